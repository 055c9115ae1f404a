"""A GRPO loss: parallel head, log-probabilities, ratio, k3, mean over micro-batches."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from meshplan.testing import assert_bitwise_equal
from meshplan.testing._ranks import join_blocks, sum_blocks
from meshplan.testing.tp import (
    compute_policy_ratio,
    compute_reference_kl,
    masked_mean,
    selected_logprobs_tp_reference,
)
from tests.tp_inputs import SIZES, random_ranges

BATCH, TOKENS, HIDDEN, VOCABULARY = 6, 5, 24, 131


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def head(hidden: Tensor, weight: Tensor) -> Tensor:
    """``hidden @ weight.T``; each logit by a tree over its products.

    A matrix product may choose its order of additions by the shape of a shard; this one does not.
    """
    products = hidden.unsqueeze(-2) * weight
    return join_blocks(sum_blocks(products, 0), HIDDEN, torch.add)


def terms(current: Tensor, old: Tensor, ref: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Clipped policy loss and penalty of each token, as in GRPO."""
    ratio = compute_policy_ratio(current, old, mask)
    clipped = ratio.clamp(0.8, 1.2)
    policy = -torch.minimum(ratio * advantage, clipped * advantage)
    return policy + 0.05 * compute_reference_kl(current, ref, mask)


def run(
    dtype: torch.dtype, vocabulary: list[tuple[int, int]], rows: list[tuple[int, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, log-probabilities, and the gradient of all logits, put together."""
    hidden = torch.randn(BATCH, TOKENS, HIDDEN, generator=seeded(1)).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=seeded(2)).to(dtype)
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=seeded(3))
    mask = torch.rand(BATCH, TOKENS, generator=seeded(4)) > 0.3
    advantage = torch.randn(BATCH, 1, generator=seeded(5))
    before = -torch.rand(BATCH, TOKENS, generator=seeded(6)) * 8
    values, logps, shards = [], [], []
    for first, last in rows:
        parts = [head(hidden[first:last], weight[a:b]) for a, b in vocabulary]
        shards.append([part.detach().requires_grad_() for part in parts])
        current = selected_logprobs_tp_reference(shards[-1], ids[first:last], mask[first:last])
        old, ref = before[first:last], before[first:last] - 0.07
        values.append(terms(current, old, ref, advantage[first:last], mask[first:last]))
        logps.append(current.detach())
    loss = masked_mean(values, [mask[a:b] for a, b in rows])
    loss.backward()
    gradient = torch.cat([torch.cat([x.grad for x in shard], dim=-1) for shard in shards])
    return loss.detach(), torch.cat(logps), gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_has_the_same_bits_for_any_shards_and_micro_batches(dtype: torch.dtype) -> None:
    whole = run(dtype, [(0, VOCABULARY)], [(0, BATCH)])
    assert whole[2].any(dim=-1).any()
    for size, ends in zip(
        SIZES,
        itertools.cycle(([0, 6], [0, 1, 6], [0, 2, 2, 5, 6], [0, 1, 2, 3, 4, 5, 6])),
        strict=False,
    ):
        found = run(
            dtype, random_ranges(VOCABULARY, size, seed=size), list(itertools.pairwise(ends))
        )
        for name, one, other in zip(("loss", "logps", "gradient"), found, whole, strict=True):
            assert_bitwise_equal(one, other, f"{name} of {size} shards, rows {ends}")
