"""The kernels for GPUs on one GPU: beside a plain copy, and beside torch's own all-reduces.

First all ranks in one launch, with the GPU's own memory in place of links; then processes that
share the GPU, whose contexts take turns, with torch's ``one_shot_all_reduce`` and
``two_shot_all_reduce_`` in the same processes. On one GPU neither says anything about links.

    python benchmarks/allreduce_gpu.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from meshplan.flatten._connect_devices import connect_devices
from meshplan.kernel import DeviceCommunicator

ROOT = Path(__file__).parents[1]
SIZES = tuple(1 << n for n in (12, 16, 20, 24))
CALLS = 30


def fused() -> list[dict[str, Any]]:
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
    return [json.loads(line) for line in done.stdout.splitlines()]


def timed(function: Callable[[], object]) -> float:
    """Milliseconds of a call that is waited for: the median of the slowest rank."""
    samples = []
    for number in range(CALLS + 3):
        dist.barrier()
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        if number > 2:
            samples.append(time.perf_counter() - started)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, samples)
    return statistics.median(max(ranks) for ranks in zip(*every, strict=True)) * 1000


def ours(tensor: Tensor, mode: str, name: str) -> Callable[[], object]:
    """The public operator, in place."""
    sizes = [dist.get_world_size()]

    def call() -> None:
        torch.ops.meshplan.peer_reduce_(
            tensor, "sum", sizes, "tree", "wide", "once", None, mode, name
        )

    return call


def measure(rank: int, world_size: int, store: str, queue: Any) -> None:
    """All sizes on one rank; rank 0 sends rows."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"file://{store}")
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    found = connect_devices(
        group,
        c10d._get_default_store(),
        "benchmark",
        tuple(range(world_size)),
        rank=rank,
        wait=300,
        timeout=60,
    )
    assert isinstance(found, DeviceCommunicator), found
    for dtype in (torch.float32, torch.bfloat16):
        for nbytes in SIZES:
            tensor = symm_mem.empty(nbytes // dtype.itemsize, dtype=dtype, device="cuda").zero_()
            symm_mem.rendezvous(tensor, group)
            mine = torch.zeros_like(tensor)
            ms = {
                "one_shot": timed(ours(mine, "one_shot", found.name)),
                "two_shot": timed(ours(mine, "two_shot", found.name)),
                "torch one_shot": timed(
                    lambda t=tensor: torch.ops.symm_mem.one_shot_all_reduce(t, "sum", group)
                ),
                "torch two_shot": timed(
                    lambda t=tensor: torch.ops.symm_mem.two_shot_all_reduce_(t, "sum", group)
                ),
            }
            found.check()
            if rank == 0:
                row = {"ranks": world_size, "dtype": str(dtype)[6:], "bytes": nbytes}
                queue.put(row | {f"{name} ms": round(value, 4) for name, value in ms.items()})
    dist.barrier()
    found.close()
    dist.destroy_process_group()


def processes(world_size: int) -> list[dict[str, Any]]:
    """Start the ranks and collect their rows."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, world_size, f"{folder}/store", queue) for rank in range(world_size)]
        started = [context.Process(target=measure, args=a, daemon=True) for a in arguments]
        for process in started:
            process.start()
        rows = []
        for _ in range(2 * len(SIZES)):
            rows.append(queue.get(timeout=200))
            print(json.dumps(rows[-1]), flush=True)
        for process in started:
            process.join(60)
    return rows


def main() -> None:
    """Measure, print, and write the rows if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    found["fused"] = fused()
    for row in found["fused"]:
        print(json.dumps(row), flush=True)
    found["processes"] = [row for world_size in (2, 4) for row in processes(world_size)]
    found["gpu"] = torch.cuda.get_device_name()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
