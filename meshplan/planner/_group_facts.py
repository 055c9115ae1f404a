"""Facts about the groups of a layout on a topology: peers by class of link, blocks, new groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from meshplan.layout import Integers, Layout
from meshplan.planner._path_costs import (
    Cost,
    PeerCounts,
    Reach,
    ReductionStrategy,
)
from meshplan.topology import Topology

MAX_LAYOUTS = 64


class GroupFacts:
    """Facts about the groups of one layout, each computed once."""

    def __init__(self, layout: Layout, topology: Topology | None) -> None:
        self.layout = layout
        self.topology = topology or Topology.unknown(layout.highest_rank + 1)
        self.links = self.topology.links
        self._wide = tuple(i for i, size in enumerate(layout.sizes) if size > 1)
        # A number for the node of each rank, and one for node and domain together: domains are
        # numbered from 0 in each node.
        self._nodes, self._domains = self.topology.nodes, self.topology.domains
        if self._nodes is not None and self._domains is not None:
            self._domains = self._nodes * (int(self._domains.max()) + 1) + self._domains
        # Caches of this object: a cache of the class would keep layouts alive.
        self.peers = lru_cache(maxsize=None)(self._count_peers)
        self.nodes = lru_cache(maxsize=None)(self._count_nodes)
        self.runs = lru_cache(maxsize=None)(self._find_runs)
        self.blocks = lru_cache(maxsize=None)(self._find_blocks)

    def _count_nodes(self, axes: tuple[int, ...]) -> int:
        if self._nodes is None:
            return self.count_ranks(axes)
        ordered = np.sort(self._nodes[self._find_members(axes, 1, False)], axis=1)
        return 1 + int((ordered[:, 1:] != ordered[:, :-1]).sum(axis=1).max())

    def _find_runs(self, axes: tuple[int, ...]) -> tuple[int, int]:
        if self._nodes is None:
            return 1, 1
        group = self._find_members(axes, 1, False)
        node = _find_run(self._nodes[group])
        return 1 if self._domains is None else _find_run(self._domains[group]), node

    def _find_blocks(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of blocks of consecutive ranks that may be reduced first, intra-node, largest
        first. Empty if the group is on one node, or nodes are unknown.
        """
        # A block is a subtree of the contract's tree, smaller than the group and inside a node or a
        # domain: the largest for each.
        ranks = self.count_ranks(axes)
        subtrees = (1, *_list_subtrees([self.layout.sizes[i] for i in axes]), ranks)
        steps = [math.gcd(ranks, run) for run in self.runs(axes)]
        domain, node = (max(one for one in subtrees if step % one == 0) for step in steps)
        if node == ranks:
            return ()
        return tuple(sorted({min(domain, node), node} - {1}, reverse=True))

    def find_reach(self, strategy: ReductionStrategy) -> Reach:
        """How far apart the ranks are that reduce by ``strategy``."""
        axes, inner, rest = strategy.axes, strategy.inner, strategy.rest
        return Reach(
            links=self.links,
            sizes=tuple(self.layout.sizes[i] for i in axes),
            flat=self.peers(axes),
            runs=self.runs(axes),
            inside=self.peers(axes, inner) if inner > 1 else None,
            across=self.peers(axes, inner, across=True) if inner > 1 else None,
            rest=self.peers(rest) if rest else None,
            scatter=bool(strategy.sharded),
        )

    def list_missing(self, strategy: ReductionStrategy) -> tuple[str, ...]:
        axes, inner = strategy.axes, strategy.inner
        found = self.find_missing(axes, inner)
        if inner > 1:
            found += self.find_missing(axes, inner, across=True)
        found += self.find_missing(strategy.rest) if strategy.rest else ()
        return tuple(dict.fromkeys(found))

    def _count_peers(
        self,
        axes: tuple[int, ...],
        inner: int = 1,
        *,
        across: bool = False,
    ) -> PeerCounts:
        """The peers in a group over ``axes``, in a block of ``inner`` of its ranks, or ``across``
        such blocks."""
        size = self.count_ranks(axes)
        if inner > 1:
            size = size // inner if across else inner
        if self._nodes is None:
            return PeerCounts(0, 0, size - 1)
        groups = self._find_members(axes, inner, across)
        in_node = _count_fewest_equal(self._nodes[groups])
        if self._domains is None:
            return PeerCounts(0, in_node - 1, size - in_node)
        in_domain = min(_count_fewest_equal(self._domains[groups]), in_node)
        return PeerCounts(in_domain - 1, in_node - in_domain, size - in_node)

    def count_ranks(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.layout.sizes[i] for i in axes)

    def find_missing(
        self,
        axes: tuple[int, ...],
        inner: int = 1,
        *,
        across: bool = False,
    ) -> tuple[str, ...]:
        """The group in words, if neither torch nor the job has created it."""
        # Torch has a group for each axis and one for the whole job, with sorted ranks. Flattened
        # meshes of users do not count: they may differ from rank to rank and from call to call.
        layout = self.layout
        names = ", ".join(layout.axes[i] for i in axes)
        if inner > 1:
            for k in range(1, len(axes)):
                if self.count_ranks(axes[k:]) == inner:
                    return self.find_missing(axes[:k] if across else axes[k:])
            return (f"{'across' if across else 'in'} blocks of {inner} over ({names})",)
        if len(axes) == 1 and layout.ascends(axes):
            return ()
        if axes == self._wide and layout.ranks == range(self.topology.world_size):
            return ()
        return (f"over ({names})",)

    def predict_creation(self, created: Sequence[str]) -> Cost:
        """The share of one use in the creation of groups."""
        seconds = len(created) * self.links.group / self.links.uses
        return Cost(nanoseconds=round(seconds * 1e9), creates=tuple(created))

    def _find_members(self, axes: tuple[int, ...], inner: int, across: bool) -> Integers:
        """Global ranks [groups, ranks per group]; at least one group of each placement on nodes."""
        groups = self.layout.siblings(axes)
        if inner > 1:
            groups = groups.reshape(len(groups), -1, inner)
            groups = groups.swapaxes(1, 2) if across else groups
            groups = groups.reshape(-1, groups.shape[-1])
        node_size, world = self.topology.node_map, self.topology.world_size
        uniform = isinstance(node_size, int) and not isinstance(self.topology.domain_map, tuple)
        if isinstance(self.layout.ranks, range) and uniform:
            assert isinstance(node_size, int)
            # Groups are shifted copies of each other, and nodes have one size. So the offset of
            # its first rank in a node determines the placement of a group, unless the group
            # reaches the last node, which may be smaller.
            starts = np.full(node_size, -1, dtype=np.int64)
            starts[groups[:, 0] % node_size] = np.arange(len(groups))
            chosen = starts[starts >= 0]
            if world % node_size:
                last = groups.max(axis=1) >= world - world % node_size
                chosen = np.concatenate((chosen, last.nonzero()[0]))
            groups = groups[chosen]
        return groups


@lru_cache(maxsize=MAX_LAYOUTS)
def find_groups(layout: Layout, topology: Topology | None) -> GroupFacts:
    return GroupFacts(layout, topology)


def _count_fewest_equal(values: Integers) -> int:
    ordered = values
    if bool((values[:, 1:] < values[:, :-1]).any()):
        ordered = np.sort(values, axis=1)
    ends = np.ones(ordered.shape, dtype=np.bool_)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=ends[:, :-1])
    at = ends.ravel().nonzero()[0]
    return min(int(at[0]) + 1, int(np.diff(at).min()) if len(at) > 1 else values.size)


def _list_subtrees(sizes: Sequence[int]) -> list[int]:
    """Sizes of blocks of consecutive leaves, above 1 and below all, that are subtrees of the
    contract's tree: whole inner axes, times a power of two that divides the next axis."""
    found, trailing = [], 1
    for size in reversed(sizes):
        power = 2
        while size % power == 0 and power < size:
            found.append(trailing * power)
            power *= 2
        trailing *= size
        found.append(trailing)
    return found[:-1]


def _find_run(rows: Integers) -> int:
    """The most columns of a block for which each row is constant in every block, of which the last
    may be smaller; the width if nothing changes."""
    changes = (rows[:, 1:] != rows[:, :-1]).any(axis=0).nonzero()[0] + 1
    return int(np.gcd.reduce(changes)) or rows.shape[1]
