"""The NCCL order model: rings, trees, chunks, and the published divergence table."""

from __future__ import annotations

import sys

import numpy as np
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import LayoutError
from meshplan.layout import signature
from meshplan.planner import nccl_order as order
from meshplan.planner.nccl_order import Tree


def groups_8x5() -> dict[str, list[list[int]]]:
    ranks = np.arange(40).reshape(8, 5)
    return {"fsdp": ranks.tolist(), "ddp": ranks.T.tolist()}


def nodes_of(group: list[int], domain: int = 8) -> list[int]:
    return [rank // domain for rank in group]


class TestKnownOrders(TestCase):
    def test_orders_of_two_p4d_hosts(self) -> None:
        # Read from the logs of two AWS P4d hosts: one chain per host, joined at the heads.
        tree = order.tree_tree([0] * 8 + [1] * 8)
        self.assertExpectedInline(
            order.draw(tree),
            "((0+(1+(2+(3+(4+(5+(6+7)))))))+(8+(9+(10+(11+(12+(13+(14+15))))))))",
        )
        mirrored = order.tree_tree([1] * 8 + [0] * 8)
        assert isinstance(tree, tuple)
        assert order.same_bits(mirrored, (tree[1], tree[0]))

    def test_channels_of_two_p4d_hosts(self) -> None:
        # The same logs: a card for two GPUs, so the heads of the 4 channels are GPUs 0, 2, 4 and 6.
        # Channels 4 to 7 have the second trees, whose root is on the other host.
        nodes = [0] * 8 + [1] * 8
        one = "(2+(3+(4+(5+(6+(7+(0+1)))))))"
        two = "(10+(11+(12+(13+(14+(15+(8+9)))))))"
        assert order.draw(order.tree_tree(nodes, 2)) == f"({one}+{two})"
        assert order.draw(order.tree_tree(nodes, 2, second=True)) == f"({two}+{one})"

    def test_rings_of_three_h100_hosts(self) -> None:
        # Channels 0 and 1 of a log of 24 ranks with a card for each GPU, as far as NCCL wrote them.
        nodes = [0] * 8 + [1] * 8 + [2] * 8
        rings = [" ".join(map(str, order.ring_order(nodes, head)[:20])) for head in (0, 1)]
        self.assertExpectedInline(
            "\n".join(rings),
            """\
0 7 6 5 4 3 2 1 8 15 14 13 12 11 10 9 16 23 22 21
0 7 6 5 4 3 2 9 8 15 14 13 12 11 10 17 16 23 22 21""",
        )

    def test_sums_of_rings_are_known(self) -> None:
        ring = order.ring_order([0, 0, 0, 1, 1])
        self.assertExpectedInline(str(ring), "(0, 2, 1, 3, 4)")
        self.assertExpectedInline(order.draw(order.ring_tree(ring, 0)), "(0+(4+(3+(1+2))))")
        self.assertExpectedInline(order.draw(order.ring_tree(ring, 4)), "(4+(3+(1+(2+0))))")
        # The block of rank 1 ends at rank 1, which is at ring position 2.
        self.assertExpectedInline(order.draw(order.root_tree(ring, 1)), "(1+(2+(0+(4+3))))")

    def test_invalid_arguments_are_refused(self) -> None:
        self.assertExpectedRaisesInline(
            LayoutError,
            lambda: order.ring_tree((0, 1), 2),
            """MP111: ring chunk 2 does not exist in a ring of 2 ranks; use 0..1""",
        )
        self.assertExpectedRaisesInline(
            LayoutError,
            lambda: order.tree_tree([]),
            """MP111: node_of_member is empty; give one node number per group rank""",
        )
        self.assertExpectedRaisesInline(
            LayoutError,
            lambda: order.canonical((0, (1, 0))),
            """MP111: group rank 0 occurs twice in a tree; each rank adds once""",
        )
        self.assertExpectedRaisesInline(
            LayoutError,
            lambda: order.ring_chunks(-1, 4, 4),
            (
                "MP111: ring_chunks needs numel >= 0, group_size >= 1 and itemsize >= 1; "
                "got numel=-1, group_size=4, itemsize=4"
            ),
        )
        self.assertExpectedRaisesInline(
            LayoutError,
            lambda: order.root_tree((0, 1), 5),
            """MP111: group rank 5 is not on the ring (0, 1)""",
        )
        self.assertExpectedRaisesInline(
            LayoutError,
            lambda: order.btree_children(3, 3),
            """MP111: node 3 does not exist among 3 nodes""",
        )


def test_signatures_of_the_8_by_5_mesh_are_known() -> None:
    assert order.nodes_of_group([4, 4, 2, 4, 2]) == ((0, 1, 3), (2, 4))
    found = [signature(range(len(group)), nodes_of(group)) for group in groups_8x5()["fsdp"]]
    assert found == [(5,), (3, 2), (5,), (1, 4), (4, 1), (5,), (2, 3), (5,)]


def test_signature_inequality_over_reports() -> None:
    whole, jagged, late = (order.tree_tree(n) for n in ([0] * 5, [0, 0, 0, 1, 1], [0] + [1] * 4))
    assert order.same_bits(whole, late)
    assert order.canonical(whole) == order.canonical(late)
    assert not order.same_bits(whole, jagged)


@given(st.recursive(st.just(0), lambda kids: st.tuples(kids, kids), max_leaves=24), st.randoms())
def test_canonical_is_exactly_commutation(shape: Tree, random: object) -> None:
    count = iter(range(1000))
    tree = order.fold(shape, lambda _: next(count), lambda left, right: (left, right))
    swapped = order.fold(
        tree,
        lambda rank: rank,
        lambda left, right: (right, left) if random.random() < 0.5 else (left, right),
    )
    assert order.same_bits(tree, swapped)
    assert order.canonical(order.canonical(swapped)) == order.canonical(tree)

    def spans(of: Tree) -> set[frozenset[int]]:
        found: set[frozenset[int]] = set()

        def join(left: frozenset[int], right: frozenset[int]) -> frozenset[int]:
            found.add(left | right)
            return left | right

        order.fold(of, lambda rank: frozenset([rank]), join)
        return found

    # The set of partial sums decides the bits: a rotated tree has other ones.
    if isinstance(tree, tuple) and isinstance(tree[1], tuple):
        rotated: Tree = ((tree[0], tree[1][0]), tree[1][1])
        assert order.same_bits(tree, rotated) == (spans(tree) == spans(rotated))
        assert not order.same_bits(tree, rotated)


@given(st.integers(0, 5_000_000), st.integers(1, 50), st.sampled_from([1, 2, 4, 8, 16]))
def test_ring_chunks_cover_the_message(numel: int, size: int, itemsize: int) -> None:
    pieces = order.ring_chunks(numel, size, itemsize)
    edges = [0] + [stop for _, stop, _ in pieces]
    assert [start for start, _, _ in pieces] == edges[:-1]
    assert edges[-1] == numel
    assert all(start < stop and 0 <= chunk < size for start, stop, chunk in pieces)
    assert all(stop - start <= 2 * 1024 * 1024 // itemsize for start, stop, _ in pieces)


def test_ring_chunks_match_hand_computation() -> None:
    # 22 float32 over 5 ranks: ceil is 5, rounded up to 4-element (16-byte) cells gives 8.
    assert order.ring_chunks(22, 5, 4) == [(0, 8, 0), (8, 16, 1), (16, 22, 2)]
    assert order.ring_chunks(3, 5, 2) == [(0, 3, 0)]
    full = 2 * 1024 * 1024 // 4
    # A full loop of 2 ranks, then a remainder of 10 elements with its own chunk width.
    assert order.ring_chunks(2 * full + 10, 2, 4) == [
        (0, full, 0),
        (full, 2 * full, 1),
        (2 * full, 2 * full + 8, 0),
        (2 * full + 8, 2 * full + 10, 1),
    ]


def test_chains_may_exceed_the_recursion_limit() -> None:
    size = 4 * sys.getrecursionlimit()
    one_host = order.tree_tree([0] * size)
    assert order.draw(one_host).startswith("(0+(1+(2+")
    assert order.same_bits(one_host, order.tree_tree([0] + [1] * (size - 1)))
    assert not order.same_bits(one_host, order.ring_tree(order.ring_order([0] * size), 1))
    assert len(order.draw(order.tree_tree(range(size)))) == len(order.draw(one_host))
