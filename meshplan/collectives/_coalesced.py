"""Lists of tensors in few messages, with the bits of one tensor at a time.

No split of a list into messages changes a bit: the order of additions does not depend on the
message. Path ``native`` has no such order, so that each tensor is one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._bits import flatten
from meshplan._calls import Ticket
from meshplan._uncompiled import never_compiled, refuse_in_graph
from meshplan.collectives._all_reduce import check_all_reduce
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
from meshplan.collectives._shards import (
    Shards,
    gather_tensor,
    gathered_shape,
    read_gather,
    read_scatter,
    scatter_tensor,
    shard_shape,
)
from meshplan.contract import Contract
from meshplan.errors import ContractError
from meshplan.execute._header import list_header
from meshplan.execute._provenance import Purpose
from meshplan.execute._run import compare_headers

_BUCKET_BYTES = 32 << 20


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
    tensors, options = list(tensors), read_options(op, path, contract, strict)
    outs = _read_outs(tensors, out)
    for tensor, one in zip(tensors, outs or tensors, strict=True):
        check_all_reduce(tensor, one if outs else None, options)
    check_distinct(outs or tensors)
    found = read_group(group)
    if found is None or not tensors:
        return _alone(tensors, outs or tensors, async_op)
    if debug:
        for tensor in tensors:
            compare_calls(found, tensor, f"deterministic_all_reduce by {options}")

    run = partial(all_reduce_list, tensors, outs, options, found)
    return start("all_reduce", run, tensors, options, found, async_op)


def all_reduce_list(
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor] | None,
    options: ReductionOptions,
    group: ProcessGroup,
    apart: bool,
    ticket: Ticket,
) -> list[Tensor]:
    """Reduce a list in few messages, in place or to ``outs``; all arguments are checked."""
    layout = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors]
    _compare_lists("all_reduce", tensors, layout, group, ticket, options, apart)

    def reduce(bucket: list[int]) -> Sequence[Tensor]:
        parts, alone = [tensors[i] for i in bucket], len(bucket) == 1
        message = parts[0] if alone else torch.cat([part.reshape(-1) for part in parts])
        name, in_place = f"deterministic_all_reduce {options.op}", alone and outs is None
        whole = reduce_tensor(message, options, group, name, ticket, apart=apart, in_place=in_place)
        return [whole] if alone else torch.split(whole, [part.numel() for part in parts])

    return _collect(_buckets(tensors, options), reduce, outs or tensors, outs is None)


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
    tensors, options = list(tensors), read_options(op, path, contract, strict)
    outs, lists = _read_outs(tensors, out), _read_sizes(tensors, sizes)
    for tensor in tensors:
        check_summand(tensor, options)
        check_no_gradient(tensor, "reduce_scatter")
    found = read_group(group)
    pairs = zip(tensors, lists, strict=True)
    shards = [read_scatter(tensor, found, dim, lengths) for tensor, lengths in pairs]
    shapes = [shard_shape(one, found, s) for one, s in zip(tensors, shards, strict=True)]
    _check_outs(outs, tensors, shapes)
    if found is None or not tensors:
        return _alone(tensors, outs, async_op)
    if debug:
        for tensor, (at, lengths) in zip(tensors, shards, strict=True):
            call = f"deterministic_reduce_scatter of dim {at} to {lengths} by {options}"
            compare_calls(found, tensor, call)

    run = partial(scatter_list, tensors, shards, outs, options, found)
    return start("reduce_scatter", run, tensors, options, found, async_op)


def scatter_list(
    tensors: Sequence[Tensor],
    shards: Sequence[Shards],
    outs: Sequence[Tensor] | None,
    options: ReductionOptions,
    group: ProcessGroup,
    apart: bool,
    ticket: Ticket,
) -> list[Tensor]:
    """Reduce-scatter a list in few messages; all arguments are checked."""
    layout = [f"{t.dtype}{list(t.shape)} {s}" for t, s in zip(tensors, shards, strict=True)]
    _compare_lists("reduce_scatter", tensors, layout, group, ticket, options, apart)

    def scatter(bucket: list[int]) -> Sequence[Tensor]:
        if len(bucket) == 1:
            (i,) = bucket
            return [scatter_tensor(tensors[i], options, group, shards[i], ticket, apart)]
        parts = [
            [part.reshape(-1) for part in torch.split(tensors[i], list(lengths), at)]
            for i in bucket
            for at, lengths in [shards[i]]
        ]
        # The shards of rank 0 of all tensors, then those of rank 1, and so on.
        by_rank = list(zip(*parts, strict=True))
        sums = tuple(sum(part.numel() for part in row) for row in by_rank)
        message = torch.cat([part for row in by_rank for part in row])
        whole = scatter_tensor(message, options, group, (0, sums), ticket, apart)
        shares = torch.split(whole, [part.numel() for part in by_rank[group.rank()]])
        return [
            share.view(shard_shape(tensors[i], group, shards[i]))
            for i, share in zip(bucket, shares, strict=True)
        ]

    return _collect(_buckets(tensors, options), scatter, outs)


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
    read_options("sum", path, contract, strict)
    tensors = list(tensors)
    outs, lists = _read_outs(tensors, out), _read_sizes(tensors, sizes)
    for tensor in tensors:
        check_tensor(tensor)
        check_no_gradient(tensor, "all_gather")
    found = read_group(group)
    pairs = zip(tensors, lists, strict=True)
    shards = [read_gather(tensor, found, dim, lengths) for tensor, lengths in pairs]
    shapes = [gathered_shape(one, split) for one, split in zip(tensors, shards, strict=True)]
    _check_outs(outs, tensors, shapes)
    if found is None or not tensors:
        return _alone(tensors, outs, async_op)
    if debug:
        for tensor, shape, (_, lengths) in zip(tensors, shapes, shards, strict=True):
            call = f"deterministic_all_gather to {list(shape)} of {lengths}"
            compare_calls(found, tensor.new_empty(0), call)

    def run(apart: bool, ticket: Ticket) -> list[Tensor]:
        used = second_group(found, tensors[0]) if apart else found
        triples = zip(tensors, shapes, shards, strict=True)
        layout = [f"{one.dtype}{list(shape)} {split}" for one, shape, split in triples]
        _compare_lists("all_gather", tensors, layout, used, ticket)

        def gather(bucket: list[int]) -> Sequence[Tensor]:
            if len(bucket) == 1:
                return [gather_tensor(tensors[bucket[0]], used, shards[bucket[0]], ticket)]
            rows = [tensors[i].detach().movedim(shards[i][0], 0).contiguous() for i in bucket]
            rows = [row.resolve_conj().resolve_neg() for row in rows]
            message = torch.cat([flatten(row).view(torch.uint8) for row in rows])
            # Bytes of each tensor on each rank.
            widths = [row.shape[1:].numel() * row.element_size() for row in rows]
            pairs = zip(bucket, widths, strict=True)
            counts = [[length * width for length in shards[i][1]] for i, width in pairs]
            sums = tuple(sum(by_tensor) for by_tensor in zip(*counts, strict=True))
            whole = gather_tensor(message, used, (0, sums), ticket)
            pieces = iter(torch.split(whole, [n for row in zip(*counts, strict=True) for n in row]))
            by_rank = [[next(pieces) for _ in bucket] for _ in sums]
            return [
                # The concatenation puts a tensor of any dtype at an aligned address.
                torch.cat([row[k] for row in by_rank])
                .view(tensors[i].dtype)
                .view(sum(shards[i][1]), *rows[k].shape[1:])
                .movedim(0, shards[i][0])
                .contiguous()
                for k, i in enumerate(bucket)
            ]

        return _collect(_buckets(tensors, None, shapes), gather, outs)

    return start("all_gather", run, tensors, None, found, async_op)


def _read_outs(tensors: Sequence[Tensor], out: Sequence[Tensor] | None) -> list[Tensor] | None:
    if out is None:
        return None
    outs = list(out)
    if len(outs) != len(tensors):
        raise ContractError(
            f"out= has length {len(outs)} for {len(tensors)} tensors; pass one out= for each"
        )
    return outs


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


def check_distinct(written: Sequence[Tensor]) -> None:
    """Refuse to write to one tensor twice."""
    addresses = [tensor.data_ptr() for tensor in written if tensor.numel()]
    if len(set(addresses)) < len(addresses):
        raise ContractError(
            f"{len(written)} tensors to write to, and one of them is in the list twice; pass each "
            "tensor once"
        )


def _alone(
    tensors: Sequence[Tensor], outs: list[Tensor] | None, async_op: bool
) -> list[Tensor] | Work:
    """The results of one rank, or of an empty list."""
    copies = [one.detach().clone(memory_format=torch.contiguous_format) for one in tensors]
    with torch.no_grad():
        results = copies if outs is None else list(map(_put, outs, copies))
    return finished(results) if async_op else results


def _compare_lists(
    kind: str,
    tensors: Sequence[Tensor],
    layout: Sequence[str],
    group: ProcessGroup,
    ticket: Ticket,
    options: ReductionOptions | None = None,
    apart: bool = False,
) -> None:
    """Compare the lists of all ranks: a message does not show where each of its tensors ends."""
    # Lists of one tensor too: another rank may have passed more.
    if options is not None and options.native:
        return
    op = options.op if options is not None else ""
    call = f"deterministic_{kind}_coalesced"
    purpose = Purpose(call, f"{kind} {op}".strip(), describe_group(group))
    header = list_header(kind, tensors, layout, op, group.size())
    used = second_group(group, tensors[0]) if apart else group
    compare_headers(tensors[0], used, header, purpose, ticket.word)


def _buckets(
    tensors: Sequence[Tensor],
    options: ReductionOptions | None,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> Iterator[list[int]]:
    """Positions of the tensors of each message; the same on every rank. Tensors of one device, and
    in a reduction of one dtype, are put together up to a size. An all-gather has no ``options``,
    and the ``shapes`` of its results.
    """
    if options is not None and options.native:
        yield from ([i] for i in range(len(tensors)))
        return
    kinds: dict[object, list[int]] = {}
    for i, tensor in enumerate(tensors):
        kind = tensor.device if options is None else (tensor.device, tensor.dtype)
        kinds.setdefault(kind, []).append(i)
    for positions in kinds.values():
        bucket: list[int] = []
        filled = 0
        for i in positions:
            shape = tensors[i].shape if shapes is None else torch.Size(shapes[i])
            nbytes = shape.numel() * tensors[i].element_size()
            if bucket and filled + nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(i)
            filled += nbytes
        yield bucket


def _collect(
    buckets: Iterable[list[int]],
    run: Callable[[list[int]], Sequence[Tensor]],
    outs: Sequence[Tensor] | None,
    in_place: bool = False,
) -> list[Tensor]:
    """Run the buckets, and write their results to ``outs``."""
    results: dict[int, Tensor] = {}
    for bucket in buckets:
        for i, value in zip(bucket, run(bucket), strict=True):
            results[i] = _put(outs[i], value) if in_place and outs else value
    # Without ``in_place`` all is read before it is written: a tensor of ``outs`` may share memory
    # with the input of another bucket.
    found = [results[i] for i in range(len(results))]
    return found if in_place or not outs else list(map(_put, outs, found))


def _put(out: Tensor, value: Tensor) -> Tensor:
    return out if value is out else out.copy_(value.view(out.shape))
