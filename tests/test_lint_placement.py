"""MP103, MP104 and MP108."""

from __future__ import annotations

import pytest
from expecttest import TestCase

from meshplan.lint._facts import JobFacts, check_facts
from meshplan.lint._finding import Finding
from meshplan.lint._orders import count_domains
from meshplan.topology import Cluster, Inputs, Topology, read_cluster
from tests.jobs import format_findings, job, layout, run_rules


def cluster(mesh: str, **inputs: object) -> Cluster:
    found = read_cluster(Inputs(**inputs), layout(mesh).world_size, {})  # type: ignore[arg-type]
    assert found is not None
    return found


def codes(mesh: str, **inputs: object) -> list[str]:
    return [f.code for f in run_rules("MP103 MP104", job(mesh), cluster(mesh, **inputs))]


class TestText(TestCase):
    def test_groups_across_domains_are_reported(self) -> None:
        mesh = "tp=8,dp=5"
        found = run_rules("MP103 MP104", job(mesh), cluster(mesh, domain_size=8))
        self.assertExpectedInline(
            format_findings(found),
            """\
warning MP103 groups over tp span domains; in the order dp, tp each would be on one
  dp=5,tp=8, domains of the most spread group: tp on 5 now, 1 then, dp on 2 now, 5 then""",
        )

    def test_groups_on_a_rack_are_reported(self) -> None:
        found = [
            one
            for mesh, size in (("ddp=9,fsdp=64", 72), ("dp=9,fsdp=16", 36), ("dp=72,fsdp=32", 144))
            for one in run_rules("MP103 MP104", job(mesh), cluster(mesh, domain_size=size))
        ]
        self.assertExpectedInline(
            format_findings(found),
            """\
warning MP104 fsdp=64 does not divide evenly into domains of 72 GPUs: blocks of 64 ranks cross from one domain into the next; take 64 of 72 GPUs of each
  64 of 72: 9 domains instead of 8; Slurm with topology/block: --segment=16, 16 hosts of 4 GPUs
warning MP104 fsdp=16 does not divide evenly into domains of 36 GPUs: blocks of 16 ranks cross from one domain into the next; take 32 of 36 GPUs of each
  32 of 36: 5 domains instead of 4
warning MP104 fsdp=32 does not divide evenly into domains of 144 GPUs: blocks of 32 ranks cross from one domain into the next; take 128 of 144 GPUs of each
  128 of 144: 18 domains instead of 16""",
        )


class TestSpans:
    @pytest.mark.parametrize(
        "mesh", ["ddp=5,fsdp=8,tp=1", "dp=5,tp=8", "dp=10,tp=4", "fsdp=16,tp=8", "pp=2,dp=4,tp=8"]
    )
    def test_best_order_has_no_finding(self, mesh: str) -> None:
        assert codes(mesh, domain_size=8) == []

    def test_better_order_is_reported(self) -> None:
        assert codes("ddp=8,fsdp=5", domain_size=8) == []  # fsdp would be on 5 domains
        assert codes("fsdp=8,ddp=4", domain_size=8) == ["MP103"]
        assert codes("tp=8,pp=2,dp=4", domain_size=8) == ["MP103"]

    @pytest.mark.parametrize(
        "mesh", ["dp_replicate=2,fsdp=3,ep=32", "pp=2,fsdp=6,ep=32", "tp=8,ep=8", "fsdp=8,expert=8"]
    )
    def test_experts_are_not_moved_outward(self, mesh: str) -> None:
        assert codes(mesh, domain_size=8) == []

    def test_experts_are_moved_inward(self) -> None:
        assert codes("ep=8,dp=4", domain_size=8) == ["MP103"]
        mesh = "tp=2,dp=4,ep=4"
        (found,) = run_rules("MP103 MP104", job(mesh), cluster(mesh, domain_size=8))
        assert found.data["order"] == ["dp", "tp", "ep"]

    @pytest.mark.parametrize("mesh", ["ep=8,fsdp=4", "tp=8,fsdp=4", "fsdp=8,tp=5"])
    def test_no_shard_or_model_axis_is_moved_outward(self, mesh: str) -> None:
        """Of the first two, shards are inside the domain now."""
        assert "MP103" not in codes(mesh, domain_size=8)

    def test_axes_of_one_role_are_judged_by_size(self) -> None:
        assert codes("dp=4,ddp=8", domain_size=8) == []
        assert codes("dp=8,ddp=4", domain_size=8) == []
        assert codes("dp=8,ddp=5", domain_size=8) == ["MP103"]

    def test_unknown_domains_have_no_finding(self) -> None:
        assert codes("tp=8,dp=5", node_size=8) == []

    def test_single_domain_has_no_finding(self) -> None:
        assert codes("tp=4,dp=2", domain_size=8) == []

    def test_domains_of_a_group_are_counted(self) -> None:
        topology = Topology.uniform(40, node_size=8, domain_size=8)
        assert count_domains(layout("ddp=8,fsdp=5,tp=1"), topology) == {"ddp": 5, "fsdp": 2}
        assert count_domains(layout("ddp=5,fsdp=8,tp=1"), topology) == {"ddp": 5, "fsdp": 1}


class TestRack:
    @pytest.mark.parametrize(
        ("mesh", "rack"),
        [
            ("dp=9,tp=8", 72),  # in one rack
            ("dp=18,tp=8", 72),  # 8 divides 72
            ("dp=8,fsdp=72", 72),
            ("dp=4,fsdp=9,tp=8", 72),
            ("dp=4,fsdp=64", 64),
            ("dp=8,fsdp=5", 8),
            ("dp=9,fsdp=4", 6),  # not a rack
            ("dp=256,tp=8", 72),  # only the outermost axis is a power of two that does not fit
        ],
    )
    def test_even_rack_has_no_finding(self, mesh: str, rack: int) -> None:
        assert "MP104" not in codes(mesh, domain_size=rack)

    def test_64_of_72_gpus_have_no_finding(self) -> None:
        assert codes("ddp=9,fsdp=64", domain_size=72, node_size=64) == []
        assert codes("ddp=9,fsdp=64", domain_size=72, hosts=(9,)) == []


def place_hosts(*counts: int, per_host: int = 4, gpus: int | None = 72) -> Cluster:
    """Hosts of a job: so many of each block, in rank order."""
    blocks = [block for block, count in enumerate(counts) for _ in range(count * per_host)]
    hosts = tuple(f"host{rank // per_host}" for rank in range(len(blocks)))
    return Cluster(Topology.of(blocks, blocks), domain_gpus=gpus, hosts=hosts)


def find_problems(mesh: str, where: Cluster) -> list[Finding]:
    return [f for f in check_facts([JobFacts(job(mesh), where)]) if f.code == "MP108"]


def find_crossing(mesh: str, where: Cluster) -> dict[str, str]:
    """By axis, the severity of its finding."""
    return {str(f.data["axes"][0]): f.severity for f in find_problems(mesh, where)}


@pytest.mark.parametrize(
    ("mesh", "counts", "expected"),
    [
        ("dp=4,ep=32", (10, 12, 10), {"ep": "error"}),
        ("dp=2,ep=64", (10, 12, 10), {"ep": "error"}),
        ("dp=8,tp=16", (10, 12, 10), {"tp": "warning"}),
        ("dp=4,ep=8,tp=4", (10, 12, 10), {"ep": "error"}),
        ("dp=4,ep=32", (8, 8, 16), {}),
        ("dp=16,ep=8", (10, 12, 10), {}),
        # A group of 128 fits into no block, and data-parallel groups may span them.
        ("ep=128", (10, 12, 10), {}),
        ("ep=32,dp=4", (10, 12, 10), {}),
        ("dp=4,fsdp=32", (10, 12, 10), {}),
        ("pp=2,dp=2,cp=32", (10, 12, 10), {}),
    ],
)
def test_groups_that_would_fit_into_a_block_are_reported(
    mesh: str, counts: tuple[int, ...], expected: dict[str, str]
) -> None:
    assert find_crossing(mesh, place_hosts(*counts)) == expected


def test_assumed_placement_has_no_crossing_groups() -> None:
    real = place_hosts(10, 12, 10)
    assert find_crossing("dp=4,ep=32", Cluster(real.topology, domain_gpus=72)) == {}
    # Hosts without links to other hosts: no allocation has such groups on one of them.
    alone = place_hosts(1, 1, 1, per_host=8, gpus=8)
    assert find_crossing("dp=4,ep=6", alone) == {}


def test_fixes_of_crossing_groups_are_tried() -> None:
    (found,) = find_problems("dp=4,ep=32", place_hosts(10, 12, 10))
    assert [fix.title for fix in found.fixes] == [
        "allocate whole segments: sbatch --segment=8 (Slurm with topology/block)"
    ]
    # Hosts of two blocks in turns: in another order of these hosts no group crosses.
    blocks = [0] * 8 + [1] * 8 + [0, 1] * 8
    mixed = Topology.of([block for block in blocks for _ in range(4)], [0] * 128)
    hosts = tuple(f"host{rank // 4}" for rank in range(128))
    (found,) = find_problems("dp=16,ep=8", Cluster(mixed, hosts=hosts, domain_gpus=72))
    assert found.data["crossing"] == 8
    assert [fix.title for fix in found.fixes] == [
        "list the hosts block by block: host0, host1, host2, host3, host4, host5, host6, host7, ...",
        "allocate whole segments: sbatch --segment=2 (Slurm with topology/block)",
    ]
    # Nine hosts of each block are no whole number of groups.
    (found,) = find_problems("dp=9,ep=8", place_hosts(9, 9))
    assert [fix.title for fix in found.fixes] == [
        "allocate whole segments: sbatch --segment=2 (Slurm with topology/block)"
    ]


def test_domains_of_two_nodes_with_one_number_are_two() -> None:
    topology = Topology.of([0] * 4 + [1] * 4, [0] * 8)
    assert count_domains(layout("dp=2,tp=4"), topology) == {"dp": 2, "tp": 1}
