"""Records, integers and values of subtrees that ranks exchange."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meshplan.testing import assert_bitwise_equal
from meshplan.testing._ranks import RankGroup
from tests.processes import run_ranks
from tests.tp_inputs import DTYPES


def of_rank(rank: int, dtype: torch.dtype) -> Tensor:
    rows = [
        [1.0, -1.0, -math.inf, 0.0, math.nan, 2.0, -3.0],
        [0.5, -2.0, -math.inf, -5.0, 1.0, math.inf, -3.0],
        [1.5, -0.5, -math.inf, -math.inf, -math.inf, 3.0, -4.0],
    ]
    return torch.tensor(rows[rank], dtype=dtype)


def check_reductions(rank: int) -> None:
    ranks = RankGroup(None)
    for dtype in (*DTYPES, torch.float64):
        found = ranks.max_floats(of_rank(rank, dtype))
        wanted = torch.stack([of_rank(r, dtype) for r in range(3)]).amax(dim=0)
        assert_bitwise_equal(found, wanted)
    big = torch.tensor([2**62, -(2**62), rank])
    total = ranks.sum_integers(big if rank == 1 else big * 0 + rank)
    assert total.tolist()[:2] == [2**62 + 2, 2 - 2**62]
    assert big.tolist() == [2**62, -(2**62), rank]


@pytest.mark.processes
def test_maxima_and_integers_are_exact() -> None:
    run_ranks(check_reductions, 3)
