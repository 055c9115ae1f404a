"""Collectives: run one step of a plan, and record what ran."""

from __future__ import annotations

from meshplan.collectives._all_reduce import deterministic_all_reduce as deterministic_all_reduce
from meshplan.collectives._all_reduce import (
    deterministic_all_reduce_coalesced as deterministic_all_reduce_coalesced,
)
from meshplan.collectives._choose import PATHS as PATHS
from meshplan.collectives._choose import PathChoice as PathChoice
from meshplan.collectives._groups import StepGroups as StepGroups
from meshplan.collectives._lanes import Work as Work
from meshplan.collectives._nccl_profiles import DETERMINISTIC_NCCL_ENV as DETERMINISTIC_NCCL_ENV
from meshplan.collectives._nccl_profiles import NCCL_PROFILES as NCCL_PROFILES
from meshplan.collectives._nccl_profiles import NcclProfile as NcclProfile
from meshplan.collectives._nccl_profiles import NcclSetting as NcclSetting
from meshplan.collectives._nccl_profiles import (
    configure_deterministic_nccl_env as configure_deterministic_nccl_env,
)
from meshplan.collectives._nccl_profiles import nccl_profile as nccl_profile
from meshplan.collectives._provenance import MAX_RECORDS as MAX_RECORDS
from meshplan.collectives._provenance import Event as Event
from meshplan.collectives._provenance import Purpose as Purpose
from meshplan.collectives._provenance import clear_report as clear_report
from meshplan.collectives._provenance import count_untouched as count_untouched
from meshplan.collectives._provenance import record as record
from meshplan.collectives._provenance import report as report
from meshplan.collectives._report import SCHEMA_VERSION as SCHEMA_VERSION
from meshplan.collectives._report import Report as Report
from meshplan.collectives._request import (
    DeterministicAllReduceConfig as DeterministicAllReduceConfig,
)
from meshplan.collectives._run import run_reduction as run_reduction
from meshplan.collectives._shards import deterministic_all_gather as deterministic_all_gather
from meshplan.collectives._shards import (
    deterministic_reduce_scatter as deterministic_reduce_scatter,
)
from meshplan.collectives._switches import ONE_SHOT_VARIABLE as ONE_SHOT_VARIABLE
from meshplan.collectives._switches import one_shot_switch as one_shot_switch
from meshplan.collectives._tracing import is_traced as is_traced

# Registers the operators.
from meshplan.collectives import functional as functional  # isort: skip

__all__ = [
    "DETERMINISTIC_NCCL_ENV",
    "DeterministicAllReduceConfig",
    "MAX_RECORDS",
    "NCCL_PROFILES",
    "ONE_SHOT_VARIABLE",
    "PATHS",
    "SCHEMA_VERSION",
    "Event",
    "NcclProfile",
    "NcclSetting",
    "PathChoice",
    "Report",
    "Purpose",
    "StepGroups",
    "Work",
    "clear_report",
    "configure_deterministic_nccl_env",
    "deterministic_all_gather",
    "deterministic_all_reduce",
    "deterministic_all_reduce_coalesced",
    "deterministic_reduce_scatter",
    "functional",
    "count_untouched",
    "is_traced",
    "nccl_profile",
    "one_shot_switch",
    "record",
    "report",
    "run_reduction",
]
