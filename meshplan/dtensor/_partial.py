"""The placement that carries a planned reduction into torch's own executor loop.

Torch calls ``_reduce_value`` on the source placement of a step. A subclass of ``Partial`` that
knows its step is all that is needed to take the reduction over; no loop of torch is replaced.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from meshplan.collectives import Source, run_reduction
from meshplan.dtensor._config import Config
from meshplan.flatten import Group, Handle, registry
from meshplan.layout import Layout
from meshplan.planner import Step

__all__ = ["AlreadyCut", "PlannedPartial"]


class AlreadyCut(Shard):
    """A ``Shard`` that a planned reduction has brought about: torch's step to it does nothing.

    The step stays in torch's list, so that torch's own trace of placements is true.
    """

    def _replicate_to_shard(
        self,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        shard_index: int | torch.SymInt,
    ) -> torch.Tensor:
        return local_tensor


class PlannedPartial(Partial):
    """A ``Partial`` whose reduction over several axes was planned as one step.

    It holds the step, the layout and texts for the report; the mesh comes with the call. Equal only
    to itself: the seam makes one per redistribution and mesh.
    """

    _step: Step
    _layout: Layout
    _config: Config
    _asked: str
    _found: tuple[Handle, Handle | None, Source] | None

    def __init__(self, step: Step, layout: Layout, asked: str, config: Config) -> None:
        super().__init__(step.op)
        # Torch's placements are frozen dataclasses.
        for name, value in (
            ("_step", step),
            ("_layout", layout),
            ("_config", config),
            ("_asked", asked),
            ("_found", None),
        ):
            object.__setattr__(self, name, value)

    def _reduce_value(self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        if isinstance(tensor, funcol.AsyncCollectiveTensor):
            tensor = tensor.wait()
        group, gather, source = self._groups(mesh)
        result = run_reduction(
            tensor, self._step, group, gather=gather, source=source, strict=self._config.strict
        )
        return funcol._maybe_wrap_tensor(result)

    def _groups(self, mesh: DeviceMesh) -> tuple[ProcessGroup, ProcessGroup | None, Source]:
        if self._found is not None:
            handle, gather_handle, source = self._found
            group = handle.group()
            gather = None if gather_handle is None else gather_handle.group()
            if group is not None and (gather is None) == (gather_handle is None):
                return group.pg, None if gather is None else gather.pg, source
        group = self._find(mesh, self._step.axes)
        rest = self._step.gather_axes if self._step.path == "exchange" else ()
        gather = self._find(mesh, rest) if rest else None
        on = str(group) if gather is None else f"{group}; gathered on {gather}"
        source = Source(self._asked, self._step.line(self._layout), on)
        gather_handle = None if gather is None else registry().handle(gather)
        object.__setattr__(self, "_found", (registry().handle(group), gather_handle, source))
        return group.pg, None if gather is None else gather.pg, source

    def _find(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Group:
        config = self._config
        return registry().get(mesh, self._layout, axes, token=config.token, timeout=config.timeout)

    def _reduce_shard_value(
        self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Placement
    ) -> torch.Tensor:
        raise AssertionError("to torch a planned reduction ends in Replicate; see AlreadyCut")

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __repr__(self) -> str:
        return f"PlannedPartial({self._step.line(self._layout)})"

    def __str__(self) -> str:
        return f"Planned({self.reduce_op})"
