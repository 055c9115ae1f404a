"""Memory of meshplan: imported, after many plans, and shared by the ranks of a group.

Imports and plans are of fresh processes, beside torch's alone. Plans: a thousand different
redistributions on a process group that is not real. Shared: pages that a rank of a group has in
common with the others after all-reduces of that size; the group keeps them.

    python -m benchmarks.memory
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import meshplan
from benchmarks.record import Case, Figures
from benchmarks.script import Suite, run
from benchmarks.timing import on_ranks
from meshplan import kernel

SIZES = (1 << 10, 1 << 20, 1 << 24, 1 << 26)
IMPORTS = {
    "torch": "import torch.distributed.tensor",
    "with meshplan": "import torch.distributed.tensor, meshplan",
}
PLANS = """
import itertools, logging, torch, meshplan
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("a", "b", "c", "d"))
kinds = (Partial(), Replicate(), Shard(0))
local = torch.ones(16, 16)
def some(count):
    for src, dst in itertools.islice(itertools.product(itertools.product(kinds, repeat=4),
                                     itertools.product(kinds[1:], repeat=4)), count):
        DTensor.from_local(local, mesh, src, run_check=False).redistribute(mesh, dst)
def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
if {installed}:
    meshplan.install()
some({few})
before = resident()
some({many})
print(resident() - before)
"""


def status(field: str) -> float:
    """MiB of this process, by the kernel's account."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def printed(code: str) -> float:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
    )
    return float(done.stdout.split()[-1])


def imported(rounds: int) -> Case:
    """Resident memory after the imports."""
    tell = "\nprint(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmRSS')))"
    runs = {
        name: Figures.of([printed(code + tell) / 1024 for _ in range(rounds)])
        for name, code in IMPORTS.items()
    }
    return Case(name="imports", unit="MiB", runs=runs, peers=("torch",))


def planned(smoke: bool) -> Case:
    """What a thousand plans leave."""
    many = 20 if smoke else 1000
    runs = {
        name: Figures.of(
            [printed(PLANS.format(installed=name != "torch", few=10, many=many))],
        )
        for name in ("torch", "with meshplan")
    }
    return Case(name=f"after {many} different redistributions", unit="MiB", runs=runs)


def shared(sizes: tuple[int, ...]) -> Iterator[Case]:
    """On every rank of a job."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    for nbytes in sizes:
        d = DTensor.from_local(torch.zeros(nbytes // 4), mesh, [Partial()], run_check=False)
        before = status("RssShmem")
        with meshplan.installed():
            d.full_tensor()
        found = status("RssShmem") - before
        meshplan.shutdown()
        yield Case(
            name=f"shared memory for all-reduces of {nbytes >> 10} KiB",
            unit="MiB",
            runs={"meshplan": Figures.of([found])},
            ranks=ranks,
            parameters={"world_size": ranks, "bytes": nbytes},
        )


def cases(smoke: bool) -> Iterator[Case]:
    """Imports, plans, groups."""
    yield imported(1 if smoke else 3)
    yield planned(smoke)
    yield from on_ranks(2 if smoke else 4, shared, SIZES[:1] if smoke else SIZES)


def why_not() -> str | None:
    """The figures are those of Linux."""
    if not kernel.available():
        return str(kernel.why_not())
    return None if Path("/proc/self/status").exists() else "no /proc/self/status"


SUITE = Suite(__doc__ or "", cases, lambda smoke: 2 + (1 if smoke else len(SIZES)), why_not)

if __name__ == "__main__":
    run(SUITE)
