"""Log-probabilities of selected tokens, from a vocabulary in one piece or in shards.

With x the logits in the reduction dtype, divided by the temperature, the result for token t is

    (x[t] - m) - log(s),   m = max over v of x[v],   s = sum over v of exp(x[v] - m)

with s by the contract's tree over the ids v of the vocabulary. Everything else is done element by
element, so that the bits of s do not depend on where the vocabulary is cut, and with s nothing
does. The rank that holds t must not take a logarithm of its own sum only, and an average of such
logarithms over ranks is no logarithm of a sum.

The gradient is the closed form, g * ((v == t) - exp(x[v] - m) / s) / temperature. It is again done
element by element, and no rank needs more for it than m, s and its own logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshplan.errors import ShardError
from meshplan.testing._segments import Block, joined, tensor_blocks
from meshplan.testing.tp._checks import (
    active_tokens,
    check_dtypes,
    check_temperature,
    checked_ids,
    checked_logit_shards,
)
from meshplan.testing.tp._math import exp, log, without_nan_payload
from meshplan.testing.tp._vocab import check_coverage, start_indices

__all__ = [
    "selected_logprobs_reference",
    "selected_logprobs_tp_reference",
    "Exchange",
    "Problem",
    "selected_logprobs",
]


class Exchange(Protocol):
    """What the shards at hand and those elsewhere make together; all tensors are [*tokens]."""

    def maximum(self, local: Tensor) -> Tensor:
        """The maximum over all shards, NaN if one is."""

    def total(self, blocks: list[tuple[Block, Tensor]]) -> Tensor:
        """The sum by the tree over the whole vocabulary, given the blocks of these shards."""

    def selected(self, local: Tensor, owned: Tensor) -> Tensor:
        """The value of the shard that owns a token, bit for bit; anything where none does."""


@dataclass(frozen=True)
class Problem:
    """All that is asked, besides the logits.

    Attributes:
        starts: first token of each shard at hand.
        ids: int64 [*tokens] on the device of the logits.
        active: bool [*tokens]; all tokens that are active are held by exactly one shard.
        temperature: positive.
        reduction_dtype: of all that is computed.
        output_dtype: of the result, rounded to at the end.
    """

    starts: Sequence[int]
    ids: Tensor
    active: Tensor
    temperature: float
    reduction_dtype: torch.dtype
    output_dtype: torch.dtype

    @staticmethod
    def of(
        shards: Sequence[Tensor],
        starts: Sequence[int],
        token_ids: Tensor,
        mask: Tensor | None,
        temperature: float,
        output_dtype: torch.dtype,
        reduction_dtype: torch.dtype,
    ) -> Problem:
        """The problem of a caller, whose ``shards`` have been checked already.

        Raises:
            ShardError: what remains does not fit the shards.
        """
        check_dtypes(reduction_dtype, output_dtype)
        temperature = check_temperature(temperature, reduction_dtype)
        ids = checked_ids(token_ids).to(shards[0].device)
        active = active_tokens(mask, ids)
        return Problem(starts, ids, active, temperature, reduction_dtype, output_dtype)

    def owned(self, start: int, size: int) -> Tensor:
        """Active tokens that the shard ``[start, start + size)`` holds, bool [*tokens]."""
        return self.active & (self.ids >= start) & (self.ids < start + size)

    def local_index(self, start: int, size: int) -> Tensor:
        """int64 [*tokens, 1]: where a token is in this shard; some index where it is not."""
        return (self.ids - start).clamp(0, size - 1).unsqueeze(-1)

    def scaled(self, shard: Tensor) -> Tensor:
        """The logits in the reduction dtype, divided by the temperature."""
        return self.tempered(shard.detach().to(self.reduction_dtype))

    def tempered(self, values: Tensor) -> Tensor:
        """``values`` divided by the temperature, in their dtype."""
        if self.temperature == 1.0:
            return values
        # CUDA multiplies by the reciprocal of a Python number, which is not the IEEE division.
        return torch.div(values, torch.full_like(values[..., :1], self.temperature))

    def covered_by(self, shards: Sequence[Tensor]) -> Tensor:
        """int64 [*tokens]: how many of these shards hold an active token."""
        count = torch.zeros_like(self.ids)
        for start, shard in zip(self.starts, shards, strict=True):
            count += self.owned(start, shard.shape[-1])
        return count


def selected_logprobs_reference(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Log-probabilities of selected tokens from logits over the whole vocabulary.

    What ``selected_logprobs_tp_reference`` gives for one shard, in float32.

    Args:
        logits: floats [*tokens, vocabulary].
        token_ids: integers [*tokens]; anything where the mask is off, such as -100.
        mask: [*tokens]; without it all tokens are active.
        temperature: the logits are divided by it.
        output_dtype: of the result; one rounding from float32.

    Returns:
        [*tokens] of ``output_dtype``, 0 where the mask is off. Its gradient with respect to
        ``logits`` has their dtype, is 0 where the mask is off, and has no -0.0 in it.

    Raises:
        ShardError: shapes, dtypes or the temperature do not fit.
        TokenCoverageError: an active token is not in the vocabulary.
        ContractStateError: the CPU flushes subnormal numbers to zero.
    """
    return selected_logprobs_tp_reference(
        [logits], token_ids, mask, temperature=temperature, output_dtype=output_dtype
    )


def selected_logprobs_tp_reference(
    logit_shards: Sequence[Tensor],
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    vocab_start_indices: Sequence[int] | None = None,
    temperature: float = 1.0,
    output_dtype: torch.dtype = torch.float32,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Log-probabilities of selected tokens from shards of the vocabulary that are all at hand.

    The bits of the result, and of the gradient of each shard, are the same for any number of
    shards and any cuts between them.

    A NaN among the logits of a token, +inf, or -inf in all of them, make its log-probability NaN
    and its gradient NaN in all shards, as ``torch.log_softmax`` does; -inf elsewhere is a token of
    probability zero. Masked tokens give zeros whatever their logits are.

    Args:
        logit_shards: floats [*tokens, part of the vocabulary], sorted by their first token.
        token_ids: integers [*tokens] over the whole vocabulary; anything where the mask is off.
        mask: [*tokens]; without it all tokens are active.
        vocab_start_indices: the first token of each shard, where the shards are not consecutive
            from zero. What lies between them is no part of the vocabulary: a node of the tree with
            one empty half has the value of its other half.
        temperature: the logits are divided by it.
        output_dtype: of the result; one rounding after everything else.
        reduction_dtype: of everything else, float32, float64, bfloat16 or float16.

    Returns:
        [*tokens] of ``output_dtype``, 0 where the mask is off. Its gradient with respect to a
        shard has the shard's dtype, is 0 where the mask is off, and has no -0.0 in it.

    Raises:
        ShardError: no shards, shards that overlap or are not sorted, or shapes, dtypes, devices
            or a temperature that do not fit.
        TokenCoverageError: no shard holds an active token.
        ContractStateError: the CPU flushes subnormal numbers to zero.
    """
    shards = checked_logit_shards(logit_shards, token_ids)
    starts = start_indices(vocab_start_indices, shards)
    problem = Problem.of(
        shards, starts, token_ids, mask, temperature, output_dtype, reduction_dtype
    )
    check_coverage(problem.ids, problem.active, problem.covered_by(shards))
    return selected_logprobs(problem, _AllAtHand(starts[-1] + shards[-1].shape[-1]), shards)


def selected_logprobs(problem: Problem, exchange: Exchange, shards: Sequence[Tensor]) -> Tensor:
    """The result for checked arguments; differentiable once with respect to ``shards``."""
    result: Tensor = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
        problem, exchange, *shards
    )
    return result


class _AllAtHand:
    """The exchange of one process that holds all shards."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def maximum(self, local: Tensor) -> Tensor:
        return local

    def total(self, blocks: list[tuple[Block, Tensor]]) -> Tensor:
        return joined(blocks, self.vocabulary, torch.add, skip_gaps=True)

    def selected(self, local: Tensor, owned: Tensor) -> Tensor:
        return local


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, exchange: Exchange, *shards: Tensor) -> Tensor:
        scaled = [problem.scaled(shard) for shard in shards]
        # If the maximum is zero, its sign is that of any zero; with two of them s is at least 2,
        # and nothing below depends on the sign.
        local = torch.stack([x.amax(dim=-1) for x in scaled]).amax(dim=0)
        maximum = exchange.maximum(without_nan_payload(local))
        selected, owned = torch.zeros_like(maximum), torch.zeros_like(problem.active)
        blocks = []
        for start, x in zip(problem.starts, scaled, strict=True):
            here = problem.owned(start, x.shape[-1])
            index = problem.local_index(start, x.shape[-1])
            selected = torch.where(here, x.gather(-1, index).squeeze(-1), selected)
            owned |= here
            blocks += tensor_blocks(exp(x - maximum.unsqueeze(-1)), start)
        total = exchange.total(blocks)
        chosen = exchange.selected(selected, owned)
        result = torch.sub(chosen - maximum, log(total)).masked_fill_(~problem.active, 0.0)
        ctx.problem = problem
        ctx.save_for_backward(maximum, total, *shards)
        return without_nan_payload(result.to(problem.output_dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ShardError(
                "selected log-probabilities have a first derivative only, a graph of it was asked "
                "for; call backward or torch.autograd.grad without create_graph=True"
            )
        maximum, total, *shards = ctx.saved_tensors
        problem: Problem = ctx.problem
        upstream = gradient.to(problem.reduction_dtype)
        wanted = ctx.needs_input_grad[2:]
        return (
            None,
            None,
            *(
                _gradient(problem, start, shard, maximum, total, upstream) if needed else None
                for start, shard, needed in zip(problem.starts, shards, wanted, strict=True)
            ),
        )


def _gradient(
    problem: Problem, start: int, shard: Tensor, maximum: Tensor, total: Tensor, upstream: Tensor
) -> Tensor:
    size = shard.shape[-1]
    shares = exp(problem.scaled(shard) - maximum.unsqueeze(-1)).div_(total.unsqueeze(-1))
    slope = torch.sub(torch.zeros_like(shares), shares)
    index = problem.local_index(start, size)
    own = slope.gather(-1, index)
    hit = problem.owned(start, size).unsqueeze(-1)
    slope.scatter_(-1, index, torch.where(hit, own + 1.0, own))
    result = problem.tempered(slope.mul_(upstream.unsqueeze(-1)))
    result = result.masked_fill(~problem.active.unsqueeze(-1), 0.0).to(shard.dtype)
    # Where shards are views of one tensor, autograd adds up their gradients with zeros around
    # them, which turns -0.0 into 0.0; so there is none from the start.
    return without_nan_payload(result.add_(0.0))
