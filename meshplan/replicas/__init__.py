"""Replica checks for live jobs: compare the bits of replicas.

* ``verify_replicas``: compare a module, an optimizer or tensors over a mesh, once.
* ``ReplicaCheck``: the same every so many steps of a training loop.
* ``digest``: 128 bits of one tensor, for logs and checkpoints.
* ``StepMonitor``: totals of both for loggers, Prometheus and OpenTelemetry.
* ``coverage``: which reductions of the job are under the contract, by call site.
"""

from __future__ import annotations

from meshplan import _require_torch as _require_torch
from meshplan.errors import Divergence, Elements
from meshplan.replicas._coverage import Coverage, CoverageStep, coverage
from meshplan.replicas._divergence import ReplicaReport
from meshplan.replicas._monitor import StepMonitor
from meshplan.replicas._verify import ReplicaCheck, digest, verify_replicas

__all__ = [
    "Coverage",
    "CoverageStep",
    "Divergence",
    "Elements",
    "ReplicaCheck",
    "ReplicaReport",
    "StepMonitor",
    "coverage",
    "digest",
    "verify_replicas",
]
