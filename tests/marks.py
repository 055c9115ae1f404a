"""Which verb of the Makefile runs a test, and how many random cases it draws."""

from __future__ import annotations

import os
from typing import Any

import pytest

# Of each property. `make test-full` draws 2,000 of those that are marked `soak`.
CASES = int(os.environ.get("MESHPLAN_TEST_CASES", "60"))
# Markers. `make test` runs the tests without one of them, and no test has two.
VERBS = frozenset({"full", "dist", "gpu"})


def full(*values: Any) -> Any:
    """Parameters with which a test runs in `make test-full` only."""
    return pytest.param(*values, marks=pytest.mark.full)


def longest(*values: Any) -> Any:
    """Parameters with which a test runs in `make test-dist` only."""
    return pytest.param(*values, marks=pytest.mark.dist)
