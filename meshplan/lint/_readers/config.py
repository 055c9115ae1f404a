"""The linter's own configuration: ``meshplan.toml``, or ``[tool.meshplan]`` of ``pyproject.toml``.

Settings are keys of the root. A mesh is ``mesh = "ddp=8,fsdp=5"``, or a table ``[[mesh]]`` that
also has its use.
"""

from __future__ import annotations

import re
from functools import partial
from typing import get_args

from meshplan.errors import MeshplanError, PolicyError
from meshplan.layout import Layout
from meshplan.lint._finding import Source
from meshplan.lint._job import Job, JobFile, add_source
from meshplan.lint._readers._numbers import Edit, apply_edits
from meshplan.lint._readers._toml import (
    Entry,
    Path,
    find_entries,
    load,
)
from meshplan.lint._roles import (
    Framework,
    Role,
    assume_roles,
    resolve_roles,
)
from meshplan.lint._settings import (
    SETTINGS_KEYS,
    check_keys,
    read_roles,
    read_settings,
    read_strings,
)
from meshplan.lint._spec import (
    format_mesh,
    parse_mesh,
)

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
    """Settings, and the meshes of the project; ``world_size`` is not needed. Raises PolicyError for
    an unknown key or value, and LayoutError or AxisNameError for an invalid mesh.
    """
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
        check_keys(document, (*SETTINGS_KEYS, "mesh"))
        settings = read_settings(document)
    except PolicyError as error:
        raise places.locate((), error) from None
    mesh = document.get("mesh", [])
    meshes: list[tuple[Path, object]] = [(("mesh",), mesh)]
    if isinstance(mesh, list):
        meshes = [(("mesh", i), one) for i, one in enumerate(mesh)]
    jobs = []
    for path, one in meshes:
        try:
            jobs.append(_read_mesh(places, path, one))
        except MeshplanError as error:
            raise places.locate(path, error) from None
    return JobFile(tuple(jobs), settings=settings)


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
    check_keys(table, _MESH_KEYS)
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
    roles = read_roles(table.get("roles", {}))
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
    names = read_strings(key, given)
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
