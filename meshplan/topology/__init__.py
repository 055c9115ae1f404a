"""Where ranks sit: nodes, domains, which links a group of ranks crosses, and what they cost."""

from __future__ import annotations

from meshplan.topology._links import Link as Link
from meshplan.topology._links import Links as Links
from meshplan.topology._model import LINK_CLASSES as LINK_CLASSES
from meshplan.topology._model import LinkClass as LinkClass
from meshplan.topology._model import Topology as Topology

__all__ = ["LINK_CLASSES", "Link", "LinkClass", "Links", "Topology"]
