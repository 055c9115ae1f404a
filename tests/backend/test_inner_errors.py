"""Errors of reductions that the inner backend runs: which of them stop the group, and when."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import meshplan
from tests.marks import full
from tests.processes import arrive, run_ranks, shorten, start_all_reduce, wait_for
from tests.refusals import refusal

pytestmark = pytest.mark.processes
BAND, SUM = dist.ReduceOp.BAND, dist.ReduceOp.SUM


def start(op: dist.ReduceOp.RedOpType, dtype: torch.dtype = torch.int32) -> dist.Work:
    return start_all_reduce(torch.ones(3).to(dtype), op=op)


def wait_and_catch(work: dist.Work, found: list[str]) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        found.append(str(error))


def fail(how: str) -> list[str]:
    """A bitwise reduction to which a rank does not come; the errors that the caller has seen."""
    found: list[str] = []
    if how == "issued":
        return [refusal(RuntimeError, dist.all_reduce, torch.ones(3, dtype=torch.int32), op=BAND)]
    work = start(BAND)
    future = work.get_future()
    if how == "waited":
        wait_and_catch(work, found)
    elif how == "waited in another thread":
        thread = threading.Thread(target=wait_and_catch, args=(work, found))
        thread.start()
        thread.join()
    del work
    while not future.done():
        time.sleep(0.02)
    return found


def refusals() -> list[str]:
    """What the calls after it raise, through each door."""
    ones = torch.ones(3)
    found = []
    for call in (
        lambda: dist.all_reduce(ones),
        lambda: dist.all_reduce(ones.int(), op=BAND),
        lambda: meshplan.deterministic_all_reduce(ones),
        lambda: start(SUM, torch.float32).wait(),
    ):
        found.append(refusal(RuntimeError, call))
    return found


@pytest.mark.parametrize(
    ("how", "late"),
    [
        ("waited", 0),
        ("issued", 1),
        ("never waited", 1),
        ("waited in another thread", 2),
        *(
            full(how, late)
            for how, late in (
                ("issued", 0),
                ("never waited", 2),
                ("waited in another thread", 0),
            )
        ),
    ],
)
def test_failed_inner_reduction_stops_the_group(how: str, late: int) -> None:
    """Whoever sees the error, or no one; a rank that comes after the others have given up too."""

    def ranks(rank: int) -> tuple[list[str], list[str]]:
        dist.all_reduce(torch.ones(3))
        shorten(2.0)
        if rank == late:
            wait_for("failed", 2)
        first = fail(how)
        arrive("failed")
        wait_for("failed", 3)
        return first, refusals()

    for first, later in run_ranks(ranks, 3, backend="meshplan"):
        assert len(first) == (0 if how == "never waited" else 1)
        for text in later:
            assert text.startswith("MP503"), text
            assert "failed before: the inner backend, which names no rank, failed on this" in text
            assert not first or first[0].splitlines()[0][:60] in text


@pytest.mark.parametrize("is_async", [True, False])
def test_refusal_of_every_rank_leaves_the_group_usable(is_async: bool) -> None:
    def refused() -> None:
        halves = torch.ones(3).half()
        work = dist.all_reduce(halves, op=BAND, async_op=is_async)
        if work is not None:
            work.wait()

    def ranks(rank: int) -> float:
        found = torch.ones(3)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="non-integral dtype"):
                refused()
            dist.all_reduce(found)
        return float(found[0])

    assert run_ranks(ranks, 2, backend="meshplan") == [4.0, 4.0]


def test_wait_that_ends_before_the_reduction_leaves_the_group_usable() -> None:
    def ranks(rank: int) -> tuple[int, float]:
        if rank == 1:
            wait_for("gave up", 1)
        work = start(BAND)
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                work.wait(timedelta(milliseconds=50))
            arrive("gave up")
        work.wait()
        found = torch.ones(3)
        dist.all_reduce(found)
        return int(work.result()[0][0]), float(found[0])

    assert run_ranks(ranks, 2, backend="meshplan") == [(1, 2.0), (1, 2.0)]
