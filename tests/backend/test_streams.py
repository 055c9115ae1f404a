"""Reductions of CUDA tensors: bits, and the order of streams, memory and graphs, without a GPU.

The emulated GPU runs everything later. Each rule is also tested without its wait: the same program
then returns other bits, which shows that it would notice.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor

import meshplan
import meshplan.backend
from meshplan import BackendOptions
from meshplan.backend import _reductions
from meshplan.collectives import Work, _lanes
from meshplan.collectives._lanes import SideStream, StreamCall
from meshplan.definition import reduce_leaves
from meshplan.errors import FallbackRefusedError
from tests import emulated_cuda as emulated
from tests.inputs import draw_leaves
from tests.marks import full
from tests.processes import run_ranks, start_all_reduce

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        torch.backends.cuda.is_built(),
        reason="CUDA tensors of a torch built for CUDA need a GPU; tests/test_gpu_backend.py has one",
    ),
]
NUMEL = 1003
CUDA = torch.device("cuda:0")


def held(side: SideStream) -> int:
    """How many calls hold memory."""
    return sum(call.holds_memory for call in side._calls)


def emulated_group(path: str | None = None, inner: str = "emulated") -> Any:
    """A group over the emulated backend, in a process of its own."""
    torch.set_num_threads(1)
    emulated.emulate()
    options = BackendOptions(inner=inner, path=path)
    return dist.new_group(backend="meshplan", pg_options=options)


def leaves_of(ranks: int, seed: int = 0, numel: int = NUMEL) -> list[Tensor]:
    return draw_leaves(ranks, numel, seed=seed)


def sum_of(leaves: list[Tensor], op: Any = "sum") -> Tensor:
    return reduce_leaves(leaves, op, (len(leaves),))


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit; ``found`` is on any device."""
    here = found.to("cpu")
    return torch.equal(here.view(torch.uint8), expected.contiguous().view(torch.uint8))


# Bits.


def reduce_everything(rank: int, inner: str = "emulated") -> dict[str, Any]:  # noqa: C901 - a list
    ranks = 3
    group = emulated_group(inner=inner)
    leaves, others = leaves_of(ranks), leaves_of(ranks, 1, 40_011)
    total, other = sum_of(leaves), sum_of(others)
    right: dict[str, bool] = {}
    waits: dict[str, list[str]] = {}

    def check(name: str, call: Callable[[list[Tensor]], list[Tensor]], expected: Any) -> None:
        """Twice: what is prepared in the first call may make the host wait."""
        for turn in range(2):
            given = [leaves[rank].to(CUDA), others[rank].to(CUDA)]
            emulated.counters.host_waits.clear()
            found = call(given)
            waits[name] = list(emulated.counters.host_waits)
            pairs = zip(found, expected, strict=True)
            right[f"{name} {turn}"] = all(same(one, wanted) for one, wanted in pairs)

    def all_reduce(given: list[Tensor], op: Any = dist.ReduceOp.SUM) -> list[Tensor]:
        for one in given:
            dist.all_reduce(one, op, group=group)
        return given

    def all_reduce_async(given: list[Tensor]) -> list[Tensor]:
        for work in [start_all_reduce(one, group=group) for one in given]:
            work.wait()
        return given

    def coalesced(given: list[Tensor]) -> list[Tensor]:
        with dist.distributed_c10d._coalescing_manager(group):
            for one in given:
                dist.all_reduce(one, group=group)
        return given

    def reduce(given: list[Tensor]) -> list[Tensor]:
        dist.reduce(given[0], 1, group=group)
        return given[:1]

    def uneven(given: list[Tensor]) -> list[Tensor]:
        blocks = list(torch.split(given[0], [500, 3, 500]))
        out = torch.empty(500 if rank != 1 else 3, device=CUDA)
        dist.reduce_scatter(out, blocks, group=group)
        return [out]

    def equal(given: list[Tensor]) -> list[Tensor]:
        out = torch.empty(13_337, device=CUDA)
        dist.reduce_scatter_single(out, given[1], group=group)
        return [out]

    def equal_coalesced(given: list[Tensor]) -> list[Tensor]:
        inputs = [given[1], given[1].clone()]
        outs = [torch.empty(13_337, device=CUDA) for _ in inputs]
        with dist.distributed_c10d._coalescing_manager(group):
            for out, one in zip(outs, inputs, strict=True):
                dist.reduce_scatter_single(out, one, group=group)
        return outs

    check("all_reduce", all_reduce, [total, other])
    check("async", all_reduce_async, [total, other])
    for op in ("avg", "max"):
        named = getattr(dist.ReduceOp, op.upper())
        check(op, lambda g, n=named: all_reduce(g, n), [sum_of(leaves, op), sum_of(others, op)])
    factor = dist._make_nccl_premul_sum(0.3 + rank)
    scaled = [
        sum_of([leaf * torch.tensor(0.3 + r) for r, leaf in enumerate(rows)])
        for rows in (leaves, others)
    ]
    check("premul", lambda given: all_reduce(given, factor), scaled)
    check("coalesced", coalesced, [total, other])
    check("reduce", reduce, [total if rank == 1 else leaves[rank]])
    check("uneven", uneven, [torch.split(total, [500, 3, 500])[rank]])
    shard = other.view(ranks, -1)[rank]
    check("equal", equal, [shard])
    check("equal coalesced", equal_coalesced, [shard, shard])
    emulated.synchronize()
    return {
        "wrong": [name for name, one in right.items() if not one],
        "waits": {name: found for name, found in waits.items() if found},
    }


def test_every_reduction_has_the_contracts_bits_and_no_host_waits() -> None:
    assert run_ranks(reduce_everything, 3) == [{"wrong": [], "waits": {}}] * 3


def test_gloo_is_given_no_address_of_a_gpu() -> None:
    """Its all-gather dies of one; the copies in the host's memory make the host wait."""

    def ranks(rank: int) -> tuple[list[str], bool]:
        wrong = reduce_everything(rank, "cpu:gloo,cuda:gloo")["wrong"]
        return wrong, "copied to the host for gloo" in str(meshplan.report())

    assert run_ranks(ranks, 3) == [([], True)] * 3


def hold_back(group: Any) -> emulated.Gate:
    """What the group reduces from here on waits until the gate is open, and the host goes on."""
    return emulated.Gate(group._device_lane.side_stream(CUDA).stream)


# Order. Each program returns whether its result was right.


def read_what_the_caller_wrote(rank: int, group: Any) -> bool:
    """The input is written on the caller's stream, late."""
    leaves = leaves_of(2)
    x = torch.zeros(NUMEL, device=CUDA)
    mine = leaves[rank].to(CUDA)
    gate = emulated.Gate(emulated.current_stream())
    x.copy_(mine)
    work = start_all_reduce(x, group=group)
    gate.open()
    work.wait()
    return same(x, sum_of(leaves))


def reduce_late(rank: int, group: Any) -> tuple[Tensor, emulated.Gate, dist.Work, Tensor]:
    """What a reduction is written to behind a gate, its work, and the right result."""
    leaves = leaves_of(2)
    x, gate = leaves[rank].to(CUDA), hold_back(group)
    return x, gate, start_all_reduce(x, group=group), sum_of(leaves)


def use_the_result_behind_wait(rank: int, group: Any) -> bool:
    x, gate, work, total = reduce_late(rank, group)
    work.wait()
    found = x * 1.0
    gate.open()
    return same(found, total)


def wait_on_another_stream(rank: int, group: Any) -> bool:
    """The stream that is current at ``wait`` counts, not that of the call."""
    x, gate, work, total = reduce_late(rank, group)
    with emulated.Stream(CUDA):
        work.wait()
        found = x * 1.0
        gate.open()
        return same(found, total)


def use_the_result_of_a_future(rank: int, group: Any) -> bool:
    """Callbacks run on streams that wait, and so does who waits for the future."""
    _x, gate, work, total = reduce_late(rank, group)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2.0)
    found = doubled.wait() * 1.0
    gate.open()
    return same(found, total * 2.0)


def let_go_of_the_input(rank: int, group: Any, *, keeps_work: bool = True) -> bool:
    """Its memory is allocated and written again before the reduction has read it."""
    leaves = leaves_of(2, numel=2 * NUMEL)
    out, kept = torch.empty(NUMEL, device=CUDA), torch.zeros(2, device=CUDA)
    x = leaves[rank].to(CUDA)
    gate = hold_back(group)
    work = dist.reduce_scatter_single(out, x, group=group, async_op=True)
    work = work if keeps_work else None
    del x
    gc.collect()
    torch.full((2 * NUMEL,), 7.0, device=CUDA)
    gate.open()
    if work is not None:
        work.wait()
    else:
        dist.all_reduce(kept, group=group)
    return same(out * 1.0, sum_of(leaves).view(2, -1)[rank])


def drop_the_work(rank: int, group: Any) -> bool:
    """The group holds the memory if the caller does not keep the work."""
    return let_go_of_the_input(rank, group, keeps_work=False)


def captured(rank: int, group: Any) -> bool:
    """A graph holds a synchronous and an asynchronous reduction, and is replayed with new numbers."""
    x, y = (torch.zeros(NUMEL, device=CUDA) for _ in range(2))
    doubled = torch.zeros(NUMEL, device=CUDA)
    dist.all_reduce(x, group=group)
    with emulated.capture(emulated.Stream(CUDA)) as graph:
        y.copy_(x)
        work = start_all_reduce(y, group=group)
        work.wait()
        dist.all_reduce(y, dist.ReduceOp.MAX, group=group)
        doubled.copy_(y * 2.0)
    right = []
    for seed in range(3):
        leaves = leaves_of(2, seed)
        x.copy_(leaves[rank])
        emulated.replay(graph)
        right.append(same(doubled, sum_of(leaves) * 2.0))
    return all(right)


def without_fork() -> None:
    """The side stream does not wait for the caller's."""
    start = SideStream.__init__

    def created(self: SideStream, device: torch.device) -> None:
        start(self, device)
        self.stream.wait_stream = lambda _: None

    SideStream.__init__ = created  # type: ignore[method-assign]


def without_join() -> None:
    """The stream at ``wait`` does not wait for the side stream."""

    def wait(self: StreamCall) -> Any:
        return self.side.module.current_stream(self.side.device)

    StreamCall.wait = wait  # type: ignore[method-assign]


def waiting_on_the_callers_stream() -> None:
    """The stream of the call waits, not the one at ``wait``."""

    def wait(self: StreamCall) -> Any:
        self._origin.wait_event(self._end)
        return self._origin

    StreamCall.wait = wait  # type: ignore[method-assign]


def without_hold() -> None:
    """No one keeps the tensors of a call."""
    start = StreamCall.__init__

    def created(self: StreamCall, *arguments: Any) -> None:
        start(self, *arguments)
        self._held = None

    StreamCall.__init__ = created  # type: ignore[method-assign]


def without_the_groups_hold() -> None:
    """Only the work keeps the tensors of a call."""

    class Forgetful(list[Any]):
        def append(self, _: Any) -> None:
            pass

    start = SideStream.__init__

    def created(self: SideStream, device: torch.device) -> None:
        start(self, device)
        self._calls = Forgetful()  # type: ignore[assignment]

    SideStream.__init__ = created  # type: ignore[method-assign]


def without_the_futures_stream() -> None:
    """The future records the caller's stream."""
    StreamCall.behind = lambda _: nullcontext()  # type: ignore[assignment,method-assign,return-value]


Program = Callable[[int, Any], bool]
PROGRAMS: dict[Program, tuple[Callable[[], None], ...]] = {
    read_what_the_caller_wrote: (without_fork,),
    use_the_result_behind_wait: (without_join,),
    wait_on_another_stream: (without_join, waiting_on_the_callers_stream),
    use_the_result_of_a_future: (without_the_futures_stream,),
    let_go_of_the_input: (without_hold,),
    drop_the_work: (without_hold, without_the_groups_hold),
    captured: (without_join, without_fork),
}


def run_program(program: Program, change: Callable[[], None] | None = None) -> list[Any]:
    def ranks(rank: int) -> Any:
        if change is not None:
            change()
        try:
            group = emulated_group()
            # The groups are connected and agreed upon.
            dist.all_reduce(torch.zeros(3, device=CUDA), group=group)
            dist.reduce_scatter_single(
                torch.zeros(1, device=CUDA), torch.zeros(2, device=CUDA), group=group
            )
            emulated.synchronize()
            found = program(rank, group)
            emulated.synchronize()
        except RuntimeError as error:
            # Errors of CUDA, for a graph that is not whole.
            if "unjoined" in str(error) or "uncaptured" in str(error):
                return False
            raise
        return found

    return run_ranks(ranks, 2)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_streams_are_ordered(program: Program) -> None:
    assert run_program(program) == [True, True]


@pytest.mark.parametrize(
    ("program", "change"),
    [(program, change) for program, changes in PROGRAMS.items() for change in changes],
    ids=lambda one: one.__name__,
)
def test_a_missing_wait_is_noticed(program: Program, change: Callable[[], None]) -> None:
    assert False in run_program(program, change)


# Memory and completion.


def follow_memory(rank: int) -> dict[str, Any]:
    group = emulated_group()
    dist.all_reduce(torch.zeros(3, device=CUDA), group=group)
    side = group._device_lane.side_stream(CUDA)
    emulated.synchronize()
    found: dict[str, Any] = {}

    def reduce_ones() -> tuple[int, Any]:
        """The address of a tensor that no one else keeps, and the work on it."""
        ones = torch.ones(5, device=CUDA)
        return ones.data_ptr(), dist.all_reduce(ones, group=group, async_op=True)

    address, work = reduce_ones()
    found["held by a call"] = held(side), emulated.is_live(address)
    work.wait()
    del work
    found["held after wait"] = held(side), emulated.is_live(address)

    address, _ = reduce_ones()
    del _
    found["held without work"] = emulated.is_live(address)
    emulated.synchronize()
    dist.all_reduce(torch.zeros(3, device=CUDA), group=group)
    found["held after the next call"] = emulated.is_live(address)

    gate = emulated.Gate(side.stream)
    address, work = reduce_ones()
    with emulated.Stream(CUDA):
        work.wait()
    del work
    found["held after another stream's wait"] = emulated.is_live(address)
    gate.open()

    _lanes.MAX_HELD = 4
    emulated.synchronize()
    gate = emulated.Gate(side.stream)
    emulated.counters.host_waits.clear()
    most, ones = 0, []
    for _ in range(12):
        ones.append(torch.ones(5, device=CUDA))
        dist.all_reduce(ones[-1], group=group, async_op=True)
        most = max(most, held(side))
    found["most held"] = most
    found["host waits"] = list(emulated.counters.host_waits)
    gate.open()
    emulated.synchronize()
    found["right"] = all(same(one, torch.full((5,), 2.0)) for one in ones)
    return found


def test_memory_is_held_until_it_is_safe_and_not_longer() -> None:
    expected = {
        "held by a call": (1, True),
        "held after wait": (0, False),
        "held without work": True,
        "held after the next call": False,
        "held after another stream's wait": True,
        "most held": 4,
        "host waits": [],
        "right": True,
    }
    assert run_ranks(follow_memory, 2) == [expected] * 2


def complete(rank: int) -> list[Any]:
    group = emulated_group()
    x = torch.ones(3, device=CUDA)
    dist.all_reduce(x, group=group)
    gate = hold_back(group)
    work = start_all_reduce(x, group=group)
    found: list[Any] = [work.is_completed(), work.is_success()]
    try:
        work.wait(timedelta(seconds=0.01))
    except meshplan.MeshplanError as error:
        found.append(error.code)
    gate.open()
    work.wait(timedelta(seconds=100))
    found += [work.is_completed(), work.is_success(), work.exception(), work.result()[0] is x]
    return found


def test_completion_is_that_of_the_device() -> None:
    expected = [False, False, "MP503", True, True, None, True]
    assert run_ranks(complete, 2) == [expected] * 2


def fail(rank: int) -> list[Any]:
    group = emulated_group()
    x = torch.ones(3, device=CUDA)
    dist.all_reduce(x, group=group)
    bind = _reductions.bind

    def refuse(*_: Any, **__: Any) -> Any:
        raise FallbackRefusedError("refused")

    _reductions.bind = refuse
    work = start_all_reduce(x, group=group)
    found: list[Any] = [work.is_completed(), work.is_success()]
    for call in (
        work.wait,
        work.get_future().wait,
        lambda: dist.all_reduce(x, group=group),
    ):
        try:
            call()
        except (RuntimeError, meshplan.MeshplanError) as error:
            found.append(str(error).partition("MP")[2][:3])
    _reductions.bind = bind
    # Different dtypes are found on the device, and reported by the next wait.
    y = torch.ones(3, device=CUDA, dtype=(torch.float32, torch.int32)[rank])
    work = start_all_reduce(y, group=group)
    emulated.synchronize()
    # Ranks may find it in different calls, so that later ones would not be the same.
    for call in (work.wait, lambda: dist.all_reduce(x, group=group)):
        try:
            call()
        except meshplan.MeshplanError as error:
            found.append(error.code)
    return found


def test_errors_reach_wait_the_future_and_the_caller() -> None:
    expected = [True, False, "701", "701", "701", "MP703", "MP503"]
    assert run_ranks(fail, 2) == [expected] * 2


def use_devices(rank: int) -> list[bool]:
    """Tensors of two devices, neither of which need be the current one; and CPU tensors."""
    group = emulated_group()
    assert emulated.current_device() == 0
    leaves = leaves_of(2)
    right = []
    for _ in range(2):
        tensors = [leaves[rank].to(f"cuda:{i}") for i in (1, 0)]
        here = leaves[rank].clone()
        gates = [emulated.Gate(emulated.current_stream(one.device)) for one in tensors]
        for one in tensors:
            one.mul_(1.0)
        places = tensors[0], here, tensors[1]
        works = [start_all_reduce(one, group=group) for one in places]
        for gate in gates:
            gate.open()
        for work in works:
            work.wait()
        right += [same(one * 1.0, sum_of(leaves)) for one in (*tensors, here)]
        right.append(emulated.current_device() == 0)
    return right


def test_each_device_has_streams_of_its_own() -> None:
    assert run_ranks(use_devices, 2) == [[True] * 8] * 2


def capture_first(rank: int) -> list[Any]:
    group = emulated_group()
    x = torch.full((3,), rank + 1.0, device=CUDA)
    found: list[Any] = []
    with emulated.capture(emulated.Stream(CUDA)):
        try:
            dist.all_reduce(x, group=group)
        except meshplan.MeshplanError as error:
            found.append(str(error))
    dist.all_reduce(x, group=group)
    return [*found, x.tolist()]


class TestRefusals(TestCase):
    def test_first_reduction_in_a_capture_is_refused(self) -> None:
        first, second = run_ranks(capture_first, 2)
        assert first == second
        assert first[1] == [3.0] * 3
        self.assertExpectedInline(
            first[0],
            """MP505: the first reduction of CUDA tensors in a group connects its ranks, which a CUDA graph cannot capture; reduce once before the capture""",
        )


def reduce_without_the_backend(rank: int, path: Any) -> list[bool]:
    """``async_op=True`` of the functions of meshplan, whose results have memory of their own."""
    emulated_group()
    plain = dist.new_group(backend="emulated")
    leaves = leaves_of(2)
    right = []
    for turn in range(2):
        x, y = (leaves[rank].to(CUDA) for _ in range(2))
        # The first call connects the ranks, and waits.
        gate = emulated.Gate(emulated.current_stream()) if turn else None
        x.mul_(1.0)
        how: Any = {"path": path, "group": plain, "async_op": True}
        work = meshplan.deterministic_all_reduce(x, **how)
        lists = meshplan.deterministic_all_reduce_coalesced([y], **how)
        shard = meshplan.deterministic_reduce_scatter(y, **how)
        assert isinstance(lists, Work)
        assert isinstance(shard, Work)
        assert isinstance(work, Work)
        if gate is not None:
            gate.open()
        total = sum_of(leaves)
        right.append(same(work.result() * 1.0, total))
        right.append(same(lists.result()[0] * 1.0, total))
        # The sum of two sums that the call before has written.
        right.append(same(shard.result() * 1.0, torch.chunk(2 * total, 2)[rank]))
    return right


@pytest.mark.parametrize("path", ["auto", full("halving")])
def test_asynchronous_collectives_of_plain_groups_use_side_streams(path: str) -> None:
    found = run_ranks(lambda rank: reduce_without_the_backend(rank, path), 2)
    assert found == [[True] * 6] * 2


def coalesce(rank: int) -> list[Any]:
    """Calls in a block that the inner backend launches at its end, such as NCCL's."""
    group = emulated_group()
    leaves = leaves_of(2)
    manager = dist.distributed_c10d._coalescing_manager
    found: list[Any] = []
    for is_async in (False, True):
        pair = [leaves[rank].to(CUDA) for _ in range(2)]
        with manager(group, CUDA, async_ops=is_async) as block:
            for one in pair:
                dist.all_reduce(one, group=group)
        if is_async:
            gate = hold_back(group)
            gate.open()
            block.wait()
        found += [same(one * 1.0, sum_of(leaves)) for one in pair]
    # Calls on both sides of a reduction are launched, and the block has the works of all.
    first, last = (torch.full((3,), rank + one, device=CUDA) for one in (1.0, 5.0))
    x = leaves[rank].to(CUDA)
    group._start_coalescing(CUDA)
    group.broadcast([first], dist.BroadcastOptions())
    dist.all_reduce(x, group=group, async_op=True)
    group.broadcast([last], dist.BroadcastOptions())
    group._end_coalescing(CUDA).wait()
    found += [first.tolist(), last.tolist(), same(x * 1.0, sum_of(leaves))]
    group._start_coalescing(CUDA)
    return [*found, group._end_coalescing(CUDA)]


def test_reductions_interrupt_blocks_of_coalesced_calls() -> None:
    expected = [True] * 4 + [[1.0] * 3, [5.0] * 3, True, None]
    assert run_ranks(coalesce, 2) == [expected] * 2


def mix_streams(rank: int) -> list[float]:
    """Each call reads what the one before it has written, on other streams and without a wait."""
    group = emulated_group()
    x = torch.ones(1, device=CUDA)
    dist.all_reduce(x, group=group)
    emulated.synchronize()
    streams = [emulated.Stream(CUDA) for _ in range(3)]
    for turn in range(9):
        with streams[turn % 3]:
            dist.all_reduce(x, group=group, async_op=turn % 2 == 0)
    emulated.synchronize()
    return x.tolist()  # type: ignore[no-any-return]


def test_calls_run_in_the_order_of_issue() -> None:
    assert run_ranks(mix_streams, 2) == [[2.0**10]] * 2


# HSDP: the sums of a reduce-scatter are read on the stream of another group.


def reduce_modules(rank: int) -> list[bool]:
    """As FSDP2 reduces several modules, on one stream over shards and on one over replicas."""
    emulated_group()
    options = BackendOptions(inner="emulated")

    def group_of(rows: list[list[int]]) -> Any:
        made = [dist.new_group(row, backend="meshplan", pg_options=options) for row in rows]
        return next(one for one, row in zip(made, rows, strict=True) if rank in row)

    shards, replicas = group_of([[0, 1], [2, 3]]), group_of([[0, 2], [1, 3]])
    scatter, reduce = torch.cuda.Stream(), torch.cuda.Stream()
    results, kept, wanted = [], [], []
    # The first one agrees on groups, for which the host waits.
    for module in range(6):
        leaves = [leaf.to(torch.bfloat16) for leaf in leaves_of(4, module, 20_000)]
        given = leaves[rank].to(CUDA)
        scatter.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(scatter):
            out = torch.empty(10_000, dtype=torch.bfloat16, device=CUDA)
            shards.scatter_partial_sum(out, given, dist.ReduceOp.AVG)
        reduce.wait_stream(scatter)
        with torch.cuda.stream(reduce):
            dist.all_reduce(out, dist.ReduceOp.AVG, replicas)
        # FSDP2 holds both until the backward ends.
        kept += [given, out]
        results.append(out)
        wanted.append(reduce_leaves(leaves, "avg", (2, 2)).chunk(2)[rank % 2])
    torch.cuda.current_stream().wait_stream(reduce)
    found = [same(one, right) for one, right in zip(results, wanted, strict=True)]
    emulated.synchronize()
    return found


def test_sums_of_shards_are_reduced_over_replicas() -> None:
    assert run_ranks(reduce_modules, 4) == [[True] * 6] * 4
