"""The deterministic collectives that people call, and what they share."""

from __future__ import annotations

from meshplan import _require_torch as _require_torch
from meshplan.collectives._api import (
    deterministic_all_gather as deterministic_all_gather,
)
from meshplan.collectives._api import (
    deterministic_all_gather_coalesced as deterministic_all_gather_coalesced,
)
from meshplan.collectives._api import (
    deterministic_all_reduce as deterministic_all_reduce,
)
from meshplan.collectives._api import (
    deterministic_all_reduce_coalesced as deterministic_all_reduce_coalesced,
)
from meshplan.collectives._api import (
    deterministic_reduce_scatter as deterministic_reduce_scatter,
)
from meshplan.collectives._api import (
    deterministic_reduce_scatter_coalesced as deterministic_reduce_scatter_coalesced,
)
from meshplan.collectives._lanes import Work as Work
from meshplan.collectives._nccl_profiles import (
    NCCL_PROFILES as NCCL_PROFILES,
)
from meshplan.collectives._nccl_profiles import (
    NcclProfile as NcclProfile,
)
from meshplan.collectives._nccl_profiles import (
    NcclSetting as NcclSetting,
)
from meshplan.collectives._nccl_profiles import (
    nccl_profile as nccl_profile,
)
from meshplan.collectives._norms import (
    clip_grad_norm_ as clip_grad_norm_,
)
from meshplan.collectives._norms import exact_norm as exact_norm

# Registers the operators.
from meshplan.collectives import functional as functional  # isort: skip
