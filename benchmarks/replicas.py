"""The cost of a replica check: a digest compared with one read of the tensor, on one thread.

The read is ``torch.sum`` over the tensor as int64, which does one addition for 8 bytes. Digest and
read take turns. A tensor is larger than the caches.

    python -m benchmarks.replicas

Or: flip one bit in one element of one rank, and see it found. All ranks have a model of so many
float32 elements (8 ranks of 100 million need 3.2 GB), in tensors of different sizes.

    python -m benchmarks.replicas --flip 100000000 [--world-size 8]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.record import Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import in_turn, on_ranks
from meshplan import kernel
from meshplan.errors import ReplicaDivergenceError
from meshplan.kernel import digest_table
from meshplan.replicas import verify_replicas

BYTES = 256 << 20


def measure(name: str, tensors: list[torch.Tensor], rounds: int) -> Case:
    """Digest and read of the same tensors."""
    words = [tensor.view(-1).view(torch.int64) for tensor in tensors]

    def read() -> None:
        for one in words:
            one.sum()

    samples = in_turn({"digest": lambda: digest_table(tensors), "read": read}, rounds, scale=1e3)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return Case(
        name=f"{nbytes >> 20} MiB of {name}",
        unit="ms",
        runs={way: Figures.of(found) for way, found in samples.items()},
        peers=("read",),
        parameters={"bytes": nbytes},
        bars=(at_most(1.2, "digest", "read"),),
    )


def cases(smoke: bool) -> Iterator[Case]:
    """One large tensor of each dtype, and the parameters of a layer many times over."""
    torch.set_num_threads(1)
    nbytes, rounds, layers = (1 << 20, 2, 1) if smoke else (BYTES, 15, 7)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(nbytes // dtype.itemsize).to(dtype)
        yield measure(str(dtype).removeprefix("torch."), [tensor], rounds)
    shapes = [(1024, 1024), (4096, 1024), (1024, 4096), (1024,), (4096,)]
    parameters = [torch.randn(shape) for _ in range(layers) for shape in shapes]
    yield measure(f"{len(parameters)} parameters, float32", parameters, rounds)


def flipped(numel: int) -> Iterator[str]:
    """The search for one bit, on every rank of a job."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("ddp", "fsdp"))
    torch.manual_seed(0)
    sizes = [numel // 2, numel // 4, numel // 8]
    sizes.append(numel - sum(sizes))
    model = nn.ParameterList(nn.Parameter(torch.rand(size)) for size in sizes)
    dist.barrier()
    for _ in range(3):
        yield str(verify_replicas(model, mesh))
    if rank == world_size - 3:
        with torch.no_grad():
            model[1].view(torch.int32)[numel // 5] ^= 1
    dist.barrier()
    started = time.perf_counter()
    try:
        verify_replicas(model, mesh, step=100)
    except ReplicaDivergenceError as error:
        yield str(error)
    yield f"found and named in {time.perf_counter() - started:.2f} s"


def why_not() -> str | None:
    """Without a compiled library the digest is torch's, and the bar is not for it."""
    return None if kernel.available() else str(kernel.why_not())


SUITE = Suite(__doc__ or "", cases, lambda smoke: 3, why_not)

if __name__ == "__main__":
    if "--flip" in sys.argv:
        parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
        parser.add_argument("--flip", type=int, metavar="ELEMENTS", required=True)
        parser.add_argument("--world-size", type=int, default=8)
        options = parser.parse_args()
        for text in on_ranks(options.world_size, flipped, options.flip):
            print(text)
    else:
        run(SUITE)
