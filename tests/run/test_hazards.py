"""Hazards of observed reductions: the linter's findings on the placements that ranks really have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, distribute_tensor

from meshplan.layout import Layout
from meshplan.run import RunSettings
from meshplan.run._hazards import describe_hazards
from meshplan.run._observation import observe
from meshplan.testing import nccl_model
from meshplan.topology._locate import Gpu, RankLocation
from tests.marks import full
from tests.processes import run_ranks

FSDP = "train.py:9 main (backward, FSDP2)"
NORM = "train.py:12 main (clip_grad_norm_, DTensor)"


def row(call: str, group: str, site: str, **changes: Any) -> dict[str, Any]:
    own = {"kind": "outside", "backend": "nccl", "group_size": 9}
    return {"call": call, "group": group, "site": site} | own | changes


def judge(
    layout: Layout, per_host: int, rows: list[dict[str, Any]], sharded: tuple[str, ...] = ()
) -> tuple[list[str], list[str]]:
    """Codes with axes, and notes; parameters are sharded along some axes."""
    groups = {axis: layout.group_of(0, axis) or () for axis in layout.axes}
    groups["all"] = tuple(layout.ranks)
    uses = {tuple(groups[axis]): {axis not in sharded} for axis in layout.axes}
    places = {
        rank: RankLocation(f"h{rank // per_host}", f"h{rank // per_host}").to_json()
        for rank in layout.ranks
    }
    hazards, notes, _ = describe_hazards(rows, groups, uses, [layout], places, len(places))
    worst = [one for one in hazards if one["severity"] != "info"]
    return [f"{one['code']} {' x '.join(one['axes'])}" for one in worst], notes


HSDP = [
    row("reduce_scatter", "fsdp", FSDP),
    row("all_reduce", "ddp", FSDP),
]
BY_AXIS = [row("all_reduce", axis, "train.py:9 main (DTensor)") for axis in ("ddp", "fsdp")]


@pytest.mark.parametrize(
    ("per_host", "rows", "sharded", "expected"),
    [
        # Each rank of FSDP2 holds a shard that one all-reduce over ddp has added.
        (8, HSDP, ("fsdp",), []),
        # The norm is added by each group of five, and all must scale by the same one.
        (8, [*HSDP, row("all_reduce", "fsdp", NORM)], ("fsdp",), ["MP101 fsdp"]),
        (5, [*HSDP, row("all_reduce", "fsdp", NORM)], ("fsdp",), []),
        # A metric over the same ranks scales nothing.
        (8, [*HSDP, row("all_reduce", "fsdp", "train.py:20 log")], ("fsdp",), []),
        (8, BY_AXIS, (), ["MP101 fsdp"]),
        (5, BY_AXIS, (), []),
        # Replicas along fsdp whose gradients are added over ddp alone.
        (8, BY_AXIS[:1], (), ["MP101 ddp"]),
        # Under the contract, or over gloo, hosts decide nothing.
        (8, [one | {"kind": "contract"} for one in BY_AXIS], (), []),
        (8, [one | {"backend": "gloo"} for one in BY_AXIS], (), []),
    ],
)
def test_only_what_ran_is_judged(
    per_host: int, rows: list[dict[str, Any]], sharded: tuple[str, ...], expected: list[str]
) -> None:
    found, notes = judge(Layout.of(ddp=8, fsdp=5), per_host, rows, sharded)
    judged_axes = [one for one in found if one.startswith("MP10") and not one.startswith("MP105")]
    assert judged_axes == expected
    assert "hazards" not in " ".join(notes)


class TestText(TestCase):
    maxDiff = None

    def test_finding_is_that_of_the_linter(self) -> None:
        layout = Layout.of(ddp=8, fsdp=5)
        groups = {axis: layout.group_of(0, axis) or () for axis in layout.axes}
        uses = {ranks: {True} for ranks in groups.values()}
        places = {rank: RankLocation(f"h{rank // 8}", "h").to_json() for rank in range(40)}
        hazards, notes, judged = describe_hazards(BY_AXIS, groups, uses, [layout], places, 40)
        found = next(one for one in hazards if one["code"] == "MP101")
        assert len(judged.facts) == 1
        self.assertExpectedInline(
            "\n".join([found["text"], *found["details"], found["fix"]]),
            """\
replicas may differ: the 8 groups of 5 ranks over fsdp are placed on nodes in 5 different ways, but their results must be identical across ddp
in gradients: ddp, then fsdp
ranks per node, in rank order: (5) in 4 groups; (3, 2) in 1 group; (1, 4) in 1 group; (4, 1) in 1 group; (2, 3) in 1 group
tree, ranks 0, 1, 2, 3, 4 (5): (0+(1+(2+(3+4))))
tree, ranks 5, 6, 7, 8, 9 (3, 2): ((5+(6+7))+(8+9))
simulated, 1 channel, float32: ring 36% of elements differ, tree 48% of elements differ
order undocumented under nvls, collnet, rccl
order the axes as --mesh fsdp=5,ddp=8 (the groups with most traffic span no more domains)""",
        )
        self.assertExpectedInline("\n".join(notes), """NVLink domains of hosts""")

    def test_what_was_not_observed_is_named(self) -> None:
        layout = Layout.of(ddp=2, x=3)
        groups = {axis: layout.group_of(0, axis) or () for axis in layout.axes}
        places = {rank: RankLocation("h", "h").to_json() for rank in range(6)}
        said = []
        for rows, known, used in (
            (BY_AXIS[:1], places, {groups["ddp"]: {True}}),
            (BY_AXIS[:1], {0: places[0]}, {}),
            ([row("all_reduce", "ranks 0, 5", "train.py:3 main")], places, {}),
            ([row("all_reduce", "ranks 0-5", "train.py:3 main")], places, {}),
        ):
            hazards, notes, _ = describe_hazards(rows, groups, used, [layout], known, 6)
            assert hazards == []
            said += notes
        self.assertExpectedInline(
            "\n".join(said),
            """\
hazards over (ddp=2, x=3): the use of x
NVLink domains of hosts
hazards: the hosts of ranks 1-5
hazards of reductions over ranks 0, 5: in no device mesh of rank 0""",
        )


def test_domains_inside_hosts_are_judged() -> None:
    """Two hosts of six GPUs, of which two and four are joined."""
    layout = Layout.of(ddp=4, fsdp=3)
    groups = {axis: layout.group_of(0, axis) or () for axis in layout.axes}
    uses = {ranks: {True} for ranks in groups.values()}
    bus = [f"0000:{number:02x}:00.0" for number in range(6)]
    places = {}
    for rank in range(12):
        place = rank % 6
        joined = bus[:2] if place < 2 else bus[2:]
        peers = tuple(one for one in joined if one != bus[place])
        gpu = Gpu(
            bus[place], bus[place], "nvidia", links=len(peers), peers=peers, domain=len(joined)
        )
        places[rank] = RankLocation(f"h{rank // 6}", f"h{rank // 6}", gpu=gpu).to_json()
    hazards, notes, _ = describe_hazards(BY_AXIS, groups, uses, [layout], places, 12)
    (found,) = [one for one in hazards if one["code"] == "MP101"]
    assert "are placed on domains in 2 different ways" in found["text"]
    assert not [one for one in notes if "NVLink" in one]


def train(rank: int, per_host: int, fsdp: bool) -> Any:
    """A job of 2 x 3 ranks over the model of NCCL, on hosts that a variable names."""
    os.environ["MESHPLAN_HOST"] = f"h{rank // per_host}"
    nccl_model.register()
    nccl_model.configure(domain_size=per_host, algorithm="tree")
    found = observe(RunSettings(first=9))
    store = dist.FileStore(os.environ["STORE"], 6)
    dist.init_process_group("nccl_model", store=store, rank=rank, world_size=6)
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("ddp", "fsdp"))
    torch.manual_seed(0)
    if fsdp:
        model = nn.Linear(12, 12)
        fully_shard(model, mesh=mesh)
        weights = list(model.parameters())
    else:
        whole = [Replicate(), Replicate()]
        weights = [nn.Parameter(distribute_tensor(torch.randn(12, 12), mesh, whole))]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    torch.manual_seed(rank)
    for _ in range(3):
        if fsdp:
            model(torch.randn(4, 12)).square().mean().backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
        else:
            local = weights[0].to_local(grad_placements=[Partial("avg"), Partial("avg")])
            (torch.randn(4, 12) @ local).square().mean().backward()
            weights[0].grad = weights[0].grad.redistribute(mesh, whole)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return found.finish(None)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("per_host", "codes", "fsdp"),
    [(2, {"MP101"}, False), (2, {"MP101"}, True), (3, set(), True), full(3, set(), False)],
)
def test_jobs_on_modelled_hosts(
    per_host: int, codes: set[str], fsdp: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE", str(tmp_path / "store"))
    report = run_ranks(lambda rank: train(rank, per_host, fsdp), 6, init=False)[0]
    assert len(report["hosts"]) == 6 // per_host
    worst = {one["code"]: one for one in report["hazards"] if one["severity"] == "error"}
    assert worst.keys() == codes
    if codes:
        assert worst["MP101"]["axes"] == ["fsdp"]
        assert fsdp == ("gradient norm" in worst["MP101"]["text"])
    json.dumps(report)
