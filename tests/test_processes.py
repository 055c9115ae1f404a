"""What the tests of several ranks rely on."""

from __future__ import annotations

import time
from multiprocessing.context import ForkProcess

import pytest

from tests.processes import run_ranks


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
