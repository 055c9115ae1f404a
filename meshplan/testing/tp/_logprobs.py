"""Log-probabilities of selected tokens, from a vocabulary in one piece or in shards.

With x the logits in the reduction dtype, divided by the temperature, the result for token t is

    (x[t] - m) - log(s),   m = max over v of x[v],   s = sum over v of exp(x[v] - m)

with s by the contract's tree over the ids v of the vocabulary. Everything else is done element by
element, so no bit depends on how the vocabulary is split. An average over ranks of logarithms of
their own sums is not the logarithm of a sum. The gradient is the closed form, g * ((v == t) -
exp(x[v] - m) / s) / temperature, element by element again: a rank needs no more for it than m, s
and its own logits. Over ranks only the maxima, the values of subtrees and whole numbers are sent.
Every rank makes every sum of floats, by the tree of the local shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.errors import ShardError
from meshplan.testing._bitwise import bits, digest
from meshplan.testing._ranks import LeafRange, RankGroup, join_blocks, sum_blocks
from meshplan.testing.tp._math import exp, log, without_nan_payload
from meshplan.testing.tp._vocab import (
    check_coverage,
    check_dtypes,
    check_logits,
    check_temperature,
    read_ids,
    read_mask,
    start_indices,
)


def selected_logprobs_reference(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Log-probabilities of selected tokens from logits over the whole vocabulary.

    ``selected_logprobs_tp_reference`` of one shard, in float32.

    Args:
        logits: floats [*tokens, vocabulary].
        token_ids, mask, temperature, output_dtype: as for ``selected_logprobs_tp_reference``.

    Returns:
        As there; one rounding from float32.

    Raises:
        ShardError, TokenCoverageError, ContractStateError: as there.
    """
    return selected_logprobs_tp_reference(
        [logits],
        token_ids,
        mask,
        temperature=temperature,
        output_dtype=output_dtype,
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
    """Log-probabilities of selected tokens from all shards of the vocabulary, in one process.

    The bits of the result, and of the gradient of each shard, are the same for any number of
    shards and any sizes of them.

    A NaN among the logits of a token, +inf, or -inf in all of them, make its log-probability NaN
    and its gradient NaN in all shards, as ``torch.log_softmax`` does; -inf elsewhere is a token of
    probability zero. The result of a masked token is 0 for any logits.

    Args:
        logit_shards: floats [*tokens, part of the vocabulary], sorted by their first token.
        token_ids: integers [*tokens] over the whole vocabulary; anything where the mask is off.
        mask: [*tokens]; without it all tokens are active.
        vocab_start_indices: the first token of each shard, where the shards are not consecutive
            from zero. Gaps between them are not part of the vocabulary: a node of the tree with
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
    check_logits(logit_shards, token_ids, "logit_shards")
    starts = start_indices(vocab_start_indices, logit_shards)
    selection = _Selection.read(
        logit_shards,
        starts,
        token_ids,
        mask,
        temperature,
        output_dtype,
        reduction_dtype,
    )
    check_coverage(selection.ids, selection.active, selection.count_owners())
    return _select(selection, *logit_shards)


def selected_logprobs_distributed_tp_reference(
    local_logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    *,
    vocab_start_index: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    output_dtype: torch.dtype = torch.float32,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``selected_logprobs_tp_reference`` where each rank of ``group`` holds one shard.

    Every rank of the group must call it, with the same tokens, mask and options. The shards must
    fill the vocabulary from zero on, each token once; their order need not be that of the ranks.
    The result has the same bits on all ranks, for any number of ranks and any shards. Its gradient
    with respect to ``local_logits`` is that of a loss which all ranks compute from the result in
    the same way; it needs no communication.

    Args:
        local_logits: floats [*tokens, part of the vocabulary] of this rank.
        vocab_start_index: the first token of this rank's shard.
        group: of any backend that supports the logits' device; by default all ranks.
        token_ids, mask, temperature, output_dtype, reduction_dtype: as for
            ``selected_logprobs_tp_reference``.

    Raises:
        GroupStateError: torch.distributed is not initialised, or this rank is not in the group.
        ShardError: on every rank: the arguments of one are invalid, or shards overlap or leave
            out a part of the vocabulary.
        TokenCoverageError: on every rank: an active token is not held by exactly one shard.
        SignatureMismatchError: on every rank: tokens, masks, dtypes or options differ.
        ContractStateError: the CPU of this rank flushes subnormal numbers to zero; ShardError on
            the others.
    """
    ranks = RankGroup(group)

    def read() -> tuple[_Selection, dict[str, Any]]:
        start = int(vocab_start_index)
        if start < 0:
            raise ShardError(f"vocab_start_index is {start}; pass an index from zero on")
        check_logits([local_logits], token_ids, "local_logits")
        options = (temperature, output_dtype, reduction_dtype)
        selection = _Selection.read([local_logits], [start], token_ids, mask, *options)
        ids = selection.ids.masked_fill(~selection.active, 0)
        equal = {
            "the dtype of logits": str(local_logits.dtype),
            "temperature": float(temperature),
            "output_dtype": str(output_dtype),
            "reduction_dtype": str(reduction_dtype),
            "mask": f"{tuple(ids.shape)} #{digest(selection.active)[:12]}",
            "token_ids under the mask": f"{tuple(ids.shape)} #{digest(ids)[:12]}",
        }
        return selection, {"equal": equal, "shard": selection.shards[0]}

    selection, records = ranks.run(read, ShardError)
    ranks.check_equal([record["equal"] for record in records])
    covered = ranks.sum_integers(selection.count_owners())
    check_coverage(selection.ids, selection.active, covered)
    shards = [tuple(record["shard"]) for record in records]
    _check_filled(shards, ranks)
    selection = replace(selection, ranks=ranks, shards=shards)
    return _select(selection, local_logits)


@dataclass(frozen=True)
class _Selection:
    """The arguments apart from the logits."""

    local: Sequence[LeafRange]  # the tokens of each local shard
    ids: Tensor  # int64 [*tokens] on the device of the logits
    active: Tensor  # bool [*tokens]; exactly one shard holds each active token
    temperature: float
    reduction_dtype: torch.dtype  # of all intermediate results
    output_dtype: torch.dtype  # of the result, rounded to at the end
    # shards, ranks: the tokens of all shards, and their holders; without ranks all are local.
    shards: Sequence[LeafRange]
    ranks: RankGroup | None = None

    @staticmethod
    def read(
        shards: Sequence[Tensor],
        starts: Sequence[int],
        token_ids: Tensor,
        mask: Tensor | None,
        temperature: float,
        output_dtype: torch.dtype,
        reduction_dtype: torch.dtype,
    ) -> _Selection:
        check_dtypes(reduction_dtype, output_dtype)
        check_temperature(temperature, reduction_dtype)
        ids = read_ids(token_ids).to(shards[0].device)
        active = read_mask(mask, ids)
        pairs = zip(starts, shards, strict=True)
        local = [(start, start + shard.shape[-1]) for start, shard in pairs]
        numbers = float(temperature), reduction_dtype, output_dtype
        return _Selection(local, ids, active, *numbers, shards=local)

    def find_owned(self, start: int, stop: int) -> Tensor:
        return self.active & (self.ids >= start) & (self.ids < stop)

    def local_index(self, start: int, stop: int) -> Tensor:
        """int64 [*tokens, 1]: the index of a token in this shard; any index if it is not there."""
        return (self.ids.clamp(start, stop - 1) - start).unsqueeze(-1)

    def scale(self, shard: Tensor) -> Tensor:
        """The logits in the reduction dtype, divided by the temperature."""
        return self.apply_temperature(shard.detach().to(self.reduction_dtype))

    def apply_temperature(self, values: Tensor) -> Tensor:
        if self.temperature == 1.0:
            return values
        # CUDA multiplies by the reciprocal of a Python number, which is not the IEEE division.
        return torch.div(values, torch.full_like(values[..., :1], self.temperature))

    def count_owners(self) -> Tensor:
        """int64 [*tokens]: how many of the local shards hold an active token."""
        count = torch.zeros_like(self.ids)
        for shard in self.local:
            count += self.find_owned(*shard)
        return count


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, selection: _Selection, *shards: Tensor) -> Tensor:
        scaled = [selection.scale(shard) for shard in shards]
        # If the maximum is zero, its sign is that of any zero; with two of them s is at least 2,
        # and nothing below depends on the sign.
        maximum = without_nan_payload(torch.stack([x.amax(dim=-1) for x in scaled]).amax(dim=0))
        if selection.ranks is not None:
            maximum = selection.ranks.max_floats(maximum)
        selected, owned = (
            torch.zeros_like(maximum),
            torch.zeros_like(selection.active),
        )
        blocks: list[tuple[LeafRange, Tensor]] = []
        for (start, stop), x in zip(selection.local, scaled, strict=True):
            here = selection.find_owned(start, stop)
            index = selection.local_index(start, stop)
            selected = torch.where(here, x.gather(-1, index).squeeze(-1), selected)
            owned |= here
            blocks += sum_blocks(exp(x - maximum.unsqueeze(-1)), start)
        if selection.ranks is not None:
            blocks = selection.ranks.gather_blocks(blocks, selection.shards, maximum)
            # The owner sends the bits of the value, all others zero.
            pattern = bits(selected)
            found = selection.ranks.sum_integers(pattern.to(torch.int64).masked_fill(~owned, 0))
            selected = found.to(pattern.dtype).view(selected.dtype)
        vocabulary = max(stop for _, stop in selection.shards)
        total = join_blocks(blocks, vocabulary, torch.add)
        result = torch.sub(selected - maximum, log(total)).masked_fill_(~selection.active, 0.0)
        ctx.selection = selection
        ctx.save_for_backward(maximum, total, *shards)
        return without_nan_payload(result.to(selection.output_dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ShardError(
                "selected log-probabilities have a first derivative only; call backward or "
                "torch.autograd.grad without create_graph=True"
            )
        maximum, total, *shards = ctx.saved_tensors
        selection: _Selection = ctx.selection
        upstream = gradient.to(selection.reduction_dtype)
        wanted = ctx.needs_input_grad[1:]
        return (
            None,
            *(
                _gradient(selection, here, shard, maximum, total, upstream) if needed else None
                for here, shard, needed in zip(selection.local, shards, wanted, strict=True)
            ),
        )


_select: Callable[..., Tensor] = _SelectedLogprobs.apply


def _gradient(
    selection: _Selection,
    here: LeafRange,
    shard: Tensor,
    maximum: Tensor,
    total: Tensor,
    upstream: Tensor,
) -> Tensor:
    shares = exp(selection.scale(shard) - maximum.unsqueeze(-1)).div_(total.unsqueeze(-1))
    slope = torch.sub(torch.zeros_like(shares), shares)
    index = selection.local_index(*here)
    own = slope.gather(-1, index)
    hit = selection.find_owned(*here).unsqueeze(-1)
    slope.scatter_(-1, index, torch.where(hit, own + 1.0, own))
    result = selection.apply_temperature(slope.mul_(upstream.unsqueeze(-1)))
    result = result.masked_fill(~selection.active.unsqueeze(-1), 0.0).to(shard.dtype)
    # Where shards are views of one tensor, autograd adds up their gradients with zeros around
    # them, which turns -0.0 into 0.0; so there is none from the start.
    return without_nan_payload(result.add_(0.0))


def _check_filled(ranges: Sequence[LeafRange], ranks: RankGroup) -> None:
    end, before = 0, -1
    for (start, stop), rank in sorted(zip(ranges, ranks.ranks, strict=True)):
        if start < end:
            raise ShardError(
                f"the shard [{start}, {stop}) of rank {rank} overlaps that of rank {before}, which "
                f"ends at {end}; assign each token of the vocabulary to one rank"
            )
        if start > end:
            raise ShardError(
                f"no rank holds the tokens {end} to {start - 1} of the vocabulary, the shard "
                f"[{start}, {stop}) of rank {rank} comes next; assign each token to one rank"
            )
        end, before = stop, rank
