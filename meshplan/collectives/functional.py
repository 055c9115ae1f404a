"""Deterministic collectives that return new tensors and have derivatives.

The derivative is that of the sum of all ranks' losses: the gradient of an all-reduce is the same
all-reduce of the gradients, that of a reduce-scatter an all-gather, and that of an all-gather a
reduce-scatter, each under the contract and by the path of the forward. Every rank runs its
backward, as it ran its forward.
Under ``torch.compile`` each is one operator: ``meshplan::all_reduce``, ``meshplan::reduce_scatter``
or ``meshplan::all_gather``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshplan.collectives._operators import LINEAR
from meshplan.collectives._options import (
    AnyOp,
    check_summand,
    check_tensor,
    read_options,
)
from meshplan.collectives._reduction import (
    GroupLike,
    compare_calls,
    counts_refused,
    read_group,
)
from meshplan.collectives._shards import gathered_shape, read_gather, read_scatter
from meshplan.contract import Contract
from meshplan.errors import ContractStateError

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


@counts_refused
def all_reduce(
    tensor: Tensor,
    *,
    op: AnyOp = "sum",
    path: str = "auto",
    contract: Contract | None = None,
    group: GroupLike | None = None,
    strict: bool = False,
    debug: bool = False,
) -> Tensor:
    """The reduction of ``tensor`` over the ranks of a group.

    Args:
        tensor, op, path, contract, group, strict, debug: as for ``deterministic_all_reduce``. The
            tensor may require a gradient if the op is ``sum`` or ``avg``.

    Returns:
        A new contiguous tensor of the same shape and dtype; a copy if there is one rank.

    Raises:
        ContractStateError: ``tensor`` requires a gradient, and the op has none; and everything that
            ``deterministic_all_reduce`` raises.
    """
    options = read_options(op, path, contract, strict)
    check_summand(tensor, options)
    _check_gradient(tensor, options.op)
    found = read_group(group)
    if found is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    if debug and not torch.compiler.is_compiling():
        compare_calls(found, tensor, f"functional.all_reduce by {options}")
    result: Tensor = torch.ops.meshplan.all_reduce(tensor, *options.operands(found))
    return result


@counts_refused
def reduce_scatter(
    tensor: Tensor,
    *,
    op: AnyOp = "sum",
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    path: str = "auto",
    contract: Contract | None = None,
    group: GroupLike | None = None,
    strict: bool = False,
    debug: bool = False,
) -> Tensor:
    """This rank's shard of the reduction of ``tensor``.

    Args:
        tensor, op, dim, sizes, path, contract, group, strict, debug: as for
            ``deterministic_reduce_scatter``. The tensor may require a gradient if the op is ``sum``
            or ``avg``.

    Returns:
        A new contiguous tensor; a copy if there is one rank.

    Raises:
        ContractStateError: ``tensor`` requires a gradient, and the op has none; and everything that
            ``deterministic_reduce_scatter`` raises.
    """
    options = read_options(op, path, contract, strict)
    check_summand(tensor, options)
    found = read_group(group)
    dim, lengths = read_scatter(tensor, found, dim, sizes)
    _check_gradient(tensor, options.op)
    if found is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    if debug and not torch.compiler.is_compiling():
        call = f"functional.reduce_scatter of dim {dim} to {lengths} by {options}"
        compare_calls(found, tensor, call)
    how = options.operands(found)
    result: Tensor = torch.ops.meshplan.reduce_scatter(tensor, dim, list(lengths), *how)
    return result


@counts_refused
def all_gather(
    tensor: Tensor,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    path: str = "auto",
    contract: Contract | None = None,
    group: GroupLike | None = None,
    strict: bool = False,
    debug: bool = False,
) -> Tensor:
    """The tensors of a group's ranks, concatenated along ``dim``.

    Args:
        tensor, dim, sizes, group, debug: as for ``deterministic_all_gather``.
        path, contract, strict: of the gradient, which is a reduce-scatter; as for
            ``deterministic_reduce_scatter``.

    Returns:
        A new contiguous tensor; a copy if there is one rank.

    Raises:
        ContractTypeError, ContractError, PolicyError, GroupStateError: as
            ``deterministic_all_gather``; the backward raises what ``deterministic_reduce_scatter``
            raises.
    """
    options = read_options("sum", path, contract, strict)
    check_tensor(tensor)
    found = read_group(group)
    dim, lengths = read_gather(tensor, found, dim, sizes)
    if found is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    if debug and not torch.compiler.is_compiling():
        shape = list(gathered_shape(tensor, (dim, lengths)))
        call = f"functional.all_gather to {shape} of {lengths} by {options}"
        compare_calls(found, tensor.new_empty(0), call)
    chosen, _, ordered, strict, name = options.operands(found)
    result: Tensor = torch.ops.meshplan.all_gather(
        tensor, dim, list(lengths), name, chosen, ordered, strict
    )
    return result


def _check_gradient(tensor: Tensor, op: str) -> None:
    if op not in LINEAR and tensor.requires_grad and torch.is_grad_enabled():
        raise ContractStateError(
            f"op={op!r} over ranks has no derivative, and the tensor requires a gradient; pass "
            "op='sum' or 'avg', or reduce tensor.detach()"
        )
