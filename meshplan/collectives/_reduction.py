"""One reduction over a process group: its members, the group it runs on, and its execution.

The group of a contract reduction is found once for a process group and its options, by an
agreement round, and kept with its step as long as the process group lives.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshplan._calls import Ticket, calls_of
from meshplan._dtypes import name_of
from meshplan._observing import within
from meshplan._spans import span
from meshplan._torch import dispatch_modes
from meshplan.collectives._lanes import Lane, Work, in_lane
from meshplan.collectives._options import ReductionOptions
from meshplan.errors import AxisNameError, GroupStateError, MeshplanError
from meshplan.execute._announce import is_counted, run_as_one
from meshplan.execute._header import step_header
from meshplan.execute._provenance import Event, Purpose, record
from meshplan.execute._run import BoundReduction, compare_headers
from meshplan.execute._shards import select_shard
from meshplan.execute._switches import one_shot_switch
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
    """Let calls that their arguments end use up a ticket, like all others. The peers of a rank that
    raises alone go on with the call. If the next call of this rank had the same number, the two
    would be reduced together.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not getattr(error, "used_ticket", False):
                _use_up_ticket(args[0] if args else kwargs.get("tensor"), kwargs)
            raise

    return call


def _use_up_ticket(tensors: object, given: Mapping[str, Any]) -> None:
    with suppress(MeshplanError):
        group = read_group(given.get("group"))
        if group is not None:
            first = tensors if isinstance(tensors, Tensor) else next(iter(tensors or ()), None)  # type: ignore[call-overload]
            kind = first.device.type if isinstance(first, Tensor) else "cpu"
            calls_of(group).take(_lane_name(kind, bool(given.get("async_op"))))


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
        lane = Lane(second_group(group, first), first.device)

    def run_in_lane() -> _Result:
        with ticket:
            return run(True, ticket)

    return in_lane(lane, run_in_lane)


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
        _keep(group, key, bound)
    return bound.run(tensor, groups, ticket.word)


def find_bound(
    tensor: Tensor,
    options: ReductionOptions,
    group: ProcessGroup,
    request: str,
    *,
    dim: int | None = None,
    lengths: tuple[int, ...] = (),
) -> BoundReduction | None:
    """The reduction that ``reduce_tensor`` has just returned from with these arguments; ``None`` if
    it is gone.
    """
    key = (options, tensor.device.type, request, False, dim, lengths)
    return _BOUND.get(group, {}).get(key)


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


def _keep(group: ProcessGroup, key: tuple[Any, ...], bound: BoundReduction) -> None:
    with _LOCK:
        steps = _BOUND.setdefault(group, {})
        if len(steps) >= MAX_STEPS_PER_GROUP:
            steps.clear()
        steps[key] = bound


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
    halves = dtype in (torch.float16, torch.bfloat16) and op in ("sum", "avg", "product")
    wide = torch.float32 if halves and options.contract.rounding == "once" else dtype
    value = tensor.detach().resolve_conj().resolve_neg()
    in_place = in_place and value.data_ptr() == tensor.data_ptr() and value.is_contiguous()
    in_place = in_place and wide is dtype
    if not in_place:
        value = value.to(wide, memory_format=torch.contiguous_format, copy=True)
    step = _step(options, group.size(), dim, lengths)
    planned = f"{step.kind} {op} over {group.size()} ranks in {name_of(wide)}, no contract"
    name = describe_group(group)
    header = step_header(step, dtype, tuple(tensor.shape), "native")
    sends = compare_headers(tensor, group, header, Purpose(request, planned, name), ticket.word)
    with span("all_reduce", op, "native"):
        within("native", partial(dist.all_reduce, value, _TORCH_OPS[op], group))
    if op == "avg":
        value.div_(group.size())
    event = Event(
        asked=request,
        planned=planned,
        ran="native",
        sends=(*sends, "all_reduce"),
        group=name,
        dtype=name_of(dtype),
        why=step.why,
        kind="collective",
        path=options.path,
        ranks=group.size(),
    )
    seconds = time.perf_counter() - started
    record(event, elements=tensor.numel(), nbytes=tensor.nbytes, seconds=seconds)
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


def compare_calls(group: ProcessGroup, tensor: Tensor, call: str) -> None:
    """Hold an agreement round of the members and compare their calls. Raises as
    ``GroupRegistry.compare``.
    """
    found = registry().of(group, tensor.device.type, token=Record.of(use="debug"))
    mine = Record.of(tensor=f"{name_of(tensor.dtype)}{list(tensor.shape)}", call=call)
    registry().compare(found, tensor.device.type, mine)


def describe_group(group: ProcessGroup) -> str:
    """The group, for the report."""
    return f"group {group.group_name} of {group.size()} ranks"
