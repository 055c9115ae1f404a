"""Norms whose bits do not depend on how tensors are sharded.

The square of a float is an exact integer in fixed point (``meshplan.kernel``). Sums of integers are
exact, so that elements, shards and ranks may be summed in any order. The sum is rounded once to
float64, and one square root follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshplan._torch import AsyncCollectiveTensor, foreach_mul_
from meshplan.collectives._options import check_tensor
from meshplan.collectives._reduction import GroupLike
from meshplan.collectives._totals import sum_over_ranks
from meshplan.errors import ContractError, ContractTypeError, MeshplanError
from meshplan.flatten._distinct_axes import DistinctAxis
from meshplan.kernel import carry, sum_squares, value_of_squares


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

    def make_row(weights: Mapping[int, int]) -> Tensor:
        return _weighted_row(local, weights)

    # Of a list that is refused, the meshes show which ranks raise its error.
    tensors = {i: each for i, each in tensors.items() if isinstance(each, Tensor)}
    row = sum_over_ranks(tensors, idle, group, distinct, make_row, error)
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
