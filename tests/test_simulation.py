"""Simulated replicas: the published table, a brute force over scalars, and other code's sums."""

from __future__ import annotations

import itertools
import math
import resource
import time
from random import Random

import numpy as np
import pytest
import torch
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ReduceOp
from torch.distributed.tensor.placement_types import Partial, Replicate

from meshplan._dtypes import name_of
from meshplan.errors import AxisNameError, PlacementError, PolicyError, TopologyError
from meshplan.layout import Layout
from meshplan.planner import nccl_order, predict_divergence, simulate
from meshplan.planner._hazards import ALGORITHMS, Algorithm, Siblings
from meshplan.planner._simulation import (
    SimulatedStep,
    _round,
    add_rows,
    count_distinct,
    count_ulps,
    draw_row,
    measure_share,
    spread_elements,
)
from meshplan.testing import bits
from meshplan.testing.nccl_model import _Algebra
from meshplan.topology import Topology
from tests.marks import full
from tests.refusals import refusal

FSDP_FIRST, DDP_FIRST = (("fsdp",), ("ddp",)), (("ddp",), ("fsdp",))
HOSTS = Topology.uniform(40, node_size=8)
ISSUE = Layout.of(ddp=8, fsdp=5)

# Mesh (ddp, fsdp), ranks of a node; different replicas and per cent of elements that differ:
# tree with fsdp first, tree with ddp first, ring with fsdp first, ring with ddp first.
TABLE = [
    ((8, 5), 8, (5, 56), (4, 46), (1, 0), (5, 35)),
    ((4, 6), 8, (3, 37), (3, 44), (1, 0), (3, 35)),
    ((4, 12), 8, (1, 0), (2, 55), (1, 0), (2, 65)),
    ((3, 16), 24, (2, 29), (2, 57), (1, 0), (2, 69)),
    ((9, 64), 72, (8, 57), (8, 80), (1, 0), (8, 86)),
    ((5, 8), 8, (1, 0), (1, 0), (1, 0), (1, 0)),
    ((8, 4), 8, (1, 0), (1, 0), (1, 0), (1, 0)),
    ((2, 8), 8, (1, 0), (1, 0), (1, 0), (1, 0)),
    ((6, 4), 8, (1, 0), (1, 0), (1, 0), (1, 0)),
]


# The mesh of most ranks takes longest.
@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        full(row, dtype) if (row[1], dtype) == (72, torch.bfloat16) else (row, dtype)
        for row in TABLE
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_published_table_is_reproduced(
    row: tuple[tuple[int, int], int, *tuple[tuple[int, int], ...]], dtype: torch.dtype
) -> None:
    sizes, node, *expected = row
    layout = Layout.of(ddp=sizes[0], fsdp=sizes[1])
    topology = Topology.uniform(layout.world_size, node_size=node)
    cases = itertools.product(("tree", "ring"), (FSDP_FIRST, DDP_FIRST))
    for (algorithm, steps), (replicas, per_cent) in zip(cases, expected, strict=True):
        found = simulate(layout, topology, steps, algorithm=algorithm, dtype=dtype, numel=1 << 13)
        assert found.replicas == replicas
        # Two standard errors of a share among 8192 elements, and the rounding of the table.
        assert abs(100 * found.differing - per_cent) <= (2 if per_cent else 0)
        assert (found.ulps > 0) == (replicas > 1)
    for algorithm in ALGORITHMS:
        flat = simulate(layout, topology, [("ddp", "fsdp")], algorithm=algorithm, numel=64)
        assert (flat.replicas, flat.differing, flat.ulps) == (1, 0, 0)


def drawn(seed: int, number: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A row as a tensor of the dtype, which it must be representable in."""
    row = torch.from_numpy(draw_row(seed, number, numel, name_of(dtype)))
    assert torch.equal(row.to(dtype).to(row.dtype), row)
    return row.to(dtype)


class Scalars:
    """The same in loops over ranks and elements, by the trees that ``tests/test_nccl_order.py`` tests."""

    def __init__(self, layout: Layout, nodes: list[int], algorithm: str, numel: int) -> None:
        self.layout, self.nodes, self.algorithm = layout, nodes, algorithm
        self.numel = numel
        self.cells = list(itertools.product(*map(range, layout.sizes)))
        self.rank = dict(zip(self.cells, layout.ranks, strict=True))

    def run(
        self, steps: list[tuple[int, ...]], src: list[str], dtype: torch.dtype, seed: int
    ) -> dict[tuple[int, ...], Tensor]:
        own = [i for i, text in enumerate(src) if text != "R"]
        numbers: dict[tuple[int, ...], int] = {}
        held: dict[tuple[int, ...], Tensor] = {}
        for cell in self.cells:
            number = numbers.setdefault(tuple(cell[i] for i in own), len(numbers))
            held[cell] = drawn(seed, number, self.numel, dtype)
        for axes in steps:
            averaged = math.prod(self.layout.sizes[i] for i in axes if src[i] == "P(avg)")
            result = {}
            for cell in self.cells:
                members = [
                    other
                    for other in self.cells
                    if all(other[i] == cell[i] for i in range(len(cell)) if i not in axes)
                ]
                members.sort(key=self.rank.__getitem__)
                rows = [held[member] for member in members]
                if averaged > 1:
                    rows = [row * torch.tensor(1 / averaged, dtype=dtype) for row in rows]
                result[cell] = self.reduce(rows, [self.nodes[self.rank[m]] for m in members])
            held = result
        return held

    def reduce(self, rows: list[Tensor], nodes: list[int]) -> Tensor:
        found = torch.empty_like(rows[0])
        align = 16 // rows[0].itemsize
        width = math.ceil(math.ceil(self.numel / len(rows)) / align) * align
        tree = nccl_order.tree_tree(nodes)
        ring = nccl_order.ring_order(nodes)
        for element in range(self.numel):
            if self.algorithm == "ring":
                tree = nccl_order.ring_tree(ring, element // width)
            values = [row[element] for row in rows]
            found[element] = nccl_order.fold(tree, values.__getitem__, torch.add)
        return found


def ordinal(value: Tensor) -> int:
    """How many floats lie between 0 and a value."""
    whole = int(abs(value).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[value.itemsize]))
    return -whole if value < 0 else whole


def compare_replicas(
    held: dict[tuple[int, ...], Tensor], alone: list[int]
) -> tuple[int, float, int]:
    replicas, differing, distance = 1, 0.0, 0
    sets: dict[tuple[int, ...], list[Tensor]] = {}
    for cell, row in held.items():
        sets.setdefault(tuple(cell[i] for i in alone), []).append(row)
    for rows in sets.values():
        hexes = {tuple(float(value).hex() for value in row) for row in rows}
        replicas = max(replicas, len(hexes))
        for row in rows[1:]:
            pairs = [
                (a, b)
                for a, b in zip(rows[0], row, strict=True)
                if float(a).hex() != float(b).hex()
            ]
            differing = max(differing, len(pairs) / len(row))
            distance = max([distance, *(abs(ordinal(a) - ordinal(b)) for a, b in pairs)])
    return replicas, differing, distance


@given(st.randoms(use_true_random=True))
def test_vectorized_simulation_matches_scalars(random: Random) -> None:
    sizes = random.choices((1, 2, 3, 4, 5), weights=(1, 2, 4, 3, 2), k=random.choice((1, 2, 2, 3)))
    while math.prod(sizes) > 24:
        sizes.pop()
    world = math.prod(sizes)
    ranks = list(range(world))
    if random.random() < 0.4:
        random.shuffle(ranks)
    nodes = random.choices(range(random.randint(1, 5)), k=world)
    if random.random() < 0.5:
        nodes.sort()
    src = random.choices(("P", "P(avg)", "R", "S(0)"), weights=(5, 2, 2, 1), k=len(sizes))
    partial = [i for i, text in enumerate(src) if text[0] == "P"]
    reduced = random.sample(
        partial, k=random.choice([len(partial)] * 3 + list(range(len(partial))))
    )
    steps: list[tuple[int, ...]] = []
    for axis in reduced:
        if steps and random.random() < 0.3:
            steps[-1] = tuple(sorted((*steps[-1], axis)))
        else:
            steps.append((axis,))
    dtype = random.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    numel, seed = random.randint(1, 16), random.randint(0, 3)
    layout = Layout(tuple(sizes), ranks=tuple(ranks))
    alone = [i for i, text in enumerate(src) if text != "R" and i not in reduced]
    for algorithm in ALGORITHMS:
        found = simulate(
            layout,
            Topology.of(nodes),
            steps,
            algorithm=algorithm,
            dtype=dtype,
            numel=numel,
            seed=seed,
            src=src,
        )
        held = Scalars(layout, nodes, algorithm, numel).run(steps, src, dtype, seed)
        assert (found.replicas, found.differing, found.ulps) == compare_replicas(held, alone)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_simulation_matches_the_model_backend(algorithm: Algorithm, op: ReduceOp) -> None:
    """Every group of a mesh with permuted ranks, as the processes of the test backend add."""
    random = Random(1)
    ranks = random.sample(range(63), k=63)
    layout = Layout.of(ranks, a=9, b=7)
    nodes = [rank // 8 for rank in range(63)]
    siblings = Siblings(layout, (1,), Topology.of(nodes), sort_ranks=True)
    numel = 300
    pieces = nccl_order.ring_chunks(numel, 7, 2)
    for group, by_coordinate in enumerate(layout.siblings(1).tolist()):
        rows = [drawn(3, rank, numel, torch.bfloat16) for rank in by_coordinate]
        parts = torch.stack([rows[by_coordinate.index(rank)] for rank in sorted(by_coordinate)])
        rules = _Algebra.of(op, parts, 7)
        if rules.factor is not None:
            rows = [row * rules.factor for row in rows]
        placed = [nodes[rank] for rank in sorted(by_coordinate)]
        expected = torch.empty_like(rows[0])
        for start, stop, chunk in pieces:
            ring = nccl_order.ring_tree(nccl_order.ring_order(placed), chunk)
            tree = ring if algorithm == "ring" else nccl_order.tree_tree(placed)
            expected[start:stop] = rules.evaluate(tree, rules.scale(parts[:, start:stop].clone()))
        summands = [row.float().numpy() for row in rows]
        found = add_rows(siblings, algorithm, group, summands, pieces, "bfloat16")
        assert torch.equal(torch.from_numpy(found).view(torch.int32), bits(expected.float()))


def test_each_step_counts_orders_and_sums() -> None:
    found = simulate(ISSUE, HOSTS, DDP_FIRST, algorithm="tree", numel=8)
    assert found.per_step == (
        SimulatedStep(axes=("ddp",), group_size=8, groups=5, orders=5, sums=5),
        SimulatedStep(axes=("fsdp",), group_size=5, groups=8, orders=4, sums=4),
    )
    # Only ranks with the same inputs must agree.
    for placement in ("R", "S(0)", "P"):
        found = simulate(ISSUE, HOSTS, [["ddp"]], algorithm="tree", numel=64, src=["P", placement])
        assert [step.sums for step in found.per_step] == [5]
        assert (found.replicas > 1) == (placement == "R")
    wide = Layout.of(ddp=8, fsdp=5, tp=16)
    topology = Topology.uniform(640, node_size=16)
    (step,) = simulate(wide, topology, [["ddp"]], algorithm="tree", numel=8).per_step
    assert (step.groups, step.orders, step.sums) == (80, 1, 1)


def test_missing_reduction_is_one_replica() -> None:
    for layout, steps in (
        (Layout.of(a=1), [["a"]]),
        (Layout.of(a=1, b=4), [["a"]]),
        (Layout.of(a=3), []),
    ):
        found = simulate(layout, Topology.uniform(4, node_size=3), steps, algorithm="ring")
        assert (found.replicas, found.differing, found.ulps, found.per_step) == (1, 0, 0, ())


def test_seed_changes_inputs_only() -> None:
    def of(seed: int) -> object:
        return simulate(ISSUE, HOSTS, FSDP_FIRST, algorithm="tree", numel=2000, seed=seed)

    assert of(0) == of(0)
    shares = {
        simulate(ISSUE, HOSTS, FSDP_FIRST, algorithm="tree", seed=s).differing for s in range(3)
    }
    assert len(shares) == 3
    rows = [draw_row(seed, number, 64, "float32") for seed in (0, 1) for number in range(20)]
    assert count_distinct(rows, "float32") == 40


def test_torch_placements_are_accepted_while_tracing() -> None:
    plain = simulate(ISSUE, HOSTS, [["ddp"]], algorithm="tree", numel=64)
    with FakeTensorMode():
        traced = simulate(
            ISSUE, HOSTS, [[0]], algorithm="tree", numel=64, src=[Partial(), Replicate()]
        )
    assert traced == plain


def test_ulps_are_counted_across_zero() -> None:
    tiny = 2.0**-149
    for one, other, distance in ((0.0, -0.0, 0), (tiny, -tiny, 2), (-1.0, -1.0 - 2**-23, 1)):
        rows = [np.array([2.0, value], np.float32) for value in (one, other)]
        assert count_ulps(*rows, "float32") == count_ulps(*reversed(rows), "float32") == distance
        assert measure_share(*rows, "float32") == 0.5
    below = np.array([1.0, 1.0 + 2**-7], np.float32)
    assert count_ulps(below[:1], below[1:], "bfloat16") == 1


def test_differences_are_counted_by_bits() -> None:
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert count_distinct([zero, -zero, one, one.copy(), zero], "float32") == 3


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=9))
def test_rounding_matches_torch(name: str, values: list[float]) -> None:
    dtype: torch.dtype = getattr(torch, name)
    wide = np.array(values) % 60000
    wide[::2] *= 2.0**-130 if name != "float16" else 2.0**-30
    expected = torch.from_numpy(wide.astype(np.float32)).to(dtype)
    if name == "float64":
        expected = torch.from_numpy(wide)
    found = torch.from_numpy(_round(wide.astype(np.float32) if name != "float64" else wide, name))
    assert torch.equal(bits(found.to(dtype)), bits(expected))
    assert torch.equal(found.to(dtype).double(), found.double())


@pytest.mark.parametrize(("numel", "size"), [(4096, 5), (5, 5), (3, 7), (1, 1), (64, 1000)])
def test_pieces_cover_the_message_and_its_chunks(numel: int, size: int) -> None:
    pieces = spread_elements(numel, size)
    assert [start for start, _, _ in pieces] == [0, *(stop for _, stop, _ in pieces[:-1])]
    assert pieces[-1][1] == numel
    chunks = [chunk for _, _, chunk in pieces]
    assert len(set(chunks)) == min(numel, size)
    assert set(chunks) <= set(range(size))


@given(st.randoms(use_true_random=True))
def test_share_matches_a_simulation(random: Random) -> None:
    sizes = random.choices((1, 2, 3, 4, 5, 6), k=3)
    world = math.prod(sizes)
    nodes = sorted(random.choices(range(random.randint(1, 9)), k=world))
    layout = Layout(tuple(sizes), ranks=tuple(random.sample(range(world), k=world)))
    topology = Topology.of(nodes)
    axes = sorted(random.sample(range(3), k=random.choice((1, 2))))
    along = [i for i in range(3) if i not in axes]
    # Every chunk of the ring is as large as any other, and aligned.
    numel = 8 * math.prod(sizes[i] for i in axes)
    shares = predict_divergence(layout, axes, along, topology, numel=numel)
    for algorithm in ALGORITHMS:
        found = simulate(layout, topology, [axes], algorithm=algorithm, numel=numel)
        assert shares[algorithm] == found.differing


def test_share_is_taken_over_sets_of_siblings() -> None:
    # Along tp all groups of a set span nodes in the same way; along ddp they differ.
    layout = Layout.of(ddp=4, fsdp=6, tp=2)
    topology = Topology.uniform(48, node_size=16)
    assert predict_divergence(layout, ["fsdp"], ["tp"], topology) == {"ring": 0.0, "tree": 0.0}
    assert min(predict_divergence(layout, ["fsdp"], ["ddp"], topology).values()) > 0.2
    assert predict_divergence(layout, ["fsdp"], [], topology) == {"ring": 0.0, "tree": 0.0}
    assert predict_divergence(layout, ["fsdp"], ["ddp"], Topology.unknown(48)) == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "axes", "along", "least"),
    [
        (Layout.of(ddp=2048, fsdp=64, tp=8), ["fsdp"], ["ddp", "tp"], 0.7),
        (Layout.of(ddp=256, fsdp=4096), ["fsdp"], ["ddp"], 0.8),
        (Layout.of(ddp=5, fsdp=16384), ["fsdp"], ["ddp"], 0.8),
    ],
)
def test_share_of_a_large_mesh_is_computed_quickly(
    layout: Layout, axes: list[str], along: list[str], least: float
) -> None:
    topology = Topology.uniform(layout.world_size, node_size=72)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    shares = predict_divergence(layout, axes, along, topology)
    # On an idle machine a second; tests share theirs.
    assert time.process_time() - started < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    assert min(shares.values()) > least


def test_share_of_too_large_groups_is_refused() -> None:
    layout = Layout.of(ddp=2, fsdp=20000)
    assert predict_divergence(layout, ["fsdp"], ["ddp"], Topology.uniform(40000, node_size=7)) == {}


@pytest.mark.full
def test_large_mesh_is_simulated() -> None:
    layout = Layout.of(ddp=256, fsdp=64, tp=8)
    topology = Topology.uniform(layout.world_size, node_size=72)
    found = simulate(layout, topology, DDP_FIRST, algorithm="ring", numel=64)
    assert [step.sums for step in found.per_step] == [64, 9]
    assert (found.replicas, found.differing > 0.5) == (9, True)


class TestErrors(TestCase):
    def message(self, error: type[Exception], *arguments: object, **options: object) -> str:
        said = refusal(error, simulate, *arguments, **{"algorithm": "ring", **options})
        assert "\n" not in said
        return said

    def test_invalid_arguments_are_refused(self) -> None:
        asked = (ISSUE, HOSTS, FSDP_FIRST)
        found = [
            self.message(PolicyError, *asked, algorithm="nvls"),
            self.message(PolicyError, *asked, dtype=torch.int32),
            self.message(PolicyError, *asked, numel=0),
            self.message(PolicyError, *asked, seed=-1),
            self.message(TopologyError, ISSUE, Topology.unknown(40), FSDP_FIRST),
            self.message(TopologyError, ISSUE, Topology.uniform(39, node_size=8), FSDP_FIRST),
            self.message(AxisNameError, ISSUE, HOSTS, [["fdsp"]]),
            self.message(PlacementError, ISSUE, HOSTS, [["fsdp"], ["fsdp"]]),
            self.message(PlacementError, ISSUE, HOSTS, [["fsdp"], []]),
            self.message(PlacementError, ISSUE, HOSTS, [["fsdp"]], src=["P", "R"]),
            self.message(PlacementError, ISSUE, HOSTS, [["fsdp"]], src=["R", "S(0)"]),
            self.message(PlacementError, ISSUE, HOSTS, [["fsdp"]], src=["R", "P(max)"]),
        ]
        self.assertExpectedInline(
            "\n".join(found),
            """\
MP402: unknown algorithm 'nvls'; use ring or tree
MP402: dtype torch.int32 cannot be simulated; use one of float32, bfloat16, float16, float64
MP402: numel must be at least 1 and seed at least 0, got numel=0 and seed=0; use, for example, numel=4096, seed=0
MP402: numel must be at least 1 and seed at least 0, got numel=4096 and seed=-1; use, for example, numel=4096, seed=0
MP211: a simulation needs the node of every rank, and none is known; use, for example, Topology.uniform(40, node_size=8)
MP211: the topology describes 39 ranks, the mesh (ddp=8, fsdp=5) has rank 39; pass a topology of 40 or more ranks
MP112: no axis 'fdsp' in the mesh, it has ddp, fsdp (did you mean 'fsdp'?)
MP401: step ['fsdp'] names axis fsdp (P(sum) -> R) a second time, where nothing is pending; name each axis to reduce once: fsdp
MP401: step [] is not one reduction, it names nothing; use steps of axes that reduce together, and a gathered axis by itself
MP401: step ['fsdp'] names axis fsdp (R -> R), where nothing is pending; name each axis to reduce once: none
MP401: step ['fsdp'] names axis fsdp (S(0) -> S(0)), where nothing is pending; name each axis to reduce once: none
MP401: P(max) cannot be simulated, only sums; use P or P(avg)""",
        )

    def test_too_large_simulations_are_refused(self) -> None:
        wide = Layout.of(ddp=2048, fsdp=64)
        found = [
            self.message(PolicyError, ISSUE, HOSTS, FSDP_FIRST, numel=1 << 26),
            self.message(
                PolicyError, Layout.of(a=3), HOSTS, [["a"]], numel=1 << 25, dtype=torch.float64
            ),
            self.message(PolicyError, wide, Topology.uniform(1 << 17, node_size=72), DDP_FIRST),
            self.message(
                PolicyError,
                Layout.of(a=1024, b=1024),
                Topology.uniform(1 << 20, node_size=8),
                [["a"], ["b"]],
                numel=1,
            ),
        ]
        self.assertExpectedInline(
            "\n".join(found),
            """\
MP402: 40 inputs of 67108864 elements of float32 exceed the limit (134217728 elements, 1024 MiB at once); use numel=3355443 or less
MP402: 3 inputs of 33554432 elements of float64 exceed the limit (134217728 elements, 1024 MiB at once); use numel=8947848 or less
MP402: 131072 inputs of 4096 elements of float32 exceed the limit (134217728 elements, 1024 MiB at once); use numel=1024 or less
MP402: (a=1024, b=1024) needs 1048576 additions, the limit is 262144; simulate a smaller mesh on nodes of the same size""",
        )
