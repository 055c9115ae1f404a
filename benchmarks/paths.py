"""Paths between hosts over gloo: an exchange, an exchange in blocks, and recursive halving.

Jobs of processes on four hosts, which are network namespaces with a rate that the kernel limits.
They measure their links as `meshplan links` does. ``auto`` is what the planner chooses from these.

    exchange   all-to-all among all ranks, addition, all-gather
    in blocks  the same inside each host first, then between hosts
    halving    rounds of messages between pairs of all ranks
    mixed      all-to-all inside each host, rounds of halving between hosts
    auto       what `path="auto"` runs

The model says what each of them takes. Where it says that halving or mixed takes at most 0.8 of
the exchange, that is a bar; ``auto`` has a bar of 1.1 of each other path everywhere.

    python -m benchmarks.paths
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from benchmarks.record import Bar, Case, Figures, at_most
from benchmarks.scaling import problem_of
from benchmarks.script import Suite, run
from benchmarks.timing import in_blocks, on_hosts, say_cases, slowest
from meshplan import Layout
from meshplan.cli._links_run import time_exchanges
from meshplan.execute import BoundReduction, Purpose, StepGroups
from meshplan.flatten import discover
from meshplan.planner import Problem, Step, plan
from meshplan.planner._group_facts import find_groups
from meshplan.planner._path_costs import (
    ElementWidth,
    PlannedReduction,
    ReductionStrategy,
    exchange_cost,
)
from meshplan.planner._planner import _make_reduction
from meshplan.topology._links import fit_links
from tests.multinode.cluster import why_not

HOSTS = 4
# Ranks on each host, and megabits a second between hosts.
JOBS = ((2, 1000), (4, 1000))
SMOKE_JOBS = ((1, 1000),)
# Bytes, and calls that count.
SIZES = ((1 << 10, 30), (1 << 16, 30), (1 << 22, 9), (1 << 26, 3))
SMOKE_SIZES = ((1 << 10, 2),)
_AXES = (0, 1)
_WAYS: dict[str, ReductionStrategy] = {
    "exchange": ReductionStrategy(_AXES),
    "in blocks": ReductionStrategy(_AXES, inner=2),
    "halving": ReductionStrategy(_AXES, between="halving"),
    "mixed": ReductionStrategy(_AXES, inner=2, between="halving"),
}


def measure(sizes: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    """Every path at every size, on every rank of a job."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    each = ranks // HOSTS
    cluster = discover(c10d._get_default_store(), rank, ranks, 60.0)
    found = time_exchanges(cluster.topology, torch.device("cpu"), 5, 60.0)
    topology = replace(cluster.topology, links=fit_links(found)[0])
    layout = Layout.of(hosts=HOSTS, ranks=each)
    inside = [dist.new_group([*range(h * each, (h + 1) * each)]) for h in range(HOSTS)]
    across = [dist.new_group([*range(place, ranks, each)]) for place in range(each)]
    whole = StepGroups(dist.group.WORLD)
    blocks = StepGroups(None, inside[rank // each], across[rank % each])

    def steps(problem: Problem) -> Iterator[tuple[str, Step, ReductionStrategy | None]]:
        for name, strategy in _WAYS.items():
            if strategy.inner == 1 or each > 1:
                wanted = replace(strategy, inner=each if strategy.inner > 1 else 1)
                yield name, _make_reduction(problem, wanted), wanted
        (chosen,) = plan(problem).reductions
        yield "auto", chosen, None

    for nbytes, calls in sizes:
        numel = nbytes // 4
        tensor = torch.zeros(numel)
        problem = replace(problem_of(layout, numel, topology), path="auto")
        runs: dict[str, Callable[[], object]] = {}
        predicted = {}
        for name, step, strategy in steps(problem):
            groups = blocks if step.inner > 1 else whole
            path = "halving" if name == "halving" else "auto" if name == "auto" else "exchange"
            purpose = Purpose(f"benchmark {name}", "", "all ranks")
            runs[name] = partial(BoundReduction(step, purpose, path=path).start, tensor, groups)
            if strategy is not None:
                reduction = PlannedReduction(
                    find_groups(layout, topology).find_reach(strategy),
                    numel,
                    numel,
                    ElementWidth(4, 4),
                    strategy.inner,
                    strategy.between,
                )
                predicted[name] = exchange_cost(reduction).nanoseconds / 1e6
        # What a call of seconds finds of the one before is little beside it.
        samples = slowest(in_blocks(runs, calls, scale=1e3, warm_up=1 if calls < 9 else 2))
        bars: list[Bar] = [at_most(1.1, "auto", name) for name in runs if name != "auto"]
        for name in ("halving", "mixed"):
            if name in predicted and predicted[name] <= 0.8 * predicted["exchange"]:
                bars.append(at_most(0.8, name, "exchange"))
        where = f"{ranks} ranks on {HOSTS} hosts"
        yield Case(
            name=f"all-reduce of {nbytes >> 10} KiB, {where}",
            unit="ms",
            runs=samples,
            peers=("exchange",),
            ranks=ranks,
            parameters={"bytes": nbytes, "hosts": HOSTS, "world_size": ranks},
            bars=tuple(bars),
        )
        yield Case(
            name=f"all-reduce of {nbytes >> 10} KiB, {where}, predicted from measured links",
            unit="ms",
            runs={name: Figures.of([value]) for name, value in predicted.items()},
            peers=("exchange",),
            ranks=ranks,
            parameters={
                "bytes": nbytes,
                "hosts": HOSTS,
                "world_size": ranks,
                "source": "predicted",
                "links": str(topology.links),
            },
        )


def cases(smoke: bool) -> Iterator[Case]:
    """Jobs of some ranks on each host."""
    for each, rate in SMOKE_JOBS if smoke else JOBS:
        yield from on_hosts(__file__, [each] * HOSTS, ["--smoke"] * smoke, rate)


def total(smoke: bool) -> int:
    """Measured and predicted, for each size of each job."""
    return 2 * (len(SMOKE_JOBS) * len(SMOKE_SIZES) if smoke else len(JOBS) * len(SIZES))


SUITE = Suite(
    __doc__ or "",
    cases,
    total,
    lambda: why_not("namespaces") or None,
)


def main() -> None:
    """The whole suite; or, under torchrun, the ranks of one job."""
    if "RANK" not in os.environ:
        run(SUITE)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    say_cases(measure(SMOKE_SIZES if options.smoke else SIZES))


if __name__ == "__main__":
    main()
