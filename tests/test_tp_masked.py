"""Masked sums, counts and means: the same bits for any shards of the values."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from meshplan.definition import reduce_leaves
from meshplan.errors import ShardError
from meshplan.testing import assert_bitwise_equal, order_sensitive
from meshplan.testing.tp import (
    active_token_count,
    masked_mean,
    masked_sum,
)
from tests.refusals import refusals
from tests.tp_inputs import DTYPES


def cancelling(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """n values whose sum shows the order of additions."""
    leaves = [order_sensitive(1, rank=i, world_size=n, seed=seed, dtype=dtype) for i in range(n)]
    return torch.cat(leaves)


def test_sums_and_means_of_one_tensor_match() -> None:
    values = torch.tensor([[1.0, 2.0, math.nan], [4.0, -8.0, 16.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    assert masked_sum(values, mask).item() == 23.0
    assert active_token_count(mask).item() == 4.0
    assert active_token_count(None, values).item() == 6.0
    assert masked_mean(values, mask).item() == 5.75
    assert masked_mean(values[1]).item() == 4.0
    assert masked_sum(torch.arange(5)).item() == 10.0
    for found in (masked_sum(values), active_token_count(mask), masked_mean(values, mask)):
        assert (found.dtype, found.shape) == (torch.float32, ())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_sum_is_the_tree_of_the_contract(dtype: torch.dtype) -> None:
    values = cancelling(77, dtype=dtype)
    reduction = torch.float64 if dtype is torch.float64 else torch.float32
    wanted = reduce_leaves(list(values.to(reduction)), "sum", (77,))
    found = masked_sum([values.reshape(7, 11)], reduction_dtype=reduction)
    assert_bitwise_equal(found, wanted)
    if dtype is torch.float32:
        assert masked_sum(values) != values.flip(0).cumsum(0)[-1]


@given(st.data())
def test_any_shards_have_the_same_bits(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    ends = [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=8))), n]
    dtype = data.draw(st.sampled_from(DTYPES))
    reduction = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    values = cancelling(n, data.draw(st.integers(0, 3)), dtype)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    results = []
    for cut in ([0, n], ends):
        pairs = list(itertools.pairwise(cut))
        shards = [values[a:b].clone().requires_grad_() for a, b in pairs]
        masks = [mask[a:b] for a, b in pairs]
        total = masked_sum(shards, masks, reduction_dtype=reduction)
        count = active_token_count(masks, reduction_dtype=reduction)
        average = masked_mean(shards, masks, reduction_dtype=reduction)
        average.backward()
        results.append((total, count, average, torch.cat([shard.grad for shard in shards])))
    for one, other in zip(*results, strict=True):
        assert_bitwise_equal(one, other)
    assert results[0][1].item() == int(mask.sum())
    assert not results[0][3][~mask].any()


def test_sum_and_mean_of_nothing_are_zero() -> None:
    values = [torch.ones(3), torch.full((2,), math.nan), torch.ones(0, 4)]
    masks = [torch.zeros(3), torch.zeros(2), torch.zeros(0, 4)]
    assert_bitwise_equal(masked_sum(values, masks), torch.tensor(0.0))
    assert_bitwise_equal(active_token_count(masks), torch.tensor(0.0))
    assert_bitwise_equal(masked_mean(values, masks), torch.tensor(0.0))
    assert_bitwise_equal(masked_sum(torch.ones(0)), torch.tensor(0.0))
    assert masked_mean(values, masks, eps=0.0).isnan()
    assert masked_mean(torch.ones(2), torch.zeros(2), 0.5).item() == 0.0


def test_mean_has_the_closed_form_gradient() -> None:
    values = torch.tensor([1.0, math.nan, 3.0, math.inf], requires_grad=True)
    mask = torch.tensor([True, False, True, False])
    masked_mean(values, mask).backward()
    assert_bitwise_equal(values.grad, torch.tensor([0.5, 0.0, 0.5, 0.0]))
    half = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    (masked_sum(half) * 2.0).backward()
    assert_bitwise_equal(half.grad, torch.full((3,), 2.0, dtype=torch.bfloat16))


def test_sums_of_special_values_follow_ieee_754() -> None:
    assert masked_sum(torch.tensor([-0.0, -0.0])).signbit()
    nans = torch.tensor([0x7FC00001, 0x3F800000, -1], dtype=torch.int32).view(torch.float32)
    assert masked_sum(nans).view(torch.int32).item() == 0x7FC00000
    assert masked_sum(torch.tensor([math.inf, -math.inf])).isnan()
    assert masked_sum(torch.tensor([[True, False], [True, True]])).item() == 3.0


def test_counts_are_exact() -> None:
    mask = torch.ones(1 << 24, dtype=torch.bool)
    found = active_token_count([mask, torch.ones(3)[:1].bool(), torch.ones(2).bool()])
    assert found.item() == float((1 << 24) + 4)  # 2^24 + 3, to the nearest even float32
    values = [torch.ones(4, 5), torch.ones(0), torch.ones(1)]
    assert active_token_count(None, values).item() == 21.0


def test_invalid_arguments_are_errors() -> None:
    a, meta = torch.ones(2), torch.ones(2, device="meta")
    calls = [
        lambda: masked_sum([]),
        lambda: masked_sum(None),  # type: ignore[arg-type]
        lambda: masked_sum([a, meta]),
        lambda: masked_sum([a, a.half()]),
        lambda: masked_sum([a * 1j]),
        lambda: masked_sum([a], [a, a]),
        lambda: masked_sum([a], [torch.ones(3)]),
        lambda: masked_sum([a], reduction_dtype=torch.int64),
        lambda: masked_sum(torch.ones(2, 3), torch.ones(3)),
        lambda: active_token_count(None),
        lambda: active_token_count([]),
        lambda: active_token_count([a, meta]),
        lambda: active_token_count(None, []),
        lambda: active_token_count(None, [a, meta]),
        lambda: active_token_count([a], [torch.ones(3)]),
        lambda: masked_mean([a], eps=-1.0),
        lambda: masked_mean(a, eps=math.nan),
    ]
    assert_expected_inline(
        refusals(ShardError, calls),
        """\
MP801: values is empty; pass at least one shard
MP801: values is a NoneType; pass a torch.Tensor, or a list of shards
MP801: values[1] is torch.float32 on meta, values[0] is torch.float32 on cpu; pass all shards in one dtype on one device
MP801: values[1] is torch.float16 on cpu, values[0] is torch.float32 on cpu; pass all shards in one dtype on one device
MP801: values is torch.complex64; pass real numbers
MP801: 2 masks for 1 shards of values; pass one mask per shard
MP801: mask has shape (3,), values has shape (2,); pass both in one shape
MP801: reduction_dtype is torch.int64; use one of torch.float32, torch.bfloat16, torch.float16, torch.float64
MP801: mask has shape (3,), values has shape (2, 3); pass both in one shape
MP801: mask is a NoneType; pass a torch.Tensor, or a list of shards
MP801: mask is empty; pass at least one shard
MP801: mask[1] is torch.float32 on meta, mask[0] is torch.float32 on cpu; pass all shards in one dtype on one device
MP801: values is empty; pass at least one shard
MP801: values[1] is torch.float32 on meta, values[0] is torch.float32 on cpu; pass all shards in one dtype on one device
MP801: mask has shape (2,), values has shape (3,); pass both in one shape
MP801: eps is -1.0; pass a finite number, at least zero
MP801: eps is nan; pass a finite number, at least zero""",
    )
