"""Run one planned reduction on one tensor. Only the path is left: ``BoundReduction`` chooses it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._calls import NO_TICKET, THIS_THREAD, check_aborted, take_named
from meshplan._dtypes import name_of
from meshplan._observing import OBSERVING, Extent, Source, count_contract, within
from meshplan._spans import span
from meshplan._torch import dispatch_modes, profiler_enabled
from meshplan._torch import functional_operators as _ops
from meshplan.errors import GroupStateError
from meshplan.execute import _audit
from meshplan.execute._choose import (
    BY_SIZE,
    ChosenPath,
    PathRequest,
    check_fallback,
    choose,
)
from meshplan.execute._deferred import DeferredWire
from meshplan.execute._failures import raise_failure
from meshplan.execute._gloo import GlooWire, is_gloo
from meshplan.execute._graph import define_operator, trace_reduction
from meshplan.execute._groups import StepGroups
from meshplan.execute._header import Header, tensor_header
from meshplan.execute._provenance import MAX_RECORDS, Event, Purpose, record
from meshplan.execute._shards import select_shard
from meshplan.execute._wire import Wire, is_captured, is_traced
from meshplan.execute.paths import Outcome, Path, get_path
from meshplan.execute.paths._shared_memory import SharedMemoryPath
from meshplan.flatten import GroupHandle
from meshplan.kernel import large_pages
from meshplan.planner import Step

_Result = TypeVar("_Result")
_SMALLEST_SUBNORMAL = math.ulp(0.0)
_PLAIN = (Tensor, torch.nn.Parameter)

# Counted reductions of one group. Beyond it the group's counts start again. That happens with the
# same call on all its ranks, because all of them have called the same reductions.
MAX_REDUCTIONS = 4096
_Counts = dict[str, dict[tuple[str, str], int]]
_COUNTS: WeakKeyDictionary[Any, _Counts] = WeakKeyDictionary()
_LOCK = threading.Lock()


class BoundReduction:
    """The decisions of all ranks about a reduction over some groups: for each dtype, shape and
    device, the path. It keeps no process group and no tensor alive; ``handles`` find the groups.
    """

    __slots__ = (
        "_chosen",
        "_ranks",
        "audit",
        "handles",
        "path",
        "purpose",
        "step",
        "strict",
    )

    def __init__(
        self,
        step: Step,  # an ``all_reduce`` or ``reduce_scatter``
        purpose: Purpose,
        handles: Sequence[GroupHandle] = (),  # of the groups that reduce, and of the one to gather
        *,
        path: str = "exchange",  # one of ``PATHS``, for a step that is planned as an exchange
        strict: bool = False,  # raise FallbackRefusedError instead of a fallback
        audit: int | None = None,  # compare the first and then every so many calls
        ranks: Callable[[], tuple[int, ...]] | None = None,  # as in ``StepGroups``
    ) -> None:
        self.step = step
        self.purpose = purpose
        self.handles = handles
        self._ranks = ranks
        self.path = path
        self.strict = strict
        self.audit = audit
        self._chosen: dict[tuple[Any, ...], ChosenPath] = {}

    def groups(self) -> StepGroups | None:
        """The groups, or ``None`` if one was destroyed, by the user or by ``shutdown``."""
        pgs = []
        for handle in self.handles:
            pg = handle.process_group()
            if pg is None:
                return None
            pgs.append(pg)
        levels = 1 if self.step.inner == 1 else 2
        gather = pgs[levels] if len(pgs) > levels else None
        if levels == 2:
            return StepGroups(None, pgs[0], pgs[1], gather, ranks=self._ranks)
        first = self.handles[0].known
        return StepGroups(pgs[0], gather=gather, peers=first.peers, no_peers=first.no_peers)

    def next_audit(self, tensor: Tensor, groups: StepGroups) -> int:
        """Count a call. Returns its number, the same on all ranks, if it is to be audited; else
        0.
        """
        if self.audit is None or self.step.contract is None or is_traced(tensor):
            return 0
        # The "fake" backend sends nothing, so there are no summands to gather.
        if any(dist.get_backend(group) == "fake" for group in groups.levels):
            return 0
        call = next_call(groups, self.purpose)
        return 0 if (call - 1) % self.audit else call

    def start(
        self,
        tensor: Tensor,  # this rank's summand, any strides; left as it is
        groups: StepGroups,
        *,
        audit: int = 0,  # the number of an audited call, the same on all ranks; 0: no audit
        traced: bool | None = None,  # ``is_traced(tensor)``, where the caller has called it
        ticket: int = NO_TICKET,  # the word of the call, which ranks compare
        calls: str = "",  # the name by which a traced reduction takes a ticket when it runs
        written: Sequence[Tensor] = (),  # that the caller overwrites with an all-reduce
    ) -> Tensor:
        """Reduce ``tensor``: the result or this rank's shard, contiguous. Its last collective may
        be under way on GPUs and by path ``native``: ``wait_tensor`` waits for it (where torch
        traces, the graph does). Later errors are then the backend's own; others are those of
        ``raise_failure``, on every rank that was in the reduction.
        """
        started = time.perf_counter()
        step, purpose = self.step, self.purpose
        assert step.op is not None
        if traced is None:
            traced = is_traced(tensor)
        chosen = self._choose(tensor, groups, traced)
        if chosen.direct is not None:
            directly = self._run_directly(tensor, groups, ticket, written)
            if directly is not None:
                return directly
        summand = _summand(tensor, chosen.pairs, step)
        in_contract = chosen.path.in_contract and step.contract
        run = partial(_reduced, summand, step, groups, chosen, traced, ticket, calls)
        if OBSERVING.observer is not None:
            native: Extent = "fallback" if chosen.fallback else "native"
            run = partial(within, "counted" if in_contract else native, run)
        if not traced:
            run = partial(_guarded, run, groups, tensor.device.type, purpose)
        if not traced and (profiler_enabled() or torch.cuda.is_initialized()):
            with span(step.kind, step.op, chosen.path.reported_name):
                reduced = run()
        else:
            reduced = run()
        result = reduced.tensor
        # A graph keeps each wait, even one whose result is unused, such as backward's copies. So
        # only a pending result is waited for.
        if reduced.pending and (step.norm is not None or traced):
            result = _ops.wait_tensor(result)
        if step.norm is not None:
            result = result ** (1.0 / step.norm)
        if chosen.pairs:
            result = torch.view_as_complex(result)
        names = tuple(reduced.log.names)
        event = chosen.events.get(names) or self._event(chosen, names, tensor, traced, groups)
        seconds = time.perf_counter() - started
        # Reductions outside the contract and empty tensors are never compared.
        audits, error = bool(audit and in_contract) and summand.numel() > 0, None
        if audits:
            error = _audit.audit(
                summand,
                reduced.tensor,
                step,
                groups,
                request=purpose.request,
                path=chosen.path.reported_name,
                dtype=tensor.dtype,
                call=audit,
            )
        # The size of a traced tensor may be a symbol: to compare it would add a guard to the graph.
        elements, nbytes = (None, 0) if traced else (tensor.numel(), tensor.nbytes)
        record(event, elements, nbytes, seconds, audits, groups, written)
        if error is not None:
            # All ranks raise it: the audit has the same result on each.
            raise error
        return result

    def run(
        self,
        tensor: Tensor,
        groups: StepGroups,
        ticket: int,
        traced: bool | None = None,
        written: Sequence[Tensor] = (),
    ) -> Tensor:
        """As ``start``, waited for; counts the call, and audits it where that is its turn."""
        if traced is None:
            traced = is_traced(tensor)
        result = None if traced else self._run_directly(tensor, groups, ticket, written)
        if result is None:
            how: dict[str, Any] = {"traced": traced, "ticket": ticket, "written": written}
            audit = self.next_audit(tensor, groups)
            pending = self.start(tensor.detach(), groups, audit=audit, **how)
            result = _ops.wait_tensor(pending)
        return result

    def _run_directly(
        self,
        tensor: Tensor,
        groups: StepGroups,
        ticket: int,
        written: Sequence[Tensor],
    ) -> Tensor | None:
        """Reduce without operators. ``None``, with nothing done, if a reduction is more than the
        kernel's call, or if operators are watched.
        """
        started, direct = time.perf_counter(), self._find_direct(tensor)
        if direct is None or not is_plain_memory(tensor) or is_watched():
            return None
        # A failed call fills it, and leaves the caller's tensor as it is.
        if self.step.lengths and not self.step.leaves:
            length = self.step.lengths[groups.position]
            out = tensor.new_empty((length, *tensor.shape[1:]))
        else:
            out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        # Inside a transformation, such as grad, what is made is a wrapper.
        if not is_plain_memory(out):
            return None
        kernel, event = direct
        run = partial(kernel, tensor, large_pages(out), ticket)
        _guarded(run, groups, "cpu", self.purpose)
        seconds = time.perf_counter() - started
        record(event, tensor.numel(), tensor.nbytes, seconds, False, groups, written)
        return out

    def run_into(self, message: Tensor, out: Tensor, ticket: int) -> bool:
        """Reduce ``message`` into ``out``, of the same dtype, which may be the same tensor; both
        are contiguous, and nothing is traced. Returns False, with nothing done, if the groups are
        gone. Raises as ``start``; ``out`` may then hold NaN (or all ones).
        """
        pg = self.handles[0].process_group()
        if pg is None:
            return False
        written = (out,) if self.step.kind == "all_reduce" else ()
        direct = self._find_direct(message)
        if direct is None:
            groups = self.groups()
            if groups is None:
                return False
            with torch.inference_mode(out.is_inference()), torch.no_grad():
                result = self.run(message, groups, ticket, traced=False, written=written)
                # Whoever reads the version of ``out`` has seen it rise when the call was issued.
                out.data.copy_(result.view(out.shape))
            return True
        started, (kernel, event) = time.perf_counter(), direct
        try:
            kernel(message, out, ticket)
        except RuntimeError as error:
            raise_failure(error, StepGroups(pg), "cpu", self.purpose, started)
        seconds = time.perf_counter() - started
        record(event, message.numel(), message.nbytes, seconds, False, pg, written)
        return True

    def _choose(self, tensor: Tensor, groups: StepGroups, traced: bool) -> ChosenPath:
        # A graph is made once, and its sizes may be symbols.
        key = tensor.device, tensor.dtype, tensor.shape
        chosen = None if traced else self._chosen.get(key)
        if chosen is None:
            over_gloo = is_gloo(tensor.device.type, groups)
            captured = traced and is_captured(tensor)
            how = self.path, traced, captured, over_gloo, self.strict
            request = PathRequest(self.step, groups, tensor, *how)
            chosen = choose(request)
            check_fallback(chosen, request, self.purpose.request)
            if not traced:
                if len(self._chosen) >= MAX_RECORDS:
                    self._chosen.clear()
                self._chosen[key] = chosen
        return chosen

    def _find_direct(self, tensor: Tensor) -> tuple[Callable[..., None], Event] | None:
        chosen = self._chosen.get((tensor.device, tensor.dtype, tensor.shape))
        # The ordinary way refuses a thread that flushes subnormal numbers, and leaves the summand
        # for ``keep``.
        flushes = _SMALLEST_SUBNORMAL * 1.0 == 0.0
        return None if chosen is None or flushes or OBSERVING.keep is not None else chosen.direct

    def _event(
        self,
        chosen: ChosenPath,
        collectives: tuple[str, ...],
        tensor: Tensor,
        traced: bool,
        groups: StepGroups,
    ) -> Event:
        step, purpose, why = self.step, self.purpose, chosen.why
        contract = step.contract if chosen.path.in_contract else None
        if not collectives:
            empty = not traced and tensor.numel() == 0
            why += "; no elements, so nothing was sent" if empty else "; the path issued nothing"
        event = chosen.events[collectives] = Event(
            purpose.request,
            purpose.planned,
            chosen.path.reported_name,
            collectives,
            purpose.group,
            name_of(tensor.dtype),
            why,
            fallback=chosen.fallback,
            kind=purpose.kind,
            path=self.path,
            contract=contract.id if contract else None,
            ranks=math.prod(step.sizes),
            traced=traced,
        )
        path, peers, chosen.direct = chosen.path, groups.peers, None
        is_plain = step.norm is None and self.audit is None and not (traced or chosen.pairs)
        if not (is_plain and isinstance(path, SharedMemoryPath) and peers and tensor.is_cpu):
            return event
        # The parts of a message are blocks of it where its first dim is split among all ranks.
        in_blocks = step.scatter == (((0, 0),) if len(step.lengths) == peers.size else ())
        if in_blocks and collectives == path.collectives:
            kernel = path.prepare(tuple(tensor.shape), tensor.dtype, step, peers)
            chosen.direct = kernel, event
        return event


def is_watched() -> bool:
    """Whether operators and spans are observed: by modes, by torch's profiler, or by Nsight."""
    on_cuda: bool = torch.cuda.is_initialized()
    return bool(dispatch_modes()) or profiler_enabled() or on_cuda


def is_plain_memory(tensor: Tensor) -> bool:
    """Whether the kernel can read and write the memory of ``tensor`` as its elements."""
    if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    if tensor.is_neg() or tensor.is_conj() or not tensor.is_contiguous():
        return False
    try:
        # None of torch's zeros without memory, and no wrapper of a transformation.
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


def run_reduction(
    tensor: Tensor, step: Step, groups: StepGroups, *, purpose: Purpose, **how: Any
) -> Tensor:
    return BoundReduction(step, purpose, **how).start(tensor, groups)


def next_call(groups: StepGroups, purpose: Purpose) -> int:
    """Count one call of a reduction over ``groups``; the first is 1."""
    owner = groups.levels[0] if groups.peers is None else groups.peers
    with _LOCK:
        # A hierarchical step runs on two groups, and its text names both. Counts are kept by that
        # text: ranks that share one of the two groups need not share the other.
        counts = _COUNTS.setdefault(owner, {}).setdefault(purpose.group, {})
        key = (purpose.request, purpose.planned)
        if key not in counts and len(counts) >= MAX_REDUCTIONS:
            counts.clear()
        counts[key] = counts.get(key, 0) + 1
        return counts[key]


# The thread that is in a reduction, by process group. Each call creates a list, whose identity
# distinguishes it from other calls, also of the same thread. ``setdefault`` is atomic.
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
                    f"thread {mine[0].name!r} called a reduction over {purpose.group} while "
                    f"thread {owner[0].name!r} is in one: ranks pair their calls in order, "
                    "and threads have no order in common; reduce over one mesh on one thread, or "
                    "give each thread a mesh of its own"
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
    """Compare the headers of all ranks over gloo, for a collective outside planned reductions.
    Raises SignatureMismatchError on every rank if two headers differ. Returns the collectives
    issued: none on other backends, and none where torch traces.
    """
    groups = StepGroups(group)
    if is_traced(tensor) or not is_gloo(tensor.device.type, groups):
        return ()
    wire = GlooWire(groups, (groups.rank, header), ticket)
    _guarded(wire.compare, groups, tensor.device.type, purpose)
    return tuple(wire.log.names)


def _summand(tensor: Tensor, pairs: bool, step: Step) -> Tensor:
    # Real and imaginary parts are two elements. A dtype outside the contract runs on the backend's
    # own all-reduce, which the report shows as a fallback.
    found = torch.view_as_real(tensor.resolve_conj()) if pairs else tensor.resolve_neg()
    return found if step.norm is None else found**step.norm


def _reduced(
    summand: Tensor,
    step: Step,
    groups: StepGroups,
    chosen: ChosenPath,
    traced: bool,
    ticket: int,
    calls: str,
) -> Outcome:
    path, step = chosen.path, chosen.step
    if traced and chosen.over_gloo:
        return trace_reduction(summand, step, groups, path, chosen.pairs, calls)
    wire: Wire
    if chosen.over_gloo or chosen.deferred:
        header = chosen.header
        if header is None:
            words = tensor_header(summand, step, path.reported_name, chosen.pairs)
            header = chosen.header = groups.rank, words
        if chosen.over_gloo:
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
        reduced = Outcome(_ops.wait_tensor(reduced.tensor), reduced.log)
    if (keep := OBSERVING.keep) is not None and path.in_contract and not traced:
        # To wait for a pending result here would let its caller's stream go on without it.
        keep(step, groups, summand, None if reduced.pending else reduced.tensor)
    return reduced


def _in_graph(
    summand: Tensor,
    step: Step,
    groups: StepGroups,
    name: str,
    is_complex: bool,
    calls: str,
) -> Outcome:
    names = [path.name for path in BY_SIZE]
    if name in names:
        request = PathRequest(
            step,
            groups,
            summand,
            "auto",
            over_gloo=True,
            strict=bool(names.index(name)),
        )
        chosen = choose(request)
        path, step = chosen.path, chosen.step
    else:
        path = get_path(name)
    summand = summand.detach()
    header = groups.rank, tensor_header(summand, step, path.reported_name, is_complex)
    if not calls:
        return _run_counted(summand, step, groups, path, GlooWire(groups, header))
    with take_named(calls, summand.device.type) as ticket:
        return _run_counted(summand, step, groups, path, GlooWire(groups, header, ticket.word))


def _run_counted(
    summand: Tensor, step: Step, groups: StepGroups, path: Path, wire: Wire
) -> Outcome:
    if OBSERVING.observer is None:
        return _run_path(path, summand, step, groups, wire)
    started, in_contract = time.perf_counter(), path.in_contract
    run = partial(_run_path, path, summand, step, groups, wire)
    reduced = within("counted" if in_contract else "native", run)
    if in_contract:
        what = f"{step.kind} {step.op} of a compiled graph"
        ranks, seconds = math.prod(step.sizes), time.perf_counter() - started
        source = Source(groups, (), step.contract.id if step.contract else None)
        count_contract(what, name_of(summand.dtype), ranks, summand.nbytes, seconds, source)
    return reduced


def _run_path(path: Path, summand: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
    if isinstance(wire, GlooWire) and summand.device.type != "cpu":
        reduced = _run_path(path, summand.cpu(), step, groups, wire)
        return Outcome(_ops.wait_tensor(reduced.tensor).to(summand.device), wire.log)
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


define_operator(_in_graph)
