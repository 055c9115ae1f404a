"""Python that makes device meshes: ``init_device_mesh``, ``DeviceMesh``, and classes with degrees.

The file is parsed and never run: a mesh of values that it computes while running is skipped. What
an axis is follows from what its mesh is given to (`_uses`), and from its name only if nothing does.
Degrees are arguments of ``ParallelismConfig`` and the like, or attributes that are set later:
``config.parallelism.tensor_parallel_degree = 4`` of torchtitan's registries,
``cfg.model.tensor_model_parallel_size = 4`` of the recipes of Megatron Bridge.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from meshplan.errors import LayoutError, MeshplanError
from meshplan.lint._finding import Source
from meshplan.lint._job import Job, JobFile, Skipped, add_source
from meshplan.lint._programs import Program, find_program_of_modules
from meshplan.lint._readers._constants import Reader, TooLong
from meshplan.lint._readers._degrees import (
    Computed,
    Document,
    Nested,
    Setting,
    match,
    read_document,
)
from meshplan.lint._readers._frameworks import FRAMEWORKS
from meshplan.lint._readers._numbers import RUN, Edit, UnknownMesh, Whole
from meshplan.lint._readers._uses import (
    Axis,
    Mesh,
    MeshCall,
    Root,
    Uses,
)
from meshplan.lint._readers._values import (
    UNKNOWN,
    Arguments,
    Either,
    Grid,
    Items,
    Moment,
    Path,
    Record,
    Span,
    Text,
    Unknown,
    Value,
    find_argument,
    is_constant,
    list_values,
    parse,
    read_default,
    read_string,
)
from meshplan.lint._roles import Framework, assume_roles
from meshplan.lint._spec import MAX_AXES, flatten_ranks, make_layout

CLASSES = {name for one in FRAMEWORKS for name in one.classes}
"""Names of the classes and functions that take degrees."""
_DERIVING = [one for one in FRAMEWORKS if "python" in one.kinds and one.classes]
ATTRIBUTES = {
    key for one in _DERIVING for mesh in one.meshes for key in mesh.keys if "parallel" in key
}
"""Degrees that files set as attributes; short names such as tp are attributes of anything."""
WRAPPERS = {"Config", "Partial"}
"""Names of the classes whose first argument is such a class."""
TRAINERS = {"Trainer", "Fabric"}
"""Names of the classes whose arguments complete those of such a class."""
DERIVED = (
    r"\.(?:(?:tensor|pipeline|expert)_model_parallel_size|(?:tensor|pipeline|context|expert"
    r"|data)_parallel(?:_shard|_replicate)?_degree)[ \t]*=[^=]|\breplace\([^)]*_parallel_"
)
"""Regular expression of what makes a derived configuration."""
# All of their arguments that end so are degrees.
_STRICT = {"ParallelismConfig", "ParallelDims"}


def read_degrees(
    source: Reader,
    calls: Sequence[tuple[ast.Call, Arguments]],
    call: ast.Call,
    given: Arguments,
    where: Source,
    world_size: int | None,
) -> JobFile:
    """The jobs of a call with degrees, or none. Raises UnknownMesh."""
    called = _find_class(source, call)
    names = given.named.keys()
    framework = next(
        (
            one
            for one in FRAMEWORKS
            if called in one.classes and any(names & set(mesh.keys) for mesh in one.meshes)
        ),
        None,
    )
    if framework is None and called not in _STRICT:
        return JobFile()
    meshes = () if framework is None else framework.meshes
    others = names - {"world_size", *(key for mesh in meshes for key in mesh.keys)}
    is_open = any(key.endswith(("_size", "_degree")) for key in others)
    # The first one of a wrapper is the class. Of an engine, only a number may be a size.
    passed = given.positional[source.resolve_callee(call.func) in WRAPPERS :]
    if any(mesh.roles.get("dp") == "apart" for mesh in meshes):
        passed = [one for one in passed if isinstance(one, Whole)]
    if passed or not given.is_complete or (called in _STRICT and is_open):
        raise UnknownMesh(f"the arguments {source.shorten(call)} are not read; {RUN}")
    if framework is None:
        return JobFile()
    settings = _read_arguments(source, call, given)
    end = max(source.find_span(one.value)[1] for one in call.keywords)

    def insert(after: Setting, key: str, size: int) -> Edit:
        return Edit(end, end, f", {key}={size}")

    for other, values in calls:
        if _find_class(source, other) in TRAINERS:
            settings += _read_arguments(source, other, values)
    document = Document(where.file, source.text, "python", settings, insert)
    return read_document(document, world_size, framework, where)


def _find_class(source: Reader, call: ast.Call) -> str:
    called = source.resolve_callee(call.func)
    if called in WRAPPERS and call.args and isinstance(call.args[0], ast.Name | ast.Attribute):
        return source.resolve_callee(call.args[0])
    return called


def _read_arguments(source: Reader, call: ast.Call, given: Arguments) -> list[Setting]:
    settings = []
    nodes = {one.arg: one.value for one in call.keywords}
    for key, value in given.named.items():
        node = nodes.get(key, call)
        why = f"{key}={source.shorten(node)} is not a constant; {RUN}"
        # An object of a class, as in ddp=run.Config(...), is no size.
        is_part = isinstance(value, Record) and value.path.rpartition(".")[2][:1].isupper()
        known = value if is_constant(value) else (Nested if is_part else Computed)(why)
        settings.append(Setting(key, known, node.lineno, key))
    return settings


def read_changed(
    source: Reader,
    record: Record,
    lines: Mapping[str, int],
    name: str,
    world_size: int | None,
) -> JobFile:
    """The jobs of a configuration whose attributes the file sets; ``lines`` has those of each.
    Raises UnknownMesh if it is made elsewhere.
    """
    framework = next(
        (one for one in _DERIVING if any(match(one.mark, key) for key in lines)),
        None,
    )
    if framework is None:
        return JobFile()
    # A recipe of Megatron Bridge sets all sizes that are not 1.
    is_whole = {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
    } <= lines.keys()
    made = record.path.rpartition(".")[2]
    if made.startswith("Inference"):
        return JobFile()  # of torchtitan's generator
    if made not in framework.classes and not is_whole:
        raise UnknownMesh(f"the configuration that is changed is made in another file; {RUN}")
    if record.fields is None:
        raise UnknownMesh(f"the configuration may have further degrees; {RUN}")
    settings = []
    keys = {key for one in framework.meshes for key in one.keys}
    first = min(lines.values())
    for key, value in record.fields.items():
        why = "depends on a condition" if isinstance(value, Either) else "is not a constant"
        shown: object = Computed(f"{key} {why}; {RUN}") if key in keys else ""
        known = value if is_constant(value) else shown
        settings.append(Setting(key, known, lines.get(key, first), key))

    def insert(after: Setting, key: str, size: int) -> None:
        return None

    document = Document(name, source.text, "python", settings, insert)
    return read_document(
        document,
        world_size,
        framework,
        Source(name, first),
    )


# A file of a training job makes a few.
_MAX_MESHES = 256
_TOO_MANY = f"more than {_MAX_MESHES} meshes in one file; give them one by one"
_INSTALLS = {"install", "installed", "uninstall"}
_GROUPS = {
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "shrink_group",
    "_set_pg_options",
}
_OPTIONS = ("contract", "path", "policy", "inner", "audit", "strict", "timeout")
_POLICY = "deterministic"
# Collectives outside DTensor, and the groups that they need.
_COLLECTIVES = ("all_reduce", "reduce_scatter", "get_group", "get_all_groups")
# What makes ranks: the first argument of Colossal-AI's DeviceMesh, where torch's has a device type.
_RANKS = {"arange", "range", "tensor", "Tensor"}
_MAKERS = {"init_device_mesh", "DeviceMesh"}
# Calls of torch after which DTensor reduces.
_DTENSOR = {"DTensor", "distribute_tensor", "distribute_module", "redistribute", "from_local"}
_FSDP1 = {"FullyShardedDataParallel", "FSDP"}
_DDP = {"DistributedDataParallel", "DDP", "replicate"}
_NAMES = ("init_device_mesh", *CLASSES)
_EVERY_NAME = {*_NAMES, "DeviceMesh"}
# A `DeviceMesh` that is made, renamed or passed on, and not only the type of an argument.
_MARK = re.compile(
    rf"\b(?:{'|'.join(_NAMES)})\b|\bDeviceMesh(?:\s*[(]|\.|\s+as\b)"
    rf"|[=(]\s*(?:\w+\.)*DeviceMesh\b(?=\s*(?:[,)\n]|$))|{DERIVED}"
)
# Part of each match. Finding these first takes a tenth of the time.
_PARTS = (*_NAMES, "DeviceMesh", "_parallel_")


def recognises(name: str, text: str) -> bool:
    """Whether this is Python, by its name, or by its calls if it has no ending."""
    if name.endswith((".py", ".pyi")):
        return True
    return "." not in name.rpartition("/")[2] and makes_meshes(text) and "import" in text


def makes_meshes(text: str) -> bool:
    """Whether the text names a function or class that makes meshes."""
    return any(part in text for part in _PARTS) and bool(_MARK.search(text))


def read(
    name: str,
    text: str,
    *,
    world_size: int | None,
    per_node: int | None = None,
    arguments: Sequence[str] = (),
) -> JobFile:
    """A job for each mesh of sizes that are constants in the file. ``world_size`` is the value of
    ``get_world_size()`` and ``int(os.environ["WORLD_SIZE"])``, ``per_node`` that of
    ``device_count()``, ``arguments`` are those of the program.
    """
    if not makes_meshes(text):
        return JobFile()
    source = MeshReader(parse(name, text), text, world_size, per_node)
    source.arguments = arguments
    try:
        source.read_file()
    except _TooMany:
        raise LayoutError(f"{name}: {_TOO_MANY}") from None
    except (TooLong, RecursionError):
        return JobFile(skipped=(Skipped(Source(name), f"more calls than are followed; {RUN}"),))
    jobs, skipped = _list_meshes(source, name)
    files: list[JobFile] = []
    for call, given in source.degrees:
        where = Source(name, call.lineno)
        try:
            files.append(read_degrees(source, source.degrees, call, given, where, world_size))
        except UnknownMesh as unknown:
            skipped.append(Skipped(where, str(unknown)))
    for record, lines in source.changes.items():
        where = Source(name, min(lines.values()))
        try:
            files.append(read_changed(source, record, lines, name, world_size))
        except (UnknownMesh, LayoutError) as error:
            # Configurations of one file are for jobs of different numbers of ranks.
            why = str(error.args[0]).removeprefix(f"{where}: ")
            skipped.append(Skipped(where, why))
    # Of Lightning's Trainer, whose arguments all calls have. Other meshes are of other jobs.
    launch = next((one for one in files if one.stated and not jobs), JobFile())
    jobs += [job for one in files for job in one.jobs]
    skipped += [two for one in files for two in one.skipped]
    if len(jobs) + len(skipped) > _MAX_MESHES:
        raise LayoutError(f"{name}: {_TOO_MANY}")
    # A function that is called twice with one shape makes one mesh.
    jobs.sort(key=lambda job: job.source.line or 0)
    options = {one.partition("=")[0] for one in arguments if one.startswith("--")}
    return replace(
        launch,
        jobs=tuple(dict.fromkeys(jobs)),
        skipped=tuple(dict.fromkeys(skipped)),
        is_read=False,
        one_axis=tuple(dict.fromkeys(source.one_axis)),
        takes_arguments=bool(options) and options <= source.options,
    )


def _list_meshes(source: MeshReader, name: str) -> tuple[list[Job], list[Skipped]]:
    """The jobs of the meshes that calls make, and those that are unknown."""
    jobs: list[Job] = []
    skipped = [Skipped(Source(name, line), why) for line, why in source.notes]
    called = {source.resolve_callee(call.func) for call in source.calls}
    for call in source.calls:
        if call not in source.read_calls and source.resolve_callee(call.func) in _EVERY_NAME:
            why = f"{source.shorten(call)} is not followed; {RUN}"
            skipped.append(Skipped(Source(name, call.lineno), why))
    roots = sorted(
        source.roots.values(),
        key=lambda one: (one.call.lineno, one.call.col_offset),
    )
    for root in roots:
        where = Source(name, root.call.lineno)
        if isinstance(root.error, MeshplanError):
            raise add_source(where, root.error)
        if root.error is not None:
            # A split axis has a mesh that is unknown.
            if root.error.has_one_axis and "_unflatten" not in source.text:
                source.one_axis.append(where)
            else:
                skipped.append(Skipped(where, str(root.error)))
        elif not root.is_split:
            job = _make_job(source, root, where, called)
            jobs.append(replace(job, flattened=_list_flattened(root, source.flattened)))
    return jobs, skipped


class _TooMany(Exception):
    """The file makes more meshes than are judged."""


class _Contract(NamedTuple):
    """A call that sets a contract, after ``place`` meshes."""

    path: Path
    given: Arguments
    moment: Moment
    place: int


class MeshReader(Reader):
    """Reads the meshes that calls make (``roots``), their parts (``uses``), and classes that take
    degrees (``degrees``). ``changes``: configurations whose degrees are set, with the lines.
    ``notes``: lines with what is not read, and why. ``flattened``: names in slices of unknown
    meshes. ``modules``: first parts of imported names.
    """

    def __init__(
        self,
        tree: ast.Module,
        text: str,
        world_size: int | None,
        per_node: int | None,
    ) -> None:
        super().__init__(tree, text, world_size, per_node)
        self.roots: dict[object, Root] = {}
        self.uses = Uses()
        self.degrees: list[tuple[ast.Call, Arguments]] = []
        self.changes: dict[Record, dict[str, int]] = {}
        self.notes: list[tuple[int, str]] = []
        self.flattened: list[tuple[str, ...]] = []
        self.one_axis: list[Source] = []
        self._contracts: list[_Contract] = []
        names: list[str | None] = []
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                names += [node.module] * (not node.level)
            elif isinstance(node, ast.Import):
                names += [one.name for one in node.names]
        self.modules = {name.partition(".")[0] for name in names if name}

    def answer(self, path: Path, given: Arguments, node: ast.Call) -> Value:
        name = path.last
        if name in _GROUPS or name in _INSTALLS:
            place = len(self.roots)
            self._contracts.append(_Contract(path, given, self.moment, place))
        for one in given:
            if "init_device_mesh" in (one, getattr(one, "last", None)):
                why = f"init_device_mesh is passed on: its calls cannot be read; {RUN}"
                self.notes.append((node.lineno, why))
        if name in _MAKERS:
            return self._add_root(node, lambda: self._read_mesh(name, given, node))
        if name in CLASSES or name in WRAPPERS or name in TRAINERS:
            self.degrees.append((node, given))
        if path.name.endswith("DeviceMesh.from_group"):
            self.notes.append((node.lineno, f"a mesh of groups that the program makes; {RUN}"))
        if name == "_flatten" and isinstance(node.func, ast.Attribute):
            self.flattened.append(_read_slice(node.func.value))
        if name == "partial" and given.positional and isinstance(given.positional[0], Path):
            name = given.positional[0].last
            given = replace(given, positional=given.positional[1:])
        self.uses.add_call(name, given)
        return None

    def note_attribute(self, owner: Value, name: str, line: int) -> None:
        if name in ATTRIBUTES:
            for one in list_values(owner):
                record = one if isinstance(one, Record) and one.owner is None else Record({})
                self.changes.setdefault(record, {})[name] = line

    def find_item(self, value: Value, index: Value) -> Value:
        names = _read_names(index)
        found = value.take(names) if isinstance(value, Mesh) and names else None
        return UNKNOWN if found is None else found

    def call_method(self, value: Value, name: str, given: Arguments, node: ast.Call) -> Value:
        if isinstance(value, Record) and value.path.endswith("ArgumentParser"):
            return self._call_parser(value, name, given)
        if not isinstance(value, Mesh):
            return UNKNOWN
        first = next(iter(given.positional), None)
        match name:
            case "_flatten":
                names = _read_names(given.named.get("mesh_dim_name", first))
                flat = value.flatten(names[0] if names else None)
                if flat.axes[0].name is not None:
                    value.root.flattened[flat.axes[0].name] = flat.axes[0].of
                return flat
            case "_unflatten":
                value.root.is_split = True
                return self._add_root(node, lambda: self._split(value.root.mesh, given, node))
            case "get_group":
                where = given.named.get("mesh_dim", first)
                if where is None:
                    return value.flatten()
                axis = _find_axis(value, where)
                return UNKNOWN if axis is None else Mesh(value.root, (axis,))
            case "__getitem__":
                return self.find_item(value, first)
        return UNKNOWN

    def _call_parser(self, parser: Record, name: str, given: Arguments) -> Value:
        """The value of a method of ``argparse.ArgumentParser``; the default of an argument counts
        as its value, unless the program gets another one.
        """
        match name:
            case "add_argument_group" | "add_mutually_exclusive_group":
                return parser
            case "add_argument":
                names = [str(one) for one in given.positional if isinstance(one, Text)]
                long = [one for one in names if one.startswith("--")] or names or [""]
                dest = given.named.get("dest", long[0].lstrip("-").replace("-", "_"))
                self.options.update(names)
                found = read_default(given.named.get("default")) if given.is_complete else UNKNOWN
                passed = find_argument(self.arguments, names)
                found = found if passed is None else passed
                self.set_field(parser, dest if isinstance(dest, str) else None, found)
            case "set_defaults":
                self.forget_fields(parser)
            case "parse_args" | "parse_known_args":
                is_known = parser.fields is not None and given.is_complete
                is_known &= not any(isinstance(one, Items) for one in given.positional)
                is_known &= not given.named
                fields = dict(parser.fields or {}) if is_known else None
                made = Record(fields, None, "Namespace", moment=self.moment)
                both = Items([(made, (0, 0)), (UNKNOWN, (0, 0))], is_tuple=True)
                return both if name == "parse_known_args" else made
        return UNKNOWN

    def has_exact_backend(self, root: Root) -> bool:
        """Whether the backend reduces under the exact order in all groups, and refuses the rest."""
        given = self._find_contract(root, "init_process_group", _GROUPS)
        keywords = {key.arg for call in self.calls for key in call.keywords}
        if given is None or "backend_override" in keywords:
            return False
        name = given.named.get("backend", next(iter(given.positional), None))
        options = _find_made(given.named.get("pg_options"), "BackendOptions")
        if name != "meshplan" or options is None:
            return False
        fields = dict(zip(_OPTIONS, options.positional, strict=False)) | (options.fields or {})
        return fields.get("strict") is True and _is_exact(fields)

    def installs_exact(self, root: Root) -> bool:
        """Whether ``meshplan.install`` runs all DTensor reductions under the exact order."""
        given = self._find_contract(root, "install", _INSTALLS)
        called = {self.resolve_callee(call.func) for call in self.calls}
        others = any(name.startswith(_COLLECTIVES) for name in called)
        return given is not None and not given.positional and not others and _is_exact(given.named)

    def _find_contract(self, root: Root, name: str, others: Set[str]) -> Arguments | None:
        """The arguments of the one call that always runs before a mesh is made, if it does."""
        nodes = [one for one in self.nodes if isinstance(one, ast.Name | ast.Attribute)]
        is_one = sum(self.resolve_callee(one) in others for one in nodes) == 1
        found = [one for one in self._contracts if one.path.last == name and one.path.is_imported]
        if not is_one or len(found) != 1 or "meshplan" not in self.modules:
            return None
        (run, conditions), last = found[0].moment, root.moment[0]
        earlier = run in (0, last) and not conditions and found[0].place < root.place
        is_whole = earlier and found[0].given.is_complete
        return found[0].given if is_whole else None

    def _add_root(self, node: ast.Call, make: Callable[[], MeshCall]) -> Value:
        """The mesh that a call makes."""
        root = Root(node, moment=self.moment, place=len(self.roots) + 1)
        try:
            root.mesh = make()
        except (UnknownMesh, MeshplanError) as error:
            root.error = error
        # A loop is read twice.
        root = self.roots.setdefault((node, self.stack, root.mesh and root.mesh.layout), root)
        if len(self.roots) > 4 * _MAX_MESHES:  # whatever is one mesh in the end
            raise _TooMany
        return UNKNOWN if root.mesh is None else root.view()

    def _read_mesh(self, called: str, given: Arguments, node: ast.Call) -> MeshCall:
        key = "mesh_shape" if called == "init_device_mesh" else "mesh"
        written = _list_written(node, key, 1)
        if key not in given.named and len(given.positional) < 2:
            raise UnknownMesh(f"{called} is called without its second argument here; {RUN}")
        shape = given.named.get(key, next(iter(given.positional[1:]), None))
        if "mesh_dim_names" not in given.named and not given.is_complete:
            raise UnknownMesh(f"{called} is called with ** here, which may name axes; {RUN}")
        names = _list_written(node, "mesh_dim_names", 2)
        labels, places = self._read_labels(given.named.get("mesh_dim_names"), names)
        if called == "DeviceMesh":
            first = next(iter(given.positional), None)
            made = isinstance(first, Record) and first.path.rpartition(".")[2] in _RANKS
            if made or isinstance(first, Items | Grid):
                raise UnknownMesh(f"a DeviceMesh of another library takes ranks first; {RUN}")
            return self._read_ranks(shape, labels, places, written)
        if not isinstance(shape, Items) or shape.entries is None:
            raise UnknownMesh(f"the shape {self.shorten(written or node)} is not a constant; {RUN}")
        sizes = self._read_sizes(shape, written)
        layout = make_layout([size for size, _ in sizes], labels)
        return MeshCall(layout, self, places, sizes)

    def _split(self, world: MeshCall | None, given: Arguments, node: ast.Call) -> MeshCall:
        """The mesh whose axes are parts of the one axis of a mesh."""
        if world is None or len(world.layout.sizes) > 1 or not world.sizes:
            raise UnknownMesh(f"the parts of an axis of several are not read; {RUN}")
        order = ("dim", "mesh_shape", "mesh_dim_names")
        named = dict(zip(order, given.positional, strict=False)) | given.named
        named["mesh_shape"] = named.get("mesh_sizes", named.get("mesh_shape"))
        mesh = self._read_mesh("init_device_mesh", replace(given, named=named), node)
        count = world.sizes[0][0] if world.total is None else world.total
        if mesh.layout.world_size != count or mesh.layout.names is None:
            raise LayoutError(
                f"_unflatten needs one name for each size, and sizes that fill {count}, got "
                f"{' x '.join(map(str, mesh.layout.sizes))}; use other sizes"
            )
        return mesh._replace(total=count)

    def _read_labels(
        self, given: Value, written: ast.expr | None
    ) -> tuple[list[str] | None, list[Span]]:
        """The names of the axes, if they have some, and the place of each."""
        if given is None:
            return None, []
        shown = self.shorten(written) if written is not None else "this"
        if not isinstance(given, Items) or given.entries is None:
            raise UnknownMesh(f"mesh_dim_names={shown} is not a constant; {RUN}")
        for place, (name, _) in enumerate(given.entries):
            if not isinstance(name, Text):
                shown = self._show_part(written, place) or shown
                raise UnknownMesh(
                    f"{shown} in mesh_dim_names is not a constant; give it with --mesh"
                )
        return [str(name) for name, _ in given.entries], [at for _, at in given.entries]

    def _show_part(self, written: ast.expr | None, place: int) -> str:
        parts = getattr(written, "elts", [])
        return self.shorten(parts[place]) if place < len(parts) else ""

    def _read_sizes(self, shape: Items, written: ast.expr | None) -> list[tuple[Whole, Span]]:
        entries = shape.entries or []
        if len(entries) > MAX_AXES:
            raise LayoutError(f"a mesh has up to {MAX_AXES} axes, got {len(entries)}")
        for place, (size, _) in enumerate(entries):
            if not isinstance(size, Whole):
                ranks = isinstance(size, Unknown) and size.ranks
                shown = self._show_part(written, place) or (
                    "a size of the shape" if written is None else self.shorten(written)
                )
                raise UnknownMesh(
                    f"{shown} is not a constant; {'pass --world-size, ' * ranks}{RUN}",
                    has_one_axis=len(entries) == 1,
                )
        return list(entries)

    def _read_ranks(
        self,
        value: Value,
        labels: list[str] | None,
        places: list[Span],
        written: ast.expr | None,
    ) -> MeshCall:
        """The mesh of listed ranks, ``arange(40).view(8, 5)`` and the like."""
        shown = "here" if written is None else self.shorten(written)
        if isinstance(value, Items):
            ranks = _list_nested(value, 0)
            if ranks is not None:
                layout = make_layout(flatten_ranks(ranks)[0], labels, ranks)
                return MeshCall(layout, self, places, listed=value.span)
        base = value
        while isinstance(base, Grid) and not base.is_changed and base.base is not None:
            base = base.base
        if not isinstance(value, Grid) or base.is_changed or not isinstance(value.count, Whole):
            is_counted = isinstance(value, Grid) and not base.is_changed and value.sizes is None
            raise UnknownMesh(
                f"the ranks {shown} are not constants; {RUN}",
                has_one_axis=is_counted,
            )
        count = value.count
        sizes = [(count, count.span)]
        if value.sizes is not None:
            if value.sizes.entries is None:
                raise UnknownMesh(f"the ranks {shown} are not constants; {RUN}")
            sizes = self._read_sizes(value.sizes, None)
        values = [int(size) for size, _ in sizes]
        if values.count(-1) == 1:
            values[values.index(-1)] = count // max(1, -math.prod(values))
            pairs = zip(values, sizes, strict=True)
            sizes = [(Whole.at(value, *at), at) for value, (_, at) in pairs]
        layout = make_layout(values, labels)
        if layout.world_size != count:
            raise LayoutError(
                f"{count} ranks do not fill the shape {' x '.join(map(str, values))}; "
                f"use arange({layout.world_size})"
            )
        return MeshCall(layout, self, places, sizes, count)


def _is_exact(given: Mapping[str, Value]) -> bool:
    """Whether the arguments name the exact order, and nothing that leaves a reduction out."""
    contract = _find_made(given.get("contract"), "Contract")
    path = given.get("path", "auto")
    if contract is None or given.get("policy", _POLICY) != _POLICY:
        return False
    orders = [*contract.positional, *(contract.fields or {}).values()]
    return orders == ["exact"] and isinstance(path, str) and path != "native"


def _find_made(value: Value, name: str) -> Record | None:
    """The object, if a class of meshplan makes it."""
    pattern = rf"meshplan\b.*\.{name}"
    is_made = isinstance(value, Record) and re.fullmatch(pattern, value.path)
    return value if is_made else None


def _list_written(node: ast.Call, key: str, position: int) -> ast.expr | None:
    """The expression that a call passes under a name or at a position."""
    named = [one.value for one in node.keywords if one.arg == key]
    return next(iter([*named, *node.args[position : position + 1]]), None)


def _list_nested(value: Value, depth: int) -> object:
    """Nested lists of numbers; ``None`` if an item is not a constant."""
    if isinstance(value, Whole):
        return int(value)
    if not isinstance(value, Items) or value.entries is None or depth > 32:
        return None
    found = [_list_nested(one, depth + 1) for one, _ in value.entries]
    return None if None in found else found


def _read_names(value: Value) -> list[str]:
    """The names in ``mesh["a", "b"]``; empty if one is unknown."""
    parts = [value]
    if isinstance(value, Items):
        parts = [one for one, _ in value.entries or ()]
    return [str(one) for one in parts] if all(isinstance(one, Text) for one in parts) else []


def _read_slice(node: ast.expr) -> tuple[str, ...]:
    """The names of ``mesh["a", "b"]`` or ``mesh["a"]``; empty for anything else."""
    if not isinstance(node, ast.Subscript):
        return ()
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    texts = [read_string(item) for item in items]
    return tuple(text for text in texts if text is not None) if None not in texts else ()


def _find_axis(mesh: Mesh, where: Value) -> Axis | None:
    """The axis of a name or a position."""
    if isinstance(where, Whole):
        return mesh.axes[where] if -len(mesh.axes) <= where < len(mesh.axes) else None
    found = mesh.take([where]) if isinstance(where, Text) else None
    return None if found is None else found.axes[0]


def _make_job(source: MeshReader, root: Root, where: Source, called: Set[str]) -> Job:
    """The job of a mesh that a call makes."""
    mesh, uses = root.mesh, source.uses
    assert mesh is not None
    roles, kinds = uses.find_roles(root), uses.find_kinds(root)
    framework: Framework = "dtensor"
    program: Program | None = None
    if kinds & {"fsdp2", "fsdp1"}:
        framework = "fsdp2"
        program = None if "fsdp2" in kinds else "fsdp1"
    elif "ddp" in kinds:
        framework = "ddp"
    elif "dtensor" not in kinds:
        # The file does not show what reduces along this mesh, but perhaps what reduces in it.
        if "fully_shard" in called or called & _FSDP1:
            framework = "fsdp2"
            program = None if "fully_shard" in called else "fsdp1"
        elif called & _DDP:
            framework = "ddp"
    # A mesh that is not followed is this one, if there is no other.
    is_only = sum(not other.is_split for other in source.roots.values()) == 1
    if framework == "fsdp2" and is_only and uses.unread & {"fsdp2", "fsdp1"}:
        roles = assume_roles(mesh.layout.axes, roles, framework)
    is_torch = (framework != "dtensor" and program is None) or "dtensor" in kinds
    is_torch |= "dtensor" in uses.unread and bool(called & _DTENSOR)
    found = find_program_of_modules(source.modules, torch_reduces=is_torch)
    if program is not None and found in ("unknown", "torch"):
        found = program
    is_exact = found in ("torch", "fsdp1") and source.has_exact_backend(root)
    # `install` does not reach what FSDP2 and DDP reduce, nor calls that are not seen here.
    if found == "torch" and framework == "dtensor" and kinds <= {"dtensor", "model"}:
        is_exact |= source.installs_exact(root)
    return Job(
        mesh.layout,
        where,
        roles=roles,
        framework=framework,
        sequence_parallel="SequenceParallel" in called,
        exact=is_exact,
        rewrite=mesh.rewrite,
        program=found,
    )


def _list_flattened(root: Root, others: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The axes of each mesh that the file flattens: ``mesh["a", "b"]._flatten()``."""
    assert root.mesh is not None
    axes = root.mesh.layout.axes
    found = dict.fromkeys(tuple(axes[i] for i in of) for of in root.flattened.values())
    found |= dict.fromkeys(names for names in dict.fromkeys(others) if set(names) <= set(axes))
    return tuple(names for names in found if len(names) > 1)
