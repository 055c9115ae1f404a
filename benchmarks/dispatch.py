"""What a redistribution costs before anything is sent: meshplan beside plain DTensor, in one run.

On a fake process group nothing is communicated, so that the time is the dispatch. The two are timed
in turn, many short rounds each, and the ratio is that of their medians. With policy ``fast`` both
issue the same collective; ``deterministic`` issues two and folds in plain torch, which is reported.

    python benchmarks/dispatch.py [--rounds 21] [--calls 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from meshplan.planner import Problem, plan

P, R = Partial(), Replicate()
Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Case:
    """A redistribution, and the most that ``fast`` may take of plain torch's time."""

    name: str
    src: Placements
    dst: Placements
    bar: float | None


CASES = (
    Case("P,P->R,R flattened mesh present", (P, P), (R, R), 0.85),
    Case("P->R", (P, R), (R, R), 1.02),
    Case("S->R", (Shard(0), R), (R, R), 1.02),
    Case("S->S'", (Shard(0), R), (Shard(1), R), 1.02),
    Case("S,S->R,R flattened mesh present", (Shard(0), Shard(0)), (R, R), None),
)


@dataclass(frozen=True)
class Row:
    """Medians in microseconds, and ratios to plain torch."""

    name: str
    plain_us: float
    fast_us: float
    deterministic_us: float
    fast_ratio: float
    deterministic_ratio: float
    bar: float | None


def timed(function: Callable[[], object], calls: int) -> float:
    """Microseconds per call."""
    started = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - started) / calls * 1e6


def measure(case: Case, mesh: DeviceMesh, rounds: int, calls: int) -> Row:
    """Time one case in turn: plain, fast, deterministic, plain, ..."""
    d = DTensor.from_local(torch.ones(40, 40), mesh, case.src, run_check=False)

    def call() -> object:
        return d.redistribute(mesh, case.dst)

    found: dict[str, list[float]] = {"plain": [], "fast": [], "deterministic": []}
    for number in range(rounds + 1):
        samples = {"plain": timed(call, calls)}
        for policy in ("fast", "deterministic"):
            with meshplan.installed(policy=policy):
                samples[policy] = timed(call, calls)
        if number:  # the first round fills the caches
            for name, value in samples.items():
                found[name].append(value)
    median = {name: statistics.median(values) for name, values in found.items()}
    return Row(
        name=case.name,
        plain_us=median["plain"],
        fast_us=median["fast"],
        deterministic_us=median["deterministic"],
        fast_ratio=median["fast"] / median["plain"],
        deterministic_ratio=median["deterministic"] / median["plain"],
        bar=case.bar,
    )


def fresh_plan_ms(rounds: int) -> float:
    """Milliseconds for a plan of a 5-axis mesh that is not in the cache."""
    layout = meshplan.Layout.of(pp=4, ddp=64, fsdp=8, cp=4, tp=8)
    problem = Problem.of(layout, ["R", "P", "P", "P", "S(1)"], ["R", "R", "S(0)", "R", "R"])
    samples = []
    for _ in range(rounds):
        plan.cache_clear()
        samples.append(timed(lambda: plan(problem), 1) / 1000)
    return statistics.median(samples)


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [f"{'':34}{'plain':>9}{'fast':>9}{'ratio':>7}{'bar':>7}{'determ.':>10}{'ratio':>7}"]
    for row in rows:
        bar = "" if row.bar is None else f"{row.bar:.2f}"
        lines.append(
            f"{row.name:34}{row.plain_us:7.0f}us{row.fast_us:7.0f}us{row.fast_ratio:7.2f}{bar:>7}"
            f"{row.deterministic_us:8.0f}us{row.deterministic_ratio:7.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run, print, and write the JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("fake", rank=0, world_size=40, store=FakeStore())
    mesh = init_device_mesh("cpu", (8, 5), mesh_dim_names=("ddp", "fsdp"))
    mesh["ddp", "fsdp"]._flatten("flat")
    rows = [measure(case, mesh, options.rounds, options.calls) for case in CASES]
    plan_ms = fresh_plan_ms(options.rounds)
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, medians of "
        f"{options.rounds} rounds of {options.calls} calls"
    )
    print(table(rows))
    print(f"fresh plan, 5 axes: {plan_ms:.3f} ms (bar 5)")
    if options.json:
        found = {
            "machine": platform.machine(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "rounds": options.rounds,
            "calls": options.calls,
            "rows": [asdict(row) for row in rows],
            "fresh_plan_ms": plan_ms,
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
