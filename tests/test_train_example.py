"""``examples/train_hsdp_tp.py`` as a user starts it, and the page that it has written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.programs import capture, load_script, torchrun

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train_hsdp_tp.py"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.dist
@pytest.mark.processes
def test_plain_replicas_differ_and_meshplan_replicas_agree(tmp_path: Path) -> None:
    # Hosts of five: ranks along tp hold the same gradients of norms, and sum them over ddp in groups
    # of which two or one are on a host. So plain replicas differ at once, whatever the processor.
    options = ["--mesh", "3,2,2", "--domain", "5", "--steps", "3", "--output", str(tmp_path)]
    done = torchrun(12, SCRIPT, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    runs = json.loads((tmp_path / "hsdp_tp.json").read_text())
    differing = {
        run: sum(any(step["differing"].values()) for step in steps) for run, steps in runs.items()
    }
    assert differing["plain"] == 3
    assert differing["meshplan"] == 0
    assert [len(steps) for steps in runs.values()] == [3, 3]
    assert (tmp_path / "hsdp_tp.png").read_bytes().startswith(PNG)
    assert f"| meshplan | 0 of 3 | 0 of {len(runs['plain'][0]['differing'])} | 0 |" in done.stdout


@pytest.mark.full
def test_page_matches_its_numbers() -> None:
    folder = ROOT / "docs" / "training"
    module = load_script(SCRIPT)
    numbers = json.loads((folder / "hsdp_tp.json").read_text())
    runs = {run: [module.Step(**step) for step in steps] for run, steps in numbers.items()}
    assert module.table(runs) in (folder / "hsdp_tp.md").read_text()
    assert all(len(steps) == 50 for steps in runs.values())
    assert not any(any(step.differing.values()) for step in runs["meshplan"])
    assert (folder / "hsdp_tp.png").read_bytes().startswith(PNG)


@pytest.mark.full
def test_wrong_number_of_ranks_is_refused() -> None:
    done = capture(
        [sys.executable, str(SCRIPT), "--mesh", "2,2,1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert "--nproc-per-node 4" in done.stderr
