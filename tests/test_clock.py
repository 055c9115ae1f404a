"""The cost of each path is what a clock shows for the messages that the path's own code sends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from meshplan.execute.paths import get_path
from meshplan.layout import Layout
from meshplan.planner import Problem, Step, plan
from meshplan.planner._group_facts import find_groups
from meshplan.planner._path_costs import (
    Cost,
    ElementWidth,
    PlannedReduction,
    ReductionStrategy,
    predict_cost,
)
from meshplan.planner._planner import _make_reduction
from meshplan.topology import Links, Topology
from tests.clock import ClockTime, _make_groups, _record, clock
from tests.marks import full
from tests.replay import Program, Replay

NODE = 4
MESHES = [
    *[one for one in itertools.product(range(2, 25), repeat=2) if math.prod(one) <= 72][::4],
    *[one for one in itertools.product(range(2, 9), repeat=3) if math.prod(one) <= 72][::5],
]
SIZES = (1 << 8, 1 << 14, 1 << 20)


def predict_and_clock(
    sizes: tuple[int, ...],
    path: str,
    numel: int,
    dtype: torch.dtype = torch.float32,
    *,
    between: str = "exchange",
    lanes: bool = False,
    sharded: tuple[int, ...] = (),
) -> tuple[float, ClockTime]:
    """Seconds by the formula, and by the clock."""
    ranks = math.prod(sizes)
    topology = Topology.uniform(ranks, node_size=NODE, domain_size=NODE)
    step, predict = make_step(sizes, path, topology, dtype, between, sharded)
    predicted = predict(numel)
    flat = None if path == "hierarchical" else path
    shown = clock(step, topology, numel, dtype, path=flat, lanes=lanes)
    assert shown.launches == predicted.collectives
    return predicted.nanoseconds / 1e9, shown


def make_step(
    sizes: tuple[int, ...],
    path: str,
    topology: Topology,
    dtype: torch.dtype,
    between: str = "exchange",
    sharded: tuple[int, ...] = (),
) -> tuple[Step, Callable[[int], Cost]]:
    """The step of a reduction, and its cost for so many elements."""
    layout, axes = Layout(sizes=sizes), tuple(range(len(sizes)))
    to = ["S(0)" if axis in sharded else "R" for axis in axes]
    problem = Problem.of(layout, ["P"] * len(sizes), to, dtype=dtype, topology=topology)
    inner = NODE if path == "hierarchical" else 1
    strategy = ReductionStrategy(axes, sharded, inner, between)  # type: ignore[arg-type]
    reach = find_groups(layout, topology).find_reach(strategy)
    width = ElementWidth.of(problem.dtype, problem.contract)

    def predict(numel: int) -> Cost:
        reduction = PlannedReduction(reach, numel, numel, width, inner, strategy.between)
        return predict_cost("exchange" if inner > 1 else path, reduction)

    return _make_reduction(problem, strategy), predict


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(
    ("sizes", "path"),
    [
        ((16,), "exchange"),
        full((5, 8), "exchange"),
        full((3, 5), "exchange"),
        ((3, 5), "reference"),
        ((4, 4), "hierarchical"),
        full((5, 8), "hierarchical"),
    ],
)
def test_cost_is_what_the_clock_shows(sizes: tuple[int, ...], path: str, numel: int) -> None:
    predicted, shown = predict_and_clock(sizes, path, numel)
    assert shown.seconds == pytest.approx(predicted, rel=0.1)


@pytest.mark.parametrize("ranks", [8, 13])
def test_each_round_takes_the_time_of_a_batch(ranks: int) -> None:
    times = []
    for batch in (0.0, 1e-3):
        topology = Topology.unknown(ranks, links=Links(batch=batch))
        step, predict = make_step((ranks,), "halving", topology, torch.float32)
        shown, predicted = clock(step, topology, 1 << 10, path="halving"), predict(1 << 10)
        assert shown.seconds == pytest.approx(predicted.nanoseconds / 1e9, rel=0.01)
        times.append(shown.seconds)
    assert times[1] - times[0] == pytest.approx(6 * 1e-3, rel=0.01)  # three rounds forth and back
    assert clock(step, topology, 1 << 10, path="exchange").seconds < 1e-3


@pytest.mark.parametrize("nodes", [(5, 4), (5, 5, 5), (3, 7, 2)])
def test_cost_of_halving_across_jagged_nodes_is_what_the_clock_shows(
    nodes: tuple[int, ...],
) -> None:
    """Pairs of one round are on one node or on two."""
    topology = Topology.of([node for node, ranks in enumerate(nodes) for _ in range(ranks)])
    step, predict = make_step((sum(nodes),), "halving", topology, torch.float32)
    for numel in (*SIZES, 1 << 25):
        shown = clock(step, topology, numel, path="halving")
        assert shown.seconds == pytest.approx(predict(numel).nanoseconds / 1e9, rel=0.1)


@pytest.mark.parametrize("numel", [*SIZES, full(1 << 24)])
@pytest.mark.parametrize(
    ("sizes", "sharded", "path", "between"),
    [
        full((16,), (0,), "exchange", "exchange"),
        full((5, 8), (1,), "exchange", "exchange"),
        full((5, 8), (1,), "hierarchical", "exchange"),
        # Without ranks that own no part, and with some.
        full((3, 4), (0, 1), "halving", ""),
        full((4, 4), (0,), "halving", ""),
        ((5, 4), (0, 1), "halving", ""),
        full((13,), (0,), "halving", ""),
        full((7, 7), (1,), "halving", ""),
        # A shard is gathered in groups that have the ranks of a pair.
        ((17, 2), (0,), "halving", ""),
        full((4, 8), (0, 1), "hierarchical", "halving"),
        full((5, 8), (0,), "hierarchical", "halving"),
        full((5, 4), (0, 1), "hierarchical", "halving"),
    ],
)
def test_cost_of_shards_is_what_the_clock_shows(
    sizes: tuple[int, ...], sharded: tuple[int, ...], path: str, between: str, numel: int
) -> None:
    predicted, shown = predict_and_clock(sizes, path, numel, between=between, sharded=sharded)
    assert shown.seconds == pytest.approx(predicted, rel=0.1)


def check_halving(sizes: tuple[int, ...], node: int, dtype: torch.dtype = torch.float32) -> None:
    """From 1 KiB to 1 GiB; the messages are recorded once, for 4 MiB."""
    ranks, recorded = math.prod(sizes), 1 << 20
    topology = Topology.uniform(ranks, node_size=node, domain_size=node)
    step, predict = make_step(sizes, "halving", topology, dtype)
    groups = (_make_groups(step, rank) for rank in range(ranks))
    path = get_path("halving")
    programs = [_record(path, step, one, recorded, dtype) for one in groups]
    for numel in (1 << 8, 1 << 14, 1 << 21, 1 << 28):
        scaled = {rank: scale(one, numel / recorded) for rank, one in enumerate(programs)}
        shown = Replay(scaled, topology, 1).run()
        assert shown == pytest.approx(predict(numel).nanoseconds / 1e9, rel=0.1), (sizes, numel)


def scale(program: Program, factor: float) -> Program:
    """The same messages, of other sizes."""
    return [
        entry
        if isinstance(entry, int)
        else entry._replace(
            sends=tuple(one._replace(size=round(one.size * factor)) for one in entry.sends)
        )
        for entry in program
    ]


@pytest.mark.parametrize(
    ("sizes", "node"), [((4, 4), 4), ((12,), 4), ((13,), 4), ((5, 3), 4), ((3, 3, 2), 1)]
)
def test_cost_of_halving_is_what_the_clock_shows(sizes: tuple[int, ...], node: int) -> None:
    check_halving(sizes, node)


@pytest.mark.full
def test_cost_of_halving_is_what_the_clock_shows_in_larger_groups() -> None:
    for ranks in range(2, 73, 3):
        check_halving((ranks,), 4)


@pytest.mark.full
@pytest.mark.parametrize("node", [1, 4])
def test_cost_of_halving_is_what_the_clock_shows_on_every_mesh(node: int) -> None:
    assert len(MESHES) >= 40
    for sizes in MESHES[node == 1 :: 2]:
        check_halving(sizes, node, torch.bfloat16)


@pytest.mark.parametrize("between", ["exchange", "halving"])
@pytest.mark.parametrize("numel", [1 << 14, full(1 << 20), full(1 << 24), 1 << 27])
def test_cost_of_chunks_is_what_the_clock_shows(numel: int, between: str) -> None:
    predicted, shown = predict_and_clock((8, 4), "hierarchical", numel, between=between, lanes=True)
    assert shown.seconds == pytest.approx(predicted, rel=0.01)
    # Chunks are under way at once, and the rounds of several of them share a launch.
    assert (shown.launches > 8) == (numel >= 1 << 24)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(3, 4), (5, 4), (7, 4), (13, 4), (31, 4), (3, 3, 4), (5, 3, 4)])
def test_cost_of_chunks_between_any_number_of_nodes(sizes: tuple[int, ...]) -> None:
    for numel in (1 << 20, 1 << 24, 1 << 28):
        for dtype in (torch.float32, torch.bfloat16):
            how = {"between": "halving", "lanes": True}
            predicted, shown = predict_and_clock(sizes, "hierarchical", numel, dtype, **how)  # type: ignore[arg-type]
            assert shown.seconds == pytest.approx(predicted, rel=0.1), (numel, dtype)


@pytest.mark.parametrize(("nodes", "numel"), [(16, 1 << 22), full(16, 1 << 28)])
def test_bytes_of_chunks_have_a_bound(nodes: int, numel: int) -> None:
    """Of the messages that the path sends: 2.15 times the summand in bfloat16, on nodes of 8."""
    topology = Topology.uniform(nodes * 8, node_size=8, domain_size=8)
    problem = Problem.of(
        Layout((nodes, 8)), ["P", "P"], ["R", "R"], dtype="bfloat16", topology=topology, path="auto"
    )
    (step,) = plan(problem).reductions
    assert step.describe_path() == "exchange in blocks of 8, halving between them"
    shown = clock(step, topology, numel, torch.bfloat16, lanes=True)
    # More than once through a block and between blocks: several chunks.
    assert shown.messages > 2 * (7 + nodes.bit_length() - 1)
    assert 2 * numel < shown.bytes <= 2.15 * 2 * numel


@pytest.mark.parametrize("numel", SIZES)
def test_one_rank_of_each_block_shows_the_time_of_all(numel: int) -> None:
    every, lane = (
        predict_and_clock((6, 4), "hierarchical", numel, torch.bfloat16, lanes=lanes)[1]
        for lanes in (False, True)
    )
    assert lane.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert lane[1:] == every[1:]


def test_the_path_is_that_of_the_plan() -> None:
    nodes = Topology.uniform(64, node_size=8, domain_size=8)
    layout = Layout.of(ddp=8, fsdp=8)
    problem = Problem.of(layout, ["P", "P"], ["R", "R"], topology=nodes, path="auto")
    (step,) = plan(problem).reductions
    assert step.inner == 8
    # 7 in the block, and one each round with its partner, twice.
    assert clock(step, nodes, 256).messages == 2 * (7 + 3)
