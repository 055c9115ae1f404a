"""Settings of a file, and the framework of the table that reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from meshplan._message_text import shorten
from meshplan.lint._readers._frameworks import FRAMEWORKS
from meshplan.lint._readers._numbers import Edit, Number
from meshplan.lint._readers._tables import Framework, Kind, Mesh

LAUNCH = ("hosts", "ranks per host", "world size")
"""The keys of `Framework.launch` and `Document.launch`, in the order of `Launch`."""


_BASE = re.compile(
    r"(?:defaults|_base_|base_config|base_configs|extends|inherits?_from|toml_files)(?:\.|$)"
)
# A value of an override that may be the name of a configuration.
_WORD = re.compile(r"(?!(?:true|false|null|none)$)[A-Za-z_][\w/-]*", re.I)
_ROOTS = ("", "_global_")


class Unknown(NamedTuple):
    """A value that only the running program has, and why."""

    why: str


class Setting(NamedTuple):
    """A key with its value."""

    path: str  # keys from the root, in lower case, with underscores and dots
    value: object  # a number, a text, a truth value, ``None``, or `Unknown`
    line: int  # of the key or of its command, from 1 on
    key: str = ""  # as written, for messages
    number: Number | None = None  # the value and its place, if another number can be written there

    def __str__(self) -> str:
        return f"{self.path}={self.value}".lower()


@dataclass(frozen=True, eq=False)
class Document:
    """The settings of a file."""

    name: str
    text: str
    kind: Kind
    settings: Sequence[Setting]
    # Returns an edit that adds a key with a number after a setting, or ``None``
    insert: Callable[[Setting, str, int], Edit | None]
    # Of the command that starts the job, by ``LAUNCH``; ``ranks of one host`` if it specifies no
    # hosts
    launch: Mapping[str, int] = field(default_factory=dict)
    # Lines of settings in a command itself, not in a variable that it uses
    commands: Set[int] = frozenset()

    @cached_property
    def texts(self) -> list[str]:
        """Each setting as ``path=value`` in lower case."""
        return [str(one) for one in self.settings]


def find_framework(document: Document) -> Framework | None:
    """The first framework of the table that reads the document."""
    paths = [one.path for one in document.settings]
    for framework in FRAMEWORKS:
        if (
            document.kind in framework.kinds
            and any(match(framework.mark, path) for path in paths)
            and not any(match(framework.without, path) for path in paths)
            and (not framework.word or re.search(framework.word, document.text, re.M))
        ):
            return framework
    return None


class Launch(NamedTuple):
    """Numbers of a launch; ``stated`` has the fields that the document itself specifies."""

    hosts: int | None
    ranks_per_host: int | None
    world_size: int | None
    stated: frozenset[str]


def count_ranks(document: Document, framework: Framework) -> Launch:
    """Hosts, ranks of each host and ranks of the job, by the document or by default."""
    found = dict(framework.defaults) | dict(document.launch)
    stated = {*document.launch}
    given: dict[str, object] = {}
    several = Unknown("several numbers")
    for one in document.settings:
        if one.path in framework.launch and given.setdefault(one.path, one.value) != one.value:
            # Several commands of one script start different numbers.
            given[one.path] = several
    for path, value in given.items():
        key = framework.launch[path]
        if type(value) is int and 1 <= value <= 1 << 24:
            found[key] = value
            stated.add(key)
        elif isinstance(value, Unknown) and key not in document.launch:
            found.pop(key, None)
    if several in given.values():
        stated.clear()
    hosts, per_host, total = map(found.get, LAUNCH)
    if total is None and hosts and per_host:
        total = hosts * per_host
        stated |= {"world size"} if {"hosts", "ranks per host"} <= stated else set()
    if total and hosts and total % hosts == 0:
        per_host = total // hosts
        stated |= {"ranks per host"} if {"hosts", "world size"} <= stated else set()
    # The launchers of torch and DeepSpeed start one host by default.
    total = total or found.get("ranks of one host")
    fields = zip(LAUNCH, Launch._fields, strict=False)
    return Launch(
        hosts,
        per_host,
        total,
        frozenset(name for key, name in fields if key in stated),
    )


class Degrees(NamedTuple):
    """The settings of one mesh."""

    framework: Framework
    mesh: Mesh
    settings: Mapping[str, Setting]
    document: Document


def find_meshes(document: Document, framework: Framework) -> Iterator[Degrees]:
    """The meshes of a framework that a document has keys for."""
    for mesh in framework.meshes:
        if not any(match(mesh.unless, text) for text in document.texts):
            yield from _find_groups(document, framework, mesh)


def _find_groups(document: Document, framework: Framework, mesh: Mesh) -> Iterator[Degrees]:
    groups: dict[str, dict[str, Setting]] = {}
    lines: dict[str, dict[str, set[int]]] = {}
    for part, axis, one in _find_settings(document, mesh):
        group = groups.setdefault(part, {})
        before = group.setdefault(axis, one)
        if axis and document.kind == "command":
            group[axis] = _merge(before, one)
            if one.line in document.commands:
                lines.setdefault(part, {}).setdefault(axis, set()).add(one.line)
    for part, places in lines.items():
        if _are_apart(document, places.values()):
            unknown = Unknown("its commands have different degrees; give the mesh with --mesh")
            for axis, one in groups[part].items():
                groups[part][axis] = one._replace(value=unknown)
    if not groups and not mesh.needs:
        groups[""] = {}
    for group in groups.values():
        if _is_reference(group, document, groups.values()):
            continue
        if not mesh.needs or mesh.needs & set(group):
            yield Degrees(framework, mesh, group, document)


def _merge(before: Setting, one: Setting) -> Setting:
    """A degree that a script has twice."""
    if isinstance(before.value, Unknown) or before.value == one.value:
        return before
    if isinstance(one.value, Unknown):
        return one
    why = (
        f"{one.key} is {shorten(str(one.value))} here and {before.key} was "
        f"{shorten(str(before.value))} before; give the mesh with --mesh"
    )
    return one._replace(value=Unknown(why))


def _find_settings(document: Document, mesh: Mesh) -> Iterator[tuple[str, str, Setting]]:
    """The part, the axis and the setting of each key of a mesh."""
    disabled = [
        one.path.rpartition(".")[0]
        for one in document.settings
        if one.path.endswith(".enabled") and str(one.value).lower() == "false"
    ]
    for one in document.settings:
        prefix, _, key = one.path.rpartition(".")
        section = _compile(mesh.section).fullmatch(prefix)
        if section is not None and key in mesh.keys and prefix not in disabled:
            yield section.groupdict().get("part") or "", mesh.keys[key], one


def _are_apart(document: Document, places: Iterable[Set[int]]) -> bool:
    """Whether axes are in different commands: each command has a mesh of its own."""
    if document.name.endswith((".yaml", ".yml", ".json")):
        # A list of arguments has a line for each.
        return len({len(lines) for lines in places}) > 1
    return len({frozenset(lines) for lines in places}) > 1


def _is_reference(
    group: Mapping[str, Setting],
    document: Document,
    groups: Iterable[Mapping[str, Setting]],
) -> bool:
    """Whether all sizes are ``${...}`` that name those of another mesh: the same mesh again."""
    if document.kind != "document" or not group or any(one.number for one in group.values()):
        return False
    return any(
        any(one.number for one in other.values())
        and all(axis in other and other[axis].value == one.value for axis, one in group.items())
        for other in groups
    )


def find_replaced(found: Degrees) -> Setting | None:
    """The first setting that names another configuration, which may replace the mesh's defaults.

    Hydra's ``defaults``, its overrides of groups (``actor=other``, ``group@package=other``) and
    ``--config-name``; the base files of other programs. Names among ``Framework.bases`` have the
    defaults of the table.
    """
    section = _compile(found.mesh.section)
    for one in found.document.settings if found.document.kind != "python" else ():
        group, at, package = one.path.partition("@")
        if found.document.kind == "document":
            is_base = bool(_BASE.match(one.path)) and one.value is not None
        elif one.key.startswith("-"):
            is_base = group in ("config_name", "config_path", "config_dir")
        else:
            is_word = isinstance(one.value, Unknown) or bool(_WORD.fullmatch(str(one.value)))
            is_base = bool(at) or "/" in group or ("." not in group and is_word)
        is_elsewhere = at and package not in _ROOTS and not section.fullmatch(package)
        name = str(one.value).removesuffix(".yaml")
        if is_base and not is_elsewhere and name not in ("_self_", *found.framework.bases):
            return one
    return None


def find_line(found: Degrees) -> int:
    """The line of the table, of the first key, or of the mark of a mesh without keys."""
    settings = found.document.settings
    if not found.settings:
        mark = _compile(found.framework.mark)
        return next(one.line for one in settings if mark.fullmatch(one.path))
    first = min(found.settings.values(), key=lambda one: one.line)
    table = first.path.rpartition(".")[0]
    lines = [one.line for one in settings if one.path == table and one.value is None]
    return min([first.line, *lines])


def match(pattern: str, text: str) -> bool:
    return bool(pattern and _compile(pattern).fullmatch(text))


@lru_cache(maxsize=256)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.S)
