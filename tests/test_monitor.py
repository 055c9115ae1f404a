"""Totals of steps and comparisons, as text, numbers and gauges of Prometheus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshplan.errors import ReplicaDivergenceError
from meshplan.replicas import CoverageStep, ReplicaReport, StepMonitor
from meshplan.replicas._coverage import CoverageRow

ROOT = Path(__file__).parents[1]
REPORT = ReplicaReport(3, 12, 48, (), (), 2, 3600.0)


def monitored() -> StepMonitor:
    monitor = StepMonitor()
    for number in (1, 2):
        step = CoverageStep(number)
        step.add(CoverageRow("outside", "all_reduce", "float32", 2, "here"), 8, 0.25)
        step.add(CoverageRow("any order", "all_reduce", "int64", 2, "here"), 16, 0.5)
        monitor(step)
    monitor.add_check(None)
    monitor.add_check(ReplicaDivergenceError("they differ", divergences=(), tensors=2, step=1))
    monitor.add_check(REPORT)
    return monitor


def test_line_has_the_totals() -> None:
    assert str(monitored()) == (
        "[meshplan] 2 steps: 2 outside, 0 native, 2 any order, 0 contract; replicas compared 2 "
        "times, 1 times different"
    )


def test_scalars_are_totals_by_name() -> None:
    found = monitored().to_scalars()
    assert {name: number for name, number in found.items() if number} == {
        "meshplan/steps": 2,
        "meshplan/outside/count": 2,
        "meshplan/outside/bytes": 16,
        "meshplan/outside/seconds": 0.5,
        "meshplan/any_order/count": 2,
        "meshplan/any_order/bytes": 32,
        "meshplan/any_order/seconds": 1.0,
        "meshplan/replicas/checks": 2,
        "meshplan/replicas/failed_checks": 1,
    }
    assert found["meshplan/replicas/differing_tensors"] == 0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks exports by the lines of the page."""
    folder = tmp_path_factory.mktemp("job")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [sys.executable, *words, "-m", "tests.monitored_job"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def samples(text: str) -> dict[str, float]:
    """By the names of ``to_scalars``, which are the texts of the gauges."""
    return {
        family.documentation: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.full
@pytest.mark.processes
def test_prometheus_reads_the_totals_of_each_rank(job: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(job):
        agreeing, differing = found["agreeing"], found["differing"]
        assert samples(agreeing["text"]) == agreeing["scalars"]
        assert samples(differing["text"]) == differing["scalars"]
        assert f'rank="{rank}"' in agreeing["text"]
        assert agreeing["scalars"]["meshplan/contract/count"] == 4
        assert agreeing["scalars"]["meshplan/outside/count"] == 2
        checks = [
            [one["scalars"][f"meshplan/replicas/{name}"] for name in ("checks", "failed_checks")]
            for one in (agreeing, differing)
        ]
        assert checks == [[2, 0], [1, 1]]
