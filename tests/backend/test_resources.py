"""Descriptors, threads and memory of a group of the backend, from its creation to its end."""

from __future__ import annotations

import gc
import os
import re
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshplan
from meshplan.backend import BackendOptions
from meshplan.flatten import registry
from tests.processes import arrive, open_links, run_in_threads, run_ranks, wait_for

pytestmark = pytest.mark.processes
IDLE = 4


def used() -> tuple[int, int, int]:
    """Descriptors without paths, threads and mappings of shared memory of this process.

    Files with paths are not counted: each call of a store, of any thread, opens its file for a
    moment. The listing itself has one too.
    """
    gc.collect()
    # Sockets, pipes, memory, and what the kernel calls anonymous.
    unnamed = sum(link[:1] != "/" or link.startswith("/memfd:") for link in open_links())
    mapped = Path("/proc/self/maps").read_text().count("memfd:meshplan")
    return unnamed, len(os.listdir("/proc/self/task")), mapped


def added(before: tuple[int, int, int]) -> list[int]:
    return [now - then for now, then in zip(used(), before, strict=True)]


def settle(before: tuple[int, int, int], most: int) -> list[int]:
    """What was added, once it has at most so many descriptors: a thread closes them as it ends."""
    deadline = time.monotonic() + 100
    while (found := added(before))[0] > most and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def reduce(group: Any, value: float = 1.0, is_async: bool = False) -> float:
    x = torch.full((3,), value)
    work = dist.all_reduce(x, group=group, async_op=is_async)
    if work is not None:
        work.wait()
    return x[0].item()


def idle_groups(rank: int) -> list[list[int]]:
    """What each of some groups takes, in the backend and in gloo, before a reduction."""
    found = []
    for backend in ("meshplan", "gloo"):
        before = used()
        groups = [dist.new_group(backend=backend) for _ in range(IDLE)]
        # Calls that move data need nothing else.
        for group in groups:
            dist.barrier(group)
        dist.barrier()
        found.append([one // IDLE for one in added(before)])
        del groups, group
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_idle_group_takes_no_more_than_one_of_gloo(ranks: int) -> None:
    for found, gloo in run_ranks(idle_groups, ranks, backend="meshplan"):
        assert found == gloo
        assert found[0] <= 7
        assert found[1] <= 4


def end_groups(rank: int) -> list[Any]:
    """What is left of groups that have reduced: of one, while it is held, and of all."""
    before, entries = used(), len(registry()._table)
    group = dist.new_group(backend="meshplan")
    dist.barrier()
    idle = added(before)
    reduce(group)
    reduce(group, is_async=True)
    meshplan.deterministic_all_reduce(torch.ones(3), group=group)
    mapped = used()[2] - before[2]
    dist.destroy_process_group(group)
    held = settle(before, idle[0])
    found: list[Any] = [mapped > 0, held[0] - idle[0], held[2], len(registry()._table) - entries]
    # A rank whose peer has dropped the group has fewer connections.
    dist.barrier()
    # The thread of asynchronous calls ends with the object.
    del group
    found.append(settle(before, 0)[0])
    groups = [dist.new_group(backend="meshplan") for _ in range(3)]
    total = [reduce(one) for one in groups]
    assert total == [float(dist.get_world_size())] * 3
    reduce(None)
    dist.barrier()
    del groups
    dist.destroy_process_group()
    return [*found, used()[2]]


def test_memory_and_descriptors_go_with_their_group() -> None:
    for found in run_ranks(end_groups, 2, backend="meshplan"):
        assert found == [True, 0, 0, 0, 0, 0]


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Let this process open so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def create_too_many(rank: int) -> list[tuple[str, int]]:
    found = []
    # With and without room for a part of the last group.
    for more in (18, 19, 20, 21, 22):
        groups: list[Any] = []
        dist.barrier()
        with few_descriptors(more):
            try:
                while True:
                    groups.append(dist.new_group(backend="meshplan"))
            except meshplan.MeshplanError as error:
                found.append((str(error), len(groups)))
    dist.barrier()
    return found


EXHAUSTED = (
    r"it needs 13 file descriptors, and this process has opened \d+ of \d+, the limit of ulimit -n; "
    r"raise the limit before the job starts, such as with ulimit -n 65536, or destroy groups that "
    r"the job does not use any more$"
)


def test_too_many_groups_are_refused_with_the_limit() -> None:
    for found in run_ranks(create_too_many, 2, backend="meshplan"):
        assert len(found) == 5
        for error, groups in found:
            assert re.match(r"MP503: group \d+ of 2 ranks cannot be created: " + EXHAUSTED, error)
            assert groups > 0


def reduce_without_descriptors(rank: int) -> list[Any]:
    """Rank 1 has none left at the first reduction, and some at the second."""
    group = dist.new_group(backend="meshplan")
    found: list[Any] = []
    with few_descriptors(3 if rank == 1 else 100):
        try:
            reduce(group)
        except meshplan.MeshplanError as error:
            found.append(str(error))
    return [*found, reduce(group, rank + 1.0)]


def test_a_rank_without_descriptors_refuses_the_first_reduction_for_all() -> None:
    for error, total in run_ranks(
        reduce_without_descriptors, 2, backend="meshplan", collective_timeout=3600
    ):
        start = "MP503: rank 1 cannot join the group of ranks 0, 1: "
        assert re.match(start + EXHAUSTED, error)
        assert total == 3.0


def come_late(is_async: bool, rank: int) -> list[Any]:
    """Rank 1 comes when rank 0 has given up; then both go on."""
    options = BackendOptions(timeout=timedelta(seconds=2))
    group = dist.new_group(backend="meshplan", pg_options=options)
    if rank == 1:
        wait_for("gave up", 1)
    found: list[Any] = []
    try:
        reduce(group, 10.0 * rank, is_async)
    except meshplan.errors.GroupAgreementError as error:
        found += [error.code, error.missing]
    if rank == 0:
        arrive("gave up")
    wait_for_both("second")
    return [*found, reduce(group, rank + 1.0, is_async), reduce(group, rank + 2.0)]


def wait_for_both(name: str) -> None:
    arrive(name)
    wait_for(name, 2)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_late_rank_is_named_and_both_go_on(is_async: bool) -> None:
    for found in run_ranks(partial(come_late, is_async), 2, backend="meshplan"):
        assert found == ["MP501", (1,), 3.0, 5.0]


def reduce_in_threads(rank: int) -> list[float]:
    """Two threads come to the first reduction of a group at once."""
    group = dist.new_group(backend="meshplan")
    found, gate = [], threading.Barrier(2)

    def run() -> None:
        gate.wait()
        found.append(reduce(group))

    run_in_threads(run, run)
    return found


def test_two_threads_may_come_to_the_first_reduction() -> None:
    assert run_ranks(reduce_in_threads, 2, backend="meshplan") == [[2.0, 2.0]] * 2


def cross_first_reductions(rank: int) -> list[float]:
    """Asynchronous first reductions of several groups, started in opposite orders."""
    shared = dist.FileStore(os.environ["MESHPLAN_TEST_STORE"], 2)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        shared.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(shared.get("port")), 2)
    dist.init_process_group("meshplan", store=store, rank=rank, world_size=2)
    world: Any = dist.group.WORLD
    groups = [dist.new_group(backend="meshplan") for _ in range(4)]
    groups += [world.split_group([1, 0]), world]
    tensors = [torch.full((3,), float(rank + i)) for i in range(len(groups))]
    works: list[Any] = [None] * len(groups)
    for i in range(len(groups))[:: -1 if rank else 1]:
        works[i] = dist.all_reduce(tensors[i], group=groups[i], async_op=True)
    for work in works:
        work.wait()
    dist.barrier()
    return [x[0].item() for x in tensors]


def test_first_reductions_of_several_groups_may_cross() -> None:
    found = run_ranks(cross_first_reductions, 2, init=False)
    assert found == [[1.0 + 2 * i for i in range(6)]] * 2


def reduce_alone(rank: int) -> list[Any]:
    group = world = dist.group.WORLD
    found: list[Any] = []
    for group in (dist.new_group([rank], use_local_synchronization=True), world):
        before = used()
        # A group of one rank has no other to reduce with.
        found += [reduce(group, 2.0), reduce(group, 2.0), added(before)[:2] == [0, 0]]
    return found


def test_a_group_of_one_rank_stays_as_it_is() -> None:
    for found in run_ranks(reduce_alone, 2, backend="meshplan"):
        assert found == [2.0, 2.0, True, 4.0, 4.0, False]


def scatter_inside(rank: int) -> int:
    group: Any = dist.group.WORLD
    for _ in range(4):
        blocks = [torch.full((1000,), rank + i) for i in range(2)]
        dist.reduce_scatter(torch.empty_like(blocks[0]), blocks, dist.ReduceOp.BXOR)
    dist.all_reduce(blocks[0], dist.ReduceOp.BXOR)
    return len(group._calls._works)


def test_reductions_of_the_inner_backend_do_not_keep_their_memory() -> None:
    assert run_ranks(scatter_inside, 2, backend="meshplan") == [1, 1]


def connect_stages(rank: int) -> float:
    """Stage 0 has reduced, stage 1 has not, and one rank of each creates a group with the other."""
    stages = [dist.new_group(ranks, backend="meshplan") for ranks in ([0, 1], [2, 3])]
    if rank < 2:
        reduce(stages[0])
    if rank in (0, 3):
        return 2.0
    # Torch names it by the number of groups that this rank has.
    both = dist.new_group(
        [1, 2], backend="meshplan", use_local_synchronization=True, timeout=timedelta(seconds=20)
    )
    return reduce(both)


def test_ranks_that_have_reduced_create_groups_with_others() -> None:
    assert run_ranks(connect_stages, 4, backend="meshplan") == [2.0] * 4
