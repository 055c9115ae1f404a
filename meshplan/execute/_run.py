"""Run one planned reduction on one tensor. The only choice left is the path; ``BoundReduction`` has
made that, too.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._aborts import THIS_THREAD, check_aborted
from meshplan._calls import NO_TICKET, take_named
from meshplan._dtypes import name_of
from meshplan._observing import OBSERVING, count_contract, within
from meshplan._spans import span
from meshplan._torch import functional_operators as _ops
from meshplan._torch import profiler_enabled
from meshplan.errors import GroupStateError
from meshplan.execute import _audit
from meshplan.execute._choose import BY_SIZE
from meshplan.execute._deferred import DeferredWire
from meshplan.execute._failures import raise_failure
from meshplan.execute._gloo import GlooWire
from meshplan.execute._gloo_groups import is_gloo
from meshplan.execute._graph import define_operators, trace_reduction
from meshplan.execute._groups import StepGroups
from meshplan.execute._header import Header, RankHeader, tensor_header
from meshplan.execute._prepared import PreparedReduction
from meshplan.execute._provenance import MAX_RECORDS, Event, Purpose, record
from meshplan.execute._shards import select_shard
from meshplan.execute._wire import Wire, is_traced
from meshplan.execute.paths import Outcome, Path, get_path
from meshplan.execute.paths import _path as registry
from meshplan.execute.paths._shared_memory import SharedMemoryPath
from meshplan.flatten import GroupHandle
from meshplan.planner import Step

_Result = TypeVar("_Result")
_SMALLEST_SUBNORMAL = math.ulp(0.0)
_Kernel = tuple[Callable[[Tensor, Tensor, int], None], Event, bool, int]


def run_reduction(
    tensor: Tensor,  # this rank's summand, any strides; left as it is
    step: Step,  # an ``all_reduce`` or ``reduce_scatter``
    groups: StepGroups,
    *,
    purpose: Purpose,
    path: str = "exchange",  # one of ``PATHS``, for a step that is planned as an exchange
    strict: bool = False,  # raise FallbackRefusedError instead of a fallback
    # For path ``auto``: always or never one-shot; ``None``: the faster.
    one_shot: bool | None = None,
    audit: int = 0,  # the number of an audited call, the same on all ranks; 0: no audit
    traced: bool | None = None,  # ``is_traced(tensor)``, where the caller has called it
    ticket: int = NO_TICKET,  # the word of the call, which ranks compare
    calls: str = "",  # the name by which a traced reduction takes a ticket when it runs
) -> Tensor:
    """Reduce ``tensor`` over ``groups`` as in ``step``: the result or this rank's shard,
    contiguous. Its last collective may be under way on GPUs and by path ``native``: ``wait_tensor``
    waits for it (where torch traces, the graph does). Later errors are then the backend's own;
    others are those of ``raise_failure``, on every rank that was in the reduction.
    """
    assert step.op is not None
    started = time.perf_counter()
    if traced is None:
        traced = is_traced(tensor)
    found = prepare_reduction(tensor, step, groups, purpose, path, strict, one_shot, traced)
    # Real and imaginary parts are two elements. A dtype outside the contract runs on the backend's
    # own all-reduce, which the report shows as a fallback.
    summand = torch.view_as_real(tensor.resolve_conj()) if found.pairs else tensor.resolve_neg()
    if step.norm is not None:
        summand = summand**step.norm
    run = partial(_reduced, summand, step, groups, found, traced, ticket, calls)
    chosen = found.ran
    if OBSERVING.observer is not None:
        run = partial(within, found.extent, run)
    if traced:
        reduced = run()
    elif profiler_enabled() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with span(step.kind, step.op, chosen):
            reduced = _guarded(run, groups, tensor.device.type, purpose)
    else:
        reduced = _guarded(run, groups, tensor.device.type, purpose)
    result = reduced.tensor
    # A graph keeps each wait, even one whose result is unused, such as backward's copies. So only
    # a pending result is waited for.
    if reduced.pending and (step.norm is not None or traced):
        result = _ops.wait_tensor(result)
    if step.norm is not None:
        result = result ** (1.0 / step.norm)
    if found.pairs:
        result = torch.view_as_complex(result)
    names = tuple(reduced.log.names)
    event = found.events.get(names)
    if event is None:
        event = found.events[names] = found.event(purpose, path, names, tensor, step, traced)
    seconds = time.perf_counter() - started
    if traced:
        # A size may be a symbol: to compare it would add a guard to the graph.
        record(event, seconds=seconds)
        return result
    # Reductions outside the contract and empty or traced tensors are never compared.
    audits = bool(audit) and found.contract is not None and summand.numel() > 0
    difference = _audit.audit(summand, reduced.tensor, step, groups) if audits else None
    record(
        event,
        elements=tensor.numel(),
        nbytes=tensor.nbytes,
        seconds=seconds,
        audited=audits,
    )
    if difference is not None:
        # All ranks raise it: the audit has the same result on each.
        raise _audit.audit_error(difference, purpose.request, step, chosen, tensor, audit)
    return result


class BoundReduction:
    """What all ranks have decided once about a reduction over a group. It holds no process group
    and no tensor; ``handle`` finds the group. ``audit``: compare the first and then every so many
    calls. The other arguments are those of ``run_reduction``.
    """

    __slots__ = (
        "_audit",
        "_calls",
        "_how",
        "_kernels",
        "_prepared",
        "handle",
        "purpose",
        "step",
    )

    def __init__(
        self,
        step: Step,
        purpose: Purpose,
        handle: GroupHandle,
        path: str,
        strict: bool,
        one_shot: bool | None,
        audit: int | None,
    ) -> None:
        self.step, self.purpose, self.handle = step, purpose, handle
        self._how, self._audit, self._calls = (path, strict, one_shot), audit, 0
        self._prepared: dict[Any, Any] = {}
        # By dtype and shape: the call, its event, whether it rounds, and the state of the paths;
        # ``None`` where the reduction is more than the call of a kernel.
        self._kernels: dict[tuple[torch.dtype, torch.Size], _Kernel | None] = {}

    def run(
        self, tensor: Tensor, pg: ProcessGroup, ticket: int, traced: bool | None = None
    ) -> Tensor:
        """``run_reduction`` of ``tensor`` over the handle's process group, waited for."""
        # Every call counts, so that all ranks audit the same ones.
        self._calls += 1
        audited = self._audit is not None and (self._calls - 1) % self._audit == 0
        path, strict, one_shot = self._how
        result: Tensor = _ops.wait_tensor(
            run_reduction(
                tensor.detach(),
                self.step,
                self._groups(pg),
                purpose=self.purpose,
                path=path,
                strict=strict,
                one_shot=one_shot,
                audit=self._calls if audited else 0,
                traced=traced,
                ticket=ticket,
            )
        )
        return result

    def run_into(self, message: Tensor, out: Tensor, ticket: int) -> bool:
        """Reduce ``message`` into ``out``, of the same dtype, which may be the same tensor; both
        are contiguous, and nothing is traced. Returns False, with nothing done, where the decisions
        no longer hold. Raises as ``run_reduction``; ``out`` may then hold NaN (or all ones).
        """
        pg = self.handle.process_group()
        if pg is None:
            return False
        key = message.dtype, message.shape
        kernel = self._kernels.get(key)
        if kernel is None:
            with torch.inference_mode(out.is_inference()), torch.no_grad():
                result = self.run(message, pg, ticket, traced=False)
                # Whoever reads the version of ``out`` has seen it rise when the call was issued.
                out.data.copy_(result.view(out.shape))
            if key not in self._kernels:
                self.keep_kernel(message)
            return True
        call, event, rounds, changes = kernel
        if changes != registry.changes or (rounds and _SMALLEST_SUBNORMAL * 1.0 == 0.0):
            # Paths were registered, or this thread flushes subnormal numbers, which the ordinary
            # way refuses. All ranks find the first at the same call; the other concerns no rank.
            return False
        started = time.perf_counter()
        try:
            call(message, out, ticket)
        except RuntimeError as error:
            raise_failure(error, StepGroups(pg), "cpu", self.purpose, started)
        seconds = time.perf_counter() - started
        record(event, elements=message.numel(), nbytes=message.nbytes, seconds=seconds)
        return True

    def keep_kernel(self, tensor: Tensor) -> None:
        """After ``run`` on CPUs: let ``run_into`` call the kernel for tensors of this dtype and
        shape, without operators in between, if ranks share memory for them.
        """
        pg = self.handle.process_group()
        if pg is None:
            return
        if len(self._kernels) >= MAX_RECORDS:
            self._kernels.clear()
        self._kernels[tensor.dtype, tensor.shape] = self._kernel(tensor, self._groups(pg))

    def _kernel(self, tensor: Tensor, groups: StepGroups) -> _Kernel | None:
        found = prepare_reduction(tensor, self.step, groups, self.purpose, *self._how, False)
        peers, path = groups.peers, found.path
        if not isinstance(path, SharedMemoryPath) or peers is None or found.pairs:
            return None
        event = found.events.get(path.collectives)
        if peers.device_type != "cpu" or event is None or self._audit is not None:
            return None
        # The parts of a message are blocks of it where it is flat.
        if self.step.norm is not None or (self.step.scatter and tensor.dim() != 1):
            return None
        call = path.prepare(tuple(tensor.shape), tensor.dtype, self.step, peers)
        rounds = tensor.dtype.is_floating_point and self.step.op not in ("max", "min")
        return call, event, rounds, registry.changes

    def _groups(self, pg: ProcessGroup) -> StepGroups:
        known = self.handle.known
        return StepGroups(pg, peers=known.peers, no_peers=known.no_peers, prepared=self._prepared)


# The thread that is in a reduction, by process group. Each call makes a list of its own, whose
# identity tells it from other calls, also of the same thread. ``setdefault`` is atomic.
_busy: dict[ProcessGroup, list[threading.Thread]] = {}


def _guarded(
    run: Callable[[], _Result], groups: StepGroups, device_type: str, purpose: Purpose
) -> _Result:
    """Run one reduction at a time on a process group; turn a backend's error into ours."""
    started = time.perf_counter()
    mine = [threading.current_thread()]
    taken = []
    try:
        for group in groups.all:
            owner = _busy.setdefault(group, mine)
            if owner is not mine:
                raise GroupStateError(
                    f"thread {mine[0].name!r} came to a reduction over {purpose.group} while "
                    f"thread {owner[0].name!r} is in one: ranks meet in the order of their calls, "
                    "and threads have no order that is the same on all ranks; reduce over one mesh "
                    "on one thread, or give each thread a mesh of its own"
                )
            taken.append(group)
        # An abort ends the waits in memory that it finds, so this comes after they were found.
        if THIS_THREAD.abort is not None:
            check_aborted()
        return run()
    except RuntimeError as error:
        raise_failure(error, groups, device_type, purpose, started)
    finally:
        for group in taken:
            del _busy[group]


def compare_headers(
    tensor: Tensor, group: ProcessGroup, header: Header, purpose: Purpose, ticket: int
) -> tuple[str, ...]:
    """Compare, over gloo, what all ranks bring to a collective that is no planned reduction. Raises
    SignatureMismatchError on every rank if two headers differ. Returns the collectives issued: none
    on other backends, and none where torch traces.
    """
    groups = StepGroups(group)
    if is_traced(tensor) or not is_gloo(tensor, groups):
        return ()
    wire = GlooWire(groups, (groups.rank, header), ticket)
    _guarded(wire.compare, groups, tensor.device.type, purpose)
    return tuple(wire.log.names)


def prepare_reduction(
    tensor: Tensor, step: Step, groups: StepGroups, purpose: Purpose, *how: Any
) -> PreparedReduction:
    """The prepared reduction of these arguments, from the groups' own table if it has one."""
    *_, traced = how
    if traced:
        return PreparedReduction(tensor, step, groups, purpose, *how)
    # By identity: to hash a step and a purpose takes longer than to send a small message. The
    # prepared reduction keeps both alive, so that no others get their identities.
    key = (
        id(step),
        id(purpose),
        tensor.device,
        tensor.dtype,
        tensor.shape,
        how,
        registry.changes,
    )
    found: PreparedReduction | None = groups.prepared.get(key)
    if found is None:
        found = PreparedReduction(tensor, step, groups, purpose, *how)
        if len(groups.prepared) >= MAX_RECORDS:
            groups.prepared.clear()
        groups.prepared[key] = found
    return found


def _reduced(
    summand: Tensor,
    step: Step,
    groups: StepGroups,
    found: PreparedReduction,
    traced: bool,
    ticket: int,
    calls: str,
) -> Outcome:
    """Run the path with the wire of this reduction."""
    path = found.path
    if traced and found.over_gloo:
        return trace_reduction(summand, step, groups, path, found.pairs, calls)
    wire: Wire
    if found.over_gloo or found.deferred:
        header = found.header
        if header is None:
            header = found.header = _header(summand, step, groups, path, found.pairs)
        if found.over_gloo:
            if summand.requires_grad:
                summand = summand.detach()
            wire = GlooWire(groups, header, ticket)
        else:
            wire = DeferredWire(groups, header, summand.device, ticket)
    else:
        # What is traced takes its ticket when it runs.
        wire = Wire(NO_TICKET if traced else ticket, calls)
    reduced = _run_path(path, summand, step, groups, wire)
    if reduced.pending and not traced and not path.asynchronous and summand.device.type == "cpu":
        # Wait here: a later waiter could not name the reduction that has failed. A collective of
        # the backend itself stays asynchronous, as in torch.
        result = _ops.wait_tensor(reduced.tensor)
        return Outcome(result, reduced.log)
    return reduced


def _header(
    summand: Tensor, step: Step, groups: StepGroups, path: Path, is_complex: bool
) -> RankHeader:
    return groups.rank, tensor_header(summand, step, path.reported_name, is_complex)


def _in_graph(
    summand: Tensor,
    step: Step,
    groups: StepGroups,
    name: str,
    is_complex: bool,
    calls: str,
) -> Outcome:
    """Run the reduction of a graph's operator."""
    path = BY_SIZE.now(step, groups, summand) if name == BY_SIZE.name else get_path(name)
    if summand.requires_grad:
        summand = summand.detach()
    header = _header(summand, step, groups, path, is_complex)
    if not calls:
        return _run_counted(summand, step, groups, path, GlooWire(groups, header))
    with take_named(calls, summand.device.type) as ticket:
        return _run_counted(summand, step, groups, path, GlooWire(groups, header, ticket.word))


def _run_counted(
    summand: Tensor, step: Step, groups: StepGroups, path: Path, wire: Wire
) -> Outcome:
    """Run the reduction of a graph, and count it for those who observe."""
    if OBSERVING.observer is None:
        return _run_path(path, summand, step, groups, wire)
    started, in_contract = time.perf_counter(), path.in_contract
    run = partial(_run_path, path, summand, step, groups, wire)
    reduced = within("counted" if in_contract else "native", run)
    if in_contract:
        what = f"{step.kind} {step.op} of a compiled graph"
        ranks, seconds = math.prod(step.sizes), time.perf_counter() - started
        count_contract(what, name_of(summand.dtype), ranks, summand.nbytes, seconds)
    return reduced


def _run_path(path: Path, summand: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
    if summand.numel() == 0 and not path.shares_memory:
        wire.compare()
        shard = select_shard(summand, step, groups.position)
        reduced = Outcome(shard.clone(memory_format=torch.contiguous_format), wire.log)
    elif step.scatter:
        reduced = path.reduce_scatter(summand, step, groups, wire)
    else:
        reduced = path.all_reduce(summand, step, groups, wire)
    assert reduced.log is wire.log, f"path {path.name} returned another list of collectives"
    checked = wire.checked(reduced.tensor)
    return reduced if checked is reduced.tensor else Outcome(checked, wire.log)


define_operators(_in_graph)
