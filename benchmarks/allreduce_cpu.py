"""All-reduces between processes of one host, side by side in one run.

    gloo       torch.distributed.all_reduce, in place; its order of additions is its own
    ordered    all-gather of everything to a list, left fold on rank 0, broadcast: what an ordered
               reference costs that is written with torch.distributed alone
    exchange   the contract over gloo: all-to-all, reduce, all-gather
    peer       the contract through shared memory, in place, by the public operator

One call is as slow as its slowest rank; what is shown is the median over the calls. ``extra`` is
how much the resident memory of rank 0 rose at most during one call, as a multiple of the message.

    python benchmarks/allreduce_cpu.py [--world-size 2 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from meshplan.collectives import Source, StepGroups, run_reduction
from meshplan.contract import Contract
from meshplan.flatten import registry
from meshplan.layout import Layout
from meshplan.planner import Step

SIZES = tuple(1 << n for n in (10, 12, 14, 16, 18, 20, 22, 24, 26))
MEMORY_FROM = 1 << 24


@dataclass(frozen=True)
class Row:
    """Medians in milliseconds; ratios to gloo's time; extra memory as multiples of the message."""

    world_size: int
    dtype: str
    nbytes: int
    gloo_ms: float
    ordered_ms: float
    exchange_ms: float
    peer_ms: float
    exchange_to_gloo: float
    peer_to_gloo: float
    ordered_to_exchange: float
    exchange_extra: float | None
    peer_extra: float | None


def ordered(tensor: Tensor) -> None:
    """The plain ordered all-reduce, in place."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    if dist.get_rank() == 0:
        total = gathered[0].float()
        for one in gathered[1:]:
            total = total + one.float()
        tensor.copy_(total)
    dist.broadcast(tensor, 0)


def ways(world_size: int) -> dict[str, Callable[[Tensor], object]]:
    """What is compared, by name."""
    mesh = init_device_mesh("cpu", (world_size,))
    layout = Layout.from_mesh(mesh)
    group = registry().get(mesh, layout, (0,), token="benchmark", peers=True)
    assert group.peers is not None, group.no_peers
    peers, contract = group.peers.name, Contract()
    step = Step(
        kind="all_reduce",
        axes=(0,),
        sizes=(world_size,),
        move="P -> R",
        why="",
        op="sum",
        path="exchange",
        contract=contract,
    )
    groups, source = StepGroups(group.pg), Source("", "", "")

    def exchange(tensor: Tensor) -> None:
        result = run_reduction(tensor, step, groups, source=source)
        torch.ops._c10d_functional.wait_tensor(result)

    def peer(tensor: Tensor) -> None:
        torch.ops.meshplan.peer_reduce_(
            tensor, "sum", [world_size], "tree", "wide", "once", None, "auto", peers
        )

    return {"gloo": dist.all_reduce, "ordered": ordered, "exchange": exchange, "peer": peer}


def timed(function: Callable[[Tensor], object], tensor: Tensor, calls: int) -> float:
    """Milliseconds of a call: the median over calls of the slowest rank."""
    samples = []
    for number in range(calls + 2):
        started = time.perf_counter()
        function(tensor)
        if number > 1:
            samples.append(time.perf_counter() - started)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, samples)
    return statistics.median(max(ranks) for ranks in zip(*every, strict=True)) * 1000


def extra_memory(function: Callable[[Tensor], object], tensor: Tensor) -> float | None:
    """How far this process's memory rises during a call, in messages; Linux only."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    function(tensor)
    reset.write_text("5")
    before = status("VmRSS:")
    function(tensor)
    return max(0, status("VmHWM:") - before) / tensor.nbytes


def measure(rank: int, world_size: int, store: str, queue: Any) -> None:
    """All sizes and dtypes on one rank; rank 0 sends rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"file://{store}")
    functions = ways(world_size)
    for dtype in (torch.float32, torch.bfloat16):
        for nbytes in SIZES:
            # Sums of sums of anything else would grow.
            tensor = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
            calls = max(7, min(101, (1 << 27) // nbytes))
            ms = {name: timed(way, tensor, calls) for name, way in functions.items()}
            extra: dict[str, float | None] = {"exchange": None, "peer": None}
            if nbytes >= MEMORY_FROM:
                extra = {name: extra_memory(functions[name], tensor) for name in extra}
            if rank == 0:
                queue.put(
                    Row(
                        world_size=world_size,
                        dtype=str(dtype).removeprefix("torch."),
                        nbytes=nbytes,
                        gloo_ms=ms["gloo"],
                        ordered_ms=ms["ordered"],
                        exchange_ms=ms["exchange"],
                        peer_ms=ms["peer"],
                        exchange_to_gloo=ms["exchange"] / ms["gloo"],
                        peer_to_gloo=ms["peer"] / ms["gloo"],
                        ordered_to_exchange=ms["ordered"] / ms["exchange"],
                        exchange_extra=extra["exchange"],
                        peer_extra=extra["peer"],
                    )
                )
    dist.barrier()
    dist.destroy_process_group()


def rows_of(world_size: int) -> list[Row]:
    """Start the ranks and print rows as they come."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, world_size, f"{folder}/store", queue) for rank in range(world_size)]
        processes = [context.Process(target=measure, args=a, daemon=True) for a in arguments]
        for process in processes:
            process.start()
        for _ in range(2 * len(SIZES)):
            rows.append(queue.get(timeout=300))
            show(rows[-1])
        for process in processes:
            process.join(60)
    return rows


def show(row: Row) -> None:
    """One line."""
    extra = "" if row.peer_extra is None else f"{row.exchange_extra:9.2f}{row.peer_extra:9.2f}"
    print(
        f"{row.world_size:>2} {row.dtype:<9}{row.nbytes:>10} {row.gloo_ms:>10.3f}"
        f"{row.ordered_ms:>10.3f}{row.exchange_ms:>10.3f}{row.peer_ms:>10.3f}"
        f"{row.exchange_to_gloo:>12.2f}{row.peer_to_gloo:>11.3f}{row.ordered_to_exchange:>13.2f}"
        f"{extra}",
        flush=True,
    )


def main() -> None:
    """Measure, print, and write the rows if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(
        f"{'W':>2} {'dtype':<9}{'bytes':>10} {'gloo ms':>10}{'ordered':>10}{'exchange':>10}"
        f"{'peer':>10}{'exch/gloo':>12}{'peer/gloo':>11}{'ordered/exch':>13}"
        f"{'exch mem':>9}{'peer mem':>9}"
    )
    rows = [row for world_size in arguments.world_size for row in rows_of(world_size)]
    if arguments.json:
        machine = {"processor": platform.processor(), "torch": torch.__version__}
        found = {"machine": machine, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
