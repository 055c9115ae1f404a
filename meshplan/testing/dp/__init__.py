"""Gradients that do not depend on the number of data-parallel ranks."""

from __future__ import annotations

from meshplan.testing.dp._controls import (
    deterministic_controls as deterministic_controls,
)
from meshplan.testing.dp._leaves import LossFn as LossFn
from meshplan.testing.dp._leaves import sample_gradients as sample_gradients
from meshplan.testing.dp._leaves import split_batch as split_batch
from meshplan.testing.dp._reduce import compare_gradients as compare_gradients
from meshplan.testing.dp._reduce import (
    distributed_dp_gradients as distributed_dp_gradients,
)
from meshplan.testing.dp._reduce import dp_gradients as dp_gradients
