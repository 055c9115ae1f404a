"""Blocks of Slurm's topology/block, placed by the hosts of a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from meshplan.errors import TopologyError
from meshplan.topology import Topology
from meshplan.topology._model import Cluster
from meshplan.topology._read_cluster import Inputs, read_cluster
from tests.cli import meshplan
from tests.refusals import refusal

CONF = "BlockName=r1 Nodes=n[00-17]\nBlockName=r2 Nodes=n[18-35]\nBlockSizes=18,36\n"
YAML = """\
- topology: racks
  block:
    blocks:
      - block: r1
        nodes: n[00-17]
- topology: small
  cluster_default: true
  block:
    blocks:
      - block: a
        nodes: n[00-01]
      - block: b
        nodes: n[02-31]
- topology: flat
  flat: true
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("topology.conf").write_text(CONF)
    Path("topology.yaml").write_text(YAML)


def slurm(hosts: str, tasks: str, order: str = "block") -> dict[str, str]:
    return {
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_DISTRIBUTION": order,
    }


def place(
    world: int, environ: dict[str, str], file: str = "topology.conf", **other: int
) -> Cluster:
    found = read_cluster(Inputs(files=(file,), **other), world, environ)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_ranks_of_a_block_are_one_domain() -> None:
    found = place(128, slurm("n[00-31]", "4(x32)"))
    assert found.topology == Topology.of([0] * 72 + [1] * 56, [0] * 72 + [1] * 56)
    assert found.domain_gpus == 72
    assert found.hosts[:5] == ("n00",) * 4 + ("n01",)
    assert found.origin == "Slurm's variables, blocks from topology.conf"


def test_hosts_may_be_in_any_order_and_have_full_names() -> None:
    hosts = "n20.cluster.example,n[00,19].cluster.example"
    found = place(12, slurm(hosts, "4(x3)", "cyclic"))
    assert found.topology == Topology.of([0, 1, 0] * 4, [0, 1, 0] * 4)
    Path("ranks").write_text("n20 slots=2\nn03 slots=2\nn18 slots=2\n")
    inputs = Inputs(files=("topology.conf",), rank_order="ranks")
    assert read_cluster(inputs, 6, {}).topology == Topology.of(
        [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0]
    )  # type: ignore[union-attr]


def test_blocks_of_the_default_view_are_used() -> None:
    found = place(16, slurm("n[00-03]", "4(x4)"), "topology.yaml")
    assert found.topology == Topology.of([0] * 8 + [1] * 8, [0] * 8 + [1] * 8)
    assert found.domain_gpus is None
    # Without a default, the views contradict each other.
    Path("topology.yaml").write_text(YAML.replace("cluster_default: true", "other: x"))
    assert place(16, slurm("n[00-03]", "4(x4)"), "topology.yaml").topology.domains is None


def test_blocks_of_large_hosts_are_joined_only_by_domain_size() -> None:
    Path("topology.conf").write_text("BlockName=a Nodes=n[0-3]\nBlockName=b Nodes=n[4-7]\n")
    environ = slurm("n[2-5]", "8(x4)")
    plain = place(32, environ)
    assert plain.topology == Topology.of([r // 8 for r in range(32)])
    assert [n.note.code for n in plain.notes if "not used" in n.note.message] == ["MP202"]
    joined = place(32, environ, domain_size=32)
    assert joined.topology == Topology.of([0] * 16 + [1] * 16, [0] * 16 + [1] * 16)


def test_contradictions_are_refused() -> None:
    said = []
    for environ, options in (
        (slurm("n[34-37]", "4(x4)"), {}),
        (slurm("n[00-31]", "4(x32)"), {"domain_size": 64}),
    ):
        said.append(refusal(TopologyError, place, 16 if not options else 128, environ, **options))
    Path("topology.conf").write_text(CONF + "BlockName=r3 Nodes=n05\n")
    said.append(refusal(TopologyError, place, 128, slurm("n[00-31]", "4(x32)")))
    assert_expected_inline(
        "\n".join(said),
        """\
MP211: topology.conf: no block has host n36, n37; pass the file of this cluster
MP211: topology.conf has blocks of 72 GPUs, and --domain-size is 64; leave out --domain-size
MP211: topology.conf: host n05 is in blocks r1 and r3; list each host once""",
    )


def test_linter_judges_a_job_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("lint", "--no-env", "--isolated", "--topology", "topology.conf", "--mesh")
    for name, value in slurm("n[00-31]", "4(x32)").items():
        monkeypatch.setenv(name, value)
    status, out, err = meshplan(*words, "ddp=8,fsdp=16", "--output-format", "json")
    assert (status, err) == (1, "")
    assert {one["code"] for one in json.loads(out)["findings"]} >= {"MP101", "MP104"}
    assert meshplan(*words, "fsdp=128", "--framework", "fsdp2")[0] == 0
    # Without the hosts of the job, the placement of ranks in blocks is unknown.
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    status, out, _ = meshplan(*words, "fsdp=128", "--hosts", "32")
    assert status == 1
    assert "the names of the job's hosts are unknown" in out
