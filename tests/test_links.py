from __future__ import annotations

import math

import pytest
from expecttest import TestCase

from meshplan.errors import TopologyError
from meshplan.topology import Link, Links, Topology
from tests.refusals import refusal


class TestRefusals(TestCase):
    def test_invalid_link_is_refused(self) -> None:
        messages = []
        for latency, bandwidth in ((-1e-6, 1e9), (0.0, 0.0), (math.nan, 1e9), (0.0, math.inf)):
            messages.append(refusal(TopologyError, Link, latency, bandwidth))
        self.assertExpectedInline(
            "\n".join(messages),
            """\
MP211: a link has a latency of 0 or more seconds and a bandwidth above 0 bytes/s, got latency=-1e-06, bandwidth=1000000000.0; use for example Link(latency=2.7e-6, bandwidth=50e9)
MP211: a link has a latency of 0 or more seconds and a bandwidth above 0 bytes/s, got latency=0.0, bandwidth=0.0; use for example Link(latency=2.7e-6, bandwidth=50e9)
MP211: a link has a latency of 0 or more seconds and a bandwidth above 0 bytes/s, got latency=nan, bandwidth=1000000000.0; use for example Link(latency=2.7e-6, bandwidth=50e9)
MP211: a link has a latency of 0 or more seconds and a bandwidth above 0 bytes/s, got latency=0.0, bandwidth=inf; use for example Link(latency=2.7e-6, bandwidth=50e9)""",
        )

    def test_invalid_links_are_refused(self) -> None:
        self.assertExpectedInline(
            refusal(TopologyError, Links, uses=0),
            """MP211: launch, batch and group are times of 0 or more seconds and uses is 1 or more, got launch=6.6e-06, batch=0.0, group=0.5, uses=0; leave out unknown figures""",
        )


def test_topology_keeps_its_links() -> None:
    slow = Links(network=Link(1e-3, 1e6))
    for made in (
        Topology.uniform(8, node_size=4, links=slow),
        Topology.uniform(3, node_size=4, domain_size=2, links=slow),
        Topology.of([0, 0, 1], links=slow),
        Topology.of([0, 1, 0], [0, 0, 1], links=slow),
        Topology.unknown(3, links=slow),
    ):
        assert made.links is slow


def test_id_differs_between_topologies() -> None:
    made = [
        Topology.uniform(8, node_size=4),
        Topology.uniform(8, node_size=2),
        Topology.uniform(8, node_size=4, domain_size=4),
        Topology.uniform(8, node_size=4, links=Links(launch=0.0)),
        Topology.of([0, 1, 0, 1]),
        Topology.unknown(8),
    ]
    assert len({topology.id for topology in made}) == len(made)
    assert Topology.of([0, 0, 0, 0, 1, 1, 1, 1]).id == made[0].id


def test_written_files_are_read_back() -> None:
    links = Links(network=Link(5e-6, 25e9), launch=1e-5, group=0.25, uses=7)
    assert Links.loads(links.dumps()) == links
    assert Links.loads(links.dumps({"ranks": 8})) == links
    assert Links.loads("{}") == Links()
    slow = Links.loads('{"network": {"latency": 0, "bandwidth": 1000}}')
    assert slow == Links(network=Link(0.0, 1000.0))


class TestFiles(TestCase):
    def test_files_are_readable_json(self) -> None:
        self.assertExpectedInline(
            str(Links()),
            """domain 0.6 us, 450 GB/s; node 1 us, 63 GB/s; network 2.7 us, 50 GB/s; launch 6.6 us""",
        )

    def test_implausible_figures_are_refused(self) -> None:
        digits = "1" * 400
        for text in (
            f'{{"uses": {digits}}}',
            f'{{"launch": {digits}}}',
            f'{{"network": {{"latency": {digits}, "bandwidth": 1}}}}',
            '{"network": {"latency": 1e308, "bandwidth": 1}}',
            '{"network": {"latency": 0, "bandwidth": 5e-324}}',
            '{"group": 1e308}',
        ):
            with pytest.raises(TopologyError, match="got ") as caught:
                Links.loads(text)
            assert len(str(caught.value)) < 300

    def test_unreadable_files_are_refused(self) -> None:
        messages = []
        for text in (
            "network: 5",
            "[]",
            "[" * 100_000,
            '{"nvlink": {}}',
            '{"network": 5e-6}',
            '{"network": {"latency": 5e-6}}',
            '{"network": {"latency": "5us", "bandwidth": 1e9}}',
            '{"network": {"latency": NaN, "bandwidth": 1e9}}',
            '{"launch": true}',
            '{"launch": -1}',
            '{"uses": 1.5}',
        ):
            messages.append(refusal(TopologyError, Links.loads, text))
        self.assertExpectedInline(
            "\n".join(messages),
            """\
MP211: links are not valid JSON: Expecting value: line 1 column 1 (char 0); use for example {"network": {"latency": 2.7e-6, "bandwidth": 50e9}, "launch": 6.6e-6}
MP211: links are []; use for example {"network": {"latency": 2.7e-6, "bandwidth": 50e9}, "launch": 6.6e-6}
MP211: links are not valid JSON: nested too deeply; use for example {"network": {"latency": 2.7e-6, "bandwidth": 50e9}, "launch": 6.6e-6}
MP211: links have no "nvlink"; use some of domain, node, network, launch, batch, group, uses
MP211: network is 5e-06; use for example {"network": {"latency": 2.7e-6, "bandwidth": 50e9}, "launch": 6.6e-6}
MP211: network is {"latency": 5e-06}; use for example {"network": {"latency": 2.7e-6, "bandwidth": 50e9}, "launch": 6.6e-6}
MP211: network.latency is "5us", not a number; use for example {"network": {"latency": 2.7e-6, "bandwidth": 50e9}, "launch": 6.6e-6}
MP211: a link has a latency of 0 or more seconds and a bandwidth above 0 bytes/s, got latency=nan, bandwidth=1000000000.0; use for example Link(latency=2.7e-6, bandwidth=50e9)
MP211: launch is true, not a number; use for example {"network": {"latency": 2.7e-6, "bandwidth": 50e9}, "launch": 6.6e-6}
MP211: launch, batch and group are times of 0 or more seconds and uses is 1 or more, got launch=-1, batch=0.0, group=0.5, uses=10000; leave out unknown figures
MP211: uses is a whole number, got 1.5; pass for example 10000""",
        )
