"""``meshplan lint --run``: meshes of a script that is executed, its limits, and what is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshplan.cli import main
from meshplan.errors import LayoutError
from meshplan.lint._run_script import _list_skipped, _read_jobs, run_script

SCRIPT = """\
import argparse
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", type=int, default=8)
args = parser.parse_args()
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
print("not a part of the report")
sizes = (dist.get_world_size() // args.fsdp, args.fsdp)
mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("a", "b"))
model = torch.nn.Linear(8, 8).cuda()
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters())
model(torch.randn(2, 8, device="cuda")).sum().backward()
optimizer.step()
raise AssertionError("the first step is the last")
"""
ASKED = ("--world-size", "40", "--domain-size", "8", "--output-format", "concise")


@pytest.fixture
def lint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(["lint", "--no-env", "--isolated", "--select", "MP101,MP191", *words])
        return (status, *capsys.readouterr())

    return call


def test_computed_mesh_is_judged_with_the_roles_of_its_use(lint: Any) -> None:
    Path("train.py").write_text(SCRIPT)
    status, out, err = lint("--run", "train.py", *ASKED, "--", "--fsdp", "5")
    assert err == "meshplan: train.py is executed, as rank 0 of 40\n"
    assert status == 1
    assert out.startswith(
        "train.py:14: error MP101 replicas may differ in the gradient norm: the 8 groups of 5 ranks over b "
    )
    assert out.count("\n") == 1


@pytest.mark.full
def test_script_without_hazard_passes(lint: Any) -> None:
    Path("train.py").write_text(SCRIPT)
    assert lint("--run", "train.py", *ASKED)[:2] == (0, "")


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1\nimport no_such_package\n", ":2: warning MP191 not judged: the package no_such_"),
        (
            "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9/')\n",
            "has no network",
        ),
        ("import torch\n[torch.ones(1 << 31) for _ in range(2)]\n", ":2: warning MP191 not judged"),
        ("import os\nos.abort()\n", "its process ended with status -6"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("x = 1\n", "the script made no DeviceMesh before its first optimizer step"),
    ],
)
def test_script_that_cannot_be_recorded_is_not_judged(lint: Any, text: str, why: str) -> None:
    Path("train.py").write_text(text)
    status, out, _ = lint("--run", "train.py", *ASKED)
    assert status == 1
    assert "warning MP191 not judged: " in out
    assert why in out


@pytest.mark.full
def test_script_has_a_limit_of_time(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(3600)\n")
    found = run_script(str(script), [], 8, 8, seconds=1)
    assert [one.why for one in found.skipped] == [
        "the script stopped before its first optimizer step: it did not end within 1 s"
    ]


def test_number_of_ranks_and_a_script_are_required(lint: Any) -> None:
    status, _, err = lint("--run", "train.py", "--domain-size", "8")
    assert (status, err) == (
        2,
        "meshplan: MP402: --run train.py needs the number of ranks; pass --world-size 40\n",
    )
    with pytest.raises(LayoutError, match="no such file"):
        run_script("missing.py", [], 8, 8)


def mesh(sizes: list[int], names: list[str], line: int = 1) -> dict[str, Any]:
    count = 1
    for size in sizes:
        count *= size
    return {"mesh": sizes, "names": names, "ranks": [*range(count)], "line": line}


def use(kind: str, *along: list[int]) -> dict[str, Any]:
    return {"use": kind, "along": along, "line": 2}


def test_uses_of_parts_give_roles() -> None:
    events = [
        mesh([2, 2, 3], ["x", "y", "z"]),
        use("model", [0, 1, 2]),
        use("fsdp2", [0, 3, 6, 9]),
    ]
    (job,) = _read_jobs("train.py", events)
    assert (job.roles, job.framework, job.program) == (
        ("shard", "shard", "model"),
        "fsdp2",
        "torch",
    )
    assert job.flattened == (("x", "y"),)
    (job,) = _read_jobs("train.py", [events[0], use("fsdp2", [0, 6], [0, 3])])
    assert job.roles == ("replicate", "shard", "unknown")
    # The same mesh twice is one, and a part of another mesh has no role here.
    jobs = [
        *_read_jobs(
            "train.py", [*events[:1], *events[:1], mesh([12], ["w"]), use("ddp", [*range(12)])]
        )
    ]
    assert [job.framework for job in jobs] == ["ddp", "ddp"]


def test_end_of_the_script_is_a_reason() -> None:
    end = {"end": "", "line": None, "missing": ""}
    assert not [*_list_skipped("a.py", [mesh([2, 2], ["dp", "tp"]), end])]
    (skipped,) = _list_skipped("a.py", [end])
    assert skipped.why == "the script made no DeviceMesh before its first optimizer step"
    (skipped,) = _list_skipped("a.py", [mesh([2, 2], ["dp", "tp"]), end | {"end": "E", "line": 3}])
    assert str(skipped.source) == "a.py:3"
