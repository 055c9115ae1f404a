"""Sums over the ranks that hold a list of tensors, in which every element counts once.

The ranks of a total are those of the largest mesh of the list, or of ``group``. If there are n,
each rank weights an element by n divided by the number of ranks that hold it. The sum over ranks is
then n times the total. No rank has to find the first replica, which process groups alone do not
show. The message also has a flag, so that all ranks raise the error of one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshplan._torch import device_types_of
from meshplan.collectives._api import deterministic_all_reduce
from meshplan.collectives._options import AnyOp
from meshplan.collectives._reduction import GroupLike, read_group
from meshplan.errors import (
    AxisNameError,
    ContractError,
    ContractTypeError,
    MeshplanError,
    PolicyError,
)
from meshplan.flatten import registry, this_rank
from meshplan.flatten._distinct_axes import DistinctAxis, ranks_along
from meshplan.kernel import ROW_WORDS, carry, divide_row
from meshplan.layout import Layout
from meshplan.record import Record

SHARED_ERRORS = (AxisNameError, ContractError, ContractTypeError, PolicyError)
"""Errors of a list on one rank that all ranks of the total raise."""

# Of the digest of a list of tensors. Each bit is counted by a word of the message.
_DIGEST_BITS = 32
# Of the text of an error.
_TEXT_BYTES = 4096
_SHOWN_RANKS = 16


def sum_over_ranks(
    tensors: Mapping[int, Tensor],
    idle: Sequence[Tensor],
    group: GroupLike | None,
    distinct: Iterable[DistinctAxis] | None,
    make_row: Callable[[Mapping[int, int]], Tensor],
    error: MeshplanError | None,
) -> list[int]:
    """The row of all elements of the tensors of all ranks, as ``meshplan.kernel`` defines it.
    ``tensors`` are by place in the list; of ``idle`` ones only the meshes count. ``make_row``
    returns this rank's row from weights by place. ``error`` refuses the list: all ranks of the
    total raise it.
    """
    within = None if group is None else read_group(group)
    meshes = {
        each.device_mesh: frozenset(each.device_mesh.mesh.flatten().tolist())
        for each in (*tensors.values(), *idle)
        if isinstance(each, DTensor) and each.device_mesh.get_coordinate() is not None
    }
    device = next((each.device for each in (*tensors.values(), *idle)), None)
    sums, several = _find_sums(meshes, within, device)
    row, counts = (
        torch.zeros(ROW_WORDS, dtype=torch.int64, device="cpu"),
        [0] * _DIGEST_BITS,
    )
    error = error or several
    if error is None:
        try:
            weights = _find_weights(_find_spreads(tensors, meshes), sums, meshes, within, distinct)
        except SHARED_ERRORS as caught:
            error = caught
        else:
            row, counts = make_row(weights), _count_lists(tensors, weights, sums)
    if not sums:
        if error is not None:
            raise error
        return [int(word) for word in row.tolist()]
    if error is not None:
        error = type(error)(f"on rank {this_rank()}: {error.args[0]}")
    words, error = _sum_rows(sums[0], row, counts, error)
    for stage in sums[1:]:
        # The total of a mesh is on all of its ranks, each of which has other ranks in its group.
        row = carry(torch.tensor(words, dtype=torch.int64, device="cpu") * len(stage.ranks))
        words, error = _sum_rows(stage, row, [0] * _DIGEST_BITS, error)
    if error is not None:
        raise error
    return words


class _Sum(NamedTuple):
    """One all-reduce of a total: over ``ranks``, by ``group``, on ``device``."""

    ranks: frozenset[int]
    group: ProcessGroup
    device: torch.device


class _Spread(NamedTuple):
    """The ranks that a tensor is on, and how many of them hold one element."""

    ranks: frozenset[int]
    replicas: int


def _find_sums(
    meshes: Mapping[DeviceMesh, frozenset[int]],
    within: ProcessGroup | None,
    device: torch.device | None,
) -> tuple[list[_Sum], MeshplanError | None]:
    """The all-reduces that this rank joins, and an error if they are not those of one total: one
    over the largest mesh or a ``group`` around it, and in a pipeline a second over the group.
    """
    members = frozenset(() if within is None else dist.get_process_group_ranks(within))
    sets = {ranks for ranks in meshes.values() if len(ranks) > 1}
    largest = sorted(
        (each for each in sets - {members} if not any(each < other for other in (*sets, members))),
        key=sorted,
    )
    # All ranks join their all-reduces in one order, so that no two of them wait for each other.
    # With several largest meshes, a rank joins that of each, to raise the error there.
    sums = [_sum_over_mesh(ranks, meshes) for ranks in largest]
    if within is not None and not any(members <= ranks for ranks in largest):
        sums.append(_Sum(members, within, _device_in(within, device)))
    several = [each.ranks for each in sums]
    stages = len(several) == 2 and len(several[0] & several[1]) == 1 and len(largest) == 1
    if len(several) < 2 or (stages and all(each <= several[0] for each in sets)):
        return sums, None
    shown = " and ".join(f"ranks {_shown(ranks)}" for ranks in several)
    return sums, ContractError(
        f"the tensors and group= are on several largest meshes, {shown}, and none "
        "has all ranks of the total; pass group= with a process group of all these ranks, or "
        "tensors on one of the meshes at a time"
    )


def _sum_over_mesh(ranks: frozenset[int], meshes: Mapping[DeviceMesh, frozenset[int]]) -> _Sum:
    # Other ranks may list other tensors first, so the mesh is chosen by its looks.
    mesh = min(
        (mesh for mesh, members in meshes.items() if members == ranks),
        key=lambda mesh: (mesh.ndim, mesh.mesh.tolist()),
    )
    if mesh.ndim == 1:
        group = mesh.get_group()
    else:
        layout, axes = Layout.from_mesh(mesh), tuple(range(mesh.ndim))
        group = registry().get(mesh, layout, axes, token=Record.of(use="total")).pg
    return _Sum(ranks, group, _current_device(mesh.device_type))


def _device_in(group: ProcessGroup, device: torch.device | None) -> torch.device:
    """``device`` if ``group`` can reduce on it, or the device of ranks with tensors."""
    served = {each.type for each in device_types_of(group)}
    if device is not None and device.type in served:
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None or accelerator.type not in served else accelerator.type
    return _current_device(kind)


def _current_device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def _find_weights(
    spreads: Mapping[int, _Spread],
    sums: Sequence[_Sum],
    meshes: Mapping[DeviceMesh, frozenset[int]],
    within: ProcessGroup | None,
    distinct: Iterable[DistinctAxis] | None,
) -> dict[int, int]:
    """By place, the number of ranks of the total divided by how many of them hold an element."""
    if not sums:
        return dict.fromkeys(spreads, 1)
    ranks = sums[0].ranks
    members = frozenset(() if within is None else dist.get_process_group_ranks(within)) & ranks
    if members == ranks:
        # Of a group around all meshes, ranks hold the same elements only by their meshes.
        return {i: len(ranks) // spread.replicas for i, spread in spreads.items()}
    axes = {members}
    # A stage of a pipeline without experts knows no axis of experts, and needs none.
    if any(spread.ranks != ranks for spread in spreads.values()):
        axes |= {each & ranks for each in ranks_along(distinct or (), meshes)}
    known = {
        each: _find_weight(each, ranks, axes, distinct is None) for each in {*spreads.values()}
    }
    weights: dict[int, int] = {}
    for i, spread in spreads.items():
        weight = known[spread]
        if weight is None:
            place = f"is on ranks {_shown(spread.ranks)}"
            place = "is no DTensor" if len(spread.ranks) == 1 else place
            fix = (
                "pass distinct= with the axes along which ranks hold other tensors, such as "
                "distinct=['ep'], or distinct=[] if all ranks hold replicas of it"
                if distinct is None
                else "distinct= and its mesh do not show which of these hold replicas of it; pass "
                "axes that share only this rank with the mesh, or a DTensor whose mesh has them"
            )
            raise ContractError(
                f"tensor {i} {place}, but the total is over ranks {_shown(ranks)}; {fix}"
            )
        weights[i] = weight
    return weights


def _find_weight(
    spread: _Spread,
    ranks: frozenset[int],
    axes: set[frozenset[int]],
    strict: bool,
) -> int | None:
    """The weight of a tensor; ``None`` if the content of other ranks is not declared. With
    ``strict``, it is declared for none of those outside of ``axes``.
    """
    # Ranks that hold shards of this tensor and of other tensors, from one replica to the next.
    block = len(spread.ranks)
    for axis in axes:
        if axis <= spread.ranks or any(axis < other for other in axes):
            continue
        if len(axis & spread.ranks) != 1:
            return None
        block *= len(axis)
    if len(ranks) % block or (strict and block != len(ranks)):
        return None
    return block // spread.replicas


def _find_spreads(
    tensors: Mapping[int, Tensor], meshes: Mapping[DeviceMesh, frozenset[int]]
) -> dict[int, _Spread]:
    alone = _Spread(frozenset([this_rank()] if dist.is_initialized() else []), 1)
    spreads: dict[int, _Spread] = {}
    kinds: dict[Any, _Spread] = {}
    for i, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            spreads[i] = alone
        elif tensor.device_mesh in meshes:
            kind = (tensor.device_mesh, tensor.placements)
            if kind not in kinds:
                # Not ``isinstance(placement, Shard)``: FSDP2 with TP makes strided shards, which
                # are no ``Shard``.
                mesh = tensor.device_mesh
                replicated = [a for a, one in enumerate(tensor.placements) if one.is_replicate()]
                kinds[kind] = _Spread(meshes[mesh], math.prod(map(mesh.size, replicated)))
            spreads[i] = kinds[kind]
    return spreads


def _count_lists(
    tensors: Mapping[int, Tensor],
    weights: Mapping[int, int],
    sums: Sequence[_Sum],
) -> list[int]:
    """Counts that the number of ranks divides, once added, if ranks that hold replicas have equal
    lists.
    """
    ranks = len(sums[0].ranks) if sums else 1
    lists: dict[int, list[str]] = {}
    for i, weight in weights.items():
        if weight % ranks:
            lists.setdefault(weight, []).append(f"{tuple(tensors[i].shape)} {tensors[i].dtype}")
    counts = [0] * _DIGEST_BITS
    for weight, lines in lists.items():
        # Each bit of the digest of a list is weighted as its tensors, so its total is a multiple of
        # the number of ranks. If ranks that hold replicas by declaration have other lists, it is
        # not, except by a chance of about 2^-32: an axis was left out of ``distinct``, or a
        # gradient is missing on some ranks.
        digest = hashlib.sha256("\n".join(sorted(lines)).encode()).digest()
        word = int.from_bytes(digest[: _DIGEST_BITS // 8], "little")
        counts = [count + weight * (word >> bit & 1) for bit, count in enumerate(counts)]
    return counts


def _sum_rows(
    place: _Sum, row: Tensor, counts: Sequence[int], error: MeshplanError | None
) -> tuple[list[int], MeshplanError | None]:
    """The sum of the ranks' rows divided by their number, and the error of one of them."""
    more = torch.tensor([*counts, error is not None], dtype=torch.int64, device="cpu")
    message = torch.cat([row.to(place.device), more.to(place.device)])
    *words, failed = _all_reduce(message, place, "sum").tolist()
    ranks, digits = len(place.ranks), len(row)
    if failed:
        error = _share_error(place, error)
    elif any(count % ranks for count in words[digits:]):
        error = ContractError(
            f"ranks of the total, {_shown(place.ranks)}, hold replicas by declaration or placement "
            "but passed tensors of other shapes or dtypes; pass distinct= with every axis along "
            "which ranks hold other tensors, and the same gradients on all ranks of a replica"
        )
    return divide_row(words[:digits], ranks), error


def _share_error(place: _Sum, error: MeshplanError | None) -> MeshplanError:
    rank = place.group.rank()
    mine = torch.tensor([place.group.size() if error is None else rank], device=place.device)
    text = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
    if int(_all_reduce(mine, place, "min")) == rank:
        data = f"{type(error).__name__} {error and error.args[0]}".encode()[:_TEXT_BYTES]
        text[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
    data = bytes(_all_reduce(text.to(place.device), place, "sum").tolist())
    name, _, message = data.rstrip(b"\0").decode(errors="ignore").partition(" ")
    kind = next(kind for kind in SHARED_ERRORS if kind.__name__ == name)
    return kind(message)


def _all_reduce(tensor: Tensor, place: _Sum, op: AnyOp) -> Tensor:
    reduced = deterministic_all_reduce(tensor, op=op, group=place.group)
    assert isinstance(reduced, Tensor)
    return reduced


def _shown(ranks: frozenset[int]) -> str:
    more = f", ... ({len(ranks)} ranks)" if len(ranks) > _SHOWN_RANKS else ""
    return ", ".join(map(str, sorted(ranks)[:_SHOWN_RANKS])) + more
