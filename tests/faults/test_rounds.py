"""A rank that dies, stops or is late at any message of path halving is named by all the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch

from meshplan._torch import default_store
from meshplan.execute import _gloo
from meshplan.execute._provenance import CollectiveLog
from meshplan.flatten import _missing
from meshplan.planner import Step
from tests.faults.jobs import die, end, run_job, stop_for
from tests.faults.test_matrix import SECONDS, Found, attempt
from tests.marks import full, longest
from tests.processes import arrive, set_timeout, wait_for
from tests.test_collectives import groups_of, run, step

pytestmark = pytest.mark.processes
BLOCKS: dict[str, Any] = {"sizes": (3, 2), "inner": 2, "between": "halving"}


class Form(NamedTuple):
    """A form of the path, and the largest group whose headers are compared all at once."""

    step: Step
    at_once: int = 32


FORMS = {
    "flat": Form(step("halving", sizes=(6,))),
    "headers in rounds": Form(step("halving", sizes=(6,)), at_once=1),
    "scatter": Form(step("halving", sizes=(6,), scatter=((0, 0),)), at_once=1),
    "blocks": Form(step("exchange", **BLOCKS)),
    "chunks": Form(step("exchange", chunk=1 << 12, **BLOCKS)),
    "chunks of an exchange": Form(step("exchange", chunk=1 << 12, sizes=(3, 2), inner=2)),
}


STRIKES: dict[str, Callable[[], object]] = {
    "killed": die,
    "stopped": lambda: stop_for(2 * SECONDS),
    "late": lambda: time.sleep(2 * SECONDS),
}


def run_counted(function: Callable[[], object], strike: Callable[[], object], at: int = -1) -> int:
    """Run ``function``, and ``strike`` before message ``at``; the number of messages it issued."""
    issue, issued = CollectiveLog.issue, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal issued
        if issued == at:
            strike()
        issued += 1
        return issue(*arguments, **options)

    CollectiveLog.issue = counted  # type: ignore[method-assign]
    try:
        function()
    finally:
        CollectiveLog.issue = issue  # type: ignore[method-assign]
    return issued


def run_fault(fault: str, name: str, odd: int, where: float) -> None:
    """The ``odd`` rank has the fault at this fraction of its messages, headers included."""
    wanted, at_once = FORMS[name]
    world = wanted.group_size

    def ranks(rank: int) -> tuple[Found, Found]:
        _missing._SECONDS = SECONDS
        _gloo.MOST_AT_ONCE = at_once
        groups = groups_of(wanted)
        groups.ranks = lambda: tuple(range(world))
        _missing.note_process(default_store(), rank)

        def reduce() -> None:
            run(torch.ones(6000), wanted, groups)

        messages, strike = run_counted(reduce, die), STRIKES[fault]
        # Without it half an hour: the end of a rank is found out without a timeout.
        if fault != "killed":
            for group in groups.all:
                set_timeout(timedelta(seconds=SECONDS), group)
        arrive("ready")
        wait_for("ready", world)
        at = int(where * messages) if rank == odd else -1
        found = attempt(lambda: run_counted(reduce, strike, at))
        behind = attempt(reduce)
        # A rank that leaves while others still call the roll would be reported as ended.
        arrive("failed")
        wait_for("failed", world - (fault == "killed"))
        end()
        return found, behind

    outcomes = run_job(ranks, world, collective_timeout=1800.0)
    for rank, outcome in enumerate(outcomes):
        if rank == odd and fault == "killed":
            assert outcome.exit_code == -9
            continue
        assert (outcome.failure, outcome.exit_code) == ("", 0), rank
        found, behind = outcome.value
        # A rank whose part was over before the fault finds it in its next call.
        first = found if found.name else behind
        assert first.name == "CollectiveError", (rank, found, behind)
        assert behind.name == "CollectiveError", (rank, behind)
        if rank == odd:
            continue
        assert first.missing == (odd,), (rank, first)
        if fault == "late":
            assert f"rank {odd} did not report it too within" in first.message, first
        else:
            state = "has ended" if fault == "killed" else "is stopped or unreachable"
            assert f"rank {odd} {state}" in first.message, first


@pytest.mark.parametrize(
    ("name", "odd", "where"),
    [
        full("headers in rounds", 1, 0.3),
        full("chunks", 4, 0.7),
        *(longest(name, odd, where) for name in FORMS for odd, where in ((1, 0.0), (0, 0.4))),
        *(longest(name, odd, where) for name in FORMS for odd, where in ((5, 0.2), (3, 0.9))),
        longest("chunks of an exchange", 3, 0.5),
    ],
)
def test_kill_at_a_message_is_named_by_all(name: str, odd: int, where: float) -> None:
    run_fault("killed", name, odd, where)


@pytest.mark.parametrize(
    ("fault", "name", "odd", "where"),
    [
        full("late", "headers in rounds", 1, 0.5),
        longest("stopped", "flat", 4, 0.5),
        longest("late", "scatter", 5, 0.5),
        longest("late", "blocks", 2, 0.4),
        longest("late", "chunks", 1, 0.5),
        longest("stopped", "chunks", 3, 0.3),
        longest("late", "chunks of an exchange", 3, 0.5),
    ],
)
def test_long_wait_at_a_message_is_named_by_all(
    fault: str, name: str, odd: int, where: float
) -> None:
    run_fault(fault, name, odd, where)
