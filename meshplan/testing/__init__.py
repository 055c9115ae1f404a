"""Test tools, for users and for the project's own tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan import _require_torch as _require_torch
from meshplan._inputs import order_sensitive as order_sensitive
from meshplan._lazy_imports import make_lazy
from meshplan.testing._bitwise import (
    assert_bitwise_equal as assert_bitwise_equal,
)
from meshplan.testing._bitwise import (
    assert_replicas_equal as assert_replicas_equal,
)
from meshplan.testing._bitwise import bits as bits
from meshplan.testing._bitwise import first_difference as first_difference
from meshplan.testing._reference import reference_reduce as reference_reduce
from meshplan.testing._reference import (
    reference_reduce_tensors as reference_reduce_tensors,
)

# Modules that need numpy, which a machine with a GPU may lack.
if TYPE_CHECKING:
    from meshplan.testing import dp as dp
    from meshplan.testing import nccl_model as nccl_model
    from meshplan.testing import tp as tp

if not TYPE_CHECKING:  # so that type checkers find misspelt names
    __getattr__, __dir__, __all__ = make_lazy(__name__)
