"""meshplan: DTensor replicas that agree bit for bit.

import meshplan
meshplan.install()
"""

from __future__ import annotations

from meshplan.collectives import clear_report as clear_report
from meshplan.collectives import report as report
from meshplan.contract import Contract as Contract
from meshplan.contract import reduce_leaves as reduce_leaves
from meshplan.dtensor import install as install
from meshplan.dtensor import installed as installed
from meshplan.dtensor import policy as policy
from meshplan.dtensor import prepare as prepare
from meshplan.dtensor import shutdown as shutdown
from meshplan.dtensor import uninstall as uninstall
from meshplan.errors import MeshplanError as MeshplanError
from meshplan.kernel import check as check
from meshplan.layout import Layout as Layout

__version__ = "0.1.0"
