"""docs/reference is what the docstrings say, and the docstrings say all of it."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshplan.lint._rules import ERRORS, RULES, rule_page

ROOT = Path(__file__).parents[1]


def _tool() -> ModuleType:
    """The script, which is in no package."""
    spec = importlib.util.spec_from_file_location(
        "make_reference", ROOT / "tools" / "make_reference.py"
    )
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    # Dataclasses look themselves up there.
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


reference = _tool()


def test_pages_are_those_that_are_made_now() -> None:
    there = {path.name: path.read_text("utf-8") for path in reference.OUTPUT.glob("*.md")}
    made = reference.pages()
    wrong = sorted(name for name in {*made, *there} if made.get(name) != there.get(name))
    assert not wrong, "run make reference"


def public() -> Iterator[tuple[str, Any]]:
    """Every definition once, under the name that documents it."""
    modules = reference.public_modules()
    for module in modules:
        for name in module.public:
            found = reference.find(module.name, name)
            if reference.homes()[found.module.name, found.name] != module.name:
                continue
            yield f"{module.name}.{name}", found
            if found.node is None and found.module not in modules:
                # A private module under a public name.
                for inner in found.module.public:
                    yield f"{module.name}.{name}.{inner}", reference.find(found.module.name, inner)


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Public functions, and public methods of public classes.

    What a class of torch's kind takes over is documented there.
    """
    for name, found in public():
        node = found.node
        if isinstance(node, ast.FunctionDef):
            yield name, node
        elif isinstance(node, ast.ClassDef) and not name.endswith((".Work", "ProcessGroup")):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    yield f"{name}.{member.name}", member


def test_every_name_has_a_docstring() -> None:
    bare = [name for name, found in public() if not found.doc]
    bare += [name for name, node in functions() if not ast.get_docstring(node)]
    assert not bare


def test_every_name_is_on_its_page() -> None:
    for name, found in public():
        if found.node is None:
            continue
        module, _, own = name.rpartition(".")
        pages = [
            reference.pages().get(reference.page_of(one), "")
            for one in (module, module.rpartition(".")[0])
        ]
        shown = rf"^##+ (?:{module.rpartition('.')[2]}\.)?{own}$"
        assert any(re.search(shown, page, re.M) for page in pages), name


def parameters(node: ast.FunctionDef) -> set[str]:
    given = node.args
    names = {arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    names |= {arg.arg for arg in (given.vararg, given.kwarg) if arg}
    return names - {"self", "cls"}


def test_every_parameter_is_told_of() -> None:
    untold = []
    for name, node in functions():
        told = ast.get_docstring(node) or ""
        untold += [
            f"{name}: {one}"
            for one in parameters(node)
            if not re.search(rf"(?<!\w){one}(?!\w)", told)
        ]
    assert not untold


def test_what_is_told_of_is_a_parameter() -> None:
    wrong = []
    for name, node in functions():
        for section, lines in reference._sections(ast.get_docstring(node) or ""):
            if section == "Args":
                told = re.findall(r"^    (?! )([*\w, ]+):", "\n".join(lines), re.M)
                names = {one.strip(" *") for found in told for one in found.split(",")}
                wrong += [f"{name}: {one}" for one in names - parameters(node)]
    assert not wrong


def test_every_error_raised_is_told_of() -> None:
    untold = []
    for name, node in functions():
        told = ast.get_docstring(node) or ""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call):
                made = ast.unparse(inner.exc.func)
                # Functions that make an error are lower case; what they make is told of as well.
                if made[0].isupper() and made not in told:
                    untold.append(f"{name}: {made}")
    assert not untold


def test_a_thing_has_one_public_name() -> None:
    names = defaultdict(set)
    for module in reference.public_modules():
        if module.name != "meshplan":
            for name in module.public:
                found = reference.find(module.name, name)
                names[found.module.name, found.name].add(f"{module.name}.{name}")
    assert not [sorted(found) for found in names.values() if len(found) > 1]


@pytest.mark.parametrize("code", [*RULES, *ERRORS])
def test_every_code_is_explained_as_the_command_does(code: str) -> None:
    title, _, rest = rule_page(code).partition("\n\n")
    page = reference.pages()["errors-and-rules.md"]
    assert f"\n#{title}\n\n{rest.partition(chr(10))[0]}" in page


def test_links_of_the_pages_lead_somewhere() -> None:
    anchors = {
        file: {
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", page, re.M)
        }
        for file, page in reference.pages().items()
    }
    for name, text in reference.pages().items():
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            file, _, anchor = target.partition("#")
            if file.startswith(".."):
                assert (reference.OUTPUT / file).exists(), (name, target)
            else:
                assert not anchor or anchor in anchors[file or name], (name, target)
