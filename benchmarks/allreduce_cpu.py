"""All-reduces between processes of one host.

    gloo       torch.distributed.all_reduce, in place; its order of additions is its own
    ordered    all-gather of everything to a list, left fold on rank 0, broadcast: what an ordered
               reference costs that is written with torch.distributed alone
    exchange   the contract over gloo: all-to-all, reduce, all-gather
    peer       the contract through shared memory, in place, by the public operator

One call is as slow as its slowest rank. Calls of one kind follow each other, and those of the first
30 ms do not count: ranks that wait asleep, as in gloo, wake up on one core and share it for up to
15 ms, in which a small call by ``peer`` takes 40 us instead of 11. Memory is how much the resident
memory of rank 0 rose at most during one call, as a multiple of the message.

    python -m benchmarks.allreduce_cpu
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.record import Bar, Case, Figures, at_least, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import calls_to_settle, in_blocks, on_ranks, slowest
from meshplan import kernel
from meshplan.execute import BoundReduction, Purpose, StepGroups
from meshplan.flatten import registry
from meshplan.layout import Layout
from meshplan.record import Record
from tests.steps import make_step

SIZES = tuple(1 << n for n in (10, 12, 14, 16, 18, 20, 22, 24, 26))
SMOKE_SIZES = (1 << 10, 1 << 16)
MEMORY_FROM = 1 << 24
DTYPES = (torch.float32, torch.bfloat16)
WORLD_SIZES = (2, 4)


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
    group = registry().get(mesh, layout, (0,), token=Record.of(use="benchmark"), peers="always")
    assert group.peers is not None, group.no_peers
    peers, groups = group.peers.name, StepGroups(group.pg)
    bound = BoundReduction(make_step((world_size,)), Purpose("", "", ""))

    def exchange(tensor: Tensor) -> None:
        torch.ops._c10d_functional.wait_tensor(bound.start(tensor, groups))

    def peer(tensor: Tensor) -> None:
        torch.ops.meshplan.peer_reduce_(
            tensor, "sum", [world_size], "tree", "wide", "once", None, "auto", peers
        )

    return {"gloo": dist.all_reduce, "ordered": ordered, "exchange": exchange, "peer": peer}


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


def bars(nbytes: int) -> Iterator[Bar]:
    """What was wanted for messages of so many bytes."""
    if nbytes <= 1 << 16:
        yield at_most(0.1, "peer", "gloo")
    if nbytes >= 1 << 20:
        yield at_most(0.3, "peer", "gloo")
        yield at_least(2.0, "ordered", "exchange")
    if nbytes >= 1 << 24:
        yield at_most(1.3, "exchange", "gloo")


def measure(sizes: tuple[int, ...], smoke: bool) -> Iterator[Case]:
    """All sizes and dtypes, on every rank of a job."""
    ranks = dist.get_world_size()
    functions = ways(ranks)
    for dtype in DTYPES:
        for nbytes in sizes:
            name = str(dtype).removeprefix("torch.")
            # Sums of sums of anything else would grow.
            tensor = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
            calls = 2 if smoke else max(7, min(101, (1 << 27) // nbytes))
            bound = {
                way: (lambda f=function, t=tensor: f(t))  # type: ignore[misc]
                for way, function in functions.items()
            }
            settled = calls_to_settle(bound)
            samples = slowest(in_blocks(bound, calls, scale=1e3, warm_up=settled))
            parameters: dict[str, int | str] = {
                "dtype": name,
                "bytes": nbytes,
                "world_size": ranks,
            }
            yield Case(
                name=f"all-reduce of {nbytes >> 10} KiB, {name}",
                unit="ms",
                runs=samples,
                peers=("gloo", "ordered"),
                ranks=ranks,
                parameters=parameters,
                bars=tuple(bars(nbytes)),
            )
            if nbytes >= MEMORY_FROM:
                extra = {way: extra_memory(functions[way], tensor) for way in functions}
                yield Case(
                    name=f"memory of that: {nbytes >> 10} KiB, {name}",
                    unit="messages",
                    runs={w: Figures.of([x]) for w, x in extra.items() if x is not None},
                    ranks=ranks,
                    parameters=parameters,
                    bars=(at_most(2.0, "exchange"), at_most(2.0, "peer")),
                )


def cases(smoke: bool) -> Iterator[Case]:
    """Jobs of 2 and of 4 ranks."""
    for world_size in WORLD_SIZES[:1] if smoke else WORLD_SIZES:
        yield from on_ranks(world_size, measure, SMOKE_SIZES if smoke else SIZES, smoke)


def total(smoke: bool) -> int:
    """With memory."""
    if smoke:
        return len(DTYPES) * len(SMOKE_SIZES)
    large = sum(nbytes >= MEMORY_FROM for nbytes in SIZES)
    return len(WORLD_SIZES) * len(DTYPES) * (len(SIZES) + large)


def why_not() -> str | None:
    """Without a compiled library ranks share no memory."""
    return None if kernel.available() else str(kernel.why_not())


SUITE = Suite(
    __doc__ or "",
    cases,
    total,
    why_not,
    reasons={
        "ordered / exchange": "1 to 4 MiB on 2 cores: each of the two collectives of an exchange "
        "waits for ranks that have no core",
        "peer / gloo": "64 MiB over 2 ranks on AMD: two copies and a fold that wait for memory",
        "exchange / gloo": "16 MiB over 2 ranks on AMD, as above",
    },
)

if __name__ == "__main__":
    run(SUITE)
