"""Plans, executed over numpy arrays of all ranks, against the contract: thousands of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import ShardOrderError
from meshplan.layout import Layout
from meshplan.planner import Plan, Step, plan
from meshplan.topology import Topology
from tests.all_ranks import AllRanks, Array, bits, coordinates, shard, split_part
from tests.strategies import FAST_NODES, Redistribution, redistributions

# Values whose sums depend on the order, and values that conversions easily lose.
ODD = (1e20, -1e20, 1.0, -1.0, 0.1, 3e-39, -0.0, 0.0, 5e-324, 65504.0, 1e-8, float("inf"))


class Bench:
    """The tensors of all ranks of a case, before and after."""

    def __init__(self, case: Redistribution) -> None:
        self.case = case
        self.sizes = case.layout.sizes
        self.pending = [i for i, text in enumerate(case.src) if text[0] == "P"]
        ranges = [range(self.sizes[i]) for i in self.pending]
        self.leaves = {index: self._leaf(index) for index in itertools.product(*ranges)}
        self._totals: dict[tuple[range, ...], Array] = {}

    def start(self) -> dict[tuple[int, ...], Array]:
        """By coordinate."""
        cuts = dims_of(self.case.src)
        return {
            where: shard(
                self.leaves[tuple(where[i] for i in self.pending)], cuts, self.sizes, where
            )
            for where in coordinates(self.sizes)
        }

    def expected(self, where: tuple[int, ...]) -> Array:
        """The contract over all leaves, and then a slice."""
        case = self.case
        over = tuple(
            range(self.sizes[i]) if i in case.partial else range(where[i], where[i] + 1)
            for i in self.pending
        )
        if over not in self._totals:
            self._totals[over] = self._total(over)
        total = self._totals[over]
        for i, (src, dst) in enumerate(zip(case.src, case.dst, strict=True)):
            if src == "R" and dst[0] == "P" and where[i]:
                total = np.zeros_like(total)
        return shard(total, dims_of(case.dst), self.sizes, where)

    def wrong(self, found: Plan, steps: tuple[Step, ...]) -> list[tuple[int, ...]]:
        """The coordinates at which the steps end with other bits than they should."""
        bad = []
        for where, array in AllRanks(found, self.start()).run(steps).items():
            wanted = self.expected(where)
            if array.shape != wanted.shape or not np.array_equal(bits(array), bits(wanted)):
                bad.append(where)
        return bad

    def _leaf(self, index: tuple[int, ...]) -> Array:
        case = self.case
        chance = np.random.default_rng((case.seed, *index))
        name = str(case.dtype).removeprefix("torch.")
        if not case.dtype.is_floating_point:
            return chance.integers(-(2**31), 2**31, case.shape).astype(name)
        values = chance.choice(ODD, case.shape) * chance.choice([1.0, 3.0, -7.0], case.shape)
        values = np.where(chance.random(case.shape) < 0.02, np.nan, values)
        with np.errstate(all="ignore"):
            made: Array = values.astype(name)
        return made

    def _total(self, over: tuple[range, ...]) -> Array:
        case = self.case
        leaves = [torch.from_numpy(self.leaves[i].copy()) for i in itertools.product(*over)]
        op = case.src[self.pending[0]][2:-1] or "sum"
        divisor = math.prod(self.sizes[i] for i in case.partial if case.src[i] == "P(avg)")
        if op in ("sum", "avg"):
            op = "avg" if divisor > 1 else "sum"
        total: Array = reduce_leaves(
            leaves,
            op,  # type: ignore[arg-type]
            [self.sizes[i] for i in case.partial],
            case.options["contract"],
            divisor=divisor if op == "avg" else None,
        ).numpy()
        return total


def cut_axes(case: Redistribution) -> list[int]:
    sizes = case.layout.sizes
    return [i for i, text in enumerate(case.src) if text[0] == "S" and sizes[i] > 1]


def dims_of(texts: tuple[str, ...]) -> list[int | None]:
    return [int(text[2]) if text[0] == "S" else None for text in texts]


def kinds_of(case: Redistribution) -> set[str]:
    """What the plan of a case has in it; all its bits are those of the contract."""
    try:
        found = plan(case.problem)
    except ShardOrderError:
        # Some of the given shards follow descending ranks.
        assert any(not case.layout.ascends(i) for i in cut_axes(case))
        return {"refused"}
    wide = [i for i in case.partial if case.layout.sizes[i] > 1]
    assert len(found.reductions) == bool(wide)
    if not wide:
        return set()
    moved = {step.axes[0] for step in found.steps if step.kind == "torch"}
    assert all(case.layout.ascends(i) for i in moved.intersection(cut_axes(case)))
    assert Bench(case).wrong(found, found.steps) == []
    (step,) = found.reductions
    first = {"slice first"} if found.steps[0].kind == "slice" else set()
    return first | {"hierarchical" if step.inner > 1 else step.kind}


@pytest.mark.soak
@settings(suppress_health_check=list(HealthCheck))
@given(redistributions())
def test_every_plan_gives_the_bits_of_the_contract(case: Redistribution) -> None:
    kinds_of(case)


EACH_KIND = {
    "all_reduce": ("P R", "R R", range(6), None),
    "reduce_scatter": ("P P", "S(0) R", range(6), None),
    "hierarchical": ("P P", "R R", range(6), Topology.uniform(6, node_size=3, links=FAST_NODES)),
    "slice first": ("P R", "R S(0)", range(6), None),
    "refused": ("P S(0)", "R S(1)", (2, 1, 0, 5, 4, 3), None),
}


@pytest.mark.parametrize("kind", EACH_KIND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_each_kind_of_plan_gives_the_bits_of_the_contract(kind: str, dtype: torch.dtype) -> None:
    src, dst, ranks, topology = EACH_KIND[kind]
    layout = Layout(sizes=(2, 3), names=None, ranks=tuple(ranks))
    # Nodes sum up only in an order with subtotals of nodes.
    options = {"contract": Contract("tree", "wide", "node"), "topology": topology}
    case = Redistribution(
        layout, tuple(src.split()), tuple(dst.split()), (12, 6), dtype, options, seed=7
    )
    assert kind in kinds_of(case)


@pytest.mark.soak
@settings(suppress_health_check=list(HealthCheck))
@given(redistributions(max_world=16))
def test_rejected_candidates_give_the_same_bits(case: Redistribution) -> None:
    try:
        found = plan(case.problem)
    except ShardOrderError:
        assume(False)
    bench = Bench(case)
    for candidate in found.candidates:
        assert bench.wrong(found, candidate.steps) == []


def test_shards_match_torch_chunk() -> None:
    for length in range(14):
        for parts in range(1, 7):
            chunks = torch.arange(length).chunk(parts)
            for index in range(parts):
                wanted = chunks[index].tolist() if index < len(chunks) else []
                assert split_part(np.arange(length), 0, parts, index).tolist() == wanted


def test_broken_plans_are_noticed() -> None:
    case = Redistribution(
        Layout.of(a=2, b=3, c=2),
        ("P", "P", "P"),
        ("S(0)", "R", "S(0)"),
        (7, 5),
        torch.float32,
        {"topology": Topology.uniform(12, node_size=2, domain_size=2)},
        7,
    )
    case.options["contract"] = Contract()
    found, bench = plan(case.problem), Bench(case)
    (step,) = found.steps
    assert step.inner == 2
    assert bench.wrong(found, found.steps) == []
    for broken in (
        replace(step, sizes=(3, 2, 2)),
        replace(step, scatter=step.scatter[:1]),
        replace(step, op="avg", divisor=12),
        replace(step, inner=4, sizes=(3, 4)),
    ):
        assert bench.wrong(found, (broken,)), broken
    flat = replace(step, inner=1)
    assert bench.wrong(found, (flat,)) == []
    assert bench.wrong(found, (replace(flat, contract=Contract(order="rank")),))
    with pytest.raises(AssertionError, match="outside of a cut"):
        AllRanks(found, bench.start()).run((replace(step, scatter=step.scatter[::-1]),))
