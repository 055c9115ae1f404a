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
from typing import Any

import torch
from torch import Tensor

from meshplan._calls import calls_of
from meshplan.collectives._options import (
    AnyOp,
    ReductionOptions,
    check_summand,
    read_options,
)
from meshplan.collectives._reduction import (
    GroupLike,
    Kind,
    Shards,
    compare_calls,
    counts_refused,
    gather_tensor,
    read_group,
    read_shards,
    reduce_tensor,
    result_shape,
)
from meshplan.contract import Contract
from meshplan.errors import ContractStateError
from meshplan.execute._groups import resolve_group
from meshplan.kernel import OPERATORS

# The operators that torch's tools see: they name the process group, have fake implementations for
# tracing and, but for ``all_reduce_``, derivatives, as in ``torch.distributed.nn``.

LINEAR = ("sum", "avg")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _reduce(tensor: Tensor, shards: Shards | None, *how: Any, in_place: bool = False) -> Tensor:
    path, op, contract, strict, group = how
    # A compiled graph skips the function that checks, and may run in another environment.
    options = read_options(op, path, Contract.of_id(contract), strict)
    check_summand(tensor, options)
    found = resolve_group(group, None if shards is None else len(shards[1]))
    with calls_of(found).take(tensor.device.type) as ticket:
        return reduce_tensor(
            tensor,
            options,
            found,
            ticket,
            shards=shards,
            in_place=in_place,
        )


def _all_reduce(tensor: Tensor, *how: Any) -> Tensor:
    return _reduce(tensor, None, *how)


def _all_reduce_in_place(tensor: Tensor, *how: Any) -> None:
    value = _reduce(tensor, None, *how, in_place=True)
    if value is not tensor:
        tensor.copy_(value)


def _reduce_scatter(tensor: Tensor, dim: int, sizes: Sequence[int], *how: Any) -> Tensor:
    return _reduce(tensor, (dim, tuple(sizes)), *how)


def _all_gather(
    tensor: Tensor,
    dim: int,
    sizes: Sequence[int],
    group: str,
    *of_gradient: Any,
) -> Tensor:
    found = resolve_group(group, len(sizes))
    with calls_of(found).take(tensor.device.type) as ticket:
        return gather_tensor(tensor, found, (dim, tuple(sizes)), ticket)


def _same(tensor: Tensor, *_: object) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _shard(tensor: Tensor, dim: int, sizes: Sequence[int], *rest: Any) -> Tensor:
    return tensor.new_empty(result_shape(tensor, (dim, tuple(sizes)), resolve_group(rest[-1])))


def _whole(tensor: Tensor, dim: int, sizes: Sequence[int], *_: Any) -> Tensor:
    return tensor.new_empty(result_shape(tensor, (dim, tuple(sizes))))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.given = inputs[1:]


def _all_reduce_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    _, op, *_ = ctx.given
    _refuse_if_not_linear(op)
    return torch.ops.meshplan.all_reduce(gradient, *ctx.given), *(None,) * 5


def _reduce_scatter_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    dim, sizes, path, op, contract, strict, group = ctx.given
    _refuse_if_not_linear(op)
    # Whose own gradient is a reduce-scatter again: the second derivative of this one.
    how = (group, path, contract, strict)
    whole = torch.ops.meshplan.all_gather(gradient, dim, sizes, *how)
    return whole / len(sizes) if op == "avg" else whole, *(None,) * 7


def _all_gather_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    dim, sizes, group, path, contract, strict = ctx.given
    how = (path, "sum", contract, strict, group)
    shard = torch.ops.meshplan.reduce_scatter(gradient, dim, sizes, *how)
    return shard, *(None,) * 6


def _refuse_if_not_linear(op: str, why: str = "") -> None:
    if op not in LINEAR:
        raise ContractStateError(
            f"op={op!r} over ranks has no derivative{why}; pass op='sum' or 'avg', or reduce "
            "tensor.detach()"
        )


_operators: Any = OPERATORS  # whose methods have no types
_HOW = "str path, str op, str contract, bool strict, str group"
for _name, _arguments, _run, _fake, _backward in (
    (
        "all_reduce",
        f"Tensor tensor, {_HOW}",
        _all_reduce,
        _same,
        _all_reduce_backward,
    ),
    (
        "reduce_scatter",
        f"Tensor tensor, int dim, int[] sizes, {_HOW}",
        _reduce_scatter,
        _shard,
        _reduce_scatter_backward,
    ),
    (
        "all_gather",
        "Tensor tensor, int dim, int[] sizes, str group, "
        f'str path="auto", str contract="{Contract().id}", bool strict=False',
        _all_gather,
        _whole,
        _all_gather_backward,
    ),
):
    _operators.define(f"{_name}({_arguments}) -> Tensor", tags=_TAGS)
    _operators.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"meshplan::{_name}", _fake, lib=_operators)
    torch.library.register_autograd(
        f"meshplan::{_name}", _backward, setup_context=_keep, lib=_operators
    )

_operators.define(f"all_reduce_(Tensor(a!) tensor, {_HOW}) -> ()", tags=_TAGS)
_operators.impl("all_reduce_", _all_reduce_in_place, "CompositeExplicitAutograd")
torch.library.register_fake("meshplan::all_reduce_", lambda *_: None, lib=_operators)


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
    return _call("all_reduce", tensor, options, group, debug)


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
    return _call("reduce_scatter", tensor, options, group, debug, dim, sizes)


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
    return _call("all_gather", tensor, options, group, debug, dim, sizes)


def _call(
    kind: Kind,
    tensor: Tensor,
    options: ReductionOptions,
    group: GroupLike | None,
    debug: bool,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    gathers = kind == "all_gather"
    check_summand(tensor, None if gathers else options)
    if not gathers and tensor.requires_grad and torch.is_grad_enabled():
        _refuse_if_not_linear(options.op, ", and the tensor requires a gradient")
    found, split = read_group(group), None
    if kind != "all_reduce":
        split = read_shards(kind, tensor, found, dim, sizes)
    if found is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    if debug and not torch.compiler.is_compiling():
        compare_calls(f"functional.{kind}", found, tensor, options, split)
    path, op, contract, strict, name = options.operands(found)
    how = (name, path, contract, strict) if gathers else (path, op, contract, strict, name)
    cut = () if split is None else (split[0], list(split[1]))
    result: Tensor = getattr(torch.ops.meshplan, kind)(tensor, *cut, *how)
    return result
