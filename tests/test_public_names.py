"""The public names are the rows of docs/api, documented, and the only ones that pages import."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

import meshplan
from meshplan.lint._rules._rule import ERRORS
from tests.pages import ROOT, blocks

# Modules that have an `__all__`: their public names.
_WHOLE = (
    "meshplan",
    "meshplan.collectives.functional",
    "meshplan.elastic",
    "meshplan.integrations.ddp",
    "meshplan.integrations.fsdp",
    "meshplan.testing.tp",
)


@cache
def listed() -> dict[str, list[str]]:
    """The names of docs/api by module."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "docs" / "api").glob("*.md")):
        for module, name in re.findall(r"(?m)`([\w.]+)\.(\w+)`(?=.*\|$)", path.read_text("utf-8")):
            found.setdefault(module, []).append(name)
    return found


def public() -> Iterator[tuple[str, Any]]:
    for module, names in listed().items():
        for name in names:
            yield f"{module}.{name}", getattr(importlib.import_module(module), name)
    for cls in ERRORS.values():
        yield f"meshplan.errors.{cls.__name__}", cls


def functions() -> Iterator[tuple[str, Any, str]]:
    """Public functions and public methods with their docstrings.

    A dataclass documents its parameters as attributes.
    """
    for name, found in public():
        if inspect.isfunction(found):
            yield name, found, inspect.getdoc(found) or ""
        elif inspect.isclass(found):
            for own, member in vars(found).items():
                method = member.__func__ if isinstance(member, classmethod) else member
                if inspect.isfunction(method) and not own.startswith("_"):
                    yield f"{name}.{own}", method, inspect.getdoc(method) or ""


@pytest.mark.parametrize("module", _WHOLE)
def test_the_pages_list_the_names_of_a_module(module: str) -> None:
    assert sorted(listed()[module]) == sorted(importlib.import_module(module).__all__)


def test_every_name_has_a_docstring() -> None:
    # A constant has no docstring of its own.
    bare = [name for name, found in public() if callable(found) and not inspect.getdoc(found)]
    bare += [name for name, _, doc in functions() if not doc]
    assert bare == []


def test_every_parameter_is_documented() -> None:
    missing = []
    for name, function, doc in functions():
        for parameter in set(inspect.signature(function).parameters) - {"self", "cls"}:
            if not re.search(rf"(?<!\w){parameter}(?!\w)", doc):
                missing.append(f"{name}: {parameter}")
    assert missing == []


def test_every_documented_argument_is_a_parameter() -> None:
    wrong = []
    for name, function, doc in functions():
        section = re.search(r"^Args:\n((?: +[^\n]*\n|\n)*)", doc + "\n", re.M)
        told = re.findall(r"^    (?! )([*\w, ]+):", section[1], re.M) if section else []
        names = {one.strip(" *") for found in told for one in found.split(",")}
        wrong += [f"{name}: {one}" for one in names - set(inspect.signature(function).parameters)]
    assert wrong == []


def test_every_error_raised_is_documented() -> None:
    missing = []
    for name, function, doc in functions():
        tree = ast.parse(dedent(inspect.getsource(inspect.unwrap(function))))
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                made = ast.unparse(node.exc.func)
                # A function that makes an error is lower case.
                if made[0].isupper() and made not in doc:
                    missing.append(f"{name}: {made}")
    assert missing == []


def imported(code: str) -> Iterator[tuple[str, str]]:
    """The modules of meshplan that a program imports from, and the names."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshplan"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_pages_import_public_names_only() -> None:
    programs = {str(path): path.read_text("utf-8") for path in ROOT.glob("examples/*.py")}
    for pattern in (
        "README.md",
        "docs/*.md",
        "docs/api/*.md",
        "docs/howto/*.md",
        "docs/explanation/*.md",
    ):
        for path in ROOT.glob(pattern):
            for number, block in enumerate(blocks(path.read_text("utf-8"), "python")):
                programs[f"{path} {number}"] = block.text
    names = {**listed(), "meshplan.errors": [cls.__name__ for cls in ERRORS.values()]}
    wrong = []
    for place, code in programs.items():
        for module, name in imported(code):
            known = names.get(module, [])
            is_module = isinstance(getattr(importlib.import_module(module), name), ModuleType)
            if name not in known and not is_module:
                wrong.append(f"{place}: {module}.{name}")
    assert wrong == []


def test_public_modules_are_found_without_an_import() -> None:
    for module in listed():
        found: Any = meshplan
        for part in module.split(".")[1:]:
            found = getattr(found, part)
        assert found.__name__ == module
