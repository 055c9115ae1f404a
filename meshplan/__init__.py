"""meshplan: DTensor replicas that agree bit for bit.

Two lines put every redistribution that starts from ``Partial`` under the contract:

    import meshplan

    meshplan.install()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan._lazy_imports import make_lazy

# Imported at first use: most of them need torch, and the command line often does not.
if TYPE_CHECKING:
    from meshplan import backend as backend
    from meshplan import cli as cli
    from meshplan import collectives as collectives
    from meshplan import contract as contract
    from meshplan import definition as definition
    from meshplan import dtensor as dtensor
    from meshplan import elastic as elastic
    from meshplan import errors as errors
    from meshplan import execute as execute
    from meshplan import flatten as flatten
    from meshplan import integrations as integrations
    from meshplan import kernel as kernel
    from meshplan import layout as layout
    from meshplan import lint as lint
    from meshplan import orders as orders
    from meshplan import planner as planner
    from meshplan import record as record
    from meshplan import replicas as replicas
    from meshplan import run as run
    from meshplan import testing as testing
    from meshplan import topology as topology
    from meshplan.backend import BackendOptions as BackendOptions
    from meshplan.collectives import clip_grad_norm_ as clip_grad_norm_
    from meshplan.collectives import (
        deterministic_all_gather as deterministic_all_gather,
    )
    from meshplan.collectives import (
        deterministic_all_gather_coalesced as deterministic_all_gather_coalesced,
    )
    from meshplan.collectives import (
        deterministic_all_reduce as deterministic_all_reduce,
    )
    from meshplan.collectives import (
        deterministic_all_reduce_coalesced as deterministic_all_reduce_coalesced,
    )
    from meshplan.collectives import (
        deterministic_reduce_scatter as deterministic_reduce_scatter,
    )
    from meshplan.collectives import (
        deterministic_reduce_scatter_coalesced as deterministic_reduce_scatter_coalesced,
    )
    from meshplan.collectives import exact_norm as exact_norm
    from meshplan.collectives import nccl_profile as nccl_profile
    from meshplan.contract import Contract as Contract
    from meshplan.definition import reduce_leaves as reduce_leaves
    from meshplan.dtensor import Config as Config
    from meshplan.dtensor import install as install
    from meshplan.dtensor import installed as installed
    from meshplan.dtensor import policy as policy
    from meshplan.dtensor import prepare as prepare
    from meshplan.dtensor import shutdown as shutdown
    from meshplan.dtensor import uninstall as uninstall
    from meshplan.errors import MeshplanError as MeshplanError
    from meshplan.execute import clear_report as clear_report
    from meshplan.execute import report as report
    from meshplan.kernel import check as check
    from meshplan.layout import Layout as Layout
    from meshplan.replicas import ReplicaCheck as ReplicaCheck
    from meshplan.replicas import coverage as coverage
    from meshplan.replicas import repair_replicas as repair_replicas
    from meshplan.replicas import verify_replicas as verify_replicas
    from meshplan.run import log_value as log_value

__version__ = "0.1.0"


if not TYPE_CHECKING:  # so that type checkers find misspelt names
    __getattr__, __dir__, __all__ = make_lazy(__name__)
