"""Whether all groups that must agree have the same placement on nodes and domains."""

from __future__ import annotations

import math

import numpy as np

from meshplan.layout import Layout
from meshplan.lint._job import Job
from meshplan.lint._orders import number_domains
from meshplan.lint._reductions import Reductions, list_reductions
from meshplan.planner import Problem, are_uniform
from meshplan.topology import Topology

_SMALL = 1 << 14  # ranks


def is_uniform(job: Job, topology: Topology) -> bool:
    """Whether all groups of this job that must agree have the same node and domain placement.

    Stricter than the rules: advice should not rely on two placements whose orders of additions
    happen to return the same bits.
    """
    topologies = [topology, find_islands(topology)]
    found = [(r, t) for r in list_reductions(job) for t in topologies if t is not None]
    return not any(_part_differs(r, t) for r, t in found) and all(
        are_uniform(r.problem, t, steps=r.steps) for r, t in found
    )


def find_islands(topology: Topology) -> Topology | None:
    """Domains as if they were nodes; ``None`` unless some node has several of them."""
    domains, nodes = topology.domains, topology.nodes
    if domains is None or nodes is None or topology.node_map == topology.domain_map:
        return None
    if isinstance(topology.node_map, int) and isinstance(topology.domain_map, int):
        per_node, left = divmod(topology.node_map, topology.domain_map)
        if not left and per_node > 1:
            return Topology.uniform(topology.world_size, node_size=topology.domain_map)
    found, number = np.unique(number_domains(topology), return_inverse=True)
    if len(found) == len(np.unique(nodes, return_index=True)[0]):
        return None
    return Topology.of(number.tolist())


def _part_differs(reductions: Reductions, topology: Topology) -> bool:
    """Whether a small part of a large mesh already shows different placements.

    If the parts of two groups differ, the groups differ. This holds for ascending ranks, where the
    part of a group has its lowest ranks.
    """
    layout = reductions.problem.layout
    if layout.world_size <= _SMALL or not isinstance(layout.ranks, range):
        return False
    for whole in range(len(layout.sizes)):
        part = _take_part(layout, whole)
        problem = reductions.problem
        small = Problem(part, problem.src, problem.dst)
        if not are_uniform(small, topology, steps=reductions.steps):
            return True
    return False


def _take_part(layout: Layout, whole: int) -> Layout:
    """The first coordinates of each axis, as many as possible of the axis ``whole``."""
    sizes = [1] * len(layout.sizes)
    sizes[whole] = min(layout.sizes[whole], _SMALL)
    grown = True
    while grown:
        grown = False
        for i, size in enumerate(layout.sizes):
            if sizes[i] < size and math.prod(sizes) * 2 <= _SMALL:
                sizes[i], grown = min(sizes[i] * 2, size), True
    ranks: list[int] = layout.grid[tuple(slice(size) for size in sizes)].flatten().tolist()
    return Layout(tuple(sizes), layout.names, tuple(ranks))
