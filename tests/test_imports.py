"""Imports run downward: in the order that CONTRIBUTING.md gives the folders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "meshplan"
# Modules that import each other, also within functions and for types. Add none.
CIRCLES = ["lint._facts lint._fixes lint._rules._rule lint._rules.environment"]


def levels() -> dict[str, int]:
    """The place of each part of the package, from the top down; the rest is at the end."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`meshplan/[^|]*) \|", text, re.M)
    found = {
        part.removeprefix("meshplan/").removesuffix(".py"): level
        for level, row in enumerate(rows)
        for part in re.findall(r"`([^`]*)`", row)
    }
    for path in PACKAGE.glob("_*.py"):
        found.setdefault(path.stem, len(rows) - 1)
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """Names that a module imports when it is loaded, when it runs, or for types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@cache
def imports() -> nx.DiGraph:
    """Modules below ``meshplan``, whose names it is without, and the imports between them."""
    paths = {
        path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path
        for path in PACKAGE.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    for name in ("__init__", "__main__"):
        del modules[name]
    graph = nx.DiGraph()
    for module, path in modules.items():
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            if name.startswith("meshplan."):
                name = name.removeprefix("meshplan.")
                target = name if name in modules else name.rpartition(".")[0]
                if target in modules and target != module:
                    graph.add_edge(module, target)
    return graph


def test_imports_run_downward() -> None:
    level = levels()
    parts = {(a, b): (a.split(".")[0], b.split(".")[0]) for a, b in imports().edges}
    upward = [f"{a} -> {b}" for (a, b), (one, other) in parts.items() if level[other] < level[one]]
    assert len(parts) > 1000
    assert upward == []


def test_no_modules_import_each_other() -> None:
    circles = [
        " ".join(sorted(circle))
        for circle in nx.strongly_connected_components(imports())
        if len(circle) > 1
    ]
    # One that is gone leaves the list.
    assert sorted(circles) == CIRCLES


def test_every_folder_has_its_place() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= set(levels())


def test_modules_are_small() -> None:
    """A longer one has several subjects; budget.toml limits the size."""
    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert [path.name for path, count in lines.items() if count > 900] == []
