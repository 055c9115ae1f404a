"""The planner: a problem in, a plan out. Pure; it communicates with no other rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan._lazy_imports import make_lazy

# Imported at first use: the linter needs hazards, and neither the search nor the costs.
if TYPE_CHECKING:
    from meshplan.planner import nccl_order as nccl_order
    from meshplan.planner._group_facts import find_groups as find_groups
    from meshplan.planner._halving import HalvingMessage as HalvingMessage
    from meshplan.planner._halving import HalvingRound as HalvingRound
    from meshplan.planner._halving import halving_schedule as halving_schedule
    from meshplan.planner._halving import merge_axes as merge_axes
    from meshplan.planner._halving import share_owners as share_owners
    from meshplan.planner._hazards import Algorithm as Algorithm
    from meshplan.planner._hazards import Hazard as Hazard
    from meshplan.planner._hazards import Siblings as Siblings
    from meshplan.planner._hazards import are_uniform as are_uniform
    from meshplan.planner._hazards import cache_siblings as cache_siblings
    from meshplan.planner._hazards import hazards as hazards
    from meshplan.planner._path_costs import CONTRACT_PATHS as CONTRACT_PATHS
    from meshplan.planner._path_costs import Between as Between
    from meshplan.planner._path_costs import ContractPath as ContractPath
    from meshplan.planner._path_costs import Reach as Reach
    from meshplan.planner._path_costs import count_chunks as count_chunks
    from meshplan.planner._path_costs import cut_chunks as cut_chunks
    from meshplan.planner._path_costs import find_fastest as find_fastest
    from meshplan.planner._path_costs import weigh_chunks as weigh_chunks
    from meshplan.planner._plan import NOMINAL_ELEMENTS as NOMINAL_ELEMENTS
    from meshplan.planner._plan import Plan as Plan
    from meshplan.planner._plan import Step as Step
    from meshplan.planner._plan import format_bytes as format_bytes
    from meshplan.planner._plan import format_time as format_time
    from meshplan.planner._planner import (
        find_uncovered_reductions as find_uncovered_reductions,
    )
    from meshplan.planner._planner import plan as plan
    from meshplan.planner._planner import (
        refuse_unpinned_scatter as refuse_unpinned_scatter,
    )
    from meshplan.planner._problem import POLICIES as POLICIES
    from meshplan.planner._problem import Policy as Policy
    from meshplan.planner._problem import Problem as Problem
    from meshplan.planner._problem import check_audit as check_audit
    from meshplan.planner._problem import check_policy as check_policy
    from meshplan.planner._search import (
        follows_default_order as follows_default_order,
    )
    from meshplan.planner._simulation import CALIBRATIONS as CALIBRATIONS
    from meshplan.planner._simulation import Prediction as Prediction
    from meshplan.planner._simulation import predict_backend as predict_backend
    from meshplan.planner._simulation import (
        predict_divergence as predict_divergence,
    )
    from meshplan.planner._simulation import predict_plan as predict_plan
    from meshplan.planner._simulation import simulate as simulate

if not TYPE_CHECKING:  # so that type checkers find misspelt names
    __getattr__, __dir__, __all__ = make_lazy(__name__)
