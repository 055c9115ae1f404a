"""What planning costs: fresh plans, torch's own planners beside them, and hazards of a large job.

All of it is pure, so that one process is enough. Plans are timed with all of meshplan's caches
empty; torch's planners are timed on a fake process group with theirs empty. Hazards run in a fresh
process each, whose peak memory is reported beside that of a process that only imports.

    python benchmarks/planner.py [--rounds 21] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos_non_cached,
    clear_redistribute_planner_cache,
)
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshplan import Layout
from meshplan.planner import Problem, plan
from meshplan.planner._cost import groups_of
from meshplan.topology import Topology

FIVE = {"pp": 2, "ddp": 4, "fsdp": 4, "cp": 2, "tp": 4}
LARGE = {"pp": 4, "ddp": 64, "fsdp": 8, "cp": 4, "tp": 8}
TEXTS = (
    "R P P P S(1) -> R R S(0) R R",
    "P P P P P -> R R R R R",
    "P S(0) S(0) S(1) P -> R R S(1) S(0) S(0)",
)
# Each in a process of its own: (name, statement, bar in seconds, bar in MiB).
HAZARDS = (
    ("only the imports", "pass", None, None),
    ("one reduction over (ddp, fsdp)", "hazards(problem, topology)", 5.0, 1024.0),
    (
        "fsdp, then ddp",
        "hazards(problem, topology, steps=[['fsdp'], ['ddp']])",
        5.0,
        1024.0,
    ),
)
SETUP = """
import resource, time
from meshplan import Layout
from meshplan.planner import Problem, hazards
from meshplan.topology import Topology
started = time.perf_counter()
problem = Problem.of(Layout.of(ddp=2048, fsdp=64, tp=8), ["P", "P", "R"], ["R", "R", "R"])
topology = Topology.uniform(1 << 20, node_size=8)
{statement}
print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@dataclass(frozen=True)
class PlanRow:
    """Medians in milliseconds, all caches empty; 0 where torch was not timed."""

    name: str
    meshplan_ms: float
    with_topology_ms: float
    torch_greedy_ms: float
    torch_min_cost_ms: float


@dataclass(frozen=True)
class HazardRow:
    """Of one process for 1,048,576 ranks."""

    name: str
    seconds: float
    peak_mib: float
    bar_seconds: float | None
    bar_mib: float | None


def median_ms(function: Callable[[], object], clear: Callable[[], object], rounds: int) -> float:
    """The median over ``rounds`` calls, each after ``clear``."""
    samples = []
    for _ in range(rounds):
        clear()
        started = time.perf_counter()
        function()
        samples.append((time.perf_counter() - started) * 1000)
    return statistics.median(samples)


def clear_plans() -> None:
    """Empty meshplan's caches."""
    plan.cache_clear()
    groups_of.cache_clear()


def placements(text: str) -> tuple[Placement, ...]:
    """Torch's placements for ``P``, ``R`` and ``S(dim)``."""
    named: dict[str, Placement] = {"P": Partial(), "R": Replicate()}
    return tuple(named.get(word) or Shard(int(word[2])) for word in text.split())


def plan_row(axes: dict[str, int], text: str, mesh: DeviceMesh | None, rounds: int) -> PlanRow:
    """Time one redistribution of a 5-axis mesh."""
    layout = Layout.of(**axes)
    src, dst = text.split(" -> ")
    ours = []
    for topology in (None, Topology.uniform(layout.world_size, node_size=8, domain_size=8)):
        problem = Problem.of(layout, src.split(), dst.split(), topology=topology)
        ours.append(median_ms(lambda p=problem: plan(p), clear_plans, rounds))  # type: ignore[misc]
    theirs = [0.0, 0.0]
    if mesh is not None:
        meta = TensorMeta(torch.Size((64, 64)), (64, 1), torch.float32)
        specs = [DTensorSpec(mesh, placements(part), meta) for part in (src, dst)]
        theirs = [
            median_ms(
                lambda m=min_cost: _gen_transform_infos_non_cached(*specs, m),  # type: ignore[misc]
                clear_redistribute_planner_cache,
                rounds,
            )
            for min_cost in (False, True)
        ]
    name = f"{text}, {layout.world_size} ranks"
    return PlanRow(name, ours[0], ours[1], theirs[0], theirs[1])


def hazard_row(
    name: str, statement: str, bar_seconds: float | None, bar_mib: float | None
) -> HazardRow:
    """Run one statement in a fresh process."""
    code = SETUP.format(statement=statement)
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
    )
    seconds, peak = map(float, found.stdout.split())
    return HazardRow(name, seconds, peak, bar_seconds, bar_mib)


def report(plans: Sequence[PlanRow], hazards: Sequence[HazardRow]) -> str:
    """The rows as text."""
    lines = [f"{'fresh plan (bar 5 ms)':56}{'meshplan':>10}{'topology':>10}{'greedy':>9}{'min':>9}"]
    for row in plans:
        torchs = [
            f"{ms:7.2f}ms" if ms else f"{'':9}"
            for ms in (row.torch_greedy_ms, row.torch_min_cost_ms)
        ]
        lines.append(
            f"{row.name:56}{row.meshplan_ms:8.2f}ms{row.with_topology_ms:8.2f}ms{''.join(torchs)}"
        )
    lines.append(f"{'hazards, 1048576 ranks':56}{'time':>10}{'bar':>7}{'peak':>10}{'bar':>9}")
    for line in hazards:
        bars = (
            ("", "")
            if line.bar_seconds is None
            else (f"{line.bar_seconds:g}s", f"{line.bar_mib:g}MiB")
        )
        lines.append(
            f"{line.name:56}{line.seconds:8.2f}s {bars[0]:>7}{line.peak_mib:7.0f}MiB{bars[1]:>9}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run, print, and write the JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=256, store=FakeStore())
    mesh = init_device_mesh("cpu", tuple(FIVE.values()), mesh_dim_names=tuple(FIVE))
    plans = [plan_row(FIVE, text, mesh, options.rounds) for text in TEXTS]
    plans += [plan_row(LARGE, text, None, options.rounds) for text in TEXTS]
    dist.destroy_process_group()
    hazards = [hazard_row(*case) for case in HAZARDS]
    print(f"torch {torch.__version__}, Python {platform.python_version()}")
    print(report(plans, hazards))
    if options.json:
        found = {
            "machine": platform.machine(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "rounds": options.rounds,
            "plans": [asdict(row) for row in plans],
            "hazards": [asdict(row) for row in hazards],
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
