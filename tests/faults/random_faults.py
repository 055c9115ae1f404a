"""Cases of random faults: drawn from a seed, written as a script for each rank, played, collected.

    python -m tests.faults.random_faults SEED ...

plays the cases of these seeds, and prints how each call ended and the verdict.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan.contract import Contract, Op
from meshplan.topology import Link, Links, Topology
from tests import processes
from tests.doors import DOORS, Door, Member, Result, attempt, call_values
from tests.faults.jobs import die

# Seconds: the limit of waits for a rank that does not come; of waits that end soon when all is well,
# which shared memory keeps; and of a case, which hangs beyond it.
SHORT, MEDIUM, HANGS = 3.0, 30.0, 200.0
# Arguments of one rank that are an error before anything is sent; the inner backend of a group of the
# backend has its own word on integers and sparse tensors.
_MISTAKES = ("integers", "sparse", "overlapping")
_MISMATCHES = ("shape", "dtype", "operation", "contract")
FAULTS = (
    "none",
    "late in time",
    *_MISMATCHES,
    *_MISTAKES,
    "integers, retried",
    "late",
    "stopped",
    "killed",
    "killed inside",
    "skipped",
    "reordered",
    "interrupted",
    "threads",
    "late thread",
)
_THREADS = ("threads", "late thread")
# No rank waits for one that does not come.
_PROMPT = ("none", "late in time", *_MISMATCHES, *_THREADS)
_ORDERS = ("tree", "rank", "exact")
_PATHS = ("auto", "exchange", "halving", "reference", "integer", "hierarchical")
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
_FORK = multiprocessing.get_context("fork")
_FAST_NODES = Links(node=Link(1e-7, 1e12), group=0.0)


@dataclass(frozen=True)
class Case:
    """One case; the same on all ranks.

    Attributes:
        seed: that it is drawn from.
        door, path, order, op: of all reductions.
        dtype: of all summands.
        numel: of all summands, but for ``numel_of``.
        topology: of the seam: ``unknown``, ``exchanged`` by the ranks, or ``nodes`` of two.
        world: the number of ranks.
        groups: of all ranks; call n is on group n modulo this, and in threads each has one.
        fault: one of ``FAULTS``.
        odd: the rank that it strikes.
        at: the call that it strikes; each group's first one is below ``groups``.
        retries: a call that fails is made once more, with right arguments.
        backward: the reductions run in backward.
        joined: the main thread waits for the threads sequentially, without a timeout.
        ending: what ends a stop: ``shutdown`` by all ranks, or a new ``group``.
    """

    seed: int
    door: str
    path: str
    order: str
    op: Op
    dtype: str
    numel: int
    topology: str
    world: int
    groups: int
    fault: str
    odd: int
    at: int
    retries: bool
    backward: bool
    joined: bool
    ending: str

    @property
    def calls(self) -> int:
        """The number of calls before the ending, which has one more."""
        return self.at + self.groups + 2

    @property
    def first(self) -> bool:
        """Whether the fault strikes the first reduction of a group."""
        return self.at < self.groups

    @property
    def mismatched(self) -> bool:
        """Whether the odd rank has other arguments in a call that is sent."""
        return self.fault in _MISMATCHES

    @property
    def threads(self) -> bool:
        """Whether each group has a thread of its own."""
        return self.fault in _THREADS

    @property
    def contract(self) -> Contract:
        """Of all reductions."""
        return Contract(self.order)

    @property
    def other_contract(self) -> Contract:
        """Of the odd rank, over the same groups: another order may have no blocks."""
        if self.path == "hierarchical":
            return Contract(self.order, rounding="node")
        return Contract("rank" if self.order != "rank" else "tree")

    def numel_of(self, call: int) -> int:
        """Elements of a call; each call has another number where one rank makes other calls.

        No process group can tell apart calls with the same arguments that one rank leaves out, makes
        in another order, or makes once more.
        """
        return self.numel + call * (self.fault in ("skipped", "reordered", "integers, retried"))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of all summands."""
        return _DTYPES[self.dtype]

    def through(self) -> Door:
        """Its door."""
        topology = {
            "unknown": Topology.unknown(self.world),
            "exchanged": None,
            "nodes": Topology.uniform(self.world, node_size=2, links=_FAST_NODES),
        }
        path = "exchange" if self.path == "hierarchical" else self.path
        return Door(self.door, path, self.contract, topology[self.topology])

    def __str__(self) -> str:
        return " ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self))

    @property
    def reproducer(self) -> str:
        """The command that plays it."""
        return f"python -m tests.faults.random_faults {self.seed}  # {self}"


def draw(seed: int) -> Case:
    """The case of a seed. Every fault, door and order occurs among few consecutive seeds."""
    generator = random.Random(f"faults {seed}")
    # In turn rather than at random: the numbers have no common factor but 3 and 6.
    fault = FAULTS[seed % len(FAULTS)]
    door = DOORS[(seed // len(FAULTS) + seed) % len(DOORS)]
    order = generator.choice(_ORDERS)
    path = generator.choice([path for path in _PATHS if _runs(path, order, door)])
    world = 4 if path == "hierarchical" else generator.choice((2, 2, 3, 3, 5))
    groups = generator.choice((2, 3)) if fault in _THREADS else generator.choice((1, 1, 2))
    dtype = generator.choice(("float32", "float32", "float64", "int64"))
    op: Op = generator.choice(("sum", "sum", "avg", "max"))
    backward = generator.random() < 0.2 and fault not in (*_MISTAKES, "interrupted")
    if backward:
        dtype, op = "float32", "sum"
    if dtype == "int64" and op == "avg":
        op = "sum"
    # The seam reduces out of place, and DTensor refuses sparse tensors.
    if fault in _MISTAKES and door == "seam":
        fault = "integers"
    at = generator.choice((0, 0, 1, 2))
    if fault == "contract" and path == "hierarchical":
        order = "tree"
    # The contract of the backend is its group's: another one shows in the group's first call.
    if fault == "contract" and door == "backend":
        groups, at = 1, 0
    return Case(
        seed=seed,
        door=door,
        path=path,
        order=order,
        op=op,
        dtype=dtype,
        numel=generator.choice((1, 7, 64, 300)),
        topology="nodes" if path == "hierarchical" else generator.choice(("unknown", "exchanged")),
        world=world,
        groups=groups,
        fault=fault,
        odd=generator.randrange(world),
        at=at,
        # In that fault, one rank tries again and the others do not.
        retries=generator.random() < 0.3 and fault != "integers, retried",
        backward=backward,
        joined=generator.random() < 0.5,
        ending=generator.choice(("shutdown", "group")),
    )


def _runs(path: str, order: str, door: str) -> bool:
    if path == "hierarchical":
        return door == "seam" and order != "rank"
    if path == "integer":
        return order == "exact"
    return path != "halving" or order == "tree"


class Step(NamedTuple):
    """What a rank does next.

    Attributes:
        action: ``reduce``, or ``retry`` if that has failed; or a fault, or an event that ranks wait for.
        call: of a reduction.
        how: how its arguments differ, or ``interrupted``.
        name: of an event.
        ranks: that have come to the event, when its wait is over.
        seconds: of a pause, or the limit of later waits.
    """

    action: str
    call: int = -1
    how: str = ""
    name: str = ""
    ranks: int = 0
    seconds: float = 0.0


def script(case: Case, rank: int) -> list[Step]:
    """The steps of one rank before the ending; without threads."""
    odd, others = rank == case.odd, case.world - 1
    steps = [Step("reduce", call) for call in range(case.at)]
    if case.fault not in _PROMPT:
        steps.append(Step("limit", seconds=SHORT))
    for call in range(case.at, case.calls):
        here, mine = call == case.at, []
        if here and odd:
            mine += _strike(case, call, others)
        elif case.fault == "reordered" and odd and call == case.at + case.groups:
            mine.append(Step("reduce", case.at))
        else:
            if here and case.fault == "interrupted":
                mine.append(Step("wait for", name="interrupted", ranks=1))
            mine.append(Step("reduce", call))
            if here and case.fault in ("late", "stopped"):
                mine.append(Step("arrive", name="gave up"))
                # A rank that is late to a group's first reduction has their error for it, and goes on.
                if case.first:
                    mine.append(Step("limit", seconds=MEDIUM))
        made = [step for step in mine if step.action == "reduce"]
        if case.retries and made and made[-1].how != "interrupted":
            mine.append(Step("retry", made[-1].call))
        steps += mine
    return steps


def _strike(case: Case, call: int, others: int) -> Iterator[Step]:
    """What the odd rank does in place of a call, or before it."""
    fault = case.fault
    if fault in ("killed", "killed inside", "stopped"):
        yield Step(fault, ranks=others)
    if fault == "late":
        yield Step("wait for", name="gave up", ranks=others)
    if fault in ("late", "stopped") and case.first:
        yield Step("limit", seconds=MEDIUM)
    if fault == "late in time":
        yield Step("pause", seconds=0.4)
    how = fault if case.mismatched else fault.partition(",")[0]
    if fault in (*_MISTAKES, "integers, retried", "interrupted") or case.mismatched:
        yield Step("reduce", call, how)
        if fault == "integers, retried":
            yield Step("reduce", call)
    elif fault == "reordered":
        # The next call on the same group, and this one in its place.
        yield Step("reduce", call + case.groups)
    elif fault != "skipped":
        yield Step("reduce", call)


class Entry(NamedTuple):
    """A call of one rank: its number, that of its group, how its arguments differ, as in ``Step``,
    and how it ended.
    """

    call: int
    group: int
    how: str
    result: Result


class Interrupted(BaseException):
    """What a rank raises inside a call, as a signal's handler does."""


@dataclass
class Player:
    """One rank of a case."""

    case: Case
    rank: int

    def __post_init__(self) -> None:
        store = os.environ["MESHPLAN_TEST_STORE"]
        self._written = open(f"{store}.entries.{self.rank}", "w", encoding="utf-8")  # noqa: SIM115
        self._lock = threading.Lock()
        self._failed = False

    def play(self) -> None:
        """The whole case."""
        case, door = self.case, self.case.through()
        self.door = door
        members = self._open()
        if case.threads:
            self._play_threads(members)
        else:
            for step in script(case, self.rank):
                self._play_step(step, members)
        if case.fault.startswith("killed"):
            return
        processes.arrive("ended")
        processes.wait_for("ended", case.world, HANGS)
        door.wait_at_most(MEDIUM, *members)
        if case.ending == "shutdown":
            meshplan.shutdown()
        else:
            members = [door.open_another(case.groups, MEDIUM)]
        self._reduce(case.calls, members[0], "")

    def _open(self) -> list[Member]:
        case, door = self.case, self.door
        # Threads have groups of their own, as the main thread has.
        members = [door.open(MEDIUM)]
        if case.fault == "contract" and case.door == "backend":
            odd = case.other_contract
            return [door.open_another(0, MEDIUM, odd if self.rank == case.odd else None)]
        return members + [door.open_another(number, MEDIUM) for number in range(1, case.groups)]

    def _play_step(self, step: Step, members: list[Member]) -> None:
        action = step.action
        if action == "reduce" or (action == "retry" and self._failed):
            self._failed = self._reduce(step.call, members[step.call % len(members)], step.how)
        elif action == "limit":
            self.door.wait_at_most(step.seconds, *members)
        elif action == "arrive":
            processes.arrive(step.name)
        elif action == "wait for":
            processes.wait_for(step.name, step.ranks, HANGS)
        elif action == "pause":
            time.sleep(step.seconds)
        elif action == "killed":
            die()
        elif action == "killed inside":
            _die_soon(self.case.seed % 7 * 0.004)
        elif action == "stopped":
            _stop_until("gave up", step.ranks)
        else:
            assert action == "retry", action

    def _play_threads(self, members: list[Member]) -> None:
        case = self.case
        late = case.fault == "late thread" and self.rank == case.odd

        def work(number: int) -> None:
            if late and number == case.seed % len(members):
                time.sleep(0.7)
            for call in range(number, case.calls * len(members), len(members)):
                if self._reduce(call, members[number], ""):
                    return

        threads = [
            # Those that hang end with the rank.
            threading.Thread(target=work, args=(number,), daemon=True)
            for number in range(len(members))
        ]
        # Each rank starts them in another order.
        turn = (self.rank + case.seed) % len(threads)
        for thread in threads[turn:] + threads[:turn]:
            thread.start()
        for thread in threads:
            thread.join(None if case.joined else HANGS)

    def _reduce(self, call: int, member: Member, how: str) -> bool:
        """Reduce, and write how it ended; returns whether it failed."""
        case = self.case
        numel = case.numel_of(call) + (how == "shape")
        dtype = case.torch_dtype
        if how == "dtype":
            dtype = torch.float64 if dtype != torch.float64 else torch.float32
        if how == "integers":
            dtype = torch.int64
        x = call_values(call, member.number, self.rank, numel, dtype)
        op: Op = case.op
        if how == "operation":
            op = "max" if case.op != "max" else "sum"
        if how == "integers":
            op = "avg"
        contract = None
        if how == "contract" and case.door != "backend":
            contract = case.other_contract
        if how == "sparse":
            x = x.to_sparse()
        if how == "overlapping":
            x = x[:1].expand(2)

        def run() -> Tensor:
            if case.backward and not how:
                return _reduce_in_backward(self.door, member, x)
            if how == "interrupted":
                with _interrupted_after(0.5):
                    return self.door.reduce(member, x, op, contract)
            return self.door.reduce(member, x, op, contract)

        result = attempt(run)
        if how == "interrupted":
            processes.arrive("interrupted")
        with self._lock:
            self._written.write(json.dumps([call, member.number, how, result]) + "\n")
            self._written.flush()
        return bool(result.error)


def _reduce_in_backward(door: Door, member: Member, x: Tensor) -> Tensor:
    """The sum of ``x`` as the gradient of a tensor that every rank holds."""
    weight = torch.zeros_like(x, requires_grad=True)
    if door.name == "seam":
        assert member.mesh is not None
        d = DTensor.from_local(weight, member.mesh, [Replicate()], run_check=False)
        (d.to_local(grad_placements=[Partial()]) * x).sum().backward()
    else:
        weight.register_hook(lambda gradient: door.reduce(member, gradient.clone()))
        (weight * x).sum().backward()
    assert weight.grad is not None
    return weight.grad


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise ``Interrupted`` in the main thread after ``seconds``, unless the block has ended."""

    def interrupt(*_: object) -> None:
        raise Interrupted(f"this rank was interrupted after {seconds:g} s")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _die_soon(seconds: float) -> None:
    """Have a helper process kill this one after ``seconds``."""
    rank = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(rank, signal.SIGKILL)
        os._exit(0)


def _stop_until(name: str, ranks: int) -> None:
    """Stop this process; a helper process continues it when ``ranks`` ranks have come to ``name``."""
    rank = os.getpid()
    waker = os.fork()
    if waker == 0:
        with contextlib.suppress(AssertionError):
            processes.wait_for(name, ranks, HANGS)
        os.kill(rank, signal.SIGCONT)
        os._exit(0)
    os.kill(rank, signal.SIGSTOP)
    os.waitpid(waker, 0)


@dataclass(frozen=True)
class Observation:
    """What has become of a case.

    Attributes:
        case: that was played.
        entries: the calls of each rank, in order.
        ends: ``returned``, ``hangs``, ``killed``, or why each rank ended; with stacks or a traceback.
        seconds: from the first call to the end.
    """

    case: Case
    entries: tuple[tuple[Entry, ...], ...]
    ends: tuple[str, ...]
    seconds: float = 0.0


def play_case(case: Case) -> Observation:
    """Play a case on forked processes, of which none is left behind."""
    door = case.through()
    with (
        door.environment(),
        processes.forked_ranks(
            lambda rank: Player(case, rank).play(), case.world, door.backend, MEDIUM
        ) as (ranks, receivers, _, store),
    ):
        started = time.monotonic()
        ends = tuple(_ends(ranks, receivers, store))
        entries = tuple(_read(Path(f"{store}.entries.{rank}")) for rank in range(case.world))
    return Observation(case, entries, ends, time.monotonic() - started)


def _ends(ranks: Sequence[Any], receivers: Sequence[Connection], store: str) -> Iterator[str]:
    deadline = time.monotonic() + HANGS
    for process, receiver in zip(ranks, receivers, strict=True):
        if not wait([receiver, process.sentinel], max(0.0, deadline - time.monotonic())):
            yield f"hangs\n{processes.stacks(process, store)}"
        elif receiver.poll():
            kind, value = receiver.recv()
            yield f"raised\n{value}" if kind == "raised" else kind
        else:
            process.join(1)
            code = process.exitcode
            yield "killed" if code == -signal.SIGKILL else f"died with exit code {code}"


def _read(path: Path) -> tuple[Entry, ...]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    entries = []
    for line in lines:
        call, group, how, (words, error, code, text, missing) = json.loads(line)
        found = None if words is None else tuple(words)
        entries.append(Entry(call, group, how, Result(found, error, code, text, tuple(missing))))
    return tuple(entries)


def play_all(cases: Sequence[Case], lanes: int) -> Iterator[Observation]:
    """Play cases in ``lanes`` processes at once: most of them wait most of the time."""
    processes.load_what_ranks_load()
    pipes = [_FORK.Pipe(duplex=False) for _ in range(lanes)]
    workers = [
        _FORK.Process(target=_play_lane, args=(cases[lane::lanes], sender))
        for lane, (_, sender) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    for _, sender in pipes:
        sender.close()
    receivers = [receiver for receiver, _ in pipes]
    try:
        while receivers:
            for receiver in wait(receivers):
                assert isinstance(receiver, Connection)
                try:
                    yield receiver.recv()
                except EOFError:
                    receivers.remove(receiver)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _play_lane(cases: Sequence[Case], sender: Connection) -> None:
    # The ranks of a case end with its lane.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for case in cases:
        sender.send(play_case(case))


def main(seeds: Sequence[str], write: Callable[[str], object] = sys.stdout.write) -> None:
    """Play the cases of ``seeds``, and write what was observed."""
    from tests.faults.judge import expected, judge

    for seed in seeds:
        seen = play_case(draw(int(seed)))
        case = seen.case
        write(f"{case.reproducer}\n")
        for rank, (entries, end) in enumerate(zip(seen.entries, seen.ends, strict=True)):
            for call, group, how, result in entries:
                reading = result.reading(expected(case, call, group))
                write(f"rank {rank} call {call} on group {group} {how}: {reading} {result.text}\n")
            write(f"rank {rank} {end}\n")
        write("".join(f"{verdict}\n" for verdict in judge(seen)) or "no fault found\n")
        write(f"{seen.seconds:.1f} s\n")


if __name__ == "__main__":
    main(sys.argv[1:])
