"""Predicted all-reduces of NCCL beside published times: tests/published_all_reduces.csv."""

from __future__ import annotations

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from meshplan.layout import Layout
from meshplan.planner import CALIBRATIONS, Problem, predict_backend
from meshplan.planner._simulation import Calibration
from meshplan.topology import Topology
from tests.test_cli_simulate import simulate

TABLE = Path(__file__).with_name("published_all_reduces.csv").read_text(encoding="utf-8")
ROWS = [*csv.DictReader(TABLE.splitlines())]

# GB/s of the adapters of one GPU, by data sheet, for which the links are fitted.
ADAPTERS = {"a100": 25.0, "a100-efa": 6.25, "h100": 50.0, "gb200": 50.0}


def predict(row: dict[str, str], calibration: Calibration) -> tuple[float, float, float]:
    """The lowest, the predicted and the highest time in us."""
    ranks, node = int(row["ranks"]), int(row["node"])
    share = float(row["adapter"]) / ADAPTERS[row["links"]]
    own = replace(calibration, network=calibration.network * share)
    topology = Topology.uniform(ranks, node_size=node, domain_size=node, links=own.links)
    problem = Problem.of(
        Layout.of(dp=ranks),
        ["P"],
        ["R"],
        dtype="float32",
        shape=(int(row["bytes"]) // 4,),
        topology=topology,
    )
    algorithm: Any = row["algorithm"]
    cost = predict_backend(problem, [["dp"]], algorithm, own).cost
    low, high = own.widen(cost)
    return low / 1e3, cost.nanoseconds / 1e3, high / 1e3


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_published_times_are_in_the_predicted_ranges(name: str) -> None:
    ratios = []
    rows = [row for row in ROWS if row["links"] == name]
    for row in rows:
        low, predicted, high = predict(row, CALIBRATIONS[name])
        assert low <= float(row["us"]) <= high, row
        assert float(row["predicted"]) == pytest.approx(predicted, rel=1e-3), row
        ratios.append(predicted / float(row["us"]))
    assert 0.9 < geometric_mean(ratios) < 1.1
    assert max(int(row["ranks"]) for row in rows) == CALIBRATIONS[name].largest


def test_ranges_are_no_wider_than_the_error() -> None:
    errors: dict[float, float] = {}
    for row in ROWS:
        _, predicted, high = predict(row, CALIBRATIONS[row["links"]])
        ratio = predicted / float(row["us"])
        width = round(high / predicted, 2)
        errors[width] = max(errors.get(width, 0.0), ratio, 1 / ratio)
    assert errors == {width: pytest.approx(width, rel=0.03) for width in (1.15, 1.7, 1.85)}


FITTED = itertools.product(CALIBRATIONS, ("domain", "network", "far"))
# No row depends on the NVLink of a100-efa, and of gb200 none on a faster network.
UNKNOWN = {("a100-efa", "domain"), ("gb200", "network")}


@pytest.mark.parametrize("factor", [0.7, 1.5])
@pytest.mark.parametrize(("name", "what"), sorted({*FITTED} - UNKNOWN))
def test_other_constants_fit_worse(name: str, what: str, factor: float) -> None:
    fitted = CALIBRATIONS[name]
    other = replace(fitted, **{what: getattr(fitted, what) * factor})
    assert measure_error(name, fitted) < measure_error(name, other)


def measure_error(name: str, calibration: Calibration) -> float:
    ratios = (predict(r, calibration)[1] / float(r["us"]) for r in ROWS if r["links"] == name)
    return sum(math.log(ratio) ** 2 for ratio in ratios)


def test_options_choose_the_links() -> None:
    words = ("--cost", "--mesh", "dp=72", "--domain-size", "72", "--output-format", "json")
    found = {}
    for name in CALIBRATIONS:
        code, out, _ = simulate(*words, "--gpu", name)
        assert code == 0
        found[name] = json.loads(out)
        assert found[name]["published"] == CALIBRATIONS[name].largest
        for row in found[name]["rows"]:
            time = row["cost"]["nanoseconds"]
            assert row["low"] < time < row["high"]
    assert simulate(*words)[1] == simulate(*words, "--gpu", "h100")[1]
    slow, fast = (found[name]["rows"][1]["low"] for name in ("a100", "gb200"))
    assert slow > 1.5 * fast
