"""Meshes of degree keys: the settings of a file, the framework that reads them, its meshes."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import NamedTuple

from meshplan._message_text import shorten
from meshplan.errors import LayoutError, MeshplanError
from meshplan.layout import Layout
from meshplan.lint._finding import Source
from meshplan.lint._job import (
    Job,
    JobFile,
    Skipped,
    add_source,
)
from meshplan.lint._programs import Program, find_program_of_text
from meshplan.lint._readers._frameworks import (
    FRAMEWORKS,
    Framework,
    Kind,
    Mesh,
)
from meshplan.lint._readers._numbers import (
    INSTEAD,
    UNKNOWN_RANKS,
    Edit,
    UnknownMesh,
    Whole,
    apply_edits,
    is_whole,
    order_sizes,
)
from meshplan.lint._roles import Role, find_role
from meshplan.lint._spec import make_layout
from meshplan.lint._unread import (
    COMMENT,
    is_size,
    suggest_degree,
    suggest_key,
)

_BASE = re.compile(
    r"(?:defaults|_base_|base_config|base_configs|extends|inherits?_from|toml_files)(?:\.|$)"
)
# A value of an override that may be the name of a configuration.
_WORD = re.compile(r"(?!(?:true|false|null|none)$)[A-Za-z_][\w/-]*", re.I)
_ROOTS = ("", "_global_")
# Options that name a file of settings.
_CONFIG = re.compile(
    r"(?:.*\.)?(?:config(?:_name|_path|_dir|_file)?|yaml_cfg|(?:model_)?recipe(?:_name)?)"
)
_REFERENCE = re.compile(r"\$\{([\w.]*)\}")
_MAX_PARTS = 16  # of a path
# Options of a model, as slime and miles pass them.
_MODEL = re.compile(r"\$\{?\w*MODEL_ARGS(?:\[[@*]\])?\}?")


class Computed(NamedTuple):
    """A value that only the running program has, and why."""

    why: str


class Nested(Computed):
    """A table or a list in place of a value: a section, or the values of a sweep."""


class Setting(NamedTuple):
    """A key with its value."""

    path: str  # keys from the root, in lower case, with underscores and dots
    # A number, which is `Whole` if another one can be written in its place, a text, a truth value,
    # ``None``, or `Computed`
    value: object
    line: int  # of the key or of its command, from 1 on
    key: str = ""  # as written, for messages

    def __str__(self) -> str:
        return f"{self.path}={self.value}".lower()


# AReaL's sglang:d4p1t2+fsdp:d8t2 and megatron:(attn:d1p6|ffn:d1p6e2).
_ALLOCATION = re.compile(r"(?:.*\.)?(?:backend|allocation_mode)")
_BACKEND = r"(sglang|vllm|fsdp|archon|megatron)(?:\[\w+\])?:"
_ENGINE = re.compile(_BACKEND + r"\(?(?:attn:)?((?:[dptce]\d{1,6})+)(?:\|ffn:(\w+)\))?")


def split_allocations(settings: Iterable[Setting]) -> list[Setting]:
    """The settings, with a degree for each letter of the allocations of AReaL among them."""
    found = [*settings]
    for one in settings:
        text = str(one.value) if _ALLOCATION.fullmatch(one.path) else ""
        engine = re.search(_BACKEND + r".*[{$]", text)
        if engine or (re.search(r"[{$]", text) and one.path.endswith("allocation_mode")):
            why = Computed(f"{one.key} has a variable; {INSTEAD}")
            path = f"{one.path}.0.{engine[1] if engine else 'fsdp'}_engine.d"
            found.append(Setting(path, why, one.line, one.key))
        if re.sub(r"[+|]", "", _ENGINE.sub("", text)):
            continue  # it has another form
        for i, (engine, dense, experts) in enumerate(_ENGINE.findall(text)):
            sizes, inner = (dict(re.findall(r"([a-z])(\d+)", one)) for one in (dense, experts))
            sizes |= {key: inner[at] for key, at in (("e", "e"), ("et", "t")) if at in inner}
            path = f"{one.path}.{i}.{engine}_engine"
            found += [
                Setting(f"{path}.{key}", int(size), one.line, one.key)
                for key, size in sizes.items()
            ]
    return found


@dataclass(frozen=True, eq=False)
class Document:
    """The settings of a file."""

    name: str
    text: str
    kind: Kind
    settings: Sequence[Setting]
    # Returns an edit that adds a key with a number after a setting, or ``None``
    insert: Callable[[Setting, str, int], Edit | None]
    # Of the command that starts the job, by fields of `JobFile`; ``ranks of one host`` if it
    # specifies no hosts
    launch: Mapping[str, int] = field(default_factory=dict)
    # Lines of settings in a command itself, not in a variable that it uses
    commands: Set[int] = frozenset()
    # Lines of settings under a launcher of trainers, as far as these can be told apart
    trained: Set[int] = frozenset()
    # Words for options from elsewhere, such as "$@", and their lines
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    # Whether a pattern matches
    _known: dict[str, bool] = field(default_factory=dict, init=False)

    @cached_property
    def code(self) -> str:
        """The text without its comments."""
        return COMMENT.sub("", self.text)

    @cached_property
    def pairs(self) -> list[tuple[Setting, str]]:
        """Each setting, and its text: ``path=value`` in lower case."""
        return [(one, str(one)) for one in self.settings]

    def has(self, pattern: str) -> bool:
        """Whether a setting matches; all groups of a mesh ask for the same."""
        if pattern not in self._known:
            self._known[pattern] = any(match(pattern, text) for _, text in self.pairs)
        return self._known[pattern]

    @cached_property
    def disabled(self) -> tuple[str, ...]:
        """Paths of disabled sections, with a dot."""
        found = (re.fullmatch(r"(.*\.)enabled?=false", text) for _, text in self.pairs)
        return tuple(one[1] for one in found if one)

    @cached_property
    def references(self) -> set[str]:
        """The last parts of the names in ``${...}``, joined by dots."""
        found = (one[1].split(".")[-_MAX_PARTS:] for one in _REFERENCE.finditer(self.code))
        return {".".join(parts[i:]) for parts in found for i in range(len(parts))}


def find_framework(document: Document) -> Framework | None:
    """The first framework of the table that reads the document."""
    paths = [one.path for one in document.settings]
    # Comments of a configuration name its program, and those of a script may name another one.
    text = document.code if document.kind == "command" else document.text
    for framework in FRAMEWORKS:
        if (
            document.kind in framework.kinds
            and any(match(framework.mark, path) for path in paths)
            and not any(match(framework.without, path) for path in paths)
            and (not framework.word or re.search(framework.word, text, re.M))
        ):
            return framework
    return None


def _count_ranks(document: Document, framework: Framework) -> JobFile:
    """Hosts, ranks of each host and ranks of the job, by the document or by default; ``stated`` has
    the fields that the document itself specifies. Their names are the keys of `Framework.launch`
    and `Document.launch`.
    """
    found = dict(framework.defaults) | dict(document.launch)
    stated = {*document.launch}
    given: dict[str, object] = {}
    several = Computed("several numbers")
    for one in document.settings:
        if one.path in framework.launch and given.setdefault(one.path, one.value) != one.value:
            # Several commands of one script start different numbers.
            given[one.path] = several
    for path, value in given.items():
        key = framework.launch[path]
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,8}", value):
            value = int(value)  # in quotes
        if is_whole(value) and 1 <= value <= 1 << 24:
            found[key] = int(value)
            stated.add(key)
        elif value is not None and key not in document.launch:
            found.pop(key, None)  # not the default
    if several in given.values():
        stated.clear()
    hosts, per_host, total = map(found.get, _COUNTS)
    if total is None and hosts and per_host:
        total = hosts * per_host
        stated |= {"world_size"} if {"hosts", "ranks_per_host"} <= stated else set()
    if total and hosts and total % hosts == 0:
        per_host = total // hosts
        stated |= {"ranks_per_host"} if {"hosts", "world_size"} <= stated else set()
    return JobFile(
        hosts=hosts,
        ranks_per_host=per_host,
        # The launchers of torch and DeepSpeed start one host by default.
        world_size=total or found.get("ranks of one host"),
        stated=frozenset(stated.intersection(_COUNTS)),
    )


_COUNTS = ("hosts", "ranks_per_host", "world_size")


class Degrees(NamedTuple):
    """The settings of one mesh."""

    framework: Framework
    mesh: Mesh
    settings: Mapping[str, Setting]
    document: Document


def _find_groups(
    document: Document,
    framework: Framework,
    mesh: Mesh,
) -> Iterator[Degrees]:
    """The meshes that a document has keys for: a group of keys is one."""
    is_absent = document.has(mesh.unless) and not document.has(mesh.when)
    if is_absent and not _is_mixed(document, mesh):
        return
    groups: dict[str, dict[str, Setting]] = {}
    lines: dict[str, dict[str, set[int]]] = {}
    for part, axis, one in _find_settings(document, mesh):
        group = groups.setdefault(part, {})
        before = group.setdefault(axis, one)
        # Of one path: in several documents of a file.
        if axis and (document.kind == "command" or before.path == one.path):
            group[axis] = _merge(before, one)
            if one.line in document.commands:
                lines.setdefault(part, {}).setdefault(axis, set()).add(one.line)
    # In YAML, a list of arguments has a line for each.
    is_listed = document.name.endswith((".yaml", ".yml", ".json"))
    for part, places in lines.items():
        # Axes in different commands: each command has a mesh of its own.
        if len({len(one) if is_listed else frozenset(one) for one in places.values()}) > 1:
            unknown = Computed(f"its commands have different degrees; {INSTEAD}")
            for axis, one in groups[part].items():
                groups[part][axis] = one._replace(value=unknown)
    if not groups and not mesh.needs:
        groups[""] = {}
    # More of them are too many.
    placed = [*islice(filter(_has_place, groups.values()), _MAX_MESHES + 1)]
    for group in groups.values():
        if _is_reference(group, document, placed):
            continue
        if not mesh.needs or not group.keys().isdisjoint(mesh.needs):
            yield Degrees(framework, mesh, group, document)


@lru_cache(maxsize=1)
def _is_mixed(document: Document, mesh: Mesh) -> bool:
    """Whether a setting that decides if there is this mesh has several values, in two commands or
    in two documents of a file.
    """
    for pattern in (mesh.unless, mesh.when):
        paths = {one.path for one, text in document.pairs if match(pattern, text)}
        if any(one.path in paths and not match(pattern, text) for one, text in document.pairs):
            return True
    return False


def _merge(before: Setting, one: Setting) -> Setting:
    """A degree that a file has twice."""
    if isinstance(before.value, Computed) or before.value == one.value:
        return before
    if isinstance(one.value, Computed):
        return one
    why = (
        f"{one.key} is {shorten(str(one.value))} here and {before.key} was "
        f"{shorten(str(before.value))} before; {INSTEAD}"
    )
    return one._replace(value=Computed(why))


def _find_settings(document: Document, mesh: Mesh) -> Iterator[tuple[str, str, Setting]]:
    """The part, the axis and the setting of each key of a mesh."""
    ignored = set[str]()
    if document.kind == "document" and mesh.roles.get("dp") != "apart":
        # As in verl, with the keys of Megatron.
        paths = [one.path.rpartition(".") for one in document.settings]
        ignored |= {prefix for prefix, _, key in paths if key == "gpu_memory_utilization"}
    for one in document.settings:
        prefix, _, key = one.path.rpartition(".")
        section = _compile(mesh.section).fullmatch(prefix)
        is_off = prefix in ignored or one.path.startswith(document.disabled)
        if section is not None and key in mesh.keys and not is_off:
            yield section.groupdict().get("part") or "", mesh.keys[key], one


def _is_reference(
    group: Mapping[str, Setting],
    document: Document,
    placed: Iterable[Mapping[str, Setting]],
) -> bool:
    """Whether all sizes are ``${...}`` that name those of another mesh: the same mesh again."""
    if document.kind != "document" or not group or _has_place(group):
        return False
    return any(
        all(axis in other and other[axis].value == one.value for axis, one in group.items())
        for other in placed
    )


def _has_place(group: Mapping[str, Setting]) -> bool:
    return any(isinstance(one.value, Whole) for one in group.values())


# The groups of a mesh come one after another, and a document may have thousands of settings.
@lru_cache(maxsize=1)
def find_replaced(
    document: Document,
    framework: Framework,
    mesh: Mesh,
) -> Setting | None:
    """The first setting that names another configuration, which may replace the mesh's defaults.

    Hydra's ``defaults``, its overrides of groups (``actor=other``, ``group@package=other``),
    ``--config-name`` and ``--job.config_file``; the base files of other programs. Names that match
    ``Framework.bases`` have the defaults of the table.
    """
    section = _compile(mesh.section)
    for one in document.settings if document.kind != "python" else ():
        group, at, package = one.path.partition("@")
        if document.kind == "document":
            is_base = bool(_BASE.match(one.path)) and not isinstance(one.value, Nested)
        elif one.key.startswith("-") or group == "config":
            is_base = bool(_CONFIG.fullmatch(group))
        else:
            is_word = isinstance(one.value, Computed) or bool(_WORD.fullmatch(str(one.value)))
            is_group = (bool(at) or "/" in group) and "=" not in str(one.value)
            is_base = is_group or ("." not in group and is_word)
        is_elsewhere = at and package not in _ROOTS and not section.fullmatch(package)
        name = str(one.value)
        is_known = name == "_self_" or match(framework.bases, name)
        is_known |= one.key.startswith("override hydra/")
        if is_base and not is_elsewhere and not is_known:
            return one
    # Arguments are none, unless nothing else is about this part of the job.
    has_part = any(section.match(one.path.rpartition(".")[0]) for one in document.settings)
    words = document.elsewhere.items()
    for word, line in sorted(words, key=lambda one: bool(_MODEL.fullmatch(one[0]))):
        if not (has_part and re.match(r"\$\{?[@*]", word)):
            return Setting("", None, line, word)
    return None


def find_line(found: Degrees) -> int:
    """The line of the table, of the first key, or of the mark of a mesh without keys."""
    settings = found.document.settings
    if not found.settings:
        mark = _compile(found.framework.mark)
        return next(one.line for one in settings if mark.fullmatch(one.path))
    first = min(found.settings.values(), key=lambda one: one.line)
    table = first.path.rpartition(".")[0]
    lines = [one.line for one in settings if one.path == table and isinstance(one.value, Nested)]
    return min([first.line, *lines])


def match(pattern: str, text: str) -> bool:
    return bool(pattern and _compile(pattern).fullmatch(text))


@lru_cache(maxsize=256)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.S)


# A job has a few.
_MAX_MESHES = 64
_EMPTY = ("", "none", "null", "~")


def read_document(
    document: Document,
    world_size: int | None,
    framework: Framework | None = None,
    call: Source | None = None,
) -> JobFile:
    """The jobs of a document, or of a ``call`` in Python, which makes meshes of its keys only;
    empty if no framework reads it.
    """
    framework = framework or find_framework(document)
    if framework is None:
        return JobFile()
    launch = _count_ranks(document, framework)
    if "world_size" in launch.stated:
        world_size = None
    hosts, total = launch.hosts, launch.world_size
    jobs: list[Job] = []
    skipped: list[Skipped] = []
    is_read = False
    groups = (
        found for mesh in framework.meshes for found in _find_groups(document, framework, mesh)
    )
    meshes = [*islice(groups, _MAX_MESHES + 1)]
    if len(meshes) > _MAX_MESHES:
        why = f"more than {_MAX_MESHES} meshes in one file; give them one by one"
        return JobFile(skipped=(Skipped(Source(document.name), why),))
    # Options may replace the number of a default; the ranks of a host are those of the document.
    started = None if world_size else total
    per_host = launch.ranks_per_host if "ranks_per_host" in launch.stated else None
    for found in meshes:
        if call and not found.settings:
            continue
        source = call or Source(document.name, find_line(found))
        try:
            # verl's critic has the mesh of its actor, for example.
            known = {(job.layout, job.roles) for job in jobs}
            made = [*_make_jobs(found, source, world_size or total, hosts)]
            is_read |= bool(made)
            ranks = made[0].layout.world_size if made and made[0].has_all_ranks else 0
            if ranks and (ranks != started if started else ranks % (per_host or 1)):
                raise UnknownMesh(
                    f"its sizes have {ranks} ranks, and it starts "
                    f"{started or f'{per_host} on each host'}; {INSTEAD}"
                )
            # One rank has no mesh, but arguments of one rank are what the user asks about.
            least = 1 if document.name == "arguments" else 2
            jobs += [
                job
                for job in made
                if (job.layout, job.roles) not in known and job.layout.world_size >= least
            ]
        except UnknownMesh as unknown:
            why = " ".join(str(unknown).split())  # a value may have several lines
            skipped.append(Skipped(Source(document.name, unknown.line or source.line), why))
        except MeshplanError as error:
            if total is None or world_size is not None:
                raise add_source(source, error) from None
            # Numbers of hosts in files are often placeholders.
            remedy = "correct this number" if "world_size" in launch.stated else "pass --world-size"
            why = f"{error.args[0]}, or {remedy}"
            skipped.append(Skipped(source, why))
    return replace(launch, jobs=tuple(jobs), skipped=tuple(skipped), is_read=is_read)


def _make_jobs(
    found: Degrees, source: Source, total: int | None, hosts: int | None
) -> Iterable[Job]:
    """The mesh of the dense layers, and that of the experts if they are parallel. Raises
    UnknownMesh for a size that is not known.
    """
    document, mesh, settings = found.document, found.mesh, found.settings
    for pattern, needed in mesh.only.items():
        of_mesh = any(match(pattern, one.path) for one in settings.values())
        if of_mesh and not document.has(needed):
            raise UnknownMesh(f"no setting shows that the program makes this mesh; {INSTEAD}")
    for pattern, why in mesh.refused.items():
        if document.has(pattern):
            line = next(one.line for one, text in document.pairs if match(pattern, text))
            raise UnknownMesh(f"{why}; {INSTEAD}", line)
    for one in settings.values() if mesh.roles.get("dp") == "apart" and mesh.is_part else ():
        if one.line in document.trained and "vllm" not in one.path:
            raise UnknownMesh(f"{one.key} may be an option of a trainer; {INSTEAD}", one.line)
    if _is_mixed(document, mesh):
        raise UnknownMesh(f"the setting that decides on this mesh has several values; {INSTEAD}")
    read = {axis: _read_size(one, mesh) for axis, one in settings.items() if axis}
    given = {axis: size for axis, size in read.items() if size is not None}
    if "dp" in given and "dp" not in mesh.order:
        replicas = {"dp_replicate": given.get("dp_replicate", 1)}
        ranks_of = f"ranks of {settings['dp'].key}"
        given.setdefault(mesh.rest, _divide(given["dp"], replicas, mesh.rest, ranks_of))
    order, experts = _read_orders(document, mesh)
    # One data axis of any size has no siblings, and so no mesh to judge.
    is_plain = document.kind == "document" and set(given.values()) <= {1}
    per_host = document.has(mesh.per_host)
    if total is None and is_plain and (mesh.needs or not mesh.keys) and not per_host:
        return
    check_unread(found, order, given, total)
    dense = _fill_sizes(found, order, given, total, hosts)
    known = {*given, mesh.rest} - {""}
    sharded, sequence_parallel, program = _read_use(document, found.framework, mesh)

    def make_job(sizes: Mapping[str, int], keep: Iterable[str]) -> Job:
        # Megatron-LM's data axis has two parts if the optimizer's state has several instances.
        is_split = sizes.get("dp_replicate", 1) > 1
        labels = {axis: "dp_shard" if is_split and axis == "dp" else axis for axis in sizes}
        shown = [axis for axis, size in sizes.items() if size > 1 or axis in keep]
        flat = tuple(labels[axis] for axis in shown if axis in mesh.flattened and sizes[axis] > 1)
        return Job(
            layout=make_layout([sizes[axis] for axis in shown], [labels[axis] for axis in shown]),
            source=source,
            roles=tuple(_find_role(mesh, axis, sharded) for axis in shown),
            framework=mesh.reduction if sharded else "ddp",
            program=program,
            has_all_ranks=not mesh.is_part,
            flattened=(flat,) if len(flat) > 1 else (),
            sequence_parallel=sequence_parallel and sizes.get("tp", 1) > 1,
            rewrite=partial(_rewrite, found, [*labels.values()], dense),
        )

    yield make_job(dense, known)
    if given.get("ep", 1) <= 1 or not experts:
        return
    every = {**dense, "etp": dense.get("tp", 1) if mesh.expert_tp else 1, **given}
    inner = {axis: every.get(axis, 1) for axis in experts}
    left = next(axis for axis in experts if axis in ("edp", "efsdp", "ep_shard", "moe_tp"))
    inner[left] = _divide(math.prod(dense.values()), inner, left)
    yield make_job(inner, {*known, left})


def _fill_sizes(
    found: Degrees,
    order: Iterable[str],
    given: Mapping[str, int],
    total: int | None,
    hosts: int | None,
) -> dict[str, int]:
    """The size of each axis of ``order``: as given, 1, or the ranks that the others leave."""
    mesh = found.mesh
    sizes = {axis: given.get(axis, 1) for axis in order}
    if mesh.fill not in given and found.document.has(mesh.per_host):
        if hosts is None:
            raise UnknownMesh("it makes groups for each host; pass --hosts and --node-size")
        sizes[mesh.fill] = hosts
    rest = [axis for axis, one in found.settings.items() if one.value == -1]
    if mesh.rest:
        rest = [mesh.rest] if mesh.rest not in given else []
    if rest:
        # Two axes of -1 cannot be told apart.
        sizes[rest[0]] = _divide(total if len(rest) == 1 else None, sizes, rest[0])
    elif mesh.fill and mesh.fill not in given:
        sizes[mesh.fill] = _divide(total, sizes, mesh.fill)
    return {axis: sizes[axis] for axis in order}


@lru_cache(maxsize=1)
def _read_use(
    document: Document,
    framework: Framework,
    mesh: Mesh,
) -> tuple[bool, bool, Program]:
    """Whether parameters and activations are sharded, and the program that reduces."""
    sharded = mesh.is_sharded or document.has(mesh.sharded)
    sharded = sharded and not document.has(mesh.unsharded)
    sequence_parallel = mesh.sequence_parallel
    for _, text in document.pairs:
        if flag := re.fullmatch(r"(?:.*\.)?(no_)?(?:enable_)?sequence_parallel=(\w+)", text):
            sequence_parallel = (flag[2] == "true") != bool(flag[1])
    program = framework.program
    if program == "unknown":
        program = find_program_of_text(document.code)
    return sharded, sequence_parallel, program


def _read_size(one: Setting, mesh: Mesh) -> int | None:
    """The size of an axis; ``None`` if it has the ranks that the others leave, or no value."""
    value, axis = one.value, mesh.keys[one.path.rpartition(".")[2]]
    is_rest = axis in (mesh.rest, mesh.fill, "dp") or not mesh.rest
    if isinstance(value, Computed):
        raise UnknownMesh(value.why, one.line)
    if value is None or str(value).lower() in _EMPTY or (is_rest and value in (-1, "auto")):
        return None
    if not is_whole(value):
        if isinstance(value, str) and not re.fullmatch(r"\d+", value):
            shown = f"{one.key}{' ' if one.key.startswith('-') else ' = '}{shorten(value)}"
            raise UnknownMesh(
                f"{shown} is not an integer; {INSTEAD}",
                one.line,
            )
        raise LayoutError(f"{one.key} must be an integer, got {repr(value)[:40]}")
    if value == 0 and mesh.zero_is_one:
        return 1
    if value == -1 and not is_rest:
        raise UnknownMesh(f"{one.key} = -1 is found by the program; {INSTEAD}")
    if value < 1:
        raise LayoutError(
            f"{one.key} must be 1 or more{', or -1 for the rest' if is_rest else ''}, got {value}"
        )
    return int(value)


@lru_cache(maxsize=1)
def _read_orders(
    document: Document,
    mesh: Mesh,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of the dense mesh and of the experts' mesh, outermost first."""
    given = ""
    for one in document.settings if mesh.orders else ():
        names = mesh.orders.get(one.path.rpartition(".")[2])
        if names is not None and one.value not in (False, None):
            if isinstance(one.value, Computed):
                raise UnknownMesh(one.value.why, one.line)
            given = names or str(one.value).lower()
    if not given:
        return mesh.order, mesh.experts
    found = given.split("-")
    every = ("tp", "pp", "dp", "ep", "cp")
    if len(set(found)) != len(found) or not set(found) <= set(every):
        raise LayoutError(
            "an order names tp, cp, ep, dp and pp once each, innermost first, got "
            f"'{given[:40]}'; use for example tp-cp-ep-dp-pp"
        )
    # As RankGenerator does with axes that have one rank.
    found += [axis for axis in every if axis not in found]
    renamed = {"dp": "edp", "tp": "etp"}
    dense = [axis for axis in reversed(found) if axis != "ep"]
    at = dense.index("dp")
    return (
        (*dense[:at], "dp_replicate", *dense[at:]),
        tuple(renamed.get(axis, axis) for axis in reversed(found) if axis != "cp"),
    )


def _divide(total: int | None, sizes: Mapping[str, int], rest: str, ranks: str = "ranks") -> int:
    """The ranks that the other sizes leave to the axis ``rest``."""
    if total is None:
        raise UnknownMesh(f"the size of {rest} {UNKNOWN_RANKS}")
    others = {axis: size for axis, size in sizes.items() if axis != rest}
    taken = math.prod(others.values())
    if total % taken:
        product = " x ".join(f"{axis} {size}" for axis, size in others.items() if size > 1)
        raise LayoutError(
            f"{total} {ranks} are not a multiple of {product} = {taken}; "
            f"use sizes whose product divides the {ranks}"
        )
    return total // taken


def _find_role(mesh: Mesh, axis: str, sharded: bool) -> Role:
    if axis in mesh.roles:
        return mesh.roles[axis]
    if axis in ("dp", "edp", "cp") and mesh.sharded:
        return "shard" if sharded else "replicate"
    return find_role(axis)


def _rewrite(
    found: Degrees, axes: Sequence[str], old: Mapping[str, int], layout: Layout
) -> str | None:
    """The file with another mesh of these axes; ``None`` if it cannot express that."""
    sizes = order_sizes(layout, axes)
    if sizes is None:
        return None
    mesh, given = found.mesh, found.settings
    wanted = {axis: size for axis, size in sizes.items() if axis in mesh.keys.values()}
    rest = given.get(mesh.rest)
    if mesh.rest and rest is not None and isinstance(rest.value, Whole):
        # The file sets the axis that the framework derives from ranks and other axes: check it.
        others = math.prod(
            wanted.get(axis, size) for axis, size in old.items() if axis != mesh.rest
        )
        size, left = divmod(layout.world_size, others)
        if left:
            return None
        wanted[mesh.rest] = size
    edits: list[Edit] = []
    places = [one for one in given.values() if isinstance(one.value, Whole)]
    places = sorted(places, key=lambda one: one.line)[::-1]
    for axis, size in wanted.items():
        one = given.get(axis)
        if one is not None and isinstance(one.value, Whole):
            if one.value not in (size, -1):
                edits.append(Edit(*one.value.span, str(size)))
        elif axis == mesh.rest or (axis == mesh.fill and one is None):
            continue
        elif size != 1:
            tried = (found.document.insert(at, _find_key(mesh, axis, at), size) for at in places)
            edit = next((edit for edit in tried if edit is not None), None)
            if edit is None or one is not None:
                return None
            edits.append(edit)
    return apply_edits(found.document.text, edits)


def _find_key(mesh: Mesh, axis: str, like: Setting) -> str:
    """The key of an axis that is spelled most like another key of the file."""
    other = like.path.rpartition(".")[2]
    keys = [key for key, one in mesh.keys.items() if one == axis]
    return max(keys, key=lambda key: difflib.SequenceMatcher(None, key, other).ratio())


_VERL = "actor_rollout_ref."
# Degrees of other meshes than those of the trainer, and of parts of an axis.
_INNER = re.compile(
    r"vllm|sglang|rollout|generat|infer|teacher|reward|serv|virtual|ulysses|target|checkpoint"
    r"|(?:^|[._])(?:ref|gen)[._]"
)


@lru_cache(maxsize=1)
def _list_unread(
    document: Document,
    framework: Framework,
    mesh: Mesh,
) -> list[tuple[Setting, bool, str]]:
    """The settings that no mesh reads and that are misspelt keys of its section, with a hint, or
    degrees, with whether they are inside of the section.
    """
    keys = {key for one in framework.meshes for key in one.keys}
    found = []
    for one in document.settings:
        prefix, _, key = one.path.rpartition(".")
        # The value may be the size of an axis of several ranks.
        is_open = isinstance(one.value, Computed) or (
            one.value == "auto" or (is_whole(one.value) and one.value not in (0, 1))
        )
        is_open &= one.value != -1 or key not in keys
        is_open &= not isinstance(one.value, Nested) or key.endswith(("size", "degree"))
        if not is_open or one.path.startswith(document.disabled):
            continue
        if any(key in m.keys and _compile(m.section).fullmatch(prefix) for m in framework.meshes):
            continue
        is_inside = _compile(mesh.section).fullmatch(prefix) is not None
        near = is_inside and (suggest_key(key, mesh.keys) or suggest_degree(key))
        # A variable of the file: the degree that refers to it has its value.
        is_degree = is_size(key) and one.key not in document.references
        if near or (is_degree and not _INNER.search(one.path.removeprefix(_VERL))):
            found.append((one, is_inside, near or ""))
            # No mesh is judged beside it.
            if is_inside:
                break
    return found


def check_unread(
    found: Degrees,
    order: Iterable[str],
    given: Mapping[str, int],
    total: int | None,
) -> None:
    """Raise UnknownMesh if the file may set another size: by a misspelt key, by a degree that no
    mesh of the framework reads, or by another configuration in place of the defaults.
    """
    document, framework, mesh = found.document, found.framework, found.mesh
    merges = "<<" in document.code
    for one, is_inside, near in _list_unread(document, framework, mesh):
        if near:
            raise UnknownMesh(f"{one.key} is not a key of this program{near}", one.line)
        prefix, _, key = one.path.rpartition(".")
        # Another section may have the size that is read, or one that is replaced (<<).
        axis = mesh.keys.get(key, "")
        is_other = axis not in given or (prefix and one.value != given[axis] and not merges)
        if is_inside or not given or (key in mesh.keys and is_other):
            shown = "" if isinstance(one.value, Computed) else f" = {one.value}"
            raise UnknownMesh(
                f"{one.key}{shown} is a degree that is not read; {INSTEAD}",
                one.line,
            )
    free = [axis for axis in order if axis not in given]
    replaced = find_replaced(document, framework, mesh)
    if replaced and _MODEL.fullmatch(replaced.key) and {"dp", "dp_replicate"} <= {*free}:
        # Options of a model may have experts, but no instances of the optimizer.
        free = [*({"ep"} - {*given}), *(axis for axis in free if axis != "dp_replicate")]
    fixed = math.prod(given.get(axis, 1) for axis in order)
    if given.get("ep", 1) > 1 and "etp" in {*mesh.keys.values()} - {*given}:
        free, fixed = ["etp", *free], 0
    # One axis follows from the ranks of the job.
    is_open = len(free) > any(axis in free for axis in (mesh.rest, mesh.fill))
    if replaced and is_open and fixed != total:
        is_word = replaced.key.startswith("$")
        what = "has options" if is_word else "names another configuration"
        word = replaced.value if replaced.key.isdigit() else replaced.key
        why = f"{word} {what}, which may set {free[0]}; {INSTEAD}"
        raise UnknownMesh(why, replaced.line)
