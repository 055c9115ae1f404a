"""Run a function on several ranks, each a separate process, over gloo. Every wait is bounded."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import meshplan

_FORK = multiprocessing.get_context("fork")
# Seconds for gloo to connect the ranks, whatever timeout the group has afterwards, and how often it
# may try.
BRING_UP = 100.0
ATTEMPTS = 3
# Its name since torch 2.15.
set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)


@cache
def load_what_ranks_load() -> None:
    """Import here, once, the modules that each forked rank needs for its first redistribution.

    A rank spends over a second of CPU time on it, and on a redistribution a few hundredths.
    """
    # A process that has asked a driver for GPUs cannot be forked: there, each rank loads them.
    if any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
        return
    for name in ("torch._dynamo", "torch._subclasses.schema_check_mode", "meshplan.dtensor"):
        importlib.import_module(name)
    # install() checks torch once in a process, and networkx compiles its functions when called.
    # The tests on a GPU import this module where numpy and networkx may be missing.
    planner, layout = (
        importlib.import_module(f"meshplan.{name}") for name in ("planner", "layout")
    )
    with meshplan.installed():
        planner.plan(planner.Problem.of(layout.Layout((2, 2)), ("P", "P"), ("R", "S(0)")))


@cache
def warm_compiler() -> None:
    """Import and initialise what compiles, so that not every rank has to: ranks are forked.

    Nothing of it has a gradient: autograd's threads do not come along into a fork.
    """
    function = torch.compile(lambda x: x * 2 + 1, fullgraph=True, backend="aot_eager")
    function(torch.ones(2))


def run_ranks(
    function: Callable[[int], Any],
    world_size: int,
    *,
    backend: str = "gloo",
    timeout: float = 900.0,
    collective_timeout: float = 120.0,
    init: bool = True,
) -> list[Any]:
    """``[function(rank) for rank in range(world_size)]``, each call in its own process.

    The default group is initialised before and destroyed after, unless ``init`` is false; there may
    be a file store at ``MESHPLAN_TEST_STORE``. No rank leaves its groups before each of them has
    returned: a peer may still be connecting to it. A rank that raises, dies or does not finish
    within ``timeout`` seconds fails the call, with all tracebacks; no process is left behind.
    """
    with forked_ranks(function, world_size, backend if init else None, collective_timeout) as ranks:
        return _collect(*ranks, timeout)


def common_result(function: Callable[[int], Any], world_size: int, **options: Any) -> Any:
    """What each rank returns, if it is the same on all; ``options``: as for ``run_ranks``."""
    first, *others = run_ranks(function, world_size, **options)
    assert others == [first] * len(others)
    return first


def run_in_threads(*calls: Callable[[], object], seconds: float | None = None) -> None:
    """Run each call in a thread of its own, to its end."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()


def start_all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> dist.Work:
    """An all-reduce that is waited for later."""
    work = dist.all_reduce(tensor, *arguments, **options, async_op=True)
    assert work is not None
    return work


Ranks = tuple[list[Any], list[Connection], Connection, str]
"""Their processes, where each of them reports, what they stay for, and the path of their store.

Ranks that have returned stay in their groups until that third one is closed.
"""


@contextmanager
def forked_ranks(
    function: Callable[[int], Any],
    world_size: int,
    backend: str | None,
    collective_timeout: float,
) -> Iterator[Ranks]:
    """Ranks that run ``function`` and have a default group, unless ``backend`` is ``None``.

    They are killed at the end.
    """
    load_what_ranks_load()
    late: list[str] = []
    # Nothing of meshplan runs before a group of gloo is there: no hang of ours is tried again.
    for _ in range(ATTEMPTS if backend == "gloo" else 1):
        with tempfile.TemporaryDirectory() as folder:
            ranks = _fork(function, world_size, backend, collective_timeout, f"{folder}/store")
            try:
                late = [] if backend is None else _late(*ranks)
                if not late:
                    yield ranks
                    return
            finally:
                for process in ranks[0]:
                    process.kill()
                    process.join()
        sys.stderr.write("\n".join(["not connected:", *late, ""]))
    raise AssertionError("\n".join(late))


def _fork(
    function: Callable[[int], Any],
    world_size: int,
    backend: str | None,
    collective_timeout: float,
    store: str,
) -> Ranks:
    pipes = [_FORK.Pipe(duplex=False) for _ in range(world_size)]
    end, stay = _FORK.Pipe(duplex=False)
    all_forked, fork_more = _FORK.Pipe(duplex=False)
    processes = [
        _FORK.Process(
            target=child,
            args=(
                function,
                rank,
                world_size,
                backend,
                collective_timeout,
                store,
                sender,
                end,
                stay,
                all_forked,
                fork_more,
            ),
        )
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for connection in (*(sender for _, sender in pipes), end, all_forked, fork_more):
        connection.close()
    return processes, [receiver for receiver, _ in pipes], stay, store


def _late(
    processes: list[Any], receivers: list[Connection], _: Connection, store: str
) -> list[str]:
    """Why the default group is not there on some rank: nothing, or a text for each such rank."""
    deadline = time.monotonic() + BRING_UP
    late = []
    for rank, receiver in enumerate(receivers):
        if not receiver.poll(max(0.0, deadline - time.monotonic())):
            where = stacks(processes[rank], store)
            late.append(f"rank {rank} has no default group after {BRING_UP:g} s\n{where}")
            continue
        try:
            kind, value = receiver.recv()
        except EOFError:
            late.append(f"rank {rank} died before it had a default group")
            continue
        if kind != "ready":
            late.append(f"rank {rank} raised:\n{value}")
    return late


def _collect(
    processes: list[Any], receivers: list[Connection], stay: Connection, store: str, timeout: float
) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: list[Any] = [None] * len(processes)
    failures: list[str] = []
    for rank, receiver in enumerate(receivers):
        # Peers stay, and have the other end of its pipe as well: its death ends nothing.
        either = [receiver, processes[rank].sentinel]
        if not wait(either, max(0.0, deadline - time.monotonic())):
            where = stacks(processes[rank], store)
            failures.append(f"rank {rank} did not finish within {timeout:g} s\n{where}")
            continue
        if not receiver.poll():
            processes[rank].join(1)
            failures.append(f"rank {rank} died with exit code {processes[rank].exitcode}")
            continue
        kind, value = receiver.recv()
        if kind == "raised":
            failures.append(f"rank {rank} raised:\n{value}")
            # The others may wait for it in a collective.
            deadline = min(deadline, time.monotonic() + 30)
        results[rank] = value
    stay.close()
    for rank, process in enumerate(processes):
        process.join(max(0.1, deadline - time.monotonic()))
        if process.exitcode != 0 and not failures:
            failures.append(f"rank {rank} ended with exit code {process.exitcode}")
    assert not failures, "\n".join(failures)
    return results


def stacks(process: Any, store: str) -> str:
    """What the threads of a rank that does not finish are doing."""
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    path = Path(f"{store}.stacks.{process.pid}")
    return path.read_text(encoding="utf-8") if path.exists() else "it has not begun"


def arrive(name: str) -> None:
    """Note that this rank has come to ``name``, for ``wait_for``; without a collective."""
    Path(os.environ["MESHPLAN_TEST_STORE"]).with_name(f"{name}.{os.getpid()}").touch()


def wait_for(name: str, ranks: int, seconds: float = 200.0) -> None:
    """Return when ``ranks`` ranks have come to ``name``: in place of a sleep."""
    folder = Path(os.environ["MESHPLAN_TEST_STORE"]).parent
    deadline = time.monotonic() + seconds
    while (found := len(list(folder.glob(f"{name}.*")))) < ranks:
        assert time.monotonic() < deadline, f"{found} of {ranks} ranks have come to {name!r}"
        time.sleep(0.02)


def shorten(seconds: float) -> None:
    """Set the timeout of the groups that this rank has: first uses are bounded by a longer one."""
    for group in list(dist.distributed_c10d._world.pg_map):
        set_timeout(timedelta(seconds=seconds), group)


@contextmanager
def patience(ranks: int) -> Iterator[None]:
    """No time passes in votes and roll calls before ``ranks`` ranks wait in one or leave this block.

    So none of them is late, however busy the machine is. Once in a job.
    """
    # The tests on a GPU import this module where what it needs may be missing.
    votes = importlib.import_module("meshplan.flatten._agree")
    first, folder = time.monotonic(), Path(os.environ["MESHPLAN_TEST_STORE"]).parent

    def monotonic() -> float:
        return first if len(list(folder.glob("asleep.*"))) < ranks else time.monotonic()

    def sleep(seconds: float) -> None:
        arrive("asleep")
        time.sleep(seconds)

    clock = mock.Mock(wraps=time, monotonic=monotonic, sleep=sleep)
    with mock.patch.object(votes, "time", clock):
        try:
            yield
        finally:
            arrive("asleep")


def open_links() -> list[str]:
    """What the descriptors of this process lead to; threads may close some meanwhile."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return links


@contextmanager
def nothing_stays_in_shared_memory() -> Iterator[None]:
    """Files that other tests create in /dev/shm meanwhile are removed again."""
    folder = Path("/dev/shm")
    before, deadline = set(folder.iterdir()), time.monotonic() + 600
    yield
    while stay := set(folder.iterdir()) - before:
        assert time.monotonic() < deadline, stay
        time.sleep(0.05)


def child(
    function: Callable[[int], Any],
    rank: int,
    world_size: int,
    backend: str | None,
    collective_timeout: float,
    store: str,
    sender: Connection,
    end: Connection,
    stay: Connection,
    all_forked: Connection,
    fork_more: Connection,
) -> None:
    stay.close()
    fork_more.close()
    stacks = open(f"{store}.stacks.{os.getpid()}", "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks)
    torch.set_num_threads(1)
    # Collections of a rank leave alone what its parent has made: they would copy all its pages.
    gc.freeze()
    # A forked rank starts with what earlier tests of its parent left in the report, in torch's count
    # of groups, in its steps of redistributions and in the compiler.
    meshplan.clear_report()
    dist.distributed_c10d._world.group_count = 0
    if redistribute := sys.modules.get("torch.distributed.tensor._redistribute"):
        # With shapes of the rank that the parent has simulated over an equal mesh.
        redistribute._gen_transform_infos.cache_clear()
        redistribute.clear_redistribute_planner_cache()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    os.environ["MESHPLAN_TEST_STORE"] = store
    # Without it gloo resolves the machine's name, which may be a question to a name server.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # What serves a store in the parent names each rank that connects, under a lock of the C library.
    # In a rank that is forked meanwhile the copy of that lock stays locked, and it waits forever.
    all_forked.poll(None)
    try:
        if backend is not None:
            dist.init_process_group(
                backend,
                rank=rank,
                world_size=world_size,
                init_method=f"file://{store}",
                timeout=timedelta(seconds=max(collective_timeout, BRING_UP)),
            )
            # gloo lets a rank go on before its peers have connected to it; were it to finish
            # first, their connecting would fail.
            dist.barrier()
            if collective_timeout < BRING_UP:
                shorten(collective_timeout)
            sender.send(("ready", None))
        value = function(rank)
        sender.send(("returned", value))
    except BaseException:
        sender.send(("raised", traceback.format_exc()))
        sender.close()
        os._exit(1)
    sender.close()
    if backend is not None and dist.is_initialized():
        end.poll(collective_timeout)
        dist.destroy_process_group()
    os._exit(0)
