"""The main job, under torchrun and in forked ranks, over the model of NCCL's order."""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.processes import run_ranks
from tests.programs import torchrun

ROOT = Path(__file__).parent.parent


EXAMPLE = str(ROOT / "examples" / "jagged_mesh.py")


def launch(ranks: int, words: list[str]) -> str:
    """What the job prints."""
    done = torchrun(ranks, EXAMPLE, *words, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def fork(ranks: int, words: list[str]) -> str:
    """The same with ranks that import nothing: forty imports of torch take two minutes of a core."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def run(rank: int) -> tuple[int, str]:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        # As under torchrun, whose agent serves the store.
        os.environ |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        sys.argv = [EXAMPLE, *words]
        with redirect_stdout(StringIO()) as printed:
            status = runpy.run_path(EXAMPLE)["main"]()
        return status, printed.getvalue()

    found = run_ranks(run, ranks, init=False)
    assert {status for status, _ in found} == {0}
    assert {text for _, text in found[1:]} == {""}
    return str(found[0][1])


def job(
    start: Callable[[int, list[str]], str],
    mesh: str,
    domain: int,
    folder: Path,
    backend: str = "nccl_model",
    *more: str,
) -> tuple[list[dict[str, Any]], str]:
    """The rows and the printed text."""
    output = folder / "demo.json"
    sizes = [int(size) for size in mesh.split(",")]
    words = ["--mesh", mesh, "--domain", str(domain), "--json", str(output)]
    printed = start(math.prod(sizes), [*words, "--backend", backend, *more])
    found = json.loads(output.read_text())
    assert found["backend"] == backend
    assert found["mesh"] == sizes
    assert "model of NCCL" in printed
    assert "model of NCCL" in found["order_of_additions"]
    rows: list[dict[str, Any]] = found["rows"]
    return rows, printed


EXCHANGE = {"all_to_all_single": 1, "all_gather_into_tensor": 1}
FAST = {"all_to_all_single": 1, "all_reduce": 1}
# Groups of more than 32 ranks compare headers in 2 log2 W rounds, before a native reduction too.
ROUNDS = {"recv": 11, "send": 11}


def check(
    rows: list[dict[str, Any]],
    both: str,
    first: str,
    calls: dict[str, int],
    fast_calls: dict[str, int],
) -> None:
    """``calls`` of the backend for ``both``, under the contract and by policy ``fast``."""

    def pick(run: str, redistribution: str) -> list[dict[str, Any]]:
        return [r for r in rows if r["run"] == run and r["redistribution"] == redistribution]

    for redistribution, reductions in ((both, 2), (first, 1)):
        plain = pick("plain DTensor", redistribution)
        assert [r["model"] for r in plain] == ["ring", "tree"]
        assert [r["reductions"] for r in plain] == [reductions] * 2
        assert max(r["distinct_replicas"] for r in plain) > 1
        assert max(r["max_fraction_differing"] for r in plain) > 0.05
        planned = pick("meshplan", redistribution)
        assert len(planned) == 2
        for row in planned:
            assert row["reductions"] == 1
            assert row["distinct_replicas"] == 1
            assert row["max_fraction_differing"] == 0
            assert row["backend_calls"] == (calls if redistribution == both else EXCHANGE)
    fast = pick("meshplan fast", both)
    assert [r["backend_calls"] for r in fast] == [fast_calls] * 2
    assert [r["reductions"] for r in fast] == [1] * 2
    assert all(r["seconds"] > 0 for r in rows)


@pytest.mark.processes
@pytest.mark.full
def test_small_jagged_mesh_shows_the_hazard(tmp_path: Path) -> None:
    rows, _ = job(launch, "3,3", 4, tmp_path)
    check(rows, "(P, P) -> (R, R)", "(P, R) -> (R, R)", EXCHANGE, FAST)


@pytest.mark.processes
@pytest.mark.dist
def test_exact_sums_do_not_depend_on_the_order_of_ranks(tmp_path: Path) -> None:
    """40 ranks, the original mesh and two random permutations of its ranks."""
    digests: dict[str, set[str]] = {}
    for permutation in ([], ["--permute", "1"], ["--permute", "2"]):
        more = ["--order", "exact", *permutation]
        rows, _ = job(fork, "8,5,1", 8, tmp_path, "nccl_model", *more)
        planned = [row for row in rows if row["run"] == "meshplan"]
        assert [row["distinct_replicas"] for row in planned] == [1] * 4
        for row in rows:
            digests.setdefault(f"{row['run']} {row['redistribution']}", set()).add(row["digest"])
    both, first = "(P, P, R) -> (R, R, R)", "(P, R, R) -> (R, R, R)"
    assert {one: len(digests[f"meshplan {one}"]) for one in (both, first)} == {both: 1, first: 1}
    # The same leaves in another order have other bits where the order counts.
    assert len(digests[f"plain DTensor {both}"]) > 1


@pytest.mark.processes
@pytest.mark.full
def test_no_replica_differs_over_the_backend(tmp_path: Path) -> None:
    """Plain DTensor, axis by axis, and policy ``fast`` reduce under the contract, too."""
    rows, _ = job(fork, "3,3", 4, tmp_path, "meshplan")
    assert len(rows) == 10
    for row in rows:
        assert row["distinct_replicas"] == 1
        assert row["max_fraction_differing"] == 0
        both, plain = row["redistribution"].count("P") == 2, row["run"] == "plain DTensor"
        assert row["reductions"] == (2 if both and plain else 1)
        assert row["backend_calls"] == (FAST if row["run"] == "meshplan fast" else EXCHANGE)


@pytest.mark.processes
@pytest.mark.full
def test_mesh_of_the_issue_shows_the_hazard(tmp_path: Path) -> None:
    rows, printed = job(fork, "8,5,1", 8, tmp_path)
    both, first = "(P, P, R) -> (R, R, R)", "(P, R, R) -> (R, R, R)"
    check(rows, both, first, ROUNDS | EXCHANGE, ROUNDS | {"all_reduce": 1})
    # The tutorial has this figure.
    assert 0.3 < max(row["max_fraction_differing"] for row in rows) < 0.4
    assert "ddp: 5 groups of 8, ranks per domain (2,2,1,2,1) (2,1,2,2,1)" in printed


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("8,x", "--mesh 8,x: write sizes like 8,5,1"),
        ("0,5", "one to three sizes, all >= 1"),
    ],
)
def test_invalid_arguments_are_rejected(
    mesh: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["jagged_mesh.py", "--mesh", mesh])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(EXAMPLE, run_name="__main__")
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_a_mesh_of_more_ranks_than_processes_is_rejected() -> None:
    done = torchrun(1, EXAMPLE, "--mesh", "2,2")
    assert done.returncode != 0
    assert "--mesh 2,2 has 4 ranks and 1 were started; use --nproc-per-node 4" in done.stderr


def test_start_without_torchrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["jagged_mesh.py", "--mesh", "4,3"])
    assert runpy.run_path(EXAMPLE)["main"]() == 2
    assert "--nproc-per-node 12" in capsys.readouterr().err
