from __future__ import annotations

import numpy as np
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import TopologyError
from meshplan.layout import Integers
from meshplan.topology import Topology
from tests.refusals import refusals


def listed(found: Integers | None) -> list[int] | None:
    if found is None:
        return None
    assert found.dtype == np.int64
    return found.tolist()


def test_uniform_topology_is_two_sizes() -> None:
    found = Topology.uniform(11, node_size=5, domain_size=2)
    assert listed(found.nodes) == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2]
    # Domain numbers restart in every node.
    assert listed(found.domains) == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 6]
    assert found.known
    assert [found.node_of(rank) for rank in (0, 4, 5, 10)] == [0, 0, 1, 2]
    assert Topology.uniform(3, node_size=8).node_of(2) == 0


def test_partial_knowledge_is_not_guessed() -> None:
    nodes = Topology.uniform(8, node_size=4)
    assert nodes.known
    assert nodes.domains is None
    nothing = Topology.unknown(8)
    assert not nothing.known
    assert (nothing.nodes, nothing.domains, nothing.node_of(3)) == (None, None, None)
    assert nothing.nodes_of(np.array([1, 2])) is None


def test_topologies_compare_by_placement() -> None:
    even = Topology.uniform(10, node_size=4, domain_size=2)
    given_by_rank = Topology.of([0] * 4 + [1] * 4 + [2] * 2, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    assert even == given_by_rank
    assert hash(even) == hash(given_by_rank)
    assert Topology.of([0] * 4 + [1] * 4) == Topology.uniform(8, node_size=4)
    assert Topology.uniform(5, node_size=8, domain_size=8) == Topology.of([0] * 5, [0] * 5)
    assert Topology.uniform(8, node_size=4) != even
    assert Topology.of([1, 0]) != Topology.of([0, 1])
    assert Topology.unknown(8) != Topology.unknown(9)
    local = Topology.of([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1])
    assert listed(local.domains) == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_million_ranks_are_two_numbers() -> None:
    big = Topology.uniform(1_048_576, node_size=72, domain_size=72)
    assert hash(big) == hash(Topology.uniform(1_048_576, node_size=72, domain_size=72))
    assert not {"nodes", "domains"} & set(vars(big))
    assert big.node_of(1_048_575) == 14563
    assert listed(big.nodes_of(np.array([[71, 72]]))) == [[0, 1]]
    assert not {"nodes", "domains"} & set(vars(big))


class TestText(TestCase):
    def test_topology_is_printed(self) -> None:
        shown = [
            Topology.uniform(40, node_size=8),
            Topology.uniform(36, node_size=8, domain_size=4),
            Topology.uniform(5, node_size=8),
            Topology.of([0, 1, 0, 1]),
            Topology.of([3, 3, 3, 7, 5, 5], [0, 0, 0, 0, 1, 2]),
            Topology.unknown(4),
        ]
        self.assertExpectedInline(
            "\n".join(map(str, shown)),
            """\
5 nodes of 8
5 nodes of 8, the last of 4, domains of 4
1 node of 5
2 nodes of 2, ranks not consecutive
3 nodes of 1 to 3, ranks not consecutive, domains given by rank
nodes unknown""",
        )


class TestErrors(TestCase):
    def test_invalid_arguments_are_refused(self) -> None:
        even = Topology.uniform(8, node_size=4)
        calls = (
            lambda: Topology.uniform(0, node_size=8),
            lambda: Topology.uniform(8, node_size=0),
            lambda: Topology.uniform(8, node_size=4, domain_size=-1),
            lambda: Topology.uniform(8, node_size=4, domain_size=8),
            lambda: Topology.of([]),
            lambda: Topology.of([0, 0, 1], [0, 1]),
            lambda: Topology.of([0, -1]),
            lambda: Topology.of([0, 0], [0, None]),  # type: ignore[list-item]
            lambda: Topology(2, None, (0, 0)),
            lambda: even.node_of(8),
            lambda: even.nodes_of(np.array([3, -1])),
        )
        self.assertExpectedInline(
            refusals(TopologyError, calls),
            """\
MP211: a topology needs at least 1 rank, got world_size=0; pass for example Topology.uniform(40, node_size=8)
MP211: a node holds at least 1 rank, got node_size=0; pass the number of consecutive ranks of a node
MP211: a domain holds at least 1 rank, got domain_size=-1; pass the number of consecutive ranks of a domain
MP211: a domain is a part of a node, got domain_size=8 with node_size=4; pass a domain_size up to node_size, or use Topology.of for other nodes
MP211: a topology needs at least 1 rank, got world_size=0; pass for example Topology.uniform(40, node_size=8)
MP211: 3 ranks need 3 domain numbers, got 2; pass the domain of rank 0, 1, 2, ...
MP211: a node is a whole number from 0 up, got -1; number the nodes, or pass Topology.unknown(world_size) if they are unknown
MP211: a domain is a whole number from 0 up, got None; number the domains, or pass domain_of_rank=None if they are unknown
MP211: a domain is a part of a node, got domains and no nodes; pass the nodes too, or Topology.unknown(world_size)
MP211: no rank 8 in a topology of 8 ranks; pass ranks from 0 to 7
MP211: no rank -1 in a topology of 8 ranks; pass ranks from 0 to 7""",
        )


@given(st.integers(1, 40), st.integers(1, 12), st.none() | st.integers(1, 12))
def test_uniform_and_its_own_maps_are_equal(world: int, node: int, domain: int | None) -> None:
    if domain is not None and domain > node:
        return
    even = Topology.uniform(world, node_size=node, domain_size=domain)
    again = Topology.of(listed(even.nodes), listed(even.domains))  # type: ignore[arg-type]
    assert again == even
    assert listed(again.nodes) == [rank // node for rank in range(world)]
    assert [even.node_of(rank) for rank in range(world)] == listed(even.nodes)


def test_text_is_short_for_any_number_of_ranks() -> None:
    assert str(Topology.uniform(10**12, node_size=8)) == "125000000000 nodes of 8"
    assert str(Topology.uniform(10, node_size=8)) == "2 nodes of 8, the last of 2"
    assert str(Topology.uniform(3, node_size=8)) == "1 node of 3"
