"""Chunks side by side: their order, their failures, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshplan.execute._wire import Message
from meshplan.execute.paths._halving import Stages, run_stages
from meshplan.planner import Reach, count_chunks, cut_chunks, weigh_chunks
from meshplan.planner._path_costs import MAX_CHUNKS, PeerCounts, find_chunk_unit
from meshplan.topology import Links


class Log:
    """What was issued and waited for, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def issue(self, name: str, error: Exception | None = None) -> Any:
        self.lines.append(f"start {name}")

        def wait() -> str:
            self.lines.append(f"wait {name}")
            if error is not None:
                raise error
            return name

        return wait

    def send(self, messages: Sequence[Message]) -> Any:
        return self.issue("round " + " ".join(str(one.peer) for one in messages))


def chunk(log: Log, number: int, rounds: int = 1, error: Exception | None = None) -> Stages[int]:
    found = yield log.issue(f"A{number}")
    assert found == f"A{number}"
    for _ in range(rounds):
        answer = yield [Message(True, torch.ones(1), number)]
        assert answer is None
    yield log.issue(f"B{number}", error)
    return number


def test_next_chunk_starts_before_older_ones_are_waited_for() -> None:
    log = Log()
    assert run_stages((chunk(log, i) for i in range(3)), log.send) == [0, 1, 2]
    assert log.lines == [
        "start A0",
        "start A1",
        "wait A0",
        "start A2",
        "start round 0",
        "wait round 0",
        "wait A1",
        "start B0",
        "start round 1",
        "wait round 1",
        "wait A2",
        "start B1",
        "wait B0",
        "start round 2",
        "wait round 2",
        "start B2",
        "wait B1",
        "wait B2",
    ]


def test_rounds_of_chunks_in_flight_are_one_batch() -> None:
    log = Log()
    run_stages((chunk(log, i, rounds=3) for i in range(5)), log.send)
    batches = [line for line in log.lines if line.startswith("start round")]
    # C chunks of r rounds: r + C - 1 batches instead of r C, each in one order, newest first.
    assert batches == [
        "start round 0",
        "start round 1 0",
        "start round 2 1 0",
        "start round 3 2 1",
        "start round 4 3 2",
        "start round 4 3",
        "start round 4",
    ]


def test_failure_is_raised_without_another_wait() -> None:
    """Of ranks that may wait for this one. The caller closes the connections."""
    log = Log()
    first, second = RuntimeError("first"), RuntimeError("second")
    errors = {1: first, 2: second}
    chunks = (chunk(log, i, rounds=0, error=errors.get(i)) for i in range(6))
    with pytest.raises(RuntimeError) as caught:
        run_stages(chunks, log.send)
    assert caught.value is first
    assert log.lines[-1] == "wait B1"
    assert "start B2" in log.lines


def test_chunks_in_flight_do_not_grow_with_their_number() -> None:
    """As many as a chunk has stages: the bound of the memory that they hold."""
    alive = most = 0

    def counted(log: Log, number: int) -> Stages[int]:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        found = yield from chunk(log, number, rounds=2)
        alive -= 1
        return found

    log = Log()
    assert run_stages((counted(log, i) for i in range(32)), log.send) == list(range(32))
    assert (most, alive) == (5, 0)


def test_chunk_that_does_not_wait_is_finished_at_once() -> None:
    def ready(number: int) -> Stages[int]:
        yield from ()
        return number

    assert run_stages(map(ready, range(3)), Log().send) == [0, 1, 2]
    assert run_stages([], Log().send) == []


def test_number_of_chunks_grows_with_the_root_of_the_size() -> None:
    near = PeerCounts(7, 0, 0)
    reach = Reach(Links(), (2, 8), PeerCounts(7, 0, 8), inside=near)
    unit = find_chunk_unit(reach, 8, "exchange")
    counts = {size: count_chunks(size, unit) for size in (0, 64 << 10, 16 << 20, 1 << 30, 1 << 40)}
    assert counts == {0: 1, 64 << 10: 1, 16 << 20: 3, 1 << 30: 21, 1 << 40: MAX_CHUNKS}
    # Without a unit, a reduction is in one piece.
    assert count_chunks(1 << 30, 0) == 1
    # More time for each chunk: fewer chunks.
    assert find_chunk_unit(replace(reach, sizes=(64, 8)), 8, "exchange") > 5 * unit


def test_chunks_at_the_ends_are_half_as_long() -> None:
    assert weigh_chunks(11) == [1] * 11
    assert weigh_chunks(12) == [6, 7, 8, 9, 10, 11, 11, 10, 9, 8, 7, 6]
    assert cut_chunks(1000, 1, 8) == [1000]
    assert cut_chunks(0, 3, 8) == [0]
    # Whole slices of each rank; none for some chunks.
    assert cut_chunks(20, 4, 8) == [8, 8, 4]
    for count in range(1, MAX_CHUNKS + 1):
        lengths = cut_chunks(100_003, count, 8)
        assert (sum(lengths), len(lengths)) == (100_003, count)
        assert all(length % 8 == 0 for length in lengths[:-1])
        assert max(lengths) * 2 <= 3 * 100_003 / count + 32
