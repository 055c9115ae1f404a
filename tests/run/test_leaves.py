"""``--keep-leaves``: the rank that has a wrong sum, what is no fault of a sum, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.planner import Step
from meshplan.run import _leaves
from meshplan.run._leaves import Leaves, find_wrong_sums
from meshplan.run._verdict import format_verdict
from meshplan.testing import order_sensitive
from tests.marks import full
from tests.processes import run_ranks
from tests.run.observing import BAD_RANK, BAD_STEP, flip, observe_ranks, train

PAGE = Path(__file__).parents[2] / "docs" / "run.md"
ORDERS = [
    Contract(),
    Contract("rank", rounding="node"),
    Contract("exact"),
    Contract("tree", "float64"),
]


class Ranks:
    """Ranks that reduce under a contract, and take one step."""

    def __init__(self, ranks: int, limit: int = 1 << 30, contract: Contract = Contract()) -> None:
        self.leaves = [Leaves(limit) for _ in range(ranks)]
        self.contract, self.members = contract, list(range(ranks))

    def reduce(self, elements: int, dtype: torch.dtype = torch.float32, **change: Any) -> None:
        """Add, with a bit that flips on some ranks: ``wrong={1: 5}`` in element 5 of rank 1."""
        ranks = len(self.members)
        leaves = [
            order_sensitive(elements, rank=one, world_size=ranks, dtype=dtype)
            for one in self.members
        ]
        # Positions do not follow ranks.
        total = reduce_leaves(leaves[::-1], "avg", (ranks,), self.contract, divisor=7)
        kind = change.get("kind", "all_reduce")
        step = Step(kind, (0,), (ranks,), "", "", op="avg", divisor=7, contract=self.contract)
        for rank, leaf in enumerate(leaves):
            result = total.clone()
            if rank in change.get("wrong", {}):
                result.view(torch.uint8)[result.element_size() * change["wrong"][rank]] ^= 4
            groups: Any = SimpleNamespace(members=self.members, position=ranks - 1 - rank)
            groups.whole = SimpleNamespace(group_name="g")
            self.leaves[rank].keep(step, groups, leaf, None if "pending" in change else result)

    def end(self, step: int = 1, *, ended: bool = True) -> None:
        for one in self.leaves:
            one.end(0, step, ended=ended)

    def find(self, classes: Any, gradients: Any = (), step: int = 1) -> Any:
        """``sums`` of the report on a difference at a step, without the ranks that are ``None``."""
        record: Any = {"since": step - 1}
        search = find_wrong_sums(classes, {"step": step}, record)
        answers: Any = None
        try:
            while True:
                asked, question = json.loads(json.dumps(search.send(answers)))
                answers = [
                    json.loads(json.dumps(self.leaves[rank].answer(question, (0, step), part)))
                    for rank in asked
                    for part in [gradients[rank] if gradients else None]
                ]
        except StopIteration:
            return record


@pytest.mark.parametrize("contract", ORDERS, ids=lambda one: one.id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rank_with_a_wrong_sum_is_named(contract: Contract, dtype: torch.dtype) -> None:
    ranks = Ranks(4, contract=contract)
    ranks.reduce(100, dtype)
    # In the second block of the message.
    ranks.reduce(70_000, dtype, wrong={2: 69_999})
    ranks.reduce(100, dtype, wrong={1: 0})
    ranks.end()
    found = ranks.find([[0, 1, 3], [2]])
    assert (found["compared"], found["wrong"], found["element"]) == (3, [2], 69_999)
    assert found["call"]["number"] == 2
    assert found["expected"] == found["got"]["0"] != found["got"]["2"]


def test_two_of_two_with_other_bits_than_their_leaves_are_not_told_apart() -> None:
    ranks = Ranks(2)
    ranks.reduce(10, wrong={0: 3, 1: 4})
    ranks.end()
    found = ranks.find([[0], [1]])
    # Each has the sum in other elements, and none has all of it.
    assert (found["wrong"], found["element"]) == ([0, 1], 3)


def test_only_reductions_of_the_step_are_compared() -> None:
    ranks = Ranks(2)
    for step in (1, 2, 3):
        ranks.reduce(10, wrong={1: step} if step == 2 else {})
        # Gradients are compared before the step.
        ranks.end(step, ended=False)
        ranks.end(step)
    assert [ranks.find([[0], [1]], step=step)["wrong"] for step in (1, 2, 3)] == [[], [1], []]


def test_leaves_keep_to_their_limit_and_the_newest_stay() -> None:
    # Of 10,000 elements two reductions fit, and never one of 30,000.
    ranks = Ranks(2, limit=170_000)
    for size in (10_000, 30_000, 10_000, 10_000):
        ranks.reduce(size, wrong={1: 7})
        for one in ranks.leaves:
            held = sum(part.nbytes for call in one._calls for part in call.kept)
            assert one._held == held <= 170_000
    ranks.end()
    found = ranks.find([[0], [1]])
    assert (found["compared"], found["not_kept"]) == (2, {"over the limit": 2})
    assert (found["call"]["number"], found["wrong"]) == (3, [1])


def test_a_long_job_holds_the_calls_of_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_leaves, "CALLS", 100)
    ranks = Ranks(1, limit=800)
    (leaves,) = ranks.leaves
    for step in range(2 * _leaves.STEPS):
        leaves.due = step % 2 == 0
        ranks.reduce(10)
        leaves.add((0,), "outside the contract")
        ranks.end(step)
    assert len(leaves._calls) == 100
    assert [len(calls) for calls in leaves._steps.values()] == [2] * _leaves.STEPS
    # Only compared steps count towards the limit of ten.
    assert [call.order for call in leaves._kept] == list(range(217, 255, 4))
    assert leaves._held == 800


def test_what_is_not_kept_is_counted() -> None:
    ranks = Ranks(2)
    ranks.reduce(10, kind="reduce_scatter")
    ranks.reduce(10, pending=True)
    for one in ranks.leaves:
        one.add((0, 1), "outside the contract")
        one.add((), "in a compiled graph")
        # Its result is on one of the two.
        one.add((0, 7), "outside the contract")
    ranks.end()
    found = ranks.find([[0], [1]])
    reasons = (
        "reduce_scatter",
        "still under way on a GPU",
        "outside the contract",
        "in a compiled graph",
    )
    assert (found["compared"], found["not_kept"]) == (0, dict.fromkeys(reasons, 1))


def test_copy_for_which_there_is_no_memory_is_counted() -> None:
    ranks, fault = Ranks(2), torch.OutOfMemoryError("no memory")
    with mock.patch.object(_leaves, "flatten", side_effect=fault), pytest.raises(type(fault)):
        ranks.reduce(10)
    ranks.leaves[1].add((0, 1), "over the limit")
    ranks.end()
    assert ranks.find([[0], [1]])["not_kept"] == {"over the limit": 1}
    assert ranks.leaves[0]._held == 0


def test_a_gradient_that_is_no_part_of_a_sum_is_named() -> None:
    ranks = Ranks(2)
    ranks.reduce(100)
    ranks.end()
    whole = torch.randn(100)
    for one in ranks.leaves:
        one._kept[0].kept[1].copy_(whole)
    gradient = whole[40:50].reshape(2, 5).clone()
    other = gradient.clone()
    flip(other, 3)
    assert ranks.find([[0], [1]], [gradient, other])["changed"] == [1]
    assert ranks.find([[0], [1]], [other, gradient])["changed"] == [0]
    # A rank whose copy has gone shows nothing, nor does one that has lost a result.
    assert ranks.find([[0], [1]], [gradient, None])["changed"] == []
    # The step has scaled both of them, or none.
    assert ranks.find([[0], [1]], [other, other])["changed"] == []
    assert ranks.find([[0], [1]], [gradient, gradient])["changed"] == []
    # Short ones are found by chance, and bytes of two elements are not one.
    assert ranks.find([[0], [1]], [whole[:3], other])["changed"] == []
    shifted = whole.view(torch.uint8)[2:-2].clone().view(torch.float32)
    assert ranks.find([[0], [1]], [shifted, other])["changed"] == []
    ranks.reduce(100)
    ranks.leaves[1].add((0, 1), "over the limit")
    ranks.end(2)
    for one in ranks.leaves:
        one._kept[1].kept[1].copy_(whole)
    assert ranks.find([[0], [1]], [gradient, other], 2)["changed"] == []


def test_ranks_that_keep_nothing_leave_the_question_open() -> None:
    ranks = Ranks(2)
    ranks.reduce(10, wrong={1: 0})
    ranks.end()
    with mock.patch.object(ranks.leaves[1], "answer", return_value={}):
        found = ranks.find([[0], [1]])
    assert (found["compared"], found["wrong"]) == (0, [])
    # One that drops them between two questions.
    answer = ranks.leaves[1].answer

    def drop(question: Any, *about: Any) -> Any:
        return answer(question, *about) if question["what"] == "sums" else {}

    with mock.patch.object(ranks.leaves[1], "answer", drop):
        found = ranks.find([[0], [1]])
    assert (found["compared"], found["wrong"], "element" in found) == (1, [], False)


def test_groups_of_many_ranks_are_not_added() -> None:
    ranks = Ranks(9)
    ranks.reduce(10, wrong={8: 0})
    ranks.end()
    found = ranks.find([list(range(8)), [8]])
    assert (found["wrong"], found["failed"]) == ([], "leaves of more than 8 ranks are not added")


def observe(job: str, fault: str, settings: str = "gradients every=1 keep_leaves=1") -> Any:
    ranks = 2 if job == "ddp" else 4
    return observe_ranks(lambda *_: train(job, fault), ranks, settings, backend="meshplan")


def read_table() -> dict[str, str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index("| bit flips on one of two ranks in | verdict |")
    rows = [line.strip("| ").split(" | ") for line in lines[start + 2 : start + 6]]
    return {fault: verdict.strip("`") for fault, verdict in rows}


# By their names in the table.
FAULTS = {
    "a sum of gradients": "sum",
    "a gradient after its sum": "gradient",
    "a parameter": "parameter",
    "an optimizer state": "optimizer state",
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("job", "fault"),
    [("ddp", one) if FAULTS[one] == "sum" else full("ddp", one) for one in FAULTS]
    + [full("hsdp", one) for one in FAULTS],
)
def test_wrong_rank_is_named_as_the_page_shows(job: str, fault: str) -> None:
    report = observe(job, FAULTS[fault])[1]
    first = report["replicas"]["first_difference"]
    assert (first["step"], first["sums"]["not_kept"]) == (BAD_STEP, {})
    line = next(one for one in format_verdict(report).splitlines() if one.startswith("  sums: "))
    assert line.startswith(f"  {read_table()[fault]}")
    assert first["cause"] is None


@pytest.mark.processes
@pytest.mark.parametrize("job", ["ddp", full("hsdp")])
def test_job_without_a_fault_keeps_its_bits(job: str) -> None:
    alone = run_ranks(lambda _: train(job), 2 if job == "ddp" else 4, backend="meshplan")
    # A limit of less than a step's leaves, on whose end nothing depends.
    with mock.patch.object(_leaves.Leaves, "__init__", _limited):
        results, report = observe(job, "")
    assert results == alone
    assert report["replicas"]["first_difference"] is None
    assert report["not_observed"] == []


def _limited(leaves: Any, limit: int) -> None:
    plain(leaves, min(limit, 3000))


plain = Leaves.__init__


@pytest.mark.full
@pytest.mark.processes
def test_wrong_sum_of_four_ranks_is_named_without_compared_gradients() -> None:
    settings = "every=1 keep_leaves=1"
    run = observe_ranks(lambda *_: train("ddp", "sum"), 4, settings, backend="meshplan")
    first = run[1]["replicas"]["first_difference"]
    assert (first["kind"], first["sums"]["wrong"]) == ("parameter", [BAD_RANK])


@pytest.mark.processes
def test_reductions_outside_the_contract_are_not_judged() -> None:
    settings = "gradients every=1 keep_leaves=1"
    run = observe_ranks(lambda *_: train("ddp", "gradient"), 2, settings)
    sums = run[1]["replicas"]["first_difference"]["sums"]
    assert (sums["compared"], sums["wrong"], sums["changed"]) == (0, [], [])
    assert sums["not_kept"] == {"outside the contract": 1}
