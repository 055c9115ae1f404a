"""The benchmarks work: cases, bars, the JSON of one schema, the page and its pictures. No times."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
from expecttest import TestCase

from benchmarks import allreduce_cpu, allreduce_gpu, timing
from benchmarks.__main__ import SUITES, time_of
from benchmarks.page import write_page
from benchmarks.record import SCHEMA, Case, Figures, at_least, at_most, machine
from meshplan.kernel import TimedPaths, _device_peers, timed_paths
from tests.programs import capture

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
SHAPE = json.loads((ROOT / "benchmarks" / "schema.json").read_text())
CASE = Case(
    name="all-reduce of 1 KiB",
    unit="ms",
    runs={
        "gloo": Figures.of([4.0, 2.0, 3.0]),
        "ordered": Figures.of([6.0]),
        "peer": Figures.of([0.5]),
    },
    peers=("gloo", "ordered"),
    ranks=2,
    parameters={"bytes": 1024, "world_size": 2},
    bars=(at_most(0.1, "peer", "gloo"), at_least(2.0, "ordered", "gloo"), at_most(1.0, "peer")),
)


def make_suite(*cases: Case) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "date": "2026-01-01",
        "smoke": False,
        "machine": machine(),
        "benchmarks": [
            {
                "name": "allreduce_cpu",
                "title": "All-reduces.",
                "about": "How.",
                "command": "python -m benchmarks.allreduce_cpu",
                "seconds": 1.0,
                "skipped": None,
                "cases": [case.to_json() for case in cases],
            },
            {
                "name": "allreduce_gpu",
                "title": "All-reduces on a GPU.",
                "about": "How.",
                "command": "python -m benchmarks.allreduce_gpu",
                "seconds": 0.0,
                "skipped": "no GPU",
                "cases": [],
            },
        ],
    }


def check(found: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SHAPE)
    jsonschema.Draft202012Validator(SHAPE).validate(found)


def test_ratios_are_to_each_peer_and_bars_are_exact() -> None:
    assert CASE.ratios == [("peer", "gloo", 0.5 / 3), ("peer", "ordered", 0.5 / 6)]
    assert [CASE.met(bar) for bar in CASE.bars] == [False, True, True]
    assert not CASE.met(at_most(0.166, "peer", "gloo"))


def timed(nbytes: int, **medians: float) -> Case:
    runs = {name: Figures.of([value]) for name, value in medians.items()}
    return Case(name=str(nbytes), unit="us", runs=runs, peers=(), parameters={"bytes": nbytes})


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ([timed(1, one_shot=1.0, two_shot=2.0)], None),
        (
            [
                timed(4096, one_shot=9.0, two_shot=3.0, exchange=4.0),
                timed(1024, one_shot=1.0, two_shot=2.0, exchange=4.0),
            ],
            TimedPaths(1024, share_memory=True),
        ),
        # Another dtype, of which one_shot is slower.
        (
            [
                timed(1024, one_shot=1.0, two_shot=2.0, exchange=4.0),
                timed(1024, one_shot=3.0, two_shot=2.0, exchange=4.0),
            ],
            TimedPaths(0, share_memory=True),
        ),
        # A small message is faster by what would not be taken.
        (
            [
                timed(1024, one_shot=5.0, two_shot=4.0, exchange=4.5),
                timed(4096, one_shot=3.0, two_shot=6.0, exchange=5.0),
            ],
            TimedPaths(0, share_memory=False),
        ),
    ],
)
def test_thresholds_of_auto_are_those_of_all_dtypes(
    cases: list[Case], expected: TimedPaths | None
) -> None:
    assert allreduce_gpu.thresholds(cases) == expected


def test_timed_gpus_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = json.loads(allreduce_gpu.TIMED.read_text())
    path = tmp_path / "timed.json"
    path.write_text(json.dumps(shipped))
    for limit in (1, 2):
        found = TimedPaths(limit, share_memory=True)
        allreduce_gpu.note(path, "NVIDIA X", 8, found, "2026-11-25, NVIDIA X, driver 580.1")
    allreduce_gpu.note(path, "NVIDIA X", 4, TimedPaths(7, share_memory=False), "2026-11-25")
    known = json.loads(path.read_text())
    assert known.items() > shipped.items()
    monkeypatch.setattr(_device_peers, "_read", lambda: known)
    assert timed_paths("NVIDIA X", 8) == found
    assert timed_paths("NVIDIA X", 4) == "exchange was timed to be faster on NVIDIA X with 4 ranks"
    assert timed_paths("NVIDIA X", 2) == (
        "one_shot and two_shot were not timed on NVIDIA X with 2 ranks; write the path that you "
        "want, or time them with make bench-gpu"
    )


def test_calls_that_settle_are_counted_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the slowest rank's time, so that no rank makes more calls than another."""
    monkeypatch.setattr(
        timing,
        "slowest",
        lambda samples: {
            name: Figures.of([seconds]) for name, seconds in zip(samples, times, strict=True)
        },
    )
    times, calls = (0.004, 3e-5, 2.0), list[str]()
    functions = {name: partial(calls.append, name) for name in ("gloo", "peer", "large")}
    before = timing.calls_to_settle(functions)
    assert before == {"gloo": 8, "peer": 1000, "large": 2}
    calls.clear()
    found = timing.in_blocks(functions, 6, turns=2, warm_up=before)
    assert {name: len(samples) for name, samples in found.items()} == dict.fromkeys(functions, 6)
    assert {name: calls.count(name) for name in functions} == {
        name: 6 + 2 * count for name, count in before.items()
    }


def test_json_round_trip_is_lossless() -> None:
    check(make_suite(CASE))
    assert Case.from_json(json.loads(json.dumps(CASE.to_json()))) == CASE


class TestTexts(TestCase):
    maxDiff = None

    def test_page_lists_bars(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        suite = replace(allreduce_cpu.SUITE, reasons={"peer / gloo": "Messages of 1 KiB."})
        self.enterContext(mock.patch.object(allreduce_cpu, "SUITE", suite))
        page = write_page(make_suite(CASE), folder)
        text = page.read_text()
        self.assertExpectedInline(
            text[text.index("## Bars") : text.index("## A second")] + text[text.index("## all") :],
            """\
## Bars

| benchmark | ratio or figure | bar | measured | cases | |
|---|---|---|---|---|---|
| allreduce_cpu | peer / gloo | at most 0.1 | 0.167 | 0 of 1 | **not met** |
| allreduce_cpu | ordered / gloo | at least 2 | 2 | 1 of 1 | met |
| allreduce_cpu | peer | at most 1 ms | 0.5 ms | 1 of 1 | met |

Not met:

* allreduce_cpu, peer / gloo: Messages of 1 KiB.

## allreduce_gpu: all-reduces on a GPU

Left out here: no GPU.
""",
        )

    def test_missed_bar_needs_a_reason(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        suite = replace(allreduce_cpu.SUITE, reasons={})
        self.enterContext(mock.patch.object(allreduce_cpu, "SUITE", suite))
        with pytest.raises(ValueError, match=r"^allreduce_cpu: the bar of peer / gloo is not met"):
            write_page(make_suite(CASE), folder)
        write_page(make_suite(CASE) | {"smoke": True}, folder)


def test_suites_have_budgets_of_20_minutes_in_all() -> None:
    assert sum(SUITES.values()) <= 20 * 60
    assert time_of("groups", 12.4, 50.0) == "groups: 12 s of 15 s; 50 s since the start"
    assert time_of("groups", 16.0, 69.0) == (
        "groups: 16 s of 15 s, more than its budget; 69 s since the start"
    )


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return capture([sys.executable, "-m", "benchmarks", *words], cwd=ROOT, timeout=None)


@pytest.mark.full
def test_every_suite_runs_in_smoke_mode(tmp_path: Path) -> None:
    done = run("--smoke", "--json", f"{tmp_path}/found.json", "--page", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    check(found)
    assert found["smoke"] is True
    assert len(re.findall(r"^\w+: \d+ s of \d+ s.* s since the start$", done.stdout, re.M)) == len(
        SUITES
    )
    assert [suite["name"] for suite in found["benchmarks"]] == list(SUITES)
    for suite in found["benchmarks"]:
        assert bool(suite["cases"]) != bool(suite["skipped"]), suite["name"]
    page = (tmp_path / "performance.md").read_text()
    assert "Not to be quoted" in page
    (paths,) = (suite for suite in found["benchmarks"] if suite["name"] == "paths")
    assert ("| 1 Gb/s, 2 x 2 |" in page) is (not paths["skipped"])
