"""Calls on several streams and in graphs run sequentially, in one order on all ranks.

The emulated GPU runs what it is given later, each stream on a thread, and replays graphs in a random
legal order, unordered nodes at once. A call that overlaps another one would be refused by the kernel,
or give other bits; a call that waits for a later one would not come back. ``EMULATED_SEED`` chooses
other orders.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest
import torch
from expecttest import TestCase
from torch import Tensor

from meshplan import kernel
from meshplan.definition import reduce_leaves
from meshplan.errors import GroupStateError, PeerTimeoutError
from meshplan.kernel import DeviceCommunicator, check
from meshplan.testing import order_sensitive
from tests.devices import (
    EMULATED,
    Emulated,
    connect_ranks,
    emulated_library,
    have_equal_bits,
    reduce_peers,
    synchronize,
)
from tests.inputs import draw_leaves
from tests.processes import common_result, run_ranks
from tests.refusals import refusal

RANKS = 3
SEEDS = (1, 2, 3)
SIZES = (50, 7_001, 20_001)
_NO_EXTERNAL = "-DMP_NO_EXTERNAL"

pytestmark = EMULATED


def connect(device: Emulated, ranks: int = RANKS, timeout: float = 20.0) -> DeviceCommunicator:
    found = connect_ranks(device, range(ranks), timeout=timeout, lanes=2)
    assert isinstance(found, DeviceCommunicator)
    return found


class Calls:
    """Reductions of one rank with different numbers, and their expected results."""

    def __init__(self, rank: int, kind: kernel.DriverKind = "cuda") -> None:
        self.rank = rank
        self.device = Emulated(kind)
        connect(self.device)
        self.started: list[tuple[Tensor, Tensor]] = []

    def one(self, stream: int, numel: int = 0) -> None:
        """A reduction on a stream, captured or not."""
        number = len(self.started)
        numel = numel or SIZES[number % len(SIZES)]
        leaves = draw_leaves(RANKS, numel, seed=number)
        with self.device.on_stream(stream):
            mode = ("one_shot", "two_shot")[number % 2]
            result = reduce_peers(leaves[self.rank], (RANKS,), mode)
        self.started.append((result, reduce_leaves(leaves, "sum", (RANKS,))))

    def fork(self, origin: int, stream: int) -> None:
        """Let what ``stream`` is given come after ``origin``, as programs do."""
        event = self.device.event()
        with self.device.driver.current():
            self.device.driver.record(event, origin)
            self.device.driver.wait(event, stream)

    def check(self) -> list[bool]:
        """Which results are right, bit for bit."""
        synchronize()
        check()
        return [have_equal_bits(result, expected) for result, expected in self.started]


def late(calls: Calls, *streams: int) -> None:
    """Ranks are late on different streams."""
    for place, stream in enumerate(streams):
        if place % RANKS == calls.rank:
            with calls.device.on_stream(stream):
                calls.device.delay(0.05)


def eager_calls_on_several_streams(calls: Calls) -> None:
    late(calls, 7, 8, 9)
    for stream in (7, 7, 8, 9, 8, 7, 9, 9):
        calls.one(stream)


def two_streams_of_one_capture(calls: Calls) -> None:
    """Nodes of both streams have one order, whichever a replay starts first."""
    calls.one(7)
    with calls.device.capture(20) as graph:
        calls.fork(20, 21)
        for stream in (20, 21, 21, 20, 21):
            calls.one(stream)
        calls.fork(21, 20)
    for _ in range(2):
        late(calls, 20, 22, 23)
        graph.replay(20)


def eager_call_waits_for_a_replay_on_another_stream(calls: Calls) -> None:
    calls.one(7)
    with calls.device.capture(20) as graph:
        calls.fork(20, 21)
        calls.one(20)
        calls.one(21)
        calls.fork(21, 20)
    for _ in range(2):
        late(calls, 7, 20, 8)
        graph.replay(20)
        calls.one(7)
        calls.one(8)


def replay_waits_for_an_eager_call_on_another_stream(calls: Calls) -> None:
    with calls.device.capture(20) as graph:
        calls.one(20)
        calls.one(20)
    for stream in (7, 8, 7):
        late(calls, 7, 20, 8)
        calls.one(stream)
        graph.replay(20)


def eager_call_on_the_captured_stream(calls: Calls) -> None:
    calls.one(20)
    with calls.device.capture(20) as graph:
        calls.one(20)
    calls.one(20)
    late(calls, 21, 20, 7)
    graph.replay(21)
    calls.one(20)
    graph.replay(7)
    calls.one(20)


def two_graphs_on_two_streams(calls: Calls) -> None:
    graphs = []
    for stream in (20, 30):
        with calls.device.capture(stream) as graph:
            calls.one(stream)
            calls.one(stream)
        graphs.append(graph)
    for _ in range(2):
        late(calls, 21, 31, 20)
        graphs[0].replay(21)
        graphs[1].replay(31)
        # The same graph twice, too.
        graphs[1].replay(20)


ON_BOTH = (
    eager_calls_on_several_streams,
    two_streams_of_one_capture,
    eager_call_waits_for_a_replay_on_another_stream,
    replay_waits_for_an_eager_call_on_another_stream,
)
ON_CUDA = eager_call_on_the_captured_stream, two_graphs_on_two_streams


@pytest.mark.parametrize(
    ("program", "kind"),
    [*itertools.product(ON_BOTH, ("cuda", "hip")), *itertools.product(ON_CUDA, ("cuda",))],
)
def test_calls_are_ordered(
    program: Callable[[Calls], None], kind: kernel.DriverKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several orders; what one rank does comes late at random."""

    def ranks(rank: int) -> list[bool]:
        calls = Calls(rank, kind)
        program(calls)
        return calls.check()

    before = os.environ.get("EMULATED_SEED")
    for seed in SEEDS if before is None else (int(before),):
        # Ranks need not have the same orders.
        monkeypatch.setenv("EMULATED_SEED", str(seed))
        found = run_ranks(ranks, RANKS)
        assert all(one and all(one) for one in found), (seed, found)


def test_queued_calls_after_a_failure_are_errors() -> None:
    """Every rank's host runs ahead; then one of them is late, for longer than the others wait."""

    def ranks(rank: int) -> list[str]:
        device = Emulated()
        found = connect(device)
        results, leaves = [], []
        for number in range(8):
            leaves.append(draw_leaves(RANKS, 9_001, seed=number))
            if number == 2:
                found.set_timeout(1.0)
            if (number, rank) == (2, 1):
                device.delay(8)
            mode = ("one_shot", "two_shot")[number % 2]
            parts = (3_000, 3_001, 3_000) if number == 7 else ()
            results.append(reduce_peers(leaves[-1][rank], (RANKS,), mode, parts=parts))
        said = []
        synchronize()
        for result, brought in zip(results, leaves, strict=True):
            expected = reduce_leaves(brought, "sum", (RANKS,))
            right = result.shape == expected.shape and have_equal_bits(result, expected)
            said.append("right" if right else "poison" if bool(result.isnan().all()) else "wrong")
        with pytest.raises(PeerTimeoutError) as caught:
            check()
        return [*said, type(caught.value).__name__]

    expected = ["right"] * 2 + ["poison"] * 6 + ["PeerTimeoutError"]
    assert run_ranks(ranks, RANKS) == [expected] * RANKS


def test_replay_after_a_failure_is_an_error() -> None:
    def ranks(rank: int) -> list[bool]:
        device = Emulated()
        found = connect(device)
        found.set_timeout(1.0)
        mine = order_sensitive(9_001, rank=rank, world_size=RANKS)
        with device.capture(20) as graph:
            one = reduce_peers(mine, (RANKS,), "one_shot")
            two = reduce_peers(mine, (RANKS,), "two_shot")
        with device.on_stream(20):
            for turn in range(4):
                if turn == 1 and rank == 2:
                    device.delay(8)
                graph.replay(20)
        synchronize()
        return [bool(one.isnan().all()), bool(two.isnan().all())]

    assert run_ranks(ranks, RANKS) == [[True, True]] * RANKS


class TestRefusals(TestCase):
    def test_driver_without_graph_events_is_refused(self) -> None:
        """Old runtimes of HIP. Nothing is launched, and reductions outside graphs still work."""
        emulated_library("hip", _NO_EXTERNAL)

        def ranks(rank: int) -> str:
            device = Emulated("hip", 5, _NO_EXTERNAL)
            connect_ranks(device, range(2), lanes=2)
            ones = torch.ones(9)
            with device.capture(20), pytest.raises(GroupStateError) as caught:
                reduce_peers(ones, (2,), "one_shot")
            assert not [line for line in device.history() if line.startswith("launch")]
            assert have_equal_bits(reduce_peers(ones, (2,), "one_shot"), torch.full((9,), 2.0))
            return str(caught.value)

        self.assertExpectedInline(
            common_result(ranks, 2),
            """MP503: this driver cannot record events in graphs, so that a captured reduction would overlap others of the same ranks; reduce outside the graph, or take the path exchange there""",
        )

    def test_concurrent_captures_are_refused(self) -> None:
        def ranks(rank: int) -> str:
            device = Emulated()
            connect_ranks(device, range(2), lanes=2)
            ones = torch.ones(9)
            with device.capture(20):
                reduce_peers(ones, (2,), "one_shot")
                with device.capture(30):
                    reduce_peers(ones, (2,), "one_shot")
                with pytest.raises(GroupStateError) as caught:
                    reduce_peers(ones, (2,), "one_shot")
            return str(caught.value)

        self.assertExpectedInline(
            common_result(ranks, 2),
            """MP503: two graphs that capture reductions of the same ranks are captured at the same time, which leaves no order between the calls; capture them sequentially""",
        )

    def test_overlapping_calls_are_refused(self) -> None:
        """The last line of defence, with the order between streams removed."""

        def ranks(rank: int) -> str:
            device = Emulated()
            connect_ranks(device, range(2), timeout=20.0, lanes=2)
            device.driver.wait = lambda *_: None  # type: ignore[method-assign]
            ones = torch.ones(9)
            if rank == 1:
                device.delay(2)
            results = [reduce_peers(ones, (2,), "one_shot")]
            with device.on_stream(8):
                if rank == 1:
                    device.delay(2)
                results.append(reduce_peers(ones, (2,), "one_shot"))
            synchronize()
            if rank == 0:
                assert all(result.isnan().all() for result in results)
            return refusal(GroupStateError, check)

        # The calls overlap on rank 0 for certain, and on rank 1 where its delays end together.
        texts = {text.replace("on rank 1:", "on rank 0:") for text in run_ranks(ranks, 2)}
        assert len(texts) == 1
        self.assertExpectedInline(
            texts.pop(),
            """MP503: two reductions over ranks 0, 1 ran at the same time on rank 0: float32[9] for all_reduce sum over 2 ranks, contract v1/tree/wide/once, path one_shot; let each stream and each graph that reduces over them wait for the one before. Call meshplan.shutdown on every rank, and these ranks reconnect""",
        )
