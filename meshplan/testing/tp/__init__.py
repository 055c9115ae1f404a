"""References of tensor-parallel reductions: the same bits for any number of ranks and any cuts.

A trainer with tensor parallelism of 1 and a generator with 8 agree on log-probabilities and losses
only if nothing in them depends on how a vocabulary or a batch is cut. These references say what
the common value is, down to the last bit:

* sums follow one tree, the contract's, over absolute positions: token ids of the vocabulary for
  the softmax, positions of the flattened values for sums and means. A shard contributes the
  subtrees that lie inside it;
* exponential and logarithm are made of plain IEEE operations, so that their bits depend on the
  number alone, and everything else is done element by element;
* all is computed in ``reduction_dtype``, float32 by default, for logits in float32, bfloat16 or
  float16, and rounded to ``output_dtype`` once, at the end;
* gradients are closed forms, element by element, with the same promise.

Each comes in three forms: over one tensor, over shards that are at hand, and over the ranks of a
process group. All three give the same bits on CPUs. torch must run eagerly: a compiler that fuses
a multiplication with an addition rounds once where these round twice.

They are oracles to test kernels with. They keep the shards and work piece by piece; a training
step would not use them.
"""

from __future__ import annotations

from meshplan.testing.tp._distributed import (
    distributed_active_token_count as distributed_active_token_count,
)
from meshplan.testing.tp._distributed import distributed_masked_mean as distributed_masked_mean
from meshplan.testing.tp._distributed import distributed_masked_sum as distributed_masked_sum
from meshplan.testing.tp._distributed import (
    selected_logprobs_distributed_tp_reference as selected_logprobs_distributed_tp_reference,
)
from meshplan.testing.tp._drift import summarize_kernel_drift as summarize_kernel_drift
from meshplan.testing.tp._drift import summarize_tp_logprob_drift as summarize_tp_logprob_drift
from meshplan.testing.tp._logprobs import selected_logprobs_reference as selected_logprobs_reference
from meshplan.testing.tp._logprobs import (
    selected_logprobs_tp_reference as selected_logprobs_tp_reference,
)
from meshplan.testing.tp._masked import active_token_count as active_token_count
from meshplan.testing.tp._masked import masked_mean as masked_mean
from meshplan.testing.tp._masked import masked_sum as masked_sum
from meshplan.testing.tp._masked import sharded_active_token_count as sharded_active_token_count
from meshplan.testing.tp._masked import sharded_masked_mean as sharded_masked_mean
from meshplan.testing.tp._masked import sharded_masked_sum as sharded_masked_sum
from meshplan.testing.tp._policy import compute_policy_ratio as compute_policy_ratio
from meshplan.testing.tp._policy import compute_reference_kl as compute_reference_kl
from meshplan.testing.tp._vocab import owner_ranks_for_token_ids as owner_ranks_for_token_ids
from meshplan.testing.tp._vocab import shard_logits_by_vocab as shard_logits_by_vocab
from meshplan.testing.tp._vocab import vocab_shard_ranges as vocab_shard_ranges

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
    "sharded_masked_sum",
    "sharded_masked_mean",
    "sharded_active_token_count",
    "distributed_masked_sum",
    "distributed_masked_mean",
    "distributed_active_token_count",
    "compute_policy_ratio",
    "compute_reference_kl",
    "summarize_kernel_drift",
    "summarize_tp_logprob_drift",
]
