"""Degree keys of Python: arguments of ``ParallelismConfig``, and attributes that are set later.

``config.parallelism.tensor_parallel_degree = 4`` of torchtitan's registries,
``cfg.model.tensor_model_parallel_size = 4`` of the recipes of Megatron Bridge, and
``dataclasses.replace(parallelism, ...)``.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from meshplan.lint._finding import Source
from meshplan.lint._job import Job
from meshplan.lint._readers._constants import Reader
from meshplan.lint._readers._degrees import make_document_jobs
from meshplan.lint._readers._documents import Document, Setting, Unknown, match
from meshplan.lint._readers._frameworks import FRAMEWORKS
from meshplan.lint._readers._numbers import RUN, Edit, Number, UnknownMesh
from meshplan.lint._readers._values import (
    Arguments,
    Either,
    Record,
    Value,
    Whole,
    is_constant,
)

CLASSES = frozenset[str]().union(*(one.classes for one in FRAMEWORKS))
"""Names of the classes and functions that take degrees."""
_DERIVING = [one for one in FRAMEWORKS if "python" in one.kinds and one.classes]
ATTRIBUTES = frozenset(
    key for one in _DERIVING for mesh in one.meshes for key in mesh.keys if "parallel" in key
)
"""Degrees that files set as attributes; short names such as tp are attributes of anything."""
WRAPPERS = frozenset({"Config", "Partial"})
"""Names of the classes whose first argument is such a class."""
TRAINERS = frozenset({"Trainer", "Fabric"})
"""Names of the classes whose arguments complete those of such a class."""
DERIVED = (
    r"\.(?:(?:tensor|pipeline|expert)_model_parallel_size|(?:tensor|pipeline|context|expert"
    r"|data)_parallel(?:_shard|_replicate)?_degree)[ \t]*=[^=]|\breplace\([^)]*_parallel_"
)
"""Regular expression of what makes a derived configuration."""
# All of their arguments that end so are degrees.
_STRICT = frozenset({"ParallelismConfig", "ParallelDims"})


def read_degrees(
    source: Reader,
    calls: Sequence[tuple[ast.Call, Arguments]],
    call: ast.Call,
    given: Arguments,
    where: Source,
    world_size: int | None,
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
            raise UnknownMesh(f"{option}{source.shorten(one.value)} in {called} is not read; {RUN}")
    if called in _STRICT and call.args:
        raise UnknownMesh(f"{source.shorten(call.args[0])} in {called} is not read; {RUN}")
    if framework is None:
        return ()
    settings = _read_arguments(source, call, given)
    end = max(source.find_span(one.value)[1] for one in call.keywords)

    def insert(after: Setting, key: str, size: int) -> Edit:
        return Edit(end, end, f", {key}={size}")

    for other, values in calls:
        if _find_class(source, other) in TRAINERS:
            settings += _read_arguments(source, other, values)
    document = Document(where.file, source.text, "python", settings, insert)
    return make_document_jobs(document, framework, where, world_size)


def _find_class(source: Reader, call: ast.Call) -> str:
    called = source.resolve_callee(call.func)
    if called in WRAPPERS and call.args and isinstance(call.args[0], ast.Name | ast.Attribute):
        return source.resolve_callee(call.args[0])
    return called


def _read_arguments(source: Reader, call: ast.Call, given: Arguments) -> list[Setting]:
    settings = []
    for one in call.keywords:
        if one.arg is None:
            continue
        why = f"{one.arg}={source.shorten(one.value)} is not a constant; {RUN}"
        value = given.named.get(one.arg, why)
        settings.append(_make_setting(one.arg, value, one.value.lineno, Unknown(why)))
    return settings


def _make_setting(key: str, value: Value, line: int, unknown: object) -> Setting:
    number = Number(int(value), *value.span) if isinstance(value, Whole) else None
    if not is_constant(value):
        value = unknown
    plain = int(value) if number is not None else str(value) if isinstance(value, str) else value
    return Setting(key, plain, line, key, number)


def read_changed(
    source: Reader,
    record: Record,
    lines: Mapping[str, int],
    name: str,
    world_size: int | None,
) -> tuple[Job, ...]:
    """The jobs of a configuration whose attributes the file sets; ``lines`` has those of each.

    Raises:
        UnknownMesh: it is made elsewhere, or has further attributes.
        LayoutError: degrees that the framework would refuse.
    """
    framework = next(
        (one for one in _DERIVING if any(match(one.mark, key) for key in lines)),
        None,
    )
    if framework is None:
        return ()
    # A recipe of Megatron Bridge sets all sizes that are not 1.
    is_whole = {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
    } <= lines.keys()
    if record.path.rpartition(".")[2] not in framework.classes and not is_whole:
        raise UnknownMesh(f"the configuration that is changed is made in another file; {RUN}")
    if record.fields is None:
        raise UnknownMesh(f"the configuration may have further degrees; {RUN}")
    settings = []
    keys = {key for one in framework.meshes for key in one.keys}
    first = min(lines.values())
    for key, value in record.fields.items():
        why = "depends on a condition" if isinstance(value, Either) else "is not a constant"
        shown: object = Unknown(f"{key} {why}; {RUN}") if key in keys else ""
        settings.append(_make_setting(key, value, lines.get(key, first), shown))

    def insert(after: Setting, key: str, size: int) -> None:
        return None

    document = Document(name, source.text, "python", settings, insert)
    return make_document_jobs(document, framework, Source(name, first), world_size)
