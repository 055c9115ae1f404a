"""Ranges of a vocabulary, their owners, and invalid arguments."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import ShardError
from meshplan.testing.tp import (
    owner_ranks_for_token_ids,
    shard_logits_by_vocab,
    vocab_shard_ranges,
)
from meshplan.testing.tp._vocab import start_indices
from tests.refusals import refusals


@given(st.integers(1, 300000), st.integers(1, 64))
def test_ranges_fill_the_vocabulary(vocab_size: int, tp_size: int) -> None:
    tp_size = min(tp_size, vocab_size)
    ranges = vocab_shard_ranges(vocab_size, tp_size)
    sizes = [stop - start for start, stop in ranges]
    assert len(ranges) == tp_size
    assert [ranges[0][0], *(stop for _, stop in ranges)] == [
        *(start for start, _ in ranges),
        vocab_size,
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_invalid_sizes_are_errors() -> None:
    sizes = (0, 1), (-3, 1), (4, 0), (4, -1), (4, 5)
    calls = [
        lambda size=size, ranks=ranks: vocab_shard_ranges(size, ranks) for size, ranks in sizes
    ]
    template = "MP801: vocab_size={} and tp_size={}; pass a vocab_size of at least one and a tp_size from 1 to vocab_size"
    assert refusals(ShardError, calls).split("\n") == [template.format(*pair) for pair in sizes]


def test_shards_are_views() -> None:
    logits = torch.arange(20.0).reshape(2, 10)
    shards = shard_logits_by_vocab(logits, 4)
    assert [tuple(shard.shape) for shard in shards] == [(2, 3), (2, 3), (2, 2), (2, 2)]
    assert torch.equal(torch.cat(shards, dim=-1), logits)
    logits[1, 9] = -1.0
    assert shards[3][1, 1] == -1.0
    calls = [
        lambda: shard_logits_by_vocab(torch.tensor(1.0), 1),
        lambda: shard_logits_by_vocab(torch.ones(2, 3), 4),
    ]
    assert_expected_inline(
        refusals(ShardError, calls),
        """\
MP801: logits have shape (); pass the vocabulary in the last dim
MP801: vocab_size=3 and tp_size=4; pass a vocab_size of at least one and a tp_size from 1 to vocab_size""",
    )


def test_tokens_have_owner_ranks() -> None:
    ids = torch.tensor([[0, 2, 3, 5, 6, 8, 9, 11], [-1, -100, 10, 7, 4, 1, 0, 9]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 3] = False
    ranges = vocab_shard_ranges(10, 4)
    owners = owner_ranks_for_token_ids(ids, ranges, mask)
    assert owners.dtype is torch.int64
    assert owners.tolist() == [[0, 0, 1, -1, 2, 3, 3, -1], [-1, -1, -1, 2, 1, 0, 0, 3]]
    small = owner_ranks_for_token_ids(ids.to(torch.int16), ranges, mask.float())
    assert torch.equal(small, owners)
    assert owner_ranks_for_token_ids(ids[0, :4], ranges).tolist() == [0, 0, 1, 1]


def test_ranges_may_be_unordered_empty_and_have_gaps() -> None:
    ids = torch.arange(8)
    owners = owner_ranks_for_token_ids(ids, [(5, 8), (0, 2), (1, 1), (3, 4)])
    assert owners.tolist() == [1, 1, -1, 3, -1, 0, 0, 0]
    assert owner_ranks_for_token_ids(ids, []).tolist() == [-1] * 8


def test_invalid_ranges_ids_and_masks_are_errors() -> None:
    ids = torch.tensor([0, 1])
    calls = [
        lambda: owner_ranks_for_token_ids(ids, [(0, 5), (4, 8)]),
        lambda: owner_ranks_for_token_ids(ids, [(4, 8), (0, 9)]),
        lambda: owner_ranks_for_token_ids(ids, [(0, 4), (0, 4)]),
        lambda: owner_ranks_for_token_ids(ids, [(-1, 4)]),
        lambda: owner_ranks_for_token_ids(ids, [(0, 2), (4, 3)]),
        lambda: owner_ranks_for_token_ids(ids, [(0, 4)], torch.ones(3)),
        lambda: owner_ranks_for_token_ids(ids.float(), [(0, 4)]),
        lambda: owner_ranks_for_token_ids(ids.bool(), [(0, 4)]),
        lambda: owner_ranks_for_token_ids([0, 1], [(0, 4)]),  # type: ignore[arg-type]
    ]
    assert_expected_inline(
        refusals(ShardError, calls),
        """\
MP801: shard_ranges[0] is [0, 5) and shard_ranges[1] is [4, 8), they overlap; assign each token of the vocabulary to one rank
MP801: shard_ranges[1] is [0, 9) and shard_ranges[0] is [4, 8), they overlap; assign each token of the vocabulary to one rank
MP801: shard_ranges[0] is [0, 4) and shard_ranges[1] is [0, 4), they overlap; assign each token of the vocabulary to one rank
MP801: shard_ranges[0] is [-1, 4); use 0 <= start <= stop, stop excluded
MP801: shard_ranges[1] is [4, 3); use 0 <= start <= stop, stop excluded
MP801: mask has shape (3,), token_ids has shape (2,); pass both in one shape
MP801: token_ids are torch.float32; pass integers
MP801: token_ids are torch.bool; pass integers
MP801: token_ids is a list; pass a torch.Tensor""",
    )


def test_start_indices_must_be_sorted_and_disjoint() -> None:
    shards = [torch.ones(2, 3), torch.ones(2, 1), torch.ones(2, 4)]
    assert start_indices(None, shards) == [0, 3, 4]
    assert start_indices([0, 3, 4], shards) == [0, 3, 4]
    assert start_indices(torch.tensor([2, 6, 9]), shards) == [2, 6, 9]
    calls = [
        lambda starts=starts: start_indices(starts, shards)
        for starts in ([0, 3], [0, 3, -4], [0, 4, 3], [0, 2, 4], [0, 0, 4])
    ]
    assert_expected_inline(
        refusals(ShardError, calls),
        """\
MP801: 2 vocab_start_indices for 3 logit_shards; pass one per shard
MP801: vocab_start_indices are [0, 3, -4]; pass indices of 0 or more
MP801: vocab_start_indices are [0, 4, 3]; pass the shards sorted by their first token
MP801: logit_shards[0] is [0, 3) and logit_shards[1] is [2, 3), they overlap; assign each token of the vocabulary to one rank
MP801: logit_shards[1] is [0, 1) and logit_shards[0] is [0, 3), they overlap; assign each token of the vocabulary to one rank""",
    )
