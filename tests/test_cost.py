from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.contract import Contract
from meshplan.definition import combine_leaves, finish_partials, reduce_leaves
from meshplan.layout import Layout
from meshplan.planner._group_facts import GroupFacts, find_groups
from meshplan.planner._path_costs import Cost, PeerCounts, predict_collective
from meshplan.testing import assert_bitwise_equal, order_sensitive
from meshplan.topology import Link, Links, Topology
from tests.links import name_link


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Layout, Topology]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = math.prod(sizes)
    ranks = draw(st.permutations(range(count)))
    nodes = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    domains = draw(st.none() | st.lists(st.integers(0, 2), min_size=count, max_size=count))
    return Layout(sizes=tuple(sizes), ranks=tuple(ranks)), Topology.of(nodes, domains)


@given(clusters(), st.data())
def test_peer_counts_match_brute_force(
    cluster: tuple[Layout, Topology], data: st.DataObject
) -> None:
    layout, topology = cluster
    axes = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(layout.sizes))), min_size=1))))
    counts = []
    for group in layout.siblings(axes).tolist():
        for rank in group:
            near = [o for o in group if topology.node_of(o) == topology.node_of(rank)]
            close = [o for o in near if name_link(topology, rank, o) == "domain"]
            counts.append((len(close) - 1, len(near) - 1))
    found = GroupFacts(layout, topology).peers(axes)
    in_domain, in_node = (min(column) for column in zip(*counts, strict=True))
    # Which ranks of a node NVLink joins may be unknown: the slower link is taken.
    assert found == PeerCounts(in_domain, in_node - in_domain, len(group) - 1 - in_node)


def test_unknown_topology_assumes_the_slowest_link() -> None:
    layout = Layout.of(a=2, b=4)
    assert GroupFacts(layout, None).peers((0, 1)) == PeerCounts(0, 0, 7)
    assert GroupFacts(layout, Topology.unknown(8)).blocks((0, 1)) == ()


@pytest.mark.parametrize(
    ("sizes", "node_size", "domain_size", "expected"),
    [
        ((2, 4), 4, None, (4,)),
        ((2, 4), 2, None, (2,)),
        ((2, 4), 4, 2, (4, 2)),
        ((2, 4), 8, None, ()),  # one node
        ((8, 5), 8, None, ()),  # groups of 5 straddle nodes
        ((5, 8), 8, 8, (8,)),
        ((5, 8), 8, 4, (8, 4)),
        ((64,), 8, None, (8,)),
        ((24,), 8, None, (8,)),
        ((20,), 8, None, (4,)),  # 8 does not divide 20
        ((12,), 6, None, (2,)),  # 6 leaves of 12 are no subtree
        ((3, 2, 2), 4, None, (4,)),
        ((4, 3), 6, None, (6,)),
        ((7,), 1, None, ()),
    ],
)
def test_blocks(
    sizes: tuple[int, ...], node_size: int, domain_size: int | None, expected: tuple[int, ...]
) -> None:
    layout = Layout(sizes=sizes)
    topology = Topology.uniform(math.prod(sizes), node_size=node_size, domain_size=domain_size)
    axes = tuple(range(len(sizes)))
    assert GroupFacts(layout, topology).blocks(axes) == expected
    # Every block is a subtree: two stages give the bits of one.
    count = math.prod(sizes)
    leaves = [order_sensitive(33, rank=r, world_size=count) for r in range(count)]
    whole = reduce_leaves(leaves, "sum", sizes)
    for block in expected:
        inner, left = [], block
        for size in reversed(sizes):
            inner.insert(0, math.gcd(size, left))
            left //= inner[0]
        outer = [size // part for size, part in zip(sizes, inner, strict=True)]
        partials = [
            combine_leaves(leaves[start : start + block], "sum", inner, Contract())
            for start in range(0, count, block)
        ]
        assert_bitwise_equal(
            finish_partials(partials, "sum", outer, Contract(), whole.dtype), whole
        )


def test_worst_node_decides_for_different_domains() -> None:
    """Two nodes have four pairs each, two have one domain each: the pairs are the worst case."""
    layout = Layout.of(a=2, b=16)
    nodes = [rank // 8 for rank in range(32)]
    pairs, whole = [rank // 2 for rank in range(16)], [100 + rank // 8 for rank in range(16)]
    for domains in (pairs + whole, whole + pairs):
        groups = GroupFacts(layout, Topology.of(nodes, domains))
        assert groups.blocks((1,)) == (8, 2)
        assert groups.peers((1,)) == PeerCounts(1, 6, 8)


def test_permuted_ranks_have_no_blocks() -> None:
    """Ranks 0 to 3 are one node; the mesh deals them out in turn."""
    dealt = Layout.of([0, 4, 1, 5, 2, 6, 3, 7], a=4, b=2)
    topology = Topology.uniform(8, node_size=4)
    assert GroupFacts(dealt, topology).blocks((0, 1)) == ()
    assert GroupFacts(dealt, topology).peers((0,)) == PeerCounts(0, 3, 0)
    assert GroupFacts(dealt, topology).peers((1,)) == PeerCounts(0, 0, 1)


def test_collective_cost_is_latency_plus_bytes() -> None:
    links = Links(
        domain=Link(1e-6, 1e9),
        node=Link(2e-6, 1e8),
        network=Link(4e-6, 1e7),
        launch=5e-6,
    )
    cost = predict_collective(links, PeerCounts(3, 2, 1), 1000)
    microseconds = 5 + 3 * (1 + 1) + 2 * (2 + 10) + (4 + 100)
    assert cost == Cost(
        nanoseconds=microseconds * 1000, collectives=1, domain=3000, node=2000, network=1000
    )
    assert cost.sent == 6000


def test_costs_add_up_and_memory_is_the_largest() -> None:
    one = Cost(nanoseconds=5, collectives=1, domain=1, peak=7, creates=("x",))
    two = Cost(nanoseconds=6, node=2, network=3, peak=4, creates=("y", "x"))
    assert Cost.total([one, two]) == Cost(11, 1, 1, 2, 3, 7, ("x", "y"))
    assert Cost.total([]) == Cost()


class TestMissingGroups:
    layout = Layout.of(a=2, b=2, c=2)

    def find_missing(self, layout: Layout, world: int, *args: object, **more: object) -> object:
        groups = GroupFacts(layout, Topology.unknown(world))
        return groups.find_missing(*args, **more)  # type: ignore[arg-type]

    def test_axis_groups_and_the_default_group_exist(self) -> None:
        assert self.find_missing(self.layout, 8, (1,)) == ()
        assert self.find_missing(self.layout, 8, (0, 1, 2)) == ()
        assert self.find_missing(self.layout, 8, (0, 2)) == ("over (a, c)",)
        assert self.find_missing(self.layout, 16, (0, 1, 2)) == ("over (a, b, c)",)

    def test_group_of_sorted_ranks_is_another_group(self) -> None:
        turned = Layout.of([1, 0, 2, 3], a=2, b=2)
        assert self.find_missing(turned, 4, (1,)) == ("over (b)",)
        assert self.find_missing(turned, 4, (0, 1)) == ("over (a, b)",)

    def test_blocks(self) -> None:
        for axes, inner, inside, across in (
            ((0, 2), 2, (), ()),
            ((0, 1, 2), 2, (), ("over (a, b)",)),
            ((0, 1, 2), 4, ("over (b, c)",), ()),
        ):
            assert self.find_missing(self.layout, 8, axes, inner) == inside
            assert self.find_missing(self.layout, 8, axes, inner, across=True) == across
        long = Layout.of(dp=8)
        assert self.find_missing(long, 8, (0,), 4) == ("in blocks of 4 over (dp)",)
        assert self.find_missing(long, 8, (0,), 4, across=True) == ("across blocks of 4 over (dp)",)

    def test_creation_cost_is_divided_by_uses(self) -> None:
        links = Links(group=1.0, uses=1000)
        groups = GroupFacts(self.layout, Topology.unknown(8, links=links))
        assert groups.predict_creation(("x", "y")) == Cost(
            nanoseconds=2_000_000, creates=("x", "y")
        )
        assert groups.predict_creation(()) == Cost()


def test_million_ranks_are_costed() -> None:
    layout = Layout.of(ddp=2048, fsdp=64, tp=8)
    groups = GroupFacts(layout, Topology.uniform(1 << 20, node_size=8, domain_size=8))
    assert groups.peers((0, 1)) == PeerCounts(0, 0, 131_071)
    assert groups.peers((0, 1, 2)) == PeerCounts(7, 0, (1 << 20) - 8)
    assert groups.blocks((0, 1, 2)) == (8,)


def test_cache_is_bounded_and_separates_layouts() -> None:
    assert find_groups.cache_info().maxsize == 64
    topology = Topology.uniform(8, node_size=4)
    made = [
        find_groups(Layout(sizes=sizes), topology) for sizes in itertools.permutations((1, 2, 4))
    ]
    assert len({id(groups) for groups in made}) == 6
    assert made[0].layout.grid.ravel().tolist() == list(range(8))
