"""Lanes: threads that run collectives concurrently with the caller, and their works."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshplan.collectives._lanes import Work, in_lane
from meshplan.errors import GroupStateError
from tests.processes import run_ranks

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")


def lanes() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("meshplan ")]


def test_finished_work_returns_its_result() -> None:
    work = Work(3)
    assert isinstance(work, dist.Work)
    assert work.wait(timedelta(seconds=0)) is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result() == 3
    work.synchronize()


class EndingFuture(Future[str]):
    """It ends just when a limited wait for it does."""

    def result(self, timeout: float | None = None) -> str:
        if timeout is not None:
            self.set_result("found")
            raise TimeoutError
        return super().result()


def test_work_that_ends_with_a_limited_wait_has_finished() -> None:
    assert Work(future=EndingFuture()).wait(timedelta(seconds=1))


def test_works_run_in_order_and_fail_separately() -> None:
    """Sequentially on one thread; a failure affects its own work only."""

    def ranks(rank: int) -> bool:
        group: Any = dist.group.WORLD
        seen, go = [], threading.Event()

        def first() -> str:
            assert go.wait(20)
            assert not torch.is_grad_enabled()
            seen.append("first")
            return threading.current_thread().name

        def second() -> None:
            seen.append("second")
            raise ZeroDivisionError("no sum")

        works = [in_lane(group, CPU, one) for one in (first, second, lambda: 5)]
        assert seen == []
        assert not any(work.is_completed() for work in works)
        with pytest.raises(GroupStateError, match=r"did not finish within 0\.01 s and still runs"):
            works[1].wait(timedelta(seconds=0.01))
        go.set()
        assert works[2].result() == 5
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="no sum"):
                works[1].wait()
        assert isinstance(works[1].exception(), ZeroDivisionError)
        assert works[1].is_completed()
        assert not works[1].is_success()
        assert works[0].result() == lanes()[0].name
        assert seen == ["first", "second"]
        return len(lanes()) == 1

    assert run_ranks(ranks, 1) == [True]


def test_timeout_raised_by_the_collective_is_passed_on() -> None:
    def fail() -> Any:
        raise TimeoutError("of the store")

    def ranks(rank: int) -> bool:
        group: Any = dist.group.WORLD
        with pytest.raises(TimeoutError, match="of the store"):
            in_lane(group, CPU, fail).wait(timedelta(seconds=20))
        return True

    assert run_ranks(ranks, 1) == [True]


def test_a_thread_ends_with_its_group() -> None:
    def ranks(rank: int) -> bool:
        group = dist.new_group([0, 1])
        # A rank that is still connecting fails if another destroys the group.
        dist.barrier()
        in_lane(group, CPU, lambda: None).wait()
        assert len(lanes()) == 1
        dist.destroy_process_group(group)
        del group
        gc.collect()
        deadline = time.monotonic() + 300
        while lanes() and time.monotonic() < deadline:
            time.sleep(0.01)
        return not lanes()

    assert run_ranks(ranks, 2) == [True, True]


def test_a_fork_gets_a_thread_of_its_own() -> None:
    def ranks(rank: int) -> int:
        group: Any = dist.group.WORLD
        in_lane(group, CPU, lambda: None).wait()
        child = os.fork()
        if child == 0:
            work = in_lane(group, CPU, lambda: 7)
            os._exit(work.result() if work.wait(timedelta(seconds=20)) else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_ranks(ranks, 1) == [7]


@pytest.mark.full
def test_pending_work_does_not_keep_a_process_alive() -> None:
    program = """
import threading, torch, torch.distributed as dist
from meshplan.collectives._lanes import in_lane
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
in_lane(dist.group.WORLD, torch.device("cpu"), threading.Event().wait)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=300, check=False)
    assert done.returncode == 0


def test_inference_mode_is_inherited() -> None:
    def ranks(rank: int) -> list[bool]:
        group: Any = dist.group.WORLD
        found = [in_lane(group, CPU, torch.is_inference_mode_enabled)]
        with torch.inference_mode():
            found.append(in_lane(group, CPU, torch.is_inference_mode_enabled))
        return [work.result() for work in found]

    assert run_ranks(ranks, 1) == [[False, True]]
