"""What the tests of several ranks rely on."""

from __future__ import annotations

import time
from multiprocessing.context import ForkProcess

import pytest

from meshplan.flatten._agree import vote
from meshplan.flatten._join import members_of
from meshplan.record import Record
from tests.processes import patience, run_ranks

pytestmark = pytest.mark.processes


def test_no_rank_begins_before_all_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that is forked while others connect has locked locks of the C library for ever."""
    forked: list[float] = []
    start = ForkProcess.start

    def start_late(process: ForkProcess) -> None:
        time.sleep(0.3)
        forked.append(time.monotonic())
        start(process)

    monkeypatch.setattr(ForkProcess, "start", start_late)
    assert min(run_ranks(lambda _: time.monotonic(), 3, init=False)) > forked[-1]


def test_no_rank_that_comes_is_late_for_a_vote() -> None:
    def ranks(rank: int) -> tuple[int, ...]:
        if rank == 2:
            return (2,)
        with patience(2):
            time.sleep(rank)
            return vote(members_of(None, (0, 1, 2), 0.1), "a", Record.of(vote="same")).missing

    assert run_ranks(ranks, 3) == [(2,)] * 3
