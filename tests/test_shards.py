"""``deterministic_reduce_scatter`` and ``deterministic_all_gather`` over real processes."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor

import meshplan
from meshplan import (
    deterministic_all_gather,
    deterministic_all_reduce,
    deterministic_reduce_scatter,
)
from meshplan.collectives import Work
from meshplan.errors import SignatureMismatchError
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.marks import full
from tests.processes import run_ranks
from tests.refusals import refusal

pytestmark = pytest.mark.processes

RANKS = 3
PATHS = ("auto", "one_shot", "two_shot", "exchange", "halving", "reference")


def leaf(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    numel = torch.Size(shape).numel()
    drawn = order_sensitive(numel, rank=rank, world_size=RANKS, dtype=dtype, specials=True)
    return drawn.view(shape)


def read_result(found: Tensor | Work) -> Tensor:
    if isinstance(found, Work):
        value = found.result()
        assert isinstance(value, Tensor)
        return value
    return found


def lengths(length: int, sizes: list[int] | None) -> list[int]:
    if sizes is not None:
        return sizes
    chunks = [len(part) for part in torch.arange(length).chunk(RANKS)] if length else []
    return chunks + [0] * (RANKS - len(chunks))


@pytest.mark.parametrize("op", ["sum", full("avg")])
def test_a_shard_has_the_bits_of_the_all_reduce(op: Any) -> None:
    """Even, as by ``torch.chunk``, by explicit sizes, empty ones among them; and back again."""

    def ranks(rank: int) -> int:
        count = 0
        for path, dtype, shape in itertools.product(
            PATHS, (torch.float32, torch.bfloat16), ((7, 5), (1, 4, 2), (1,))
        ):
            summand = leaf(rank, shape, dtype)
            kept = summand.clone()
            config: dict[str, Any] = {"path": path, "op": op}
            whole = deterministic_all_reduce(summand.clone(), **config)
            assert isinstance(whole, Tensor)
            for dim in range(-len(shape), len(shape)):
                n = shape[dim]
                for sizes in (None, [0, n, 0], [n - n // 2, 0, n // 2]):
                    cut = lengths(n, sizes)
                    for async_op in (False, True) if dim == 0 else (False,):
                        shard = read_result(
                            deterministic_reduce_scatter(
                                summand, op=op, dim=dim, sizes=sizes, path=path, async_op=async_op
                            )
                        )
                        assert_bitwise_equal(summand, kept, "the summand")
                        wanted = whole.narrow(dim, sum(cut[:rank]), cut[rank]).contiguous()
                        assert shard.is_contiguous()
                        assert_bitwise_equal(shard, wanted, f"{path} {shape} {dim} {sizes}")
                        back = read_result(
                            deterministic_all_gather(shard, dim=dim, sizes=cut, async_op=async_op)
                        )
                        assert back.is_contiguous()
                        assert_bitwise_equal(back, whole, f"{path} {shape} {dim} {sizes}")
                        count += 1
        return count

    found = run_ranks(ranks, RANKS)
    assert found == [found[0]] * RANKS
    assert found[0] > 200


def test_a_gather_moves_any_dtype() -> None:
    def ranks(rank: int) -> bool:
        for dtype in (
            torch.bool,
            torch.uint8,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.bfloat16,
            torch.int64,
            torch.complex64,
            torch.complex128,
        ):
            shards = [torch.arange(6 * r, 6 * r + 6).view(2, 3).to(dtype) for r in range(RANKS)]
            found = deterministic_all_gather(shards[rank], dim=1)
            assert isinstance(found, Tensor)
            assert found.dtype is dtype
            wanted = torch.cat([shard.view(torch.uint8) for shard in shards], 1)
            assert torch.equal(found.view(torch.uint8), wanted)
        # Signs of zeros and payloads of NaNs are bits like others.
        odd = torch.tensor([-0.0, 0.0], dtype=torch.float32)
        odd.view(torch.int32)[1] = 0x7FC00000 + rank + 1
        found = deterministic_all_gather(odd)
        assert isinstance(found, Tensor)
        assert found.view(torch.int32)[1::2].tolist() == [0x7FC00001, 0x7FC00002, 0x7FC00003]
        assert found.view(torch.int32)[::2].tolist() == [-(2**31)] * 3
        # A conjugated view is gathered with its conjugated values.
        turned = torch.full((1,), complex(rank, 1)).conj()
        found = deterministic_all_gather(turned)
        assert isinstance(found, Tensor)
        assert found.tolist() == [complex(r, -1) for r in range(RANKS)]
        for shape in ((0, 3), (2, 0)):
            found = deterministic_all_gather(torch.empty(shape), dim=0)
            assert isinstance(found, Tensor)
            assert found.shape == (3 * shape[0], shape[1])
        return True

    assert all(run_ranks(ranks, RANKS))


class TestReport(TestCase):
    def test_shards_are_reported(self) -> None:
        def ranks(rank: int) -> str:
            shard = deterministic_reduce_scatter(torch.ones(4, 4), op="avg", dim=1, path="exchange")
            assert isinstance(shard, Tensor)
            deterministic_all_gather(shard, dim=1)
            assert [one["kind"] for one in meshplan.report(json=True)["entries"]] == [
                "collective"
            ] * 2
            return re.sub(r"\d\.\d{3} s", "0.001 s", str(meshplan.report()))

        self.assertExpectedInline(
            run_ranks(ranks, 2)[0],
            """\
1 x collective deterministic_reduce_scatter avg of dim 1 float32
    planned: reduce_scatter avg over 2 ranks, exchange, contract v1/tree/wide/once
    ran: exchange (all_to_all_single), contract v1/tree/wide/once: path exchange
    on: group 0 of 2 ranks
    16 elements each, 64 B in all, 0.001 s until it returned
1 x collective deterministic_all_gather along dim 1 float32
    planned: all_gather of 2 ranks
    ran: all_gather (all_to_all_single + all_gather_into_tensor), nothing is added: bytes are moved
    on: group 0 of 2 ranks
    8 elements each, 32 B in all, 0.001 s until it returned""",
        )


class TestMismatchErrors(TestCase):
    def test_debug_names_the_different_tensor(self) -> None:
        def ranks(rank: int) -> list[str]:
            said = []
            for run in (
                lambda: deterministic_reduce_scatter(
                    torch.ones(4), sizes=[4 - rank, rank], debug=True
                ),
                lambda: deterministic_all_gather(torch.ones(2 + rank), debug=True),
            ):
                said.append(refusal(SignatureMismatchError, run))
            return said

        first, second = run_ranks(ranks, 2)[0]
        self.assertExpectedInline(
            first,
            """MP703: rank 1 called a reduction over ranks 0, 1 with tensor float32[4], call deterministic_reduce_scatter of dim 0 to (3, 1) by auto, sum, v1/tree/wide/once, this rank 0 with tensor float32[4], call deterministic_reduce_scatter of dim 0 to (4, 0) by auto, sum, v1/tree/wide/once. Different: call deterministic_reduce_scatter of dim 0 to (3, 1) by auto, sum, v1/tree/wide/once (rank 1), deterministic_reduce_scatter of dim 0 to (4, 0) by auto, sum, v1/tree/wide/once (rank 0). Nothing was sent: every rank must pass the same shape, dtype, operation and contract""",
        )
        self.assertExpectedInline(
            second,
            """MP703: rank 1 called a reduction over ranks 0, 1 with tensor float32[0], call deterministic_all_gather to [6] of (3, 3), this rank 0 with tensor float32[0], call deterministic_all_gather to [4] of (2, 2). Different: call deterministic_all_gather to [6] of (3, 3) (rank 1), deterministic_all_gather to [4] of (2, 2) (rank 0). Nothing was sent: every rank must pass the same shape, dtype, operation and contract""",
        )
