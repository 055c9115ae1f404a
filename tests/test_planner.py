from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import (
    Partial,
    Replicate,
    Shard,
    _MaskPartial,
    _StridedShard,
)

import meshplan.execute.paths  # noqa: F401 - a message lists its paths
from meshplan.contract import OPS, Contract
from meshplan.errors import (
    ContractTypeError,
    PlacementError,
    PolicyError,
    ShardOrderError,
)
from meshplan.layout import Layout
from meshplan.planner import Plan, Problem, plan
from meshplan.planner._problem import Spec
from meshplan.topology import Topology
from tests.refusals import refusal

ISSUE = Layout.of(ddp=8, fsdp=5, tp=1)
CUBE = Layout.of(a=2, b=3, c=2)


def planned(layout: Layout, src: str, dst: str, **options: object) -> Plan:
    return plan(Problem.of(layout, src.split(), dst.split(), **options))  # type: ignore[arg-type]


class TestText(TestCase):
    def test_two_reductions_of_the_8_by_5_mesh_become_one(self) -> None:
        self.assertExpectedInline(
            str(planned(ISSUE, "P P R", "R R R")),
            """all_reduce sum over (ddp, fsdp), groups of 40, exchange, contract v1/tree/wide/once: 2 axes in one reduction, in one order for all siblings""",
        )

    def test_fast_merges_two_axes(self) -> None:
        self.assertExpectedInline(
            str(planned(ISSUE, "P P P", "R R R", policy="fast")),
            """all_reduce sum over (ddp, fsdp), groups of 40, native, no contract: 2 axes in one reduction, in the backend's own order""",
        )

    def test_consistent_plans_hazards_only(self) -> None:
        lines = []
        for text in (
            "P P R -> R R R",
            "P R R -> R R R",
            "P S(0) R -> R S(0) R",
            "P S(0) R -> R R R",
            "P P R -> R S(0) R",
            "P(max) R R -> R R R",
        ):
            src, dst = text.split(" -> ")
            steps = planned(ISSUE, src, dst, policy="consistent").steps
            lines += [f"{text}: {step.line(ISSUE).split(', groups')[0]}" for step in steps]
        pair = Layout.of(ddp=2, fsdp=5)
        lines += [str(planned(pair, "P R", "R R", policy="consistent"))]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
P P R -> R R R: all_reduce sum over (ddp, fsdp)
P R R -> R R R: all_reduce sum over (ddp)
P S(0) R -> R S(0) R: torch P(sum) -> R over (ddp): siblings agree in any order of the backend
P S(0) R -> R R R: all_reduce sum over (ddp)
P S(0) R -> R R R: torch S(0) -> R over (fsdp): no reduction
P P R -> R S(0) R: reduce_scatter sum over (ddp, fsdp) to S(0) over fsdp, all_gather over (ddp)
P(max) R R -> R R R: torch P(max) -> R over (ddp): siblings agree in any order of the backend
torch P(sum) -> R over (ddp): siblings agree in any order of the backend""",
        )

    def test_fast_leaves_one_axis_to_torch(self) -> None:
        self.assertExpectedInline(
            str(planned(CUBE, "P R S(0)", "R R R", policy="fast")),
            """\
torch P(sum) -> R over (a): policy fast merges two or more P -> R axes only
torch S(0) -> R over (c): no reduction""",
        )

    def test_mixed_placements_are_planned(self) -> None:
        self.assertExpectedInline(
            str(planned(CUBE, "P(avg) S(1) P", "S(0) R R", contract=Contract(order="rank"))),
            """\
reduce_scatter avg/2 over (a, c) to S(0) over a, all_gather over (c), groups of 4, exchange, contract v1/rank/wide/once: 2 axes in one reduction, in one order for all siblings
torch S(1) -> R over (b): no reduction""",
        )

    def test_reduce_scatter_is_planned(self) -> None:
        self.assertExpectedInline(
            str(planned(CUBE, "P P P", "S(0) R S(0)")),
            """reduce_scatter sum over (a, b, c) to S(0) over a, S(0) over c, all_gather over (b), groups of 12, exchange, contract v1/tree/wide/once: 3 axes in one reduction, in one order for all siblings""",
        )
        # A kept shard is inside a new one: it is gathered in between.
        self.assertExpectedInline(
            str(planned(CUBE, "P S(0) P", "S(0) S(0) R")),
            """\
all_reduce sum over (a, c), groups of 4, exchange, contract v1/tree/wide/once: 2 axes in one reduction, in one order for all siblings
torch S(0) -> R over (b): no reduction
slice R -> S(0) over (a), local: after the reduction of P(sum)
slice R -> S(0) over (b), local: every rank has the whole value""",
        )
        # One process plays all ranks, or the order of the shards is the user's own.
        self.assertExpectedInline(
            str(planned(CUBE, "P P P", "S(0) R S(0)", scatter=False)),
            """\
all_reduce sum over (a, b, c), groups of 12, exchange, contract v1/tree/wide/once: 3 axes in one reduction, in one order for all siblings
slice R -> S(0) over (a), local: after the reduction of P(sum)
slice R -> S(0) over (c), local: after the reduction of P(sum)""",
        )

    def test_hierarchical_reduction_is_planned(self) -> None:
        layout, nodes = Layout.of(dp=4, fsdp=8), Topology.uniform(32, node_size=8)
        self.assertExpectedInline(
            str(planned(layout, "P P", "R R", topology=nodes)),
            """all_reduce sum over (dp, fsdp), groups of 32, exchange in blocks of 8, contract v1/tree/wide/once: 2 axes in one reduction, in one order for all siblings, hierarchical, 8 ranks per block, cheapest for 4194304 elements""",
        )
        self.assertExpectedInline(
            str(planned(layout, "P P", "S(0) R", topology=nodes)),
            """reduce_scatter sum over (dp, fsdp) to S(0) over dp, all_gather over (fsdp), groups of 32, exchange in blocks of 8, contract v1/tree/wide/once: 2 axes in one reduction, in one order for all siblings, hierarchical, 8 ranks per block, cheapest for 4194304 elements""",
        )
        # A left fold has no parts that could be done first; a maximum has.
        rank = Contract(order="rank")
        (step,) = planned(layout, "P P", "R R", topology=nodes, contract=rank).steps
        assert step.inner == 1
        (step,) = planned(layout, "P(max) P(max)", "R R", topology=nodes, contract=rank).steps
        assert step.inner == 8
        # The reference path gathers everything, and no policy but the contract's is planned so.
        (step,) = planned(layout, "P P", "R R", topology=nodes, path="reference").steps
        assert step.inner == 1
        (step,) = planned(layout, "P P", "R R", topology=nodes, policy="fast").steps
        assert step.inner == 1

    def test_equal_placements_have_no_step(self) -> None:
        self.assertExpectedInline(str(planned(CUBE, "R R R", "R R R")), """nothing to do""")
        self.assertExpectedInline(
            str(planned(ISSUE, "R R P", "R R R")),
            """torch P(sum) -> R over (tp): axis of size 1, no communication""",
        )

    def test_problem_is_printed(self) -> None:
        unnamed = Layout(sizes=(2, 2), ranks=(0, 3, 2, 1))
        self.assertExpectedInline(
            str(Problem.of(unnamed, ["P", "P(sum)"], ["R", "S(0)"])),
            """(P(sum), P(sum)) -> (R, S(0)) on (axis0=2, axis1=2; ranks 0, 3, 2, 1)""",
        )

    def test_plan_is_written_as_json(self) -> None:
        found = planned(Layout.of(a=2, b=2), "P P(avg)", "R R", dtype=torch.bfloat16)
        self.assertExpectedInline(
            json.dumps(found.to_json(), sort_keys=True),
            """{"cost": {"collectives": 2, "creates": [], "domain": 0, "nanoseconds": 281058, "network": 12582912, "node": 0, "peak": 25165824}, "dst": ["R", "R"], "dtype": "bfloat16", "mesh": {"axes": ["a", "b"], "ranks": [0, 1, 2, 3], "sizes": [2, 2]}, "policy": "deterministic", "shape": null, "src": ["P(sum)", "P(avg)"], "steps": [{"axes": ["a", "b"], "between": "exchange", "chunk": 0, "contract": "v1/tree/wide/once", "divisor": 2, "inner": 1, "kind": "all_reduce", "move": "P(sum), P(avg) -> R", "norm": null, "op": "avg", "path": "exchange", "scatter": [], "sizes": [2, 2], "why": "2 axes in one reduction, in one order for all siblings"}]}""",
        )


# Redistributions of which torch merges only what stands side by side.
THREE_AXES = (
    "P P P -> R R R",
    "P P P -> R S(0) R",
    "P P P -> S(0) R R",
    "P P P -> R R S(0)",
    "P P P -> S(0) R S(0)",
    "P P P -> S(0) S(1) S(0)",
    "P P P -> S(0) S(0) S(0)",
    "P S(0) P -> R S(0) R",
    "P S(0) P -> R R R",
    "P R P -> R R R",
    "P S(0) P -> R S(1) R",
    "P S(0) P -> S(0) S(0) S(0)",
    "S(0) P P -> S(0) R R",
    "S(0) P P -> R R R",
    "S(0) S(0) P -> R R R",
    "S(0) R S(0) -> R R R",
    "S(0) S(1) S(0) -> R R R",
    "S(1) S(0) S(0) -> R R R",
    "P P P -> S(0) S(0) R",
)


class TestThreeAxes(TestCase):
    def test_every_policy_is_planned(self) -> None:
        layout = Layout.of(a=2, b=2, c=2)
        lines = []
        for text in (*THREE_AXES, "P R P -> R S(0) R"):
            src, dst = text.split(" -> ")
            found = planned(layout, src, dst)
            steps = [step.brief(layout).removesuffix(", exchange") for step in found.steps]
            sending = [step for step in found.steps if step.kind != "slice"]
            lines.append(f"{text}: {len(sending)} sent: {'; '.join(steps)}")
            assert len(found.reductions) == (1 if "P" in src else 0)
        self.assertExpectedInline(
            "\n".join(lines),
            """\
P P P -> R R R: 1 sent: all_reduce sum over (a, b, c)
P P P -> R S(0) R: 1 sent: reduce_scatter sum over (a, b, c) to S(0) over b, all_gather over (a, c)
P P P -> S(0) R R: 1 sent: reduce_scatter sum over (a, b, c) to S(0) over a, all_gather over (b, c)
P P P -> R R S(0): 1 sent: reduce_scatter sum over (a, b, c) to S(0) over c, all_gather over (a, b)
P P P -> S(0) R S(0): 1 sent: reduce_scatter sum over (a, b, c) to S(0) over a, S(0) over c, all_gather over (b)
P P P -> S(0) S(1) S(0): 1 sent: reduce_scatter sum over (a, b, c) to S(0) over a, S(1) over b, S(0) over c
P P P -> S(0) S(0) S(0): 1 sent: reduce_scatter sum over (a, b, c) to S(0) over a, S(0) over b, S(0) over c
P S(0) P -> R S(0) R: 1 sent: all_reduce sum over (a, c)
P S(0) P -> R R R: 2 sent: all_reduce sum over (a, c); torch S(0) -> R over (b)
P R P -> R R R: 1 sent: all_reduce sum over (a, c)
P S(0) P -> R S(1) R: 2 sent: all_reduce sum over (a, c); torch S(0) -> S(1) over (b)
P S(0) P -> S(0) S(0) S(0): 2 sent: all_reduce sum over (a, c); torch S(0) -> R over (b); slice R -> S(0) over (a), local; slice R -> S(0) over (b), local; slice R -> S(0) over (c), local
S(0) P P -> S(0) R R: 1 sent: all_reduce sum over (b, c)
S(0) P P -> R R R: 2 sent: all_reduce sum over (b, c); torch S(0) -> R over (a)
S(0) S(0) P -> R R R: 3 sent: all_reduce sum over (c); torch S(0) -> R over (b); torch S(0) -> R over (a)
S(0) R S(0) -> R R R: 2 sent: torch S(0) -> R over (a); torch S(0) -> R over (c)
S(0) S(1) S(0) -> R R R: 3 sent: torch S(0) -> R over (a); torch S(1) -> R over (b); torch S(0) -> R over (c)
S(1) S(0) S(0) -> R R R: 3 sent: torch S(1) -> R over (a); torch S(0) -> R over (b); torch S(0) -> R over (c)
P P P -> S(0) S(0) R: 1 sent: reduce_scatter sum over (a, b, c) to S(0) over a, S(0) over b, all_gather over (c)
P R P -> R S(0) R: 1 sent: slice R -> S(0) over (b), local; all_reduce sum over (a, c)""",
        )


class TestErrors(TestCase):
    def test_invalid_requests_are_refused(self) -> None:
        whole = ("P P P", "R R R")
        cases: tuple[tuple[type[Exception], str, str, dict[str, object]], ...] = (
            (PlacementError, "P P", "R R", {}),
            (PlacementError, "P(mean) R R", "R R R", {}),
            (PlacementError, "P(max) P R", "R R R", {}),
            (PlacementError, "P P S(2)", "R R S(2)", {"shape": (4, 4)}),
            (PlacementError, "P P P", "R S(0) R", {"shape": ()}),
            (PlacementError, *whole, {"shape": (3, -1)}),
            (PolicyError, *whole, {"policy": "quick"}),
            (PolicyError, *whole, {"path": "ring"}),
            (ContractTypeError, "P(avg) P P", "R R R", {"dtype": torch.int64}),
        )
        self.assertExpectedInline(
            "\n".join(refusal(error, planned, CUBE, *asked, **how) for error, *asked, how in cases),
            """\
MP401: a mesh of 3 axes needs 3 placements, got 2 from and 2 to; pass one placement per axis of (a=2, b=3, c=2)
MP401: invalid placement 'P(mean)'; use R, S(0), P or P(op) with op one of sum, avg, max, min, product
MP401: partial values of kinds max and sum cannot be reduced together, because the result depends on their order; redistribute one of them first
MP401: S(2) needs a tensor of 3 or more dims, got shape [4, 4]; use a dim below 2
MP401: S(0) cannot shard a tensor of 0 dims; use R
MP401: no tensor has the shape [3, -1]; use sizes of 0 or more elements
MP402: unknown policy 'quick'; use 'deterministic' or 'consistent' or 'fast'
MP402: unknown contract path 'ring'; use 'auto' or 'exchange' or 'reference' or 'halving' or 'integer' or 'integer_checksum'
MP412: P(avg) of int64 has no exact result; use P(sum) and divide, or convert to a floating dtype first""",
        )

    def test_gather_along_descending_ranks_is_refused(self) -> None:
        turned = Layout.of([1, 0, 3, 2], a=2, b=2)
        assert planned(turned, "P P", "S(0) S(0)").reductions
        assert planned(turned, "P S(0)", "R S(0)").reductions
        self.assertExpectedInline(
            refusal(ShardOrderError, planned, turned, "P S(0)", "R R"),
            """MP403: (P(sum), S(0)) -> (R, R) on (a=2, b=2; ranks 1, 0, 3, 2) moves shards along axis b, whose ranks do not ascend: torch would put them in the order of sorted ranks, not of mesh coordinates; make a mesh whose ranks ascend along each axis""",
        )
        # Axis a ascends.
        assert planned(turned, "S(0) P", "R R").reductions


def test_equal_problems_share_one_plan() -> None:
    first = planned(ISSUE, "P P R", "R R R")
    assert planned(Layout.of(ddp=8, fsdp=5, tp=1), "P(sum) P R", "R R R") is first
    assert hash(first) == hash(planned(ISSUE, "P P R", "R R R"))
    assert planned(ISSUE, "P P R", "R R R", contract=Contract(order="rank")) != first


def test_torch_placements_are_read_by_exact_type() -> None:
    assert Spec.of(Partial("avg")) == Spec.of("P(avg)")
    assert Spec.of(Shard(2)) == Spec.of("S(2)")
    assert Spec.of(Replicate()) == Spec.of("R")
    assert (Spec.of(_NormPartial(2)).kind, Spec.of(_NormPartial(2)).norm) == ("norm", 2.0)
    assert Spec.of(_MaskPartial("sum")).kind == "opaque"
    assert Spec.of(_StridedShard(0, split_factor=2)).kind == "other"

    class Mine(Partial):
        pass

    assert Spec.of(Mine("sum")).kind == "opaque"
    for op in OPS:
        assert (Spec.of(Partial(op)).kind, Spec.of(Partial(op)).op) == ("partial", op)
    for op in ("band", "bor", "bxor"):
        assert Spec.of(Partial(op)).kind == "opaque"
        assert Spec.of(Partial(op)).any_order
    assert Spec.of(Partial("another")).kind == "opaque"
    assert not Spec.of(Partial("another")).any_order


def test_norms_reduce_together_only_when_equal() -> None:
    layout = Layout.of(a=2, b=3)
    replicate = [Replicate(), Replicate()]

    def reductions(*src: object) -> list[tuple[tuple[int, ...], float | None]]:
        found = plan(Problem.of(layout, list(src), replicate))  # type: ignore[arg-type]
        return [(step.axes, step.norm) for step in found.reductions]

    assert reductions(_NormPartial(2), _NormPartial(2)) == [((0, 1), 2.0)]
    assert reductions(_NormPartial(2), _NormPartial(3)) == []
    assert reductions(_NormPartial(2), Partial()) == [((1,), None)]
    assert reductions(_MaskPartial("sum"), Partial()) == [((1,), None)]
    assert reductions(_MaskPartial("sum"), _MaskPartial("sum")) == []


SPECS = st.sampled_from(["R", "S(0)", "S(1)", "P", "P(avg)"])
TARGETS = st.sampled_from(["R", "S(0)", "S(1)"])


@given(data=st.data())
def test_all_partial_axes_are_one_reduction(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    layout = Layout(sizes=tuple(sizes))
    src = [data.draw(SPECS) for _ in sizes]
    dst = [data.draw(TARGETS) for _ in sizes]
    found = plan(Problem.of(layout, src, dst))

    wide = tuple(i for i, s in enumerate(src) if s.startswith("P") and sizes[i] > 1)
    assert [step.axes for step in found.reductions] == ([wide] if wide else [])
    assert found.ordered == bool(wide)
    for step in found.reductions:
        averaged = math.prod(sizes[i] for i in wide if src[i] == "P(avg)")
        assert (step.op, step.divisor) == (("avg", averaged) if averaged > 1 else ("sum", None))
        assert step.contract == Contract()
        assert step.group_size == math.prod(sizes[i] for i in wide)
        # At most one gather of finished values after it.
        assert step.gather_axes in ((), tuple(i for i in wide if i not in dict(step.scatter)))
    # Every axis ends in its goal, for any steps in between.
    held = [Spec.of(text).text for text in src]
    for step in found.steps:
        if step.kind in ("all_reduce", "reduce_scatter"):
            cut = dict(step.scatter)
            for i in step.axes:
                held[i] = f"S({cut[i]})" if i in cut else "R"
        else:
            (axis,) = step.axes
            assert step.src is not None
            assert step.dst is not None
            assert held[axis] == step.src.text
            held[axis] = step.dst.text
    if found.ordered:
        assert all(held[i] == Spec.of(dst[i]).text for i in range(len(sizes)) if sizes[i] > 1)


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_every_operation_is_planned(op: str) -> None:
    for count in (1, 2, 3):
        for axes in itertools.combinations(range(3), count):
            src = [f"P({op})" if i in axes else "R" for i in range(3)]
            (step,) = plan(Problem.of(CUBE, src, ["R"] * 3)).reductions
            assert (step.op, step.divisor, step.axes) == (op, None, axes)


def test_cache_is_bounded() -> None:
    info = plan.cache_info()
    assert info.maxsize is not None
    assert info.maxsize <= 10_000


@pytest.mark.parametrize("text", ["S(\u00b2)", "S(\u0664)", "S(1234567890)", "S(-1)", "S()", "S"])
def test_invalid_dims_are_refused(text: str) -> None:
    with pytest.raises(PlacementError, match="invalid placement"):
        Spec.of(text)
