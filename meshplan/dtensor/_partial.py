"""The placement that carries a planned reduction into torch's own executor loop.

Torch calls ``_reduce_value`` on the source placement of a step. A subclass of ``Partial`` that
knows its step is all that is needed to take the reduction over; no loop of torch is replaced.
"""

from __future__ import annotations

import torch
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from meshplan.collectives import Source, run_all_reduce
from meshplan.dtensor._config import Config
from meshplan.flatten import Group, Handle, registry
from meshplan.layout import Layout
from meshplan.planner import Step

__all__ = ["PlannedPartial"]


class PlannedPartial(Partial):
    """A ``Partial`` whose reduction over several axes was planned as one step.

    It holds the step, the layout and texts for the report; the mesh comes with the call. Equal only
    to itself: the seam makes one per redistribution and mesh.
    """

    _step: Step
    _layout: Layout
    _config: Config
    _asked: str
    _found: tuple[Handle, Source] | None

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
        group, source = self._group(mesh)
        result = run_all_reduce(
            tensor, self._step, group.pg, source=source, strict=self._config.strict
        )
        return funcol._maybe_wrap_tensor(result)

    def _group(self, mesh: DeviceMesh) -> tuple[Group, Source]:
        if self._found is not None:
            handle, source = self._found
            group = handle.group()
            if group is not None:
                return group, source
        config = self._config
        group = registry().get(
            mesh, self._layout, self._step.axes, token=config.token, timeout=config.timeout
        )
        source = Source(self._asked, self._step.line(self._layout), str(group))
        object.__setattr__(self, "_found", (registry().handle(group), source))
        return group, source

    def _reduce_shard_value(
        self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Placement
    ) -> torch.Tensor:
        raise AssertionError("a planned reduction ends in Replicate; the seam slices afterwards")

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __repr__(self) -> str:
        return f"PlannedPartial({self._step.line(self._layout)})"

    def __str__(self) -> str:
        return f"Planned({self.reduce_op})"
