"""The cost of a redistribution before anything is sent: meshplan compared with plain DTensor.

On a fake process group nothing is communicated, so that the time is the dispatch. The two take
turns, many short rounds each; a sample is the mean of a round. With policy ``fast`` both issue the
same collective; ``deterministic`` issues two and folds in plain torch, which is reported.

    python -m benchmarks.dispatch
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from benchmarks.record import Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import seconds

P, R = Partial(), Replicate()
Placements = tuple[Placement, ...]

# Name, source, target, and the most that a policy may take of plain torch's time.
REDISTRIBUTIONS: tuple[tuple[str, Placements, Placements, dict[str, float]], ...] = (
    ("P,P -> R,R, flattened mesh present", (P, P), (R, R), {"fast": 0.7, "deterministic": 2.2}),
    ("P -> R", (P, R), (R, R), {"fast": 1.0}),
    ("S -> R", (Shard(0), R), (R, R), {"fast": 1.02, "deterministic": 1.02}),
    ("S -> S'", (Shard(0), R), (Shard(1), R), {"fast": 1.02, "deterministic": 1.02}),
    ("S,S -> R,R, flattened mesh present", (Shard(0), Shard(0)), (R, R), {}),
)


def measure(name: str, function: Callable[[], object], bars: dict[str, float], smoke: bool) -> Case:
    """One redistribution, in microseconds."""
    rounds, calls = (2, 3) if smoke else (21, 200)

    def many() -> None:
        for _ in range(calls):
            function()

    samples: dict[str, list[float]] = {way: [] for way in ("torch", "fast", "deterministic")}
    for number in range(rounds + 1):
        for way, found in samples.items():
            with nullcontext() if way == "torch" else meshplan.installed(policy=way):
                # Installing is no part of it, nor are the calls after which Python has specialized
                # the code that looks up the replaced function.
                many()
                sample = seconds(many) / calls * 1e6
            if number:
                found.append(sample)
    return Case(
        name=name,
        unit="us",
        runs={way: Figures.of(found) for way, found in samples.items()},
        peers=("torch",),
        bars=tuple(at_most(bar, policy, "torch") for policy, bar in bars.items()),
    )


def cases(smoke: bool) -> Iterator[Case]:
    """Every redistribution on a mesh of 8 x 5."""
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("fake", rank=0, world_size=40, store=FakeStore())
    mesh = init_device_mesh("cpu", (8, 5), mesh_dim_names=("ddp", "fsdp"))
    mesh["ddp", "fsdp"]._flatten("flat")
    for name, src, dst, bars in REDISTRIBUTIONS:
        d = DTensor.from_local(torch.ones(40, 40), mesh, src, run_check=False)

        def call(d: DTensor = d, dst: Placements = dst) -> object:
            return d.redistribute(mesh, dst)

        yield measure(name, call, bars, smoke)
    dist.destroy_process_group()


SUITE = Suite(
    __doc__ or "",
    cases,
    lambda smoke: len(REDISTRIBUTIONS),
    reasons={
        **dict.fromkeys(
            ("fast / torch", "deterministic / torch"),
            "each S -> R or S -> S' compares the length of the shard with that of its spec, as "
            "torch does not",
        )
    },
)

if __name__ == "__main__":
    run(SUITE)
