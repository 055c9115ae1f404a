"""The paths: an instance of each is registered by one line here."""

from __future__ import annotations

from meshplan.execute.paths import (
    _exchange,
    _halving,
    _hierarchical,
    _integer,
    _native,
    _reference,
    _shared_memory,
)
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
for _instance in (
    _shared_memory.ONE_SHOT,
    _shared_memory.TWO_SHOT,
    _exchange.PATH,
    _halving.PATH,
    _hierarchical.PATH,
    _integer.PATH,
    _integer.CHECKED,
    _reference.PATH,
    _native.PATH,
):
    register(_instance)
