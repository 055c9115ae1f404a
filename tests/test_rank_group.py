"""Records, integers and values of subtrees that ranks exchange."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor

from meshplan.errors import GroupStateError, ShardError, SignatureMismatchError
from meshplan.testing import assert_bitwise_equal
from meshplan.testing._ranks import RankGroup, join_blocks, sum_blocks
from tests.processes import run_ranks
from tests.refusals import refusal
from tests.tp_inputs import DTYPES, logits_of


def test_missing_process_group_is_an_error() -> None:
    assert_expected_inline(
        refusal(GroupStateError, RankGroup, None),
        """MP503: no process group is initialised; call torch.distributed.init_process_group first""",
    )


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


def check_blocks(rank: int) -> None:
    values = logits_of(2, 3, 37, seed=1)
    for ends in ([0, 5, 5, 37], [0, 0, 0, 37], [0, 36, 36, 37], [0, 11, 22, 37]):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            data = values.to(dtype)
            ranges = list(itertools.pairwise(ends))
            start, stop = ranges[rank]
            blocks = sum_blocks(data[..., start:stop], start)
            everywhere = RankGroup(None).gather_blocks(blocks, ranges, data[..., 0])
            whole = join_blocks(sum_blocks(data, 0), 37, torch.add)
            assert_bitwise_equal(join_blocks(everywhere, 37, torch.add), whole)
    none = sum_blocks(values[:0, :, rank * 10 : rank * 10 + 10], rank * 10)
    ranges = [(0, 10), (10, 20), (20, 30)]
    for _, value in RankGroup(None).gather_blocks(none, ranges, values[:0, :, 0]):
        assert value.shape == (0, 3)


def check_errors(rank: int) -> list[str]:
    """Messages of this rank, where one or two ranks raise."""
    ranks = RankGroup(None)
    assert ranks.run(lambda: (None, rank * 10), ShardError) == (None, [0, 10, 20])
    found = []

    def refuse(*who: int, error: Exception) -> tuple[int, int]:
        if rank in who:
            raise error
        return rank, rank

    for who, error in (
        ((1,), ShardError("three is too few")),
        ((0, 2), KeyError("size")),
        ((2,), RuntimeError()),
    ):
        with pytest.raises((ShardError, KeyError, RuntimeError)) as caught:
            ranks.run(lambda who=who, error=error: refuse(*who, error=error), ShardError)
        found.append(f"{type(caught.value).__name__}: {caught.value}".strip(": "))
    with pytest.raises(SignatureMismatchError) as mismatch:
        ranks.check_equal([{"a": "1", "b": str(r // 2)} for r in range(3)])
    assert mismatch.value.rank == (0 if rank == 2 else 2)
    found.append(str(mismatch.value))
    ranks.check_equal([{"a": "1"}] * 3)
    # All ranks are still at the same place.
    assert ranks.sum_integers(torch.tensor([1])).item() == 3
    return found


def check_group(rank: int) -> str:
    group = dist.new_group([2, 0])
    if rank == 1:
        return refusal(GroupStateError, RankGroup, group)
    ranks = RankGroup(group)
    assert ranks.gather_records(rank) == ranks.ranks
    assert ranks.ranks[ranks.position] == rank
    return str(sorted(ranks.ranks))


def check_all(rank: int) -> tuple[list[str], str]:
    check_reductions(rank)
    check_blocks(rank)
    return check_errors(rank), check_group(rank)


@pytest.mark.processes
def test_exchange_over_ranks() -> None:
    results = run_ranks(check_all, 3)
    rows = []
    for rank, (messages, of_group) in enumerate(results):
        rows += [f"rank {rank}: {message}" for message in (*messages, of_group)]
    assert_expected_inline(
        "\n".join(rows),
        """\
rank 0: ShardError: MP801: rank 1 raised ShardError: MP801: three is too few; all ranks of the group stopped
rank 0: KeyError: 'size'
rank 0: ShardError: MP801: rank 2 raised RuntimeError; all ranks of the group stopped
rank 0: MP703: ranks differ in b: 0 on rank 0, 1 on rank 2; pass the same on all ranks
rank 0: [0, 2]
rank 1: ShardError: MP801: three is too few
rank 1: ShardError: MP801: rank 0 raised KeyError: 'size'; all ranks of the group stopped
rank 1: ShardError: MP801: rank 2 raised RuntimeError; all ranks of the group stopped
rank 1: MP703: ranks differ in b: 0 on rank 0, 1 on rank 2; pass the same on all ranks
rank 1: MP503: rank 1 is not in the group; call this on the group's members only
rank 2: ShardError: MP801: rank 1 raised ShardError: MP801: three is too few; all ranks of the group stopped
rank 2: KeyError: 'size'
rank 2: RuntimeError
rank 2: MP703: ranks differ in b: 0 on rank 0, 1 on rank 2; pass the same on all ranks
rank 2: [0, 2]""",
    )
