"""A loop in a thread that the main thread waits for: the main thread's groups, else its own."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan.definition import reduce_leaves
from meshplan.errors import GroupStateError, MeshplanError
from meshplan.flatten import _threads, registry
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.processes import common_result, run_ranks

pytestmark = pytest.mark.processes

P, R = Partial(), Replicate()
AXES = ((P, P), (R, P), (P, R))


def reduce_all(mesh: DeviceMesh) -> None:
    """Over every set of axes, bit for bit."""
    world, rank = dist.get_world_size(), dist.get_rank()
    leaves = [order_sensitive(100, rank=r, world_size=world, seed=3) for r in range(world)]
    for placements in AXES:
        axes = [i for i, p in enumerate(placements) if p.is_partial()]
        where = [int(i) for i in (mesh.mesh == rank).nonzero()[0]]
        group = mesh.mesh[tuple(slice(None) if i in axes else where[i] for i in range(2))]
        sizes = tuple(mesh.size(axis) for axis in axes)
        expected = reduce_leaves([leaves[r] for r in group.flatten().tolist()], "sum", sizes)
        d = DTensor.from_local(leaves[rank], mesh, placements, run_check=False)
        assert_bitwise_equal(d.redistribute(mesh, [R, R]).to_local(), expected)


def groups_of(function: Callable[[], object]) -> list[str]:
    """The groups in the report."""
    meshplan.clear_report()
    function()
    return [entry["group"] for entry in meshplan.report().entries]


def expect_join(seconds: float) -> AbstractContextManager[object]:
    return mock.patch.object(_threads, "_SECONDS_TO_JOIN", seconds)


def in_thread(function: Callable[[], object], timeout: float | None = None) -> None:
    """Run it in a thread, and wait as the caller of a training loop does.

    Without a time-out, the thread gives this one all the time that it needs to come to ``join``.
    """
    wrong: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=run, name="loop", daemon=True)
    with expect_join(100.0 if timeout is None else 0.2):
        thread.start()
        if timeout is None:
            thread.join()
        while thread.is_alive():
            thread.join(timeout)
    if wrong:
        raise wrong[0]


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


LENT = " (the main thread's, which waits for this thread)"


def test_joined_thread_uses_the_groups_of_the_main_thread() -> None:
    def case(first: str, path: str) -> Any:
        mesh = square()
        with meshplan.installed(path=path, timeout=60.0):
            if first == "prepare":
                meshplan.prepare(mesh)
            main = groups_of(lambda: reduce_all(mesh)) if first == "main" else None
            created = registry()._table.created()
            threads = [groups_of(lambda: in_thread(lambda: reduce_all(mesh))) for _ in range(2)]
            main_again = groups_of(lambda: reduce_all(mesh))
            assert registry()._table.created() == created, (first, path)
        meshplan.shutdown()
        assert main is None or main == main_again
        return *threads, main_again

    cases = list(itertools.product(("main", "thread", "prepare"), ("auto", "exchange")))
    for found in run_ranks(lambda _: [case(*one) for one in cases], 4):
        for one, (thread, again, main) in zip(cases, found, strict=True):
            assert thread == again == [group + LENT for group in main], one
            assert [group.split()[0] for group in main] == ["default", "axis", "axis"], one


def test_flattened_mesh_of_the_user_is_usable_in_a_thread() -> None:
    def rank_of(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        mesh["b", "c"]._flatten("bc")
        d = DTensor.from_local(torch.ones(4), mesh, [R, P, P], run_check=False)
        with meshplan.installed(timeout=60.0):
            return groups_of(lambda: in_thread(lambda: d.redistribute(mesh, [R, R, R])))

    for (group,) in run_ranks(rank_of, 8):
        assert group.startswith("flattened group ")
        assert group.endswith(LENT)


def test_one_unjoined_thread_gives_all_ranks_separate_groups() -> None:
    """Which a rank cannot see of the others: they agree on it."""

    def rank_of(rank: int) -> tuple[list[str], list[str]]:
        mesh = square()
        with meshplan.installed(timeout=60.0):
            main = groups_of(lambda: reduce_all(mesh))
            timeout = 0.5 if rank == 3 else None
            thread = groups_of(lambda: in_thread(lambda: reduce_all(mesh), timeout))
            assert main == groups_of(lambda: reduce_all(mesh))
        meshplan.shutdown()
        return [g.partition(" (")[2] for g in thread], [g.split()[0] for g in thread]

    found = run_ranks(rank_of, 4)
    own = "the thread's own: the main thread of rank 3 did not wait for its thread in join() "
    own += "without a timeout)"
    assert [why for why, _ in found] == [
        [own, LENT[2:], LENT[2:]],
        [own, LENT[2:], own],
        [own, own, LENT[2:]],
        [own, own, own],
    ]
    assert [kinds[0] for _, kinds in found] == ["created"] * 4


def test_nested_threads_reduce_correctly() -> None:
    """Only what the main thread waits for, by whatever way, is in its place."""

    def rank_of(rank: int) -> tuple[list[str], list[str]]:
        mesh, other = square(), init_device_mesh("cpu", (4, 1), mesh_dim_names=("x", "y"))
        d = DTensor.from_local(torch.ones(4), other, [P, P], run_check=False)
        with meshplan.installed(timeout=60.0):
            deep = groups_of(lambda: in_thread(lambda: in_thread(lambda: reduce_all(mesh))))
            timed = groups_of(
                lambda: in_thread(lambda: in_thread(lambda: d.redistribute(other, [R, R]), 1.0))
            )
        meshplan.shutdown()
        return deep, timed

    for deep, (timed,) in run_ranks(rank_of, 4):
        assert all(group.endswith(LENT) for group in deep)
        assert timed.startswith("created group ")


class TestMessages(TestCase):
    maxDiff = None

    def test_later_unjoined_thread_is_refused(self) -> None:
        def rank_of(rank: int) -> str:
            mesh = square()
            with meshplan.installed(timeout=60.0):
                in_thread(lambda: reduce_all(mesh))
                with pytest.raises(GroupStateError) as caught:
                    in_thread(lambda: reduce_all(mesh), 0.3)
                # On all ranks, so that none waits for another, and the groups are as they were.
                in_thread(lambda: reduce_all(mesh))
                reduce_all(mesh)
            return str(caught.value)

        self.assertExpectedInline(
            common_result(rank_of, 4),
            """MP503: thread 'loop' called a reduction over default group 0 of 4 ranks: 0, 1, 2, 3 (the main thread's, which waits for this thread), a group of the main thread, which does not wait for this thread as it did for the one before; wait for each in Thread.join() without a timeout, or give this one a mesh of its own""",
        )

    def test_main_thread_reducing_concurrently_is_refused(self) -> None:
        def rank_of(rank: int) -> str:
            mesh = square()
            begun, go = threading.Event(), threading.Event()

            def loop() -> None:
                reduce_all(mesh)
                begun.set()
                assert go.wait(60)
                reduce_all(mesh)

            thread = threading.Thread(target=loop, name="loop", daemon=True)
            with meshplan.installed(timeout=60.0), expect_join(100.0):
                thread.start()
                with pytest.raises(KeyboardInterrupt):
                    interrupt_when(begun, thread.join)
                with pytest.raises(MeshplanError) as caught:
                    reduce_all(mesh)
                go.set()
                # join() takes the thread for ended, once it was interrupted.
                while thread in threading.enumerate():
                    time.sleep(0.01)
                reduce_all(mesh)
            return str(caught.value)

        self.assertExpectedInline(
            common_result(rank_of, 4),
            """MP503: the main thread called a reduction over default group 0 of 4 ranks: 0, 1, 2, 3 while thread 'loop' runs, which reduces over groups of the main thread because that one waited for it; join it first, or give it a mesh of its own""",
        )

    def test_store_without_clone_is_refused(self) -> None:
        """The threads create groups of their own, through a store that has no clone()."""

        def rank_of(rank: int) -> str:
            mesh = square()
            store = c10d._get_default_store()
            inner: Any = Uncloned(store)
            c10d._get_default_store = lambda: inner
            with meshplan.installed(timeout=60.0):
                reduce_all(mesh)
                with pytest.raises(MeshplanError) as caught:
                    in_thread(lambda: reduce_all(mesh), 0.3)
                reduce_all(mesh)
            c10d._get_default_store = lambda: store
            return re.sub(r"rank \d failed", "rank N failed", str(caught.value))

        messages = run_ranks(rank_of, 4)
        self.assertExpectedInline(
            messages[0],
            """MP502: the group of ranks 0, 1, 2, 3 was agreed on but could not be created, rank N failed: GroupStateError: MP503: a thread beside the main thread creates groups through a store of its own, and the default group's Uncloned has no clone(); give init_process_group a TCPStore, or have the main thread wait for the thread in Thread.join() without a timeout; the members have dropped it and the next call tries again""",
        )


def interrupt_when(event: threading.Event, wait: Callable[[], None]) -> None:
    """Wait in the main thread until the event interrupts the wait."""

    def interrupt() -> None:
        assert event.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    wait()


class Uncloned(dist.Store):
    """A store written in Python, as in tests and launchers. It cannot be cloned."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def __getattribute__(self, name: str) -> Any:
        if name in ("check", "get", "multi_get", "set", "add", "compare_set", "wait", "delete_key"):
            return getattr(object.__getattribute__(self, "_store"), name)
        return object.__getattribute__(self, name)
