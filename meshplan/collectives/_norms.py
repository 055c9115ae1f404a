"""Norms whose bits do not depend on how tensors are sharded.

The square of a float is an exact integer in fixed point (``meshplan.kernel``). Sums of integers are
exact, so that elements, shards and ranks may be summed in any order. The sum is rounded once to
float64, and one square root follows.

The ranks of a total are those of the largest mesh of the list, or of ``group``. If there are n,
each rank weights an element by n divided by the number of ranks that hold it. The sum over ranks is
then n times the total. No rank has to find the first replica, which process groups alone do not
show. The message also has a flag, so that all ranks raise the error of one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshplan._torch import AsyncCollectiveTensor, device_types_of, foreach_mul_
from meshplan.collectives._api import deterministic_all_reduce
from meshplan.collectives._options import AnyOp, check_tensor
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
from meshplan.kernel import ROW_WORDS, carry, divide_row, sum_squares, value_of_squares
from meshplan.layout import Layout
from meshplan.record import Record


def exact_norm(
    tensors: Tensor | Iterable[Tensor],
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    group: GroupLike | None = None,
    distinct: Iterable[DistinctAxis] | None = None,
) -> Tensor:
    """The 2-norm of all elements of ``tensors``: the exact sum of squares, rounded once.

    Every element counts once, however many ranks hold it. The value is the same for any mesh, any
    number of shards and any order of ranks and tensors. It waits for the device.

    The ranks of the norm are those of the largest mesh of the list, and those of ``group``. All of
    them call this. Of a DTensor on fewer ranks, and of a plain tensor, the other ranks may hold
    replicas, or other tensors: ``distinct`` or ``group`` declares it, or an error is raised.

    Args:
        tensors: one or several, of float16, bfloat16, float32, float64 or complex numbers. A tensor
            that is listed twice counts once. Without DTensors and ``group``, it is the norm of this
            rank alone.
        norm_type: 2; other norms raise an error.
        error_if_nonfinite: raise an error if the norm is infinite or NaN.
        group: ranks that hold other tensors, such as the stages of a pipeline, the axis of expert
            parallelism, or plain shards of an optimizer. Their elements are added, except those of
            DTensors whose meshes have these ranks. One process group, one axis, or ``None``.
        distinct: axes along which ranks hold other tensors, such as ``["ep"]``: names, ``(mesh,
            axis)`` or process groups. Along axes that neither it nor ``group`` has, ranks hold
            replicas: ``[]`` declares replicas on all ranks. ``None`` declares nothing. Axes of a
            DTensor's own mesh are never distinct.

    Returns:
        0-dim float64 on the device of the first tensor. NaN if an element is NaN, else infinite if
        an element is, or if the sum of squares exceeds float64.

    Raises:
        ContractError: another ``norm_type``; a DTensor with partial values; several largest meshes;
            a tensor on fewer ranks without a declaration; or other shapes on ranks that hold
            replicas by declaration. All ranks of the norm raise it.
        ContractTypeError: not dense tensors of floating-point or complex numbers, on any rank.
        AxisNameError, PolicyError: ``distinct`` has a name that no mesh has, or several meshes for
            other ranks; or what is no axis.
        GroupStateError: ``group`` or an element of ``distinct`` is not a group.
        RuntimeError: ``error_if_nonfinite``, and the norm is infinite or NaN.
        GroupError, CollectiveError, SignatureMismatchError: as ``deterministic_all_reduce``.
    """
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    value = _norm(dict(enumerate(listed)), (), norm_type, group, distinct)
    return _result(value, listed, error_if_nonfinite)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: GroupLike | None = None,
    distinct: Iterable[DistinctAxis] | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` by ``exact_norm``: the same bits for any sharding.

    Args:
        parameters: one or several, with gradients of any placement that ``exact_norm`` accepts. The
            meshes of all of them count, also of those without a gradient.
        max_norm: gradients are multiplied by ``max_norm / (norm + 1e-6)`` if that is below 1. The
            quotient is computed in float64. Products are computed in float32, or in float64 for
            gradients of float64, and rounded once to the gradients' dtype.
        norm_type, error_if_nonfinite, group, distinct: as for ``exact_norm``.
        foreach: ``False``: one multiplication for each gradient; else one for each list of
            gradients of one device and dtype. The bits are the same.

    Returns:
        The norm of the gradients before they were multiplied, as ``exact_norm`` returns it.

    Raises:
        ContractError, ContractTypeError, AxisNameError, RuntimeError, GroupError, CollectiveError:
            as ``exact_norm``. Gradients are left as they are.
    """
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads: dict[int, Tensor] = {i: p.grad for i, p in enumerate(listed) if p.grad is not None}
    # A gradient may be missing on some ranks only. The parameter has its mesh on all of them.
    idle = [each for each in listed if each.grad is None]
    norm = _norm(grads, idle, norm_type, group, distinct)
    total = _result(norm, list(grads.values()), error_if_nonfinite)
    factor = float(max_norm) / (norm + 1e-6)
    # Also for NaN, as in torch.
    if not factor >= 1.0:
        local = [_local(grad.detach()) for grad in _each_once(grads).values()]
        # On CPUs, torch rounds a factor for a list to the gradients' dtype if it is a number, and
        # multiplies by it unrounded if it is a tensor.
        scale = torch.tensor(factor, dtype=torch.float64, device="cpu")
        if foreach is False:
            for grad in local:
                grad.mul_(scale)
        elif local:
            foreach_mul_(local, scale)
    return total


def _check_type(norm_type: float) -> None:
    if float(norm_type) != 2.0:
        raise ContractError(
            f"norm_type={norm_type}: only the 2-norm has an exact sum here; pass norm_type=2.0, or "
            "call torch.nn.utils.get_total_norm"
        )


def _result(value: float, tensors: Sequence[Tensor], error_if_nonfinite: bool) -> Tensor:
    if error_if_nonfinite and not math.isfinite(value):
        raise RuntimeError(
            f"the norm is {value}, so that gradients cannot be scaled by it; pass "
            "error_if_nonfinite=False to scale them anyway"
        )
    device = _local(tensors[0].detach()).device if tensors else "cpu"
    return torch.tensor(value, dtype=torch.float64, device=device)


def _norm(
    tensors: Mapping[int, Tensor],
    idle: Sequence[Tensor],
    norm_type: float,
    group: GroupLike | None,
    distinct: Iterable[DistinctAxis] | None,
) -> float:
    """The norm of ``tensors``, by their places in the list; of ``idle`` ones the meshes count."""
    tensors = _each_once(tensors)
    local: dict[int, Tensor] = {}
    error: MeshplanError | None = None
    try:
        _check_type(norm_type)
        for i, tensor in tensors.items():
            local[i] = _local(tensor.detach()) if isinstance(tensor, Tensor) else tensor
            _check_squares(tensor, local[i], i)
    except (ContractError, ContractTypeError) as caught:
        error = caught

    # Of a list that is refused, the meshes show which ranks raise its error.
    tensors = {i: each for i, each in tensors.items() if isinstance(each, Tensor)}
    row = _sum_over_ranks(tensors, local, idle, group, distinct, error)
    return math.sqrt(value_of_squares(row))


def _check_squares(tensor: Tensor, local: Tensor, place: int) -> None:
    if isinstance(tensor, DTensor) and any(one.is_partial() for one in tensor.placements):
        raise ContractError(
            f"tensor {place} is {tensor.placements}, a sum that has not been made; redistribute it "
            "to Replicate or Shard first"
        )
    check_tensor(local, f"tensor {place}")
    if (not local.is_floating_point() and not local.is_complex()) or local.dtype.itemsize == 1:
        raise ContractTypeError(
            f"tensor {place} is {local.dtype}, whose squares have no exact sum here; convert it to "
            "one of float16, bfloat16, float32, float64"
        )


def _weighted_row(local: Mapping[int, Tensor], weights: Mapping[int, int]) -> Tensor:
    device = next((each.device for each in local.values()), torch.device("cpu"))
    by_weight: dict[int, list[Tensor]] = {}
    for i, weight in weights.items():
        by_weight.setdefault(weight, []).append(local[i])
    row = _row([], device)
    for weight, some in by_weight.items():
        row += _row(some, device) * weight
    # Of infinities and NaNs, one is enough.
    row[-2:].clamp_(max=1)
    return carry(row)


def _row(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    by_device: dict[torch.device, list[Tensor]] = {device: []}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    rows = [sum_squares(some, where).to(device) for where, some in by_device.items()]
    return carry(torch.stack(rows).sum(0))


def _each_once(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Without those that are listed again, such as tied parameters."""
    places: dict[int, int] = {}
    for i, each in tensors.items():
        places.setdefault(id(each), i)
    return {i: tensors[i] for i in places.values()}


def _local(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


# Of a list on one rank, which all ranks of the total raise.
_SHARED_ERRORS = (AxisNameError, ContractError, ContractTypeError, PolicyError)
# Of the digest of a list of tensors. Each bit is counted by a word of the message.
_DIGEST_BITS = 32
# Of the text of an error.
_TEXT_BYTES = 4096
_SHOWN_RANKS = 16


def _sum_over_ranks(
    tensors: Mapping[int, Tensor],
    local: Mapping[int, Tensor],
    idle: Sequence[Tensor],
    group: GroupLike | None,
    distinct: Iterable[DistinctAxis] | None,
    error: MeshplanError | None,
) -> list[int]:
    """The row of all elements of the tensors of all ranks, as ``meshplan.kernel`` defines it.
    ``tensors``, and their ``local`` parts, are by place in the list; of ``idle`` ones only the
    meshes count. ``error`` refuses the list: all ranks of the total raise it.
    """
    within = None if group is None else read_group(group)
    meshes = {
        each.device_mesh: frozenset(each.device_mesh.mesh.flatten().tolist())
        for each in (*tensors.values(), *idle)
        if isinstance(each, DTensor) and each.device_mesh.get_coordinate() is not None
    }
    device = next((each.device for each in (*tensors.values(), *idle)), None)
    sums, several = _find_sums(meshes, within, device)
    row = torch.zeros(ROW_WORDS, dtype=torch.int64, device="cpu")
    counts = [0] * _DIGEST_BITS
    error = error or several
    if error is None:
        try:
            weights = _find_weights(_find_spreads(tensors, meshes), sums, meshes, within, distinct)
        except _SHARED_ERRORS as caught:
            error = caught
        else:
            row, counts = _weighted_row(local, weights), _count_lists(tensors, weights, sums)
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
    kind = next(kind for kind in _SHARED_ERRORS if kind.__name__ == name)
    return kind(message)


def _all_reduce(tensor: Tensor, place: _Sum, op: AnyOp) -> Tensor:
    reduced = deterministic_all_reduce(tensor, op=op, group=place.group)
    assert isinstance(reduced, Tensor)
    return reduced


def _shown(ranks: frozenset[int]) -> str:
    more = f", ... ({len(ranks)} ranks)" if len(ranks) > _SHOWN_RANKS else ""
    return ", ".join(map(str, sorted(ranks)[:_SHOWN_RANKS])) + more
