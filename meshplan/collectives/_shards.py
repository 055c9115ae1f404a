"""Reduce-scatter and all-gather of plain tensors over any process group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._bits import flatten
from meshplan._calls import Ticket
from meshplan._dtypes import name_of
from meshplan._spans import span
from meshplan._torch import functional_operators as _ops
from meshplan._uncompiled import never_compiled, refuse_in_graph
from meshplan.collectives._lanes import Work, finished
from meshplan.collectives._options import (
    AnyOp,
    ReductionOptions,
    check_destination,
    check_no_gradient,
    check_summand,
    check_tensor,
    read_options,
)
from meshplan.collectives._reduction import (
    GroupLike,
    compare_calls,
    counts_refused,
    describe_group,
    read_group,
    reduce_tensor,
    second_group,
    start,
)
from meshplan.contract import Contract
from meshplan.errors import ContractError
from meshplan.execute._header import gather_header
from meshplan.execute._provenance import Event, Purpose, record
from meshplan.execute._run import compare_headers

Shards = tuple[int, tuple[int, ...]]
"""The dimension that is split, and the length of each rank's shard along it."""


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
    check_summand(tensor, options)
    found = read_group(group)
    shards = read_scatter(tensor, found, dim, sizes)
    check_no_gradient(tensor, "reduce_scatter")
    if out is not None:
        check_destination(out, tensor, shard_shape(tensor, found, shards))
    if found is None:
        return _copied(tensor, out, async_op)
    if debug:
        split = f"of dim {shards[0]} to {shards[1]}"
        compare_calls(found, tensor, f"deterministic_reduce_scatter {split} by {options}")

    def run(apart: bool, ticket: Ticket) -> Tensor:
        shard = scatter_tensor(tensor, options, found, shards, ticket, apart)
        return shard if out is None else out.copy_(shard)

    return start("reduce_scatter", run, [tensor], options, found, async_op)


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
    read_options("sum", path, contract, strict)
    check_tensor(tensor)
    found = read_group(group)
    shards = read_gather(tensor, found, dim, sizes)
    check_no_gradient(tensor, "all_gather")
    shape, (_, lengths) = gathered_shape(tensor, shards), shards
    if out is not None:
        check_destination(out, tensor, shape)
    if found is None:
        return _copied(tensor, out, async_op)
    if debug:
        call = f"deterministic_all_gather to {list(shape)} of {lengths}"
        compare_calls(found, tensor.new_empty(0), call)

    def run(apart: bool, ticket: Ticket) -> Tensor:
        used = second_group(found, tensor) if apart else found
        whole = gather_tensor(tensor, used, shards, ticket)
        return whole if out is None else out.copy_(whole)

    return start("all_gather", run, [tensor], None, found, async_op)


def _copied(tensor: Tensor, out: Tensor | None, async_op: bool) -> Tensor | Work:
    """The result of one rank."""
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    if out is not None:
        whole = out.copy_(whole)
    return finished(whole) if async_op else whole


def read_scatter(
    tensor: Tensor, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None
) -> Shards:
    """The shards of a reduce-scatter over ``group``; ``None`` for one rank. Raises ContractError
    for an invalid ``dim``, or ``sizes`` that do not add up to its length.
    """
    dim = _read_dim(tensor, dim)
    ranks = 1 if group is None else group.size()
    length = tensor.shape[dim]
    if sizes is None:
        # As torch.chunk splits, with empty shards at the end.
        width = -(-length // ranks)
        return dim, tuple(max(0, min(width, length - rank * width)) for rank in range(ranks))
    if len(sizes) != ranks or sum(sizes) != length or min(sizes) < 0:
        raise ContractError(
            f"sizes={list(sizes)} do not split dim {dim} of {length} elements for a group of "
            f"{ranks}; pass one size for each rank, whose sum is the length"
        )
    return dim, tuple(sizes)


def read_gather(
    tensor: Tensor, group: ProcessGroup | None, dim: int, sizes: Sequence[int] | None
) -> Shards:
    """The shards of an all-gather over ``group``; ``None`` for one rank. Raises ContractError for
    an invalid ``dim``, or ``sizes`` that do not fit this rank's shard.
    """
    dim = _read_dim(tensor, dim)
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    lengths = tuple(sizes) if sizes is not None else (tensor.shape[dim],) * ranks
    if len(lengths) != ranks or lengths[rank] != tensor.shape[dim] or min(lengths) < 0:
        raise ContractError(
            f"sizes={list(lengths)} for a group of {ranks}, of which this is rank {rank}, and its "
            f"tensor has {tensor.shape[dim]} elements along dim {dim}; pass one size for each rank"
        )
    return dim, lengths


def shard_shape(tensor: Tensor, group: ProcessGroup | None, shards: Shards) -> tuple[int, ...]:
    """The shape of this rank's shard of ``tensor``."""
    dim, lengths = shards
    rank = 0 if group is None else group.rank()
    return (*tensor.shape[:dim], lengths[rank], *tensor.shape[dim + 1 :])


def gathered_shape(tensor: Tensor, shards: Shards) -> tuple[int, ...]:
    """The shape of the result of an all-gather of this rank's ``tensor``."""
    dim, lengths = shards
    return (*tensor.shape[:dim], sum(lengths), *tensor.shape[dim + 1 :])


def scatter_tensor(
    tensor: Tensor,
    options: ReductionOptions,
    group: ProcessGroup,
    shards: Shards,
    ticket: Ticket,
    apart: bool = False,
) -> Tensor:
    """This rank's shard of the reduction, waited for; all arguments are checked."""
    dim, lengths = shards
    request = f"deterministic_reduce_scatter {options.op} of dim {dim}"
    cut: dict[str, Any] = {"dim": dim, "lengths": lengths}
    return reduce_tensor(tensor, options, group, request, ticket, apart=apart, **cut)


def gather_tensor(tensor: Tensor, group: ProcessGroup, shards: Shards, ticket: Ticket) -> Tensor:
    """The shards of all ranks, joined, from checked arguments. Over gloo, raises
    SignatureMismatchError on every rank if ranks brought different shards.
    """
    started = time.perf_counter()
    dim, lengths = shards
    request = f"deterministic_all_gather along dim {dim}"
    planned = f"all_gather of {len(lengths)} ranks"
    purpose = Purpose(request, planned, describe_group(group))
    header = gather_header(tensor.dtype, tensor.shape, dim, lengths)
    sends = compare_headers(tensor, group, header, purpose, ticket.word)
    rows = tensor.detach().resolve_conj().resolve_neg().movedim(dim, 0).contiguous()
    shape = rows.shape[1:]
    # Backends support few dtypes; every backend sends bytes.
    mine = flatten(rows).view(torch.uint8)
    width = max(lengths)
    row = shape.numel() * tensor.element_size()
    if mine.numel() < width * row:
        padded = mine.new_zeros(width * row)
        padded[: mine.numel()] = mine
        mine = padded
    whole = mine
    if mine.numel():
        sends = (*sends, "all_gather_into_tensor")
        ranks, name = len(lengths), group.group_name
        whole = mine.new_empty(ranks * mine.numel())
        with span("all_gather"):
            # With an output, because of gloo: see GlooWire.all_gather.
            _ops.wait_tensor(_ops.all_gather_into_tensor_out(mine, ranks, name, out=whole))
    parts = whole.view(len(lengths), width * row)
    if any(length < width for length in lengths):
        pairs = zip(parts, lengths, strict=True)
        whole = torch.cat([part[: length * row] for part, length in pairs])
    joined = whole.view(tensor.dtype).view(sum(lengths), *shape).movedim(0, dim).contiguous()
    event = Event(
        asked=request,
        planned=planned,
        ran="all_gather",
        sends=sends,
        group=purpose.group,
        dtype=name_of(tensor.dtype),
        why="bytes are moved",
        kind="collective",
        ranks=len(lengths),
    )
    seconds = time.perf_counter() - started
    record(event, elements=tensor.numel(), nbytes=tensor.nbytes, seconds=seconds)
    return joined


def _read_dim(tensor: Tensor, dim: int) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ContractError(
            f"dim={dim} of a tensor with {tensor.ndim} dimensions; pass one of its dimensions"
        )
    return dim % tensor.ndim
