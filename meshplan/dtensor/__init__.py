"""The plugin: one attribute of torch replaced, one ``Partial`` that carries a plan."""

from __future__ import annotations

from meshplan import _require_torch as _require_torch
from meshplan.dtensor._config import Config as Config
from meshplan.dtensor._install import (
    UncoveredReductionWarning as UncoveredReductionWarning,
)
from meshplan.dtensor._install import install as install
from meshplan.dtensor._install import installed as installed
from meshplan.dtensor._install import policy as policy
from meshplan.dtensor._install import prepare as prepare
from meshplan.dtensor._install import shutdown as shutdown
from meshplan.dtensor._install import uninstall as uninstall
from meshplan.dtensor._routes import (
    discovered_cluster as discovered_cluster,
)
from meshplan.dtensor._seam import current_config as current_config
