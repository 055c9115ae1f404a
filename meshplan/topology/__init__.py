"""Where ranks sit: nodes, domains, and which links a group of ranks crosses."""

from __future__ import annotations

from meshplan.topology._model import LINK_CLASSES as LINK_CLASSES
from meshplan.topology._model import LinkClass as LinkClass
from meshplan.topology._model import Topology as Topology

__all__ = ["LINK_CLASSES", "LinkClass", "Topology"]
