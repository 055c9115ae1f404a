"""Parts of a global batch for ranks."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from meshplan.errors import ContractError
from meshplan.testing.dp import split_batch
from meshplan.testing.dp._leaves import copy_range
from tests.refusals import refusals


@pytest.mark.parametrize(
    ("samples", "world", "leaf", "sizes"),
    [
        (8, 1, 1, [8]),
        (8, 4, 1, [2, 2, 2, 2]),
        (10, 4, 1, [3, 3, 2, 2]),
        (2, 5, 1, [1, 1, 0, 0, 0]),
        (14, 3, 2, [6, 4, 4]),
    ],
)
def test_parts_cover_the_batch_in_order(
    samples: int, world: int, leaf: int, sizes: list[int]
) -> None:
    batch = {"x": torch.arange(samples), "y": (torch.ones(samples, 2), [None, "word"])}
    parts = split_batch(batch, world, uneven=True, samples_per_leaf=leaf)
    assert [len(part["x"]) for part in parts] == sizes
    assert [len(part["y"][0]) for part in parts] == sizes
    assert torch.cat([part["x"] for part in parts]).tolist() == list(range(samples))
    assert all(part["y"][1] == [None, "word"] for part in parts)
    if len(set(sizes)) == 1:
        assert [len(p["x"]) for p in split_batch(batch, world, samples_per_leaf=leaf)] == sizes


def test_batches_that_do_not_divide_are_errors() -> None:
    calls = [
        lambda: split_batch(torch.ones(10, 2), 4),
        lambda: split_batch(torch.ones(12, 2), 4, samples_per_leaf=2),
        lambda: split_batch(torch.ones(3, 2), 2, samples_per_leaf=2, uneven=True),
        lambda: split_batch(torch.ones(3, 2), 1, samples_per_leaf=0),
        lambda: split_batch(torch.ones(3, 2), 0),
        lambda: split_batch((torch.ones(3, 2), {"y": torch.ones(4)}), 1),
        lambda: split_batch((torch.ones(3, 2), torch.tensor(1.0)), 1),
        lambda: split_batch([None, 3], 1),
    ]
    assert_expected_inline(
        refusals(ContractError, calls),
        """\
MP411: a batch of 10 samples does not divide by 4 ranks, 2 would be left over; pass another batch, or uneven=True for parts that differ by one
MP411: a batch of 12 samples in leaves of 2 does not divide by 4 ranks, 2 would be left over; pass another batch, or uneven=True for parts that differ by one
MP411: 3 samples are not a multiple of samples_per_leaf=2, and a leaf of another size has other bits; pass a multiple on every rank
MP411: samples_per_leaf=0; pass the number of samples of a leaf, at least 1
MP411: world=0; pass the number of ranks, at least 1
MP411: the first dim of every tensor of a batch counts the samples, got shapes (3, 2), (4,); pass e.g. inputs of (8, 3) and targets of (8,)
MP411: the first dim of every tensor of a batch counts the samples, got shapes (3, 2), (); pass e.g. inputs of (8, 3) and targets of (8,)
MP411: a batch without tensors has no samples; pass e.g. inputs [8, 3]""",
    )


def test_copies_of_samples_have_one_memory_layout() -> None:
    batch = torch.arange(120.0).reshape(4, 5, 6).transpose(1, 2).requires_grad_()
    for start in range(4):
        sample = copy_range((batch,), start, start + 1)[0]
        assert sample.tolist() == batch[start : start + 1].tolist()
        assert sample.stride() == (30, 5, 1)
        assert sample.storage_offset() == 0
        assert sample.data_ptr() % 64 == 0
        assert not sample.requires_grad
