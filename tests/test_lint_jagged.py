"""MP101 and MP102: which jagged groups matter."""

from __future__ import annotations

import json

from expecttest import TestCase

from meshplan.lint._facts import JobFacts
from meshplan.lint._read_jobs import read_jobs
from meshplan.topology import Cluster, Topology
from tests.jobs import format_findings, job, run_rules


def find_harmful(
    mesh: str, node: int, domain: int | None = None, **options: object
) -> list[tuple[str, ...]]:
    """Code and axes of each finding."""
    one = job(mesh, **options)
    topology = Topology.uniform(one.layout.world_size, node_size=node, domain_size=domain)
    findings = run_rules("MP101 MP102", one, topology)
    assert {f.severity for f in findings if f.code == "MP101"} <= {"error"}
    assert {f.severity for f in findings if f.code == "MP102"} <= {"info"}
    return [(f.code, *f.data["axes"]) for f in findings]


class TestText(TestCase):
    def test_known_mesh_is_reported(self) -> None:
        topology = Topology.uniform(40, node_size=8, domain_size=8)
        self.assertExpectedInline(
            format_findings(run_rules("MP101 MP102", job("ddp=8,fsdp=5,tp=1"), topology)),
            """\
error MP101 replicas may differ: the 8 groups of 5 ranks over fsdp are placed on nodes in 5 different ways, but their results must be identical across ddp
  in gradients: ddp, then fsdp
  ranks per node, in rank order: (5) in 4 groups; (3, 2) in 1 group; (1, 4) in 1 group; (4, 1) in 1 group; (2, 3) in 1 group
  tree, ranks 0, 1, 2, 3, 4 (5): (0+(1+(2+(3+4))))
  tree, ranks 5, 6, 7, 8, 9 (3, 2): ((5+(6+7))+(8+9))
  simulated, 1 channel, float32: ring 36% of elements differ, tree 48% of elements differ
  order undocumented under nvls, collnet, rccl
error MP101 replicas may differ: the 5 groups of 8 ranks over ddp are placed on nodes in 5 different ways, but their results must be identical across fsdp
  in a reduction over ddp alone
  ranks per node, in rank order: (2, 2, 1, 2, 1) in 1 group; (2, 1, 2, 2, 1) in 1 group; (2, 1, 2, 1, 2) in 1 group; (1, 2, 2, 1, 2) in 1 group; (1, 2, 1, 2, 2) in 1 group
  tree, ranks 0, 5, 10, 15, 20, 25, 30, 35 (2, 2, 1, 2, 1): ((0+5)+(35+((20+(10+15))+(25+30))))
  tree, ranks 1, 6, 11, 16, 21, 26, 31, 36 (2, 1, 2, 2, 1): ((1+6)+(36+((16+(21+11))+(26+31))))
  simulated, 1 channel, float32: ring none differ, tree 57% of elements differ
  order undocumented under nvls, collnet, rccl""",
        )

    def test_harmless_order_is_named(self) -> None:
        topology = Topology.uniform(48, node_size=8)
        self.assertExpectedInline(
            format_findings(run_rules("MP101 MP102", job("ddp=4,fsdp=12"), topology)),
            """\
error MP101 replicas may differ: the 4 groups of 12 ranks over fsdp are placed on nodes in 2 different ways, but their results must be identical across ddp
  in gradients: ddp, then fsdp
  ranks per node, in rank order: (8, 4) in 2 groups; (4, 8) in 2 groups
  tree, ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (8, 4): ((0+(1+(2+(3+(4+(5+(6+7)))))))+(8+(9+(10+11))))
  tree, ranks 12, 13, 14, 15, 16, 17, 18, 19, ... (4, 8): ((12+(13+(14+15)))+(16+(17+(18+(19+(20+(21+(22+23))))))))
  simulated, 1 channel, float32: ring 65% of elements differ, tree 56% of elements differ
  order undocumented under nvls, collnet, rccl
info MP102 replicas are not shown to differ if fsdp is reduced first: fsdp, then ddp; they may differ if it is reduced last, or by itself""",
        )
        turned = job("ddp=4,fsdp=12", reduce_order=("fsdp", "ddp"))
        self.assertExpectedInline(
            format_findings(run_rules("MP101 MP102", turned, topology)),
            """\
info MP102 groups over fsdp are placed on nodes in 2 different ways; replicas are not shown to differ: no two groups that add the same values must agree
  ranks per node, in rank order: (8, 4) in 2 groups; (4, 8) in 2 groups""",
        )

    def test_jagged_domains_inside_a_node_are_reported(self) -> None:
        topology = Topology.uniform(6, node_size=6, domain_size=2)
        self.assertExpectedInline(
            format_findings(run_rules("MP101 MP102", job("ddp=2,fsdp=3"), topology)),
            """\
error MP101 replicas may differ: the 2 groups of 3 ranks over fsdp are placed on domains in 2 different ways, but their results must be identical across ddp
  in gradients: ddp, then fsdp
  ranks per domain, in rank order: (2, 1) in 1 group; (1, 2) in 1 group
  the same on nodes; the order inside a node of several domains is unknown
  order undocumented under nvls, collnet, rccl
info MP102 replicas are not shown to differ if fsdp is reduced first: fsdp, then ddp; they may differ if it is reduced last, or by itself""",
        )


def test_one_group_has_no_siblings() -> None:
    # 13 ranks on nodes of 8: no other group must agree with the only one.
    assert find_harmful("dp=13", 8) == []
    assert find_harmful("dp=13,tp=1,pp=1", 8) == []


def test_model_axes_keep_replicas_of_small_parameters() -> None:
    # Gradients of norms, along tp; and the gradient norm, along dp, over groups of tp.
    assert find_harmful("tp=4,dp=6", 8) == [("MP101", "dp"), ("MP101", "tp")]


def test_stages_have_parameters_of_their_own() -> None:
    assert find_harmful("pp=4,dp=6", 8) == [("MP102", "dp")]
    # Groups of the same stage do have replicas of each other.
    assert ("MP101", "dp") in find_harmful("pp=2,dp=4,tp=3", 8)


def test_two_ranks_always_add_alike() -> None:
    assert ("MP102", "fsdp") in find_harmful("ddp=6,fsdp=2", 3)


def test_message_names_a_reduction_of_scalars() -> None:
    where = Topology.uniform(24, node_size=8)
    messages = [one.message for one in run_rules("MP101", job("tp=4,dp=6"), where)]
    assert [one.partition(" groups")[0] for one in messages] == [
        "replicas may differ: the 4",
        "replicas may differ in the gradient norm: the 6",
    ]


class TestFrameworks:
    def test_fsdp2_reduces_to_shards(self) -> None:
        # The all-reduce along ddp is of shards that no other rank has; the gradient norm over fsdp
        # is not.
        assert find_harmful("ddp=8,fsdp=5", 8, framework="fsdp2") == [
            ("MP101", "fsdp"),
            ("MP102", "ddp"),
        ]
        assert find_harmful("fsdp=13", 8, framework="fsdp2") == []

    def test_fsdp2_with_tensor_parallelism(self) -> None:
        assert ("MP101", "fsdp") in find_harmful("fsdp=6,tp=4", 5, framework="fsdp2")

    def test_ddp_is_one_reduction(self) -> None:
        assert find_harmful("ddp=8,fsdp=5", 8, framework="ddp") == []
        assert find_harmful("dp=6,tp=3", 8, framework="ddp")[0] == ("MP101", "dp")


def test_flattening_alone_is_not_enough() -> None:
    flattened = (("ddp", "fsdp"),)
    # One reduction over both has no siblings, one over one of them has.
    assert find_harmful("ddp=8,fsdp=5", 8, flattened=flattened) == [
        ("MP101", "ddp"),
        ("MP101", "fsdp"),
    ]
    assert find_harmful("ddp=8,fsdp=5", 8, flattened=flattened, reduce_order=("ddp", "fsdp")) == []
    three = {"flattened": (("dp", "ddp"),), "reduce_order": ("dp", "ddp", "fsdp")}
    assert find_harmful("dp=4,ddp=2,fsdp=5", 8, **three)


def test_finding_has_machine_readable_data() -> None:
    topology = Topology.uniform(40, node_size=8)
    first, second = run_rules("MP101 MP102", job("ddp=8,fsdp=5"), topology)
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
    assert first.data["orders"] == {"ring": 5, "tree": 5}
    assert 0.2 < first.data["simulated_share"]["ring"] < 0.6
    assert second.data["simulated_share"]["ring"] == 0
    assert [e["ranks"] for e in first.data["examples"]] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    json.dumps([dict(first.data), dict(second.data)])


def test_permuted_ranks_are_placed_by_coordinate() -> None:
    # Ranks as a mesh (fsdp=5, ddp=8) has them: groups fall evenly.
    one = job("ddp=8,fsdp=5")
    ranks = tuple(one.layout.grid.reshape(5, 8).T.flatten().tolist())
    turned = type(one.layout)((8, 5), ("ddp", "fsdp"), ranks)
    cluster = Cluster(Topology.uniform(40, node_size=8))
    assert not JobFacts(type(one)(turned, one.source), cluster).harmful


def test_uneven_domains_in_scattered_nodes_are_reported() -> None:
    topology = Topology.of([0] * 6 + [1] * 6, [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4])
    codes = [f.code for f in run_rules("MP101 MP102", job("ddp=4,fsdp=3"), topology)]
    assert codes[0] == "MP101"


def test_equal_counts_on_other_members_are_reported() -> None:
    # Both groups have two ranks on each of two nodes: by turns, and one after the other.
    topology = Topology.of([0, 1, 0, 1, 0, 0, 1, 1])
    finding, *_ = run_rules("MP101 MP102", job("ddp=2,fsdp=4"), topology)
    assert finding.code == "MP101"
    assert "are placed on nodes in 2 different ways" in finding.message
    assert [s["ranks_per_node"] for s in finding.data["signatures"]] == [[2, 2]]


def test_large_groups_are_abbreviated() -> None:
    one = job("dp=20000,tp=3")
    finding, *_ = run_rules("MP101 MP102", one, Topology.uniform(60000, node_size=7))
    assert finding.code == "MP101"
    assert len(json.dumps(dict(finding.data))) < 200_000
    # Too large to be simulated in a moment: nothing is said, and not that nothing differs.
    assert finding.data["simulated_share"] == {}
    assert not any(line.startswith("simulated") for line in finding.details)


def test_exact_sums_have_no_order() -> None:
    """Only if the configuration states it: the placement itself may still be reported."""
    found = {}
    for line in ("", 'order = "exact"\n'):
        text = f'[[mesh]]\naxes = "ddp=8,fsdp=5"\nframework = "dtensor"\n{line}'
        (one,) = read_jobs("meshplan.toml", text).jobs
        findings = run_rules("MP101 MP102 MP103 MP105", one, Topology.uniform(40, node_size=8))
        found[line] = {finding.code for finding in findings}
    assert found[""] >= {"MP101", "MP105"}
    assert not found['order = "exact"\n'] & {"MP101", "MP102", "MP105"}
