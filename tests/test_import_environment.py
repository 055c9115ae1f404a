"""The table of environment variables is what the sources read, no more and no less."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"[A-Z][A-Z0-9_]*")
OURS = re.compile(r"MESHPLAN_[A-Z0-9]+(?:_[A-Z0-9]+)*")
MAPPINGS = ("environ", "environment")


def table() -> set[str]:
    """Names in the first column of both tables."""
    names: set[str] = set()
    for line in (ROOT / "docs" / "environment.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names.update(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return names


def python() -> Iterator[Path]:
    yield from sorted((ROOT / "meshplan").rglob("*.py"))
    yield ROOT / "meshplan_autoload.py"
    yield ROOT / "setup.py"


def native() -> Iterator[Path]:
    yield from sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def texts(path: Path) -> set[str]:
    """All string literals of a module."""
    return {
        node.value
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def words(node: ast.AST) -> Iterator[str]:
    """Those of ``os.environ.get``, the last one first."""
    while isinstance(node, ast.Attribute):
        yield node.attr
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


@cache
def find_variables(path: Path) -> set[str]:
    """Literals in ``environ.get("A")``, ``environ["A"]``, ``f(environ, "A")``, ``"A" in environ``."""
    found = set()
    for node in ast.walk(tree(path)):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Subscript):
            parts = [node.value, node.slice]
        elif isinstance(node, ast.Call):
            parts = [node.func, *node.args]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            parts = [node.left, *node.comparators]
        if any(word in MAPPINGS for part in parts for word in words(part)):
            values = [part.value for part in parts if isinstance(part, ast.Constant)]
            found |= {v for v in values if isinstance(v, str) and NAME.fullmatch(v)}
    return found


def test_everything_that_is_read_is_in_the_table() -> None:
    named = table()
    for path in python():
        missing = {one for one in find_variables(path) if one not in named}
        missing |= {one for one in texts(path) if OURS.fullmatch(one)} - named
        assert not missing, path
    for path in native():
        source = path.read_text(encoding="utf-8")
        found = re.findall(r'getenv\(\s*"([^"]+)"', source) + OURS.findall(source)
        assert not set(found) - named, path


def test_everything_in_the_table_is_read() -> None:
    literals = set().union(*(texts(path) for path in python()))
    literals |= set().union(*(texts(path) for path in sorted((ROOT / "tests").glob("*.py"))))
    for name in table() - {"NCCL_*"}:
        assert name in literals, name


def test_search_finds_every_read() -> None:
    found = set().union(*(find_variables(path) for path in python()))
    assert {"MESHPLAN_PATH", "NCCL_ALGO", "LOCAL_RANK", "SLURM_LOCALID", "NO_COLOR"} <= found
    assert len(found) >= 20


READS = """\
import importlib, os, sys
import torch.distributed.tensor, spmd_types, networkx

class Watched(type(os.environ)):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame and frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
            frame = frame.f_back
        name = frame.f_globals.get("__name__", "") if frame else ""
        if name.split(".")[0] == "meshplan":
            read.append((name, key))
        return super().__getitem__(key)

read, before = [], dict(os.environ)
os.environ.__class__ = Watched
for name in sys.argv[1:]:
    importlib.import_module(name)
print(read, dict(os.environ) == before)
os.environ.get("HOME")
exec(compile("import os; os.environ.get('X')", "x", "exec"), {"__name__": "meshplan.x"})
print(read)
"""


@pytest.mark.full
def test_imports_read_and_set_nothing() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "meshplan").rglob("*.py"))
        if path.name not in ("__main__.py", "torchft.py", "vllm.py", "_vllm_communicator.py")
    ]
    if find_spec("torchft") is not None:
        modules.append("meshplan.integrations.torchft")
    command = [sys.executable, "-c", READS, *modules]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[] True", "[('meshplan.x', 'X')]"]
