"""The placement that carries a planned reduction into torch's own executor (docs/adr/0002), and the
check that the executor runs it.

In torch's ``LocalTensorMode`` one process simulates all ranks, and the groups of a mesh may hold
shards of different sizes. An element's bits do not depend on its place in a message. So summands
are padded to one size, reduced together, and shortened.
"""

from __future__ import annotations

import dis
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from meshplan._calls import NO_TICKET, GroupCalls, Ticket, calls_of
from meshplan._torch import (
    EXECUTOR,
    AsyncCollectiveTensor,
    FlattenedTransformInfo,
    LocalTensor,
    TracingContext,
    dispatch_modes,
    local_tensor_mode,
    maybe_wrap_tensor,
    redistribute_module,
    tensors_of_ranks,
    tracing,
)
from meshplan._torch.placements import PartialHooks
from meshplan._uncompiled import never_compiled
from meshplan.dtensor._config import Config
from meshplan.errors import PlanNotRunError
from meshplan.execute import BoundReduction, Purpose, StepGroups, is_traced
from meshplan.execute._announce import is_counted, run_as_one
from meshplan.execute._wire import check_data
from meshplan.flatten import (
    Block,
    Group,
    Sharing,
    _threads,
    default_timeout,
    first_use,
    is_worker_thread,
    registry,
    this_rank,
)
from meshplan.layout import Layout
from meshplan.planner import Step
from meshplan.record import Record

# Whose groups one carrier keeps; where there are more, all are found again.
MAX_MESHES = 64


def reduce_simulated(
    reduce: Callable[..., Tensor],
    summand: Tensor,
    *arguments: Any,
    **options: Any,
) -> Tensor:
    """``reduce(summand, ...)``, where the ranks' summands may have different sizes.
    The members of a group have summands of one shape.
    """
    ranks: dict[int, Tensor] = tensors_of_ranks(summand)
    if len({local.shape for local in ranks.values()}) == 1:
        return reduce(summand, *arguments, **options)
    longest = max(local.numel() for local in ranks.values())
    padded = LocalTensor({rank: _pad(local, longest) for rank, local in ranks.items()})
    reduced: dict[int, Tensor] = tensors_of_ranks(reduce(padded, *arguments, **options))
    shapes = ((rank, local.numel(), local.shape) for rank, local in ranks.items())
    whole: Tensor = LocalTensor(
        {rank: reduced[rank].view(-1)[:count].reshape(shape) for rank, count, shape in shapes}
    )
    return whole


def _pad(local: Tensor, length: int) -> Tensor:
    flat = local.reshape(-1)
    if flat.is_complex():
        flat = flat.resolve_conj()
    return torch.cat([flat.resolve_neg(), flat.new_zeros(length - flat.numel())])


def _wrap_pending(result: torch.Tensor) -> torch.Tensor:
    """The result as torch's executor expects it: its first use waits for it. Torch wraps results by
    an operator, which only autograd needs and which costs as much as a call of a collective.
    """
    if result.requires_grad:
        return maybe_wrap_tensor(result)
    return AsyncCollectiveTensor(result)


def unplanned_calls(
    mesh: DeviceMesh,
    layout: Layout,
    src: Sequence[Placement],
    dst: Sequence[Placement],
) -> list[tuple[GroupCalls, str]]:
    """The counter and the lane of each reduction of a redistribution without a plan."""
    axes: dict[str, list[int]] = {}
    for axis, (before, after) in enumerate(zip(src, dst, strict=True)):
        if type(before) is Partial and not after.is_partial() and mesh.size(axis) > 1:
            # One reduction adds all that is summed or averaged.
            op = "sum" if before.reduce_op == "avg" else before.reduce_op
            axes.setdefault(op, []).append(axis)
    if mesh.get_coordinate() is None or local_tensor_mode() is not None:
        return []
    beside, lane = is_worker_thread(), _lane(mesh, is_worker_thread())
    orders = [layout.group_of(this_rank(), chosen) for chosen in axes.values()]
    return [
        (calls_of(*map(mesh.get_group, chosen), order=order, beside=beside), lane)
        for chosen, order in zip(axes.values(), orders, strict=True)
    ]


def _lane(mesh: DeviceMesh, beside: bool) -> str:
    """Worker threads count apart from the main thread: they have an order of their own."""
    return f"{mesh.device_type} of threads" if beside else mesh.device_type


@dataclass(slots=True, eq=False)
class _MeshGroups:
    """A planned reduction over the groups of one mesh, for one kind of thread."""

    mesh: weakref.ref[DeviceMesh]  # of the last call; slices of a mesh are new objects
    thread: int
    calls: GroupCalls  # counts its calls
    lane: str
    bound: BoundReduction | None = None  # from the first call on


class PlannedPartial(PartialHooks):
    """A ``Partial`` whose reduction over several axes was planned as one step. It does not hold the
    mesh, which comes with each call, and is equal to itself only.
    """

    step: Step
    axes: tuple[int, ...]  # that it finishes, those of size 1 included
    _layout: Layout
    _config: Config
    asked: str
    # Of the last call. Equal meshes share a carrier, but no groups: see ``_known``.
    _last: _MeshGroups | None
    _known: dict[tuple[GroupCalls, bool], _MeshGroups]

    def __init__(
        self,
        step: Step,
        layout: Layout,
        asked: str,
        config: Config,
        axes: tuple[int, ...],
    ) -> None:
        super().__init__(step.op)
        # Torch's placements are frozen dataclasses.
        for name, value in (
            ("step", step),
            ("axes", axes),
            ("_layout", layout),
            ("_config", config),
            ("asked", asked),
            ("_last", None),
            ("_known", {}),
        ):
            object.__setattr__(self, name, value)

    @never_compiled
    def reduce_value(self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        if dispatch_modes() and is_counted():
            kind, op, shape = self.step.kind, self.step.op or "", tuple(tensor.shape)
            again = partial(self.reduce_value, tensor, mesh, mesh_dim)
            return run_as_one(again, kind, op, shape, tensor.dtype, self._any_group)
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        found = self._last
        if found is None or found.mesh() is not mesh or found.thread != get_ident():
            found = self._groups_of(mesh)
        if tensor.is_meta:
            # Peers reduce in this call, and must not pair it with this rank's next one.
            found.calls.take(found.lane)
            check_data(tensor, "the local tensor")
        traced = is_traced(tensor)
        if traced:
            # What torch traces takes its ticket when it runs; simulated ranks compare none.
            result = self._reduce(tensor, mesh, found, True, None)
        else:
            with found.calls.take(found.lane) as ticket:
                result = self._reduce(tensor, mesh, found, False, ticket)
        # Last, as the sign for the executor's loop that this reduction has run.
        note_reduction(self)
        return result if traced else _wrap_pending(result)

    def _groups_of(self, mesh: DeviceMesh) -> _MeshGroups:
        """The groups of ``mesh``, by identity: equal meshes may have others."""
        axes = self.step.axes
        beside = is_worker_thread()
        calls = calls_of(*map(mesh.get_group, axes), order=self._members(), beside=beside)
        found = self._known.get((calls, beside))
        if found is None:
            found = _MeshGroups(weakref.ref(mesh), get_ident(), calls, _lane(mesh, beside))
            if len(self._known) >= MAX_MESHES:
                self._known.clear()
            self._known[calls, beside] = found
        found.mesh, found.thread = weakref.ref(mesh), get_ident()
        object.__setattr__(self, "_last", found)
        return found

    def _reduce(
        self,
        tensor: torch.Tensor,
        mesh: DeviceMesh,
        found: _MeshGroups,
        traced: bool,
        ticket: Ticket | None,
    ) -> torch.Tensor:
        # Groups may have been destroyed since the last call, by the user or by ``shutdown``.
        bound, config = found.bound, self._config
        groups = None if bound is None else bound.groups()
        if bound is None or groups is None:
            bound, groups = self._bind(mesh, found, 0 if ticket is None else ticket.number)
        else:
            for handle in bound.handles:
                # Both conditions are rare, and a call costs more than the rest of this loop.
                if handle.known.lent or _threads.in_place:
                    _threads.check_turn(handle.known, lent=handle.known.lent)
        # Agreement rounds of ``debug`` and of audits.
        if config.debug and not torch.compiler.is_compiling():
            self._compare(tensor, mesh, bound)
        audit = 0 if config.audit is None else bound.next_audit(tensor, groups)
        if audit:
            self._compare(tensor, mesh, bound, f"of call {audit}")
        reduce = bound.start
        if isinstance(tensor, LocalTensor):
            reduce = partial(reduce_simulated, bound.start)
        return reduce(
            tensor,
            groups,
            audit=audit,
            traced=traced,
            ticket=NO_TICKET if ticket is None else ticket.word,
            calls=found.calls.name,
        )

    def _any_group(self) -> ProcessGroup:
        bound = None if self._last is None else self._last.bound
        pg = None if bound is None else bound.handles[0].process_group()
        assert pg is not None
        return pg

    def _bind(
        self, mesh: DeviceMesh, found: _MeshGroups, call: int
    ) -> tuple[BoundReduction, StepGroups]:
        """Find or create the groups of the step. The first use of a group is an agreement round."""
        step, config = self.step, self._config
        wait = config.timeout
        how: dict[str, Any] = {"token": config.token, "timeout": wait, "call": call}
        with first_use(default_timeout(mesh.device_type) if wait is None else wait):
            if step.inner > 1:
                # Several inner groups take part in one reduction, so all their members agree first.
                registry().meet(mesh, self._layout, step.axes, **how)
            # Every rank creates groups in one order; otherwise two ranks could wait for each other.
            peers: Sharing = "never"
            if step.path == "exchange" and step.inner == 1:
                peers = config.sharing(mesh.device_type)
            find = partial(registry().get, mesh, self._layout)
            groups = [find(step.axes, block=one, peers=peers, **how) for one in self._blocks()]
            if step.gather_axes:
                # Other ranks, who count no calls of this group.
                groups.append(find(step.gather_axes, **how | {"call": 0}))
        purpose = Purpose(self.asked, step.line(self._layout), self._text(groups))
        found.bound = bound = BoundReduction(
            step,
            purpose,
            [registry().handle(group) for group in groups],
            path=config.path,
            strict=config.strict,
            audit=config.audit,
            ranks=self._members,
        )
        pgs = bound.groups()
        assert pgs is not None
        return bound, pgs

    def _compare(
        self,
        tensor: torch.Tensor,
        mesh: DeviceMesh,
        bound: BoundReduction,
        more: str = "",
    ) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        contract = self.step.contract
        mine = Record.of(
            tensor=f"{dtype}{list(tensor.shape)}",
            call=self.asked,
            step=self.step.brief(self._layout),
            contract=contract and contract.id,
            audit=more or None,
        )
        for handle in bound.handles:
            registry().compare(handle.known, mesh.device_type, mine)

    def _blocks(self) -> tuple[Block | None, ...]:
        """The blocks of the groups that reduce; ``None`` for the whole group."""
        inner = self.step.inner
        return (None,) if inner == 1 else (Block("inner", inner), Block("outer", inner))

    def _members(self) -> tuple[int, ...]:
        return self._layout.group_of(this_rank(), self.step.axes) or ()

    def _text(self, groups: Sequence[Group]) -> str:
        roles = [f"{block.kind} " if block else "" for block in self._blocks()]
        roles += ["gathered on "] if self.step.gather_axes else []
        return "; ".join(f"{role}{group}" for role, group in zip(roles, groups, strict=True))

    def reduce_shard_value(
        self,
        tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        shard_spec: Placement,
    ) -> torch.Tensor:
        raise AssertionError("to torch a planned reduction ends in Replicate; see ScatteredShard")

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __repr__(self) -> str:
        return f"PlannedPartial({self.step.line(self._layout)})"

    def __str__(self) -> str:
        return f"Planned({self.reduce_op})"


# The seam returns steps and does not see their execution. An executor that skips a planned one
# would return each rank's summand instead of the sum, without an error. Two checks prevent that:
#
# * The list of steps watches the executor's loop (``TrackedSteps``). When that asks for the step
#   after a reduction, the reduction must have returned.
# * If the executor never started its loop, the next redistribution of the thread raises
#   (``check_last_plan``).
#
# Plans for other callers, such as cost models, are not tracked.

_RETURNS = ("RETURN_VALUE", "RETURN_CONST")


class ThreadState:
    """The state of one thread. Every redistribution finds all of it by one look-up."""

    __slots__ = ("decisions", "falls_through", "reduced", "waiting", "world")

    def __init__(self) -> None:
        self.reduced: object = None  # the carrier whose reduction returned last
        # The caller of the seam and the request, until the executor starts on the plan.
        self.waiting: tuple[FrameType, str] | None = None
        self.decisions: dict[int, Any] = {}  # by the identity of torch's list of steps
        # A reference to the default group for whose rank torch has cached this thread's steps.
        self.world: Any = None
        # The frame and its code, while reductions are counted.
        self.falls_through: tuple[int, CodeType] | None = None
        # The seam reads torch's tracing context in every redistribution. In a thread that never
        # traced, the attribute is missing, and the look-up is slower than reading None. Entering
        # an empty context once leaves None behind.
        if TracingContext.try_get() is None:
            with tracing(None):
                pass


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()


THREAD = _Thread()


class TrackedSteps(list[Any]):
    """The steps of a plan, whose iteration by the executor checks each planned reduction. The state
    of a run is in its iterator and thread, so the seam can return one list many times.
    """

    def __init__(self, steps: list[Any], carriers: list[Any], executor: CodeType) -> None:
        super().__init__(steps)
        self.executor = executor
        self.asked: str = carriers[0].asked
        sources = [step.src_dst_placements[0] for step in steps]
        self._carriers = [one if any(one is c for c in carriers) else None for one in sources]

    @never_compiled
    def __iter__(self) -> Iterator[Any]:
        # Torch's debug mode iterates over the list too, to print it: only the executor counts.
        if sys._getframe(1).f_code is not self.executor:
            return super().__iter__()
        state = THREAD.state
        state.waiting = None
        return self._run(state)

    def _run(self, state: ThreadState) -> Iterator[Any]:
        for step, carrier in zip(super().__iter__(), self._carriers, strict=True):
            if carrier is None:
                yield step
                continue
            state.reduced = None
            yield step
            # The executor asks for the next step: it must have called the carrier, which notes it.
            # Redistributions inside the reduction run before, and the carrier notes itself last.
            if state.reduced is not carrier:
                raise _not_run(carrier.asked)
            state.reduced = None


def track_steps(steps: list[Any], carriers: list[Any], caller: FrameType) -> list[Any]:
    if not carriers or not _is_executor(caller):
        return steps
    tracked = TrackedSteps(steps, carriers, caller.f_code)
    THREAD.state.waiting = (caller, tracked.asked)
    return tracked


def flattened_step(**values: Any) -> Any:
    """A step of torch's flattened class, with a weak reference to its mesh, which a cached step
    must not keep alive. ``values`` are the fields of torch's class.
    """
    return _flattened_step_class()(**values)


@cache
def _flattened_step_class() -> Any:
    # Made at first use: a torch without the class must fail in ``install``, not at import.
    class FlattenedStep(FlattenedTransformInfo):
        def __init__(self, *, mesh: DeviceMesh, **values: Any) -> None:
            whole = FlattenedTransformInfo(mesh=mesh, **values)
            # Torch's class is a frozen dataclass.
            for name in {field.name for field in fields(whole)} - {"mesh"}:
                object.__setattr__(self, name, getattr(whole, name))
            object.__setattr__(self, "held", weakref.ref(mesh))

        @property
        def mesh(self) -> DeviceMesh:
            # Alive: the caller that runs the step holds the mesh.
            found: DeviceMesh = self.held()  # type: ignore[attr-defined]
            return found

    return FlattenedStep


def note_reduction(carrier: object) -> None:
    state = THREAD.state
    state.reduced = carrier
    state.waiting = None


def check_last_plan(state: ThreadState) -> None:
    """Check that torch has started on the last plan of this thread when another redistribution
    starts: that is nested in the first one; or the first one has raised, which is its own error; or
    it has returned without its loop.
    """
    assert state.waiting is not None
    frame, asked = state.waiting
    running = sys._getframe(1)
    while running is not None and running is not frame:
        running = running.f_back  # type: ignore[assignment]
    if running is frame:
        return
    state.waiting = None
    # A frame that was left by an exception stops at the instruction that raised.
    if dis.opname[frame.f_code.co_code[frame.f_lasti]] in _RETURNS:
        raise _not_run(asked)


def _is_executor(caller: FrameType) -> bool:
    """Whether the frame runs torch's executor, or a replacement of it."""
    return (
        caller.f_code.co_name == EXECUTOR
        or caller.f_globals is vars(redistribute_module)
        or caller.f_code is getattr(getattr(redistribute_module, EXECUTOR, None), "__code__", None)
    )


def _not_run(asked: str) -> PlanNotRunError:
    return PlanNotRunError(
        f"torch was given the plan of {asked} and has not run its reduction. Do not use the "
        f"result, which is not reduced; undo whatever replaced {redistribute_module.__name__}."
        f"{EXECUTOR} since meshplan.install, or use a tested torch version"
    )
