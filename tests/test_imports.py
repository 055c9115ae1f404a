"""Imports run downward: in the order that CONTRIBUTING.md gives the folders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "meshplan"


def levels() -> dict[str, int]:
    """The place of each part of the package, from the top down; what is not listed is at the end."""
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
    """Parts of the package that are imported when a module is, or when it runs; not for types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("meshplan."))
        yield from imported(node)


def test_imports_run_downward() -> None:
    level = levels()
    upward, seen = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        for other in set(imported(ast.parse(path.read_text(encoding="utf-8")))):
            if other in level and other != part:
                seen += 1
                upward += [f"{path.relative_to(ROOT)} -> {other}"] * (level[other] < level[part])
    assert seen > 300
    assert upward == []


def test_every_folder_has_its_place() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= set(levels())


def test_modules_are_small() -> None:
    """One that is longer needs a page in docs/adr."""
    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert [path.name for path, count in lines.items() if count > 400] == []
