"""Reductions that fall through to PyTorch, and reduce-scatters that NCCL does not pin."""

from __future__ import annotations

from typing import Any

import pytest
from expecttest import TestCase
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _MaskPartial

from meshplan.errors import PolicyError
from meshplan.layout import Layout
from meshplan.planner import Plan, Problem, find_uncovered_reductions, plan, refuse_unpinned_scatter
from tests.refusals import refusal

P, R, S = Partial(), Replicate(), Shard
MESH = Layout.of(dp=3, tp=4, one=1)


class Mine(Partial):
    """A user's own."""


def planned(src: Any, dst: Any, policy: Any = "deterministic") -> Plan:
    return plan(Problem.of(MESH, src, dst, policy=policy))


def short(src: Any, dst: Any, policy: Any = "deterministic") -> list[str]:
    return [
        step.move.split("(")[0] for step in find_uncovered_reductions(planned(src, dst, policy))
    ]


@pytest.mark.parametrize("policy", ["deterministic", "consistent"])
def test_reductions_outside_the_policy_are_found(policy: str) -> None:
    two, three, mine = _NormPartial(2), _NormPartial(3), Mine("sum")
    assert short((mine, R, R), (R, R, R), policy) == ["P"]
    assert short((mine, R, R), (S(0), R, R), policy) == ["P"]
    assert short((mine, P, R), (R, R, R), policy) == ["P"]
    assert short((two, three, R), (R, R, R), policy) == ["_NormP", "_NormP"]
    assert short((two, P, R), (R, R, R), policy) == ["_NormP"]
    assert short((two, P, R), (S(0), R, R), policy) == ["_NormP"]
    assert short((two, R, R), (S(0), R, R), policy) == ["_NormP"]
    assert short((two, two, R), (R, two, R), policy) == ["_NormP"]


def test_reductions_within_the_policy_are_not_found() -> None:
    two, mine, mask = _NormPartial(2), Mine("sum"), _MaskPartial("sum")
    for policy in ("deterministic", "consistent", "fast"):
        assert short((P, P, P), (R, S(0), R), policy) == []
        assert short((two, two, R), (R, R, R), policy) == []
        # At most one summand is not zero.
        assert short((mask, R, R), (R, R, R), policy) == []
        assert short((mask, P, R), (S(0), R, R), policy) == []
        # Nothing is sent, or nothing is reduced.
        assert short((R, R, mine), (R, R, R), policy) == []
        assert short((mine, S(0), R), (mine, R, R), policy) == []
        assert short((S(0), R, R), (R, S(0), R), policy) == []
    assert short((mine, P, R), (S(0), R, R), "fast") == []
    # Two ranks have the same sum in any order.
    small = Layout.of(dp=2, tp=4)
    for policy, count in (("consistent", 0), ("deterministic", 1)):
        found = plan(Problem.of(small, (mine, R), (R, R), policy=policy))  # type: ignore[arg-type]
        assert len(find_uncovered_reductions(found)) == count
    assert short((_MaskPartial("max"), R, R), (R, R, R)) == ["MaskP"]
    assert short((Partial("bor"), R, R), (R, R, R)) == []
    assert short((Partial("another"), R, R), (R, R, R)) != []
    (step,) = planned((mask, R, R), (R, R, R)).steps
    assert step.why.endswith("every order gives the same bits")


SCATTERS = [
    ((P, R, R), (S(0), R, R), "fast"),
    ((P, P, R), (S(0), R, R), "fast"),
    ((R, Mine("sum"), R), (R, S(1), R), "deterministic"),
    ((_MaskPartial("sum"), R, R), (S(0), R, R), "deterministic"),
    ((_NormPartial(2), R, R), (S(0), R, R), "consistent"),
]
OTHERS = [
    ((P, R, R), (S(0), R, R), "deterministic"),
    ((P, P, R), (S(0), S(0), R), "consistent"),
    ((P, P, R), (R, R, R), "fast"),
    ((P, R, R), (R, R, R), "fast"),
    ((R, R, P), (R, R, S(0)), "fast"),
    ((S(0), R, R), (S(1), R, R), "fast"),
    ((Mine("sum"), R, R), (R, R, R), "deterministic"),
]
PINS_ONLY_ALL_REDUCE = (
    "allreduce:tree",
    "allreduce:ring",
    "AllReduce:^nvls",
    "allreduce:tree;broadcast:ring",
    "allreduce:tree;reducescatter:tree",
    "Tree",
    "tree;allreduce:ring",
    "CollNetChain",
)
PINS_BOTH = (
    "",
    "Ring",
    "ring,tree;allreduce:tree",
    "allreduce:tree;reducescatter:ring",
    "^NVLS",
    "broadcast:ring",
    "reducescatter:ring",
    # NCCL cannot read these.
    "allreduce tree",
    "rung",
)


@pytest.mark.parametrize("case", SCATTERS, ids=str)
@pytest.mark.parametrize("listed", PINS_ONLY_ALL_REDUCE)
def test_unpinned_reduce_scatter_is_refused(case: Any, listed: str) -> None:
    with pytest.raises(PolicyError, match="reduce-scatter"):
        refuse_unpinned_scatter(planned(*case), listed)


def test_pinned_reduce_scatter_is_accepted() -> None:
    for case in SCATTERS:
        for listed in PINS_BOTH:
            refuse_unpinned_scatter(planned(*case), listed)
    for case in OTHERS:
        for listed in PINS_ONLY_ALL_REDUCE:
            refuse_unpinned_scatter(planned(*case), listed)


class TestMessages(TestCase):
    def test_refusals_name_the_reduction(self) -> None:
        messages = []
        for case, listed in (
            (SCATTERS[0], "allreduce:tree"),
            (SCATTERS[2], "Tree"),
        ):
            messages.append(refusal(PolicyError, refuse_unpinned_scatter, planned(*case), listed))
        self.assertExpectedInline(
            "\n".join(messages),
            """\
MP402: (P(sum), R, R) -> (S(0), R, R) on (dp=3, tp=4, one=1): torch P(sum) -> S(0) over (dp) is a reduce-scatter of NCCL's own. Under NCCL_ALGO=allreduce:tree all-reduce is pinned, and reduce-scatter, which has no tree, is NCCL's choice; use NCCL_ALGO='ring,tree;allreduce:tree' before the job starts, which gives it a ring, or meshplan.install(policy='deterministic'), whose contract does not use NCCL's reduce-scatter
MP402: (R, P(sum), R) -> (R, S(1), R) on (dp=3, tp=4, one=1): torch P(sum) -> S(1) over (tp) is a reduce-scatter of NCCL's own. Under NCCL_ALGO=Tree all-reduce is pinned, and reduce-scatter, which has no tree, has no algorithm left; use NCCL_ALGO='ring,tree;allreduce:tree' before the job starts, which gives it a ring""",
        )
