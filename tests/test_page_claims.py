"""Figures and tests that pages name, and claims of pages about the whole repository."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan import Layout
from meshplan.planner import Problem, plan
from meshplan.topology import Topology
from tests.pages import ROOT, remove_blocks
from tests.processes import run_ranks
from tools.site_cost import MESSAGES, predict_slowdown


@cache
def prose(page: str) -> str:
    return remove_blocks((ROOT / page).read_text(encoding="utf-8"))


@cache
def defined_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_tests_named_by_the_readme_exist() -> None:
    module = ""
    named = re.findall(r"`(tests/\w+\.py(?:::\w+)?|::\w+)`", prose("README.md"))
    assert len(named) > 5
    for name in named:
        file, _, function = name.partition("::")
        module = file or module
        assert function in defined_in(module.removeprefix("tests/").removesuffix(".py")), name


def measured(name: str) -> list[dict[str, Any]]:
    """The cases of a benchmark, in docs/performance/performance.json."""
    path = ROOT / "docs" / "performance" / "performance.json"
    suites = json.loads(path.read_text())["benchmarks"]
    cases: list[dict[str, Any]] = next(one["cases"] for one in suites if one["name"] == name)
    return cases


def test_predicted_figures_match_the_data() -> None:
    """Errors of predictions, against the committed benchmark results."""
    errors = [
        one["runs"]["median error"]["median"]
        for one in measured("scaling")
        if "median error" in one["runs"]
    ]
    shown = f"{min(errors):.0f} to {max(errors):.0f} %"
    assert f"error of a job is {shown}" in prose("docs/howto/plans-and-hazards.md")
    assert f"error of a job was {shown}" in prose("docs/cost.md")


def ratios(suite: str, of: str, to: str) -> list[float]:
    runs = [one["runs"] for one in measured(suite) if {of, to} <= set(one["runs"])]
    return [one[of]["median"] / one[to]["median"] for one in runs]


def test_measured_figures_match_the_data() -> None:
    """Those of the README and of the pages about costs."""
    readme, cost = prose("README.md"), prose("docs/cost.md")
    steps = ratios("training", "meshplan", "plain")
    digests = ratios("replicas", "digest", "read")
    for text in (readme, cost, prose("docs/train.md")):
        assert f"{min(steps):.2f} to {max(steps):.2f} times" in text
    for text in (readme, cost):
        assert f"| {min(digests):.2f} to {max(digests):.2f} reads of the data |" in text
    dispatch = ratios("dispatch", "deterministic", "torch")[0]
    assert f"| {dispatch:.1f} times DTensor's |" in readme
    runs = measured("dispatch")[0]["runs"]
    us = {name: f"{run['median']:.0f} µs" for name, run in runs.items()}
    assert f"| {us['deterministic']} instead of {us['torch']} |" in cost
    for case in measured("training"):
        plain, ours = (f"{case['runs'][name]['median']:.0f} ms" for name in ("plain", "meshplan"))
        assert f"{case['name'].split(' = ')[1]} | {plain} | {ours} |" in cost
    lint = [one["runs"]["meshplan lint"]["median"] for one in measured("lint")[1::2]]
    for seconds in (lint[0], lint[-1]):
        assert f"| {seconds:.1f} s (measured" in prose("docs/lint-a-cluster.md")
    token = next(
        one["runs"]
        for one in measured("allreduce_cpu")
        if one["name"] == "all-reduce of 64 KiB, float32" and one["ranks"] == 2
    )
    peer, gloo = (f"{token[name]['median']:.2f} ms" for name in ("peer", "gloo"))
    shown = f"shared memory takes {peer} for 64 KiB and 2 ranks, and gloo takes {gloo}"
    assert shown in prose("docs/rl.md")
    path = ROOT / "docs" / "performance" / "performance.json"
    date = json.loads(path.read_text())["date"]
    assert readme.count(f", {date} |") == cost.count(f", {date} |") == 3


def test_predicted_figures_are_the_planners() -> None:
    found = {name: predict_slowdown(512, size) for name, (size, _) in MESSAGES.items()}
    shown = [
        f"{low:.1f} to {high:.1f} times {'the time ' * (name == '64 KiB')}for {name}"
        for name, (low, high) in found.items()
    ]
    assert ", ".join(shown) in prose("docs/cost.md")
    low, high = min(low for low, _ in found.values()), max(high for _, high in found.values())
    assert f"| {low:.1f} to {high:.1f} times NCCL's ring or tree |" in prose("README.md")


def test_training_figures_match_the_data() -> None:
    runs = json.loads((ROOT / "docs" / "training" / "hsdp_tp.json").read_text())
    first = next(n for n, step in enumerate(runs["plain"], 1) if any(step["differing"].values()))
    assert f"Plain torch's replicas differ from step {first} on" in prose("docs/tutorial.md")
    assert not any(any(step["differing"].values()) for step in runs["meshplan"])


_UNSAFE = {"pickle", "marshal", "shelve", "cloudpickle", "dill", "joblib"}
_CALLS = {
    "load",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
}


def unpickling(source: str) -> list[str]:
    """Imports of modules that unpickle, and calls of torch's functions that do."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [one.name for one in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.split(".")[0] in _UNSAFE]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if node.func.attr in _CALLS and owner in ("torch", "dist", "c10d", "torch.distributed"):
                found.append(ast.unparse(node.func))
    return found


def test_nothing_is_unpickled() -> None:
    assert unpickling("import pickle\ndist.all_gather_object(a, b)") == [
        "pickle",
        "dist.all_gather_object",
    ]
    for path in sorted((ROOT / "meshplan").rglob("*.py")):
        assert unpickling(path.read_text(encoding="utf-8")) == [], path


def redistributed(mesh: Any, size: int) -> None:
    partial = DTensor.from_local(torch.ones(size), mesh, (Partial(), Partial()), run_check=False)
    partial.redistribute(mesh, (Replicate(), Replicate()))


@pytest.mark.processes
def test_plans_of_a_job_do_not_depend_on_sizes() -> None:
    """On two nodes of two ranks the best plan for 3 elements is another than that for 4 Mi."""
    nodes = Topology.uniform(4, node_size=2, domain_size=2)

    def best(size: int) -> str:
        placements = (["P", "P"], ["R", "R"])
        problem = Problem.of(
            Layout.of(a=2, b=2), *placements, shape=(size,), topology=nodes, path="auto"
        )
        return str(plan(problem))

    assert best(3) != best(1 << 22)

    def ranks(rank: int) -> list[tuple[str, int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        with meshplan.installed(topology=nodes):
            for size in (3, 1 << 22, 1):
                redistributed(mesh, size)
            # Small and large messages issue other collectives, and have entries of their own.
            counts = Counter[str]()
            for one in meshplan.report().entries:
                counts[one["planned"]] += one["count"]
            return list(counts.items())

    nominal = f"{best(1 << 22)}, cheapest for {1 << 22} elements"
    assert run_ranks(ranks, 4) == [[(nominal, 3)]] * 4


@pytest.mark.processes
def test_nothing_is_registered_on_a_mesh() -> None:
    """A group over two of three axes is none that torch has, and is created."""

    def ranks(rank: int) -> tuple[list[str], str, str]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        partial = (Partial(), Replicate(), Partial())
        hash(mesh)  # which torch keeps
        before = {name: repr(value) for name, value in vars(mesh).items()}
        with meshplan.installed():
            tensor = DTensor.from_local(torch.ones(3), mesh, partial, run_check=False)
            tensor.redistribute(mesh, (Replicate(),) * 3)
            entry = meshplan.report().entries[-1]
        after = {name: repr(value) for name, value in vars(mesh).items()}
        changed = [name for name in after if before.get(name) != after[name]]
        return changed, entry["planned"], entry["group"]

    for changed, planned, group in run_ranks(ranks, 8):
        assert changed == []
        assert planned.startswith("all_reduce sum over (a, c), groups of 4")
        assert group.startswith("created group meshplan:")
