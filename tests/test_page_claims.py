"""Claims of pages about the whole repository."""

from __future__ import annotations

import ast
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan import Layout
from meshplan.planner import Problem, plan
from meshplan.topology import Topology
from tests.pages import ROOT
from tests.processes import run_ranks

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
    found: list[str] = []
    # A file without one of these words has no such import and no such call, and to parse it takes long.
    if not re.search("|".join(_UNSAFE | _CALLS), source):
        return found
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
