from __future__ import annotations

import math
from typing import Any

import networkx as nx
import pytest

from meshplan.layout import Layout
from meshplan.planner import NOMINAL_ELEMENTS, Problem, plan
from meshplan.planner._path_costs import ReductionStrategy
from meshplan.planner._search import Move, _StateGraph, search
from meshplan.topology import Topology

LAYOUT = Layout.of(a=2, b=2, c=3)
NODES = Topology.uniform(12, node_size=6, domain_size=3)
TEXTS = (
    "P P P -> R R R",
    "P S(0) P -> R S(1) S(0)",
    "P S(0) S(0) -> R R S(0)",
    "S(0) P R -> R S(0) S(1)",
    "S(0) S(0) P -> S(1) R S(0)",
    "P R R -> R S(0) S(0)",
)


def problem(text: str, **options: object) -> tuple[Problem, tuple[int, ...]]:
    src, dst = (part.split() for part in text.split(" -> "))
    axes = tuple(i for i, s in enumerate(src) if s == "P")
    return Problem.of(LAYOUT, src, dst, **options), axes  # type: ignore[arg-type]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shape", [None, (7, 30), (1, 1), (4096, 4096)])
def test_no_sequence_of_states_is_cheaper(text: str, shape: tuple[int, int] | None) -> None:
    """Against all simple paths, one by one."""
    asked, axes = problem(text, shape=shape, topology=NODES)
    found, compared = search(asked, axes, 3)
    everything = _StateGraph(asked, axes)
    turns = everything._grow()
    start, end = (False, everything.first), (True, everything.goal)
    times = {
        tuple(path): nx.path_weight(everything.graph, path, "weight")
        for path in nx.all_simple_paths(everything.graph, start, end)
    }
    assert found[0].cost.nanoseconds == min(times.values())
    # One candidate for each way to reduce at each place where it can stand.
    best = [min(t for path, t in times.items() if turn in path) for turn in turns]
    assert compared == len(turns)
    assert [one.cost.nanoseconds for one in found] == sorted(best)[: len(found)]


def test_tensor_size_decides_the_stages() -> None:
    """Latency counts for small tensors, bytes for large ones: then each domain goes first."""
    for shape, inner in (((4,), 1), ((1 << 24,), 3)):
        asked, axes = problem("P P P -> R R R", shape=shape, topology=NODES)
        assert search(asked, axes, 1)[0][0].path[0] == ReductionStrategy(axes, (), inner)


def test_size_is_that_of_the_largest_shard() -> None:
    asked, axes = problem("S(0) S(0) P -> S(0) S(0) R", shape=(5, 7), topology=NODES)
    seeker = _StateGraph(asked, axes)
    assert seeker.count_elements((0, 0, -1)) == 2 * 7
    assert seeker.count_elements((0, -1, -1)) == 3 * 7
    assert seeker.count_elements((0, 1, -1)) == 3 * 4
    unknown = _StateGraph(problem("S(0) S(0) P -> S(0) S(0) R")[0], axes)
    assert unknown.count_elements((0, 0, -1)) == NOMINAL_ELEMENTS // 4


def test_moves_surround_the_single_reduction() -> None:
    asked, axes = problem("P S(0) R -> S(0) R S(1)", shape=(12, 12), topology=NODES)
    (first, *_), _ = search(asked, axes, 5)
    assert first.path == (
        # Half is left away at once; whole rows are there before each rank takes some of them, so
        # that nothing has to be gathered once it is finished.
        Move(axis=2, held=-1, then=1),
        Move(axis=1, held=0, then=-1),
        ReductionStrategy(axes=(0,), sharded=(0,)),
    )


@pytest.mark.parametrize("nodes", [2, 512])
def test_nodes_reduce_partials_by_halving(nodes: int) -> None:
    topology = Topology.uniform(nodes * 8, node_size=8, domain_size=8)
    how: dict[str, Any] = {"path": "auto", "topology": topology, "shape": (1 << 24,)}
    layout = Layout((nodes, 8))
    chosen = plan(Problem.of(layout, ("P", "P"), ("R", "R"), dtype="bfloat16", **how))
    (step,) = chosen.reductions
    assert (step.inner, step.between, step.path) == (8, "halving", "exchange")
    assert step.chunk > 0
    # 16 bits inside nodes, float32 partials of an eighth between them, 16 bits back.
    assert chosen.candidates[0].cost.sent <= 2.15 * 2 * (1 << 24)


@pytest.mark.parametrize("nodes", [3, 5, 64, 65])
def test_shards_between_any_number_of_nodes_may_halve(nodes: int) -> None:
    """Of 5 or 65 nodes some own no part, and get their shards in one round more."""
    topology = Topology.uniform(nodes * 8, node_size=8, domain_size=8)
    how: dict[str, Any] = {"path": "auto", "topology": topology, "shape": (1 << 24,)}
    problem = Problem.of(Layout((nodes, 8)), ("P", "P"), ("R", "S(0)"), **how)
    found = search(problem, (0, 1), 100)[0]
    reductions = [one for each in found for one in each.path if isinstance(one, ReductionStrategy)]
    assert ReductionStrategy((0, 1), (1,), 8, "halving") in reductions


@pytest.mark.parametrize(
    ("sizes", "numel", "halves"),
    [
        ((12,), 1 << 19, True),  # 0.89 of the time of an exchange
        ((12,), 1 << 20, False),  # 0.93
        ((4, 8), 1 << 24, True),  # 0.94
        ((4, 8), 1 << 26, False),  # 0.96
    ],
)
def test_halving_has_to_save_a_margin(sizes: tuple[int, ...], numel: int, halves: bool) -> None:
    """Of 10 % between ranks, and of 5 % between blocks."""
    node = sizes[-1] if len(sizes) > 1 else 1
    topology = Topology.uniform(math.prod(sizes), node_size=node, domain_size=node)
    words = ["P"] * len(sizes), ["R"] * len(sizes)
    chosen = plan(Problem.of(Layout(sizes), *words, path="auto", topology=topology, shape=(numel,)))
    times: dict[str, int] = {}
    for one in chosen.candidates:
        times.setdefault(one.steps[0].between, one.cost.nanoseconds)
    assert times["halving"] < times["exchange"]
    assert (chosen.reductions[0].between == "halving") == halves
    assert ("faster, within the margin that halving has to save" in chosen.explain()) != halves
