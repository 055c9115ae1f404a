"""No module of meshplan but its one room knows a private name of torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import TestCase
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard

import meshplan._torch as room
from meshplan._torch import (
    NAMES,
    TESTING_NAMES,
    find_moved,
)
from meshplan._torch._entry import Entry
from meshplan.dtensor._install import check_seam
from meshplan.errors import UnsupportedTorchError
from tests.refusals import refusal

assert fully_shard, "FSDP2 is imported, so that what watches it is checked as well"

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "meshplan" / "_torch"
ALL = NAMES | TESTING_NAMES


OF_GROUPS = {"_set_group_desc", "_set_group_name"}
"""Of torch's process groups, which those of the backend have as well."""


def is_private(name: str) -> bool:
    """Whether a name or one part of a dotted name begins with one underscore."""
    return any(re.match(r"_(?!_)\w", part) is not None for part in name.split("."))


def private_names_of(kind: Any) -> set[str]:
    """What a class or a module of torch has, and what its methods set on ``self``."""
    file = sys.modules[getattr(kind, "__module__", kind.__name__)].__file__
    on_self = re.findall(r"self\.(_\w+)", Path(str(file)).read_text(encoding="utf-8"))
    return {name for name in (*dir(kind), *on_self) if is_private(name)}


THEIRS = {
    part
    for entry in ALL.values()
    for text in (entry.module, entry.path, *entry.parts, *entry.stores)
    for part in text.split(".")
    if is_private(part)
}.union(*map(private_names_of, (DeviceMesh, DTensor, Shard, FSDPParamGroup, c10d)))


def defined_in(tree: ast.AST) -> set[str]:
    """The private names that a module defines: functions, classes, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            # What is set on other objects may be theirs.
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return {name for name in found if is_private(name)}


def find_reads(tree: ast.AST, own: set[str], mine: set[str]) -> Iterator[str]:
    """Private names of torch that a module imports, reads of an object or has in a string."""
    others, theirs = set[str](), THEIRS - mine
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [module + one.name for one in node.names]
            for one, name in zip(node.names, names, strict=True):
                if not name.startswith(("torch", "meshplan")):
                    others.add(one.asname or one.name.split(".")[0])
            names = [name for name in names if name.startswith("torch.") and is_private(name)]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            base = ast.unparse(node.value)
            known = node.attr in own and (node.attr not in THEIRS or base in ("self", "cls"))
            names = [] if known or base.split(".")[0] in others else [node.attr]
        elif isinstance(node, ast.Constant) and node.value in theirs:
            names = [str(node.value)]
        yield from (f"{node.lineno}: {name}" for name in names)  # type: ignore[attr-defined]


def test_no_other_module_reads_a_private_name() -> None:
    paths = (ROOT / "meshplan").rglob("*.py")
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    tuple_methods = {name for name in dir(namedtuple("_Any", "a")) if is_private(name)}
    # The actions of a parser are argparse's.
    defined = {path: defined_in(tree) for path, tree in trees.items()}
    own = {"_actions", *OF_GROUPS, *tuple_methods}.union(*defined.values())
    line = "x._spec, mesh._layout, '_reduce_scatter_comm'"
    assert len([*find_reads(ast.parse(f"import torch._dynamo\n{line}"), own, set())]) == 4
    # The linter has no objects of torch, and names of files that it reads.
    outside = {path for path in trees if ROOM not in path.parents and "lint" not in path.parts}
    assert len(outside) > 150
    found = [
        f"{path}:{read}" for path in outside for read in find_reads(trees[path], own, defined[path])
    ]
    assert found == []


def test_nothing_has_moved_in_this_torch() -> None:
    assert list(find_moved(ALL)) == []
    check_seam()


def break_entry(entry: Entry) -> Entry:
    if entry.source:
        return replace(entry, source=r"^this is in no file of torch's$")
    if not entry.path:
        return replace(entry, module=f"{entry.module}_gone")
    return replace(entry, path=f"{entry.path}_gone")


@pytest.mark.parametrize("name", ALL)
def test_missing_name_is_reported(name: str) -> None:
    entry = break_entry(ALL[name])
    found = list(find_moved({name: entry}))
    if entry.optional:
        assert found == []
    else:
        assert found
        assert all(one.startswith(f"{entry}") and one.endswith(": not found") for one in found)


@pytest.mark.parametrize(
    "part", sorted(f"{n} {p}" for n, e in ALL.items() for p in e.parts + e.stores)
)
def test_missing_part_is_reported(part: str) -> None:
    name, part = part.split()
    entry = ALL[name]
    parts = tuple(f"{one}_gone" if one == part else one for one in entry.parts)
    stored = tuple(f"{one}_gone" if one == part else one for one in entry.stores)
    changed = replace(entry, parts=parts, stores=stored)
    assert list(find_moved({name: changed})) == [f"{entry}.{part}_gone ({entry.use}): not found"]


@pytest.mark.parametrize("name", [name for name, entry in ALL.items() if entry.parameters])
def test_changed_signature_is_reported(name: str) -> None:
    entry = ALL[name]
    changed = replace(entry, parameters=("another", *entry.parameters[1:]))
    (found,) = find_moved({name: changed})
    assert f"instead of another, {', '.join(entry.parameters[1:])}" in found


def test_install_checks_the_table() -> None:
    name = next(reversed(NAMES))
    with (
        mock.patch.dict(NAMES, {name: break_entry(NAMES[name])}),
        pytest.raises(UnsupportedTorchError, match="not found"),
    ):
        check_seam()


def test_torch_is_imported_with_the_first_name() -> None:
    line = "import sys, meshplan._torch as room; print('torch' in sys.modules);"
    line += "print(room.SEAM, 'torch' in sys.modules);"
    line += "from meshplan._torch import Store; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", NAMES["SEAM"].name, "False", "False"]


def test_a_name_is_looked_up_once() -> None:
    found = room.AsyncCollectiveTensor
    with mock.patch.object(Entry, "given", side_effect=AssertionError):
        assert room.AsyncCollectiveTensor is found
    assert not is_private("__version__")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        room.nothing  # noqa: B018


class TestMessages(TestCase):
    maxDiff = None

    def test_use_of_a_missing_name_is_an_error(self) -> None:
        absent = break_entry(NAMES["LocalTensor"]).given()
        uses = absent, lambda: absent.attribute, lambda: isinstance(1, absent)
        (text,) = {refusal(UnsupportedTorchError, use) for use in uses}
        # Of a function it is as of a class.
        store = break_entry(NAMES["default_store"])
        name = "distributed_c10d._get_default_store_gone"
        assert refusal(UnsupportedTorchError, store.given()) == text.replace(
            "_local_tensor.LocalTensor_gone", name
        )
        self.assertExpectedInline(
            text.replace(torch.__version__, "VERSION"),
            """MP602: torch VERSION does not have torch.distributed._local_tensor.LocalTensor_gone; install torch 2.11 to 2.15, which meshplan is tested with""",
        )
