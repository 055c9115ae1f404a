"""The placement of all ranks, merged from the location that each reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from expecttest import TestCase

from meshplan.errors import TopologyInputError
from meshplan.topology import Topology
from meshplan.topology._locate import Fabric, Gpu, RankLocation
from meshplan.topology._merge_locations import merge_locations
from meshplan.topology._model import pack_cluster, unpack_cluster

RACK, OTHER_RACK = "ab" * 16, "cd" * 16


def gpu(number: int, **changes: Any) -> Gpu:
    """On a switch of eight."""
    given = Gpu(
        id=f"GPU-{number}",
        bus=f"0000:{number:02x}:00.0",
        vendor="nvidia",
        model="H100",
        links=18,
        switch=True,
        on_host=8,
        domain=8,
    )
    return replace(given, **changes)


def place(host: int, number: int | None = None, **changes: Any) -> RankLocation:
    """On host ``host``, with the GPU ``number`` of it if there is one."""
    mine = None if number is None else gpu(number)
    given = RankLocation(
        f"node{host} boot{host}", f"node{host}", f"boot{host}", host, mine, imex=True
    )
    if number is None:
        given = replace(given, reason="this host shows no GPU")
    gpu_changes = changes.pop("gpu", None)
    if gpu_changes is not None:
        given = replace(given, gpu=gpu(number or 0, **gpu_changes))
    return replace(given, **changes)


def job(hosts: int, each: int = 8, **changes: Any) -> list[RankLocation]:
    return [place(h, i, **changes) for h in range(hosts) for i in range(each)]


def in_racks(racks: Sequence[str], each: int = 4) -> list[RankLocation]:
    """Hosts of four GPUs, by the cluster of each host."""
    return [
        place(h, i, gpu={"fabric": Fabric(rack, 7, 3, 0, 0xAA), "on_host": 4, "domain": 4})
        for h, rack in enumerate(racks)
        for i in range(each)
    ]


def notes(places: Sequence[RankLocation]) -> str:
    return "\n".join(str(one.note) for one in merge_locations(places).notes)


class TestNotes(TestCase):
    def test_missing_links_are_noted(self) -> None:
        places = job(2)
        places[11] = place(1, 3, gpu={"links": 17})
        places[12] = place(1, 4, gpu={"links": 9})
        places[3] = place(0, 3, gpu={"unread": (5, 7), "links": 16})
        self.assertExpectedInline(
            notes(places),
            """\
MP201: H100: 18 links on 13 ranks; 9 on rank 12; 17 on rank 11: links may be down, and NCCL goes by the weakest of a group
MP201: links 5, 7 could not be read on rank 3""",
        )

    def test_healthy_fabric_without_links_is_noted(self) -> None:
        places = in_racks([RACK] * 3)
        silent = {"links": 0, "switch": False, "domain": 1, "on_host": 4}
        places[6] = place(1, 2, gpu={**silent, "fabric": Fabric(RACK, 7, 3)})
        found = merge_locations(places)
        assert found.topology.nodes is not None
        assert found.topology.nodes.tolist() == [0] * 12
        assert found.topology.domains is not None
        # One node, and the GPU reaches none of the others but through the network.
        assert found.topology.domains.tolist() == [0] * 6 + [1] + [0] * 5
        self.assertExpectedInline(
            notes(places),
            """\
MP201: no link is up on rank 6, though the GPU is registered with a clique of multi-node NVLink: its traffic takes the network; take the host out of the job
MP204: hosts are not identical: node0, node2: 4 x H100, links to a switch; node1: 4 x H100, links to a switch and 4 x H100, no links""",
        )

    def test_unhealthy_fabric_is_noted(self) -> None:
        places = in_racks([RACK] * 2)
        for rank in (1, 5, 6):
            sick = Fabric(RACK, 7, 3, 0, 0x9A if rank == 1 else 0xA9)
            places[rank] = replace(places[rank], gpu=replace(places[rank].gpu, fabric=sick))  # type: ignore[type-var]
        self.assertExpectedInline(
            notes(places),
            """\
MP201: fabric of multi-node NVLink, ranks 5-6: bandwidth is degraded
MP201: fabric of multi-node NVLink, rank 1: routes are unhealthy""",
        )

    def test_inconsistent_hosts_are_noted(self) -> None:
        places = [*job(2), *(place(2, i, gpu={"model": "A100", "links": 12}) for i in range(4))]
        self.assertExpectedInline(
            notes(places),
            """\
MP204: hosts are not identical: node0, node1: 8 x H100, links to a switch; node2: 8 x A100, links to a switch
ranks per node differ: 8 on 2 nodes; 4 on node2""",
        )

    def test_two_ranks_on_one_gpu_are_noted(self) -> None:
        self.assertExpectedInline(
            notes([place(0, 0), place(0, 0), place(1, 0), place(1, 1)]),
            """ranks 0-1 use one GPU, GPU-0 on node0: NCCL refuses that""",
        )

    def test_partly_unknown_gpus_are_noted(self) -> None:
        places = job(2)
        for rank in (3, 9):
            places[rank] = replace(places[rank], gpu=None, reason="NVML: GPU is lost")
        found = merge_locations(places)
        assert found.topology == Topology.uniform(16, node_size=8)
        self.assertExpectedInline(
            notes(places), """the GPU is unknown on ranks 3, 9: NVML: GPU is lost"""
        )
        self.assertExpectedInline(
            found.origin,
            """live: 16 ranks on 2 hosts, links between GPUs unknown: NVML: GPU is lost""",
        )

    def test_contradictions_are_noted(self) -> None:
        one_agent = [place(0, agent=0), place(1, agent=0)]
        containers = [place(0, machine="m"), place(1, machine="m"), place(2)]
        self.assertExpectedInline(
            f"{notes(one_agent)}\n{notes(containers)}",
            """\
one agent of torchrun (GROUP_RANK 0) has ranks on node0, node1; hosts are taken as they are named
node0, node1 are containers of one machine, which NCCL takes for several hosts; where that is wrong give NCCL_HOSTID the same value in them""",
        )
        # Several agents on one host are how torchrun is tried out.
        assert notes([place(0, i, agent=i) for i in range(4)]) == ""

    def test_reason_for_an_unused_fabric_is_noted(self) -> None:
        off = in_racks([RACK] * 2)
        off[3] = replace(off[3], multi_node=False)
        without = in_racks([RACK] * 2)
        without[4:] = [replace(one, imex=False) for one in without[4:]]
        half = in_racks([RACK] * 2)
        half[:4] = [place(0, i, gpu={"on_host": 4, "domain": 4}) for i in range(4)]
        for places in (off, without, half):
            assert merge_locations(places).topology == Topology.uniform(
                8, node_size=4, domain_size=4
            )
        self.assertExpectedInline(
            "\n".join(map(notes, (off, without, half))),
            """\
multi-node NVLink is turned off on rank 3 (NCCL_MNNVL_ENABLE, NCCL_CUMEM_ENABLE or NCCL_P2P_DISABLE), so nodes are hosts
GPUs of several hosts are registered with one fabric, and ranks 4-7 have no IMEX channel (/dev/nvidia-caps-imex-channels), without which NCCL cannot use it: nodes are hosts
ranks 0-3 are not registered with a fabric of multi-node NVLink and the others are: NCCL uses it for all ranks or for none, so nodes are hosts""",
        )


def test_usual_job_has_no_notes() -> None:
    found = merge_locations(job(3))
    assert found.topology == Topology.uniform(24, node_size=8, domain_size=8)
    assert found.notes == ()
    assert found.domain_gpus == 8
    assert found.hosts == ("node0",) * 8 + ("node1",) * 8 + ("node2",) * 8
    assert found.origin == "live: 24 ranks on 3 hosts, domains by NVLink"


def test_job_on_a_part_of_its_hosts_is_merged() -> None:
    assert merge_locations(job(2, each=4)).domain_gpus == 8


def test_nodes_are_numbered_by_first_rank() -> None:
    """Cyclic over hosts: nodes are numbered in order of their first rank."""
    places = [place(h, i) for i in range(3) for h in (5, 2)]
    found = merge_locations(places)
    assert found.topology.node_map == (0, 1, 0, 1, 0, 1)
    assert found.hosts == ("node5", "node2") * 3


def test_single_rank_is_merged() -> None:
    assert merge_locations([place(0, 0)]).topology == Topology.uniform(
        1, node_size=1, domain_size=1
    )
    assert merge_locations([place(0)]).topology == Topology.uniform(1, node_size=1)


def test_without_gpus_domains_are_unknown() -> None:
    found = merge_locations([place(h) for h in (0, 0, 1, 1)])
    assert found.topology == Topology.uniform(4, node_size=2)
    assert found.topology.domains is None
    assert found.notes == ()
    assert found.origin == (
        "live: 4 ranks on 2 hosts, links between GPUs unknown: this host shows no GPU"
    )


def test_linked_pairs_become_domains() -> None:
    def pair(number: int, peer: int) -> RankLocation:
        changes = {"switch": False, "peers": (f"0000:{peer:02x}:00.0",), "links": 4, "domain": None}
        return place(0, number, gpu=changes)

    pairs = [pair(0, 3), pair(1, 2), pair(2, 1), pair(3, 0)]
    found = merge_locations(pairs)
    assert found.topology.domain_map == (0, 1, 1, 0)
    assert found.domain_gpus == 2
    # GPU 5 belongs to no rank: both reach it, and its other links are unknown.
    found = merge_locations([pair(0, 5), pair(1, 5)])
    assert found.topology == Topology.uniform(2, node_size=2, domain_size=2)
    assert found.domain_gpus is None


def test_equal_bus_ids_of_two_hosts_are_two_gpus() -> None:
    changes = {"switch": False, "peers": ("0000:07:00.0",), "links": 4, "domain": None}
    found = merge_locations([place(h, 0, gpu=changes) for h in (0, 1)])
    assert found.topology == Topology.uniform(2, node_size=1, domain_size=1)


def test_unread_links_are_not_missing_links() -> None:
    unread: dict[str, Any] = {"links": None, "unread": tuple(range(18)), "switch": False}
    found = merge_locations([place(0, 0), place(0, 1, gpu={**unread, "domain": None})])
    assert found.topology.domains is None


def test_gpus_without_links_are_domains_of_their_own() -> None:
    alone = {"links": 0, "switch": False, "domain": 1}
    found = merge_locations(job(2, each=2, gpu=alone))
    assert found.topology == Topology.uniform(4, node_size=2, domain_size=1)
    assert found.domain_gpus == 1


def test_partitions_of_one_gpu_are_one_domain() -> None:
    part = {"links": 0, "switch": False, "domain": 1}
    found = merge_locations([place(0, 3, gpu={**part, "id": name}) for name in ("MIG-1", "MIG-2")])
    assert found.topology == Topology.uniform(2, node_size=2, domain_size=2)
    assert found.notes == ()


def test_nodes_are_cliques_of_multi_node_nvlink() -> None:
    found = merge_locations(in_racks([RACK, RACK, OTHER_RACK, RACK]))
    assert found.topology.nodes is not None
    assert found.topology.nodes.tolist() == [0] * 8 + [1] * 4 + [0] * 4
    assert found.topology.domains is not None
    assert found.topology.domains.tolist() == found.topology.nodes.tolist()
    assert found.domain_gpus is None
    assert found.hosts[8] == "node2"
    assert found.origin == (
        "live: 16 ranks on 4 hosts, nodes are cliques of multi-node NVLink, domains by NVLink"
    )
    assert str(found.notes[0].note) == "ranks per node differ: 12 on 1 node; 4 on node2"


def test_cliques_of_one_cluster_are_separate() -> None:
    places = in_racks([RACK] * 4)
    for rank in range(8, 16):
        fabric = Fabric(RACK, 8, 3)
        places[rank] = replace(places[rank], gpu=replace(places[rank].gpu, fabric=fabric))  # type: ignore[type-var]
    assert merge_locations(places).topology == Topology.uniform(16, node_size=8, domain_size=8)


def test_a_fabric_of_single_hosts_joins_no_hosts() -> None:
    """Boards of eight may be registered too: completed, with a cluster of their own or of zeros."""
    for clusters in ([RACK, OTHER_RACK], ["0" * 32] * 2):
        places = [replace(one, imex=False) for one in in_racks(clusters)]
        found = merge_locations(places)
        assert found.topology == Topology.uniform(8, node_size=4, domain_size=4)
        assert found.notes == ()


def test_one_host_needs_no_multi_node_link() -> None:
    found = merge_locations([replace(one, imex=False) for one in in_racks([RACK])])
    assert found.topology == Topology.uniform(4, node_size=4, domain_size=4)
    assert found.domain_gpus == 4
    assert found.notes == ()


def test_hosts_of_equal_name_are_separate() -> None:
    places = [replace(place(h), name="localhost") for h in (0, 0, 1)]
    found = merge_locations(places)
    # A node size of 2 stands for the same map.
    assert found.topology.node_map in ((0, 0, 1), 2)
    assert found.hosts == ("localhost#0", "localhost#0", "localhost#1")


def test_amd_hosts_are_merged() -> None:
    changes = {"vendor": "amd", "model": "", "switch": False, "links": 1, "domain": 2}
    places = [place(0, i, gpu={**changes, "peers": (f"0000:{i ^ 1:02x}:00.0",)}) for i in range(4)]
    found = merge_locations(places)
    assert found.topology == Topology.uniform(4, node_size=4, domain_size=2)
    assert found.origin == "live: 4 ranks on 1 host, domains by xGMI"


def test_notes_are_bounded() -> None:
    """However many ranks are odd."""
    places = [
        place(
            h, i, gpu={"links": h * 8 + i, "model": "" if i else f"m{h}", "unread": (h,)[: h % 2]}
        )
        for h in range(300)
        for i in range(8)
    ]
    places += [replace(place(h, 0), name=f"twin{h}", machine="m") for h in range(300)]
    found = merge_locations(places)
    assert len(found.notes) < 200
    assert max(len(str(one.note)) for one in found.notes) < 1500


@pytest.mark.parametrize(
    "places", [job(2), [place(0)], in_racks([RACK, RACK, OTHER_RACK]), [place(1, 1), place(0, 0)]]
)
def test_cluster_is_packed_and_unpacked(places: list[RankLocation]) -> None:
    cluster = merge_locations(places)
    assert unpack_cluster(pack_cluster(cluster)) == cluster


@pytest.mark.parametrize("text", ["", "x", "{}", pack_cluster(merge_locations([place(0)]))[:-5]])
def test_invalid_packed_clusters_are_refused(text: str) -> None:
    with pytest.raises(TopologyInputError, match="one version"):
        unpack_cluster(text)


def test_gpu_of_each_rank_is_kept() -> None:
    found = merge_locations([place(0, 1, gpu={"links": 17}), place(0, 0), place(1)])
    first, second = place(0, 1).gpu, place(0, 0).gpu
    assert first is not None
    assert second is not None
    assert found.gpus == (first.bus, second.bus, "")
    assert found.links == (17, second.links, None)
