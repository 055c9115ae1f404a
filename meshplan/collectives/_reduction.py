"""One reduction over a process group: its members, the group it runs on, and its execution.

The group of a contract reduction is found once for a process group and its options, by an
agreement round, and kept with its step for the lifetime of the process group.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshplan._bits import flatten
from meshplan._calls import Ticket, calls_of
from meshplan._dtypes import name_of
from meshplan._observing import within
from meshplan._spans import span
from meshplan._torch import device_types_of, dispatch_modes
from meshplan._torch import functional_operators as _ops
from meshplan.collectives._lanes import Work, in_lane
from meshplan.collectives._options import ReductionOptions
from meshplan.errors import (
    AxisNameError,
    ContractError,
    GroupStateError,
    MeshplanError,
)
from meshplan.execute import StepGroups
from meshplan.execute._announce import is_counted, run_as_one
from meshplan.execute._header import gather_header, list_header, step_header
from meshplan.execute._provenance import Purpose, record_call
from meshplan.execute._run import BoundReduction, compare_headers
from meshplan.execute._shards import select_shard
from meshplan.execute.paths import sharing_of
from meshplan.flatten import Group, find_axis, registry
from meshplan.planner import Step
from meshplan.record import Record

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]
Shards = tuple[int, tuple[int, ...]]
"""The dimension that is split, and the length of each rank's shard along it."""
GroupLike = ProcessGroup | DeviceMesh | tuple[DeviceMesh, str | int]
"""The ranks of a collective: a process group, a mesh of one axis, or a mesh and one of its axes."""

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

# Of one process group. Where there are more, all are found again.
MAX_STEPS_PER_GROUP = 1024

_BOUND: WeakKeyDictionary[ProcessGroup, dict[tuple[Any, ...], BoundReduction]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def counts_refused(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Let calls that are refused for their arguments use up a ticket, like all others. Peers make
    such a call, and would pair it with this rank's next one if that had its number.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not getattr(error, "used_ticket", False):
                given = kwargs.get("tensor", kwargs.get("tensors"))
                use_up_ticket(args[0] if args else given, kwargs)
            raise

    return call


def use_up_ticket(tensors: object, given: Mapping[str, Any]) -> None:
    with suppress(MeshplanError):
        group = read_group(given.get("group"))
        if group is not None:
            for kind in list_kinds(tensors, group):
                calls_of(group).take(_lane_name(kind, bool(given.get("async_op"))))


def list_kinds(tensors: object, group: ProcessGroup) -> list[str]:
    """The device types of a call. Without data all: peers may have theirs on any of them."""
    first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
    if isinstance(first, Tensor) and not first.is_meta:
        return [first.device.type]
    return [device.type for device in device_types_of(group)]


def _lane_name(device_type: str, apart: bool) -> str:
    """Calls on a second group are in an order of their own."""
    return f"{device_type} asynchronous" if apart else device_type


def start(
    collective: str,
    run: Callable[[bool, Ticket], _Result],
    tensors: Sequence[Tensor],
    options: ReductionOptions | None,
    group: ProcessGroup,
    async_op: bool,
) -> _Result | Work:
    """Run a collective now, or with ``async_op`` concurrently with the caller, and return a
    ``Work`` of it. ``run`` gets whether to use the second group of the same ranks, and the call's
    ticket. An all-gather has no ``options``.
    """
    first = tensors[0]
    if dispatch_modes() and is_counted():
        again = partial(start, collective, run, tensors, options, group, async_op)
        op, shape = "" if options is None else options.op, tuple(first.shape)
        return run_as_one(again, collective, op, shape, first.dtype, lambda: group)
    ticket = calls_of(group).take(_lane_name(first.device.type, async_op))
    with ticket:
        if not async_op:
            with torch.no_grad():
                return run(False, ticket)
        if options is not None and not options.native:
            # Agreement rounds are held now, in the caller's order of calls.
            for tensor in tensors:
                find_group(tensor, group, options, ticket, apart=True)
        apart = second_group(group, first)

    def run_in_lane() -> _Result:
        with ticket:
            return run(True, ticket)

    return in_lane(apart, first.device, run_in_lane)


def reduce_tensor(
    tensor: Tensor,
    options: ReductionOptions,
    group: ProcessGroup,
    ticket: Ticket,
    *,
    request: str = "",
    apart: bool = False,
    in_place: bool = False,
    shards: Shards | None = None,
    written: Sequence[Tensor] = (),
) -> Tensor:
    """The reduction, or with ``shards`` this rank's, waited for, from checked arguments. ``apart``:
    on a second process group of the same ranks. ``in_place``: ``tensor`` may be written to and
    returned. ``written``: of ``BoundReduction``. Raises as ``deterministic_all_reduce``.
    """
    if not request:
        kind = "all_reduce" if shards is None else "reduce_scatter"
        at = "" if shards is None else f" of dim {shards[0]}"
        request = f"deterministic_{kind} {options.op}{at}"
    if options.native:
        used = second_group(group, tensor) if apart else group
        return _reduce_by_backend(tensor, options, used, request, ticket, in_place, shards)
    bound, groups = bind(tensor, options, group, request, ticket, apart, shards)
    return bound.run(tensor, groups, ticket.word, written=written)


def bind(
    tensor: Tensor,
    options: ReductionOptions,
    group: ProcessGroup,
    request: str,
    ticket: Ticket,
    apart: bool = False,
    shards: Shards | None = None,
) -> tuple[BoundReduction, StepGroups]:
    """The reduction of ``reduce_tensor``, and its groups; the members decide in the first call."""
    key = (options, tensor.device.type, request, apart, shards)
    # The entry outlives a shutdown. Its handle knows whether the decision still holds.
    bound = _BOUND.get(group, {}).get(key)
    groups = None if bound is None else bound.groups()
    if bound is None or groups is None:
        found = find_group(tensor, group, options, ticket, apart=apart)
        step = _step(options, group.size(), shards)
        planned = f"{step.kind} {step.op} over {group.size()} ranks"
        planned += f", {step.path}, contract {options.contract.id}"
        bound = BoundReduction(
            step,
            Purpose(request, planned, describe_group(found.pg, group), "collective"),
            [registry().handle(found)],
            path=options.path,
            strict=options.strict,
            audit=options.audit,
        )
        groups = bound.groups()
        assert groups is not None
        with _LOCK:
            steps = _BOUND.setdefault(group, {})
            if len(steps) >= MAX_STEPS_PER_GROUP:
                steps.clear()
            steps[key] = bound
    return bound, groups


def _step(options: ReductionOptions, ranks: int, shards: Shards | None) -> Step:
    return Step(
        kind="all_reduce" if shards is None else "reduce_scatter",
        axes=(0,),
        sizes=(ranks,),
        move="",
        why=f"path {options.path}",
        op=options.op,
        divisor=(options.divisor or ranks) if options.op == "avg" else None,
        path="native" if options.native else "exchange",
        contract=None if options.native else options.contract,
        scatter=() if shards is None else ((0, shards[0]),),
        lengths=() if shards is None else shards[1],
        leaves=options.leaves,
    )


def _reduce_by_backend(
    tensor: Tensor,
    options: ReductionOptions,
    group: ProcessGroup,
    request: str,
    ticket: Ticket,
    in_place: bool,
    shards: Shards | None,
) -> Tensor:
    started = time.perf_counter()
    op, dtype = options.op, tensor.dtype
    # To round once, the backend adds 16-bit numbers as float32, in messages of twice the size.
    halves = dtype in (torch.float16, torch.bfloat16) and op in (
        "sum",
        "avg",
        "product",
    )
    wide = torch.float32 if halves and options.contract.rounding == "once" else dtype
    value = tensor.detach().resolve_conj().resolve_neg()
    in_place = in_place and value.data_ptr() == tensor.data_ptr() and value.is_contiguous()
    in_place = in_place and wide is dtype
    if not in_place:
        value = value.to(wide, memory_format=torch.contiguous_format, copy=True)
    step = _step(options, group.size(), shards)
    planned = f"{step.kind} {op} over {group.size()} ranks in {name_of(wide)}, no contract"
    purpose = Purpose(request, planned, describe_group(group))
    header = step_header(step, dtype, tuple(tensor.shape), "native")
    sends = (
        *compare_headers(tensor, group, header, purpose, ticket.word),
        "all_reduce",
    )
    kind = getattr(dist.ReduceOp, "SUM" if op == "avg" else op.upper())
    with span("all_reduce", op, "native"):
        within("native", partial(dist.all_reduce, value, kind, group))
    if op == "avg":
        value.div_(group.size())
    how = {"why": step.why, "path": "native"}
    record_call(purpose, [tensor], started, "native", sends, group.size(), **how)
    if shards is not None:
        return select_shard(value, step, group.rank()).to(dtype).contiguous()
    return tensor if in_place else value.to(dtype)


def find_group(
    tensor: Tensor,
    group: ProcessGroup,
    options: ReductionOptions,
    ticket: Ticket,
    *,
    apart: bool = False,
) -> Group:
    """The group that a reduction by contract runs on. The first call is an agreement round, in
    which the members must agree on options and ticket. ``apart``: a second group of the same ranks;
    see ``second_group``. Raises as ``GroupRegistry.of``.
    """
    kind, path = tensor.device.type, options.path
    token = Record.of(contract=options.contract.id, path=path, audit=options.audit)
    peers, call = sharing_of(path, kind), ticket.number
    return registry().of(
        group,
        kind,
        token=token,
        peers=peers,
        apart=apart,
        call=call,
    )


def read_group(group: GroupLike | None) -> ProcessGroup | None:
    """The process group to run over; ``None`` if this rank is the only one. Raises GroupStateError
    without torch.distributed, without a process group in a job of several ranks, or if this rank is
    not in ``group``; AxisNameError if the mesh has no such axis, or several and none is named.
    """
    if not dist.is_available():
        raise GroupStateError(
            "torch.distributed is unavailable; install a torch that was built with it"
        )
    if not dist.is_initialized():
        size = os.environ.get("WORLD_SIZE", "1")
        if size.strip() in ("", "0", "1"):
            return None
        raise GroupStateError(
            f"WORLD_SIZE is {size} and there is no process group; call "
            "torch.distributed.init_process_group first"
        )
    found: object = group
    if isinstance(group, DeviceMesh):
        found = _group_of_axis(group, None)
    elif isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        found = _group_of_axis(*group)
    elif group is None:
        found = dist.group.WORLD
    if not isinstance(found, ProcessGroup):
        if found == dist.GroupMember.NON_GROUP_MEMBER:
            raise GroupStateError(
                f"rank {dist.get_rank()} is not in the group; call this on its members only"
            )
        raise GroupStateError(
            f"group={group!r} is not a process group; pass a ProcessGroup, a DeviceMesh of one "
            "axis or (mesh, axis), or leave it out for all ranks"
        )
    return found if found.size() > 1 else None


def _group_of_axis(mesh: DeviceMesh, axis: str | int | None) -> object:
    names = mesh.mesh_dim_names
    if axis is None and mesh.ndim == 1:
        axis = 0
    known = axis in (names or ()) or (type(axis) is int and 0 <= axis < mesh.ndim)
    if not known:
        shown: Sequence[object] = names or range(mesh.ndim)
        wrong = f"has {mesh.ndim} axes" if axis is None else f"has no axis {axis!r}"
        raise AxisNameError(
            f"the mesh of group= {wrong}; pass group=(mesh, axis) with one of the axes "
            f"{', '.join(map(repr, shown))}"
        )
    outside = mesh.get_coordinate() is None
    return dist.GroupMember.NON_GROUP_MEMBER if outside else mesh.get_group(axis)


def second_group(group: ProcessGroup, tensor: Tensor) -> ProcessGroup:
    """A second process group of the same ranks: two threads may not order one group's sends."""
    return registry().of(group, tensor.device.type, token=Record.of(use="async_op"), apart=True).pg


def compare_calls(
    call: str,  # e.g. ``functional.reduce_scatter``
    group: ProcessGroup,
    tensor: Tensor,
    options: ReductionOptions | None,
    shards: Shards | None,
) -> None:
    """Hold the agreement round of ``debug`` for one tensor; raises as ``GroupRegistry.compare``."""
    if shards is not None and call.endswith("scatter"):
        call += f" of dim {shards[0]} to {shards[1]}"
    elif shards is not None:
        call += f" to {list(result_shape(tensor, shards))} of {shards[1]}"
        # Ranks may pass shards of different lengths.
        tensor = tensor.new_empty(0)
    if options is not None:
        call += f" by {options}"
    found = registry().of(group, tensor.device.type, token=Record.of(use="debug"))
    mine = Record.of(tensor=f"{name_of(tensor.dtype)}{list(tensor.shape)}", call=call)
    registry().compare(found, tensor.device.type, mine)


def describe_group(group: ProcessGroup, beside: ProcessGroup | None = None) -> str:
    """``beside``: the caller's, if ``group`` is another one of the same ranks."""
    return f"group {find_axis(beside or group) or group.group_name} of {group.size()} ranks"


# Lists of tensors in few messages, with the bits of one tensor at a time.
#
# No split of a list into messages changes a bit: the order of additions does not depend on the
# message. Path ``native`` has no such order, so that each tensor is one message.

_BUCKET_BYTES = 32 << 20


def run_list(
    kind: Kind,
    tensors: Sequence[Tensor],
    shards: Sequence[Shards],  # of a list that is reduced to whole tensors, none
    outs: Sequence[Tensor] | None,
    options: ReductionOptions | None,  # of an all-gather, none
    group: ProcessGroup,
    ticket: Ticket,
    *,
    apart: bool = False,
    alone: bool = False,  # of one tensor, for which ranks compare no lists
) -> list[Tensor]:
    """Run a collective of a list in few messages, from checked arguments. Without ``outs``, an
    all-reduce is in place.
    """
    in_place = kind == "all_reduce" and outs is None
    outs = tensors if in_place else outs

    def run_one(tensor: Tensor, cut: Shards | None) -> Tensor:
        if options is not None:
            return reduce_tensor(
                tensor,
                options,
                group,
                ticket,
                apart=apart,
                in_place=in_place,
                shards=cut,
            )
        assert cut is not None
        return gather_tensor(tensor, second_group(group, tensor) if apart else group, cut, ticket)

    if alone:
        value = run_one(tensors[0], shards[0] if shards else None)
        return [value if outs is None or value is outs[0] else outs[0].copy_(value)]
    _compare_lists(kind, tensors, shards, options, group, apart, ticket)
    results = [*tensors]
    for bucket in _buckets(tensors, options, shards):
        parts = [tensors[i] for i in bucket]
        cuts = [shards[i] for i in bucket if shards]
        values: Sequence[Tensor]
        if len(bucket) == 1:
            values = [run_one(parts[0], cuts[0] if cuts else None)]
        elif kind == "all_reduce":
            whole = run_one(torch.cat([part.reshape(-1) for part in parts]), None)
            values = torch.split(whole, [part.numel() for part in parts])
        elif kind == "reduce_scatter":
            values = _scatter_bucket(parts, cuts, group, run_one)
        else:
            values = _gather_bucket(parts, cuts, run_one)
        for i, value in zip(bucket, values, strict=True):
            results[i] = put(outs[i], value) if in_place and outs else value
    # Unless in place, all is read before it is written: a tensor of ``outs`` may share memory with
    # the input of another bucket.
    return results if in_place or not outs else list(map(put, outs, results))


def _scatter_bucket(
    parts: Sequence[Tensor],
    cuts: Sequence[Shards],
    group: ProcessGroup,
    run: Callable[[Tensor, Shards], Tensor],
) -> list[Tensor]:
    pieces = [
        [piece.reshape(-1) for piece in torch.split(part, list(lengths), at)]
        for part, (at, lengths) in zip(parts, cuts, strict=True)
    ]
    # The shards of rank 0 of all tensors, then those of rank 1, and so on.
    by_rank = list(zip(*pieces, strict=True))
    sums = tuple(sum(piece.numel() for piece in row) for row in by_rank)
    whole = run(torch.cat([piece for row in by_rank for piece in row]), (0, sums))
    shares = torch.split(whole, [piece.numel() for piece in by_rank[group.rank()]])
    triples = zip(shares, parts, cuts, strict=True)
    return [share.view(result_shape(part, cut, group)) for share, part, cut in triples]


def _gather_bucket(
    parts: Sequence[Tensor],
    cuts: Sequence[Shards],
    run: Callable[[Tensor, Shards], Tensor],
) -> list[Tensor]:
    pairs = list(zip(parts, cuts, strict=True))
    rows = [part.detach().movedim(at, 0).contiguous() for part, (at, _) in pairs]
    rows = [row.resolve_conj().resolve_neg() for row in rows]
    # Bytes of each tensor on each rank.
    widths = [row.shape[1:].numel() * row.element_size() for row in rows]
    counts = [[n * width for n in cut[1]] for cut, width in zip(cuts, widths, strict=True)]
    by_rank = list(zip(*counts, strict=True))
    message = torch.cat([flatten(row).view(torch.uint8) for row in rows])
    whole = run(message, (0, tuple(map(sum, by_rank))))
    pieces = torch.split(whole, [n for row in by_rank for n in row])
    return [
        # The concatenation puts a tensor of any dtype at an aligned address.
        torch.cat(pieces[k :: len(rows)])
        .view(part.dtype)
        .view(sum(lengths), *rows[k].shape[1:])
        .movedim(0, at)
        .contiguous()
        for k, (part, (at, lengths)) in enumerate(pairs)
    ]


def check_distinct(written: Sequence[Tensor]) -> None:
    # While torch traces, a tensor has no address.
    several = written if len(written) > 1 else ()
    addresses = [tensor.data_ptr() for tensor in several if tensor.numel()]
    if len(set(addresses)) < len(addresses):
        raise ContractError(
            f"{len(written)} tensors to write to, and one of them is in the list twice; pass each "
            "tensor once"
        )


def _compare_lists(
    kind: Kind,
    tensors: Sequence[Tensor],
    shards: Sequence[Shards],
    options: ReductionOptions | None,
    group: ProcessGroup,
    apart: bool,
    ticket: Ticket,
) -> None:
    """Compare the lists of all ranks: a message does not show where each of its tensors ends."""
    # Lists of one tensor too: another rank may have passed more.
    if options is not None and options.native:
        return
    op = options.op if options is not None else ""
    layout = []
    splits: Sequence[Shards | None] = shards or [None] * len(tensors)
    for tensor, split in zip(tensors, splits, strict=True):
        shape = result_shape(tensor, split) if split and options is None else tensor.shape
        layout.append(f"{tensor.dtype}{list(shape)} {split or ''}".strip())
    call = f"deterministic_{kind}_coalesced"
    purpose = Purpose(call, f"{kind} {op}".strip(), describe_group(group))
    header = list_header(kind, tensors, layout, op, group.size())
    used = second_group(group, tensors[0]) if apart else group
    compare_headers(tensors[0], used, header, purpose, ticket.word)


def _buckets(
    tensors: Sequence[Tensor],
    options: ReductionOptions | None,
    shards: Sequence[Shards],
) -> Iterator[list[int]]:
    """Positions of the tensors of each message; the same on every rank. Tensors of one device, and
    in a reduction of one dtype, are put together up to a size: in an all-gather, of the results.
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
            shape = result_shape(tensors[i], shards[i]) if options is None else tensors[i].shape
            nbytes = math.prod(shape) * tensors[i].element_size()
            if bucket and filled + nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(i)
            filled += nbytes
        yield bucket


def put(out: Tensor, value: Tensor) -> Tensor:
    return out if value is out else out.copy_(value.view(out.shape))


def read_shards(
    kind: Kind,
    tensor: Tensor,
    group: ProcessGroup | None,  # ``None`` for one rank
    dim: int,
    sizes: Sequence[int] | None,
) -> Shards:
    """The shards of a reduce-scatter or an all-gather. Raises ContractError for an invalid ``dim``,
    or ``sizes`` that do not add up to its length, or do not fit this rank's shard.
    """
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ContractError(
            f"dim={dim} of a tensor with {tensor.ndim} dimensions; pass one of its dimensions"
        )
    dim %= tensor.ndim
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    length = tensor.shape[dim]
    if kind == "all_gather":
        lengths = tuple(sizes) if sizes is not None else (length,) * ranks
        if len(lengths) != ranks or lengths[rank] != length or min(lengths) < 0:
            raise ContractError(
                f"sizes={list(lengths)} for a group of {ranks}, of which this is rank {rank}, and "
                f"its tensor has {length} elements along dim {dim}; pass one size for each rank"
            )
        return dim, lengths
    if sizes is None:
        # As torch.chunk splits, with empty shards at the end.
        width = -(-length // ranks)
        return dim, tuple(max(0, min(width, length - place * width)) for place in range(ranks))
    if len(sizes) != ranks or sum(sizes) != length or min(sizes) < 0:
        raise ContractError(
            f"sizes={list(sizes)} do not split dim {dim} of {length} elements for a group of "
            f"{ranks}; pass one size for each rank, whose sum is the length"
        )
    return dim, tuple(sizes)


def result_shape(
    tensor: Tensor, shards: Shards | None, scatters: ProcessGroup | None = None
) -> tuple[int, ...]:
    """The shape of the result for ``tensor``: of its whole without ``shards``, of this rank's shard
    of a reduce-scatter over the group ``scatters``, or of an all-gather.
    """
    if shards is None:
        return tuple(tensor.shape)
    dim, lengths = shards
    # Of one rank, both are the whole.
    length = sum(lengths) if scatters is None else lengths[scatters.rank()]
    return (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])


def gather_tensor(tensor: Tensor, group: ProcessGroup, shards: Shards, ticket: Ticket) -> Tensor:
    """The shards of all ranks, joined, from checked arguments. Over gloo, raises
    SignatureMismatchError on every rank if ranks passed different shards.
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
    how = {"why": "bytes are moved"}
    record_call(purpose, [tensor], started, "all_gather", sends, len(lengths), **how)
    return joined
