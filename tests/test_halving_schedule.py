"""The schedule of recursive halving: bits, messages and bytes of all ranks, in one process."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Generator
from functools import reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.orders import order_named
from meshplan.planner import halving_schedule, share_owners
from tests.traffic import count_halving

SHAPES = [
    shape
    for axes in (2, 3, 4)
    for shape in itertools.product((1, 2, 3, 4, 5, 6, 7), repeat=axes)
    if 2 <= math.prod(shape) <= 72
][::6]
Mail = dict[tuple[int, int], deque[Any]]


def one_rank(shape: tuple[int, ...], rank: int, mail: Mail) -> Generator[dict[int, object]]:
    """Run the schedule of one rank on expressions: which leaves are added, for each part."""
    plan = halving_schedule(shape, rank)
    own: dict[int, object] = dict.fromkeys(range(plan.parts), rank)
    tail: dict[int, object] = {}
    for one in plan.rounds:
        summands: list[tuple[int, dict[int, object]]] = []
        for message in one.sends:
            parts = range(message.start, message.stop)
            sent, behind = {part: own[part] for part in parts}, {}
            if message.tail:
                behind = {part: tail[part] for part in parts}
            for values, kind in ((sent, message.sum), (behind, message.tail)):
                assert all(isinstance(x, int) == (kind == "leaf") for x in values.values())
            mail[rank, message.peer].append((sent, behind))
        for message in one.receives:
            came, behind = yield from received(mail[message.peer, rank])
            assert [*came] == [*range(message.start, message.stop)]
            if message.is_tail:
                tail |= came
            else:
                summands.append((message.peer, came))
                tail |= behind
        own = {part: own[part] for part in range(one.start, one.stop)}
        operands = [came for _, came in sorted(summands, key=lambda pair: pair[0])]
        operands.insert(one.place, own)
        own = {part: reduce(lambda a, b: (a, b), (x[part] for x in operands)) for part in own}
        if one.closes:
            own, tail = {part: (own[part], tail[part]) for part in own}, {}
    assert [*own] == ([] if plan.owned is None else [plan.owned])
    for one in plan.gather():
        for message in one.sends:
            result = {part: own[part] for part in range(message.start, message.stop)}
            mail[rank, message.peer].append((result, {}))
        for message in one.receives:
            own |= (yield from received(mail[message.peer, rank]))[0]
    yield own


def received(mails: deque[Any]) -> Generator[dict[int, object], None, Any]:
    """The next message, once it is there."""
    while not mails:
        yield {}
    return mails.popleft()


def check(shape: tuple[int, ...]) -> None:
    """All ranks end with the expression of the contract, for all parts, and no message is left."""
    ranks = math.prod(shape)
    mail: Mail = defaultdict(deque)
    running = [one_rank(shape, rank, mail) for rank in range(ranks)]
    expected = order_named("tree").expression(shape, lambda i: i, lambda a, b: (a, b))
    finished = 0
    while finished < ranks:
        found = [next(one, None) for one in running]
        results = [result for result in found if result]
        finished += len(results)
        for result in results:
            assert set(result.values()) == {expected}, shape
            assert len(result) == halving_schedule(shape, 0).parts
        assert results or any(mail.values())
    assert not any(mail.values()), "a message that no rank expects"


@settings(max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 40))
def test_messages_add_as_the_tree(shape: list[int]) -> None:
    check(tuple(shape))


@pytest.mark.full
def test_messages_add_as_the_tree_in_every_group() -> None:
    assert len(SHAPES) >= 40
    for shape in [*((ranks,) for ranks in range(1, 73)), *SHAPES]:
        check(shape)


def traffic(shape: tuple[int, ...], elements: int = 1 << 20) -> list[tuple[int, float]]:
    """Messages, and bytes in units of the summand's, of every rank: float32."""
    plans = (halving_schedule(shape, rank) for rank in range(math.prod(shape)))
    found = (count_halving(plan, elements, 4, 4) for plan in plans)
    return [(one.messages, one.bytes / elements / 4) for one in found]


def levels(ranks: int) -> int:
    return (ranks - 1).bit_length()


@pytest.mark.parametrize(
    "ranks",
    [
        2,
        3,
        5,
        8,
        33,
        100,
        1024,
        *[pytest.param(n, marks=pytest.mark.full) for n in (4096, 4097, 4200)],
    ],
)
def test_messages_and_bytes_are_bounded(ranks: int) -> None:
    found = traffic((ranks,))
    even = ranks & ranks - 1 == 0
    assert max(messages for messages, _ in found) <= (2 if even else 4) * levels(ranks)
    assert max(sent for _, sent in found) < (2.0 if even else 2.13)
    assert sum(sent for _, sent in found) / ranks <= 2.01


@pytest.mark.full
def test_messages_and_bytes_are_bounded_in_every_group() -> None:
    for ranks in range(2, 4201):
        # The first ranks carry most: they pass on every tail. The last ones are the tails.
        positions = {
            *range(min(ranks, 16)),
            *range(max(0, ranks - 4), ranks),
            1 << levels(ranks) - 1,
        }
        for position in positions - {ranks}:
            found = count_halving(halving_schedule.__wrapped__((ranks,), position), 1 << 20, 4, 4)
            even = ranks & ranks - 1 == 0
            assert found.messages <= (2 if even else 4) * levels(ranks), ranks
            assert found.bytes < (2.0 if even else 2.13) * (4 << 20), ranks
    for shape in [*SHAPES, (8, 5), (40, 8), (125, 8, 4), (3, 3, 3), (9, 3), (7, 7, 3)]:
        found = traffic(shape)
        assert max(messages for messages, _ in found) <= 4 * levels(math.prod(shape)), shape
        assert max(sent for _, sent in found) <= 2.26, shape
        assert sum(sent for _, sent in found) / len(found) <= 2.03, shape


@pytest.mark.full
def test_no_rank_of_a_mesh_sends_more_than_two_and_a_quarter_of_its_summand() -> None:
    worst = {}
    for axes in (1, 2, 3):
        for shape in itertools.product(range(2, 73), repeat=axes):
            if math.prod(shape) <= 72:
                worst[shape] = max(sent for _, sent in traffic(shape))
    assert len(worst) == 443
    shape = max(worst, key=worst.__getitem__)
    assert (shape, worst[shape]) == ((7, 5), 2.25)


@pytest.mark.parametrize("nodes", [2, 3, 17, 33, 65, pytest.param(1025, marks=pytest.mark.full)])
def test_bytes_of_bfloat16_on_nodes_of_eight_are_bounded(nodes: int) -> None:
    """Inside of a node each rank sends 7/8 of the summand forth and back, and a node sends partials
    of an eighth in float32 to others, and results in bfloat16."""
    between = max(
        count_halving(halving_schedule((nodes,), rank), 1 << 20, 4, 4, scatter=True).bytes
        + count_halving(halving_schedule((nodes,), rank), 1 << 20, 2, 2).bytes
        - count_halving(halving_schedule((nodes,), rank), 1 << 20, 2, 2, scatter=True).bytes
        for rank in range(nodes)
    )
    assert 2 * 7 / 8 + between / (2 << 20) / 8 <= 2.15


@pytest.mark.parametrize("shape", [(5,), (13,), (5, 8), (7, 7), (12,)])
def test_halves_of_a_message_have_as_many_shards(shape: tuple[int, ...]) -> None:
    """Also where parts have the shards of ranks that own none."""
    served = share_owners(shape)
    assert sorted(itertools.chain(*served)) == [*range(math.prod(shape))]
    counts = [len(ranks) for ranks in served]
    while len(counts) % 2 == 0:
        half = len(counts) // 2
        assert abs(sum(counts[:half]) - sum(counts[half:])) <= 1
        counts = counts[:half]


def test_schedule_of_one_rank_of_a_million_is_short() -> None:
    plan = halving_schedule((1 << 20,), 12345)
    assert len(plan.rounds) == 20
    assert count_halving(plan, 1 << 24, 4, 4).messages == 40
