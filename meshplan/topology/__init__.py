"""The location of ranks: nodes, domains, and the links between ranks with their cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan._lazy_imports import make_lazy
from meshplan.topology._reading import Note as Note
from meshplan.topology._reading import Reading as Reading

# Imported at first use: listing the rules of the linter needs no numpy.
if TYPE_CHECKING:
    from meshplan.topology import formats as formats
    from meshplan.topology._links import Link as Link
    from meshplan.topology._links import Links as Links
    from meshplan.topology._model import Cluster as Cluster
    from meshplan.topology._model import Topology as Topology
    from meshplan.topology._read_cluster import Inputs as Inputs
    from meshplan.topology._read_cluster import read_cluster as read_cluster

if not TYPE_CHECKING:  # so that type checkers find misspelt names
    __getattr__, __dir__, __all__ = make_lazy(__name__)
