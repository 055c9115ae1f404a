"""Trees over absolute positions: any ranges, the bits of the contract's tree."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshplan._chunks import cover_range
from meshplan.definition import reduce_leaves
from meshplan.testing import assert_bitwise_equal, order_sensitive
from meshplan.testing._ranks import LeafRange, join_blocks, sum_blocks


@st.composite
def partitions(draw: st.DrawFn, max_n: int = 48) -> list[int]:
    """Ends of consecutive ranges that fill 0 to n: 0, ..., n; empty ranges among them."""
    n = draw(st.integers(1, max_n))
    cuts = draw(st.lists(st.integers(0, n), max_size=9))
    return [0, *sorted(cuts), n]


def leaves_of(n: int, seed: int = 0, numel: int = 7) -> list[Tensor]:
    return [order_sensitive(numel, rank=i, world_size=n, seed=seed) for i in range(n)]


def spell(left: str, right: str) -> str:
    return f"({left} {right})"


def tree_value(leaves: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Neighbours are paired, an odd one out is carried up."""
    level = list(leaves)
    while len(level) > 1:
        pairs = [combine(a, b) for a, b in zip(level[0::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def range_blocks(
    leaves: Sequence[Any], start: int, combine: Callable[[Any, Any], Any]
) -> list[tuple[LeafRange, Any]]:
    return [
        (block, tree_value(leaves[block[0] - start : block[1] - start], combine))
        for block in cover_range(start, start + len(leaves))
    ]


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_blocks_are_aligned_and_the_largest(start: int, length: int) -> None:
    stop = start + length
    blocks = cover_range(start, stop)
    assert [i for a, b in blocks for i in range(a, b)] == list(range(start, stop))
    assert len(blocks) <= max(1, 2 * stop.bit_length())
    for a, b in blocks:
        size = b - a
        assert size & (size - 1) == 0
        assert a % size == 0
        parent = a // (2 * size) * 2 * size
        assert parent < start or parent + 2 * size > stop


@given(partitions(200))
def test_any_partition_has_the_shape_of_the_whole_tree(ends: list[int]) -> None:
    names = [str(i) for i in range(ends[-1])]
    blocks = [
        item
        for start, stop in itertools.pairwise(ends)
        for item in range_blocks(names[start:stop], start, spell)
    ]
    whole = tree_value(names, spell)
    assert join_blocks(blocks, len(names), spell) == whole
    assert join_blocks(reversed(blocks), len(names), spell) == whole


@given(partitions(), st.integers(0, 3))
def test_any_partition_has_the_bits_of_the_contract(ends: list[int], seed: int) -> None:
    leaves = leaves_of(ends[-1], seed)
    whole = reduce_leaves(leaves, "sum", (len(leaves),))
    stacked = torch.stack(leaves, dim=-1)
    ranges = list(itertools.pairwise(ends))
    one_by_one = [item for a, b in ranges for item in range_blocks(leaves[a:b], a, operator.add)]
    at_once = [item for a, b in ranges for item in sum_blocks(stacked[..., a:b], a)]
    assert [block for block, _ in at_once] == [block for block, _ in one_by_one]
    for blocks in (one_by_one, at_once):
        assert_bitwise_equal(join_blocks(blocks, len(leaves), operator.add), whole)


def test_vocabulary_of_128257_tokens_is_split() -> None:
    n = 128257
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(3, n, generator=generator) * 10.0 ** torch.arange(-3, 6, 3)[:, None]
    whole = join_blocks(sum_blocks(values, 0), n, torch.add)
    # The same tree from the leaves up, by padding with what does not change a sum.
    padded = torch.nn.functional.pad(values, (0, (1 << 17) - n), value=-0.0)
    while padded.shape[-1] > 1:
        padded = padded[..., 0::2] + padded[..., 1::2]
    assert_bitwise_equal(whole, padded[..., 0])
    for cuts in ((1, 64128), (32065, 96193), (65536, 128256)):
        ends = [0, *cuts, n]
        blocks = [
            item
            for start, stop in itertools.pairwise(ends)
            for item in sum_blocks(values[..., start:stop], start)
        ]
        assert len(blocks) <= 3 * 2 * 17
        assert_bitwise_equal(join_blocks(blocks, n, torch.add), whole)


def test_sums_keep_dtypes_and_shapes() -> None:
    values = torch.arange(12).reshape(2, 2, 3)
    (block, pair), (_, single) = sum_blocks(values, 4)
    assert block == (4, 6)
    assert (pair.dtype, pair.tolist(), single.shape) == (torch.int64, [[1, 7], [13, 19]], (2, 2))
    assert sum_blocks(torch.zeros(2, 0), 5) == []
    assert sum_blocks(torch.zeros(0, 2), 2)[0][1].shape == (0,)
    negative_zero = torch.full((3,), -0.0)
    assert join_blocks(sum_blocks(negative_zero, 0), 3, torch.add).signbit()


def test_gaps_are_skipped() -> None:
    def of(*ranges: LeafRange, n: int = 16) -> str:
        names = [str(i) for i in range(n)]
        blocks = [item for a, b in ranges for item in range_blocks(names[a:b], a, spell)]
        return join_blocks(blocks, n, spell)

    rows = [of((0, 3), (9, 12)), of((5, 6)), of((1, 2), (15, 16)), of((12, 16)), of((0, 9), n=9)]
    assert_expected_inline(
        "\n".join(rows),
        """\
(((0 1) 2) (9 (10 11)))
5
(1 15)
((12 13) (14 15))
((((0 1) (2 3)) ((4 5) (6 7))) 8)""",
    )
