"""Which private names of torch a module of meshplan reads, from its text alone.

A name is private if it begins with one underscore. A module may read the private names that meshplan
defines anywhere, methods of named tuples, and private names of modules that are not torch's. All else
is taken for torch's: attributes, imports from torch, dotted names in strings, and strings that name
what is known of torch.
"""

from __future__ import annotations

import ast
import re
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

_TUPLE = {name for name in dir(namedtuple("_Any", "a")) if re.match(r"_[a-z]", name)}
_OF_OBJECT = ("getattr", "hasattr", "setattr", "delattr", "__setattr__", "__getattribute__")
_DOTTED = re.compile(r"(?:[A-Za-z]\w*)?(?:\.\w+)+(?:\(.*)?")


def is_private(name: str) -> bool:
    """Whether a name or one part of a dotted name begins with one underscore."""
    return any(re.match(r"_(?!_)\w", part) is not None for part in name.split("."))


def imports_of(tree: ast.AST) -> dict[str, str]:
    """What the names that a module imports stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            for one in node.names:
                root = one.name.split(".")[0]
                found[one.asname or root] = one.name if one.asname else root
    return found


def defined_in(tree: ast.AST) -> set[str]:
    """The private names that a module defines: functions, classes, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            # What is set on other objects may be theirs.
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return {name for name in found if is_private(name)}


def find_reads(
    tree: ast.AST, own: set[str], theirs: set[str], libraries: tuple[str, ...] = ()
) -> list[str]:
    """What a module reads of torch's private names, each with its line.

    Args:
        tree: of the module.
        own: private names that are meshplan's.
        theirs: those of torch that are known.
        libraries: other libraries of which it may write names.
    """
    found: list[tuple[int, str]] = []
    origins = imports_of(tree)
    left_out, mine = set(_texts_without_names(tree)), defined_in(tree)

    def is_theirs(owner: ast.AST, name: str) -> bool:
        if not is_private(name) or name in _TUPLE or name.startswith("_meshplan_"):
            return False
        base = ast.unparse(owner)
        if name in own and (name not in theirs or base in ("self", "cls")):
            return False
        origin = origins.get(base.split(".")[0], "")
        return not origin or origin.startswith(("torch", "meshplan"))

    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [module + one.name for one in node.names]
            names = [name for name in names if name.startswith("torch.") and is_private(name)]
        elif isinstance(node, ast.ClassDef) and node.bases:
            # It may replace what a base class of torch has.
            body = [one for one in node.body if isinstance(one, ast.Assign | ast.FunctionDef)]
            named = [getattr(one, "name", None) or ast.unparse(one.targets[0]) for one in body]  # type: ignore[union-attr]
            names = [name for name in named if name in theirs]
        elif isinstance(node, ast.Attribute):
            names = [node.attr] if is_theirs(node.value, node.attr) else []
        elif isinstance(node, ast.Call):
            owner, name = _attribute_of_call(node)
            left_out.add(id(name))
            names = [name.value] if name is not None and is_theirs(owner, name.value) else []
        elif isinstance(node, ast.Constant) and id(node) not in left_out:
            names = [str(node.value)]
            names = [name for name in names if _names_theirs(name, theirs - mine, libraries)]
        found += [(node.lineno, name) for name in names]  # type: ignore[attr-defined]
    return [f"{line}: {name}" for line, name in sorted(set(found))]


def _attribute_of_call(node: ast.Call) -> tuple[Any, Any]:
    """Object and name, a constant, of ``getattr`` and its like; ``None`` of other calls."""
    if _called(node) in _OF_OBJECT and len(node.args) > 1:
        owner, name = node.args[:2]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return owner, name
    return None, None


def _called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _names_theirs(text: str, theirs: set[str], libraries: tuple[str, ...]) -> bool:
    """Whether a string is a known name, or has a private one in a dotted name."""
    if re.search(r"\btorch(\.\w+)*\._(?!_)\w", text):
        return True
    if _DOTTED.fullmatch(text) and is_private(text.split("(")[0]):
        return text.split(".")[0] not in ("meshplan", *libraries)
    return text in theirs


def _texts_without_names(tree: ast.AST) -> Iterator[int]:
    """Docstrings, and ends and beginnings that a string is compared with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            yield id(node.value)
        elif isinstance(node, ast.Call) and _called(node) in ("endswith", "startswith"):
            yield from (id(inner) for one in node.args for inner in ast.walk(one))
