"""Meshes of degree keys: the settings of a file, the framework that reads them, its meshes."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from meshplan._message_text import shorten
from meshplan.errors import LayoutError, MeshplanError
from meshplan.layout import Layout
from meshplan.lint._finding import Source
from meshplan.lint._job import Job, JobFile, Skipped, add_source
from meshplan.lint._programs import Program, find_program_of_text
from meshplan.lint._readers._documents import (
    Degrees,
    Document,
    Setting,
    Unknown,
    count_ranks,
    find_framework,
    find_line,
    find_meshes,
    match,
)
from meshplan.lint._readers._names import check_unread
from meshplan.lint._readers._numbers import (
    UNKNOWN_RANKS,
    Edit,
    UnknownMesh,
    apply_edits,
    order_sizes,
)
from meshplan.lint._readers._tables import Framework, Mesh
from meshplan.lint._roles import Role, find_role
from meshplan.lint._spec import make_layout

# A job has a few.
_MAX_MESHES = 64
_ENGINES = ("vllm", "sglang", "serving")
_EMPTY = ("", "none", "null", "~")


def read_document(document: Document, world_size: int | None) -> JobFile:
    """The jobs of a document; empty if no framework reads it. Raises LayoutError, with the line,
    for sizes that the framework would refuse.
    """
    framework = find_framework(document)
    if framework is None:
        return JobFile()
    launch = count_ranks(document, framework)
    if "world_size" in launch.stated:
        world_size = None
    hosts, total = launch.hosts, launch.world_size
    jobs: list[Job] = []
    skipped: list[Skipped] = []
    is_read = False
    meshes = [*islice(find_meshes(document, framework), _MAX_MESHES + 1)]
    if len(meshes) > _MAX_MESHES:
        why = f"more than {_MAX_MESHES} meshes in one file; give them one by one"
        return JobFile(skipped=(Skipped(Source(document.name), why),))
    for found in meshes:
        line = find_line(found)
        source = Source(document.name, line)
        try:
            # verl's critic has the mesh of its actor, for example.
            known = {(job.layout, job.roles) for job in jobs}
            made = [*_make_jobs(found, source, world_size or total, hosts)]
            is_read |= bool(made)
            # An engine starts its own workers, on as many GPUs of an allocation as it needs.
            counts = made and world_size is None and framework.program not in _ENGINES
            if counts and total not in (None, made[0].layout.world_size):
                raise UnknownMesh(
                    f"its sizes have {made[0].layout.world_size} ranks, and it starts {total}; "
                    "give the mesh with --mesh"
                )
            # One rank has no mesh, but arguments of one rank are what the user asks about.
            least = 1 if document.name == "arguments" else 2
            jobs += [
                job
                for job in made
                if (job.layout, job.roles) not in known and job.layout.world_size >= least
            ]
        except UnknownMesh as unknown:
            skipped.append(Skipped(Source(document.name, unknown.line or line), str(unknown)))
        except MeshplanError as error:
            if total is None or world_size is not None:
                raise add_source(source, error) from None
            # Numbers of hosts in files are often placeholders.
            remedy = "correct this number" if "world_size" in launch.stated else "pass --world-size"
            why = f"{error.args[0]}, or {remedy}"
            skipped.append(Skipped(source, why))
    return JobFile(tuple(jobs), tuple(skipped), None, *launch, is_read=is_read)


def make_document_jobs(
    document: Document, framework: Framework, source: Source, world_size: int | None
) -> tuple[Job, ...]:
    """The jobs of a call in Python, which has the settings of one mesh.

    Raises:
        UnknownMesh: a size is not known.
        LayoutError: sizes that the framework would refuse.
    """
    launch = count_ranks(document, framework)
    if world_size is None or "world_size" in launch.stated:
        world_size = launch.world_size
    return tuple(
        job
        for found in find_meshes(document, framework)
        if found.settings
        for job in _make_jobs(found, source, world_size, launch.hosts)
        if job.layout.world_size > 1
    )


def _make_jobs(
    found: Degrees, source: Source, total: int | None, hosts: int | None
) -> Iterable[Job]:
    """The mesh of the dense layers, and that of the experts if they are parallel. Raises
    UnknownMesh for a size that is not known, LayoutError for sizes that the framework would refuse.
    """
    mesh, settings = found.mesh, found.document.settings
    for pattern, why in mesh.refused.items():
        for text, one in zip(found.document.texts, settings, strict=True):
            if match(pattern, text):
                raise UnknownMesh(f"{why}; give the mesh with --mesh", one.line)
    given = {
        axis: size
        for axis, one in found.settings.items()
        if axis and (size := _read_size(one, mesh)) is not None
    }
    order, experts = _read_orders(mesh, settings)
    # One data axis of any size has no siblings, and so no mesh to judge.
    is_plain = found.document.kind == "document" and set(given.values()) <= {1}
    per_host = any(match(mesh.per_host, text) for text in found.document.texts)
    if total is None and is_plain and (mesh.needs or not mesh.keys) and not per_host:
        return
    check_unread(found, order, given, total)
    sizes = _fill_sizes(found, order, given, total, hosts)
    known = {*given, mesh.rest} - {""}
    sharded, sequence_parallel, program = _read_use(found)

    def make_job(axes: Sequence[str], sizes: Mapping[str, int], keep: Iterable[str]) -> Job:
        # Megatron-LM's data axis has two parts if the optimizer's state has several instances.
        names = {"dp": "dp_shard"} if sizes.get("dp_replicate", 1) > 1 and "dp" in axes else {}
        shown = [axis for axis in axes if sizes[axis] > 1 or axis in keep]
        labels = [names.get(axis, axis) for axis in shown]
        flat = tuple(
            names.get(axis, axis) for axis in shown if axis in mesh.flattened and sizes[axis] > 1
        )
        return Job(
            layout=make_layout([sizes[axis] for axis in shown], labels),
            source=source,
            roles=tuple(_find_role(mesh, axis, sharded) for axis in shown),
            framework=mesh.reduction if sharded else "ddp",
            program=program,
            flattened=(flat,) if len(flat) > 1 else (),
            sequence_parallel=sequence_parallel and sizes.get("tp", 1) > 1,
            rewrite=partial(_rewrite, found, [names.get(axis, axis) for axis in axes], sizes_of),
        )

    sizes_of: Mapping[str, int] = dict(sizes)
    yield make_job(order, sizes, known | mesh.shown)
    if given.get("ep", 1) <= 1 or not experts:
        return
    ranks = math.prod(sizes.values())
    inner = {axis: given.get(axis, sizes.get(axis, 1)) for axis in experts}
    inner["etp"] = given.get("etp", sizes.get("tp", 1) if mesh.expert_tp else 1)
    inner = {axis: inner[axis] for axis in experts}
    left = next(axis for axis in experts if axis in ("edp", "efsdp", "ep_shard"))
    inner[left] = _divide(ranks, inner, left)
    yield make_job(experts, inner, known | mesh.shown)


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
    texts = found.document.texts
    if mesh.fill not in given and any(match(mesh.per_host, text) for text in texts):
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
    return sizes


def _read_use(found: Degrees) -> tuple[bool, bool, Program]:
    """Whether parameters and activations are sharded, and the program that reduces."""
    mesh = found.mesh
    texts = found.document.texts
    sharded = mesh.is_sharded or any(match(mesh.sharded, text) for text in texts)
    sharded = sharded and not any(match(mesh.unsharded, text) for text in texts)
    sequence_parallel = mesh.sequence_parallel
    for text in texts:
        if flag := re.fullmatch(r"(?:.*\.)?(no_)?(?:enable_)?sequence_parallel=(\w+)", text):
            sequence_parallel = (flag[2] == "true") != bool(flag[1])
    program = found.framework.program
    if program == "unknown":
        program = find_program_of_text(found.document.text)
    return sharded, sequence_parallel, program


def _read_size(one: Setting, mesh: Mesh) -> int | None:
    """The size of an axis; ``None`` if it has the ranks that the others leave, or no value."""
    value, axis = one.value, mesh.keys[one.path.rpartition(".")[2]]
    is_rest = axis in (mesh.rest, mesh.fill) or not mesh.rest
    if isinstance(value, Unknown):
        raise UnknownMesh(value.why, one.line)
    if value is None or str(value).lower() in _EMPTY or (is_rest and value in (-1, "auto")):
        return None
    if type(value) is not int:
        if isinstance(value, str) and not re.fullmatch(r"\d+", value):
            shown = f"{one.key}{' ' if one.key.startswith('-') else ' = '}{shorten(value)}"
            raise UnknownMesh(f"{shown} is not an integer; give the mesh with --mesh", one.line)
        raise LayoutError(f"{one.key} must be an integer, got {repr(value)[:40]}")
    if value == 0 and mesh.zero_is_one:
        return 1
    if value == -1 and not is_rest:
        raise UnknownMesh(f"{one.key} = -1 is found by the program; give the mesh with --mesh")
    if value < 1:
        raise LayoutError(
            f"{one.key} must be 1 or more{', or -1 for the rest' if is_rest else ''}, got {value}"
        )
    return value


def _read_orders(
    mesh: Mesh, settings: Iterable[Setting]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of the dense mesh and of the experts' mesh, outermost first."""
    given = ""
    for one in settings:
        for key, names in mesh.orders.items():
            if one.path.rpartition(".")[2] == key and one.value not in (
                False,
                None,
            ):
                if isinstance(one.value, Unknown):
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


def _divide(total: int | None, sizes: Mapping[str, int], rest: str) -> int:
    """The ranks that the other sizes leave to the axis ``rest``."""
    if total is None:
        raise UnknownMesh(f"the size of {rest} {UNKNOWN_RANKS}")
    others = {axis: size for axis, size in sizes.items() if axis != rest}
    taken = math.prod(others.values())
    if total % taken:
        product = " x ".join(f"{axis} {size}" for axis, size in others.items() if size > 1)
        raise LayoutError(
            f"{total} ranks are not a multiple of {product} = {taken}; "
            "use sizes whose product divides the ranks"
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
    wanted = {axis: sizes[axis] for axis in sizes if axis in mesh.keys.values()}
    rest = given.get(mesh.rest)
    if mesh.rest and rest is not None and rest.number is not None:
        # The axis of the rest has a number: it follows from the ranks and the other axes.
        others = math.prod(
            wanted.get(axis, size) for axis, size in old.items() if axis != mesh.rest
        )
        size, left = divmod(layout.world_size, others)
        if left:
            return None
        wanted[mesh.rest] = size
    edits: list[Edit] = []
    places = [one for one in given.values() if one.number is not None][::-1]
    places.sort(key=lambda one: one.line, reverse=True)
    for axis, size in wanted.items():
        one = given.get(axis)
        if one is not None and one.number is not None:
            if one.number.value not in (size, -1):
                edits.append(Edit(one.number.start, one.number.end, str(size)))
        elif axis == mesh.rest or (axis == mesh.fill and one is None):
            continue
        elif size != 1:
            tried = (found.document.insert(at, _find_key(mesh, axis, at), size) for at in places)
            edit = next((edit for edit in tried if edit is not None), None)
            if edit is None or one is not None:
                return None
            edits.append(edit)
    return apply_edits(found.document.text, _join(edits))


def _find_key(mesh: Mesh, axis: str, like: Setting) -> str:
    """The key of an axis that is spelled most like another key of the file."""
    other = like.path.rpartition(".")[2]
    keys = [key for key, one in mesh.keys.items() if one == axis]
    return max(keys, key=lambda key: difflib.SequenceMatcher(None, key, other).ratio())


def _join(edits: Sequence[Edit]) -> Iterator[Edit]:
    """Several insertions at one place as one."""
    added: dict[tuple[int, int], str] = {}
    for edit in edits:
        if edit.start < edit.end:
            yield edit
        else:
            at = (edit.start, edit.end)
            added[at] = added.get(at, "") + edit.new
    yield from (Edit(*at, new) for at, new in added.items())
