"""Gradients that do not depend on the number of data-parallel ranks.

* ``dp_gradients``: as N ranks compute them, in one process.
* ``distributed_dp_gradients``: the same bits over a process group.
* ``sample_gradients``: their leaves.
* ``split_batch``: the part of each rank.
* ``compare_gradients``, ``gradient_summary``: two sets of gradients, by bits and in numbers.
* ``deterministic_controls``: the settings under which one machine repeats itself.
"""

from __future__ import annotations

from meshplan.testing.dp._batch import split_batch as split_batch
from meshplan.testing.dp._compare import GradientSummary as GradientSummary
from meshplan.testing.dp._compare import ParameterDifference as ParameterDifference
from meshplan.testing.dp._compare import compare_gradients as compare_gradients
from meshplan.testing.dp._compare import gradient_summary as gradient_summary
from meshplan.testing.dp._controls import deterministic_controls as deterministic_controls
from meshplan.testing.dp._leaves import LossFn as LossFn
from meshplan.testing.dp._leaves import sample_gradients as sample_gradients
from meshplan.testing.dp._reduce import distributed_dp_gradients as distributed_dp_gradients
from meshplan.testing.dp._reduce import dp_gradients as dp_gradients
