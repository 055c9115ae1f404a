"""Logits, shard ranges and tokens for the tests of ``meshplan.testing.tp``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 2, 3, 4, 5, 7, 8)


def logits_of(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 3.0
) -> Tensor:
    """Random logits; the sums of their exponentials show the order of additions."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def random_ranges(size: int, parts: int, seed: int) -> list[tuple[int, int]]:
    """Consecutive ranges of at least one position, of random sizes."""
    cuts = random.Random(seed).sample(range(1, size), parts - 1)
    return list(itertools.pairwise([0, *sorted(cuts), size]))


def boundary_tokens(ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The first and the last token of each shard: int64 [2 * shards]."""
    return torch.tensor([token for start, stop in ranges for token in (start, stop - 1)])


def split(tensor: Tensor, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Leaf copies of the parts of the last dim, whose gradients are compared."""
    return [tensor[..., a:b].detach().clone().requires_grad_() for a, b in ranges]
