"""The order model against a second implementation, which connects ranks one by one as NCCL does.

The model builds expressions from nodes. Here every rank gets its neighbours on the ring and its
``up`` and ``down`` in both trees, as in ``ncclTopoPreset``, ``connectRings``, ``connectTrees`` and
``ncclGetDtree`` of NCCL 2.30, and the additions follow these links.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from meshplan.planner import nccl_order as order
from meshplan.planner.nccl_order import Tree

NONE = -1


def list_splits(size: int) -> Iterator[list[int]]:
    """Every way to place ``size`` ranks on nodes; nodes are numbered by their first rank."""

    def extend(nodes: list[int]) -> Iterator[list[int]]:
        if len(nodes) == size:
            yield nodes
            return
        for node in range(max(nodes, default=-1) + 2):
            yield from extend([*nodes, node])

    return extend([])


def find_tree_links(count: int, rank: int) -> tuple[int, int, int, int]:
    """Parent, both children, and which child of its parent a rank is: ``ncclGetBtree``."""
    bit = 1
    while bit < count and not bit & rank:
        bit <<= 1
    if rank == 0:
        return NONE, NONE, bit >> 1 if count > 1 else NONE, 0
    up = (rank ^ bit) | (bit << 1)
    if up >= count:
        up = rank ^ bit
    low = bit >> 1
    down0 = down1 = NONE
    if low:
        down0, down1 = rank - low, rank + low
        while down1 >= count:
            down1 = NONE if low == 0 else rank + low
            low >>= 1
    return up, down0, down1, 0 if rank < up else 1


def find_second_links(count: int, rank: int) -> tuple[int, int, int, int]:
    """The same in the second tree: ``ncclGetDtree``."""
    if count % 2:
        found = find_tree_links(count, (rank - 1 + count) % count)
        up, *down = (NONE if one == NONE else (one + 1) % count for one in found[:3])
    else:
        found = find_tree_links(count, count - 1 - rank)
        up, *down = (NONE if one == NONE else count - 1 - one for one in found[:3])
    return up, down[0], down[1], found[3]


class Ranks:
    """The links of every rank of a communicator in one channel."""

    def __init__(self, node_of: Sequence[int], channel: int) -> None:
        names = list(dict.fromkeys(node_of))
        self.nodes = [[r for r, node in enumerate(node_of) if node == name] for name in names]
        self.size = len(node_of)
        self.channel = channel
        self.next = [NONE] * self.size
        self.up = [NONE] * self.size
        self.down: list[list[int]] = [[] for _ in range(self.size)]

    def connect_ring(self) -> None:
        ends = []
        for ranks in self.nodes:
            chain = list(ranks)
            if len(self.nodes) > 1:
                while chain[0] != ranks[self.channel % len(ranks)]:
                    chain.append(chain.pop(0))
                chain[1:] = chain[:0:-1]
            for one, other in itertools.pairwise(chain):
                self.next[one] = other
            ends.append((chain[0], chain[-1]))
        for node, (_, send) in enumerate(ends):
            self.next[send] = ends[(node + 1) % len(ends)][0]

    def connect_tree(self, second: bool) -> None:
        chains = []
        for ranks in self.nodes:
            chain = list(ranks)
            for _ in range(self.channel % len(ranks) if len(self.nodes) > 1 else 0):
                chain.append(chain.pop(0))
            for one, other in itertools.pairwise(chain):
                self.up[other] = one
                self.down[one].append(other)
            chains.append(chain)
        links = find_second_links if second else find_tree_links
        for node, chain in enumerate(chains):
            up, *children, kind = links(len(chains), node)
            if up != NONE:
                self.up[chain[0]] = self.pick_receiver(chains[up], kind)
            for which, child in enumerate(children):
                if child != NONE:
                    self.down[self.pick_receiver(chain, which)].append(chains[child][0])

    @staticmethod
    def pick_receiver(chain: Sequence[int], child: int) -> int:
        # treeToChild0 is the second GPU of a balanced tree, treeToChild1 the first.
        return chain[1] if child == 0 and len(chain) > 1 else chain[0]

    def reduce_ring(self, start: int) -> Tree:
        """The partial sum that arrives back at ``start`` after once round."""
        rank = self.next[start]
        total: Tree = rank
        while rank != start:
            rank = self.next[rank]
            total = (rank, total)
        return total

    def reduce_tree(self) -> Tree:
        (root,) = (rank for rank in range(self.size) if self.up[rank] == NONE)
        for rank in range(self.size):
            assert all(self.up[child] == rank for child in self.down[rank])
        return self.reduce_below(root)

    def reduce_below(self, rank: int) -> Tree:
        total: Tree = rank
        for child in self.down[rank]:
            total = (total, self.reduce_below(child))
        return total


def count_differences(nodes: Sequence[int]) -> int:
    sizes = [list(nodes).count(node) for node in dict.fromkeys(nodes)]
    different = 0
    for head in range(order.count_heads(sizes)):
        ranks = Ranks(nodes, head)
        ranks.connect_ring()
        ring = order.ring_order(nodes, head)
        different += ring[0] != 0
        for chunk, rank in enumerate(ring):
            different += order.ring_tree(ring, chunk) != ranks.reduce_ring(rank)
        for second in (False, True):
            ranks = Ranks(nodes, head)
            ranks.connect_tree(second)
            different += order.tree_tree(nodes, head, second=second) != ranks.reduce_tree()
    return different


@pytest.mark.parametrize("size", range(1, 8))
def test_all_splits_of_up_to_7_ranks_match(size: int) -> None:
    assert sum(map(count_differences, list_splits(size))) == 0


@pytest.mark.full
@pytest.mark.parametrize("size", [8, 9])
def test_all_splits_of_8_and_9_ranks_match(size: int) -> None:
    assert sum(map(count_differences, list_splits(size))) == 0


def draw_splits(count: int) -> Iterator[list[int]]:
    random = Random(2026)
    for _ in range(count):
        size = random.randint(10, 64)
        nodes = random.choices(range(random.randint(1, size)), k=size)
        if random.random() < 0.5:
            nodes.sort()
        yield nodes


def test_random_splits_of_up_to_64_ranks_match() -> None:
    assert sum(map(count_differences, draw_splits(100))) == 0


@pytest.mark.full
def test_3000_random_splits_of_up_to_64_ranks_match() -> None:
    assert sum(map(count_differences, draw_splits(3000))) == 0


def test_second_trees_match_the_drawings_of_nccl() -> None:
    # The parent of each node in the comments of src/graph/trees.cc: mirrored for 12 nodes, shifted
    # for 13.
    mirrored = [1, 3, 1, 11, 5, 7, 5, 3, 9, 7, 9, -1]
    shifted = [9, -1, 3, 5, 3, 9, 7, 5, 7, 1, 11, 0, 11]
    for parents in (mirrored, shifted):
        count = len(parents)
        assert [find_second_links(count, node)[0] for node in range(count)] == parents
        children = {
            node: [i for i, up in enumerate(parents) if up == node] for node in range(count)
        }
        for place in range(count):
            found = order.btree_children(count, place)
            moved = {order.second_tree_node(count, i) for i in found if i is not None}
            assert moved == set(children[order.second_tree_node(count, place)])
