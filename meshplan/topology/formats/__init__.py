"""Parsers of descriptions of clusters: one module for each format.

Each module has ``recognises(text)``, which is fast and never raises, and ``read(text)``, which
returns a ``Reading`` or raises ``TopologyInputError`` with the line. None imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan._lazy_imports import make_lazy

if TYPE_CHECKING:
    from meshplan.topology.formats import amd_smi as amd_smi
    from meshplan.topology.formats import kubernetes as kubernetes
    from meshplan.topology.formats import nccl_log as nccl_log
    from meshplan.topology.formats import nccl_topology as nccl_topology
    from meshplan.topology.formats import nvidia_topo as nvidia_topo
    from meshplan.topology.formats import rocm_smi as rocm_smi
    from meshplan.topology.formats import slurm as slurm
    from meshplan.topology.formats import slurm_env as slurm_env

# In the order in which they are tried. slurm_env reads variables, not a text.
FORMATS = (
    "nccl_topology",
    "kubernetes",
    "nvidia_topo",
    "rocm_smi",
    "amd_smi",
    "slurm",
    "nccl_log",
)

if not TYPE_CHECKING:  # so that type checkers find misspelt names
    __getattr__, __dir__, __all__ = make_lazy(__name__)
