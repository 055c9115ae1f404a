"""The references over real ranks: each holds one shard, all return the same bits.

Only facts, values of subtrees and whole numbers travel; every sum of floats is made on every rank,
by the tree that the functions for shards at hand use, and so the bits are theirs. A collective of
the backend is trusted with moving data and with the sum and maximum of integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.errors import ShardError
from meshplan.testing._bitwise import bits
from meshplan.testing._segments import Block, joined, tensor_blocks
from meshplan.testing.tp._checks import (
    active_tokens,
    check_dtypes,
    check_eps,
    checked_logit_shards,
    checked_values,
)
from meshplan.testing.tp._exchange import (
    Options,
    check_alike,
    check_member,
    digest,
    exchanged_blocks,
    exchanged_facts,
    group_ranks,
    largest,
    total,
)
from meshplan.testing.tp._logprobs import Problem, selected_logprobs
from meshplan.testing.tp._masked import leaves, mean, tree_sum
from meshplan.testing.tp._vocab import check_coverage

__all__ = [
    "selected_logprobs_distributed_tp_reference",
    "distributed_masked_sum",
    "distributed_active_token_count",
    "distributed_masked_mean",
]


def selected_logprobs_distributed_tp_reference(
    local_logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    vocab_start_index: int,
    group: Any | None = None,
    temperature: float = 1.0,
    output_dtype: torch.dtype = torch.float32,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``selected_logprobs_tp_reference`` where each rank of ``group`` holds one shard.

    Every rank of the group must call it, with the same tokens, mask and options. The shards must
    fill the vocabulary from zero on, each token once; their order need not be that of the ranks.
    The result has the same bits on all ranks, for any number of ranks and any cuts. Its gradient
    with respect to ``local_logits`` is that of a loss which every rank computes alike from the
    result; nothing is exchanged for it.

    Args:
        local_logits: floats [*tokens, part of the vocabulary] of this rank.
        token_ids: integers [*tokens] over the whole vocabulary; anything where the mask is off.
        mask: [*tokens]; without it all tokens are active.
        vocab_start_index: the first token of this rank's shard.
        group: a process group of any backend that takes the logits' device; by default all ranks.
        temperature, output_dtype, reduction_dtype: as for ``selected_logprobs_tp_reference``.

    Raises:
        GroupStateError: torch.distributed is not initialised, or this rank is not in the group.
        ShardError: on every rank: one of them refused its arguments, or shards overlap or leave
            out a part of the vocabulary.
        TokenCoverageError: on every rank: an active token is not held by exactly one shard.
        SignatureMismatchError: on every rank: tokens, masks, dtypes or options differ.
        ContractStateError: the CPU of this rank flushes subnormal numbers to zero; ShardError on
            the others.
    """
    check_member(group)
    problems: list[Problem] = []

    def own() -> tuple[Options, Block]:
        start, options = int(vocab_start_index), (temperature, output_dtype, reduction_dtype)
        if start < 0:
            raise ShardError(f"vocab_start_index is {start}; write an index from zero on")
        checked_logit_shards([local_logits], token_ids)
        problem = Problem.of([local_logits], [start], token_ids, mask, *options)
        problems.append(problem)
        alike = {
            "dtypes of logits": str(local_logits.dtype),
            "temperatures": repr(problem.temperature),
            "output_dtypes": str(output_dtype),
            "reduction_dtypes": str(reduction_dtype),
            "masks": digest(problem.active),
            "token_ids under the mask": digest(problem.ids.masked_fill(~problem.active, 0)),
        }
        return alike, (start, start + local_logits.shape[-1])

    facts = exchanged_facts(own, group)
    check_alike([options for options, _ in facts], group)
    (problem,) = problems
    covered = total(problem.covered_by([local_logits]), group)
    check_coverage(problem.ids, problem.active, covered)
    ranges = [shard for _, shard in facts]
    _check_filled(ranges, group)
    return selected_logprobs(problem, _OverRanks(ranges, group), [local_logits])


def distributed_masked_sum(
    local_values: Tensor,
    local_mask: Tensor | None = None,
    *,
    group: Any | None = None,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``sharded_masked_sum`` where each rank of ``group`` holds one shard, in the group's order.

    Every rank of the group must call it; shapes may differ and may be empty. The result has the
    same bits on all ranks, those of ``masked_sum`` over the flattened shards one after the other.
    Its gradient with respect to ``local_values`` is that of a loss which every rank computes alike
    from the result; nothing is exchanged for it.

    Args:
        local_values: real numbers of any shape.
        local_mask: of the same shape; without it all elements of this rank are active.
        group: a process group of any backend that takes the values' device; by default all ranks.
        reduction_dtype: of all additions and of the result.

    Returns:
        Scalar of ``reduction_dtype`` on the device of ``local_values``.

    Raises:
        GroupStateError: torch.distributed is not initialised, or this rank is not in the group.
        ShardError: on every rank: one of them refused its arguments.
        SignatureMismatchError: on every rank: dtypes differ.
        ContractStateError: the CPU of this rank flushes subnormal numbers to zero; ShardError on
            the others.
    """
    return _Tokens.of(local_values, local_mask, reduction_dtype, group).sum()


def distributed_active_token_count(
    local_mask: Tensor | None = None,
    *,
    local_values: Tensor | None = None,
    group: Any | None = None,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """How many elements are active on all ranks of ``group``: of the masks, or of the values.

    Every rank of the group must call it. Counted in integers, rounded to ``reduction_dtype`` once.

    Args:
        local_mask: any shape; what is not zero is active.
        local_values: of the same shape.
        group: as for ``distributed_masked_sum``.
        reduction_dtype: of the result.

    Returns:
        Scalar of ``reduction_dtype`` on the device of what was counted.

    Raises:
        GroupStateError, ShardError, SignatureMismatchError, ContractStateError: as
            ``distributed_masked_sum``; and ShardError for neither mask nor values on a rank.
    """
    counted = local_mask if local_values is None else local_values
    return _Tokens.of(counted, local_mask, reduction_dtype, group, summed=False).count()


def distributed_masked_mean(
    local_values: Tensor,
    local_mask: Tensor | None = None,
    *,
    group: Any | None = None,
    eps: float = 1e-8,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``distributed_masked_sum`` divided by the count of all ranks, taken for at least ``eps``.

    Args:
        local_values, local_mask, group, reduction_dtype: as for ``distributed_masked_sum``.
        eps: least denominator, so that the mean of nothing is 0; with 0 it is NaN.

    Raises:
        GroupStateError, ShardError, SignatureMismatchError, ContractStateError: as
            ``distributed_masked_sum``; and ShardError for an ``eps`` that is negative or not
            finite, SignatureMismatchError for one that differs.
    """
    tokens = _Tokens.of(local_values, local_mask, reduction_dtype, group, eps=eps)
    return mean(tokens.sum(), tokens.count(), float(eps))


@dataclass(frozen=True)
class _OverRanks:
    """The exchange of ranks that hold one shard each."""

    ranges: Sequence[Block]
    group: Any

    def maximum(self, local: Tensor) -> Tensor:
        return largest(local, self.group)

    def total(self, blocks: list[tuple[Block, Tensor]]) -> Tensor:
        like = blocks[0][1]
        everywhere = exchanged_blocks(blocks, self.ranges, like, self.group)
        return joined(everywhere, max(stop for _, stop in self.ranges), torch.add)

    def selected(self, local: Tensor, owned: Tensor) -> Tensor:
        # One rank gives the bits of the value, all others zero.
        pattern = bits(local)
        found = total(pattern.to(torch.int64).masked_fill(~owned, 0), self.group)
        return found.to(pattern.dtype).view(local.dtype)


@dataclass(frozen=True)
class _Tokens:
    """Values and masks of the ranks of a group, agreed on.

    ``values`` and ``active`` are this rank's, of one shape; ``sizes`` are those of all ranks.
    """

    values: Tensor
    active: Tensor
    sizes: Sequence[int]
    dtype: torch.dtype
    group: Any

    @staticmethod
    def of(
        values: Tensor | None,
        mask: Tensor | None,
        dtype: torch.dtype,
        group: Any,
        *,
        summed: bool = True,
        eps: float = 0.0,
    ) -> _Tokens:
        """What all ranks were given; ``summed`` if values are added up, and not only counted."""
        check_member(group)

        def own() -> tuple[Options, int]:
            check_dtypes(dtype)
            check_eps(eps)
            if values is None:
                raise ShardError("neither values nor a mask; give at least one of them")
            (plain,) = checked_values([values], "local_values")
            active.append(active_tokens(mask, plain, "local_values"))
            alike = {"reduction_dtypes": str(dtype), "eps": repr(float(eps))}
            if summed:
                alike["dtypes of values"] = str(plain.dtype)
            return alike, plain.numel()

        active: list[Tensor] = []
        facts = exchanged_facts(own, group)
        check_alike([options for options, _ in facts], group)
        assert values is not None
        return _Tokens(values, active[0], [size for _, size in facts], dtype, group)

    def sum(self) -> Tensor:
        """The sum over all ranks; differentiable with respect to ``values``."""
        return tree_sum(leaves(self.values, self.active, self.dtype), self._over_ranks)

    def count(self) -> Tensor:
        """How many elements are active on all ranks."""
        return total(self.active.sum(dtype=torch.int64), self.group).to(self.dtype)

    def _over_ranks(self, flat: Tensor) -> Tensor:
        ends = list(itertools.accumulate(self.sizes, initial=0))
        if ends[-1] == 0:
            return flat.new_zeros(())
        blocks = tensor_blocks(flat, ends[dist.get_rank(self.group)])
        ranges = list(itertools.pairwise(ends))
        everywhere = exchanged_blocks(blocks, ranges, flat.new_zeros(()), self.group)
        return joined(everywhere, ends[-1], torch.add)


def _check_filled(ranges: Sequence[Block], group: Any) -> None:
    ranks = group_ranks(group)
    end, before = 0, -1
    for (start, stop), rank in sorted(zip(ranges, ranks, strict=True)):
        if start < end:
            raise ShardError(
                f"the shard [{start}, {stop}) of rank {rank} overlaps that of rank {before}, which "
                f"ends at {end}; give each token of the vocabulary to one rank"
            )
        if start > end:
            raise ShardError(
                f"no rank holds the tokens {end} to {start - 1} of the vocabulary, the shard "
                f"[{start}, {stop}) of rank {rank} comes next; give each token to one rank"
            )
        end, before = stop, rank
