"""Every fold over peers, of any number of ranks and mesh: its bits, and the width of its words."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.kernel import _device_peers
from meshplan.kernel._device_peers import BATCH, STAGED_WAITING, TABLE_LEAVES, fold_plan, plan_of
from meshplan.kernel._library import MAX_PEERS
from meshplan.orders import ORDERS
from meshplan.testing import bits
from tests.devices import CONTRACTS
from tests.inputs import FLOATS, INTEGERS, arithmetics, draw_leaves
from tests.peer_folds import PeerFolds

# Of one axis, of several that reduce as one does, and of others.
SHAPES = (
    *((n,) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 32, 72)),
    *((2, 4), (2, 3), (3, 5), (5, 3), (2, 2, 2, 9), (8, 9)),
)


@pytest.fixture(scope="module")
def folds(tmp_path_factory: pytest.TempPathFactory) -> PeerFolds:
    if shutil.which("g++") is None:
        pytest.skip("no g++: the kernels are not compiled")
    return PeerFolds(tmp_path_factory.mktemp("folds"))


def divisors(number: int) -> list[tuple[int, ...]]:
    """All shapes of so many ranks, without axes of size 1."""
    found = [(number,)]
    for size in range(2, number // 2 + 1):
        if number % size == 0:
            found += [(size, *inner) for inner in divisors(number // size)]
    return found


@pytest.mark.parametrize("order", ["tree", "rank"])
def test_batches_are_the_expression_of_the_order(order: str) -> None:
    for shape in [s for n in range(1, MAX_PEERS + 1) for s in divisors(n)] + [(300,), (7, 43)]:
        plan = plan_of(order, shape)
        assert plan is not None
        expected = ORDERS[order].expression(shape, str, "({}+{})".format)
        assert plan_text(plan.batches, plan.chain) == expected, shape
        assert plan.waiting <= STAGED_WAITING or math.prod(shape) > MAX_PEERS


def plan_text(batches: bytes, chain: bool) -> str:
    """What csrc/element.h makes of a plan."""
    stack: list[str] = []
    first = 0
    while first < len(batches):
        count, added = batches[first] % 16, batches[first] // 16
        assert 1 <= count <= BATCH
        assert first // TABLE_LEAVES == (first + count - 1) // TABLE_LEAVES
        leaves = [str(leaf) for leaf in range(first, first + count)]
        if chain:
            text = leaves[0] if first == 0 else f"({stack.pop()}+{leaves[0]})"
            for leaf in leaves[1:]:
                text = f"({text}+{leaf})"
        else:
            text = ORDERS["tree"].expression((count,), leaves.__getitem__, "({}+{})".format)
            for _ in range(added):
                text = f"({stack.pop()}+{text})"
        stack.append(text)
        first += count
    (found,) = stack
    return found


def test_orders_that_do_not_take_leaves_in_turn_have_no_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reverse = replace(
        ORDERS["rank"],
        name="reverse",
        expression=lambda shape, leaf, node: node(leaf(1), leaf(0)),
    )
    monkeypatch.setattr(_device_peers, "ORDERS", {**ORDERS, "reverse": reverse})
    assert plan_of("reverse", (2,)) is None
    # A fold goes another way then, which is reported once.
    for order in ("reverse", "reverse", "rank"):
        assert (fold_plan(order, (2,)) is None) == (order == "reverse")
    assert [record.getMessage() for record in caplog.records] == [
        "order 'reverse' over axes of [2] runs in plain torch on GPUs, slower: it has no batches"
    ]


def wrong_folds(
    folds: PeerFolds, shape: Sequence[int], dtypes: Sequence[torch.dtype], numel: int
) -> list[str]:
    """Results and copies that differ from the definition, of every operation and rounding."""
    wrong, count = [], math.prod(shape)
    for dtype in dtypes:
        leaves = draw_leaves(count, numel, dtype, specials=True)
        for op, contract in arithmetics(dtype, CONTRACTS):
            expected = reduce_leaves(leaves, op, shape, contract)  # type: ignore[arg-type]
            # The last rank's leaf is alone in its batch, or not at the start of it.
            for rank, offset in ((0, 0), (count - 1, dtype.itemsize), (count // 2, 8)):
                for found in folds(leaves, op, shape, contract, rank=rank, offset=offset):
                    if not torch.equal(bits(found), bits(expected)):
                        wrong.append(f"{dtype} {op} {shape} {contract.id} {rank} at {offset}")
    return wrong


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_every_fold_has_the_bits_of_the_definition(
    folds: PeerFolds, shape: tuple[int, ...]
) -> None:
    """Of 3 lanes; 37 elements are some words and a tail, 3 less than a word of any dtype but float64."""
    for numel in (37, 3, 0):
        assert wrong_folds(folds, shape, (*FLOATS, *INTEGERS), numel) == []


@pytest.mark.full
@pytest.mark.parametrize("shape", [(7,), (9,), (16,), (3, 5), (2, 2, 2, 9)])
def test_every_alignment_has_the_bits_of_the_definition(
    folds: PeerFolds, shape: tuple[int, ...]
) -> None:
    for dtype, numel in itertools.product((*FLOATS, torch.uint8), (1, 15, 67)):
        count = math.prod(shape)
        leaves = draw_leaves(count, numel, dtype)
        for op, contract in (("sum", Contract()), ("max", Contract()), ("sum", Contract("exact"))):
            expected = reduce_leaves(leaves, op, shape, contract)  # type: ignore[arg-type]
            for offset in range(0, 16, dtype.itemsize):
                for found in folds(leaves, op, shape, contract, rank=count // 2, offset=offset):
                    assert torch.equal(bits(found), bits(expected)), (dtype, numel, op, offset)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "dtype", "op", "contract"),
    [
        ((2,), torch.bfloat16, "sum", Contract()),
        ((8,), torch.float16, "sum", Contract("rank")),
        ((9,), torch.bfloat16, "sum", Contract()),
        ((16,), torch.bfloat16, "sum", Contract()),
        ((3, 5), torch.bfloat16, "avg", Contract()),
        ((72,), torch.bfloat16, "sum", Contract("rank")),
        ((32,), torch.float32, "sum", Contract()),
        ((72,), torch.float32, "sum", Contract()),
        ((8, 9), torch.float64, "product", Contract()),
        ((8, 9), torch.int8, "sum", Contract()),
        ((8, 9), torch.int64, "product", Contract()),
        ((5, 3), torch.float16, "max", Contract()),
        ((16,), torch.float32, "sum", Contract(accumulate="float64")),
        ((16,), torch.bfloat16, "sum", Contract(rounding="node")),
        ((8,), torch.bfloat16, "sum", Contract("exact")),
        ((72,), torch.float32, "sum", Contract("exact")),
        ((72,), torch.float64, "sum", Contract("exact")),
        ((32,), torch.bfloat16, "sum", Contract()),
        ((5, 3), torch.float16, "sum", Contract()),
        ((9,), torch.bfloat16, "sum", Contract("exact")),
        ((32,), torch.float32, "sum", Contract(accumulate="float64")),
    ],
)
def test_leaves_are_read_in_the_widest_words(
    folds: PeerFolds,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    op: str,
    contract: Contract,
) -> None:
    """16 bytes of each leaf once, the result and its copies once, and nothing narrower but the last element."""
    count, words = math.prod(shape), 10
    for tail, offset in ((0, 0), (1, 0), (0, 8), (1, 8)):
        numel = words * 16 // dtype.itemsize + tail
        # Equal leaves: no exact sum is uncertain and reads them again.
        leaves = [torch.ones(numel, dtype=dtype) for _ in range(count)]
        folds(leaves, op, shape, contract, rank=count - 1, offset=offset)
        expected = dict.fromkeys(folds.accesses, 0)
        # The tiles and the copies; the own leaf and the result.
        expected[16] += (2 * count - 2) * words
        width = 16 if offset == 0 else 8
        expected[width] += 2 * words * 16 // width
        expected[dtype.itemsize] += 2 * count * tail
        assert folds.accesses == expected, (tail, offset)
