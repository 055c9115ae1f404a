"""Replica checks for live jobs: compare the bits of replicas."""

from __future__ import annotations

from meshplan import _require_torch as _require_torch
from meshplan.errors import Divergence as Divergence
from meshplan.errors import Elements as Elements
from meshplan.replicas._comparison import CopiedTensor as CopiedTensor
from meshplan.replicas._comparison import ReplicaReport as ReplicaReport
from meshplan.replicas._coverage import Coverage as Coverage
from meshplan.replicas._coverage import CoverageStep as CoverageStep
from meshplan.replicas._coverage import coverage as coverage
from meshplan.replicas._verify import ReplicaCheck as ReplicaCheck
from meshplan.replicas._verify import ReplicaRepair as ReplicaRepair
from meshplan.replicas._verify import digest as digest
from meshplan.replicas._verify import repair_replicas as repair_replicas
from meshplan.replicas._verify import verify_replicas as verify_replicas
