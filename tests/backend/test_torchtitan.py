"""torchtitan's own trainer over the backend, as examples/torchtitan.md selects it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT, blocks
from tests.programs import capture

# `make test-full` installs it.
MISSING = importlib.util.find_spec("torchtitan") is None

pytestmark = [
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.skipif(MISSING, reason="pip install --group trainers --group without-dependencies"),
]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The page's module."""
    page = (ROOT / "examples" / "torchtitan.md").read_text(encoding="utf-8")
    parts = [block.text for block in blocks(page, "python")]
    assert len(parts) == 2
    file = tmp_path / "job.py"
    file.write_text("\n".join(parts))
    return file


def run(job: Path, steps: int, configuration: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """What rank 0 finds in the plain job and over the backend, and what the latter prints."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.backend.torchtitan_jobs"]
    # The backend for model parallelism that runs with torch 2.13.
    configuration += ",node=3,spmd=partial_dtensor"
    done = capture(
        [*command, "--job", str(job), "--steps", str(steps), configuration],
        timeout=1000,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    plain, under, over = map(json.loads, lines)
    # Observed: the plain job, and the same under --backend meshplan.
    affected = [one["verdict"][0].startswith("[meshplan] affected: ") for one in (plain, under)]
    assert affected == [plain["differ"] > 0, False], (plain, under)
    ran = "  every reduction of floating-point numbers ran under the contract"
    assert (under["differ"], under["outside"], ran in under["verdict"]) == (0, 0, True)
    assert (plain["group"], over["group"]) == ("nccl_model", "meshplan")
    # The plain job's reductions are all outside, and over the backend none is.
    assert (plain["contract"], plain["native"]) == (0, 0)
    assert plain["outside"] > 0
    assert (over["outside"], over["native"]) == (0, 0)
    # Integers and maxima are under the contract, too.
    assert over["contract"] + over["any order"] == plain["outside"] + plain["any order"]
    assert over["reduce_scatter"] == plain["reduce_scatter"] > 0
    return plain, over, done.stdout


def test_replicas_stay_equal_where_plain_ones_drift(job: Path) -> None:
    """HSDP and tensor parallel, with clipping in every step: the norm's groups are jagged."""
    plain, over, printed = run(job, 30, "rep=2,tp=4")
    # torchtitan clips to 0.1.
    assert min(plain["norms"] + over["norms"]) > 0.1
    assert plain["differ"] > 0
    assert (over["differ"], over["tensors"]) == (0, plain["tensors"])
    assert re.findall(r"(\d+) contract", printed) == [str(over["contract"])]


def test_pipeline_and_shards(job: Path) -> None:
    """The norm of the stages is a plain all-reduce of torchtitan's."""
    _, over, _ = run(job, 2, "pp=2,shard=2")
    assert over["differ"] == 0


def test_selective_checkpointing_repeats_no_reduce_scatter(job: Path) -> None:
    """It saves their results by operator, so none of the 20 in two steps runs again."""
    _, over, _ = run(job, 2, "tp=2,ac=selective")
    assert over["reduce_scatter"] == 20
