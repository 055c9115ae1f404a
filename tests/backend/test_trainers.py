"""Training jobs over a model of NCCL, and over the backend with that model inside.

Ranks that hold the same part of a tensor are replicas of each other. So are those of two runs of a
job whose ranks are on other nodes: NCCL adds in another order there.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from meshplan.run._verdict import format_verdict
from tests.backend import trainers
from tests.programs import torchrun

ROOT = Path(__file__).parents[2]
# `make test-full` installs them.
MISSING = [
    name
    for name in ("accelerate", "lightning", "transformers")
    if importlib.util.find_spec(name) is None
]

pytestmark = [
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.skipif(bool(MISSING), reason="pip install --group trainers"),
]


OBSERVED = "every=1 gradients certify={}"


def run_job(name: str, folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank of each run has found: over a model of NCCL and over the backend, which the job
    names, and then as ``meshplan run`` starts the first of them, alone and with its own backend.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.backend.trainers", name]
    settings = OBSERVED.format(folder / "observed.cert")
    under = f"{OBSERVED.format(folder / 'under.cert')} backend=meshplan"
    files = {
        folder / "plain": ["nccl_model"],
        folder / "meshplan": ["meshplan"],
        folder / "observed": ["nccl_model", settings],
        folder / "under": ["nccl_model", under],
    }
    processes = [
        subprocess.Popen(
            [*command, backend, str(file), *more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        for file, (backend, *more) in files.items()
    ]
    try:
        errors = [process.communicate(timeout=1000)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, text in zip(processes, errors, strict=True):
        assert process.returncode == 0, text[-6000:]
    return [pickle.loads(file.read_bytes()) for file in files]


def compare_replicas(ranks: list[dict[str, Any]]) -> tuple[int, int]:
    """How many parts have several holders, and how many of those differ between them."""
    holders: defaultdict[tuple[str, str], list[bytes]] = defaultdict(list)
    for rank in ranks:
        for name, part, bits in rank["held"]:
            holders[name, part].append(bits)
    several = [found for found in holders.values() if len(found) > 1]
    return len(several), sum(any(one != found[0] for one in found) for found in several)


@pytest.mark.parametrize("name", trainers.JOBS)
def test_replicas_have_equal_bits_where_plain_ones_differ(name: str, tmp_path: Path) -> None:
    plain, found, observed, under = run_job(name, tmp_path)
    assert {rank["group"] for rank in plain} == {"NcclModelProcessGroup"}
    assert {rank["group"] for rank in found} == {"MeshplanProcessGroup"}
    replicas, differing = compare_replicas(plain)
    assert replicas > 10
    assert differing > 0
    assert compare_replicas(found) == (replicas, 0)
    for rank, alone in zip(found, plain, strict=True):
        assert alone["counts"]["outside"] >= trainers.STEPS
        # All of the reductions that the plain job makes.
        total = sum(alone["counts"].values())
        assert rank["counts"] == {"outside": 0, "native": 0, "any_order": 0, "contract": total}, (
            rank["table"]
        )
    assert [rank["held"] for rank in observed] == [rank["held"] for rank in plain]
    check_verdicts(name, observed, under)


def check_verdicts(name: str, plain: list[dict[str, Any]], under: list[dict[str, Any]]) -> None:
    """Of observed runs, one for each map of nodes."""
    nodes = trainers.JOBS[name].nodes
    reports = [rank["report"] for rank in (*plain, *under) if "report" in rank]
    assert len(reports) == 2 * len(nodes)
    for number, report in enumerate(reports):
        assert report["state"] == "ended"
        assert report["steps"]["unequal"] == []
        outside = [one for one in report["reductions"] if not one["contract"]]
        assert number < len(nodes) or not outside
        if name.startswith("Llama with FSDP2"):
            # Sharded along the mesh that they name. Along others ranks may hold other parameters,
            # as experts do.
            assert "no replicas were compared" in format_verdict(report)
            continue
        assert report["steps"]["compared"] >= trainers.STEPS
        affected = report["replicas"]["first_difference"] is not None
        if number >= len(nodes):
            assert not affected, format_verdict(report)
        elif nodes == trainers.ONE_GROUP:
            # All ranks of a group get one sum. Another placement gets another one.
            assert not affected, format_verdict(report)
        else:
            assert affected >= any(differ_within(plain)), format_verdict(report)
        framework = next((one for one in FRAMEWORKS if one in name), None)
        if framework and outside:
            assert FRAMEWORKS[framework] in format_verdict(report)
    if nodes == trainers.ONE_GROUP:
        links = [report["certificate"]["last"] for report in reports]
        assert len(set(links[:2])) == 2
        assert len(set(links[2:])) == 1


# Of the line that fixes it. Trainers of Transformers reduce in Accelerate.
FRAMEWORKS = {
    "Accelerate": "before Accelerator()",
    "Transformers": "before Accelerator()",
    "Lightning": "process_group_backend='meshplan'",
}


def differ_within(ranks: list[dict[str, Any]]) -> list[str]:
    """Parameters and states that differ between ranks of one run."""
    found: defaultdict[tuple[str, str], set[bytes]] = defaultdict(set)
    for rank in ranks:
        for name, part, bits in rank["held"]:
            found[name, part].add(bits)
    kept = {name for (name, _), bits in found.items() if len(bits) > 1}
    return [name for name in kept if not name.startswith(("norm", "loss", "grad_norm"))]


@pytest.mark.parametrize("name", trainers.JOBS)
def test_one_line_of_a_job_names_the_backend(name: str) -> None:
    train: Any = trainers.JOBS[name].train
    tree = ast.parse(inspect.getsource(getattr(train, "func", train)))
    used = [one for one in ast.walk(tree) if isinstance(one, ast.Name) and one.id == "backend"]
    assert len(used) == 1


@pytest.mark.parametrize(("name", "reductions"), [("accelerate", 4), ("lightning", 10)])
def test_example_differs_between_placements_only_in_plain_torch(name: str, reductions: int) -> None:
    done = torchrun(3, f"examples/train_{name}.py", timeout=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"0 outside, 0 native, 0 any order, {reductions} contract") == 2
    assert "nccl_model: 2 result(s) on two placements" in done.stdout
    assert "meshplan: 1 result(s) on two placements" in done.stdout
