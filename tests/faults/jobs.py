"""Run ranks of which some are killed or stopped; returns how each ended, and its result."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

import meshplan
from meshplan.definition import reduce_leaves
from meshplan.errors import MeshplanError
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.processes import forked_ranks, nothing_stays_in_shared_memory, open_links

# Seconds: a job that waited so long would not end in time. It is the bound of what must not wait.
NEVER = 3600.0
_LONG = timedelta(seconds=200)


@dataclass(frozen=True)
class Outcome:
    """How a rank ended.

    Attributes:
        value: what its function returned.
        failure: the traceback that it ended with, or ``""``.
        exit_code: of its process, negative for a signal; ``None`` if it had to be killed here.
    """

    value: Any
    failure: str
    exit_code: int | None


def run_job(
    function: Callable[[int], Any],
    world_size: int,
    *,
    timeout: float = 300.0,
    collective_timeout: float = 60.0,
    init: bool = True,
) -> list[Outcome]:
    """``function(rank)`` on each of ``world_size`` forked processes; never raises for one of them.

    Args:
        function: the default group is initialised before, and is not destroyed after.
        timeout: seconds for all of it. Who is not done is killed, and has no exit code.
        collective_timeout: of the default group, in seconds.
        init: initialise the default group, over gloo and a file store.
    """
    backend = "gloo" if init else None
    with (
        nothing_stays_in_shared_memory(),
        forked_ranks(function, world_size, backend, collective_timeout) as ranks,
    ):
        processes, receivers, stay, _ = ranks
        # Here a rank that has returned is one that has left.
        stay.close()
        return _outcomes(processes, receivers, timeout)


def run_to_end(function: Callable[[int], Any], world_size: int, **options: Any) -> list[Any]:
    """What the ranks of a job return, each of which ends by itself and without an error."""
    outcomes = run_job(function, world_size, **options)
    assert all(not one.failure and one.exit_code == 0 for one in outcomes), outcomes
    return [one.value for one in outcomes]


def _outcomes(processes: list[Any], receivers: list[Connection], timeout: float) -> list[Outcome]:
    deadline = time.monotonic() + timeout
    outcomes = []
    for process, receiver in zip(processes, receivers, strict=True):
        kind, value = "", None
        with contextlib.suppress(EOFError):
            if receiver.poll(max(0.0, deadline - time.monotonic())):
                kind, value = receiver.recv()
        process.join(max(0.1, deadline - time.monotonic()))
        failed = kind == "raised"
        outcomes.append(
            Outcome(None if failed else value, value if failed else "", process.exitcode)
        )
    return outcomes


def partial_over(mesh: DeviceMesh, numel: int = 1000) -> DTensor:
    """A summand on every rank of the job, partial on every axis."""
    world_size = dist.get_world_size()
    leaf = order_sensitive(numel, rank=dist.get_rank(), world_size=max(world_size, 2))
    return DTensor.from_local(leaf, mesh, [Partial()] * mesh.ndim, run_check=False)


def right_bits(mesh: DeviceMesh, numel: int = 1000, times: int = 1) -> None:
    """Reduce ``partial_over(mesh)`` over all ranks; all elements have the contract's bits."""
    world_size = dist.get_world_size()
    leaves = [
        order_sensitive(numel, rank=r, world_size=max(world_size, 2))
        for r in mesh.mesh.flatten().tolist()
    ]
    expected = reduce_leaves(leaves, "sum", tuple(mesh.mesh.shape))
    for _ in range(times):
        assert_bitwise_equal(partial_over(mesh, numel).full_tensor(), expected)


def attempt(function: Callable[[], Any]) -> tuple[str, str]:
    """The class of the error that ``function`` raises, and its text; both empty if there is none."""
    try:
        function()
    except (MeshplanError, AssertionError) as error:
        return type(error).__name__, str(error)
    return "", ""


def end() -> None:
    """``meshplan.shutdown``, and destroy the default group, even if ranks are absent."""
    meshplan.shutdown()
    dist.destroy_process_group()


def join(name: object, ranks: Sequence[int], rank: int) -> int:
    """A new default group of those of ``ranks``, in that order; this process's rank in it."""
    folder = os.path.dirname(os.environ["MESHPLAN_TEST_STORE"])
    dist.init_process_group(
        "gloo",
        rank=list(ranks).index(rank),
        world_size=len(ranks),
        init_method=f"file://{folder}/again{name}",
        timeout=_LONG,
    )
    dist.barrier()
    return dist.get_rank()


def join_over_tcp(rank: int, world_size: int) -> list[dist.TCPStore]:
    """The default group of all processes over a TCP store that rank 0 serves while it is held."""
    port = Path(os.environ["MESHPLAN_TEST_STORE"]).with_name("port")
    held = []
    if rank == 0:
        held.append(dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False))
        port.with_name("new").write_text(str(held[0].port))
        port.with_name("new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    store = dist.TCPStore("127.0.0.1", int(port.read_text()), None, False)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=_LONG)
    dist.barrier()
    return held


def die() -> None:
    """Die as if by the out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_for(seconds: float) -> None:
    """Stop this process now; a helper process continues it after ``seconds``."""
    me = os.getpid()
    waker = os.fork()
    if waker == 0:
        time.sleep(seconds)
        os.kill(me, signal.SIGCONT)
        os._exit(0)
    os.kill(me, signal.SIGSTOP)
    os.waitpid(waker, 0)


def count_resources() -> Counter[str]:
    """What this process holds of the system: descriptors, threads, mappings of ours, KiB."""
    kinds = Counter("descriptors" for _ in open_links())
    kinds["threads"] = len(os.listdir("/proc/self/task"))
    kinds["python threads"] = threading.active_count()
    kinds["mappings"] = Path("/proc/self/maps").read_text().count("memfd:meshplan")
    kinds["groups"] = len(dist.distributed_c10d._world.pg_map)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    kinds["KiB"] = pages * resource.getpagesize() // 1024
    return kinds
