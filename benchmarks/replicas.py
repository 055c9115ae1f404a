"""What a replica check costs: a tensor's digest beside one read of the tensor, on one thread.

The read is ``torch.sum`` over the tensor as int64, which does one addition for 8 bytes. Digest and
read take turns; shown are medians, and the median of the ratios of neighbours. A tensor is larger
than the caches.

    python benchmarks/replicas.py [--rounds 15] [--json FILE]

Or: flip one bit in one element of one rank, and see it found. All ranks have a model of so many
float32 elements (8 ranks of 100 million need 3.2 GB), in tensors of different sizes.

    python benchmarks/replicas.py --flip 100000000 [--world-size 8]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshplan import kernel
from meshplan.errors import ReplicaDivergenceError
from meshplan.kernel import digest_table
from meshplan.replicas import verify_replicas

BYTES = 256 << 20
BAR = 1.2


@dataclass(frozen=True)
class Row:
    """Medians in milliseconds; the ratio is the digest's time to the read's."""

    tensor: str
    nbytes: int
    digest_ms: float
    read_ms: float
    ratio: float


def measure(name: str, tensors: list[torch.Tensor], rounds: int) -> Row:
    """Digest and read of the same tensors, in turn."""
    words = [tensor.view(-1).view(torch.int64) for tensor in tensors]
    digests, reads = [], []
    for number in range(rounds + 1):
        started = time.perf_counter()
        digest_table(tensors)
        between = time.perf_counter()
        for one in words:
            one.sum()
        if number:
            digests.append(1000 * (between - started))
            reads.append(1000 * (time.perf_counter() - between))
    ratio = statistics.median(d / r for d, r in zip(digests, reads, strict=True))
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return Row(name, nbytes, statistics.median(digests), statistics.median(reads), ratio)


def rows_of(rounds: int) -> list[Row]:
    """One large tensor of each dtype, and the parameters of a layer many times over."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(BYTES // dtype.itemsize).to(dtype)
        rows.append(measure(str(dtype).removeprefix("torch."), [tensor], rounds))
    shapes = [(1024, 1024), (4096, 1024), (1024, 4096), (1024,), (4096,)]
    layers = [torch.randn(shape) for _ in range(7) for shape in shapes]
    rows.append(measure("35 parameters", layers, rounds))
    return rows


def flipped(rank: int, world_size: int, numel: int, store: str, queue: Any) -> None:
    """One rank of the search for one bit; rank 0 tells what was said."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"file://{store}")
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("ddp", "fsdp"))
    torch.manual_seed(0)
    sizes = [numel // 2, numel // 4, numel // 8]
    sizes.append(numel - sum(sizes))
    model = nn.ParameterList(nn.Parameter(torch.rand(size)) for size in sizes)
    dist.barrier()
    said = [str(verify_replicas(model, mesh)) for _ in range(3)]
    if rank == world_size - 3:
        with torch.no_grad():
            model[1].view(torch.int32)[numel // 5] ^= 1
    dist.barrier()
    started = time.perf_counter()
    try:
        verify_replicas(model, mesh, step=100)
    except ReplicaDivergenceError as error:
        said.append(str(error))
    said.append(f"found and named in {time.perf_counter() - started:.2f} s")
    if rank == 0:
        queue.put(said)
    dist.barrier()
    dist.destroy_process_group()


def flip(numel: int, world_size: int) -> None:
    """Start the ranks, and print what rank 0 says."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(r, world_size, numel, f"{folder}/store", queue) for r in range(world_size)]
        processes = [context.Process(target=flipped, args=a, daemon=True) for a in arguments]
        for process in processes:
            process.start()
        print("\n".join(queue.get(timeout=900)))
        for process in processes:
            process.join(60)


def main() -> None:
    """Measure, print, and write the JSON if asked; or look for a bit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flip", type=int, metavar="ELEMENTS")
    parser.add_argument("--world-size", type=int, default=8)
    options = parser.parse_args()
    if options.flip is not None:
        flip(options.flip, options.world_size)
        return
    if not kernel.available():
        raise SystemExit(str(kernel.why_not()))
    torch.set_num_threads(1)
    rows = rows_of(options.rounds)
    print(f"torch {torch.__version__}, one thread, median of {options.rounds}")
    print(f"{'':16}{'MiB':>6}{'digest':>10}{'read':>10}{'ratio':>8}  (bar {BAR})")
    for row in rows:
        print(
            f"{row.tensor:16}{row.nbytes >> 20:>6}{row.digest_ms:8.1f}ms{row.read_ms:8.1f}ms"
            f"{row.ratio:8.2f}"
        )
    if options.json:
        found = {
            "machine": platform.machine(),
            "torch": torch.__version__,
            "rounds": options.rounds,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
