"""Parsers of descriptions of clusters: one module for each format, and one for the tools of AMD.

Each module has ``recognises(text)``, which is fast and never raises, and ``read(text)``, which
returns a ``Reading`` or raises ``TopologyInputError`` with the line. None imports torch.
"""

# In the order in which they are tried.
FORMATS = (
    "nccl_topology",
    "kubernetes",
    "nvidia_topo",
    "rocm_smi",
    "slurm",
    "nccl_log",
)
