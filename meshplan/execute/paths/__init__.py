"""The paths: one module each, whose ``PATH`` is registered by one line here."""

from __future__ import annotations

from importlib import import_module

from meshplan.execute.paths._path import PATHS as PATHS
from meshplan.execute.paths._path import Outcome as Outcome
from meshplan.execute.paths._path import Path as Path
from meshplan.execute.paths._path import check_path as check_path
from meshplan.execute.paths._path import get_path as get_path
from meshplan.execute.paths._path import register as register
from meshplan.execute.paths._path import select_path as select_path
from meshplan.execute.paths._path import sharing_of as sharing_of
from meshplan.execute.paths._path import unregister as unregister

# The order is that of texts for users.
for _module in (
    "one_shot",
    "two_shot",
    "exchange",
    "halving",
    "hierarchical",
    "integer",
    "integer_checksum",
    "reference",
    "native",
):
    register(import_module(f"{__name__}._{_module}").PATH)
