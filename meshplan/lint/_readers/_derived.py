"""Configurations that functions of a file derive: attributes that they set on another one.

``config.parallelism.tensor_parallel_degree = 4`` of torchtitan's registries,
``cfg.model.tensor_model_parallel_size = 4`` of the recipes of Megatron Bridge, and
``dataclasses.replace(parallelism, ...)``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshplan.errors import LayoutError
from meshplan.lint._finding import Source
from meshplan.lint._job import Job, Skipped
from meshplan.lint._readers._degrees import make_document_jobs
from meshplan.lint._readers._documents import Document, Setting, Unknown, match
from meshplan.lint._readers._frameworks import FRAMEWORKS
from meshplan.lint._readers._numbers import INSTEAD, Edit, Number, UnknownMesh
from meshplan.lint._readers._tree import format_dotted

if TYPE_CHECKING:
    from meshplan.lint._readers._source import PythonSource
    from meshplan.lint._readers._tables import Framework

DERIVED = (
    r"\.(?:(?:tensor|pipeline|expert)_model_parallel_size|(?:tensor|pipeline|context|expert"
    r"|data)_parallel(?:_shard|_replicate)?_degree)[ \t]*=[^=]|\breplace\([^)]*_parallel_"
)
"""Regular expression of what makes a derived configuration."""
_MAX_DEPTH = 20
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_derived(
    source: PythonSource, name: str, world_size: int | None
) -> tuple[list[Job], list[Skipped]]:
    """The jobs of functions that set degrees on a configuration, and those that are unknown."""
    jobs: list[Job] = []
    skipped: list[Skipped] = []
    if not re.search(DERIVED, source.text):
        return jobs, skipped
    tree = ast.parse(source.text.removeprefix("\ufeff"))
    functions = {one.name: one for one in ast.walk(tree) if isinstance(one, _Function)}
    every = [
        _Configurations(source, functions, one)
        for one in FRAMEWORKS
        if "python" in one.kinds and one.classes
    ]
    for function in functions.values():
        found = next((one for one in every if one.is_marked(one.find_own(function))), None)
        if found is None:
            continue
        where = Source(name, min(one.line for one in found.find_own(function)))
        try:
            settings = found.find_all(function)
            document = Document(name, source.text, "python", settings, _refuse_insertion)
            jobs += make_document_jobs(document, found.framework, where, world_size)
        except (UnknownMesh, LayoutError) as error:
            # Configurations of one file are for jobs of different numbers of ranks.
            why = error.args[0]
            skipped.append(Skipped(where, str(why)))
    return jobs, skipped


def _refuse_insertion(after: Setting, key: str, size: int) -> Edit | None:
    return None


class _Configurations:
    """The degrees of a framework that the functions of a file set."""

    def __init__(
        self, source: PythonSource, functions: dict[str, _Function], framework: Framework
    ) -> None:
        self._source = source
        self._functions = functions
        self.framework = framework
        # Short names such as tp are attributes of anything.
        self._keys = {key for one in framework.meshes for key in one.keys if "parallel" in key}

    def is_marked(self, settings: list[Setting]) -> bool:
        """Whether a key is one of the framework's own."""
        return any(match(self.framework.mark, one.path) for one in settings)

    def find_own(self, function: _Function) -> list[Setting]:
        """The degrees that a function sets on a configuration."""
        own: dict[str, Setting] = {}
        targets: dict[str, str] = {}
        for statement, conditional in _walk(function.body):
            for key, value, target in self._find_changes(statement):
                setting = self._read(key, value)
                if conditional:
                    setting = setting._replace(
                        value=Unknown(f"{key} depends on a condition; {INSTEAD}"), number=None
                    )
                # Two targets are two configurations, such as a trainer's and a generator's.
                if targets.setdefault(key, target) != target:
                    setting = setting._replace(
                        value=Unknown(f"{key} is set on two configurations; {INSTEAD}"), number=None
                    )
                own[key] = setting
        return list(own.values())

    def find_all(self, function: _Function, depth: int = 0) -> list[Setting]:
        """The degrees of the configuration that a function makes or changes.

        Raises:
            UnknownMesh: it is made elsewhere, or the function makes several.
        """
        made = [
            call
            for call in ast.walk(function)
            if isinstance(call, ast.Call)
            and self._source.resolve_callee(call.func) in self.framework.classes
        ]
        bases = [
            self._functions[call.func.id]
            for call in ast.walk(function)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id in self._functions
        ]
        found: dict[str, Setting] = {}
        bases = [one for one in bases if depth < _MAX_DEPTH and self._has_degrees(one, depth + 1)]
        if len(made) + len(bases) > 1:
            raise UnknownMesh(f"{function.name} makes several configurations; {INSTEAD}")
        own = {one.path: one for one in self.find_own(function)}
        if made:
            for one in made[0].keywords:
                if one.arg is None:
                    raise UnknownMesh(f"** in {function.name} may set degrees; {INSTEAD}")
                found[one.arg] = self._read(one.arg, one.value)
        elif bases:
            found = {one.path: one for one in self.find_all(bases[0], depth + 1)}
        elif not {"tensor_model_parallel_size", "pipeline_model_parallel_size"} <= set(own):
            # A recipe of Megatron Bridge sets all sizes that are not 1.
            raise UnknownMesh(
                f"the configuration that {function.name} changes is made in another file; {INSTEAD}"
            )
        return list((found | own).values())

    def _has_degrees(self, function: _Function, depth: int) -> bool:
        if self.find_own(function):
            return True
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            if self._source.resolve_callee(call.func) in self.framework.classes:
                return True
            base = call.func.id if isinstance(call.func, ast.Name) else ""
            known = depth < _MAX_DEPTH and base in self._functions and base != function.name
            if known and self._has_degrees(self._functions[base], depth + 1):
                return True
        return False

    def _find_changes(self, statement: ast.stmt) -> Iterator[tuple[str, ast.expr, str]]:
        """Each key that a statement sets, its value, and the configuration."""
        match statement:
            case ast.Assign(targets=[ast.Attribute(value=target, attr=key)], value=value):
                if key in self._keys:
                    yield key, value, format_dotted(target)
        for call in ast.walk(statement):
            if isinstance(call, ast.Call) and (
                self._source.resolve_callee(call.func) == "replace" and call.args
            ):
                for one in call.keywords:
                    if one.arg in self._keys:
                        yield str(one.arg), one.value, ast.unparse(call.args[0])

    def _read(self, key: str, value: ast.expr) -> Setting:
        if isinstance(value, ast.Constant) and type(value.value) in (int, type(None), bool):
            number = None
            if type(value.value) is int:
                number = Number(value.value, *self._source.find_span(value))
            return Setting(key, value.value, value.lineno, key, number)
        why = f"{key} = {self._source.shorten(value)} is not a constant; give it with --mesh"
        unknown: object = Unknown(why) if key in self._keys else str(ast.unparse(value))
        return Setting(key, unknown, value.lineno, key)


def _walk(body: list[ast.stmt], conditional: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """The simple statements of a function, each with whether it may not run."""
    for one in body:
        inner = [
            part
            for name in ("body", "orelse", "finalbody")
            if (part := getattr(one, name, None)) and isinstance(part, list)
        ]
        if isinstance(one, _Function | ast.ClassDef):
            continue
        if not inner:
            yield one, conditional
        for part in inner:
            yield from _walk(part, conditional or not isinstance(one, ast.With))
