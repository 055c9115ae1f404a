"""What ranks post, compared without ranks: differences, order of arrival, sizes at 1,000 ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from meshplan.run import _ledger, _shares
from meshplan.run._leaves import find_wrong_sums
from meshplan.run._ledger import Ledger
from meshplan.run._report import build
from meshplan.run._shares import Begun, Item, Shares
from meshplan.testing import order_sensitive
from tests.run.observing import flip

Change = Callable[[dict[str, Tensor], int], object]
FINAL = {"final": {"notes": [], "rows": []}}


class Ranks:
    """Ranks that hold one set of tensors, and a ledger."""

    def __init__(self, world_size: int) -> None:
        self.ledger = Ledger(world_size)
        self.ranks = tuple(range(world_size))
        table = mock.Mock(holders_of=lambda *_: {self.ranks})
        self.shares = [Shares(table, print) for _ in self.ranks]
        for rank, one in enumerate(self.shares):
            one.rank = rank
        self.reduced: Any = [(self.ranks, True, 20_010, 0)]
        self.sent = 0

    def post(
        self, rank: int, step: int, tensors: dict[str, Tensor], kind: str = "parameter"
    ) -> Any:
        items = [Item(kind, name, one, one) for name, one in tensors.items()]
        begun, shares = Begun([], []), self.shares[rank]
        reduced = [sums for sums in self.reduced if not sums[0] or rank in sums[0]]
        shares.begin(begun, 0, step, items, whole=True, certified=False, reduced=reduced)
        make: Any = shares.take(begun, 0, step, whole=True, number=None)
        return make()

    def deliver(self, rank: int, message: Any) -> None:
        self.sent += len(json.dumps(message))
        for asked, question in self.ledger.add(rank, json.loads(json.dumps(message))):
            self.deliver(asked, self.shares[asked].answer(json.loads(json.dumps(question))))

    def step(self, step: int, change: Change | None = None, kind: str = "parameter") -> None:
        """A step of all ranks, whose tensors ``change`` may change on a rank."""
        for rank in self.ranks:
            tensors = values(step)
            if change is not None:
                change(tensors, rank)
            self.deliver(rank, self.post(rank, step, tensors, kind))

    def end(self) -> None:
        for rank in self.ranks:
            self.deliver(rank, FINAL)

    @property
    def first(self) -> Any:
        return self.ledger.first


def values(seed: int = 0) -> dict[str, Tensor]:
    flat = order_sensitive(20_010, rank=0, world_size=1, seed=seed)
    small, weight, bias = flat.split([3, 20_000, 7])
    return {"small": small.clone(), "weight": weight.reshape(40, 500), "bias": bias.clone()}


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_located_in_every_order_of_arrival(seed: int) -> None:
    found = Ranks(5)
    messages = []
    for rank in found.ranks:
        for step in (1, 2, 3):
            tensors = values(step)
            if rank == 3 and step >= 2:
                flip(tensors["weight"], 12_345)
                flip(tensors["bias"], 1, 3)
                tensors = dict(reversed(tensors.items()))  # in the order of its optimizer
            messages.append((rank, found.post(rank, step, tensors)))
    chosen = random.Random(seed)
    # Messages of one rank keep their order.
    queues = [[one for rank, one in messages if rank == r] for r in found.ranks]
    while any(queues):
        rank = chosen.choice([r for r in found.ranks if queues[r]])
        found.deliver(rank, queues[rank].pop(0))
    first = found.first
    assert (first["step"], first["kind"], first["tensor"]) == (2, "parameter", "weight")
    assert first["ranks"] == {"agree": [[0, 1, 2, 4], [3]]}
    assert (first["tensors"], first["elements"], first["of"]) == (2, 1, 20_000)
    assert (first["largest"], first["cause"]) == ("1 ulp", "one rank")
    assert "first at index (24, 345)" in first["text"]
    assert found.ledger.describe_steps()["compared"] == 3


def find_cause(factor: Callable[[int], float], *reduced: Any) -> Any:
    """Of tensors that each rank multiplies by a factor, after reductions of some elements."""
    found = Ranks(4)
    found.reduced = reduced
    found.step(1, lambda tensors, rank: [t.mul_(factor(rank)) for t in tensors.values()])
    return found.first["cause"]


def test_replicas_that_started_apart_and_that_drift_are_told_apart() -> None:
    assert find_cause(lambda rank: (-1) ** rank) == "never equal"
    assert find_cause(lambda rank: 1 + rank * 3e-7, ((), True, 3, 0)) == "order"


@pytest.mark.parametrize(
    ("cause", "reduced"),
    [
        # Of ranks that torch does not know.
        ("order", [((), True, 3, 0)]),
        ("order", [((0, 2), True, 2, 0), ((0, 1, 2), True, 1, 0)]),
        ("order", [((0, 2), False, 3, 0), ((0, 1, 2, 3), True, 1, 0)]),
        # Every sum between ranks that differ is in one order.
        (None, [((0, 2), False, 3, 0), ((0, 1), True, 3, 0), ((2, 3), True, 3, 0)]),
        # Earlier ones had the size of the tensor.
        ("not reduced", [((0, 1, 2, 3), True, 1, 3)]),
        ("not reduced", [((0, 2), False, 0, 3), ((0, 1), True, 9, 9), ((2, 3), True, 9, 9)]),
        # Other ways of adding are not counted.
        (None, []),
        (None, [((0, 1, 2, 3), True, 1, 1)]),
    ],
)
def test_order_is_the_cause_only_of_what_was_reduced(cause: str | None, reduced: Any) -> None:
    """The first tensor, of three elements, has other bits on ranks 2 and 3."""
    assert find_cause(lambda rank: 1 + rank // 2 * 3e-7, *reduced) == cause


def test_a_gradient_of_the_same_step_comes_before_its_parameter() -> None:
    found = Ranks(2)
    for kind in ("parameter", "gradient"):
        found.step(1, lambda tensors, rank: flip(tensors["small"], 0, rank), kind)
    assert found.first["kind"] == "gradient"


def test_steps_before_a_rank_connects_are_compared() -> None:
    found, steps = Ranks(3), range(1, 9)
    late = []
    for step in steps:
        for rank in found.ranks:
            tensors = values(step)
            if rank == 2 and step >= 2:
                flip(tensors["bias"], 2, rank)
            message = found.post(rank, step, tensors)
            if rank == 2:
                late.append(message)
            else:
                found.deliver(rank, message)
    for message in late:
        found.deliver(2, message)
    assert found.ledger.describe_steps()["compared"] == len(steps)
    assert (found.first["step"], found.first["tensor"]) == (2, "bias")
    assert found.first["elements"] == 1
    assert found.ledger._held == 0


def test_a_rank_that_steps_less_often_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ledger, "HELD_POSTS", 8)
    found = Ranks(3)
    for step in range(1, 12):
        for rank in found.ranks:
            if rank != 1 or step < 4:
                found.deliver(rank, found.post(rank, step, values(step)))
    ((name, one),) = found.ledger.sets.items()
    assert list(one.pending) == [8, 9, 10, 11]
    for rank in found.ranks:
        taken = {name: 3 if rank == 1 else 11}
        found.deliver(rank, FINAL | {"taken": taken})
    steps = found.ledger.describe_steps()
    assert (steps["compared"], steps["not_compared"]) == (3, 8)
    assert steps["unequal"] == [{"tensors": 3, "taken": {"11": [0, 2], "3": [1]}}]
    assert found.first is None
    # The last steps of the others wait for no rank: all are let go.
    assert found.ledger.find_clear() == {0, 1, 2}


def test_rank_that_vanished_keeps_no_rank_waiting() -> None:
    found = Ranks(3)
    for rank in (0, 1):
        found.deliver(rank, found.post(rank, 1, values()))
        found.deliver(rank, FINAL)
    assert found.ledger.find_clear() == set()
    assert found.ledger.find_clear({2}) == {0, 1}


def test_rank_with_another_list_of_tensors_took_no_other_number_of_steps() -> None:
    found = Ranks(2)
    for rank in found.ranks:
        tensors = values() if rank == 0 else values() | {"more": torch.ones(2)}
        found.deliver(rank, found.post(rank, 1, tensors) | FINAL)
    assert found.ledger.describe_steps()["unequal"] == []
    assert found.ledger.find_unposted()


def test_replicas_that_agreed_before_did_not_start_apart() -> None:
    found = Ranks(4)
    found.step(1)
    found.step(2, lambda tensors, rank: [t.mul_((-1) ** rank) for t in tensors.values()])
    assert (found.first["step"], found.first["cause"]) == (2, None)


def test_ranks_that_were_not_heard_to_the_end_are_named() -> None:
    ledger = Ledger(3)
    for rank in (0, 1):
        ledger.add(rank, {"hello": {"location": {"name": "a"}, "settings": {}}})
    ledger.add(0, FINAL)
    own = {"notes": [], "rows": [], "uses": {}, "backend": "gloo", "seconds_per_step": None}
    notes = ["rank 2: posted nothing", "rank 1: not heard to the end"]
    assert build(ledger, own, "ended", None)[0]["not_observed"] == notes
    assert build(ledger, own, "running", None)[0]["not_observed"] == []


def test_tensors_that_are_gone_are_named_without_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shares, "COPIED_BYTES", 0)
    found = Ranks(2)
    found.ledger.find_wrong_sums = find_wrong_sums
    found.step(1, lambda tensors, rank: flip(tensors["bias"], 2, rank))
    assert (found.first["tensor"], found.first["elements"]) == ("bias", None)
    # Ranks were asked for their sums all the same, and keep none.
    assert found.first["sums"]["compared"] == 0
    assert found.ledger.find_clear() == set()
    found.end()
    assert found.ledger.find_clear() == {0, 1}


def test_all_ranks_stay_while_a_wrong_sum_is_looked_for() -> None:
    found = Ranks(3)
    found.ledger.find_wrong_sums = find_wrong_sums
    with mock.patch.object(found.shares[2], "answer", return_value={}):
        found.step(1, lambda tensors, rank: flip(tensors["bias"], 2, rank // 2))
        found.end()
    # Rank 1 is asked for its leaf after rank 2 has answered, who may have died.
    assert found.ledger.find_clear() == set()
    assert found.ledger.find_clear({2}) == {0, 1}


def test_messages_of_1000_ranks_with_1000_tensors_are_bounded() -> None:
    """The words of a step do not grow with the tensors, and a difference asks 8 ranks."""
    found = Ranks(1000)
    tensors = {f"layers.{number}.weight": torch.full((2,), float(number)) for number in range(1000)}
    same = found.post(0, 1, tensors)
    (share,) = same["shares"]
    others = same | {"shares": [share | {"sets": dict.fromkeys(share["sets"], ())}]}
    for step in (1, 2):
        for rank in found.ranks[:-1]:
            found.deliver(rank, (others if rank else same) | {"step": step})
    # Nothing but the words of the last steps is held, until the last rank posts.
    assert found.sent < 2 * 1000 * 300
    found.sent = 0
    flip(tensors["layers.500.weight"], 1)
    found.deliver(999, found.post(999, 1, tensors))
    assert found.first["ranks"]["agree"] == [list(range(999)), [999]]
    assert (found.first["tensor"], found.first["elements"]) == ("layers.500.weight", 1)
    assert found.sent < 8 * 1000 * 150
