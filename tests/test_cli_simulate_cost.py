"""``meshplan simulate --cost``: its output for one mesh and for clusters, and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from expecttest import TestCase

from meshplan.cli._plan import CLUSTERS, NUMELS
from meshplan.planner import CALIBRATIONS
from meshplan.topology import Link, Links
from tests.test_cli_simulate import cells, refused, show, simulate


class TestText(TestCase):
    def test_one_mesh_is_costed(self) -> None:
        self.assertExpectedInline(
            show("--cost", "--mesh", "ddp=8,fsdp=5", "--domain-size", "8"),
            """\
mesh (ddp=8, fsdp=5), 5 nodes of 8, domains of 8; 4194304 elements of float32 (16.8 MB)
way                  steps                time                  to meshplan    network  node  domain
-------------------  -------------------  --------------------  -------------  -------  ----  -------
meshplan             ddp+fsdp halving     656.8 us to 1.90 ms                  3.1 MB   0 B   33.6 MB
torch, axis by axis  ddp tree, fsdp tree  834.1 us to 2.41 ms   0.44 to 3.7    50.3 MB  0 B   0 B
one ring             ddp+fsdp ring        263.2 us to 760.7 us  0.14 to 1.2    4.1 MB   0 B   32.7 MB
one tree             ddp+fsdp tree        156.8 us to 453.1 us  0.083 to 0.69  4.2 MB   0 B   33.6 MB
links: domain 0.84 us, 390 GB/s; node 1 us, 63 GB/s; network 21.6 us, 49 GB/s; launch 6.6 us
ranges: largest error of the model for h100 on published times of NCCL
alpha-beta model; arithmetic, contention between jobs and the creation of groups are left out
""",
        )

    def test_orders_and_algorithm_are_costed(self) -> None:
        words = ("--mesh", "ddp=2,fsdp=4,tp=2", "--node-size", "4", "--from", "P,P,R")
        found = show(
            "--cost",
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
way        steps                                                   time                 to meshplan  network  node  domain
---------  ------------------------------------------------------  -------------------  -----------  -------  ----  ------
meshplan   ddp+fsdp exchange in blocks of 2, halving between them  75.3 us to 217.6 us               22 B     20 B  0 B
fsdp, ddp  fsdp tree, ddp tree                                     59.8 us to 172.9 us  0.27 to 2.3  27 B     36 B  0 B
one tree   ddp+fsdp tree                                           55.8 us to 161.3 us  0.26 to 2.1  18 B     36 B  0 B
links: domain 0.84 us, 390 GB/s; node 1 us, 63 GB/s; network 21.6 us, 49 GB/s; launch 6.6 us
ranges: largest error of the model for h100 on published times of NCCL
alpha-beta model; arithmetic, contention between jobs and the creation of groups are left out
""",
        )

    def test_missing_reduction_is_reported(self) -> None:
        found = show("--cost", "--mesh", "ddp=1,fsdp=2", "--node-size", "2", "--from", "P,R")
        self.assertExpectedInline(
            found,
            """\
mesh (ddp=1, fsdp=2), 1 node of 2; 4194304 elements of float32 (16.8 MB)
nothing is reduced: no partial axis has 2 ranks or more
links: domain 0.84 us, 390 GB/s; node 1 us, 63 GB/s; network 21.6 us, 49 GB/s; launch 6.6 us
ranges: largest error of the model for h100 on published times of NCCL
alpha-beta model; arithmetic, contention between jobs and the creation of groups are left out
""",
        )

    def test_clusters_are_costed(self) -> None:
        self.assertExpectedInline(
            show("--cost", "--numel", "16777216"),
            """\
predicted times of all-reduces over (ddp, fsdp), fsdp=8 on nodes of 8, and of each as a multiple of meshplan's
16777216 elements of float32 (67.1 MB):
GPUs    meshplan              torch, axis by axis                 one ring                            one tree                           a rank sends over the network
------  --------------------  ----------------------------------  ----------------------------------  ---------------------------------  -----------------------------------
8       283.6 us to 375.0 us  323.1 us to 427.3 us (0.86 to 1.5)  323.1 us to 427.3 us (0.86 to 1.5)  381.5 us to 504.5 us (1 to 1.8)    0 B, 0 B, 0 B, 0 B
64      389.6 us to 1.13 ms   1.99 ms to 5.75 ms (1.8 to 15)      660.1 us to 1.91 ms (0.59 to 4.9)   371.0 us to 1.07 ms (0.33 to 2.8)  14.7 MB, 117.4 MB, 16.5 MB, 16.8 MB
512     511.2 us to 1.48 ms   2.33 ms to 6.72 ms (1.6 to 13)      2.48 ms to 7.16 ms (1.7 to 14)      483.9 us to 1.40 ms (0.33 to 2.7)  16.5 MB, 134.2 MB, 16.7 MB, 16.8 MB
4096    613.5 us to 1.77 ms   2.44 ms to 7.05 ms (1.4 to 11)      16.96 ms to 49.02 ms (9.6 to 80)    596.9 us to 1.72 ms (0.34 to 2.8)  16.7 MB, 134.2 MB, 16.8 MB, 16.8 MB
32768   713.5 us to 2.06 ms   2.55 ms to 7.38 ms (1.2 to 10)      132.83 ms to 383.88 ms (64 to 540)  709.8 us to 2.05 ms (0.34 to 2.9)  16.8 MB, 134.2 MB, 16.8 MB, 16.8 MB
100000  773.0 us to 2.23 ms   2.59 ms to 7.48 ms (1.2 to 9.7)     404.53 ms to 1.17 s (180 to 1500)   747.5 us to 2.16 ms (0.33 to 2.8)  17.0 MB, 134.2 MB, 16.8 MB, 16.8 MB

links: domain 0.84 us, 390 GB/s; node 1 us, 63 GB/s; network 21.6 us, 49 GB/s; launch 6.6 us
ranges: largest error of the model for h100 on published times of NCCL; none was found for more than 40 GPUs
alpha-beta model; arithmetic, contention between jobs and the creation of groups are left out
""",
        )


class TestRefusals(TestCase):
    def test_invalid_options_are_refused(self) -> None:
        found = [
            refused("--cost", "--seed", "1"),
            refused("--cost", "--node-size", "8"),
            refused("--cost", "--reduce-order", "ddp"),
            refused("--cost", "--mesh", "ddp=2"),
            refused("--cost", "--mesh", "ddp=2", "--node-size", "2", "--from", "S(0)"),
            refused("--cost", "--mesh", "ddp=2", "--node-size", "2", "--reduce-order", "tp"),
            refused("--cost", "--algorithm", "nvls"),
            refused("--cost", "--links", "no-such-file"),
            refused("--mesh", "ddp=2", "--node-size", "2", "--links", "x.json"),
            refused("--mesh", "ddp=2", "--node-size", "2", "--gpu", "a100"),
            refused("--cost", "--gpu", "a100", "--links", os.devnull),
        ]
        self.assertExpectedInline(
            "".join(found),
            """\
meshplan: MP402: --cost uses no random numbers; leave out --seed
meshplan: MP402: --node-size needs one mesh; add --mesh, such as --mesh ddp=8,fsdp=5, or leave it out
meshplan: MP402: --reduce-order needs one mesh; add --mesh, such as --mesh ddp=8,fsdp=5, or leave it out
meshplan: MP211: the placement of ranks is unknown; use --domain-size 8, --node-size 8, --hosts 5, or --topology FILE with the output of nvidia-smi topo -m
meshplan: MP401: only all-reduces are predicted, got S(0) -> R on axis ddp; use P or R before, and R after
meshplan: MP112: no axis 'tp' in the mesh, it has ddp
meshplan simulate: argument --algorithm: use ring, tree or both, got 'nvls'; see meshplan simulate --help
meshplan: MP212: no-such-file: cannot be read: No such file or directory
meshplan: MP402: --links needs --cost; pass --cost too
meshplan: MP402: --gpu needs --cost; pass --cost too
meshplan: MP402: --links has figures of its own; leave out --gpu
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
    assert found["links"] == json.loads(CALIBRATIONS["h100"].links.dumps())
    plan, torch, *_ = found["rows"]
    assert torch["to_meshplan"] == [
        pytest.approx(torch[one] / plan[other], rel=0.05)
        for one, other in (("low", "high"), ("high", "low"))
    ]
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
    paths = [tmp_path / "links.json", tmp_path / "slow.json"]
    for path, network in zip(paths, (50e9, 5e9), strict=True):
        path.write_text(Links(network=Link(2.7e-6, network)).dumps())
    words = ("--cost", "--mesh", "ddp=8", "--node-size", "1", "--output-format", "json")
    times = []
    for path in paths:
        _, out, _ = simulate(*words, "--links", str(path))
        found = json.loads(out)
        times.append([row["cost"]["nanoseconds"] for row in found["rows"]])
    assert found["links"]["network"]["bandwidth"] == 5e9
    # A tenth of the bandwidth, for all ways that go over the network.
    assert all(8 < after / before < 10 for before, after in zip(*times, strict=True))
