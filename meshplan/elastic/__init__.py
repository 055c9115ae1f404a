"""The same bits of a training step on any number of ranks.

The leaves of the contract's tree are the micro-batches of a step, instead of the ranks. Micro-batch
g belongs to rank g mod W in round g div W of a job with W data-parallel ranks. The leaves of a
slice of the gradients go to one rank, which adds them in the order of micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan import _require_torch as _require_torch
from meshplan._lazy_imports import make_lazy

if TYPE_CHECKING:
    from meshplan.elastic._gradients import (
        GradientAccumulator as GradientAccumulator,
    )
    from meshplan.elastic._micro_batches import MicroBatches as MicroBatches
    from meshplan.elastic._micro_batches import (
        MicroBatchSampler as MicroBatchSampler,
    )
    from meshplan.elastic._micro_batches import seed_micro_batch as seed_micro_batch

if not TYPE_CHECKING:  # so that type checkers find misspelt names
    __getattr__, __dir__, __all__ = make_lazy(__name__)
