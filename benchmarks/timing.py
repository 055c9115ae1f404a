"""Compared calls take turns, a call is as slow as its slowest rank, and jobs have hosts."""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.record import Case, Figures

_TIMEOUT = 600.0
# Seconds. On two cores, two ranks share one for up to 15 ms.
_SETTLED = 0.03
_SAYS = "benchmark: "


def seconds(
    function: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Of one call."""
    started = clock()
    function()
    return clock() - started


def in_turn(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    scale: float = 1.0,
    before: Callable[[], object] | None = None,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds times ``scale`` of each function, in rounds in which each has its turn.

    Args:
        functions: by name.
        rounds: that count, after ``warm_up`` that do not.
        scale: 1e3 for milliseconds.
        before: called before each function, and not timed.
        warm_up: how many rounds fill caches.
        clock: in seconds; ``time.thread_time`` for CPU time.
    """
    found: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(warm_up + rounds):
        for name, function in functions.items():
            if before is not None:
                before()
            sample = seconds(function, clock) * scale
            if number >= warm_up:
                found[name].append(sample)
    return found


def in_blocks(
    functions: Mapping[str, Callable[[], object]],
    calls: int,
    *,
    scale: float = 1.0,
    turns: int = 3,
    warm_up: int | Mapping[str, int] = 2,
) -> dict[str, list[float]]:
    """Seconds times ``scale`` of each function, called again and again in its turn.

    For calls in which ranks meet: one that follows another kind of call would pay for how far
    apart that has left them.

    Args:
        functions: by name.
        calls: of each function that count, at least; in ``turns`` blocks.
        warm_up: calls at the start of each block that do not count; of all functions, or by name.
    """
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            before = warm_up if isinstance(warm_up, int) else warm_up[name]
            samples = [seconds(function) * scale for _ in range(before + -(-calls // turns))]
            found[name] += samples[before:]
    return found


def calls_to_settle(functions: Mapping[str, Callable[[], object]]) -> dict[str, int]:
    """How many calls of each last until the system has spread ranks over cores; 2 or more.

    Ranks that wait asleep in a call wake up on the core of another rank, and stay there for some
    milliseconds: hundreds of the shortest calls, whose ranks do not sleep. Collective, and the same
    on every rank.
    """
    trial = slowest(in_blocks(functions, 3, turns=1))
    return {name: max(2, math.ceil(_SETTLED / one.median)) for name, one in trial.items()}


def slowest(samples: Mapping[str, list[float]]) -> dict[str, Figures]:
    """The same on every rank: of each call, what the slowest rank took. Collective."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, dict(samples))
    return {
        name: Figures.of([max(ranks) for ranks in zip(*(one[name] for one in every), strict=True)])
        for name in samples
    }


def on_ranks(
    world_size: int, function: Callable[..., Iterator[Any]], *arguments: Any
) -> Iterator[Any]:
    """What ``function(*arguments)`` yields on rank 0 of a job on this machine, over gloo.

    Args:
        world_size: how many processes are started, afresh: nothing of this one is in them.
        function: of a module; a generator, which every rank runs to its end.

    Raises:
        RuntimeError: a rank has failed, or nothing came for ten minutes.
    """
    # Torch and what a first redistribution imports are imported once: all ranks are forked from it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "meshplan.dtensor", "torch._dynamo"])
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank,
                args=(rank, world_size, f"file://{folder}/store", sender, function, arguments),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            while True:
                if not receiver.poll(_TIMEOUT):
                    raise RuntimeError(f"nothing came from {world_size} ranks in {_TIMEOUT:g} s")
                try:
                    yield receiver.recv()
                except EOFError:
                    break
            for process in processes:
                process.join(60)
            codes = [process.exitcode for process in processes]
            if any(codes):
                raise RuntimeError(f"ranks ended with exit codes {codes}")
        finally:
            for process in processes:
                process.kill()


def _rank(
    rank: int,
    world_size: int,
    store: str,
    sender: Any,
    function: Callable[..., Iterator[Any]],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=store)
    dist.barrier()
    if rank:
        sender.close()
    for found in function(*arguments):
        if rank == 0:
            sender.send(found)
    dist.barrier()
    dist.destroy_process_group()


def on_hosts(
    file: str, ranks: Sequence[int], words: Sequence[str], rate: int = 0
) -> Iterator[Case]:
    """The cases that a script passes to ``say_cases``, on hosts with so many ranks each and, where
    they are namespaces, ``rate`` megabits a second between them; 0: no limit.
    """
    from tests.multinode.cluster import cluster
    from tests.multinode.launch import job

    script = str(Path(file).resolve().with_suffix(""))
    with cluster(len(ranks)) as found:
        for host in found.hosts if rate else ():
            if host.namespaces is not None:
                limit = ("rate", f"{rate}mbit", "burst", "64kb", "latency", "400ms")
                host.namespaces.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        with job(found, script, ranks, arguments=words) as started:
            codes = started.wait(900)
            if any(codes):
                raise RuntimeError(f"exit codes {codes}\n{started.tails()}")
            for line in started.output(0).splitlines():
                if line.startswith(_SAYS):
                    yield Case.from_json(json.loads(line.removeprefix(_SAYS)))


def say_cases(cases: Iterator[Case]) -> None:
    """Measure cases on a rank that torchrun has started, and print them for ``on_hosts``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in cases:
        if dist.get_rank() == 0:
            sys.stdout.write(_SAYS + json.dumps(case.to_json()) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()
