"""References of tensor-parallel reductions: the same bits for any number of ranks and any shards.

These references define the common value, down to the last bit:

* sums follow one tree, the contract's, over absolute positions: token ids of the vocabulary for
  the softmax, positions of the flattened values for sums and means. A shard contributes the
  subtrees inside it;
* exponential and logarithm are made of plain IEEE operations, so that their bits depend on the
  number alone, and everything else is done element by element;
* everything is computed in ``reduction_dtype``, float32 by default, for logits in float32,
  bfloat16 or float16, and rounded to ``output_dtype`` once, at the end;
* gradients are closed forms, element by element, with the same guarantee.

Each has three forms: over one tensor, over local shards, and over the ranks of a process group.
All three return the same bits on CPUs. torch must run eagerly: a compiler that fuses a
multiplication with an addition rounds once where these round twice.

They are oracles, too slow for training.
"""

from __future__ import annotations

from meshplan.testing.tp._logprobs import (
    selected_logprobs_distributed_tp_reference,
    selected_logprobs_reference,
    selected_logprobs_tp_reference,
)
from meshplan.testing.tp._masked import (
    active_token_count,
    compute_policy_ratio,
    compute_reference_kl,
    distributed_active_token_count,
    distributed_masked_mean,
    distributed_masked_sum,
    masked_mean,
    masked_sum,
)
from meshplan.testing.tp._vocab import (
    owner_ranks_for_token_ids,
    shard_logits_by_vocab,
    vocab_shard_ranges,
)

__all__ = [
    "vocab_shard_ranges",
    "shard_logits_by_vocab",
    "owner_ranks_for_token_ids",
    "selected_logprobs_reference",
    "selected_logprobs_tp_reference",
    "selected_logprobs_distributed_tp_reference",
    "masked_sum",
    "masked_mean",
    "active_token_count",
    "distributed_masked_sum",
    "distributed_masked_mean",
    "distributed_active_token_count",
    "compute_policy_ratio",
    "compute_reference_kl",
]
