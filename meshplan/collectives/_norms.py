"""Norms whose bits do not depend on how tensors are sharded.

The square of a float is an exact integer in fixed point (``meshplan.kernel``). Sums of integers are
exact, so that elements, shards and ranks may be summed in any order. The sum is rounded once to
float64, and one square root follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshplan._torch import AsyncCollectiveTensor, foreach_mul_
from meshplan.collectives._all_reduce import deterministic_all_reduce
from meshplan.collectives._options import check_tensor
from meshplan.collectives._reduction import GroupLike, read_group
from meshplan.errors import ContractError, ContractTypeError
from meshplan.kernel import carry, sum_squares, value_of_squares

__all__ = ["clip_grad_norm_", "exact_norm"]


def exact_norm(
    tensors: Tensor | Iterable[Tensor],
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    group: GroupLike | None = None,
) -> Tensor:
    """The 2-norm of all elements of ``tensors``: the exact sum of squares, rounded once.

    The value is the same for any mesh, any number of shards and any order of ranks and tensors. It
    waits for the device.

    Args:
        tensors: one or several, of float16, bfloat16, float32, float64 or complex numbers. Shards
            of a DTensor are summed over the axes that shard it, and replicas are counted once:
            every rank of its mesh calls this with the same list. A plain tensor is counted whole.
        norm_type: 2; other norms raise an error.
        error_if_nonfinite: raise an error if the norm is infinite or NaN.
        group: ranks that bring tensors of their own besides the shards of DTensors, such as the
            stages of a pipeline or plain shards of an optimizer. Their elements are added. One
            process group, one axis, or ``None``: none.

    Returns:
        0-dim float64 on the device of the first tensor. NaN if an element is NaN, else infinite if
        an element is, or if the sum of squares exceeds float64.

    Raises:
        ContractError: another ``norm_type``, a DTensor with partial values, or tensors on several
            kinds of devices.
        ContractTypeError: not dense tensors of floating-point or complex numbers.
        RuntimeError: ``error_if_nonfinite``, and the norm is infinite or NaN.
        GroupError, CollectiveError, SignatureMismatchError: as ``deterministic_all_reduce``.
    """
    if float(norm_type) != 2.0:
        raise ContractError(
            f"norm_type={norm_type}: only the 2-norm has an exact sum here; pass norm_type=2.0, or "
            "call torch.nn.utils.get_total_norm"
        )
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    value, device = _norm([tensor.detach() for tensor in tensors], group)
    if error_if_nonfinite and not math.isfinite(value):
        raise RuntimeError(
            f"the norm is {value}, so that gradients cannot be scaled by it; pass "
            "error_if_nonfinite=False to scale them anyway"
        )
    return torch.tensor(value, dtype=torch.float64, device=device)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: GroupLike | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` by ``exact_norm``: the same bits for any sharding.

    Args:
        parameters: one or several, with gradients of any placement that ``exact_norm`` accepts.
        max_norm: gradients are multiplied by ``max_norm / (norm + 1e-6)`` if that is below 1. The
            quotient is computed in float64.
        norm_type, error_if_nonfinite, group: as for ``exact_norm``.
        foreach: ``False``: one multiplication for each gradient; else one for each list of
            gradients of one device and dtype.

    Returns:
        The norm of the gradients before they were multiplied, as ``exact_norm`` returns it.

    Raises:
        ContractError, ContractTypeError, RuntimeError, GroupError, CollectiveError: as
            ``exact_norm``. Gradients are left as they are.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    grads = [found.grad for found in parameters if found.grad is not None]
    total = exact_norm(
        grads, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite, group=group
    )
    factor = float(max_norm) / (total.item() + 1e-6)
    # Also for NaN, as in torch.
    if not factor >= 1.0:
        local = [_local(grad.detach()) for grad in grads]
        if foreach is False:
            for one in local:
                one.mul_(factor)
        elif local:
            foreach_mul_(local, factor)
    return total


def _norm(tensors: Sequence[Tensor], group: GroupLike | None) -> tuple[float, torch.device]:
    # By the axes over which they are sharded. All ranks of a mesh have the same, in the same order.
    sharded: dict[DeviceMesh, dict[tuple[int, ...], list[Tensor]]] = {}
    whole: list[Tensor] = []
    for i, tensor in enumerate(tensors):
        local, axes = _local(tensor), _sharded_axes(tensor, i)
        check_tensor(local, f"tensor {i}")
        if (not local.is_floating_point() and not local.is_complex()) or local.dtype.itemsize == 1:
            raise ContractTypeError(
                f"tensor {i} is {local.dtype}, whose squares have no exact sum here; convert it to "
                "one of float16, bfloat16, float32, float64"
            )
        if isinstance(tensor, DTensor) and axes:
            sharded.setdefault(tensor.device_mesh, {}).setdefault(axes, []).append(local)
        else:
            whole.append(local)
    device = _local(tensors[0]).device if tensors else torch.device("cpu")
    row = _row(whole, device)
    for mesh, by_axes in sharded.items():
        found = torch.stack([_row(local, local[0].device) for local in by_axes.values()])
        for axis in range(mesh.ndim):
            rows = [i for i, axes in enumerate(by_axes) if axis in axes]
            if rows and mesh.size(axis) > 1:
                found[rows] = _summed(found[rows], (mesh, axis))
        row = carry(row + carry(found.sum(0)).to(device))
    if group is not None and read_group(group) is not None:
        row = _summed(row, group)
    return math.sqrt(value_of_squares(row)), device


def _sharded_axes(tensor: Tensor, place: int) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    if any(placement.is_partial() for placement in tensor.placements):
        raise ContractError(
            f"tensor {place} is {tensor.placements}, a sum that has not been made; redistribute it "
            "to Replicate or Shard first"
        )
    # Not ``isinstance(one, Shard)``: FSDP2 with TP makes strided shards, which are no ``Shard``.
    return tuple(axis for axis, one in enumerate(tensor.placements) if not one.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _row(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    by_device: dict[torch.device, list[Tensor]] = {device: []}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    rows = [sum_squares(found, where).to(device) for where, found in by_device.items()]
    return carry(torch.stack(rows).sum(0))


def _summed(rows: Tensor, group: GroupLike) -> Tensor:
    """Rows added over the ranks of ``group``, as integers."""
    reduced = deterministic_all_reduce(rows, group=group)
    assert isinstance(reduced, Tensor)
    return carry(reduced)
