"""Degree keys as arguments of Python's classes and functions, such as ``ParallelismConfig``."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from meshplan.lint._finding import Source
from meshplan.lint._job import Job
from meshplan.lint._readers._degrees import make_document_jobs
from meshplan.lint._readers._documents import Document, Setting, Unknown
from meshplan.lint._readers._frameworks import FRAMEWORKS
from meshplan.lint._readers._numbers import INSTEAD, Edit, UnknownMesh

if TYPE_CHECKING:
    from meshplan.lint._readers._scopes import Scope
    from meshplan.lint._readers._source import PythonSource

CLASSES = frozenset[str]().union(*(one.classes for one in FRAMEWORKS))
"""Names of the classes and functions that take degrees."""
WRAPPERS = frozenset({"Config", "Partial"})
"""Names of the classes whose first argument is such a class."""
_TRAINERS = frozenset({"Trainer", "Fabric"})
# All of their arguments that end so are degrees.
_STRICT = frozenset({"ParallelismConfig", "ParallelDims"})


def read_degrees(
    source: PythonSource, call: ast.Call, scope: Scope, where: Source, world_size: int | None
) -> tuple[Job, ...]:
    """The jobs of a call with degrees; empty for any other call.

    Raises:
        UnknownMesh: a degree is not a constant, or the arguments may have further degrees.
        LayoutError: degrees that the framework would refuse.
    """
    called = _find_class(source, call)
    names = {one.arg for one in call.keywords if one.arg}
    framework = next(
        (
            one
            for one in FRAMEWORKS
            if called in one.classes and any(names & set(mesh.keys) for mesh in one.meshes)
        ),
        None,
    )
    if framework is None and called not in _STRICT:
        return ()
    keys = set() if framework is None else {key for mesh in framework.meshes for key in mesh.keys}
    for one in call.keywords:
        hidden = one.arg is None or (
            called in _STRICT
            and one.arg not in {*keys, "world_size"}
            and one.arg.endswith(("_size", "_degree"))
        )
        if hidden:
            option = f"{one.arg}=" if one.arg else "**"
            raise UnknownMesh(
                f"{option}{source.shorten(one.value)} in {called} is not read; {INSTEAD}"
            )
    if called in _STRICT and call.args:
        raise UnknownMesh(f"{source.shorten(call.args[0])} in {called} is not read; {INSTEAD}")
    if framework is None:
        return ()
    settings = _read_arguments(source, call, scope)
    end = max(source.find_span(one.value)[1] for one in call.keywords)

    def insert(after: Setting, key: str, size: int) -> Edit:
        return Edit(end, end, f", {key}={size}")

    for other, inner in source.calls:
        if _find_class(source, other) in _TRAINERS:
            settings += _read_arguments(source, other, inner)
    document = Document(where.file, source.text, "python", settings, insert)
    return make_document_jobs(document, framework, where, world_size)


def _find_class(source: PythonSource, call: ast.Call) -> str:
    called = source.resolve_callee(call.func)
    if called in WRAPPERS and call.args and isinstance(call.args[0], ast.Name | ast.Attribute):
        return source.resolve_callee(call.args[0])
    return called


def _read_arguments(source: PythonSource, call: ast.Call, scope: Scope) -> list[Setting]:
    settings = []
    for one in call.keywords:
        if one.arg is None:
            continue
        number = source.read_number(one.value, scope)
        value: object = None if number is None else number.value
        if number is None:
            resolved = scope.resolve(one.value)
            if resolved is not None and isinstance(resolved[0], ast.Constant):
                value = resolved[0].value
            else:
                shown = source.shorten(one.value)
                value = Unknown(f"{one.arg}={shown} is not a constant; give it with --mesh")
        settings.append(Setting(one.arg, value, one.value.lineno, one.arg, number))
    return settings
