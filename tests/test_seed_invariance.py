"""One row of a batch does not depend on the batch that it comes in, nor on the call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshplan import DeterministicAllReduceConfig, deterministic_all_reduce
from meshplan.testing import bits, order_sensitive
from tests.processes import run_ranks

pytestmark = [pytest.mark.timeout(180), pytest.mark.processes]

RANKS = 4
HIDDEN = 16384
TRIALS = 10
BATCHES = (*range(1, 9), 13, 16, 25, 32, 49, 50)


def row(rank: int, number: int, dtype: torch.dtype) -> Tensor:
    return order_sensitive(HIDDEN, rank=rank, world_size=RANKS, dtype=dtype, seed=number)


def first_rows(rank: int, mode: str, dtype: torch.dtype) -> tuple[int, int]:
    """How many different first rows: over calls with one batch, and over batches of all sizes."""
    config = DeterministicAllReduceConfig(mode=mode)  # type: ignore[arg-type]
    rows = torch.stack([row(rank, number, dtype) for number in range(4)])
    same, varying = set(), set()
    for _ in range(TRIALS):
        batch = deterministic_all_reduce(rows.clone(), config)
        assert isinstance(batch, Tensor)
        same.add(bits(batch).numpy().tobytes())
    for size in BATCHES:
        batch = rows[torch.arange(size) % 4]
        deterministic_all_reduce(batch, config)
        varying.add(bits(batch[0]).numpy().tobytes())
        # The same row again, at another place of the message.
        varying.update(bits(again).numpy().tobytes() for again in batch[::4])
    return len(same), len(varying)


@pytest.mark.parametrize("mode", ["ordered_rank_reference", "one_shot", "two_shot", "exchange"])
def test_sg_18_same_batch_and_varying_batch(mode: str) -> None:
    """SG-02: no order that depends on which rank owns an element. SG-01: nor on who asks."""

    def ranks(rank: int) -> list[tuple[int, int]]:
        return [first_rows(rank, mode, dtype) for dtype in (torch.bfloat16, torch.float32)]

    assert run_ranks(ranks, RANKS, timeout=150) == [[(1, 1)] * 2] * RANKS


def test_sg_19_contrast() -> None:
    """The backend's own all-reduce: an element's bits move with its place in the message."""

    def ranks(rank: int) -> tuple[int, int]:
        return first_rows(rank, "torch_all_reduce", torch.float32)

    found = run_ranks(ranks, RANKS, timeout=150)
    assert found == [found[0]] * RANKS
    same, varying = found[0]
    assert same == 1
    assert varying > 1
