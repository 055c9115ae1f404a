"""``abort``, ``shutdown`` and ``set_timeout`` end waits for a rank that does not come, on any path."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshplan
import meshplan.backend
from meshplan._calls import THIS_THREAD, Abort
from meshplan.backend._group import MeshplanProcessGroup
from meshplan.execute import _wire
from meshplan.execute._gloo import GlooWire
from meshplan.execute._groups import StepGroups
from meshplan.execute._header import tensor_header
from meshplan.execute._wire import Message
from meshplan.execute.paths import _exchange
from meshplan.flatten import _missing
from tests.faults.jobs import attempt
from tests.processes import arrive, run_ranks, set_timeout, start_all_reduce, wait_for
from tests.test_collectives import step

pytestmark = pytest.mark.processes
PATHS = pytest.mark.parametrize("path", ["auto", "exchange", "halving", "reference"])
# Of the group: far more than any test takes.
LONG = timedelta(seconds=300)


def new_group(path: str, timeout: timedelta = LONG) -> MeshplanProcessGroup:
    options = meshplan.BackendOptions(path=path, timeout=timeout)
    group = dist.new_group(backend="meshplan", pg_options=options)
    assert isinstance(group, MeshplanProcessGroup)
    return group


def text_of(run: Callable[[], Any]) -> str:
    return attempt(run)[1]


def leave_alone(rank: int, done: str = "done") -> bool:
    """Rank 1 does not come, until rank 0 is done."""
    if rank == 1:
        wait_for(done, 1)
    return rank == 1


def reduce(group: MeshplanProcessGroup) -> None:
    dist.all_reduce(torch.ones(5), group=group)


class EndingWork(dist.Work):
    """A collective that ends just when a limited wait for it does."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.error, self.ended = error, False

    def is_completed(self) -> bool:
        return self.ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            self.ended = True
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True


def test_a_collective_that_ends_with_a_slice_of_the_wait_has_not_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(THIS_THREAD, "abort", Abort("a group"))
    group: Any = SimpleNamespace(group_name="0")
    work = EndingWork()
    _wire.wait_for_group(work, group)
    assert work.ended
    with pytest.raises(RuntimeError, match="its own error"):
        _wire.wait_for_group(EndingWork("its own error"), group)


def abort_waiting(path: str, rank: int) -> list[list[str]]:
    """Rank 1 does not come; another thread of rank 0 aborts the group."""
    found = []
    for first, is_async in itertools.product((True, False), repeat=2):
        done = f"done {first} {is_async}"
        group = new_group(path)
        if not first:
            reduce(group)
        if leave_alone(rank, done):
            continue
        timer = threading.Timer(1.0, group.abort)
        timer.start()
        if is_async:
            works = [start_all_reduce(torch.ones(5), group=group) for _ in range(3)]
            texts = [text_of(work.wait) for work in works]
        else:
            texts = [text_of(partial(reduce, group))]
        # The call after the failure, and the end.
        found.append([*texts, text_of(partial(reduce, group))])
        timer.join()
        group.shutdown()
        arrive(done)
    return found


@PATHS
def test_abort_ends_the_reduction_under_way_and_those_behind_it(path: str) -> None:
    found, _ = run_ranks(partial(abort_waiting, path), 2, backend="meshplan")
    assert [len(texts) for texts in found] == [4, 2, 4, 2]
    for under_way, *others in found:
        assert under_way.startswith("MP503: group ")
        assert "of 2 ranks was aborted while it waited for " in under_way
        for one in others:
            assert one.startswith("MP503: group ")
            assert "of 2 ranks was aborted; destroy it" in one


def wait_for_data(rank: int) -> list[str]:
    """Headers are compared, and rank 1 sends no data; another thread aborts."""
    group = dist.new_group(timeout=LONG)
    large = torch.ones(2 * GlooWire.in_place_bytes)
    wanted = step("exchange", sizes=(2,))
    header = tensor_header(large, wanted, "exchange", False)
    wire = GlooWire(StepGroups(group), (rank, header))
    wire.compare()
    if leave_alone(rank):
        return []
    message = Message(False, large.view(torch.uint8), 1)
    waits: list[Callable[[], Any]] = [
        lambda: wire.start_exchange(large.view(2, -1), group)(),
        lambda: wire.start_gather(large, group)(),
        lambda: wire.start_round([message], group, large.device)(),
        lambda: _exchange.PATH.all_reduce(large, wanted, StepGroups(group), wire),
    ]
    found = []
    for wait in waits:
        THIS_THREAD.abort = abort = Abort("a group")
        timer = threading.Timer(0.5, setattr, (abort, "requested", True))
        timer.start()
        found.append(text_of(wait))
        timer.join()
    arrive("done")
    return found


def test_abort_ends_waits_for_data() -> None:
    found, _ = run_ranks(wait_for_data, 2)
    assert len(found) == 4
    for message in found:
        assert message.startswith("MP503: a group was aborted while it waited for ranks of group ")


def by_method(limit: timedelta, group: MeshplanProcessGroup) -> None:
    group.set_timeout(limit)


def shorten(path: str, rank: int) -> list[str]:
    """The timeout of groups that have reduced before."""
    _missing._SECONDS = 1.0
    found = []
    # By the function as torchtitan does after its first step.
    for set_limit in (set_timeout, by_method):
        group, done = new_group(path), f"done {set_limit.__name__}"
        for _ in range(3):
            reduce(group)
        set_limit(timedelta(seconds=2), group)
        reduce(group)
        if leave_alone(rank, done):
            continue
        found.append(text_of(partial(reduce, group)))
        group.shutdown()
        arrive(done)
    return found


@PATHS
def test_set_timeout_reaches_later_reductions(path: str) -> None:
    found, _ = run_ranks(partial(shorten, path), 2, backend="meshplan")
    assert len(found) == 2
    for text in found:
        assert "rank 1" in text
        assert text[:5] in ("MP504", "MP702")


def shut_down_behind_failure(path: str, rank: int) -> list[str]:
    """Reductions without a wait, behind one with a missing rank."""
    _missing._SECONDS = 1.0
    group = new_group(path, timedelta(seconds=4))
    reduce(group)
    if leave_alone(rank):
        return []
    first, *others = [start_all_reduce(torch.ones(5), group=group) for _ in range(30)]
    found = [text_of(first.wait)]
    begun = time.monotonic()
    group.shutdown()
    # Each of them alone would wait for 4 s.
    found.append(str(time.monotonic() - begun < 60))
    found += [text_of(work.wait) for work in others]
    arrive("done")
    return found


@pytest.mark.parametrize("path", ["auto", "exchange"])
def test_shutdown_after_a_failure_waits_for_no_reduction_behind_it(path: str) -> None:
    (first, fast, *others), _ = run_ranks(
        partial(shut_down_behind_failure, path), 2, backend="meshplan"
    )
    assert first[:5] in ("MP504", "MP702")
    assert fast == "True"
    assert {one[:5] for one in others} == {"MP503"}
