"""Sums of rounds are those of all micro-batches, for every number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from expecttest import TestCase
from torch import Tensor

from meshplan import Contract, reduce_leaves
from meshplan.definition import combine_leaves
from meshplan.elastic import combine
from meshplan.elastic._combine import TreeSum
from meshplan.elastic._micro_batches import working_ranks
from meshplan.errors import ContractError, ContractTypeError, ElasticError
from meshplan.testing import assert_bitwise_equal, bits, order_sensitive

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
CONTRACTS = (Contract(), Contract(accumulate="float64"), Contract(rounding="node"))


def leaves_of(count: int, dtype: torch.dtype = F32) -> list[Tensor]:
    leaves = [order_sensitive(999, rank=g, world_size=count, dtype=dtype) for g in range(count)]
    leaves[0][:3] = torch.tensor([-0.0, float("nan"), float("inf")])
    for leaf in leaves[1:]:
        leaf[:3] = torch.tensor([-0.0, 1.0, float("inf")])
    return leaves


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda one: one.id)
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("count", [1, 12, 16, 40])
def test_any_number_of_ranks_has_the_bits_of_all_micro_batches(
    count: int, dtype: torch.dtype, contract: Contract
) -> None:
    leaves = leaves_of(count, dtype)
    wanted = reduce_leaves(leaves, "avg", (count,), contract)
    by_tokens = reduce_leaves(leaves, "avg", (count,), contract, divisor=77)
    total = reduce_leaves(leaves, "sum", (count,), contract)
    for ranks in working_ranks(count):
        rounds = [
            combine_leaves(leaves[at : at + ranks], "sum", (ranks,), contract)
            for at in range(0, count, ranks)
        ]
        before = [bits(one).clone() for one in rounds]
        name = f"{ranks} ranks"
        assert_bitwise_equal(combine(rounds, count, "avg", contract, dtype=dtype), wanted, name)
        found = combine(rounds, count, contract=contract, dtype=dtype, divisor=77)
        assert_bitwise_equal(found, by_tokens, name)
        assert_bitwise_equal(combine(rounds, count, "sum", contract, dtype=dtype), total, name)
        assert all(torch.equal(bits(one), old) for one, old in zip(rounds, before, strict=True))
    assert_bitwise_equal(combine(leaves, count, contract=contract), wanted, "one rank")


def test_accumulation_in_order_has_other_bits() -> None:
    """What ``combine`` replaces."""
    leaves = leaves_of(16)[:]
    added = leaves[0].clone()
    for leaf in leaves[1:]:
        added += leaf
    differing = bits(added / 16) != bits(reduce_leaves(leaves, "avg", (16,)))
    assert differing.float().mean() > 0.3


def test_integers_wrap() -> None:
    leaves = [torch.full((3,), 100, dtype=torch.int8) for _ in range(8)]
    assert combine(leaves, 8, "sum").tolist() == [32] * 3


def test_few_rounds_are_kept() -> None:
    """At most log2(n) + 1 of n rounds, the new one included."""
    most = 0
    tree = TreeSum(Contract())
    for count in range(1, 65):
        tree.add([torch.ones(1)], copy=False)
        most = max(most, len(tree._kept))
        assert len(tree._kept) == count.bit_count()
    assert tree.take()[0].item() == 64
    assert most == 6


def test_generator_is_consumed_one_round_at_a_time() -> None:
    def rounds() -> Iterator[Tensor]:
        buffer = torch.empty(5)
        for leaf in leaves_of(8):
            yield buffer.copy_(leaf[:5])

    assert_bitwise_equal(
        combine(rounds(), 8), reduce_leaves([leaf[:5] for leaf in leaves_of(8)], "avg", (8,))
    )


class TestErrors(TestCase):
    maxDiff = None

    def test_calls_that_do_not_fit_are_refused(self) -> None:
        one, node = torch.ones(3), Contract(order="rank")
        wide = torch.ones(2)
        messages = []
        for error, call in (
            (ElasticError, lambda: combine([one] * 3, 16)),
            (ElasticError, lambda: combine([], 12)),
            (ElasticError, lambda: combine([one] * 4, 12)),
            (ElasticError, lambda: combine([one], 0)),
            (ContractError, lambda: combine([one], 1, "max")),  # type: ignore[arg-type]
            (ContractError, lambda: combine([one], 1, "sum", divisor=3)),
            (ContractError, lambda: combine([one], 1, contract=node)),
            (ContractTypeError, lambda: combine([one, wide], 2)),
            (ContractTypeError, lambda: combine([one.to(BF16)] * 2, 4)),
            (ContractTypeError, lambda: combine([one.to(F64)], 1, dtype=F32)),
            (ContractTypeError, lambda: combine([one.to(torch.int32)], 1)),
        ):
            with pytest.raises(error) as caught:
                call()
            messages.append(str(caught.value))
        self.assertExpectedInline(
            "\n".join(messages),
            """\
MP902: got 3 rounds of 16 micro-batches; pass one sum for each round, 16, 8, 4, 2 or 1 of them
MP902: got 0 rounds of 12 micro-batches; pass one sum for each round, 12, 6 or 3 of them
MP902: got 4 rounds of 12 micro-batches; pass one sum for each round, 12, 6 or 3 of them
MP902: 0 micro-batches in a step; pass an integer of at least 1
MP411: no sum over rounds with op='max'; use 'sum' or 'avg'
MP411: divisor=3 with op='sum'; a divisor is a whole number from 1 to 2**63 - 1 and needs op='avg'
MP411: sums under v1/rank/wide/once cannot be made of rounds; use Contract(order='tree')
MP412: round 1 is torch.float32 (2,) on cpu, round 0 is torch.float32 (3,) on cpu; all rounds must match
MP412: rounds of 2 micro-batches are torch.bfloat16, which rounds each of them; pass rounds of torch.float32 and dtype=torch.bfloat16
MP412: rounds are torch.float64, and sums of torch.float32 are torch.float32 under v1/tree/wide/once; pass rounds of torch.float32
MP412: avg of torch.int32 has no exact result, the contract defines avg for floats only; reduce with 'sum' and divide as you need, or convert to a floating dtype first""",
        )
