"""``meshplan simulate --cost``: its output for one mesh and for clusters, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from expecttest import TestCase

from meshplan.cli._simulate import CLUSTERS, NUMELS
from meshplan.topology import Link, Links
from tests.test_cli_simulate import cells, refused, simulate


class TestText(TestCase):
    def show(self, *words: str) -> str:
        code, out, said = simulate("--cost", *words)
        assert (code, said) == (0, "")
        return out

    def test_one_mesh_is_costed(self) -> None:
        self.assertExpectedInline(
            self.show("--mesh", "ddp=8,fsdp=5", "--domain-size", "8"),
            """\
mesh (ddp=8, fsdp=5), 5 nodes of 8, domains of 8; 4194304 elements of float32 (16.8 MB)
way                  steps                time      to meshplan  network  node  domain
-------------------  -------------------  --------  -----------  -------  ----  -------
meshplan             ddp+fsdp exchange    744.3 us  1.00         26.8 MB  0 B   5.9 MB
torch, axis by axis  ddp ring, fsdp ring  1.18 ms   1.58         56.2 MB  0 B   0 B
one ring             ddp+fsdp ring        156.2 us  0.21         4.1 MB   0 B   32.7 MB
one tree             ddp+fsdp tree        109.7 us  0.15         4.2 MB   0 B   33.6 MB
links: domain 0.6 us, 450 GB/s; node 1 us, 63 GB/s; network 2.7 us, 50 GB/s; launch 6.6 us
alpha-beta model; arithmetic, contention between jobs and the creation of groups are left out
""",
        )

    def test_orders_and_algorithm_are_costed(self) -> None:
        words = ("--mesh", "ddp=2,fsdp=4,tp=2", "--node-size", "4", "--from", "P,P,R")
        found = self.show(
            *words,
            "--reduce-order",
            "fsdp,ddp",
            "--flat",
            "--algorithm",
            "tree",
            "--numel",
            "9",
            "--dtype",
            "bf16",
        )
        self.assertExpectedInline(
            found,
            """\
mesh (ddp=2, fsdp=4, tp=2), 4 nodes of 4; 9 elements of bfloat16 (18 B)
way        steps                time     to meshplan  network  node  domain
---------  -------------------  -------  -----------  -------  ----  ------
meshplan   ddp+fsdp exchange    47.6 us  1.00         48 B     8 B   0 B
fsdp, ddp  fsdp tree, ddp tree  26.0 us  0.55         54 B     36 B  0 B
one tree   ddp+fsdp tree        19.4 us  0.41         18 B     36 B  0 B
links: domain 0.6 us, 450 GB/s; node 1 us, 63 GB/s; network 2.7 us, 50 GB/s; launch 6.6 us
alpha-beta model; arithmetic, contention between jobs and the creation of groups are left out
""",
        )

    def test_missing_reduction_is_reported(self) -> None:
        found = self.show("--mesh", "ddp=1,fsdp=2", "--node-size", "2", "--from", "P,R")
        self.assertExpectedInline(
            found,
            """\
mesh (ddp=1, fsdp=2), 1 node of 2; 4194304 elements of float32 (16.8 MB)
nothing is reduced: no partial axis has 2 ranks or more
links: domain 0.6 us, 450 GB/s; node 1 us, 63 GB/s; network 2.7 us, 50 GB/s; launch 6.6 us
alpha-beta model; arithmetic, contention between jobs and the creation of groups are left out
""",
        )

    def test_clusters_are_costed(self) -> None:
        self.assertExpectedInline(
            self.show("--numel", "16777216"),
            """\
predicted times of all-reduces over (ddp, fsdp), fsdp=8 on nodes of 8, and of each as a multiple of meshplan's
16777216 elements of float32 (67.1 MB):
GPUs    meshplan  torch, axis by axis  one ring            one tree         a rank sends over the network
------  --------  -------------------  ------------------  ---------------  -----------------------------------
8       282.6 us  276.0 us (0.98)      276.0 us (0.98)     313.3 us (1.11)  0 B, 0 B, 0 B, 0 B
64      486.9 us  2.67 ms (5.48)       446.1 us (0.92)     366.7 us (0.75)  14.7 MB, 117.4 MB, 16.5 MB, 16.8 MB
512     579.4 us  3.00 ms (5.18)       1.22 ms (2.11)      382.9 us (0.66)  16.5 MB, 134.2 MB, 16.7 MB, 16.8 MB
4096    639.8 us  3.02 ms (4.71)       7.41 ms (11.58)     399.1 us (0.62)  16.7 MB, 134.2 MB, 16.8 MB, 16.8 MB
32768   696.4 us  3.03 ms (4.35)       56.87 ms (81.66)    415.3 us (0.6)   16.8 MB, 134.2 MB, 16.8 MB, 16.8 MB
100000  745.8 us  3.04 ms (4.07)       172.84 ms (231.80)  420.7 us (0.56)  17.0 MB, 134.2 MB, 16.8 MB, 16.8 MB

links: domain 0.6 us, 450 GB/s; node 1 us, 63 GB/s; network 2.7 us, 50 GB/s; launch 6.6 us
alpha-beta model; arithmetic, contention between jobs and the creation of groups are left out
""",
        )


class TestRefusals(TestCase):
    def test_invalid_options_are_refused(self) -> None:
        found = [
            refused("--cost", "--seed", "1"),
            refused("--cost", "--table", "--mesh", "ddp=2"),
            refused("--cost", "--node-size", "8"),
            refused("--cost", "--reduce-order", "ddp"),
            refused("--cost", "--mesh", "ddp=2"),
            refused("--cost", "--mesh", "ddp=2", "--node-size", "2", "--from", "S(0)"),
            refused("--cost", "--mesh", "ddp=2", "--node-size", "2", "--reduce-order", "tp"),
            refused("--cost", "--algorithm", "nvls"),
            refused("--cost", "--links", "no-such-file"),
            refused("--mesh", "ddp=2", "--node-size", "2", "--links", "x.json"),
        ]
        self.assertExpectedInline(
            "".join(found),
            """\
meshplan: MP402: --cost uses no random numbers; leave out --seed
meshplan: MP402: --table has its own meshes; leave out --mesh
meshplan: MP402: --node-size needs one mesh; add --mesh, such as --mesh ddp=8,fsdp=5, or leave it out
meshplan: MP402: --reduce-order needs one mesh; add --mesh, such as --mesh ddp=8,fsdp=5, or leave it out
meshplan: MP211: the placement of ranks is unknown; use --domain-size 8, --node-size 8, --hosts 5, or --topology FILE with the output of nvidia-smi topo -m
meshplan: MP401: only all-reduces are predicted, got S(0) -> R on axis ddp; use P or R before, and R after
meshplan: MP112: no axis 'tp' in the mesh, it has ddp
meshplan simulate: argument --algorithm: use ring, tree or both, got 'nvls'; see meshplan simulate --help
meshplan: MP212: no-such-file: cannot be read: No such file or directory
meshplan: MP402: --links needs --cost; pass --cost too
""",
        )


def test_json_of_one_mesh() -> None:
    words = ("--cost", "--mesh", "ddp=8,fsdp=5", "--domain-size", "8", "--output-format", "json")
    code, out, _ = simulate(*words)
    found = json.loads(out)
    assert code == 0
    assert [row["way"] for row in found["rows"]] == [
        "meshplan",
        "torch, axis by axis",
        "one ring",
        "one tree",
    ]
    assert found["links"] == json.loads(Links().dumps())
    plan, torch, *_ = found["rows"]
    assert torch["to_meshplan"] == pytest.approx(
        torch["cost"]["nanoseconds"] / plan["cost"]["nanoseconds"], rel=1e-3
    )
    assert [step["axes"] for step in torch["steps"]] == [["ddp"], ["fsdp"]]


def test_json_of_clusters_matches_the_text() -> None:
    _, out, _ = simulate("--cost", "--output-format", "json")
    clusters = json.loads(out)["clusters"]
    assert [(one["numel"], one["ranks"]) for one in clusters] == [
        (numel, ranks) for numel in NUMELS for ranks in CLUSTERS
    ]
    for one in clusters:
        assert one["mesh"]["ddp"] * one["mesh"]["fsdp"] == one["ranks"]
    _, text, _ = simulate("--cost")
    lines = [line for line in text.splitlines() if line[:1].isdigit() and "element" not in line]
    assert [int(cells(line)[0]) for line in lines] == [*CLUSTERS] * len(NUMELS)


def test_links_of_a_file_are_used(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    slow = Links(network=Link(2.7e-6, 5e9))
    path.write_text(slow.dumps())
    words = ("--cost", "--mesh", "ddp=8", "--node-size", "1", "--output-format", "json")
    times = []
    for more in ((), ("--links", str(path))):
        _, out, _ = simulate(*words, *more)
        found = json.loads(out)
        times.append([row["cost"]["nanoseconds"] for row in found["rows"]])
    assert found["links"]["network"]["bandwidth"] == 5e9
    # A tenth of the bandwidth, for all ways that go over the network.
    assert all(8 < after / before < 10 for before, after in zip(*times, strict=True))
