"""What ``auto`` runs without shared memory: by size, ranks and links, from facts that ranks share."""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.execute import Purpose, StepGroups, run_reduction
from meshplan.execute._choose import PathRequest, choose
from meshplan.execute._graph import _read, write_step
from meshplan.execute._provenance import clear_report, report
from meshplan.layout import Layout
from meshplan.planner import (
    Problem,
    Step,
    find_fastest,
    plan,
)
from meshplan.planner._group_facts import find_groups
from meshplan.planner._path_costs import (
    ElementWidth,
    PlannedReduction,
    ReductionStrategy,
    exchange_cost,
    halving_cost,
    reference_cost,
)
from meshplan.planner._planner import _make_reduction
from meshplan.testing import assert_bitwise_equal, order_sensitive
from meshplan.topology import Link, Links, Topology
from tests.processes import run_ranks

pytestmark = pytest.mark.processes


def planned(links: Links, *sizes: int, **contract: str) -> Step:
    """The step of an all-reduce between ranks that are on nodes of their own."""
    ranks = math.prod(sizes)
    problem = Problem.of(
        Layout(sizes=sizes),
        ["P"] * len(sizes),
        ["R"] * len(sizes),
        path="auto",
        contract=Contract(**contract),  # type: ignore[arg-type]
        topology=Topology.uniform(ranks, node_size=1, links=links),
    )
    (step,) = plan(problem).reductions
    return step


def chosen(step: Step, nbytes: int, dtype: torch.dtype = torch.float32) -> str:
    """The name of the path of a summand of so many bytes."""
    dist.init_process_group("fake", rank=0, world_size=step.group_size, store=FakeStore())
    try:
        tensor = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
        found = choose(PathRequest(step, StepGroups(dist.group.WORLD), tensor, "auto"))
        return found.path.name
    finally:
        dist.destroy_process_group()


def test_path_depends_on_size_and_ranks() -> None:
    found = {
        (ranks, kib): chosen(planned(Links(), ranks), kib << 10)
        for ranks in (4, 16, 48)
        for kib in (1, 64, 1 << 17)
    }
    assert found == {
        (4, 1): "reference",
        (4, 64): "reference",
        (4, 1 << 17): "exchange",
        (16, 1): "reference",
        (16, 64): "halving",
        # As many bytes by both: a tie keeps the exchange.
        (16, 1 << 17): "exchange",
        # The work of the host for the rounds takes longer than one all-gather.
        (48, 1): "reference",
        (48, 64): "halving",
        (48, 1 << 17): "exchange",
    }


def test_path_depends_on_links_and_dtype() -> None:
    far = Links(network=Link(1e-3, 1e9))
    near = Links(network=Link(0.0, 1e9))
    assert chosen(planned(far, 16), 1 << 26) == "halving"
    assert chosen(planned(near, 16), 1 << 26) == "exchange"
    # Sums of bfloat16 travel as float32.
    assert chosen(planned(Links(), 16), 1 << 26, torch.bfloat16) == "exchange"
    assert chosen(planned(Links(), 16, order="rank"), 1 << 26) == "exchange"


def test_complex_numbers_travel_as_their_parts() -> None:
    """By the path of a graph, which brings real and imaginary parts."""
    step = planned(Links(), 16, accumulate="float64")
    for nbytes in (1 << 18, 1 << 21, 1 << 24):
        assert chosen(step, nbytes, torch.complex64) == chosen(step, nbytes, torch.float32)
    assert chosen(step, 1 << 21) == "exchange"
    assert chosen(planned(Links(), 16), 1 << 21, torch.complex64) == "halving"


def test_cpu_jobs_are_planned_with_links_of_cpus() -> None:
    """Unless links are given: on those of GPUs halving would be chosen."""
    dist.init_process_group("fake", rank=0, world_size=40, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (8, 5))
        d = DTensor.from_local(torch.ones(1 << 15), mesh, [Partial(), Partial()], run_check=False)
        gpus = Links(launch=6.5e-6)  # The defaults stand for links that nobody measured.
        ran = []
        for topology in (
            None,
            Topology.unknown(40),
            Topology.unknown(40, gpus),
            Topology.unknown(40, replace(gpus, batch=100e-6)),
        ):
            clear_report()
            with meshplan.installed(topology=topology):
                d.redistribute(mesh, [Replicate(), Replicate()])
            (entry,) = report().entries
            ran.append(entry["ran"])
        assert ran == ["exchange", "exchange", "halving", "exchange"]
    finally:
        dist.destroy_process_group()


def test_halving_may_cost_less_from_some_size_on() -> None:
    """On two nodes of eight, most bytes of halving stay on a node, and it has more rounds."""
    layout, topology = Layout(sizes=(2, 8)), Topology.uniform(16, node_size=8, domain_size=8)
    problem = Problem.of(layout, ["P", "P"], ["R", "R"], path="auto", topology=topology)
    step = _make_reduction(problem, ReductionStrategy((0, 1)))
    assert [chosen(step, kib << 10) for kib in (96, 1 << 20)] == ["exchange", "halving"]


def test_graph_keeps_the_links() -> None:
    for step in (planned(Links(), 16), planned(Links(), 48)):
        assert step.reach is not None
        assert _read(write_step(step)).reach == step.reach


@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=3).map(tuple).filter(lambda s: prod(s) > 8),
    st.sampled_from((1, 2, 4, 8)),
    st.floats(0, 1e-4),
    st.floats(0, 1e-4),
    st.integers(0, 1 << 34),
    st.integers(1, 2),
)
def test_fastest_path_costs_least(
    sizes: tuple[int, ...], node_size: int, batch: float, latency: float, nbytes: int, ratio: int
) -> None:
    layout = Layout(sizes=sizes)
    links = Links(network=Link(latency, 1e9), batch=batch)
    topology = Topology.uniform(prod(sizes), node_size=node_size, domain_size=1, links=links)
    reach = find_groups(layout, topology).find_reach(ReductionStrategy((*range(len(sizes)),)))
    reduction = PlannedReduction(reach, nbytes, nbytes, ElementWidth(1, ratio))
    exchange = exchange_cost(reduction).nanoseconds
    halving = 1.1 * halving_cost(reduction).nanoseconds
    gather = reference_cost(reduction).nanoseconds
    inner, between, _ = find_fastest(reach, nbytes, ratio, (0, 1), True)
    found = gather if inner == 0 else {"exchange": exchange, "halving": halving}[between]
    assert math.isclose(found, min(exchange, halving, gather))
    assert find_fastest(reach, nbytes, ratio, (1,), False) == (1, "exchange", 0)


@pytest.mark.full
def test_auto_takes_halving_between_twelve_ranks() -> None:
    leaves = [order_sensitive(60_000, rank=r, world_size=12) for r in range(12)]
    expected = reduce_leaves(leaves, "sum", (12,))

    def ranks(rank: int) -> str:
        step, groups = planned(Links(), 12), StepGroups(dist.group.WORLD)
        clear_report()
        found = run_reduction(
            leaves[rank], step, groups, purpose=Purpose("a", "p", "g"), path="auto"
        )
        assert_bitwise_equal(found, expected)
        (entry,) = report().entries
        assert entry["ran"] == "halving"
        return str(entry["why"])

    whys = run_ranks(ranks, 12)
    assert len(set(whys)) == 1
    assert "; halving is predicted to cost less than an exchange of this size" in whys[0]
