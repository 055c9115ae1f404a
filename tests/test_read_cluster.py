"""Clusters put together from files, numbers and variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from expecttest import TestCase

from meshplan.errors import TopologyError, TopologyInputError
from meshplan.topology import Topology
from meshplan.topology._model import Cluster
from meshplan.topology._read_cluster import Inputs, read_cluster


def matrix(gpus: int, domain: int, cpus: str = "0-31") -> str:
    """What ``nvidia-smi topo -m`` prints for GPUs in domains one after the other."""
    rows = ["\t" + "\t".join(f"GPU{i}" for i in range(gpus)) + "\tCPU Affinity\tNUMA Affinity"]
    for i in range(gpus):
        cells = [
            "X" if i == j else "NV18" if i // domain == j // domain else "SYS" for j in range(gpus)
        ]
        rows.append(f"GPU{i}\t" + "\t".join(cells) + f"\t{cpus}\t0")
    return "\n".join(rows) + "\n"


PARTIAL = '<system version="1"><cpu numaid="0"><pci busid="0000:0f:00.0"/></cpu></system>\n'
SLURM = {
    "SLURM_JOB_NODELIST": "n[0-2]",
    "SLURM_TASKS_PER_NODE": "8(x2),4",
    "SLURM_DISTRIBUTION": "block",
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("eight").write_text(matrix(8, 8))
    Path("fours").write_text(matrix(8, 4))
    Path("tray").write_text(matrix(4, 4, "0-71"))
    Path("partial").write_text(PARTIAL)


def place_ranks(
    world_size: int, environ: Mapping[str, str] | None = None, **inputs: object
) -> Cluster:
    found = read_cluster(Inputs(**inputs), world_size, environ or {})  # type: ignore[arg-type]
    assert found is not None
    return found


def uniform(world_size: int, node: int, domain: int | None = None) -> Topology:
    return Topology.uniform(world_size, node_size=node, domain_size=domain)


def codes(cluster: Cluster) -> list[str]:
    return [note.note.code for note in cluster.notes if note.note.code]


class TestNumbers:
    def test_a_domain_is_a_node(self) -> None:
        assert place_ranks(40, domain_size=8).topology == uniform(40, 8, 8)
        assert place_ranks(576, domain_size=72).topology == uniform(576, 72, 72)

    def test_hosts_share_ranks_evenly(self) -> None:
        assert place_ranks(40, hosts=(5,)).topology == uniform(40, 8)
        assert place_ranks(40, hosts=(8,), domain_size=8).topology == uniform(40, 5, 5)
        assert place_ranks(576, hosts=(9,), domain_size=72).topology == uniform(576, 64, 64)

    def test_uneven_hosts_are_filled_in_order(self) -> None:
        cluster = place_ranks(36, hosts=(5,), domain_size=8)
        assert cluster.topology == uniform(36, 8, 8)
        assert [str(note.note) for note in cluster.notes] == ["1 of 5 nodes has 4 ranks, 4 have 8"]

    def test_host_may_have_several_domains(self) -> None:
        assert place_ranks(32, hosts=(2,), domain_size=8).topology == uniform(32, 16, 8)

    def test_domain_across_hosts_is_one_node(self) -> None:
        cluster = place_ranks(144, hosts=(36,), domain_size=72)
        assert cluster.topology == uniform(144, 72, 72)
        assert cluster.domain_gpus == 72

    def test_unknown_domains_stay_unknown(self) -> None:
        assert place_ranks(16, node_size=8).topology == uniform(16, 8)

    def test_rank_order_places_ranks(self) -> None:
        cluster = place_ranks(4, node_size=2, rank_order="cyclic")
        assert cluster.topology == Topology.of([0, 1, 0, 1])
        cluster = place_ranks(8, node_size=4, domain_size=2, rank_order="plane=2")
        assert cluster.topology == Topology.of([0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3])


class TestFiles:
    def test_files_of_hosts_are_read_in_order(self) -> None:
        assert place_ranks(40, files=("eight",)).topology == uniform(40, 8, 8)
        assert place_ranks(40, files=("eight",), hosts=(5,)).topology == uniform(40, 8, 8)
        assert place_ranks(40, files=("fours",), hosts=(5,)).topology == uniform(40, 8, 4)

    def test_hosts_may_use_a_part_of_their_gpus(self) -> None:
        cluster = place_ranks(40, files=("eight",), hosts=(8,))
        assert cluster.topology == uniform(40, 5, 5)
        assert cluster.domain_gpus == 8

    def test_different_kinds_of_hosts_are_reported(self) -> None:
        cluster = place_ranks(20, files=("eight", "tray"), hosts=(2, 1))
        assert cluster.topology == uniform(20, 8, 8)
        assert codes(cluster) == ["MP203", "MP204"]
        assert cluster.domain_gpus is None
        assert codes(place_ranks(16, files=("eight", "fours"))) == ["MP204"]

    def test_rack_tray_is_read(self) -> None:
        cluster = place_ranks(144, files=("tray",), domain_size=72)
        assert cluster.topology == uniform(144, 72, 72)
        # That there are more trays is what the number says.
        assert codes(cluster) == []
        assert codes(place_ranks(16, files=("tray",))) == ["MP203"]

    def test_partial_files_leave_domains_unknown(self) -> None:
        cluster = place_ranks(16, files=("partial",))
        assert cluster.topology == Topology.unknown(16)
        assert codes(cluster) == ["MP202"]
        assert place_ranks(16, files=("partial",), hosts=(2,)).topology == uniform(16, 8)

    def test_rank_file_places_ranks(self) -> None:
        Path("ranks").write_text("b slots=3\na slots=3\n")
        cluster = place_ranks(6, files=("fours",), rank_order="ranks")
        assert cluster.topology == uniform(6, 3, 3)
        assert cluster.hosts == ("b",) * 3 + ("a",) * 3

    def test_nccl_log_places_nodes(self) -> None:
        lines = [
            f"h{r // 2}:1{r}:1{r} [0] NCCL INFO comm 0xabc rank {r} nRanks 4 nNodes 2 "
            f"localRanks 2 localRank {r % 2} MNNVL 0\n"
            for r in range(4)
        ]
        Path("log").write_text("".join(lines))
        assert place_ranks(4, files=("log",)).topology == uniform(4, 2)
        with pytest.raises(
            TopologyError, match="specifies the nodes of 4 ranks, and the mesh has 8"
        ):
            place_ranks(8, files=("log",))

    def test_kubernetes_file_places_nodes(self) -> None:
        hosts = [("a", "u.1", 4), ("b", "u.1", 4), ("c", "u.2", 4)]
        items = [
            {
                "kind": "Node",
                "metadata": {
                    "name": name,
                    "labels": {"nvidia.com/gpu.clique": clique, "nvidia.com/gpu.count": str(gpus)},
                },
            }
            for name, clique, gpus in hosts
        ]
        Path("nodes").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
        assert place_ranks(12, files=("nodes",)).topology == uniform(12, 8)
        assert place_ranks(10, files=("nodes",)).topology == uniform(10, 8)


class TestEnvironment:
    def test_slurm_environment_places_ranks(self) -> None:
        assert place_ranks(20, SLURM).topology == uniform(20, 8)
        assert place_ranks(20, SLURM).hosts == ("n0",) * 8 + ("n1",) * 8 + ("n2",) * 4
        assert place_ranks(20, SLURM, files=("fours",)).topology == uniform(20, 8, 4)
        # A user's own numbers go before it.
        assert place_ranks(20, SLURM, hosts=(2,)).topology == uniform(20, 10)

    def test_torchrun_environment_places_ranks(self) -> None:
        assert place_ranks(16, {"LOCAL_WORLD_SIZE": "4"}).topology == uniform(16, 4)

    @pytest.mark.parametrize("value", ["", "0", "x", "-1", "²", "9" * 30])
    def test_invalid_local_world_size_is_ignored(self, value: str) -> None:
        assert read_cluster(Inputs(), 16, {"LOCAL_WORLD_SIZE": value}) is None

    def test_empty_environment_has_no_cluster(self) -> None:
        assert read_cluster(Inputs(), 16, {}) is None


class TestMessages(TestCase):
    def refusal(
        self, world_size: int, environ: dict[str, str] | None = None, **inputs: object
    ) -> str:
        try:
            place_ranks(world_size, environ, **inputs)
        except (TopologyError, TopologyInputError) as error:
            return str(error)
        return "none"

    def test_invalid_numbers_are_refused(self) -> None:
        self.assertExpectedInline(
            "\n".join(
                [
                    self.refusal(40, hosts=(0,)),
                    self.refusal(40, domain_size=-8),
                    self.refusal(40, hosts=(7,)),
                    self.refusal(40, hosts=(4,), node_size=8),
                    self.refusal(40, hosts=(4, 1)),
                    self.refusal(40, node_size=8, rank_order="missing"),
                    self.refusal(72, hosts=(9,), domain_size=20),
                    self.refusal(16, {"LOCAL_WORLD_SIZE": "3"}),
                    self.refusal(16, SLURM),
                ]
            ),
            """\
MP211: --hosts is 0; pass a number from 1 up
MP211: --domain-size is -8; pass a number from 1 up
MP211: 40 ranks cannot be the same number on each of 7 hosts; pass --node-size, or --rank-order FILE with the host of each rank
MP211: 4 hosts of 8 GPUs have 32 ranks, and the mesh has 40; pass --hosts 5, or a mesh of 32 ranks
MP211: --hosts has 5 ranks on 2 hosts, and the mesh has 40; pass the ranks of each host, without --node-size, or the number of hosts
MP211: a file with the host of each rank is complete; leave out --hosts and --node-size
MP211: --domain-size 20 is not a number of whole hosts of 8 GPUs; pass --rank-order FILE with the rack of each rank
MP211: LOCAL_WORLD_SIZE=3 does not divide the 16 ranks of the mesh; pass --node-size, or --rank-order FILE with the host of each rank
MP211: 20 ranks have a host in Slurm's variables, and the mesh has 16; unset SLURM_TASKS_PER_NODE, or pass the mesh of that job""",
        )

    def test_invalid_files_are_refused(self) -> None:
        Path("ranks").write_text("a slots=9\n")
        self.assertExpectedInline(
            "\n".join(
                [
                    self.refusal(40, files=("eight",), hosts=(4,)),
                    self.refusal(40, files=("eight",), node_size=9),
                    self.refusal(40, files=("fours",), domain_size=8),
                    self.refusal(40, files=("eight", "fours")),
                    self.refusal(40, files=("eight", "fours"), hosts=(5,)),
                    self.refusal(9, files=("eight",), rank_order="ranks"),
                    self.refusal(8, files=("eight",), rank_order="ranks"),
                    self.refusal(9, files=("eight", "fours"), rank_order="ranks"),
                    self.refusal(9, hosts=(1,), rank_order="ranks"),
                    self.refusal(40, files=("tray",), domain_size=10),
                    self.refusal(40, files=("missing",)),
                ]
            ),
            """\
MP211: 4 hosts of 8 GPUs have 32 ranks, and the mesh has 40; pass --hosts 5, or a mesh of 32 ranks
MP211: --node-size is 9, and eight shows 8 GPUs; pass a number up to that
MP211: fours shows domains of 4 GPUs, and --domain-size is 8; leave out the wrong one
MP211: 2 hosts have 16 ranks, and the mesh has 40; pass --hosts with the number of hosts of each file
MP211: 2 files describe a host, and --hosts has 1 number; pass one for each, as in --hosts 2,3
MP211: host 0 has 9 ranks, and eight shows 8 GPUs; pass the description of that host
MP211: 9 ranks have a host in ranks, and the mesh has 8; list one line for each rank, or pass the mesh of that job
MP211: 2 files describe a host, and the kind of each host is unknown; pass one of them, or --hosts with block, cyclic or plane=N
MP211: a file with the host of each rank is complete; leave out --hosts and --node-size
MP211: --domain-size 10 is not a number of whole hosts of 4 GPUs; pass --rank-order FILE with the rack of each rank
MP212: missing: cannot be read: No such file or directory""",
        )


def test_million_ranks_are_placed() -> None:
    assert place_ranks(1 << 20, domain_size=72).topology.node_map == 72
