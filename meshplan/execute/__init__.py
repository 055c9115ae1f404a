"""Run one step of a plan by one of the paths, and record its execution."""

from __future__ import annotations

from meshplan.execute._choose import PathChoice as PathChoice
from meshplan.execute._groups import StepGroups as StepGroups
from meshplan.execute._provenance import COUNTERS as COUNTERS
from meshplan.execute._provenance import Event as Event
from meshplan.execute._provenance import Purpose as Purpose
from meshplan.execute._provenance import clear_report as clear_report
from meshplan.execute._provenance import record as record
from meshplan.execute._provenance import report as report
from meshplan.execute._run import BoundReduction as BoundReduction
from meshplan.execute._run import run_reduction as run_reduction
from meshplan.execute._wire import Wire as Wire
from meshplan.execute._wire import is_traced as is_traced
from meshplan.execute.paths import PATHS as PATHS
from meshplan.execute.paths import check_path as check_path
from meshplan.execute.paths import select_path as select_path
from meshplan.execute.paths import sharing_of as sharing_of
