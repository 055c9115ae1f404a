"""The collectives that people call, over any process group: of one tensor, or of a list of tensors.

A function of one tensor is that of a list of one, whose members need not compare lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from meshplan._calls import Ticket
from meshplan._uncompiled import never_compiled, refuse_in_graph
from meshplan.collectives._lanes import Work
from meshplan.collectives._options import (
    AnyOp,
    ReductionOptions,
    check_destination,
    check_no_gradient,
    check_summand,
    read_options,
)
from meshplan.collectives._reduction import (
    GroupLike,
    Kind,
    Shards,
    check_distinct,
    compare_calls,
    counts_refused,
    put,
    read_group,
    read_shards,
    result_shape,
    run_list,
    start,
    use_up_ticket,
)
from meshplan.contract import Contract
from meshplan.errors import ContractError


@counts_refused
def deterministic_all_reduce(
    tensor: Tensor,
    *,
    op: AnyOp = "sum",
    path: str = "auto",
    contract: Contract | None = None,
    group: GroupLike | None = None,
    out: Tensor | None = None,
    async_op: bool = False,
    strict: bool = False,
    verify: Literal["checksum"] | None = None,
    debug: bool = False,
) -> Tensor | Work:
    """Reduce ``tensor`` over the ranks of a group, in place or to ``out``.

    Every rank of the group calls it with a tensor of the same shape and dtype and equal arguments.
    With one rank (or without a process group, if ``WORLD_SIZE`` is unset or 1) the result is
    ``tensor``, also for ``avg``. The members of the group hold an agreement round at the first call
    with a path other than ``native``.

    Args:
        tensor: any shape and strides. float16, bfloat16, float32, float64, int8 to int64, uint8,
            and complex for ``sum`` and ``avg``; by path ``native`` the dtypes of the backend. Not a
            DTensor.
        op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"product"``, or the
            ``torch.distributed.ReduceOp`` of that name. ``avg`` is the sum, and one division by the
            number of ranks before the result is rounded.
        path: how data moves, one of ``meshplan.execute.PATHS``, such as ``"auto"``,
            ``"one_shot"``, ``"two_shot"``, ``"exchange"``, ``"halving"`` or ``"reference"``. No bit
            depends on it, except by ``"native"``: the backend's own order, outside every contract.
        contract: the order and the rounding of additions, ``Contract()`` if ``None``. Path
            ``native`` reads its ``rounding``: ``once`` adds 16-bit floats in float32.
        group: a ``ProcessGroup``, a ``DeviceMesh`` of one axis, or ``(mesh, axis)``; all ranks if
            ``None``. The summands are in the order of the group's ranks.
        out: the result is written to it, and ``tensor`` is left as it is unless they share memory.
        async_op: return a ``Work`` at once.
        strict: raise an error instead of taking another path than ``path``.
        verify: with path ``integer``: ``"checksum"`` finds every flipped bit in its messages. A
            call that cannot run so raises an error, with ``strict`` or without.
        debug: hold an agreement round over the store before the call.

    Returns:
        ``out``, or ``tensor`` itself without ``out``. With ``async_op`` a ``Work``: do not touch
        the tensors before its ``wait`` has returned.

    Raises:
        ContractTypeError, ContractError, PolicyError, ContractStateError: an unsupported argument.
            They are checked first, in any state of the process groups.
        GroupStateError: no process group in a job of several ranks, or a rank outside the group.
        AxisNameError: ``group`` names no axis of its mesh.
        GroupAgreementError, GroupCreationError: at the first use of a group.
        FallbackRefusedError: ``strict`` or ``verify``, and the path is unavailable or ``native``.
        ChecksumError: ``verify``, and a bit has changed; on every rank.
        PeerTimeoutError, SignatureMismatchError: ranks that are missing, or came with another call.
    """
    options = read_options(op, path, contract, strict, verify)
    if torch.compiler.is_compiling() and not async_op:
        return _trace_all_reduce(tensor, out, options, group)
    started: Tensor | Work = _begin(
        "all_reduce", [tensor], out, options, group, async_op, debug, alone=True
    )
    return started


@never_compiled
@counts_refused
def deterministic_all_reduce_coalesced(
    tensors: Sequence[Tensor],
    *,
    op: AnyOp = "sum",
    path: str = "auto",
    contract: Contract | None = None,
    group: GroupLike | None = None,
    out: Sequence[Tensor] | None = None,
    async_op: bool = False,
    strict: bool = False,
    debug: bool = False,
) -> list[Tensor] | Work:
    """Reduce several tensors in few messages, in place or to ``out``.

    Args:
        tensors: of any dtypes and shapes, the same list on every rank. By path ``native``, whose
            order depends on the message, each is one message.
        out: one tensor for each; no tensor twice. They may share memory with ``tensors``.
        op, path, contract, group, async_op, strict, debug: as for ``deterministic_all_reduce``.

    Returns:
        ``out``, or the same tensors, as a list; with ``async_op`` one ``Work`` for all.

    Raises:
        ContractError: a tensor that is written twice, or an ``out`` of another length; and
            everything that ``deterministic_all_reduce`` raises.
    """
    refuse_in_graph("meshplan.deterministic_all_reduce_coalesced")
    options = read_options(op, path, contract, strict)
    started: list[Tensor] | Work = _begin(
        "all_reduce",
        tensors,
        out,
        options,
        group,
        async_op,
        debug,
    )
    return started


@never_compiled
@counts_refused
def deterministic_reduce_scatter(
    tensor: Tensor,
    *,
    op: AnyOp = "sum",
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    path: str = "auto",
    contract: Contract | None = None,
    group: GroupLike | None = None,
    out: Tensor | None = None,
    async_op: bool = False,
    strict: bool = False,
    verify: Literal["checksum"] | None = None,
    debug: bool = False,
) -> Tensor | Work:
    """Reduce ``tensor`` over the ranks of a group; each rank gets its shard of the result.

    The bits are those of ``deterministic_all_reduce`` under the same contract.

    Args:
        tensor: this rank's summand, at least 1-D, any strides; the same shape and dtype on every
            rank; the dtypes of ``deterministic_all_reduce``. It is left as it is.
        dim: the dimension that is split.
        sizes: the length of each rank's shard along ``dim``, in the order of the group's ranks, the
            same list on every rank. ``None``: the lengths of ``torch.chunk``, with shorter and
            empty shards at the end.
        out: this rank's shard is written to it; it may share memory with ``tensor``.
        op, path, contract, group, async_op, strict, verify, debug: as for
            ``deterministic_all_reduce``.

    Returns:
        ``out``, or a new contiguous tensor; with ``async_op`` a ``Work`` whose ``result()`` it is.

    Raises:
        ContractError: ``sizes`` that do not add up to the length of ``dim``, or an invalid ``dim``;
            and everything that ``deterministic_all_reduce`` raises.
    """
    refuse_in_graph("meshplan.deterministic_reduce_scatter")
    options = read_options(op, path, contract, strict, verify)
    how = options, group, async_op, debug
    started: Tensor | Work = _begin(
        "reduce_scatter", [tensor], out, *how, dim=dim, sizes=[sizes], alone=True
    )
    return started


@never_compiled
@counts_refused
def deterministic_reduce_scatter_coalesced(
    tensors: Sequence[Tensor],
    *,
    op: AnyOp = "sum",
    dim: int = 0,
    sizes: Sequence[Sequence[int] | None] | None = None,
    path: str = "auto",
    contract: Contract | None = None,
    group: GroupLike | None = None,
    out: Sequence[Tensor] | None = None,
    async_op: bool = False,
    strict: bool = False,
    debug: bool = False,
) -> list[Tensor] | Work:
    """Reduce several tensors in few messages; each rank gets its shard of each.

    Args:
        tensors: of any dtypes and shapes, the same list on every rank. They are left as they are.
        sizes: for each tensor what ``deterministic_reduce_scatter`` accepts, such as ``None``.
        out: one tensor for each shard; no tensor twice. They may share memory with ``tensors``.
        op, dim, path, contract, group, async_op, strict, debug: as for
            ``deterministic_reduce_scatter``.

    Returns:
        ``out``, or new contiguous tensors, as a list; with ``async_op`` one ``Work`` for all.

    Raises:
        ContractError: an ``out`` or ``sizes`` of another length than ``tensors``; and everything
            that ``deterministic_reduce_scatter`` raises.
    """
    refuse_in_graph("meshplan.deterministic_reduce_scatter_coalesced")
    options = read_options(op, path, contract, strict)
    how = options, group, async_op, debug
    started: list[Tensor] | Work = _begin(
        "reduce_scatter", tensors, out, *how, dim=dim, sizes=sizes
    )
    return started


@never_compiled
@counts_refused
def deterministic_all_gather(
    tensor: Tensor,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    path: str = "auto",
    contract: Contract | None = None,
    group: GroupLike | None = None,
    out: Tensor | None = None,
    async_op: bool = False,
    strict: bool = False,
    debug: bool = False,
) -> Tensor | Work:
    """Concatenate the tensors of a group's ranks along ``dim``: bytes are moved, nothing is added.

    Args:
        tensor: this rank's shard, at least 1-D, any strides and any dtype; the same dtype and,
            except along ``dim``, shape on every rank.
        dim: the dimension to concatenate along.
        sizes: the length of each rank's shard along ``dim``, in the order of the group's ranks, the
            same list on every rank; ``None``: all are as long as this one.
        path, contract, strict: as for ``deterministic_reduce_scatter``. They are checked, and have
            no effect: one set of arguments serves both functions.
        out: the result is written to it; it may share memory with ``tensor``.
        group, async_op, debug: as for ``deterministic_all_reduce``.

    Returns:
        ``out``, or a new contiguous tensor; with ``async_op`` a ``Work`` whose ``result()`` it is.

    Raises:
        ContractTypeError: not a dense tensor.
        ContractError: ``sizes`` that do not fit this shard.
        ContractStateError: a tensor that requires a gradient, where gradients are recorded.
        GroupStateError, GroupAgreementError, SignatureMismatchError and others: as
            ``deterministic_all_reduce``.
    """
    refuse_in_graph("meshplan.deterministic_all_gather")
    options = read_options("sum", path, contract, strict)
    how = options, group, async_op, debug
    started: Tensor | Work = _begin(
        "all_gather", [tensor], out, *how, dim=dim, sizes=[sizes], alone=True
    )
    return started


@never_compiled
@counts_refused
def deterministic_all_gather_coalesced(
    tensors: Sequence[Tensor],
    *,
    dim: int = 0,
    sizes: Sequence[Sequence[int] | None] | None = None,
    path: str = "auto",
    contract: Contract | None = None,
    group: GroupLike | None = None,
    out: Sequence[Tensor] | None = None,
    async_op: bool = False,
    strict: bool = False,
    debug: bool = False,
) -> list[Tensor] | Work:
    """Concatenate several tensors of each rank along ``dim``, in few messages.

    Args:
        tensors: of any dtypes; the same number of them on every rank.
        sizes: for each tensor what ``deterministic_all_gather`` accepts, such as ``None``.
        out: one tensor for each result; no tensor twice. They may share memory with ``tensors``.
        dim, path, contract, group, async_op, strict, debug: as for ``deterministic_all_gather``.

    Returns:
        ``out``, or new contiguous tensors, as a list; with ``async_op`` one ``Work`` for all.

    Raises:
        ContractError: an ``out`` or ``sizes`` of another length than ``tensors``; and everything
            that ``deterministic_all_gather`` raises.
    """
    refuse_in_graph("meshplan.deterministic_all_gather_coalesced")
    options = read_options("sum", path, contract, strict)
    how = options, group, async_op, debug
    started: list[Tensor] | Work = _begin("all_gather", tensors, out, *how, dim=dim, sizes=sizes)
    return started


def _begin(
    kind: Kind,
    tensors: Sequence[Tensor],
    out: Tensor | Sequence[Tensor] | None,
    options: ReductionOptions,
    group: GroupLike | None,
    async_op: bool,
    debug: bool,
    *,
    dim: int = 0,
    sizes: Sequence[Sequence[int] | None] | None = None,
    alone: bool = False,  # of one tensor: ranks compare no lists, and no list is returned
) -> Any:
    """Check the arguments and run the collective, as ``start`` does."""
    tensors, reduces = list(tensors), None if kind == "all_gather" else options
    outs: Any = None if out is None else [out] if alone else list(out)
    if outs is not None and len(outs) != len(tensors):
        raise ContractError(
            f"out= has length {len(outs)} for {len(tensors)} tensors; pass one out= for each"
        )
    shards: list[Shards] = []
    if kind == "all_reduce":
        _check_all_reduce(tensors, outs, options)
        found = read_group(group)
    else:
        lists = _read_sizes(tensors, sizes)
        for tensor in tensors:
            check_summand(tensor, reduces)
        found = read_group(group)
        for tensor, lengths in zip(tensors, lists, strict=True):
            shards.append(read_shards(kind, tensor, found, dim, lengths))
            check_no_gradient(tensor, kind)
        scatters = None if reduces is None else found
        pairs = zip(tensors, shards, strict=True)
        _check_outs(outs, tensors, [result_shape(*pair, scatters) for pair in pairs])
    if found is None or not tensors:
        # The list of another rank may have tensors.
        use_up_ticket(tensors, {"group": group, "async_op": async_op})
        results = _alone(tensors, outs, kind == "all_reduce")
        result = results[0] if alone else results
        return Work(result) if async_op else result
    if debug:
        splits: Sequence[Shards | None] = shards or [None] * len(tensors)
        for tensor, split in zip(tensors, splits, strict=True):
            compare_calls(f"deterministic_{kind}", found, tensor, reduces, split)

    def once(apart: bool, ticket: Ticket) -> Any:
        how = tensors, shards, outs, reduces, found, ticket
        results = run_list(kind, *how, apart=apart, alone=alone)
        return results[0] if alone else results

    return start(kind, once, tensors, reduces, found, async_op)


def _alone(
    tensors: list[Tensor], outs: Sequence[Tensor] | None, in_place: bool
) -> Sequence[Tensor]:
    """The results of one rank, or of an empty list."""
    if outs is None and in_place:
        return tensors
    copies = [one.detach().clone(memory_format=torch.contiguous_format) for one in tensors]
    with torch.no_grad():
        return copies if outs is None else list(map(put, outs, copies))


def _trace_all_reduce(
    tensor: Tensor,
    out: Tensor | None,
    options: ReductionOptions,
    group: GroupLike | None,
) -> Tensor:
    _check_all_reduce([tensor], None if out is None else [out], options)
    found, result = read_group(group), tensor if out is None else out
    if found is None:
        return result if out is None else put(out, tensor.detach().clone())
    if out is None:
        torch.ops.meshplan.all_reduce_(tensor, *options.operands(found))
        return result
    return out.copy_(torch.ops.meshplan.all_reduce(tensor, *options.operands(found)))


def _check_all_reduce(
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor] | None,
    options: ReductionOptions,
) -> None:
    for tensor in tensors:
        check_summand(tensor, options)
        if outs is None:
            check_destination(tensor)
        else:
            check_no_gradient(tensor, "all_reduce")
    if outs is None:
        check_distinct(tensors)
    _check_outs(outs, tensors, [tuple(tensor.shape) for tensor in tensors])


def _read_sizes(
    tensors: Sequence[Tensor], sizes: Sequence[Sequence[int] | None] | None
) -> list[Sequence[int] | None]:
    lists: list[Sequence[int] | None] = list(sizes or [None] * len(tensors))
    if len(lists) != len(tensors) or any(isinstance(one, int) for one in lists):
        raise ContractError(
            f"sizes={sizes} for {len(tensors)} tensors; pass one list, or None, for each tensor"
        )
    return lists


def _check_outs(
    outs: Sequence[Tensor] | None,
    tensors: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
) -> None:
    for out, tensor, shape in zip(outs or (), tensors, shapes, strict=outs is not None):
        check_destination(out, tensor, shape)
    check_distinct(outs or ())
