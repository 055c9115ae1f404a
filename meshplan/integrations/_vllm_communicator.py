"""The communicator of vLLM's groups, in a module of its own: its import needs vLLM's platform."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from meshplan import _require_torch as _require_torch
from meshplan.collectives import deterministic_all_reduce, deterministic_reduce_scatter

_base = super(type(current_platform), current_platform).get_device_communicator_cls()


class Communicator(resolve_obj_by_qualname(_base)):  # type: ignore[misc] # has no type hints
    """Reduces under the contract. Everything else is vLLM's own."""

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum over the group, in a new tensor."""
        # vLLM's operator must not return its input.
        result = torch.empty_like(input_)
        deterministic_all_reduce(input_, group=self.device_group, out=result)
        return result

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """This rank's equal part, along ``dim``, of the sum over the group."""
        part = deterministic_reduce_scatter(input_.movedim(dim, 0), group=self.device_group)
        assert isinstance(part, Tensor)
        return part.movedim(0, dim).contiguous()

    def reduce_scatterv(
        self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> Tensor:
        """This rank's part of ``sizes[rank]`` along ``dim``; equal parts without ``sizes``."""
        if sizes is None or len(set(sizes)) == 1:
            return self.reduce_scatter(input_, dim)
        parts = torch.split(self.all_reduce(input_), sizes, dim)
        return parts[self.rank_in_group].contiguous()

    def reduce_scatterv_into_output(
        self, input_: Tensor, output: Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> Tensor:
        return output.copy_(self.reduce_scatterv(input_, dim, sizes))
