"""The groups of one reduction, sorted by how they fall on nodes, and the order NCCL adds in each.

A mesh of a million ranks has hundreds of thousands of groups and few ways in which they fall on
nodes. Ranks are handled as tensors; Python sees only one group of each *pattern*: which members
share a node, and which member has which rank in the communicator. The model knows nothing else of
a group, so groups of one pattern have one association.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from meshplan.layout import Layout
from meshplan.planner import _nccl_order as order
from meshplan.topology import Topology

__all__ = ["ALGORITHMS", "Algorithm", "Siblings"]

Algorithm: TypeAlias = Literal["ring", "tree"]
"""Algorithms of NCCL whose order of additions is modelled."""
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


class Siblings:
    """All groups over ``axes``, and in how many orders NCCL may add in them.

    Args:
        layout: the mesh.
        axes: positions of the reduced axes, ascending.
        topology: where ranks sit; its nodes must be known.
        sort_ranks: a group's NCCL rank is its place by global rank, as in the groups that torch
            makes for a mesh; else its place by mesh coordinate, as in those of meshplan.

    Attributes:
        members: global ranks by NCCL rank, int64 CPU tensor [groups, ranks per group]; groups by
            the coordinate of the other axes, row-major.
        pattern: number of each group's pattern, int64 CPU tensor [groups]; patterns are numbered
            by the first group that has them.
    """

    def __init__(
        self, layout: Layout, axes: tuple[int, ...], topology: Topology, *, sort_ranks: bool
    ) -> None:
        self.sizes = tuple(s for i, s in enumerate(layout.sizes) if i not in axes)
        self.outer = tuple(i for i in range(len(layout.sizes)) if i not in axes)
        members = layout.siblings(axes)
        # Place by mesh coordinate of the member with NCCL rank 0, 1, ...: what the groups' inputs
        # correspond by is the coordinate, whatever the order inside the communicator.
        place: Tensor | None = None
        if sort_ranks and bool((members[:, 1:] < members[:, :-1]).any()):
            members, place = members.sort(dim=1)
        self.members = members
        nodes = topology.nodes_of(members)
        assert nodes is not None
        labels = _first_of_equal(nodes)
        keys = labels if place is None else torch.cat([labels, place], dim=1)
        self.pattern, first = _distinct_rows(keys)
        self._first_group = first
        self._labels = labels[first]
        self._place = None if place is None else place[first]
        self._associations: dict[tuple[Algorithm, int], int] = {}
        self._numbers: dict[Algorithm, dict[Hashable, int]] = {name: {} for name in ALGORITHMS}

    @property
    def size(self) -> int:
        """Ranks per group."""
        return self.members.shape[1]

    @cached_property
    def signatures(self) -> tuple[tuple[int, ...], ...]:
        """Ranks per node for each pattern, nodes in order of their first NCCL rank."""
        return tuple(
            tuple(len(ranks) for ranks in order.nodes_of_group(row))
            for row in self._labels.tolist()
        )

    def sets(self, along: Sequence[int]) -> Tensor:
        """Groups that differ only along the axes ``along``: int64 CPU tensor [sets, groups]."""
        inner = [i for i, axis in enumerate(self.outer) if axis in along]
        rest = [i for i in range(len(self.outer)) if i not in inner]
        width = 1
        for i in inner:
            width *= self.sizes[i]
        grid = torch.arange(len(self.pattern), device="cpu").reshape(self.sizes)
        return grid.permute(*rest, *inner).reshape(-1, width)

    def associations(self, algorithm: Algorithm, groups: Tensor) -> Tensor:
        """A number for each of ``groups``: equal if and only if both add in the same order.

        For ``ring`` that means: in the same order for every chunk of the message.

        Args:
            algorithm: ``ring`` or ``tree``.
            groups: int64: positions of groups in ``members``.

        Returns:
            int64, of the shape of ``groups``.
        """
        patterns = self.pattern[groups]
        table = torch.zeros(len(self._first_group), dtype=torch.int64, device="cpu")
        for pattern in torch.unique(patterns).tolist():
            table[pattern] = self._association(algorithm, pattern)
        return table[patterns]

    def ring(self, group: int) -> tuple[int, ...]:
        """The ring of a group, as places by mesh coordinate."""
        place = self._leaf(int(self.pattern[group]))
        labels = self._labels[int(self.pattern[group])].tolist()
        return tuple(place(rank) for rank in order.ring_order(labels))

    def tree(self, algorithm: Algorithm, group: int, chunk: int) -> order.Tree:
        """The association in a group, with global ranks as leaves.

        Args:
            algorithm: ``ring`` or ``tree``.
            group: its position in ``members``.
            chunk: of the message: each of them starts at another rank of a ring. Of no account for
                a tree.
        """
        labels = self._labels[int(self.pattern[group])].tolist()
        ranks = self.members[group].tolist()
        if algorithm == "ring":
            tree = order.ring_tree(order.ring_order(labels), chunk)
        else:
            tree = order.tree_tree(labels)
        return _relabelled(tree, ranks.__getitem__)

    def smallest(self, groups: Tensor) -> int:
        """Of ``groups`` the one on the fewest nodes, and of those the one with the lowest rank."""
        nodes = torch.tensor([len(s) for s in self.signatures], dtype=torch.int64, device="cpu")
        lowest = self.members[groups].min(dim=1).values
        fewest = nodes[self.pattern[groups]]
        lowest = lowest.masked_fill(fewest > fewest.min(), int(lowest.max()) + 1)
        return int(groups[int(lowest.argmin())])

    def _association(self, algorithm: Algorithm, pattern: int) -> int:
        key = (algorithm, pattern)
        if key not in self._associations:
            form = self._form(algorithm, pattern)
            numbers = self._numbers[algorithm]
            self._associations[key] = numbers.setdefault(form, len(numbers))
        return self._associations[key]

    def _form(self, algorithm: Algorithm, pattern: int) -> Hashable:
        if self.size <= 2:
            return None  # one addition, and it commutes
        if algorithm == "ring":
            # Chunk c is the chain x[c+1], x[c+2], x[c+3], ..., x[c] along the ring x. A chain is
            # an unordered tree in which only the first two leaves may change places: every later
            # leaf is what one partial sum has and the one before has not. With 3 or more ranks,
            # x[c] is such a later leaf in chunk c, so rings whose chunks all agree have x[c] in
            # common for every c: they are equal. Equal rings agree in every chunk.
            return self.ring(int(self._first_group[pattern]))
        tree = order.tree_tree(self._labels[pattern].tolist())
        if self._place is not None:
            tree = _relabelled(tree, self._leaf(pattern))
        return order.draw(order.canonical(tree))

    def _leaf(self, pattern: int) -> Callable[[int], int]:
        if self._place is None:
            return lambda rank: rank
        place: list[int] = self._place[pattern].tolist()
        return place.__getitem__


def _relabelled(tree: order.Tree, leaf: Callable[[int], int]) -> order.Tree:
    def join(left: order.Tree, right: order.Tree) -> order.Tree:
        return left, right

    def renamed(rank: int) -> order.Tree:
        return leaf(rank)

    return order.fold(tree, renamed, join)


def _first_of_equal(rows: Tensor) -> Tensor:
    """For each entry of int64 [n, m], the column of the first equal entry in its row."""
    values, column = rows.sort(dim=1, stable=True)
    starts = torch.zeros_like(column)
    changed = values[:, 1:] != values[:, :-1]
    starts[:, 1:] = torch.arange(1, rows.shape[1], device="cpu") * changed
    # Where the run of equal values starts; a stable sort has the first column there.
    run = starts.cummax(dim=1).values
    return torch.empty_like(rows).scatter_(1, column, column.gather(1, run))


def _distinct_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Number the distinct rows of int64 [n, m] in order of appearance.

    Returns the number of each row [n], and for each number its first row [distinct].
    """
    # Sorting numbers is much cheaper than sorting rows. Equal rows have equal hashes; that equal
    # hashes have equal rows is checked, not hoped for.
    random = torch.Generator(device="cpu").manual_seed(0)
    weights = torch.randint(
        -(2**63), 2**63 - 1, (rows.shape[1],), dtype=torch.int64, device="cpu", generator=random
    )
    hashes = (rows * weights).sum(dim=1)
    number, first = _by_appearance(torch.unique(hashes, return_inverse=True)[1])
    if not torch.equal(rows[first][number], rows):
        number, first = _by_appearance(torch.unique(rows, dim=0, return_inverse=True)[1])
    return number, first


def _by_appearance(number: Tensor) -> tuple[Tensor, Tensor]:
    count = len(number)
    first = torch.full((int(number.max()) + 1,), count, dtype=torch.int64, device="cpu")
    first.scatter_reduce_(0, number, torch.arange(count, device="cpu"), reduce="amin")
    first, old = first.sort()
    renumber = torch.empty_like(old)
    renumber[old] = torch.arange(len(old), device="cpu")
    return renumber[number], first
