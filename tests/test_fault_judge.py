"""The judge of the random faults finds each kind of fault, and nothing where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.doors import Result
from tests.faults.judge import KINDS, Verdict, expected, explains, judge
from tests.faults.random_faults import FAULTS, Case, Entry, Observation, draw, script

CASE = replace(
    draw(0),
    door="functions",
    order="tree",
    op="sum",
    dtype="float32",
    numel=5,
    world=3,
    groups=1,
    odd=1,
    at=1,
    retries=False,
    backward=False,
    ending="group",
)
NAMED = Result(error="CollectiveError", code="MP504", text="MP504: rank 1 has ended")
STOPPED = Result(error="GroupStateError", code="MP503", text="MP503: rank 1 has ended before")
DIFFERENT = Result(error="SignatureMismatchError", code="MP703", text="MP703: rank 1: float64[5]")


def right(case: Case, call: int, group: int = 0, how: str = "") -> Entry:
    return Entry(call, group, how, Result(expected(case, call, group)))


def seen(
    fault: str, results: Callable[[int, int], Result | None], **changes: object
) -> Observation:
    """A case in which ``results(rank, call)`` is not right; its ending is."""
    case = replace(CASE, fault=fault, **changes)  # type: ignore[arg-type]
    entries = []
    for rank in range(case.world):
        calls = [step for step in script(case, rank) if step.action == "reduce"]
        found = [
            Entry(step.call, 0, step.how, result)
            if (result := results(rank, step.call)) is not None
            else right(case, step.call, 0, step.how)
            for step in calls
        ]
        if not fault.startswith("killed"):
            found.append(right(case, case.calls, case.groups))
        entries.append(tuple(found))
    return Observation(case, tuple(entries), ("returned",) * case.world)


def kinds(verdicts: Sequence[Verdict]) -> set[str]:
    return {verdict.kind for verdict in verdicts}


def failed_from(
    at: int, first: Result, later: Result | None
) -> Callable[[int, int], Result | None]:
    return lambda rank, call: None if call < at else first if call == at else later


RIGHT = lambda rank, call: None  # noqa: E731


def test_right_calls_and_explained_errors_are_no_faults() -> None:
    assert judge(seen("none", RIGHT)) == []
    assert judge(seen("shape", failed_from(1, DIFFERENT, None))) == []
    assert judge(seen("skipped", failed_from(1, NAMED, STOPPED))) == []
    killed = seen("killed", failed_from(1, NAMED, STOPPED))
    ends = ("returned", "killed", "returned")
    assert judge(
        replace(killed, entries=(killed.entries[0], (), killed.entries[2]), ends=ends)
    ) == [Verdict("lost", "rank 1 call 0: not made")]
    before = (killed.entries[0], killed.entries[1][:1], killed.entries[2])
    assert judge(replace(killed, entries=before, ends=ends)) == []


def test_sum_of_another_call_is_found() -> None:
    """Also in its last bit, on one rank; and a sum of two calls."""
    later = Result(expected(CASE, 2, 0))
    assert "wrong" in kinds(judge(seen("skipped", failed_from(1, later, STOPPED))))
    words = expected(CASE, 3, 0)
    one_bit = Result((*words[:-1], words[-1] ^ 1))
    found = seen("none", lambda rank, call: one_bit if (rank, call) == (2, 3) else None)
    assert kinds(judge(found)) == {"wrong", "lost"}
    assert next(v for v in judge(found) if v.kind == "wrong").where.startswith("rank 2 call 3 ")
    shorter = Result(words[:-1])
    assert "wrong" in kinds(judge(seen("none", failed_from(3, shorter, None))))


def test_call_of_another_group_is_found() -> None:
    entry = Entry(1, 1, "", Result(expected(CASE, 1, 0)))
    observation = seen("none", RIGHT)
    entries = tuple((*calls[:1], entry, *calls[1:]) for calls in observation.entries)
    assert "wrong" in kinds(judge(replace(observation, entries=entries)))


def test_hang_and_unexpected_end_are_found() -> None:
    observation = seen("none", RIGHT)
    for end, kind in {
        "hangs\nstacks": "hung",
        "killed": "crashed",
        "died with exit code -6": "crashed",
        "raised\nTraceback": "crashed",
    }.items():
        found = judge(replace(observation, ends=("returned", "returned", end)))
        assert kinds(found) == {kind}
        assert end in found[0].where


@pytest.mark.parametrize(
    ("text", "code", "explained"),
    [
        ("MP501: rank 1 did not reach it within 3 s", "MP501", True),
        ("MP504: it failed on all; ranks 0, 2 did not report it", "MP504", True),
        ("MP503: the store of the default group does not answer", "MP503", True),
        ("MP504: all of its ranks report it: look for a late rank", "MP504", True),
        ("MP412: op='avg' requires a floating-point tensor, got torch.int64", "MP412", True),
        ("MP504: the backend failed", "MP504", False),
        ("MP702: no rank came", "MP702", False),
        ("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]", "", False),
        ("rank 1 timed out", "", False),
    ],
)
def test_error_without_rank_and_reason_is_found(text: str, code: str, explained: bool) -> None:
    error = Result(error="SomeError", code=code, text=text)
    assert explains(error) == explained
    found = kinds(judge(seen("skipped", failed_from(1, error, error))))
    assert ("silent" in found) != explained


def test_unnoticed_difference_is_found() -> None:
    """A maximum may be right by chance where one rank asked for a sum."""
    assert kinds(judge(seen("operation", RIGHT))) == {"wrong", "unnoticed"}
    only_odd = seen("operation", lambda rank, call: DIFFERENT if (rank, call) == (1, 1) else None)
    assert kinds(judge(only_odd)) == {"unnoticed"}


def test_lost_recovery_is_found() -> None:
    """After a difference, after a late first reduction, and in a new group."""
    assert kinds(judge(seen("dtype", failed_from(1, DIFFERENT, STOPPED)))) == {"lost"}
    late = Result(error="GroupAgreementError", code="MP501", text="MP501: rank 1 did not reach it")
    assert kinds(judge(seen("late", failed_from(0, late, STOPPED), at=0))) == {"lost"}
    assert judge(seen("late", failed_from(0, late, None), at=0)) == []
    assert judge(seen("late", failed_from(0, late, STOPPED), at=0, door="backend")) == []
    observation = seen("skipped", failed_from(1, NAMED, STOPPED))
    entries = tuple((*calls[:-1], Entry(*calls[-1][:3], STOPPED)) for calls in observation.entries)
    assert kinds(judge(replace(observation, entries=entries))) == {"lost"}


def test_reduction_after_a_stop_is_found() -> None:
    assert kinds(judge(seen("late", failed_from(1, NAMED, None)))) == {"went on"}


def test_every_kind_is_documented_and_every_fault_has_a_script() -> None:
    assert all(KINDS.values())
    for fault in FAULTS:
        steps = [script(replace(CASE, fault=fault), rank) for rank in range(CASE.world)]
        assert steps[0] == steps[2]
        quiet = ("none", "threads", "late thread")
        assert (steps[0] == steps[1]) == (fault in quiet), fault
        if fault not in ("skipped", "reordered"):
            # An event that a rank waits for is one that others arrive at, before or without it.
            calls = [{step.call for step in mine if step.action == "reduce"} for mine in steps]
            assert calls[0] == calls[1] == set(range(CASE.calls)), fault
