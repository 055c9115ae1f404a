"""A rank of the backend that is killed, stopped, late or differs: every rank gets an error, in time.

Each job has a group for each combination of path, call and synchronous or not, and the fault strikes
all of them at once: each combination has a thread of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import meshplan
import meshplan.backend
from meshplan.flatten import _missing
from tests.faults.jobs import Outcome, attempt, die, end, run_job, stop_for
from tests.marks import full, longest
from tests.processes import run_in_threads

pytestmark = pytest.mark.processes

ODD = 1
NUMEL = 600
# Of calls in which no rank is missing, and of those behind the fault. Ranks come to the latter
# together, from a barrier.
LONG, SECONDS = 200.0, 8.0


class Case(NamedTuple):
    """One way to reduce."""

    path: str
    call: str
    is_async: bool


CASES = [
    Case(*case)
    for case in product(
        ("auto", "halving"), ("all_reduce", "reduce_scatter", "coalesced"), (False, True)
    )
]
Groups = dict[Case, dist.ProcessGroup]
Found = tuple[str, str]
"""The class of an error and its message; both empty if there was none."""


def create_groups(contract: meshplan.Contract | None = None) -> Groups:
    groups = {}
    for case in CASES:
        options = meshplan.BackendOptions(contract, path=case.path, timeout=timedelta(seconds=LONG))
        groups[case] = dist.new_group(backend="meshplan", pg_options=options)
    return groups


def issue(
    case: Case,
    group: Any,
    number: int = 0,
    *,
    numel: int = NUMEL,
    dtype: torch.dtype = torch.float32,
    op: Any = dist.ReduceOp.SUM,
) -> Callable[[], None]:
    """Reduce ``number`` on every rank: the sum shows which calls were paired. Returns the wait."""
    size = group.size()
    x = torch.full((numel * size,), float(number), dtype=dtype)
    work: Any
    if case.call == "all_reduce":
        result, work = x, dist.all_reduce(x, op, group=group, async_op=case.is_async)
    elif case.call == "reduce_scatter":
        result = torch.empty(numel, dtype=dtype)
        work = dist.reduce_scatter_single(result, x, op, group=group, async_op=case.is_async)
    else:
        with _coalescing_manager(group, async_ops=case.is_async) as work:
            for part in x.chunk(3):
                dist.all_reduce(part, op, group=group)
        result = x

    def wait() -> None:
        if case.is_async:
            work.wait()
        assert result.unique().tolist() == [number * size]

    return wait


def issue_four(case: Case, group: Any, odd_case: Case | None = None, **odd: Any) -> list[Found]:
    """Four calls; asynchronous ones are all issued before the first wait, but for the last. The
    first differs on rank ``odd`` by ``odd_case``.
    """
    calls = [lambda n=n: issue(case, group, n) for n in (2, 3, 4)]
    calls.insert(0, lambda: issue(odd_case or case, group, 1, **odd))
    if not case.is_async:
        return [attempt(lambda c=c: c()()) for c in calls]  # type: ignore[misc]
    waits = [call() for call in calls[:3]]
    return [*map(attempt, waits), attempt(lambda: calls[3]()())]


# How the odd rank's call differs.
OTHER_CALL = {"all_reduce": "reduce_scatter", "reduce_scatter": "all_reduce"}
DIFFERENCES: dict[str, dict[str, Any]] = {
    "shape": {"numel": NUMEL + 1},
    "dtype": {"dtype": torch.float64},
    "operation": {"op": dist.ReduceOp.MAX},
    "call": {},
}


def differ(rank: int) -> list[tuple[str, Case, list[Found]]]:
    groups = create_groups()
    found = []
    for name, odd in DIFFERENCES.items():
        for case, group in groups.items():
            other = case._replace(call=OTHER_CALL.get(case.call, case.call))
            if name == "call" and other == case:
                continue
            how = {"odd_case": other if name == "call" else None, **odd} if rank == ODD else {}
            found.append((name, case, issue_four(case, group, **how)))
    end()
    return found


@pytest.mark.parametrize("ranks", [3, full(5)])
def test_different_calls_are_an_error_on_every_rank(ranks: int) -> None:
    """The calls behind it, which are the same on all ranks again, are right."""
    for outcome in run_job(differ, ranks):
        assert outcome.failure == ""
        for name, case, (first, *others) in outcome.value:
            assert first[0] == "SignatureMismatchError", (name, case, first)
            assert re.search(r"\brank 1\b", first[1]), (name, case, first)
            assert others == [("", "")] * 3, (name, case, others)


def differ_in_contract(rank: int) -> dict[Case, list[Found]]:
    groups = create_groups(meshplan.Contract("rank") if rank == ODD else None)
    found = {case: issue_four(case, group) for case, group in groups.items()}
    end()
    return found


@pytest.mark.parametrize("ranks", [3, full(5)])
def test_different_contracts_are_an_error_on_every_rank(ranks: int) -> None:
    for outcome in run_job(differ_in_contract, ranks):
        assert outcome.failure == ""
        for case, (first, *others) in outcome.value.items():
            assert first[0] == "GroupAgreementError", (case, first)
            assert "v1/rank/wide/once (rank 1)" in first[1]
            assert all(first[1] in message for _, message in others)


def strike(fault: str) -> Callable[[int], Any]:
    """What a rank does: reductions, the fault, reductions, and what is possible after it."""

    def run(rank: int) -> tuple[dict[Case, list[Found]], list[Found]]:
        _missing._SECONDS = SECONDS
        groups = create_groups()
        for case, group in groups.items():
            issue(case, group, 5)()
        if fault != "late in time":
            for group in groups.values():
                group.set_timeout(timedelta(seconds=SECONDS))
        dist.barrier()
        if rank == ODD:
            STRIKES[fault]()
        found: dict[Case, list[Found]] = {}

        def reduce(case: Case) -> None:
            # With a branch of its own, the odd rank calls what the others wait for in other memory.
            other = case._replace(call="all_reduce" if case.call == "coalesced" else "coalesced")
            odd = other if rank == ODD and fault == "another branch" else None
            found[case] = issue_four(case, groups[case], odd)

        if rank != ODD or fault != "absent":
            run_in_threads(*(partial(reduce, case) for case in CASES))
        again = []
        if fault != "killed":
            dist.barrier()
            again = [attempt(issue(case, g, 6)) for case, g in create_groups().items()]
        end()
        return found, again

    return run


STRIKES: dict[str, Callable[[], object]] = {
    "killed": die,
    "stopped": lambda: stop_for(3 * SECONDS),
    "late": lambda: time.sleep(3 * SECONDS),
    "late in time": lambda: time.sleep(1),
    "absent": lambda: None,
    "another branch": lambda: None,
}


def run_strike(fault: str, ranks: int) -> list[Outcome]:
    outcomes = run_job(strike(fault), ranks, collective_timeout=200.0)
    for rank, outcome in enumerate(outcomes):
        killed = fault == "killed" and rank == ODD
        assert (outcome.failure, outcome.exit_code) == ("", -9 if killed else 0)
        if fault != "killed":
            _, again = outcome.value
            assert again == [("", "")] * len(CASES)
    return outcomes


def check_first(fault: str, case: Case, rank: int, first: Found) -> None:
    """The error of the call in which a rank is missing."""
    name, message = first
    if rank == ODD:
        # It was not missing itself, as far as it knows, or the others have given up.
        assert re.search(r"rank 1 \(this one\)|all of its ranks report it", message), (case, first)
        return
    in_memory = case.path == "auto" and case.call != "coalesced"
    assert name == ("PeerTimeoutError" if in_memory else "CollectiveError"), (case, first)
    if fault == "killed":
        assert "rank 1 has ended" in message
    elif in_memory:
        assert "rank 1 did not reach" in message
    elif fault == "stopped":
        assert "rank 1 is stopped or unreachable" in message
    else:
        # One that may be alive is only a candidate.
        assert re.search(r"ranks? (\d, )*1(, \d)* did not report it too", message), (case, first)
        assert "or one that still waits for such a rank" in message


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [
        ("killed", 3),
        full("killed", 5),
        full("stopped", 5),
        *(full(fault, 3) for fault in ("stopped", "late", "absent")),
        *(longest(fault, 5) for fault in ("late", "absent")),
    ],
)
def test_a_missing_rank_is_named_and_its_group_stops(fault: str, ranks: int) -> None:
    """No later call of one rank is paired with another call of the others."""
    for rank, outcome in enumerate(run_strike(fault, ranks)):
        if outcome.value is None:
            continue
        found, _ = outcome.value
        assert len(found) == (0 if rank == ODD and fault == "absent" else len(CASES))
        for case, (first, *others) in found.items():
            check_first(fault, case, rank, first)
            for name, message in others:
                assert name == "GroupStateError", (case, name, message)
                assert "has stopped, because a reduction failed before: " in message
                assert first[1] in message


@pytest.mark.parametrize("ranks", [full(3), full(5)])
def test_a_rank_that_is_late_in_time_fails_nothing(ranks: int) -> None:
    for outcome in run_strike("late in time", ranks):
        found, _ = outcome.value
        assert found == {case: [("", "")] * 4 for case in CASES}


@pytest.mark.parametrize("ranks", [full(3), full(5)])
def test_a_list_in_place_of_one_tensor_is_an_error_on_every_rank(ranks: int) -> None:
    """Found at once where both go through the backend; else the ranks wait in different places."""
    for outcome in run_strike("another branch", ranks):
        found, _ = outcome.value
        for case, (first, *others) in found.items():
            assert first[0] in (
                "SignatureMismatchError",
                "PeerTimeoutError",
                "CollectiveError",
            ), (case, first)
            assert all(not name or name == "GroupStateError" for name, _ in others), (case, others)
            assert case.path == "auto" or first[0] == "SignatureMismatchError", (case, first)
