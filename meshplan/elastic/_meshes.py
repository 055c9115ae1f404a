"""Groups and meshes over which FSDP2 adds shards in the order of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshplan.backend._group import MeshplanProcessGroup
from meshplan.errors import ContractError, ElasticError


def check_options(groups: Sequence[MeshplanProcessGroup]) -> None:
    """Refuse groups of several contracts, or of one whose subtrees are no sums of gradients."""
    contract = groups[0].options.contract
    # Sums in float64 would be rounded to the dtype of gradients in each round.
    if (contract.order, contract.accumulate) != ("tree", "wide"):
        raise ContractError(
            f"gradients under {contract.id} cannot be added in rounds; use "
            "Contract(order='tree', accumulate='wide')"
        )
    for group in groups:
        options = group.options
        if options.contract != contract or options.policy == "fast":
            raise ElasticError(
                f"a group reduces under {options.contract.id} with policy={options.policy!r}, "
                f"another under {contract.id}; pass the same BackendOptions of "
                "policy='deterministic' to all groups"
            )


def check_order(mesh: DeviceMesh) -> None:
    """Refuse replicas whose shards are in different orders."""
    for axis in range(mesh.ndim):
        # Torch orders the ranks of a group by their numbers, whatever their order in the mesh.
        places = mesh.mesh.argsort(axis).argsort(axis).movedim(axis, 0)
        places = places.reshape(mesh.size(axis), -1)
        if bool((places != places[:, :1]).any()):
            raise ElasticError(
                f"the groups of {mesh} along axis {axis} have ranks in different orders: "
                f"{mesh.mesh.tolist()}. Torch sorts them, and FSDP2 then adds other shards; pass "
                "a mesh with the same order in all groups of an axis"
            )


def check_parameter(name: str, parameter: nn.Parameter, mesh: DeviceMesh | None) -> None:
    """Refuse a parameter of 16 bits, or that ``mesh`` does not shard."""
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ElasticError(
            f"parameter {name!r} is {parameter.dtype}, to which each round would be "
            "rounded; keep parameters in float32, and compute in 16 bits by "
            "MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32) or autocast"
        )
    found = []
    if mesh is not None and isinstance(parameter, DTensor):
        # Replicas and shards come before the axes of tensor parallelism.
        replicated = [one.is_replicate() for one in parameter.placements[: mesh.ndim]]
        found = _axes(parameter.device_mesh, replicated)
    if mesh is not None and found != _axes(mesh, [True] * (mesh.ndim - 1) + [False]):
        raise ElasticError(
            f"parameter {name!r} is not sharded over {mesh}; pass the mesh that "
            "fully_shard got, and shard all parameters over it"
        )


def _axes(mesh: DeviceMesh, replicated: Sequence[bool]) -> list[tuple[list[int], bool]]:
    return [
        (dist.get_process_group_ranks(mesh.get_group(axis)), one)
        for axis, one in enumerate(replicated)
    ]
