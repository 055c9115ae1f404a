"""MP103 and MP104: meshes that another order of axes, or fewer GPUs of a rack, would serve."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshplan.layout import Layout
from meshplan.lint._finding import Finding
from meshplan.lint._job import Job, Role
from meshplan.lint._orders import as_text, axis_orders
from meshplan.topology import LINK_CLASSES, Cluster, Topology

__all__ = ["placement_findings", "spanning"]

# Axes whose groups talk most come first: layers are reduced on model axes all the time, gradients
# once in a step, and stages of a pipeline only send activations on.
_TALK: tuple[Role, ...] = ("model", "shard", "replicate", "apart")
# Racks that NVLink joins have 36, 72 or 144 GPUs; hosts of other numbers are a matter of taste.
_SMALLEST_RACK = 32
_INSIDE = LINK_CLASSES.index("domain")


def placement_findings(job: Job, cluster: Cluster) -> Iterator[Finding]:
    """Warnings; none where the domains are unknown."""
    if cluster.topology.domains is None:
        return
    yield from _spans(job, cluster.topology)
    yield from _rack(job, cluster)


def spanning(layout: Layout, topology: Topology) -> frozenset[str]:
    """Names of the axes of which some group is not inside one domain."""
    return frozenset(
        axis
        for axis, size in zip(layout.axes, layout.sizes, strict=True)
        if size > 1 and bool((topology.link_classes(layout.siblings(axis)) != _INSIDE).any())
    )


def _spans(job: Job, topology: Topology) -> Iterator[Finding]:
    """MP103: some order of axes has fewer axes across domains, those that talk most first."""
    roles = dict(zip(job.layout.axes, job.roles, strict=True))

    def weight(across: frozenset[str]) -> tuple[int, ...]:
        return tuple(sum(roles[axis] == role for axis in across) for role in _TALK)

    now = spanning(job.layout, topology)
    best, better = weight(now), None
    for layout in axis_orders(job.layout):
        across = spanning(layout, topology)
        if weight(across) < best:
            best, better = weight(across), (layout, across)
    if better is None:
        return
    layout, across = better
    freed = [axis for axis in job.layout.axes if axis in now - across]
    kept = "its groups" if len(freed) == 1 else "their groups"
    yield Finding(
        code="MP103",
        severity="warning",
        message=f"groups of {' and '.join(freed)} span domains; in the order "
        f"{', '.join(layout.axes)} {kept} would be inside them",
        source=job.source,
        subject=str(job.layout),
        details=(f"the mesh {as_text(layout)} has {_listed(across)} across domains",),
        data={
            "axes": freed,
            "spanning": sorted(now),
            "order": list(layout.axes),
            "spanning_then": sorted(across),
        },
    )


def _rack(job: Job, cluster: Cluster) -> Iterator[Finding]:
    """MP104: on a rack of 72, groups of 64 do not come out even."""
    gpus, used = cluster.domain_gpus, _ranks_of_domain(cluster.topology)
    if gpus is None or used is None or gpus < _SMALLEST_RACK or used != gpus or _is_power(gpus):
        return
    layout = job.layout
    if layout.world_size <= gpus:
        return
    blocks = [math.prod(layout.sizes[i:]) for i in range(len(layout.sizes))]
    uneven = [
        (axis, size, block)
        for axis, size, block in zip(layout.axes, layout.sizes, blocks, strict=True)
        if size > 1 and _is_power(size) and gpus % block and block % gpus
    ]
    if not uneven:
        return
    axis, size, inner = uneven[-1]
    part = 1 << (gpus.bit_length() - 1)
    racks, now = -(-layout.world_size // part), -(-layout.world_size // gpus)
    yield Finding(
        code="MP104",
        severity="warning",
        message=f"{axis}={size} does not come out even on domains of {gpus} GPUs: blocks of "
        f"{inner} ranks cross from one domain into the next; take {part} of {gpus} GPUs of each",
        source=job.source,
        subject=str(layout),
        details=(
            f"{part} of {gpus}: {racks} domains instead of {now}; Slurm with topology/block: "
            "--segment=16, 16 hosts of 4 GPUs",
        )
        if gpus == 72
        else (f"{part} of {gpus}: {racks} domains instead of {now}",),
        data={"axis": axis, "domain_gpus": gpus, "take": part, "domains": racks},
    )


def _ranks_of_domain(topology: Topology) -> int | None:
    """Ranks of each domain, but for the last one."""
    if not isinstance(topology.domain_map, int) or not isinstance(topology.node_map, int):
        return None
    return topology.domain_map if topology.node_map % topology.domain_map == 0 else None


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _listed(axes: frozenset[str]) -> str:
    return " and ".join(sorted(axes)) or "no axis"
