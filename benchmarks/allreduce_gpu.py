"""The kernels for GPUs on one GPU, compared with a plain copy and with torch's own all-reduces.

First all ranks in one launch, with the GPU's own memory in place of links; then processes, with
torch's ``one_shot_all_reduce`` and ``two_shot_all_reduce_``, and NCCL where each rank has a GPU, in
the same processes. A CUDA graph of some calls is timed by the GPU, so that the host counts nowhere.
Ranks that share one GPU take turns on it: their times say nothing about links. Where each rank has
a GPU, what is faster is written to meshplan/kernel/timed_gpus.json, for ``path="auto"``.

    python -m benchmarks.allreduce_gpu
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from benchmarks.record import Case, Figures, at_least, machine
from benchmarks.script import Suite, run
from benchmarks.timing import on_ranks, slowest
from meshplan.contract import Contract
from meshplan.execute import Purpose, StepGroups, run_reduction
from meshplan.flatten._connect import connect_devices
from meshplan.flatten._join import members_of
from meshplan.kernel import DeviceCommunicator, TimedPaths
from meshplan.planner import Step

ROOT = Path(__file__).parents[1]
TIMED = ROOT / "meshplan" / "kernel" / "timed_gpus.json"
SIZES = tuple(1 << n for n in range(10, 29, 2))
# Of ranks that share a GPU: each wait lasts until the GPU changes to the other rank.
SHARED_SIZES = SIZES[1:8:2]
DTYPES = (torch.float32, torch.bfloat16)
WORLD_SIZES = (2, 4, 8)
OURS = ("one_shot", "two_shot", "exchange")
REPLAYS, WARM_UP, IN_GRAPH = 30, 3, 10


def fused() -> Iterator[Case]:
    """All ranks in one launch: see tests/native/fused_ranks.cu."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    with tempfile.TemporaryDirectory() as folder:
        cpu = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-c", "csrc/cpu.cpp", "-o"]
        subprocess.run([*cpu, f"{folder}/cpu.o"], check=True, cwd=ROOT)
        command = [nvcc, "-std=c++17", "-O3", "-fmad=false", "-arch=native", "-Icsrc"]
        command += ["tests/native/fused_ranks.cu", f"{folder}/cpu.o", "-o", f"{folder}/fused"]
        subprocess.run(command, check=True, cwd=ROOT)
        done = subprocess.run(
            [f"{folder}/fused", "time"], check=True, capture_output=True, text=True, timeout=300
        )
    for line in done.stdout.splitlines():
        yield from fused_cases(json.loads(line))


def fused_cases(row: dict[str, float | str]) -> Iterator[Case]:
    """What the program prints: medians alone. Only large messages show a bandwidth."""
    name = (
        f"{row['mode']} of {row['ranks']} ranks in one launch, {row['bytes']} bytes of "
        f"{row['item']}-byte elements"
    )
    for unit in ("us", "GB/s")[: 1 + (int(row["bytes"]) >= 1 << 20)]:
        runs = {"kernel": float(row[unit]), "copy": float(row[f"copy {unit}"])}
        wanted = unit == "GB/s" and int(row["bytes"]) >= 1 << 26
        yield Case(
            name=name,
            unit=unit,
            runs={way: Figures.of([value]) for way, value in runs.items()},
            peers=("copy",),
            parameters={key: row[key] for key in ("ranks", "bytes", "mode")},  # type: ignore[misc]
            bars=(at_least(0.8, "kernel", "copy"),) if wanted else (),
        )


def exchange(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The contract over NCCL: all-to-all, one fold, all-gather."""
    ranks = group.size()
    step = Step(
        kind="all_reduce",
        axes=(0,),
        move="P -> R",
        why="benchmark",
        op="sum",
        path="exchange",
        contract=Contract(),
        sizes=(ranks,),
    )
    purpose = Purpose("benchmark", "", f"{ranks} ranks")
    return run_reduction(tensor, step, StepGroups(group), purpose=purpose, path="exchange")


def ways(
    tensor: Tensor, group: str, name: str, nccl: dist.ProcessGroup | None
) -> dict[str, Callable[[], object]]:
    """What is compared, by name; ``tensor`` is symmetric memory of the group."""
    ranks = dist.get_world_size()
    mine = torch.zeros_like(tensor)

    def ours(mode: str) -> None:
        torch.ops.meshplan.peer_reduce_(
            mine, "sum", [ranks], "tree", "wide", "once", None, mode, name
        )

    calls: dict[str, Callable[[], object]] = {
        "one_shot": lambda: ours("one_shot"),
        "two_shot": lambda: ours("two_shot"),
        "torch one_shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", group),
        "torch two_shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", group),
    }
    if nccl is not None:
        calls["exchange"] = lambda: exchange(mine, nccl)
        calls["nccl"] = lambda: dist.all_reduce(mine, group=nccl)
    return calls


def in_graphs(calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Microseconds of one call of each: of a CUDA graph that has some, divided by their number."""
    found = {}
    for name, call in calls.items():
        call()  # what the first one prepares cannot be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL ask for events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(IN_GRAPH):
                call()
        samples = []
        for _ in range(WARM_UP + REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / IN_GRAPH)
        found[name] = samples[WARM_UP:]
    return found


def thresholds(cases: Sequence[Case]) -> TimedPaths | None:
    """What ``auto`` is to take, of the cases of one number of ranks; ``None`` without exchanges.

    A way counts as faster at a size only if it is for each dtype.
    """
    times: dict[int, list[dict[str, float]]] = {}
    for case in cases:
        if "exchange" in case.runs:
            medians = {name: run.median for name, run in case.runs.items()}
            times.setdefault(int(case.parameters["bytes"]), []).append(medians)
    if not times:
        return None

    def faster(nbytes: int, way: str, other: str) -> bool:
        return all(one[way] <= one[other] for one in times[nbytes])

    small = takewhile(lambda n: faster(n, "one_shot", "two_shot"), sorted(times))
    limit = max(small, default=0)
    modes = {n: "one_shot" if n <= limit else "two_shot" for n in times}
    return TimedPaths(limit, all(faster(n, mode, "exchange") for n, mode in modes.items()))


def note(path: Path, name: str, ranks: int, found: TimedPaths, when: str) -> None:
    """Add a row to the file, or replace it."""
    known = json.loads(path.read_text())
    known.setdefault(name, {})[str(ranks)] = {**found._asdict(), "timed": when}
    path.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


def sizes(ranks: int) -> tuple[int, ...]:
    """Bytes of the messages that this machine is timed with."""
    return SIZES if torch.cuda.device_count() >= ranks else SHARED_SIZES


def measure() -> Iterator[Case]:
    """All sizes, on every rank of a job."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    found = connect_devices(
        group,
        members_of(None, tuple(range(ranks)), 300.0),
        "benchmark",
        timeout=60,
    )
    assert isinstance(found, DeviceCommunicator), found
    nccl = dist.new_group(backend="nccl") if torch.cuda.device_count() >= ranks else None
    for dtype in DTYPES:
        for nbytes in sizes(ranks):
            tensor = symm_mem.empty(nbytes // dtype.itemsize, dtype=dtype, device="cuda").zero_()
            symm_mem.rendezvous(tensor, group)
            compared = ways(tensor, group, found.name, nccl)
            runs = slowest(in_graphs(compared))
            found.check()
            name = str(dtype).removeprefix("torch.")
            yield Case(
                name=f"all-reduce of {nbytes >> 10} KiB, {name}, by processes",
                unit="us",
                runs=runs,
                peers=tuple(way for way in runs if way not in OURS),
                ranks=ranks,
                parameters={"dtype": name, "bytes": nbytes, "world_size": ranks},
            )
    dist.barrier()
    found.close()


def cases(smoke: bool) -> Iterator[Case]:
    """One launch, then processes."""
    yield from fused()
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    for world_size in WORLD_SIZES[:1] if smoke else WORLD_SIZES:
        found = list(on_ranks(world_size, measure))
        yield from found
        if not smoke and (paths := thresholds(found)) is not None:
            when = f"{time.strftime('%Y-%m-%d')}, {machine()['gpu']}"
            note(TIMED, torch.cuda.get_device_name(), world_size, paths, when)


def total(smoke: bool) -> int:
    """Of processes; how many launches there are the program knows."""
    jobs = WORLD_SIZES[:1] if smoke else WORLD_SIZES
    return len(DTYPES) * sum(len(sizes(ranks)) for ranks in jobs)


def why_not() -> str | None:
    """It takes a GPU."""
    return None if torch.cuda.is_available() else "no GPU"


SUITE = Suite(__doc__ or "", cases, total, why_not)

if __name__ == "__main__":
    run(SUITE)
