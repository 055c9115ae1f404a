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

from tests.backend import trainers

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


def run_job(name: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By backend: what each rank of each run has found."""
    backends = ("nccl_model", "meshplan")
    command = [sys.executable, "-W", "ignore", "-m", "tests.backend.trainers", name]
    processes = [
        subprocess.Popen(
            [*command, backend, str(folder / backend)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        for backend in backends
    ]
    try:
        errors = [process.communicate(timeout=1000)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, text in zip(processes, errors, strict=True):
        assert process.returncode == 0, text[-6000:]
    return {backend: pickle.loads((folder / backend).read_bytes()) for backend in backends}


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
    plain, found = run_job(name, tmp_path).values()
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


@pytest.mark.parametrize("name", trainers.JOBS)
def test_one_line_of_a_job_names_the_backend(name: str) -> None:
    train: Any = trainers.JOBS[name].train
    tree = ast.parse(inspect.getsource(getattr(train, "func", train)))
    used = [one for one in ast.walk(tree) if isinstance(one, ast.Name) and one.id == "backend"]
    assert len(used) == 1


@pytest.mark.parametrize(("name", "reductions"), [("accelerate", 4), ("lightning", 10)])
def test_example_differs_between_placements_only_in_plain_torch(name: str, reductions: int) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", "3", f"examples/train_{name}.py"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"0 outside, 0 native, 0 any order, {reductions} contract") == 2
    assert "nccl_model: 2 result(s) on two placements" in done.stdout
    assert "meshplan: 1 result(s) on two placements" in done.stdout
