"""The placement that carries a planned reduction into torch's own executor loop.

Torch calls ``_reduce_value`` on the source placement of a step. A subclass of ``Partial`` that
knows its step is all that is needed to take the reduction over; no loop of torch is replaced.
"""

from __future__ import annotations

import torch
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from meshplan.collectives import run_all_reduce
from meshplan.dtensor._config import Config
from meshplan.flatten import registry
from meshplan.layout import Layout
from meshplan.planner import Step

__all__ = ["PlannedPartial"]


class PlannedPartial(Partial):
    """A ``Partial`` whose reduction over several axes was planned as one step.

    It holds the step, the layout and texts for the report; the mesh comes with the call.
    """

    _meshplan: tuple[Step, Layout, str, str, Config]

    def __init__(self, step: Step, layout: Layout, asked: str, config: Config) -> None:
        super().__init__(step.op)
        object.__setattr__(self, "_meshplan", (step, layout, asked, step.line(layout), config))

    def _reduce_value(self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        step, layout, asked, planned, config = self._meshplan
        if isinstance(tensor, funcol.AsyncCollectiveTensor):
            tensor = tensor.wait()
        group = registry().get(mesh, layout, step.axes, token=config.token, timeout=config.timeout)
        result = run_all_reduce(
            tensor,
            step,
            group.pg,
            asked=asked,
            planned=planned,
            on=str(group),
            strict=config.strict,
        )
        return funcol._maybe_wrap_tensor(result)

    def _reduce_shard_value(
        self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Placement
    ) -> torch.Tensor:
        raise AssertionError("a planned reduction ends in Replicate; the seam slices afterwards")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlannedPartial) and self._meshplan == other._meshplan

    def __hash__(self) -> int:
        return hash(self._meshplan)

    def __repr__(self) -> str:
        return f"PlannedPartial({self._meshplan[3]})"

    def __str__(self) -> str:
        return f"Planned({self.reduce_op})"
