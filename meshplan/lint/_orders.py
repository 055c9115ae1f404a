"""Similar meshes: other orders of axes, other sizes, other ranks; and how they compare.

The number of tried meshes depends on the mesh only: the same mesh gets the same advice on every
machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from meshplan.layout import Integers, Layout
from meshplan.lint._job import Job
from meshplan.lint._roles import Role
from meshplan.topology import Topology

# Limit of ranks over all tried meshes; least and largest number of meshes.
_RANKS = 4_000_000
_FEWEST, _MOST = 6, 150
# By traffic, the most first: each layer reduces along model axes and exchanges tokens with experts,
# gradients are reduced once a step, and pipeline stages only pass activations on.
_BY_TRAFFIC: tuple[Role, ...] = (
    "model",
    "experts",
    "shard",
    "replicate",
    "apart",
)


def list_axis_orders(layout: Layout) -> Iterator[Layout]:
    """The other orders of the axes, those that move the fewest first; axes of size 1 stay.

    Empty if the ranks are not consecutive: an order of axes implies that they are.
    """
    if not isinstance(layout.ranks, range):
        return
    wide = [i for i, size in enumerate(layout.sizes) if size > 1]
    orders = itertools.islice(itertools.permutations(wide), 1, 5040)
    for order in itertools.islice(sorted(orders, key=_count_moved_pairs), _limit_meshes(layout)):
        places = dict(zip(wide, order, strict=True))
        positions = [places.get(i, i) for i in range(len(layout.sizes))]
        yield Layout(
            tuple(layout.sizes[i] for i in positions),
            tuple(layout.axes[i] for i in positions),
            layout.ranks,
        )


def list_other_sizes(layout: Layout, axes: Sequence[int]) -> Iterator[Layout]:
    """Other sizes of ``axes`` with the same product, nearest first."""
    if not isinstance(layout.ranks, range) or len(axes) < 2:
        return
    now = [layout.sizes[i] for i in axes]
    found = [sizes for sizes in _factor(math.prod(now), len(axes)) if list(sizes) != now]

    def distance(sizes: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        # Rounded, so that equal ratios have equal distances in spite of rounding errors.
        ratios = sum(abs(math.log2(a / b)) for a, b in zip(sizes, now, strict=True))
        gone = sum(a == 1 and b > 1 for a, b in zip(sizes, now, strict=True))
        return gone, round(ratios, 6), sizes  # type: ignore[return-value]

    for sizes in sorted(found, key=distance)[: _limit_meshes(layout)]:
        new = dict(zip(axes, sizes, strict=True))
        yield Layout(
            tuple(new.get(i, size) for i, size in enumerate(layout.sizes)),
            layout.names,
            layout.ranks,
        )


def permute_ranks(layout: Layout, other: Layout) -> Layout:
    """``layout`` with the rank coordinates of ``other``, which has its axes in another order."""
    where = [other.axes.index(axis) for axis in layout.axes]
    ranks: list[int] = other.grid.transpose(where).flatten().tolist()
    return Layout(layout.sizes, layout.names, tuple(ranks))


def _limit_meshes(layout: Layout) -> int:
    return min(max(_RANKS // layout.world_size, _FEWEST), _MOST)


def _count_moved_pairs(order: Sequence[int]) -> tuple[int, Sequence[int]]:
    """The number of axis pairs in another order, then the order itself."""
    return sum(a > b for a, b in itertools.combinations(order, 2)), order


def _factor(product: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (product,)
        return
    low = [n for n in range(1, math.isqrt(product) + 1) if product % n == 0]
    for size in sorted({*low, *(product // n for n in low)}):
        for rest in _factor(product // size, count - 1):
            yield (size, *rest)


def number_domains(topology: Topology) -> Integers:
    """The domain of each rank by a number that no domain of another node has."""
    nodes, domains = topology.nodes, topology.domains
    assert nodes is not None
    assert domains is not None
    return nodes * (int(domains.max()) + 1) + domains


def count_domains_per_group(layout: Layout, topology: Topology, axis: str) -> Integers:
    """The domains that each group of an axis spans, an int64 array [groups]."""
    domains = np.sort(number_domains(topology)[layout.siblings(axis)], axis=1)
    spans: Integers = 1 + (domains[:, 1:] != domains[:, :-1]).sum(axis=1)
    return spans


def count_domains(layout: Layout, topology: Topology) -> dict[str, int]:
    """The most domains that a group of each axis spans, without axes of size 1."""
    return {
        axis: int(count_domains_per_group(layout, topology, axis).max())
        for axis, size in zip(layout.axes, layout.sizes, strict=True)
        if size > 1
    }


def weigh_domains(job: Job, spread: dict[str, int]) -> tuple[int, ...]:
    """The extra domains of the groups by role, the most traffic first."""
    roles = job.role_of
    return tuple(sum(n - 1 for a, n in spread.items() if roles[a] == role) for role in _BY_TRAFFIC)
