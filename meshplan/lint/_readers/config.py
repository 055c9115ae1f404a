"""The linter's own configuration: ``meshplan.toml``, or ``[tool.meshplan]`` of ``pyproject.toml``.

Settings are keys of the root. A mesh is ``mesh = "ddp=8,fsdp=5"``, or a table ``[[mesh]]`` that
also has its use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, get_args

from meshplan._message_text import shorten, suggest
from meshplan.errors import MeshplanError, PolicyError
from meshplan.layout import Layout
from meshplan.lint._finding import SEVERITIES, Severity, Source
from meshplan.lint._job import (
    Job,
    JobFile,
    Settings,
    add_source,
)
from meshplan.lint._readers._numbers import Edit, apply_edits
from meshplan.lint._readers._toml import (
    Entry,
    Path,
    find_entries,
    load,
)
from meshplan.lint._roles import (
    ROLES,
    Framework,
    Role,
    assume_roles,
    resolve_roles,
)
from meshplan.lint._spec import (
    format_mesh,
    parse_mesh,
)

_SELECTOR = re.compile(r"MP\d{0,3}|ALL")
_MESH_KEYS = (
    "axes",
    "ranks",
    "flattened",
    "dims",
    "roles",
    "framework",
    "reduce-order",
    "order",
    "sequence-parallel",
)
_FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
_OURS = re.compile(
    r"^[ \t]*(?:\[\[?[ \t]*tool[ \t]*\.[ \t]*meshplan|\[\[[ \t]*mesh)\b",
    re.M,
)
# A mesh at the root, which ends with the first table.
_ROOT_MESH = re.compile(r"^[ \t]*mesh[ \t]*=[ \t]*[\"'][^\"'\n]*=", re.M)
_TABLE = re.compile(r"^[ \t]*\[", re.M)


def recognises(name: str, text: str) -> bool:
    """Whether this is a configuration of the linter, by its name, its tables or its mesh."""
    base = name.replace("\\", "/").rpartition("/")[2]
    if base in ("meshplan.toml", ".meshplan.toml", "pyproject.toml"):
        return True
    if not base.endswith(".toml"):
        return False
    table = _TABLE.search(text)
    root = text if table is None else text[: table.start()]
    return bool(_OURS.search(text) or _ROOT_MESH.search(root))


def read(name: str, text: str, *, world_size: int | None) -> JobFile:
    """Settings, and the meshes of the project; ``world_size`` is not needed."""
    document = load(name, text)
    pyproject = name.endswith("pyproject.toml") or "tool" in document
    root: Path = ("tool", "meshplan") if pyproject else ()
    for key in root:
        document = document.get(str(key), {}) if isinstance(document, dict) else {}
    if pyproject and not document:
        return JobFile()
    places = _Places(name, text, root)
    if not isinstance(document, dict):
        raise PolicyError(f"{places.find_source(())}: [tool.meshplan] must be a table")
    try:
        _check_keys(document, (*_READERS, "mesh"))
        mesh = document.pop("mesh", [])
        given = {key.replace("-", "_"): _READERS[key](key, one) for key, one in document.items()}
    except PolicyError as error:
        raise places.locate((), error) from None
    meshes: list[tuple[Path, object]] = [(("mesh",), mesh)]
    if isinstance(mesh, list):
        meshes = [(("mesh", i), one) for i, one in enumerate(mesh)]
    jobs = []
    for path, one in meshes:
        try:
            jobs.append(_read_mesh(places, path, one))
        except MeshplanError as error:
            raise places.locate(path, error) from None
    return JobFile(tuple(jobs), settings=Settings(**given))


class _Places:
    """The places of keys and values in the file."""

    def __init__(self, name: str, text: str, root: Path) -> None:
        self.name = name
        self.text = text
        self.root = root
        self.entries = {entry.path: entry for entry in reversed([*find_entries(text)])}

    def find_source(self, path: Path, key: str = "") -> Source:
        """The key of the table at ``path``, or the nearest table around it."""
        full = (*self.root, *path, *([key] if key else []))
        if full in self.entries:
            return Source(self.name, self.entries[full].line)
        if not path and not key:
            return Source(self.name, 1)
        return self.find_source(path if key else path[:-1])

    def locate(self, path: Path, error: MeshplanError) -> MeshplanError:
        """The error with the place of the key that its message starts with."""
        key = str(error.args[0]).partition(" ")[0].strip("'\"")
        return add_source(self.find_source(path, key), error)

    def find_value(self, path: Path) -> Entry | None:
        """The value at ``path``, if it is not a table with a header of its own."""
        entry = self.entries.get((*self.root, *path))
        return None if entry is None or entry.is_table else entry


def _read_mesh(places: _Places, path: Path, table: object) -> Job:
    source = places.find_source(path)
    if isinstance(table, str):
        layout = parse_mesh(table)
        rewrite = partial(_rewrite, places.text, places.find_value(path), layout)
        return Job(layout, source, rewrite=rewrite)
    if not isinstance(table, dict):
        raise PolicyError(
            'mesh is a string such as "ddp=8,fsdp=5", or tables [[mesh]] with axes, '
            f"got {type(table).__name__}"
        )
    _check_keys(table, _MESH_KEYS)
    axes = table.get("axes")
    if not isinstance(axes, str):
        raise PolicyError(
            f'axes are "ddp=8,fsdp=5", got {"nothing" if axes is None else repr(axes)[:60]}'
        )
    layout = parse_mesh(axes, table.get("ranks"))
    framework = table.get("framework", "dtensor")
    flattened = table.get("flattened", [])
    dims = table.get("dims", [])
    sequence_parallel = table.get("sequence-parallel", False)
    value = places.find_value((*path, "axes")) if "ranks" not in table else None
    roles = _read_roles(table.get("roles", {}))
    for axis in roles:
        layout.axis_index(axis)
    given: tuple[Role, ...] = tuple(roles.get(axis, "unknown") for axis in layout.axes)
    if framework not in _FRAMEWORKS:
        raise PolicyError(
            f"framework is one of {', '.join(_FRAMEWORKS)}, got {repr(framework)[:40]}"
        )
    if not isinstance(flattened, list):
        raise PolicyError('flattened is a list of lists of axes, e.g. [["ddp", "fsdp"]]')
    flat = tuple(_read_axes(layout, "flattened", one) for one in flattened)
    if not isinstance(dims, list) or not all(type(one) is int and one > 0 for one in dims):
        shown = repr(table["dims"])[:60]
        raise PolicyError(f"dims are lengths of tensor dims from 1 up, got {shown}")
    reduce_order = _read_axes(layout, "reduce-order", table.get("reduce-order", []))
    if table.get("order", "exact") != "exact":
        raise PolicyError(
            'order may only be "exact", got '
            f"{repr(table['order'])[:40]}; leave it out for other orders"
        )
    if not isinstance(sequence_parallel, bool):
        shown = repr(sequence_parallel)[:40]
        raise PolicyError(f"sequence-parallel is true or false, got {shown}")
    if "framework" in table and "unknown" in resolve_roles(layout.axes, given, framework):
        given = assume_roles(layout.axes, given, framework)
    return Job(
        layout=layout,
        source=source,
        roles=given,
        framework=framework,
        program="torch" if "framework" in table else "unknown",
        flattened=flat,
        dims=tuple(dims),
        reduce_order=reduce_order,
        exact="order" in table,
        sequence_parallel=sequence_parallel,
        rewrite=partial(_rewrite, places.text, value, layout),
    )


def _read_axes(layout: Layout, key: str, given: object) -> tuple[str, ...]:
    names = _read_strings(key, given)
    if len(set(names)) < len(names):
        raise PolicyError(f"{key} names an axis twice: {', '.join(names)[:60]}")
    return tuple(layout.axes[layout.axis_index(name)] for name in names)


def _rewrite(
    text: str,
    value: Entry | None,
    old: Layout,
    layout: Layout,
) -> str | None:
    """The file with another mesh."""
    if value is None or layout.ranks != range(layout.world_size):
        return None
    if layout.axes != old.axes and old.names is None:
        return None
    new = f'"{format_mesh(layout if old.names else Layout(layout.sizes))}"'
    return apply_edits(text, [Edit(value.start, value.end, new)])


def _read_roles(given: object) -> dict[str, Role]:
    """The role of each axis of a table."""
    if not isinstance(given, dict):
        raise PolicyError(f'roles are a table such as {{ fsdp = "shard" }}, got {_shorten(given)}')
    found: dict[str, Role] = {}
    for axis, role in given.items():
        if role not in ROLES:
            raise PolicyError(
                f"roles are {', '.join(ROLES)}, got {repr(role)[:40]} for axis {axis[:40]}"
                f"{suggest(str(role), ROLES)}"
            )
        found[axis] = role
    return found


def _check_keys(table: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise PolicyError for an unknown key; the message starts with it."""
    names = sorted(known)
    for key in table:
        if key not in names:
            raise PolicyError(
                f"{_shorten(key)} is not a valid key; use one of {', '.join(names)}"
                f"{suggest(key, names)}"
            )


def _read_strings(key: str, value: object) -> tuple[str, ...]:
    """A list of strings, or one string."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise PolicyError(f"{key} must be a list of strings, got {_shorten(value)}")
    return tuple(items)


def _read_level(key: str, level: object) -> Severity:
    for one in SEVERITIES:
        if level == one:
            return one
    raise PolicyError(
        f"{key} must be one of {', '.join(SEVERITIES)}, got {_shorten(level)}"
        f"{suggest(str(level), SEVERITIES)}"
    )


def _read_selectors(key: str, value: object) -> tuple[str, ...]:
    found = _read_strings(key, value)
    for selector in found:
        if not _SELECTOR.fullmatch(selector):
            raise PolicyError(
                f'{key} takes codes and prefixes such as "MP101" and "MP3", got '
                f"{_shorten(selector)}"
            )
    return found


def _read_size(key: str, size: object) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size >= 1:
        return size
    raise PolicyError(f"{key} must be a positive integer, got {_shorten(size)}")


def _read_option(key: str, value: object) -> str:
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int) for item in items):
        raise PolicyError(
            f"{key} must be a string, an integer or a list of these, got {_shorten(value)}"
        )
    return ",".join(str(item) for item in items)


def _shorten(value: object) -> str:
    return shorten(repr(value))


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("select", "ignore", "extend-select"), _read_selectors),
    "fail-level": _read_level,
    **dict.fromkeys(("topology", "include", "exclude"), _read_strings),
    **dict.fromkeys(("hosts", "rank-order", "output-format"), _read_option),
    **dict.fromkeys(("node-size", "domain-size"), _read_size),
    "roles": lambda _, given: _read_roles(given),
}
