"""The contract's reductions, compiled: the same bits as ``meshplan.contract``, faster.

Where the compiled library is not there, or the tensors are not on a CPU, the functions here are
those of ``meshplan.contract``.
"""

from __future__ import annotations

from meshplan.kernel._fold import combine_leaves as combine_leaves
from meshplan.kernel._fold import finish_partials as finish_partials
from meshplan.kernel._fold import reduce_leaves as reduce_leaves
from meshplan.kernel._library import available as available
from meshplan.kernel._library import why_not as why_not

__all__ = ["available", "combine_leaves", "finish_partials", "reduce_leaves", "why_not"]
