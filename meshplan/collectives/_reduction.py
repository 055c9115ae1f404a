"""One reduction over a process group: its members, the group it runs on, and its execution.

The group of a contract reduction is found once for a process group and its options, by an
agreement round, and kept with its step as long as the process group lives.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar
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
from meshplan.execute._choose import one_shot_switch
from meshplan.execute._header import gather_header, list_header, step_header
from meshplan.execute._provenance import Event, Purpose, record
from meshplan.execute._run import BoundReduction, compare_headers
from meshplan.execute._shards import select_shard
from meshplan.execute.paths import sharing_of
from meshplan.flatten import Group, registry
from meshplan.planner import Step
from meshplan.record import Record

GroupLike = ProcessGroup | DeviceMesh | tuple[DeviceMesh, str | int]
"""The ranks of a collective: a process group, a mesh of one axis, or a mesh and one of its axes."""

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

# Of one process group. Where there are more, all are found again.
MAX_STEPS_PER_GROUP = 1024
_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


_BOUND: WeakKeyDictionary[ProcessGroup, dict[tuple[Any, ...], BoundReduction]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def counts_refused(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Let calls that their arguments end use up a ticket, like all others. Peers go on with such a
    call, and would reduce it together with this rank's next one if that had its number.
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
    """The device types of a call. Without a tensor all: peers may have theirs on any of them."""
    first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
    if isinstance(first, Tensor):
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
    request: str,
    ticket: Ticket,
    *,
    apart: bool = False,
    in_place: bool = False,
    dim: int | None = None,
    lengths: tuple[int, ...] = (),
) -> Tensor:
    """The reduction, or this rank's shard of it, waited for, from checked arguments. ``apart``: on
    a second process group of the same ranks. ``in_place``: ``tensor`` may be written to and
    returned. A reduce-scatter has ``dim`` and ``lengths``. Raises as ``deterministic_all_reduce``.
    """
    if options.native:
        used = second_group(group, tensor) if apart else group
        return _reduce_by_backend(tensor, options, used, request, ticket, in_place, dim, lengths)
    bound, groups = bind(tensor, options, group, request, ticket, apart, dim, lengths)
    return bound.run(tensor, groups, ticket.word)


def bind(
    tensor: Tensor,
    options: ReductionOptions,
    group: ProcessGroup,
    request: str,
    ticket: Ticket,
    apart: bool = False,
    dim: int | None = None,
    lengths: tuple[int, ...] = (),
) -> tuple[BoundReduction, StepGroups]:
    """The reduction of ``reduce_tensor``, and its groups; the members decide in the first call."""
    key = (options, tensor.device.type, request, apart, dim, lengths)
    # The entry outlives a shutdown. Its handle knows whether the decision still holds.
    bound = _BOUND.get(group, {}).get(key)
    groups = None if bound is None else bound.groups()
    if bound is None or groups is None:
        found, one_shot = find_group(tensor, group, options, ticket, apart=apart)
        step = _step(options, group.size(), dim, lengths)
        planned = f"{step.kind} {step.op} over {group.size()} ranks"
        planned += f", {step.path}, contract {options.contract.id}"
        bound = BoundReduction(
            step,
            Purpose(request, planned, describe_group(found.pg), "collective"),
            [registry().handle(found)],
            path=options.path,
            strict=options.strict,
            one_shot=one_shot,
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


def _step(options: ReductionOptions, ranks: int, dim: int | None, lengths: tuple[int, ...]) -> Step:
    return Step(
        kind="all_reduce" if dim is None else "reduce_scatter",
        axes=(0,),
        sizes=(ranks,),
        move="",
        why=f"path {options.path}",
        op=options.op,
        divisor=(options.divisor or ranks) if options.op == "avg" else None,
        path="native" if options.native else "exchange",
        contract=None if options.native else options.contract,
        scatter=() if dim is None else ((0, dim),),
        lengths=lengths,
        leaves=options.leaves,
    )


def _reduce_by_backend(
    tensor: Tensor,
    options: ReductionOptions,
    group: ProcessGroup,
    request: str,
    ticket: Ticket,
    in_place: bool,
    dim: int | None,
    lengths: tuple[int, ...],
) -> Tensor:
    """The backend's own all-reduce, and this rank's shard of it."""
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
    step = _step(options, group.size(), dim, lengths)
    planned = f"{step.kind} {op} over {group.size()} ranks in {name_of(wide)}, no contract"
    purpose = Purpose(request, planned, describe_group(group))
    header = step_header(step, dtype, tuple(tensor.shape), "native")
    sends = compare_headers(tensor, group, header, purpose, ticket.word)
    with span("all_reduce", op, "native"):
        within("native", partial(dist.all_reduce, value, _TORCH_OPS[op], group))
    if op == "avg":
        value.div_(group.size())
    _record(started, tensor, purpose, "native", (*sends, "all_reduce"), step.why, group.size())
    if dim is not None:
        return select_shard(value, step, group.rank()).to(dtype).contiguous()
    return tensor if in_place else value.to(dtype)


def find_group(
    tensor: Tensor,
    group: ProcessGroup,
    options: ReductionOptions,
    ticket: Ticket,
    *,
    apart: bool = False,
) -> tuple[Group, bool | None]:
    """The group that a reduction by contract runs on, and the value of
    ``MESHPLAN_USE_1STAGE_ALLREDUCE``. The first call is an agreement round, in which the members
    must agree on options and ticket. ``apart``: a second group of the same ranks; see
    ``second_group``. Raises as ``GroupRegistry.of``.
    """
    kind, path, one_shot = tensor.device.type, options.path, one_shot_switch()
    peers = sharing_of(path, kind, one_shot)
    # An environment variable, which ranks may have set differently; compared where it decides.
    switch = None if path != "auto" or one_shot is None else "always" if one_shot else "never"
    token = Record.of(contract=options.contract.id, path=path, one_shot=switch, audit=options.audit)
    call = ticket.number
    return registry().of(group, kind, token=token, peers=peers, apart=apart, call=call), one_shot


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
    found = group
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


def _group_of_axis(mesh: DeviceMesh, axis: str | int | None) -> ProcessGroup:
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
    if mesh.get_coordinate() is None:
        raise GroupStateError(
            f"rank {dist.get_rank()} is not in the group; call this on its members only"
        )
    return mesh.get_group(axis)


def second_group(group: ProcessGroup, tensor: Tensor) -> ProcessGroup:
    """A second process group of the same ranks: two threads may not order one group's sends."""
    return registry().of(group, tensor.device.type, token=Record.of(use="async_op"), apart=True).pg


def compare_calls(
    call: str,  # e.g. ``functional.reduce_scatter``
    group: ProcessGroup,
    tensor: Tensor,
    options: ReductionOptions | None,
    split: Shards | None,
) -> None:
    """Hold the agreement round of ``debug`` for one tensor; raises as ``GroupRegistry.compare``."""
    if split is not None and call.endswith("scatter"):
        call += f" of dim {split[0]} to {split[1]}"
    elif split is not None:
        call += f" to {list(gathered_shape(tensor, split))} of {split[1]}"
        # Ranks may bring shards of several lengths.
        tensor = tensor.new_empty(0)
    if options is not None:
        call += f" by {options}"
    found = registry().of(group, tensor.device.type, token=Record.of(use="debug"))
    mine = Record.of(tensor=f"{name_of(tensor.dtype)}{list(tensor.shape)}", call=call)
    registry().compare(found, tensor.device.type, mine)


def describe_group(group: ProcessGroup) -> str:
    """The group, for the report."""
    return f"group {group.group_name} of {group.size()} ranks"


# Lists of tensors in few messages, with the bits of one tensor at a time.
#
# No split of a list into messages changes a bit: the order of additions does not depend on the
# message. Path ``native`` has no such order, so that each tensor is one message.

_BUCKET_BYTES = 32 << 20

Shards = tuple[int, tuple[int, ...]]
"""The dimension that is split, and the length of each rank's shard along it."""


def all_reduce_list(
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor] | None,
    options: ReductionOptions,
    group: ProcessGroup,
    apart: bool,
    ticket: Ticket,
) -> list[Tensor]:
    """Reduce a list in few messages, in place or to ``outs``; all arguments are checked."""
    reduce_one = partial(
        reduce_tensor,
        options=options,
        group=group,
        request=f"deterministic_all_reduce {options.op}",
        ticket=ticket,
        apart=apart,
    )
    if len(tensors) == 1:
        return [put((outs or tensors)[0], reduce_one(tensors[0], in_place=outs is None))]

    def reduce(bucket: list[int]) -> Sequence[Tensor]:
        parts = [tensors[i] for i in bucket]
        if len(bucket) == 1:
            return [reduce_one(parts[0], in_place=outs is None)]
        whole = reduce_one(torch.cat([part.reshape(-1) for part in parts]))
        return torch.split(whole, [part.numel() for part in parts])

    return _collect(_buckets(tensors, options), reduce, outs or tensors, outs is None)


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


def gather_list(
    tensors: Sequence[Tensor],
    shards: Sequence[Shards],
    outs: Sequence[Tensor] | None,
    group: ProcessGroup,
    apart: bool,
    ticket: Ticket,
) -> list[Tensor]:
    """All-gather a list in few messages; all arguments are checked."""
    used = second_group(group, tensors[0]) if apart else group
    shapes = [gathered_shape(one, split) for one, split in zip(tensors, shards, strict=True)]

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


def check_distinct(written: Sequence[Tensor]) -> None:
    """Refuse to write to one tensor twice."""
    # While torch traces, a tensor has no address.
    several = written if len(written) > 1 else ()
    addresses = [tensor.data_ptr() for tensor in several if tensor.numel()]
    if len(set(addresses)) < len(addresses):
        raise ContractError(
            f"{len(written)} tensors to write to, and one of them is in the list twice; pass each "
            "tensor once"
        )


def compare_lists(
    kind: str,
    tensors: Sequence[Tensor],
    shards: Sequence[Shards],  # of a list that is reduced to whole tensors, none
    options: ReductionOptions | None,  # of an all-gather, none
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
        shape = gathered_shape(tensor, split) if split and options is None else tensor.shape
        layout.append(f"{tensor.dtype}{list(shape)} {split or ''}".strip())
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
    results: dict[int, Tensor] = {}
    for bucket in buckets:
        for i, value in zip(bucket, run(bucket), strict=True):
            results[i] = put(outs[i], value) if in_place and outs else value
    # Without ``in_place`` all is read before it is written: a tensor of ``outs`` may share memory
    # with the input of another bucket.
    found = [results[i] for i in range(len(results))]
    return found if in_place or not outs else list(map(put, outs, found))


def put(out: Tensor, value: Tensor) -> Tensor:
    return out if value is out else out.copy_(value.view(out.shape))


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
    _record(started, tensor, purpose, "all_gather", sends, "bytes are moved", len(lengths))
    return joined


def _record(
    started: float,
    tensor: Tensor,
    purpose: Purpose,
    ran: str,
    sends: tuple[str, ...],
    why: str,
    ranks: int,
) -> None:
    """Record a collective that no ``BoundReduction`` has run."""
    event = Event(
        asked=purpose.request,
        planned=purpose.planned,
        ran=ran,
        sends=sends,
        group=purpose.group,
        dtype=name_of(tensor.dtype),
        why=why,
        kind="collective",
        path="native" if ran == "native" else "",
        ranks=ranks,
    )
    seconds = time.perf_counter() - started
    record(event, elements=tensor.numel(), nbytes=tensor.nbytes, seconds=seconds)


def _read_dim(tensor: Tensor, dim: int) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ContractError(
            f"dim={dim} of a tensor with {tensor.ndim} dimensions; pass one of its dimensions"
        )
    return dim % tensor.ndim
