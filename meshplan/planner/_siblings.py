"""The groups of one reduction by node placement, and NCCL's order in each.

A mesh of a million ranks has hundreds of thousands of groups and few different node placements. So
ranks are arrays, and Python code handles one group of each *pattern*: the sets of members that
share a node, and the communicator rank of each member. The model uses no other fact about a group,
so groups of one pattern have one association.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import cache, cached_property
from typing import Literal, TypeAlias, get_args

import numpy as np

from meshplan.layout import Integers, Layout
from meshplan.planner import nccl_order as order
from meshplan.topology import Topology

Algorithm: TypeAlias = Literal["ring", "tree"]
"""Algorithms of NCCL whose order of additions is modelled."""
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

_MAX_DRAWN = 4
_MAX_FORMS = 1 << 16


class Siblings:
    """All groups over ``axes``, and the orders in which NCCL may add in them.

    Args:
        layout: the mesh.
        axes: positions of the reduced axes, ascending.
        topology: rank placement; its nodes must be known.
        sort_ranks: NCCL ranks ascend by global rank, as in groups that torch creates for a mesh;
            else by mesh coordinate, as in groups of meshplan.
        channels: the most channels that NCCL uses; ``None``: one ring and two trees for each head
            (`nccl_order`), with as many heads as the fullest node of a group has ranks.

    Attributes:
        members: global ranks by NCCL rank, an int64 array [groups, ranks per group]; groups by
            the coordinate of the other axes, row-major.
        pattern: number of each group's pattern, an int64 array [groups]; patterns are numbered
            by the first group that has them.
    """

    def __init__(
        self,
        layout: Layout,
        axes: tuple[int, ...],
        topology: Topology,
        *,
        sort_ranks: bool,
        channels: int | None = None,
    ) -> None:
        self.sizes = tuple(s for i, s in enumerate(layout.sizes) if i not in axes)
        self.outer = tuple(i for i in range(len(layout.sizes)) if i not in axes)
        members = layout.siblings(axes)
        # Position by mesh coordinate of the member with NCCL rank 0, 1, ...: siblings have equal
        # inputs at equal coordinates, in whatever order the communicator has them.
        place: Integers | None = None
        if sort_ranks and bool((members[:, 1:] < members[:, :-1]).any()):
            place = members.argsort(axis=1)
            members = np.take_along_axis(members, place, axis=1)
        self.members = members
        nodes = topology.nodes_of(members)
        assert nodes is not None
        labels = _label_equal(nodes)
        keys = labels if place is None else np.concatenate([labels, place], axis=1)
        self.pattern, first = find_distinct_rows(keys)
        self._first_group = first
        self._labels = labels[first]
        self._place = None if place is None else place[first]
        self._most_channels = channels
        self._forms: dict[tuple[Algorithm, int, int], bytes] = {}
        self._drawn: dict[tuple[Algorithm, int, int, int], str] = {}
        self._tables: dict[tuple[Algorithm, tuple[int, ...]], Integers] = {}

    @property
    def size(self) -> int:
        """Ranks per group."""
        return int(self.members.shape[1])

    @cached_property
    def _nodes(self) -> list[tuple[tuple[int, ...], ...]]:
        """NCCL ranks of each node for each pattern."""
        return [_list_nodes(row) for row in self._labels]

    @cached_property
    def signatures(self) -> tuple[tuple[int, ...], ...]:
        """Ranks per node for each pattern, nodes in order of their first NCCL rank."""
        return tuple(tuple(map(len, nodes)) for nodes in self._nodes)

    def sets(self, along: Sequence[int]) -> Integers:
        """Groups that differ only along the axes ``along``: an int64 array [sets, groups]."""
        inner = [i for i, axis in enumerate(self.outer) if axis in along]
        rest = [i for i in range(len(self.outer)) if i not in inner]
        width = math.prod(self.sizes[i] for i in inner)
        grid = np.arange(len(self.pattern)).reshape(self.sizes)
        return grid.transpose(*rest, *inner).reshape(-1, width)

    @cached_property
    def heads(self) -> int:
        """Heads of the nodes of each group; a group on one node repeats its only one."""
        return max(map(order.count_heads, self.signatures))

    @cached_property
    def channels(self) -> range:
        """The channels of each group. Those of one number add the same part of a message."""
        return range(min(2 * self.heads, self._most_channels or 2 * self.heads))

    def associations(self, algorithm: Algorithm, groups: Integers) -> Integers:
        """A number for each of ``groups``: equal if and only if both add in the same order.

        By ``algorithm``. That means in every channel, and under ``ring`` for every chunk of the
        message. ``groups`` are positions in ``members``; the result is int64, of their shape.
        Numbers of two calls cannot be compared.
        """
        patterns = self.pattern[groups]
        present = tuple(np.flatnonzero(np.bincount(patterns.ravel())).tolist())
        table = self._tables.get((algorithm, present))
        if table is None:
            table = self._tables[algorithm, present] = self._number(algorithm, present)
        numbers: Integers = table[patterns]
        return numbers

    def _number(self, algorithm: Algorithm, patterns: Sequence[int]) -> Integers:
        """For each pattern the number of its order; 0 for those not among ``patterns``."""
        matching = [list(patterns)]
        # Most patterns already differ in the first channel. Only the others need the next one.
        for channel in self.channels:
            if all(len(part) == 1 for part in matching):
                break
            matching = [
                part for whole in matching for part in self._split(algorithm, whole, channel)
            ]
        table = np.zeros(len(self._first_group), dtype=np.int64)
        for number, part in enumerate(matching):
            table[part] = number
        return table

    def find_channel(self, algorithm: Algorithm, one: int, other: int) -> int:
        """The first channel in which two groups add in different orders.

        By ``algorithm``; ``one`` and ``other`` are positions in ``members``.

        Raises:
            StopIteration: there is none.
        """
        pair = [int(self.pattern[one]), int(self.pattern[other])]
        return next(c for c in self.channels if len(self._split(algorithm, pair, c)) > 1)

    def ring(self, group: int, channel: int = 0) -> tuple[int, ...]:
        """The ring of a group in a channel, as places by mesh coordinate."""
        ring = order.join_rings(self._nodes[int(self.pattern[group])], channel % self.heads)
        place = self._place_leaf(int(self.pattern[group]))
        return ring if self._place is None else tuple(map(place, ring))

    def tree(self, algorithm: Algorithm, group: int, chunk: int, channel: int = 0) -> order.Tree:
        """The association by ``algorithm`` in a group (a position in ``members``), of global ranks.

        It is that of one channel. Each ``chunk`` of the message starts at another rank of a ring; a
        tree ignores it.
        """
        nodes, head = self._nodes[int(self.pattern[group])], channel % self.heads
        ranks = self.members[group].tolist()
        if algorithm == "ring":
            tree = order.ring_tree(order.join_rings(nodes, head), chunk)
        else:
            tree = order.node_tree(nodes, head, second=channel >= self.heads)
        return order.relabel(tree, ranks.__getitem__)

    def draw(self, algorithm: Algorithm, group: int, chunk: int, channel: int) -> str:
        """The `tree` of the same ``algorithm``, ``group``, ``chunk`` and ``channel``, as text.

        The first texts are kept: they are examples of several hazards.
        """
        key = (algorithm, group, chunk, channel)
        text = self._drawn.get(key)
        if text is None and algorithm == "tree":
            nodes, head = self._nodes[int(self.pattern[group])], channel % self.heads
            names = list(map(str, self.members[group].tolist()))
            text = order.draw_nodes(nodes, head, second=channel >= self.heads, names=names)
        elif text is None:
            text = order.draw(self.tree(*key))
        if len(self._drawn) < _MAX_DRAWN:
            self._drawn[key] = text
        return text

    def smallest(self, groups: Integers) -> int:
        """Of ``groups``, the one on the fewest nodes; of several such, that of the lowest rank."""
        nodes = np.array([len(s) for s in self.signatures], dtype=np.int64)[self.pattern[groups]]
        lowest = self.members[groups].min(axis=1)
        return int(groups[np.lexsort((lowest, nodes))[0]])

    def _split(self, algorithm: Algorithm, patterns: list[int], channel: int) -> list[list[int]]:
        """Parts of ``patterns`` that add in one order in a channel."""
        if len(patterns) == 1 or self.size <= 2:  # a sum of two commutes
            return [patterns]
        parts: dict[Hashable, list[int]] = {}
        for pattern in patterns:
            parts.setdefault(self._find_form(algorithm, channel, pattern), []).append(pattern)
        return list(parts.values())

    def _find_form(self, algorithm: Algorithm, channel: int, pattern: int) -> Hashable:
        """The `_make_form` of a pattern, by its digest, as forms are as long as a group."""
        key = (algorithm, channel, pattern)
        if key not in self._forms:
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            self._forms[key] = hashlib.sha256(self._make_form(*key)).digest()
        return self._forms[key]

    def _make_form(self, algorithm: Algorithm, channel: int, pattern: int) -> bytes:
        if algorithm == "ring":
            # The ring itself is the canonical form. Chunk c adds the chain x[c+1], x[c+2], ...,
            # x[c] along the ring x. Commuting additions can swap only the first two leaves of a
            # chain: each later leaf is the difference of two partial sums. With 3 or more ranks,
            # x[c] is such a later leaf in chunk c. So two rings that agree in all chunks have the
            # same x[c] for every c, hence are equal; and equal rings agree in every chunk.
            return np.array(self.ring(int(self._first_group[pattern]), channel)).tobytes()
        # A sum is known by its lowest leaf. Each other leaf is the lowest of a sum that is once
        # added to one with a lower leaf: which one, and after how many others, tells all pairs.
        size = self.size
        pairs, added = array("q", bytes(8 * size)), [0] * size

        def join(one: int, other: int) -> int:
            low, high = (one, other) if one < other else (other, one)
            pairs[high] = low * size + added[low]
            added[low] += 1
            return low

        order.fold_nodes(
            self._nodes[pattern],
            channel % self.heads,
            channel >= self.heads,
            self._place_leaf(pattern),
            join,
        )
        return pairs.tobytes()

    def _place_leaf(self, pattern: int) -> Callable[[int], int]:
        if self._place is None:
            return lambda rank: rank
        place: list[int] = self._place[pattern].tolist()
        return place.__getitem__


def cache_siblings(
    layout: Layout, topology: Topology, *, sort_ranks: bool = True, channels: int | None = None
) -> Callable[[tuple[int, ...]], Siblings]:
    """A function from axes to their groups, which computes each once for as long as it lives."""
    return cache(
        lambda axes: Siblings(layout, axes, topology, sort_ranks=sort_ranks, channels=channels)
    )


def _list_nodes(labels: Integers) -> tuple[tuple[int, ...], ...]:
    """`order.nodes_of_group` of one row of `_label_equal`, whose labels ascend by first rank."""
    ranks = labels.argsort(kind="stable")
    starts = np.flatnonzero(np.diff(labels[ranks], prepend=-1)).tolist()
    listed = tuple(ranks.tolist())
    return tuple(listed[a:b] for a, b in zip(starts, [*starts[1:], len(listed)], strict=True))


def _label_equal(rows: Integers) -> Integers:
    """For each entry of int64 [n, m], the column of the first equal entry in its row."""
    column = rows.argsort(axis=1, kind="stable")
    values = np.take_along_axis(rows, column, axis=1)
    starts = np.zeros_like(column)
    starts[:, 1:] = np.arange(1, rows.shape[1]) * (values[:, 1:] != values[:, :-1])
    # Each entry gets the start of its run of equal values. The sort is stable, so the first
    # column of the run is there.
    run = np.maximum.accumulate(starts, axis=1)
    found = np.empty_like(column)
    np.put_along_axis(found, column, np.take_along_axis(column, run, axis=1), axis=1)
    return found


def find_distinct_rows(rows: Integers) -> tuple[Integers, Integers]:
    """Number the distinct rows of int64 [n, m] in order of appearance.

    Returns the number of each row [n], and for each number its first row [distinct].
    """
    # Sorting hashes is much cheaper than sorting rows. Equal rows have equal hashes. If unequal
    # rows collide, the comparison fails and the rows themselves are sorted.
    number, first = _number_by_appearance(_hash_rows(rows))
    if not np.array_equal(rows[first][number], rows):
        number, first = _number_by_appearance(rows)
    return number, first


def _hash_rows(rows: Integers) -> Integers:
    weights = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, rows.shape[1])
    found: Integers = (rows * weights).sum(axis=1)
    return found


def _number_by_appearance(keys: Integers) -> tuple[Integers, Integers]:
    _, first, number = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    order = first.argsort()
    renumber = np.empty_like(order)
    renumber[order] = np.arange(len(order))
    numbers: Integers = renumber[number.reshape(len(keys))]
    return numbers, first[order]
