"""Collectives: run one step of a plan, and record what ran."""

from __future__ import annotations

from meshplan.collectives._choose import PATHS as PATHS
from meshplan.collectives._choose import PathChoice as PathChoice
from meshplan.collectives._groups import StepGroups as StepGroups
from meshplan.collectives._provenance import MAX_RECORDS as MAX_RECORDS
from meshplan.collectives._provenance import Event as Event
from meshplan.collectives._provenance import Report as Report
from meshplan.collectives._provenance import Source as Source
from meshplan.collectives._provenance import clear_report as clear_report
from meshplan.collectives._provenance import count_untouched as count_untouched
from meshplan.collectives._provenance import record as record
from meshplan.collectives._provenance import report as report
from meshplan.collectives._run import run_reduction as run_reduction

__all__ = [
    "MAX_RECORDS",
    "PATHS",
    "Event",
    "PathChoice",
    "Report",
    "Source",
    "StepGroups",
    "clear_report",
    "count_untouched",
    "record",
    "report",
    "run_reduction",
]
