"""Python that makes device meshes: ``init_device_mesh``, ``DeviceMesh``, torchtitan's own classes.

The file is parsed and never run: a mesh of values that it computes while running is skipped. What
an axis is follows from what its mesh is given to (`_uses`), and from its name only if nothing does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence, Set
from dataclasses import replace

from meshplan.errors import LayoutError, MeshplanError
from meshplan.lint._finding import Source
from meshplan.lint._job import Job, JobFile, Skipped, add_source
from meshplan.lint._programs import Program, find_program_of_modules
from meshplan.lint._readers._classes import CLASSES, WRAPPERS, read_degrees
from meshplan.lint._readers._contracts import has_exact_backend, installs_exact
from meshplan.lint._readers._derived import DERIVED, read_derived
from meshplan.lint._readers._meshes import MeshValues, Root
from meshplan.lint._readers._numbers import INSTEAD, UnknownMesh
from meshplan.lint._readers._scopes import Scope
from meshplan.lint._readers._source import PythonSource
from meshplan.lint._readers._tree import format_dotted, read_slice
from meshplan.lint._readers._uses import Uses, find_uses
from meshplan.lint._roles import Framework, assume_roles, resolve_roles

# A file of a training job makes a few.
_MAX_MESHES = 256
# Calls of torch after which DTensor reduces.
_DTENSOR = frozenset(
    {"DTensor", "distribute_tensor", "distribute_module", "redistribute", "from_local"}
)
_FSDP1 = frozenset({"FullyShardedDataParallel", "FSDP"})
_DDP = frozenset({"DistributedDataParallel", "DDP", "replicate"})
_NAMES = ("init_device_mesh", *CLASSES)
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


def read(name: str, text: str, *, world_size: int | None) -> JobFile:
    """A job for each mesh of sizes that are constants in the file.

    Args:
        name: of the file.
        text: the source.
        world_size: the value of ``get_world_size()`` and ``int(os.environ["WORLD_SIZE"])``.

    Raises:
        LayoutError: not Python, or an invalid mesh; the message names file and line.
    """
    if not makes_meshes(text):
        return JobFile()
    source = PythonSource(name, text, world_size)
    values = MeshValues(source)
    uses = find_uses(source, values)
    jobs: list[Job] = []
    skipped = [
        Skipped(
            Source(name, use.lineno),
            f"init_device_mesh is passed on, and its calls are not read; {INSTEAD}",
        )
        for use in source.uses
        if source.resolve_callee(use) == "init_device_mesh"
    ]
    called = {source.resolve_callee(call.func) for call, _ in source.calls}
    # Of a mesh from elsewhere, as of an imported function, which may be any of these.
    flattened = [
        read_slice(call.func.value)
        for call, scope in source.calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "_flatten"
        and not values.find_meshes(call.func.value, scope)
    ]
    roots: dict[tuple[ast.Call, Scope], list[Root]] = {}
    for (call, scope, _), root in values.roots.items():
        roots.setdefault((call, scope), []).append(root)
    for call, scope in source.calls:
        where = Source(name, call.lineno)
        try:
            for root in roots.get((call, scope), ()):
                if root.error is not None:
                    raise root.error
                if root.mesh is not None and not root.is_split:
                    job = _make_job(source, values, root, where, uses, called)
                    jobs.append(replace(job, flattened=_list_flattened(root, flattened)))
            callee = source.resolve_callee(call.func)
            if callee in CLASSES or callee in WRAPPERS:
                jobs += read_degrees(source, call, scope, where, world_size)
            elif callee == "from_group" and format_dotted(call.func).endswith(
                "DeviceMesh.from_group"
            ):
                raise UnknownMesh(f"a mesh of groups that the program makes; {INSTEAD}")
        except UnknownMesh as unknown:
            # One axis of any size has no mesh to judge, unless it is split.
            lasting = not unknown.has_one_axis or "_unflatten" in text
            skipped += [Skipped(where, str(unknown))] * lasting
        except MeshplanError as error:
            raise add_source(where, error) from None
        if len(jobs) + len(skipped) > _MAX_MESHES:
            raise LayoutError(
                f"{where}: more than {_MAX_MESHES} meshes in one file; give them one by one"
            )
    derived, unread = read_derived(source, name, world_size)
    jobs += derived
    skipped += unread
    # A function that is called twice with one shape makes one mesh.
    return JobFile(tuple(dict.fromkeys(jobs)), tuple(dict.fromkeys(skipped)))


def _make_job(
    source: PythonSource,
    values: MeshValues,
    root: Root,
    where: Source,
    uses: Uses,
    called: Set[str],
) -> Job:
    """The job of a mesh that a call makes."""
    mesh = root.mesh
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
    is_only = sum(not other.is_split for other in values.roots.values()) == 1
    if framework == "fsdp2" and is_only and uses.unread & {"fsdp2", "fsdp1"}:
        roles = assume_roles(resolve_roles(mesh.layout.axes, roles, framework), framework)
    is_torch = (framework != "dtensor" and program is None) or "dtensor" in kinds
    is_torch |= "dtensor" in uses.unread and bool(called & _DTENSOR)
    found = find_program_of_modules(frozenset(source.modules), torch_reduces=is_torch)
    if program is not None and found in ("unknown", "torch"):
        found = program
    is_exact = found in ("torch", "fsdp1") and has_exact_backend(source, root.call, root.scope)
    # `install` does not reach what FSDP2 and DDP reduce, nor calls that are not seen here.
    if found == "torch" and framework == "dtensor" and kinds <= {"dtensor", "model"}:
        is_exact |= installs_exact(source, root.call, root.scope)
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
