"""Test tools, for users and for the project's own tests.

* ``reference_reduce``, ``reference_reduce_tensors``: the contract by exact rational arithmetic.
* ``order_sensitive``: inputs whose sums show the order of additions.
* ``bits``, ``first_difference``, ``assert_bitwise_equal``: compare by bits on one rank.
* ``replica_fingerprints``, ``assert_replicas_equal``: compare by bits between ranks.
* ``nccl_model``: a process group that adds in the order NCCL would, on CPUs.
* ``tp``: references of tensor-parallel reductions, the same bits for any number of ranks.
* ``dp``: gradients that do not depend on the number of data-parallel ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan import _require_torch as _require_torch
from meshplan._lazy_imports import make_lazy
from meshplan.testing._bitwise import (
    assert_bitwise_equal,
    assert_replicas_equal,
    bits,
    first_difference,
    replica_fingerprints,
)
from meshplan.testing._inputs import order_sensitive
from meshplan.testing._reference import reference_reduce, reference_reduce_tensors

if TYPE_CHECKING:
    from meshplan.testing import _nccl_model as nccl_model
    from meshplan.testing import dp, tp

__all__ = [
    "reference_reduce",
    "reference_reduce_tensors",
    "order_sensitive",
    "bits",
    "first_difference",
    "assert_bitwise_equal",
    "replica_fingerprints",
    "assert_replicas_equal",
    "nccl_model",
    "tp",
    "dp",
]

if not TYPE_CHECKING:  # so that type checkers find misspelt names
    # Modules that need numpy, which a machine with a GPU may lack.
    __getattr__, __dir__ = make_lazy(
        __name__, {}, {"nccl_model": "_nccl_model", "tp": "tp", "dp": "dp"}
    )
