"""The planner: a problem in, a plan out. Pure; nothing here talks to another rank."""

from __future__ import annotations

from meshplan.planner import _nccl_order as nccl_order
from meshplan.planner._hazard import Hazard as Hazard
from meshplan.planner._hazards import hazards as hazards
from meshplan.planner._plan import Path as Path
from meshplan.planner._plan import Plan as Plan
from meshplan.planner._plan import Step as Step
from meshplan.planner._planner import plan as plan
from meshplan.planner._problem import CONTRACT_PATHS as CONTRACT_PATHS
from meshplan.planner._problem import POLICIES as POLICIES
from meshplan.planner._problem import ContractPath as ContractPath
from meshplan.planner._problem import Policy as Policy
from meshplan.planner._problem import Problem as Problem
from meshplan.planner._problem import Spec as Spec
from meshplan.planner._problem import check_policy as check_policy

__all__ = [
    "CONTRACT_PATHS",
    "POLICIES",
    "ContractPath",
    "Hazard",
    "Path",
    "Plan",
    "Policy",
    "Problem",
    "Spec",
    "Step",
    "check_policy",
    "hazards",
    "nccl_order",
    "plan",
]
