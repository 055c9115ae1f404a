"""Hazards: the published table, safe and unsafe cases, and the rule by brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from random import Random

import numpy as np
import pytest
import torch
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Partial, Replicate, _MaskPartial

from meshplan.layout import Layout
from meshplan.planner import Hazard, Problem, hazards, nccl_order
from meshplan.planner import _hazards as siblings_module
from meshplan.planner._hazards import ALGORITHMS, Siblings
from meshplan.planner._problem import Spec
from meshplan.topology import Topology

ISSUE = Layout.of(ddp=8, fsdp=5, tp=1)
HOSTS = Topology.uniform(40, node_size=8)


def problem(layout: Layout, src: str, dst: str, **options: object) -> Problem:
    return Problem.of(layout, src.split(), dst.split(), **options)  # type: ignore[arg-type]


def found(
    layout: Layout,
    src: str,
    dst: str,
    topology: Topology,
    steps: object = None,
    channels: int | None = None,
    **options: object,
) -> tuple[Hazard, ...]:
    asked = problem(layout, src, dst, **options)
    return hazards(asked, topology, steps=steps, channels=channels)  # type: ignore[arg-type]


FSDP_FIRST, DDP_FIRST = ((1,), (0,)), ((0,), (1,))


def test_other_channels_and_the_second_tree_are_compared() -> None:
    (hazard,) = found(ISSUE, "P P R", "R R R", HOSTS, DDP_FIRST)
    assert dict(hazard.classes) == {"ring": 5, "tree": 5}
    # One rank on each node but one: the first ring is in rank order wherever that node is.
    (one,) = found(ISSUE, "P P R", "R R R", HOSTS, FSDP_FIRST, channels=1)
    (every,) = found(ISSUE, "P P R", "R R R", HOSTS, FSDP_FIRST)
    assert dict(one.classes) == {"ring": 1, "tree": 5}
    assert dict(every.classes) == {"ring": 5, "tree": 5}
    # (2, 2) and (2, 1, 1) have one first tree, and two second ones.
    pair = [0, 0, 1, 1], [0, 0, 1, 2]
    assert nccl_order.same_bits(*map(nccl_order.tree_tree, pair))
    assert not nccl_order.same_bits(*(nccl_order.tree_tree(p, second=True) for p in pair))
    mesh, topology = Layout.of(a=2, b=4), Topology.of([0, 0, 1, 1, 2, 2, 3, 4])
    for channels, orders in ((1, {"ring": 1, "tree": 1}), (None, {"ring": 2, "tree": 2})):
        (hazard,) = found(mesh, "R P", "R R", topology, channels=channels)
        assert dict(hazard.classes) == orders


class TestText(TestCase):
    def test_jagged_mesh_is_described(self) -> None:
        (hazard,) = found(ISSUE, "P P R", "R R R", HOSTS, DDP_FIRST)
        self.assertExpectedInline(
            str(hazard),
            """\
sum over (fsdp), 8 groups of 5: 8 siblings along (ddp) hold the same inputs and must agree
  may differ under ring (5 orders), tree (5 orders); order undocumented under nvls, collnet, rccl
  ranks per node: (5); (3, 2); (1, 4); (4, 1); (2, 3)
  tree, ranks 0, 1, 2, 3, 4: (0+(1+(2+(3+4))))
  tree, ranks 5, 6, 7, 8, 9: ((5+(6+7))+(8+9))
  fixes: reduce over (ddp, fsdp) at once: no siblings remain; use the contract (policy 'deterministic'): the order never varies""",
        )
        (hazard,) = found(ISSUE, "P P R", "R R R", HOSTS, FSDP_FIRST)
        assert hazard.signatures[:2] == ((2, 2, 1, 2, 1), (2, 1, 2, 2, 1))
        self.assertExpectedInline(
            "\n".join(str(hazard).splitlines()[3:5]),
            """\
  tree, ranks 0, 5, 10, 15, 20, 25, ...: ((0+5)+(35+((20+(10+15))+(25+30))))
  tree, ranks 1, 6, 11, 16, 21, 26, ...: ((1+6)+(36+((16+(21+11))+(26+31))))""",
        )

    def test_fix_by_another_order_is_described(self) -> None:
        layout = Layout.of(ddp=4, fsdp=12)
        topology = Topology.uniform(48, node_size=8)
        (hazard,) = found(layout, "P P", "R R", topology, DDP_FIRST)
        self.assertExpectedInline(
            str(hazard),
            """\
sum over (fsdp), 4 groups of 12: 4 siblings along (ddp) hold the same inputs and must agree
  may differ under ring (2 orders), tree (2 orders); order undocumented under nvls, collnet, rccl
  ranks per node: (8, 4); (4, 8)
  tree, ranks 0, 1, 2, 3, 4, 5, ...: ((0+(1+(2+(3+(4+(5+(6+7)))))))+(8+(9+(10+11))))
  tree, ranks 12, 13, 14, 15, 16, 17, ...: ((12+(13+(14+15)))+(16+(17+(18+(19+(20+(21+(22+23))))))))
  fixes: reduce in the order (fsdp), (ddp): identical orders of additions under ring and tree; reduce over (ddp, fsdp) at once: no siblings remain; use the contract (policy 'deterministic'): the order never varies""",
        )
        (hazard,) = found(layout, "P P", "R R", topology, FSDP_FIRST)
        self.assertExpectedInline(
            str(hazard),
            """\
sum over (ddp), 12 groups of 4: 12 siblings along (fsdp) hold the same inputs and must agree
  identical under ring and tree in the model; order undocumented under nvls, collnet, rccl
  ranks per node: (1, 1, 1, 1)""",
        )

    def test_hazard_of_a_later_channel_is_described(self) -> None:
        # (4,) and (1, 3): in the first channel, the chain of one node is the tree of both.
        topology = Topology.of([0, 0, 0, 0, 1, 2, 2, 2])
        mesh = Layout.of(a=2, b=4)
        (hazard,) = found(mesh, "R P", "R R", topology)
        assert hazard.channel == 1
        # In the first channel under ring only.
        (first,) = found(mesh, "R P", "R R", topology, channels=1)
        self.assertExpectedInline(
            "\n".join(line for line in str(first).splitlines() if line not in str(hazard)),
            """\
  may differ under ring (2 orders); order undocumented under nvls, collnet, rccl
  ring chunk 0, ranks 0, 1, 2, 3: (0+(3+(2+1)))
  ring chunk 0, ranks 4, 5, 6, 7: (4+(6+(7+5)))""",
        )
        self.assertExpectedInline(
            str(hazard),
            """\
sum over (b), 2 groups of 4: 2 siblings along (a) hold the same inputs and must agree
  may differ under ring (2 orders), tree (2 orders); order undocumented under nvls, collnet, rccl
  ranks per node: (4); (1, 3)
  tree channel 1, ranks 0, 1, 2, 3: (0+(1+(2+3)))
  tree channel 1, ranks 4, 5, 6, 7: (4+(6+(7+5)))
  fixes: use the contract (policy 'deterministic'): the order never varies""",
        )

    def test_unknown_topology_is_described(self) -> None:
        (hazard,) = found(ISSUE, "P P R", "R R R", Topology.unknown(40), FSDP_FIRST)
        self.assertExpectedInline(
            str(hazard),
            """\
sum over (ddp), 5 groups of 8: 5 siblings along (fsdp) hold the same inputs and must agree
  may differ: node placement unknown, so the order is unknown under ring, tree, nvls, collnet, rccl
  fixes: reduce over (ddp, fsdp) at once: no siblings remain; use the contract (policy 'deterministic'): the order never varies""",
        )


def test_layout_may_cover_a_part_of_the_topology() -> None:
    part = Layout.of(range(5, 11), a=2, b=3)
    (hazard,) = found(part, "R P", "R R", Topology.uniform(40, node_size=7))
    assert hazard.signatures == ((2, 1), (3,))
    assert [e.expression for e in hazard.examples] == ["(8+(9+10))", "((5+6)+7)"]


def test_exact_arithmetic_is_safe() -> None:
    for topology in (HOSTS, Topology.unknown(40)):
        for op in ("max", "min"):
            assert found(ISSUE, f"P({op}) R R", "R R R", topology) == ()
        for dtype in (torch.int64, torch.uint8, torch.bool):
            assert found(ISSUE, "P R R", "R R R", topology, dtype=dtype) == ()
    for op in ("sum", "avg", "product"):
        for dtype in (None, torch.bfloat16, torch.float64):
            (hazard,) = found(ISSUE, f"P({op}) R R", "R R R", HOSTS, dtype=dtype)
            assert (hazard.op, hazard.verdict) == (op, "may differ")
    (outside,) = found(ISSUE, "P R R", "R R R", HOSTS, dtype=torch.complex64)
    assert (outside.verdict, outside.fixes) == ("may differ", ())
    (mixed,) = found(Layout.of(a=2, b=20), "R P(avg)", "R R", HOSTS)
    assert mixed.op == "avg"


def test_gather_before_the_reduction_creates_siblings() -> None:
    (hazard,) = found(ISSUE, "P S(0) R", "R R R", HOSTS, FSDP_FIRST)
    assert (hazard.axes, hazard.along, hazard.verdict) == ((0,), ("fsdp",), "may differ")
    assert hazard.fixes[0].startswith("reduce in the order (ddp), then gather (fsdp)")
    assert found(ISSUE, "P S(0) R", "R R R", HOSTS, DDP_FIRST) == ()


def test_reduce_scatter_may_use_pat() -> None:
    (hazard,) = found(ISSUE, "R P R", "R S(0) R", HOSTS)
    assert hazard.unknown == ("nvls", "collnet", "rccl", "pat")
    assert hazard.verdict == "may differ"


def test_norms_and_masks_are_reported_by_arithmetic() -> None:
    layout = Layout.of(a=8, b=5)

    def ops(*src: object) -> list[tuple[str, tuple[int, ...], str, int]]:
        reported = hazards(Problem.of(layout, list(src), [Replicate(), Replicate()]), HOSTS)  # type: ignore[arg-type]
        return [(h.op[:6], h.axes, h.verdict, len(h.fixes)) for h in reported]

    assert ops(_NormPartial(2), Replicate()) == [("2-norm", (0,), "may differ", 1)]
    assert ops(_NormPartial(2), _NormPartial(2)) == []
    assert ops(_NormPartial(float("inf")), Replicate()) == []
    assert ops(Partial("bxor"), Partial("bxor")) == []
    assert ops(_MaskPartial("sum"), Replicate()) == [("MaskP(", (0,), "may differ", 0)]
    # Unlike arithmetic is not merged: one step for each axis.
    assert ops(_NormPartial(2), "P") == [("sum", (1,), "may differ", 0)]


def test_unknown_orders_are_always_reported() -> None:
    even = Layout.of(ddp=5, fsdp=8)
    (hazard,) = found(even, "R P", "R R", HOSTS)
    assert (hazard.verdict, hazard.unknown) == ("none", ("nvls", "collnet", "rccl"))
    assert (hazard.examples, hazard.fixes) == ((), ())
    for mesh in (ISSUE, Layout.of(ddp=5, fsdp=8, tp=1)):
        for src, steps in (("P P R", FSDP_FIRST), ("P P R", DDP_FIRST), ("R P R", None)):
            (blind,) = found(mesh, src, "R R R", Topology.unknown(40), steps)
            assert blind.verdict == "unknown topology"
            assert blind.unknown == ("ring", "tree", "nvls", "collnet", "rccl")
            assert (blind.may_differ, blind.signatures, blind.classes) == ((), (), ())


def test_hazards_are_values_and_work_while_torch_traces() -> None:
    asked = problem(Layout.of(ddp=8, fsdp=5), "P P", "R R")
    with FakeTensorMode():
        traced = hazards(asked, Topology.uniform(40, node_size=8), steps=DDP_FIRST)
    assert traced == hazards(asked, HOSTS, steps=[("ddp",), ("fsdp",)])
    assert len({*traced, *hazards(asked, HOSTS, steps=DDP_FIRST)}) == 1


def test_million_ranks_are_checked() -> None:
    layout = Layout.of(ddp=2048, fsdp=64, tp=8)
    topology = Topology.uniform(layout.world_size, node_size=72)
    (ddp, fsdp) = found(layout, "P P R", "R R R", topology, DDP_FIRST)
    assert (ddp.verdict, ddp.signatures) == ("none", ((1,) * 2048,))
    assert dict(fsdp.classes) == {"ring": 9, "tree": 9}
    assert (fsdp.groups, fsdp.siblings) == (16384, 16384)


def test_hash_collisions_do_not_merge_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = found(ISSUE, "P P R", "R R R", HOSTS, DDP_FIRST)
    monkeypatch.setattr(siblings_module, "_hash_rows", lambda rows: np.zeros(len(rows), np.int64))
    assert found(ISSUE, "P P R", "R R R", HOSTS, DDP_FIRST) == expected


@given(st.data())
def test_order_equality_matches_the_associations(data: st.DataObject) -> None:
    """Of every channel. Ring: one comparison of rings stands for one of every chunk."""
    size = data.draw(st.integers(1, 7))
    ranks = data.draw(st.permutations(range(3 * size)))
    nodes = data.draw(st.lists(st.integers(0, 3), min_size=3 * size, max_size=3 * size))
    layout = Layout.of(ranks, a=3, b=size)
    sort_ranks = data.draw(st.booleans())
    siblings = Siblings(layout, (1,), Topology.of(nodes), sort_ranks=sort_ranks)

    groups = []
    for group in layout.siblings(1).tolist():
        members = sorted(group) if sort_ranks else group
        groups.append(([nodes[rank] for rank in members], [group.index(r) for r in members]))
    counts = [[placed.count(node) for node in dict.fromkeys(placed)] for placed, _ in groups]
    heads = range(max(map(nccl_order.count_heads, counts)))

    def additions(algorithm: str, placed: list[int], place: list[int]) -> list[nccl_order.Tree]:
        if algorithm == "ring":
            rings = [nccl_order.ring_order(placed, head) for head in heads]
            found = [nccl_order.ring_tree(ring, chunk) for ring in rings for chunk in range(size)]
        else:
            found = [
                nccl_order.tree_tree(placed, head, second=second)
                for second in (False, True)
                for head in heads
            ]
        return [nccl_order.relabel(tree, place.__getitem__) for tree in found]

    for algorithm in ALGORITHMS:
        numbers = siblings.associations(algorithm, np.arange(3)).tolist()
        trees = [additions(algorithm, *group) for group in groups]
        for a, b in itertools.combinations(range(3), 2):
            pairs = zip(trees[a], trees[b], strict=True)
            alike = all(nccl_order.same_bits(left, right) for left, right in pairs)
            assert (numbers[a] == numbers[b]) == alike


Cell = tuple[int, ...]


class Simulation:
    """Run steps on symbols in one channel and look for a replica that has two values.

    A value is a leaf, or the unordered pair of what was added. Every rank holds a value for each
    *piece* of the tensor; a piece has a coordinate along each axis that is ever sharded.
    """

    def __init__(
        self, asked: Problem, steps: list[Cell], nodes: list[int], algorithm: str, sort: bool
    ) -> None:
        self.src, self.dst = asked.src, asked.dst
        self.nodes, self.algorithm, self.sort = nodes, algorithm, sort
        sizes = asked.layout.sizes
        self.cells = list(itertools.product(*map(range, sizes)))
        self.rank_at = dict(zip(self.cells, asked.layout.ranks, strict=True))
        pairs = list(enumerate(zip(self.src, self.dst, strict=True)))
        self.cut = [i for i, (s, d) in pairs if "shard" in (s.kind, d.kind)]
        self.pieces = list(itertools.product(*(range(sizes[i]) for i in self.cut)))
        gathers = [(i,) for i, (s, d) in pairs if (s.kind, d.kind) == ("shard", "replicate")]
        self.steps = [*steps, *(axes for axes in gathers if axes not in steps)]
        self.reductions = [axes for axes in steps if axes not in gathers]

    def replicas_differ(self) -> bool:
        """Whatever chunk of the ring an element is in, in each of the reductions."""
        chunks = [range(1) for _ in self.reductions]
        if self.algorithm == "ring":
            chunks = [range(len(self.groups(axes)[0])) for axes in self.reductions]
        return any(
            self.run(dict(zip(self.reductions, choice, strict=True)))
            for choice in itertools.product(*chunks)
        )

    def run(self, chunks: dict[Cell, int]) -> bool:
        held: dict[Cell, dict[Cell, Hashable]] = {}
        for cell in self.cells:
            leaf = tuple(c for c, s in zip(cell, self.src, strict=True) if s.kind == "partial")
            held[cell] = {p: ("leaf", leaf, p) for p in self.pieces if self.owns(cell, p, self.src)}
        for axes in self.steps:
            for members in self.groups(axes):
                if axes in chunks:
                    result = self.reduce([held[m] for m in members], members, chunks[axes])
                else:
                    result = {p: v for m in members for p, v in held[m].items()}
                for member in members:
                    held[member] = dict(result)
        final: dict[Hashable, set[Hashable]] = {}
        for cell in self.cells:
            kept = tuple(c for c, d in zip(cell, self.dst, strict=True) if d.kind == "partial")
            for piece, value in held[cell].items():
                if self.owns(cell, piece, self.dst):
                    final.setdefault((kept, piece), set()).add(value)
        return any(len(values) > 1 for values in final.values())

    def groups(self, axes: Cell) -> list[list[Cell]]:
        found: dict[Cell, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(tuple(c for i, c in enumerate(cell) if i not in axes), []).append(cell)
        if self.sort:
            return [sorted(members, key=self.rank_at.__getitem__) for members in found.values()]
        return list(found.values())

    def owns(self, cell: Cell, piece: Cell, specs: tuple[Spec, ...]) -> bool:
        pairs = zip(self.cut, piece, strict=True)
        return all(specs[i].kind != "shard" or cell[i] == p for i, p in pairs)

    def reduce(
        self, inputs: list[dict[Cell, Hashable]], members: list[Cell], chunk: int
    ) -> dict[Cell, Hashable]:
        placed = [self.nodes[self.rank_at[m]] for m in members]
        if self.algorithm == "tree":
            tree = nccl_order.tree_tree(placed)
        else:
            tree = nccl_order.ring_tree(nccl_order.ring_order(placed), chunk)

        def total(piece: Cell) -> Hashable:
            return nccl_order.fold(
                tree, lambda r: inputs[r][piece], lambda left, right: frozenset((left, right))
            )

        return {piece: total(piece) for piece in inputs[0]}


@pytest.mark.soak
@given(st.randoms(use_true_random=True))
def test_a_hazard_is_reported_exactly_if_replicas_differ(random: Random) -> None:
    # True random draws: those of the library prefer small and equal numbers, which are safe.
    sizes = random.choices((1, 2, 3, 4), weights=(1, 3, 4, 4), k=random.choice((2, 3)))
    moves = ["P R", "R R", "P S(0)", "S(0) S(0)", "S(0) R", "R S(0)", "P P"]
    chosen = random.choices(moves, weights=(6, 3, 1, 1, 2, 1, 1), k=len(sizes))
    src, dst = zip(*(move.split() for move in chosen), strict=True)
    world = math.prod(sizes)
    ranks = list(range(world))
    if random.random() < 0.3:
        random.shuffle(ranks)
    nodes = random.choices(range(random.randint(1, 4)), k=world)
    if random.random() < 0.5:
        nodes.sort()
    sort = random.random() < 0.5
    asked = Problem.of(Layout(sizes=tuple(sizes), ranks=tuple(ranks)), src, dst)

    pending = [i for i in range(len(sizes)) if src[i] == "P" != dst[i]]
    steps: list[tuple[int, ...]] = []
    for axis in random.sample(pending, k=len(pending)):
        if not steps or random.random() < 0.6:
            steps.append((axis,))
        else:
            steps[-1] = tuple(sorted((*steps[-1], axis)))
    gathered = [i for i in range(len(sizes)) if (src[i], dst[i]) == ("S(0)", "R")]
    for axis in gathered:
        if random.random() < 0.5:
            steps.insert(random.randint(0, len(steps)), (axis,))

    reported = hazards(asked, Topology.of(nodes), steps=steps, sort_ranks=sort, channels=1)
    for algorithm in ALGORITHMS:
        differ = Simulation(asked, steps, nodes, algorithm, sort).replicas_differ()
        assert differ == any(algorithm in h.may_differ for h in reported)
    blind = hazards(asked, Topology.unknown(world), steps=steps, sort_ranks=sort)
    assert [h.axes for h in blind] == [h.axes for h in reported]
    # Cures that name an order or a flattened reduction hold in the model.
    if any(h.verdict == "may differ" for h in reported):
        fixes = next(h.fixes for h in reported if h.verdict == "may differ")
        orders = itertools.permutations(s for s in steps if s[0] not in gathered)
        fixed = any(
            all(
                h.verdict == "none"
                for h in hazards(asked, Topology.of(nodes), steps=o, sort_ranks=sort, channels=1)
            )
            for o in orders
        )
        assert fixed == any(fix.startswith("reduce in the order") for fix in fixes)
        flat = hazards(asked, Topology.of(nodes), sort_ranks=sort, channels=1)
        wide = [s for s in steps if s[0] not in gathered and any(sizes[i] > 1 for i in s)]
        several = len(wide) > 1
        assert (several and all(h.verdict == "none" for h in flat)) == any(
            fix.startswith("reduce over") for fix in fixes
        )
