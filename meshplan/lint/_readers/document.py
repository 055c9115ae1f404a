"""Documents: TOML, YAML and JSON with degrees of parallelism in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from meshplan.errors import TopologyInputError
from meshplan.lint._job import JobFile
from meshplan.lint._readers._degrees import (
    Computed,
    Document,
    Nested,
    Setting,
    read_document,
    split_allocations,
)
from meshplan.lint._readers._numbers import INSTEAD, Edit, Whole, is_whole
from meshplan.lint._readers._toml import find_entries, load
from meshplan.lint._unread import is_size
from meshplan.topology._reading import MAX_DEPTH, compose_yaml

# Part of each key in the table; a text without them has no degrees.
_MARK = re.compile(
    r"[pP]arallel|dp_(?:replicate|shard)|fsdp|backend|allocation_mode"
    r"|mics_shard_size|zero_hpz|autotp|megatron_lm_config"
    r"|\b(?:tp|pp|cp|ep|dp)\b|deployment|(?m:^defaults:)",
)
# Keys of Kubernetes, Compose, CI and editors whose value is a command line.
_COMMAND = re.compile(
    r"(?:extra_)?args?|arguments|command|cmd|entrypoint|run|script|setup|commands|model_args"
)
# Two escapes of JSON for one character, which YAML does not know.
_PAIR = re.compile(r"\\u[dD][89abAB]\w{2}\\u[dD][c-fC-F]\w{2}")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
# OmegaConf's ${oc.env:NAME,8}, and ${NAME:8}: a variable of the environment and its default.
_DEFAULT = re.compile(r"\$\{(?:oc\.env:\w+,[ \t]*|[A-Z]\w*:)(\d{1,12})\}")
# Between the words of tensorParallelSize.
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_MAX_NODES = 1 << 14
_MAX_BASES = 8


def recognises(name: str, text: str) -> bool:
    """Whether this is a document, by its name, with a word of the table in it."""
    return name.endswith((".toml", ".yaml", ".yml", ".json")) and bool(_MARK.search(text))


def read(name: str, text: str, *, world_size: int | None) -> JobFile:
    """The meshes of the keys, or of the command line in the document."""
    settings = [*_read_toml(name, text)] if name.endswith(".toml") else [*_read_yaml(text)]
    settings = _inherit(name, settings, [])
    insert = partial(_insert, text, name.rpartition(".")[2])
    resolved = _resolve(split_allocations(settings))
    found = read_document(Document(name, text, "document", resolved, insert), world_size)
    keys = {key for one in settings for key in one.path.split(".")}
    has_command = any(map(_COMMAND.fullmatch, keys))
    if found == JobFile() and has_command:
        from meshplan.lint._readers import command

        if command.recognises(name, text):
            return command.read(name, text, world_size=world_size)
    return found


def _normalize(*keys: object) -> str:
    # Megatron-LM's own configurations have options as keys: "--tensor-model-parallel-size: 2".
    path = ".".join(str(key).lstrip("-") for key in keys)
    return _CAMEL.sub("_", path).replace("-", "_").lower()


def _inherit(name: str, settings: list[Setting], read: list[str]) -> list[Setting]:
    """The settings, with those of the files that its ``defaults`` name (NeMo RL). All are
    left as they are if one of the files is not there, as for the groups of Hydra, or too many.
    """
    listed = [one for one in settings if re.fullmatch(r"defaults(?:\.\d+)?", one.path)]
    named = [one for one in listed if not isinstance(one.value, Nested)]
    below: dict[str, Setting] = {}
    for one in named:
        from meshplan.lint._readers.command import read_neighbor

        file = str(one.value)
        read.append(file)
        if not file.endswith((".yaml", ".yml")) or len(read) > _MAX_BASES:
            return settings
        text = read_neighbor(name, file)
        base = _inherit(str(Path(name).parent / file), [*_read_yaml(text)], read)
        if not base:
            return settings
        # The file has no place of its values.
        below |= {
            two.path: two._replace(
                line=one.line,
                value=int(two.value) if isinstance(two.value, Whole) else two.value,
            )
            for two in base
        }
    own = {one.path: one for one in settings if one not in listed}
    # A list has no keys of its own.
    replaced = [
        f"{path}."
        for path, one in own.items()
        if not isinstance(one.value, Nested) or f"{path}.0" in own
    ]
    # merge_with_override of NeMo RL: in the root only.
    marks = (re.fullmatch(r"(\w+\.)_override_", path) for path in own)
    replaced += [mark[1] for mark in marks if mark]
    kept = {path: two for path, two in below.items() if not path.startswith(tuple(replaced))}
    return [*(own | kept | own).values()] if named else settings


def _resolve(settings: list[Setting]) -> list[Setting]:
    """The settings with the values of ``${other.key}``."""
    values = {one.path: one.value for one in settings}
    found = []
    for one in settings:
        if isinstance(one.value, str) and "${" in one.value:
            reference = _REFERENCE.fullmatch(one.value)
            default = _DEFAULT.fullmatch(one.value)
            value = values.get(_normalize(reference[1])) if reference else None
            why = f"{one.key} = {one.value} has no value in this file; use a number"
            # Without the place of the other key.
            named = int(value) if is_whole(value) else Computed(why)
            one = one._replace(value=int(default[1]) if default else named)
        found.append(one)
    return found


def _nest(key: str) -> Nested:
    return Nested(f"{key} has a list or a table in place of a number; {INSTEAD}")


def _insert(text: str, ending: str, after: Setting, key: str, size: int) -> Edit | None:
    assert isinstance(after.value, Whole)
    if _CAMEL.search(after.key):
        return None
    _, at = after.value.span
    if ending == "json":
        return Edit(at, at, f', "{key}": {size}')
    line = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    end -= text[end - 1 : end] == "\r"
    indent = re.match(r"[ \t]*", text[line:])
    if "{" in text[line:at] or "[" in text[line:at] or indent is None:
        return None
    new = f"{key} = {size}" if ending == "toml" else f"{key}: {size}"
    return Edit(end, end, f"\n{indent[0]}{new}")


def _read_toml(name: str, text: str) -> Iterator[Setting]:
    document = load(name, text)
    places = {entry.path: entry for entry in reversed([*find_entries(text)])}

    def walk(value: Any, path: tuple[str | int, ...], line: int) -> Iterator[Setting]:
        place = places.get(path)
        line = line if place is None else place.line
        if isinstance(value, dict):
            if path:
                yield Setting(_normalize(*path), _nest(str(path[-1])), line, str(path[-1]))
            for key, inner in value.items():
                yield from walk(inner, (*path, key), line)
            return
        if place is not None and not place.is_table and is_whole(value):
            value = Whole.at(value, place.start, place.end)
        value = _nest(str(path[-1])) if isinstance(value, list) else value
        yield Setting(_normalize(*path), value, line, str(path[-1]))

    return walk(document, (), 1)


def _read_yaml(text: str) -> Iterator[Setting]:
    """The settings in YAML, or in JSON, its subset."""
    import yaml  # here, because few files need it

    try:
        documents = compose_yaml(_PAIR.sub("?" * 12, text))
    except TopologyInputError:
        return
    shift = len(text) - len(text.removeprefix("\ufeff"))
    known: dict[Any, _Items] = {}
    pending: list[tuple[tuple[str, ...], Any, int]] = [((), one, 1) for one in documents]
    for path, node, line in pending:
        if isinstance(node, yaml.MappingNode):
            # Anchors may name a node any number of times.
            if len(path) < MAX_DEPTH and len(pending) < _MAX_NODES:
                items = _list_items(node, known)
                if path and is_size(path[-1]):
                    yield Setting(_normalize(*path), _nest(path[-1]), line, path[-1])
                pending += [((*path, key), *item) for key, item in items.items()]
            continue
        if isinstance(node, yaml.SequenceNode) and len(pending) < _MAX_NODES:
            pending += [((*path, str(i)), one, line) for i, one in enumerate(node.value)]
        if not path:
            continue
        value: object = _nest(path[-1])
        if isinstance(node, yaml.ScalarNode):
            text_of: str = node.value
            value = text_of
            kind = node.tag.rpartition(":")[2]
            if kind == "int" and re.fullmatch(r"-?\d{1,12}", text_of):
                place = (
                    node.start_mark.index + shift,
                    node.end_mark.index + shift,
                )
                value = Whole.at(int(text_of), *place)
            elif kind in ("bool", "null"):
                value = None if kind == "null" else text_of.lower() in ("true", "yes", "on")
        yield Setting(_normalize(*path), value, line, path[-1])


_Items: TypeAlias = dict[str, tuple[Any, int]]


def _list_items(node: Any, known: dict[Any, _Items], depth: int = 0) -> _Items:
    """The values of a mapping with their lines, by key: the last of equal keys, and before its own
    those of the mappings that it merges (``<<``).
    """
    if node not in known and depth < MAX_DEPTH:
        known[node] = merged = _Items()  # for a mapping that merges itself
        own: _Items = {}
        for key, value in node.value:
            if key.tag.endswith(":merge"):
                others = value.value if value.id == "sequence" else [value]
                for one in reversed([one for one in others if one.id == "mapping"]):
                    merged |= _list_items(one, known, depth + 1)
            elif key.id == "scalar":
                own[key.value] = value, key.start_mark.line + 1
        known[node] = {**merged, **own}
    return known.get(node, {})
