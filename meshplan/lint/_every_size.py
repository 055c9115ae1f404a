"""Judges a mesh for every number of nodes, if the number of its ranks is unknown.

One axis has the ranks that the others leave. Let the axes inside of it have I ranks, and a node S.
The place of a rank on its node is its number modulo S, which repeats along the axis after
P = S / gcd(I, S) coordinates. If the axis is longer than 2P coordinates and a node, then:

* groups over inner axes begin at all places that occur at all, whatever its length;
* groups over outer axes have their members on nodes of their own;
* groups over the axis itself have equal patterns if they do over their first 2P members;
* the places at which outer coordinates begin depend on its length modulo P only.

So whether all groups that must agree have one pattern depends on the length modulo P from there on,
and judging up to there and one period more judges every length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from meshplan._message_text import format_first
from meshplan.errors import MeshplanError
from meshplan.layout import Layout
from meshplan.lint._facts import JobFacts
from meshplan.lint._job import Job
from meshplan.lint._reductions import is_uniform
from meshplan.topology import Cluster

# A number of nodes that the products of usual sizes divide.
_PROBE = 2**7 * 3**3 * 5 * 7
_MOST_RANKS = 1 << 16
_MOST_STEPS = 256


class EverySize(NamedTuple):
    """The verdict on a mesh for every number of nodes."""

    # A number of nodes to report: the smallest with a hazard, or the smallest with two coordinates
    # along the axis of the rest
    nodes: int
    note: str  # the verdict in words
    is_open: bool = False  # whether some numbers of nodes have a hazard, and larger ones none
    is_hazard: bool = True  # whether any number has one


def judge_every_size(
    read: Callable[[int], Sequence[Job]],
    place: Callable[[Job], Cluster],
    per_node: int,
) -> EverySize | None:
    """The verdict for every number of nodes of ``per_node`` ranks; ``None`` if there is none.
    ``read`` returns the jobs of the file for a number of ranks.
    """
    try:
        probes = [read(_PROBE * per_node * times) for times in (1, 2)]
    except MeshplanError:
        return None
    growing = []
    for one, other in zip(*probes, strict=False):
        axes = [a for a, b in enumerate(one.layout.sizes) if b != other.layout.sizes[a]]
        fits = one.layout.axes == other.layout.axes and len(axes) == 1
        if one.layout != other.layout and not (fits and one.layout.world_size == _PROBE * per_node):
            return None
        growing += [(one, axes[0])] if axes else []
    if not growing or len(probes[0]) != len(probes[1]):
        return None
    taken = [job.layout.world_size // job.layout.sizes[axis] for job, axis in growing]
    step = math.lcm(per_node, *taken) // per_node
    shortest = max(step * per_node // one for one in taken)
    try:
        bound = max(_find_bound(_resize(*one, step * per_node), one[1], place) for one in growing)
        if any(job.find_unknown_axes() for job, _ in growing) or not (
            0 < bound <= _MOST_STEPS and bound * step * per_node <= _MOST_RANKS
        ):
            return None
        verdicts = [
            max(_judge(job, axis, step * at * per_node, place) for job, axis in growing)
            for at in range(1, bound + 1)
        ]
    except MeshplanError:
        return None
    hazards = [at for at, verdict in enumerate(verdicts, 1) if verdict == _HAZARD]
    if not hazards:
        if _UNKNOWN in verdicts:
            return None
        nodes = step * (2 if shortest == 1 else 1)
        note = f"no hazard for any number of nodes of {per_node}"
        return EverySize(nodes, note, is_hazard=False)
    first = hazards[0]
    some = f"multiple of {step} nodes" if step > 1 else "number of nodes"
    if len(hazards) == bound + 1 - first:
        return EverySize(first * step, f"for every {some} from {first * step} on")
    clean = [at * step for at in range(1, bound + 1) if at not in hazards]
    note = (
        f"depends on the number of nodes: a hazard on {first * step}, none on {format_first(clean)}"
    )
    return EverySize(first * step, note, is_open=True)


_UNIFORM, _UNKNOWN, _HAZARD = range(3)


def _judge(job: Job, axis: int, ranks: int, place: Callable[[Job], Cluster]) -> int:
    """Whether groups have one pattern, another one without a hazard in the model, or a hazard."""
    resized = _resize(job, axis, ranks)
    cluster = place(resized)
    if is_uniform(resized, cluster.topology):
        return _UNIFORM
    return _HAZARD if JobFacts(resized, cluster, is_trial=True).codes["MP101"] else _UNKNOWN


def _resize(job: Job, axis: int, ranks: int) -> Job:
    """The job on another number of ranks."""
    sizes = list(job.layout.sizes)
    sizes[axis] = ranks // (job.layout.world_size // sizes[axis])
    return replace(job, layout=Layout(tuple(sizes), job.layout.names), roles=job.given)


def _find_bound(job: Job, axis: int, place: Callable[[Job], Cluster]) -> int:
    """The multiples of the smallest number of nodes to judge; 0 if no number is enough."""
    topology = place(job).topology
    sizes, length = job.layout.sizes, job.layout.sizes[axis]
    if job.layout.ranks != range(job.layout.world_size):
        return 0
    longer = place(_resize(job, axis, 64 * job.layout.world_size)).topology
    node = longer.node_map
    # Racks of unknown size may be a node (hosts of 4 GPUs).
    if not isinstance(node, int) or (node == 4 and topology.domains is None):
        return 0
    inner = math.prod(sizes[axis + 1 :])
    period = node // math.gcd(inner, node)
    longest = 2 * period + -(-node // inner) + 2
    return -(-longest // length) + period // math.gcd(period, length)
