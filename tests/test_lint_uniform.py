"""Meshes that are placed evenly on their nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshplan.lint import _reductions as module
from meshplan.lint._facts import JobFacts
from meshplan.lint._reductions import find_islands, is_uniform
from meshplan.topology import Cluster, Topology
from tests.jobs import job


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 8))
def test_uniform_mesh_has_no_hazard(a: int, b: int, tp: int, node: int) -> None:
    one = job(f"ddp={a},fsdp={b},tp={tp}")
    topology = Topology.uniform(one.layout.world_size, node_size=node)
    if is_uniform(one, topology):
        assert not JobFacts(one, Cluster(topology)).harmful


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), st.integers(1, 9))
def test_sampled_check_matches_the_full_check(a: int, b: int, tp: int, node: int) -> None:
    one = job(f"ddp={a},fsdp={b},tp={tp}")
    topology = Topology.uniform(one.layout.world_size, node_size=node)
    whole = is_uniform(one, topology)
    small = module._SMALL
    try:
        module._SMALL = 16  # type: ignore[misc]
        assert is_uniform(one, topology) == whole
    finally:
        module._SMALL = small  # type: ignore[misc]


def test_domains_become_islands() -> None:
    assert find_islands(Topology.uniform(16, node_size=8)) is None
    assert find_islands(Topology.uniform(16, node_size=8, domain_size=8)) is None
    found = find_islands(Topology.uniform(16, node_size=8, domain_size=4))
    assert found == Topology.uniform(16, node_size=4)
    # The last domain of a node is smaller.
    found = find_islands(Topology.uniform(10, node_size=5, domain_size=3))
    assert found == Topology.of([0, 0, 0, 1, 1, 2, 2, 2, 3, 3])
    # Domains with the same number in different nodes are two.
    found = find_islands(Topology.of([0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]))
    assert found == Topology.of([0, 0, 2, 2, 1, 1])
    # One domain in each node, in nodes that are not consecutive.
    assert find_islands(Topology.of([0, 1, 0, 1], [0, 1, 0, 1])) is None


def test_domains_decide_uniformity() -> None:
    one = job("ddp=2,fsdp=3")
    assert is_uniform(one, Topology.uniform(6, node_size=6))
    assert not is_uniform(one, Topology.uniform(6, node_size=6, domain_size=2))


def test_unknown_is_not_uniform() -> None:
    assert not is_uniform(job("ddp=2,fsdp=3"), Topology.unknown(6))
