"""Where the ranks of a job sit by Slurm's environment alone, before any of them runs."""

from __future__ import annotations

from collections.abc import Mapping

from meshplan.topology._cluster import Cluster, SourcedNote
from meshplan.topology._merge_notes import uneven_ranks
from meshplan.topology._model import Topology
from meshplan.topology.formats._hostlist import hostlist
from meshplan.topology.formats.slurm_env import placement

__all__ = ["slurm_cluster"]


def slurm_cluster(environ: Mapping[str, str]) -> Cluster | None:
    """The cluster of a job step with a known distribution of tasks; else ``None``.

    Domains are unknown.

    Raises:
        TopologyInputError: values that are not well formed or that contradict each other.
    """
    nodes = placement(environ)
    if not nodes:
        return None
    hosts = hostlist(environ.get("SLURM_JOB_NODELIST") or environ["SLURM_NODELIST"])
    notes = uneven_ranks(nodes, nodes, hosts)
    return Cluster(
        topology=Topology.of(nodes),
        notes=tuple(SourcedNote("SLURM_TASKS_PER_NODE", note) for note in notes),
        hosts=tuple(hosts[node] for node in nodes),
        origin=f"Slurm: {len(nodes)} ranks on {len(set(nodes))} nodes",
    )
