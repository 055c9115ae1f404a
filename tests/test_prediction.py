"""Predicted all-reduces: the formulas by hand and by events, and what must not change them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import AxisNameError, PlacementError
from meshplan.layout import Layout
from meshplan.planner import Problem, plan, predict_backend, predict_plan
from meshplan.planner._path_costs import Cost
from meshplan.topology import Link, Links, Topology
from tests.refusals import refusal

FAST, SLOW = Link(1e-6, 4e9), Link(10e-6, 1e9)
LINKS = Links(domain=FAST, node=Link(2e-6, 2e9), network=SLOW, launch=5e-6)


def all_reduce(topology: Topology | None, numel: int = 1 << 20, **sizes: int) -> Problem:
    return Problem.of(
        Layout.of(**sizes),
        ["P"] * len(sizes),
        ["R"] * len(sizes),
        dtype=torch.float32,
        shape=(numel,),
        topology=topology,
    )


def seconds(cost: Cost) -> float:
    return cost.nanoseconds / 1e9


def test_one_domain_matches_hand_computation() -> None:
    problem = all_reduce(Topology.uniform(4, node_size=4, domain_size=4, links=LINKS), tp=4)
    ring, tree = (predict_backend(problem, [["tp"]], how).cost for how in ("ring", "tree"))  # type: ignore[arg-type]
    size = 4 << 20
    assert ring == Cost(
        nanoseconds=round((5e-6 + 6 * 1e-6 + 1.5 * size / 4e9) * 1e9),
        collectives=1,
        domain=3 * size // 2,
    )
    assert tree == Cost(
        nanoseconds=round((5e-6 + 6 * 1e-6 + 2 * size / 4e9) * 1e9), collectives=1, domain=2 * size
    )


def test_several_nodes_match_hand_computation() -> None:
    # 8 nodes of 4: 62 hops, 16 of them between nodes; 4 adapters to a node are as fast as a domain.
    topology = Topology.uniform(32, node_size=4, domain_size=4, links=LINKS)
    problem = all_reduce(topology, ddp=8, fsdp=4)
    whole = [["ddp", "fsdp"]]
    ring, tree = (predict_backend(problem, whole, how).cost for how in ("ring", "tree"))  # type: ignore[arg-type]
    size = 4 << 20
    moved = 62 * size // 32
    assert seconds(ring) == pytest.approx(5e-6 + 46e-6 + 160e-6 + moved / 4e9, abs=1e-9)
    assert (ring.network, ring.node, ring.domain) == (moved // 4, 0, moved)
    # Three hops between nodes each way, for floor(log2(8)).
    assert seconds(tree) == pytest.approx(5e-6 + 6e-6 + 60e-6 + 2 * size / 4e9, abs=1e-9)
    assert (tree.network, tree.domain) == (size // 2, 2 * size)


@given(st.integers(2, 9), st.integers(1, 1 << 16))
def test_ring_matches_an_event_simulation(ranks: int, numel: int) -> None:
    problem = all_reduce(Topology.uniform(ranks, node_size=1, links=LINKS), numel, ddp=ranks)
    piece = -(-numel * 4 // ranks)
    # When each rank has what it sends next: one message after the other, round the ring.
    ready = [0.0] * ranks
    for _ in range(2 * (ranks - 1)):
        ready = [
            max(ready[rank], ready[rank - 1]) + SLOW.latency + piece / SLOW.bandwidth
            for rank in range(ranks)
        ]
    found = predict_backend(problem, [["ddp"]], "ring").cost
    assert seconds(found) == pytest.approx(5e-6 + max(ready), abs=2e-9)
    assert found.network == 2 * (ranks - 1) * piece


def test_single_rank_on_a_node_slows_its_ring() -> None:
    problem = Problem.of(
        Layout.of(ddp=8, fsdp=5),
        ["R", "P"],
        ["R", "R"],
        dtype=torch.float32,
        shape=(1 << 20,),
        topology=Topology.uniform(40, node_size=8, domain_size=8, links=LINKS),
    )
    alone = predict_backend(problem, [["fsdp"]], "ring").cost
    # Groups (4, 1): all that a group sends goes through the one adapter of the fifth.
    assert alone.network == 2 * 4 * -(-(4 << 20) // 5)
    assert seconds(alone) > alone.network / SLOW.bandwidth


def test_unknown_topology_has_one_node_per_rank() -> None:
    known = all_reduce(Topology.uniform(6, node_size=1), ddp=6)
    for how in ("ring", "tree"):
        assert (
            predict_backend(all_reduce(None, ddp=6), [["ddp"]], how)  # type: ignore[arg-type]
            == predict_backend(all_reduce(Topology.unknown(6), ddp=6), [["ddp"]], how)  # type: ignore[arg-type]
            == predict_backend(known, [["ddp"]], how)  # type: ignore[arg-type]
        )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = math.prod(sizes)
    node = draw(st.integers(1, 6))
    domain = draw(st.none() | st.integers(1, node))
    topology = Topology.uniform(count, node_size=node, domain_size=domain, links=LINKS)
    axes = {f"a{i}": size for i, size in enumerate(sizes)}
    return all_reduce(topology, draw(st.integers(1, 1 << 20)), **axes)


@given(problems())
def test_sequence_cost_is_the_sum_of_its_fastest_steps(problem: Problem) -> None:
    steps = [[axis] for axis in problem.layout.axes]
    best = predict_backend(problem, steps)
    alone = []
    for axes in best.steps:
        src = ["P" if axis in axes else "R" for axis in problem.layout.axes]
        one = replace(problem, src=Problem.of(problem.layout, src, src).src)
        found = [predict_backend(one, [axes], how) for how in ("ring", "tree")]  # type: ignore[arg-type]
        alone.append(min(found, key=lambda each: each.cost.nanoseconds).cost)
    assert best.cost == Cost.total(alone)


@given(problems())
def test_predicted_cost_matches_the_planner(problem: Problem) -> None:
    found = predict_plan(problem)
    planned = plan(problem)
    if planned.candidates:
        cost = planned.candidates[0].cost
        groups = problem.topology.links.group * len(cost.creates)  # type: ignore[union-attr]
        share = groups / problem.topology.links.uses  # type: ignore[union-attr]
        assert found.cost == replace(cost, nanoseconds=found.cost.nanoseconds)
        assert seconds(found.cost) == pytest.approx(seconds(cost) - share, abs=2e-9)
    else:
        assert found.cost == Cost()
    assert len(found.steps) == len(found.how) == len(planned.reductions)


@given(problems())
def test_node_names_do_not_change_the_prediction(problem: Problem) -> None:
    topology = problem.topology
    assert topology is not None
    assert topology.nodes is not None
    renamed = Topology.of(
        [7 - node if node < 8 else node for node in topology.nodes.tolist()],
        None if topology.domains is None else topology.domains.tolist(),
        links=LINKS,
    )
    steps = [[axis] for axis in problem.layout.axes]
    assert predict_backend(problem, steps) == predict_backend(
        replace(problem, topology=renamed), steps
    )


def test_100000_ranks_are_predicted() -> None:
    topology = Topology.uniform(100_000, node_size=8, domain_size=8)
    problem = all_reduce(topology, 1 << 28, ddp=12_500, fsdp=8)
    found = predict_plan(problem)
    assert found.how == ("exchange in blocks of 8",)
    one = predict_backend(problem, [["ddp", "fsdp"]], "ring")
    # Less than the whole message leaves a node for each of its adapters, twice.
    assert found.cost.network < 2 * (1 << 30) / 8 * 1.01
    assert one.cost.nanoseconds > 12_500 * 2 * 2700


class TestRefusals(TestCase):
    def test_other_redistributions_are_refused(self) -> None:
        layout = Layout.of(ddp=2, fsdp=2)
        messages = []
        for src, dst in ((["P", "P"], ["R", "S(0)"]), (["S(0)", "P"], ["R", "R"])):
            problem = Problem.of(layout, src, dst)
            messages.append(refusal(PlacementError, predict_plan, problem))
            steps = [["ddp"], ["fsdp"]]
            assert refusal(PlacementError, predict_backend, problem, steps) == messages[-1]
        self.assertExpectedInline(
            "\n".join(messages),
            """\
MP401: only all-reduces are predicted, got P(sum) -> S(0) on axis fsdp; use P or R before, and R after
MP401: only all-reduces are predicted, got S(0) -> R on axis ddp; use P or R before, and R after""",
        )

    def test_incomplete_steps_are_refused(self) -> None:
        problem = all_reduce(None, ddp=2, fsdp=2)
        with pytest.raises(PlacementError, match="no step reduces axis fsdp"):
            predict_backend(problem, [["ddp"]])
        with pytest.raises(AxisNameError):
            predict_backend(problem, [["ddp"], ["tp"]])


@pytest.mark.parametrize(
    ("numel", "limits"),
    [
        (1 << 14, {512: 3.5, 4096: 3.5, 100_000: 4.5}),
        (1 << 22, {512: 2.5, 4096: 2.5, 100_000: 3.2}),
        (1 << 28, {64: 1.0, 512: 1.1, 4096: 1.1}),
    ],
)
def test_plans_stay_near_the_best_native_algorithm(numel: int, limits: dict[int, float]) -> None:
    for ranks, limit in limits.items():
        topology = Topology.uniform(ranks, node_size=8, domain_size=8)
        problem = all_reduce(topology, numel, ddp=ranks // 8, fsdp=8)
        found = predict_plan(replace(problem, path="auto")).cost.nanoseconds
        ring, tree = (
            predict_backend(problem, [["ddp", "fsdp"]], how).cost.nanoseconds  # type: ignore[arg-type]
            for how in ("ring", "tree")
        )
        assert found <= limit * tree
        assert found <= ring or numel < 1 << 28
