"""MP101 and MP102: which jagged groups matter."""

from __future__ import annotations

import json

import pytest
from expecttest import TestCase

from meshplan.lint._jagged import Jagged
from meshplan.topology import Topology
from tests.jobs import job, shown


def found(mesh: str, node: int, domain: int | None = None, **options: object) -> list[tuple[str, ...]]:
    """Code and axes of each finding."""
    one = job(mesh, **options)
    topology = Topology.uniform(one.layout.world_size, node_size=node, domain_size=domain)
    findings = list(Jagged(one, topology).findings())
    assert {f.severity for f in findings if f.code == "MP101"} <= {"error"}
    assert {f.severity for f in findings if f.code == "MP102"} <= {"info"}
    return [(f.code, *f.data["axes"]) for f in findings]


class TestText(TestCase):
    def test_the_known_mesh(self) -> None:
        topology = Topology.uniform(40, node_size=8, domain_size=8)
        self.assertExpectedInline(
            shown(Jagged(job("ddp=8,fsdp=5,tp=1"), topology).findings()),
            """""",
        )

    def test_harmless_in_another_order(self) -> None:
        topology = Topology.uniform(48, node_size=8)
        self.assertExpectedInline(
            shown(Jagged(job("ddp=4,fsdp=12"), topology).findings()),
            """""",
        )
        turned = job("ddp=4,fsdp=12", reduce_order=("fsdp", "ddp"))
        self.assertExpectedInline(
            shown(Jagged(turned, topology).findings()),
            """""",
        )

    def test_domains_inside_a_node(self) -> None:
        topology = Topology.uniform(6, node_size=6, domain_size=2)
        self.assertExpectedInline(
            shown(Jagged(job("ddp=2,fsdp=3"), topology).findings()),
            """""",
        )

    def test_a_rack(self) -> None:
        topology = Topology.uniform(576, node_size=72, domain_size=72)
        self.assertExpectedInline(
            shown(Jagged(job("ddp=9,fsdp=64"), topology).findings()),
            """""",
        )


@pytest.mark.parametrize(
    "mesh", ["ddp=5,fsdp=8,tp=1", "ddp=8,fsdp=4", "dp=6,tp=4", "dp=10,fsdp=4,tp=2", "dp=40", "x=1", "dp=4,tp=1"]
)
def test_uniform(mesh: str) -> None:
    assert found(mesh, 8, 8) == []


def test_one_group_has_no_siblings() -> None:
    # 13 ranks on nodes of 8: nobody must agree with the only group.
    assert found("dp=13", 8) == []
    assert found("dp=13,tp=1,pp=1", 8) == []


def test_model_axes_keep_replicas_of_small_parameters() -> None:
    # Gradients of norms, along tp; and the gradient norm, along dp, over groups of tp.
    assert found("tp=4,dp=6", 8) == [("MP101", "dp"), ("MP101", "tp")]


def test_stages_have_parameters_of_their_own() -> None:
    assert found("pp=4,dp=6", 8) == [("MP102", "dp")]
    # Groups of the same stage do have replicas of each other.
    assert ("MP101", "dp") in found("pp=2,dp=6,tp=2", 8)


def test_two_ranks_always_add_alike() -> None:
    assert found("ddp=6,fsdp=2", 3) == [("MP101", "ddp"), ("MP102", "fsdp")]


class TestFrameworks:
    def test_fsdp2_reduces_to_shards(self) -> None:
        # The all-reduce along ddp is of shards that nobody else has; the gradient norm over fsdp
        # is not.
        assert found("ddp=8,fsdp=5", 8, framework="fsdp2") == [("MP101", "fsdp"), ("MP102", "ddp")]
        assert found("fsdp=13", 8, framework="fsdp2") == []

    def test_fsdp2_with_tensor_parallelism(self) -> None:
        assert ("MP101", "fsdp") in found("fsdp=6,tp=4", 5, framework="fsdp2")

    def test_ddp_is_one_reduction(self) -> None:
        assert found("ddp=8,fsdp=5", 8, framework="ddp") == []
        assert found("dp=6,tp=3", 8, framework="ddp")[0] == ("MP101", "dp")


def test_flattened_axes_are_one_reduction() -> None:
    assert found("ddp=8,fsdp=5", 8, flattened=(("ddp", "fsdp"),)) == []
    assert found("a=4,b=2,c=5", 8, flattened=(("a", "b"),))


def test_data() -> None:
    topology = Topology.uniform(40, node_size=8)
    first, second = Jagged(job("ddp=8,fsdp=5"), topology).findings()
    assert first.data["axes"] == ["fsdp"]
    assert first.data["along"] == ["ddp"]
    assert (first.data["groups"], first.data["group_size"]) == (8, 5)
    assert first.data["signatures"] == [
        {"ranks_per_node": [5], "groups": 4},
        {"ranks_per_node": [3, 2], "groups": 1},
        {"ranks_per_node": [1, 4], "groups": 1},
        {"ranks_per_node": [4, 1], "groups": 1},
        {"ranks_per_node": [2, 3], "groups": 1},
    ]
    assert first.data["orders"] == {"ring": 5, "tree": 4}
    assert 0.2 < first.data["simulated_share"]["ring"] < 0.6
    assert second.data["simulated_share"]["ring"] == 0
    assert [e["ranks"] for e in first.data["examples"]] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    json.dumps([dict(first.data), dict(second.data)])


def test_permuted_ranks() -> None:
    # Ranks as a mesh (fsdp=5, ddp=8) has them: groups fall evenly.
    one = job("ddp=8,fsdp=5")
    ranks = tuple(one.layout.grid.reshape(5, 8).T.flatten().tolist())
    turned = type(one.layout)((8, 5), ("ddp", "fsdp"), ranks)
    assert not Jagged(type(one)(turned, one.source), Topology.uniform(40, node_size=8)).harmful


def test_uneven_domains_in_nodes_that_are_not_consecutive() -> None:
    topology = Topology.of([0] * 6 + [1] * 6, [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4])
    codes = [f.code for f in Jagged(job("ddp=4,fsdp=3"), topology).findings()]
    assert codes[0] == "MP101"
