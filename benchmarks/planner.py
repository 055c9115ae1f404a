"""The cost of planning: new plans, compared with torch's planners, and hazards of a large job.

All of it is pure, so that one process is enough. Plans are timed with all caches empty, meshplan's
and torch's, which has a process group that is not real. Hazards run in a fresh process each; its
peak memory is shown beside that of a process that only imports.

    python -m benchmarks.planner
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

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

from benchmarks.record import Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import in_turn
from meshplan import Layout
from meshplan.planner import Problem, plan
from meshplan.planner._group_facts import find_groups
from meshplan.topology import Topology

FIVE = {"pp": 2, "ddp": 4, "fsdp": 4, "cp": 2, "tp": 4}
LARGE = {"pp": 4, "ddp": 64, "fsdp": 8, "cp": 4, "tp": 8}
TEXTS = (
    "R P P P S(1) -> R R S(0) R R",
    "P P P P P -> R R R R R",
    "P S(0) S(0) S(1) P -> R R S(1) S(0) S(0)",
)
HAZARDS = {
    "one reduction over (ddp, fsdp)": "hazards(problem, topology)",
    "fsdp, then ddp": "hazards(problem, topology, steps=[['fsdp'], ['ddp']])",
}
SETUP = """
import resource, time
from meshplan import Layout
from meshplan.planner import Problem, hazards
from meshplan.topology import Topology
started = time.perf_counter()
problem = Problem.of(Layout.of(ddp={ddp}, fsdp=64, tp=8), ["P", "P", "R"], ["R", "R", "R"])
topology = Topology.uniform({ddp} * 64 * 8, node_size=8)
{statement}
print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def clear() -> None:
    """Empty the caches of meshplan and of torch's planner."""
    plan.cache_clear()
    find_groups.cache_clear()
    clear_redistribute_planner_cache()


def placements(text: str) -> tuple[Placement, ...]:
    """Torch's placements for ``P``, ``R`` and ``S(dim)``."""
    named: dict[str, Placement] = {"P": Partial(), "R": Replicate()}
    return tuple(named.get(word) or Shard(int(word[2])) for word in text.split())


def planned(axes: dict[str, int], text: str, mesh: DeviceMesh | None, rounds: int) -> Case:
    """One redistribution of a 5-axis mesh, by torch's planners too if ``mesh`` is given."""
    layout = Layout.of(**axes)
    src, dst = text.split(" -> ")
    near = Topology.uniform(layout.world_size, node_size=8, domain_size=8)
    problems = {
        "meshplan": Problem.of(layout, src.split(), dst.split()),
        "meshplan, topology": Problem.of(layout, src.split(), dst.split(), topology=near),
    }
    ways: dict[str, Callable[[], object]] = {
        name: lambda problem=problem: plan(problem)  # type: ignore[misc]
        for name, problem in problems.items()
    }
    if mesh is not None:
        meta = TensorMeta(torch.Size((64, 64)), (64, 1), torch.float32)
        specs = [DTensorSpec(mesh, placements(part), meta) for part in (src, dst)]
        ways["torch, greedy"] = lambda: _gen_transform_infos_non_cached(*specs, False)
        ways["torch, min-cost"] = lambda: _gen_transform_infos_non_cached(*specs, True)
    samples = in_turn(ways, rounds, scale=1e3, before=clear)
    return Case(
        name=f"fresh plan of {text}, mesh of {layout.world_size}",
        unit="ms",
        runs={name: Figures.of(found) for name, found in samples.items()},
        peers=tuple(name for name in ways if name.startswith("torch")),
        parameters={"world_size": layout.world_size},
        bars=tuple(at_most(5.0, name) for name in problems),
    )


def hazards(name: str, statement: str, ddp: int) -> Iterator[Case]:
    """Time and memory of one statement, each in a fresh process."""
    found = {}
    for run_name, text in (("imports only", "pass"), ("hazards", statement)):
        code = SETUP.format(statement=text, ddp=ddp)
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
        )
        found[run_name] = tuple(map(float, done.stdout.split()))
    parameters: dict[str, int | str] = {"world_size": ddp * 64 * 8}
    yield Case(
        name=f"hazards of {ddp * 64 * 8} ranks: {name}",
        unit="s",
        runs={"hazards": Figures.of([found["hazards"][0]])},
        parameters=parameters,
        bars=(at_most(5.0, "hazards"),),
    )
    yield Case(
        name=f"peak memory of that: {name}",
        unit="MiB",
        runs={key: Figures.of([peak]) for key, (_, peak) in found.items()},
        parameters=parameters,
        bars=(at_most(1024, "hazards"),),
    )


def cases(smoke: bool) -> Iterator[Case]:
    """Plans, then hazards."""
    torch.set_num_threads(1)
    rounds = 1 if smoke else 11
    dist.init_process_group("fake", rank=0, world_size=256, store=FakeStore())
    mesh = init_device_mesh("cpu", tuple(FIVE.values()), mesh_dim_names=tuple(FIVE))
    texts = TEXTS[:1] if smoke else TEXTS
    for text in texts:
        yield planned(FIVE, text, mesh, rounds)
    for text in texts:
        yield planned(LARGE, text, None, rounds)
    dist.destroy_process_group()
    for name, statement in list(HAZARDS.items())[: 1 if smoke else None]:
        yield from hazards(name, statement, 2 if smoke else 2048)


def total(smoke: bool) -> int:
    """Plans of two meshes; time and memory of hazards."""
    return 4 if smoke else 2 * len(TEXTS) + 2 * len(HAZARDS)


SUITE = Suite(__doc__ or "", cases, total)

if __name__ == "__main__":
    run(SUITE)
