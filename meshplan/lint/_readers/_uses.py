"""The meshes of a Python file, and the roles of their axes from the calls that get each mesh.

Sources of positions and names of arguments: torch 2.11 to 2.15, ``distributed/fsdp``,
``distributed/_composable``, ``distributed/tensor``, ``distributed/pipelining``,
``nn/parallel/distributed.py``. ``apply_...`` are torchtitan's own functions.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from meshplan.errors import MeshplanError
from meshplan.layout import Layout
from meshplan.lint._readers._constants import Reader
from meshplan.lint._readers._numbers import (
    Edit,
    UnknownMesh,
    Whole,
    apply_edits,
)
from meshplan.lint._readers._values import (
    Arguments,
    Items,
    Moment,
    Path,
    Record,
    Span,
    Value,
    list_values,
)
from meshplan.lint._roles import Role, find_role

_Kind = Literal["fsdp2", "fsdp1", "ddp", "dtensor", "model", "pipeline", "context"]


class _Argument(NamedTuple):
    """The argument that takes a mesh or a group: its position and its names."""

    kind: _Kind
    position: int | None
    names: tuple[str, ...]


_MESH = ("device_mesh", "mesh")
CALLS: Mapping[str, _Argument] = {
    "fully_shard": _Argument("fsdp2", 1, ("mesh",)),
    "apply_fsdp": _Argument("fsdp2", 1, ("dp_mesh", "mesh", "device_mesh")),
    "FullyShardedDataParallel": _Argument("fsdp1", 1, ("device_mesh", "process_group")),
    "FSDP": _Argument("fsdp1", 1, ("device_mesh", "process_group")),
    "DistributedDataParallel": _Argument("ddp", 6, ("process_group", "device_mesh")),
    "DDP": _Argument("ddp", 6, ("process_group", "device_mesh")),
    "replicate": _Argument("ddp", 1, ("device_mesh", "mesh", "process_group")),
    "apply_ddp": _Argument("ddp", 1, ("dp_mesh", "device_mesh")),
    "apply_replicate": _Argument("ddp", 1, ("dp_mesh", "device_mesh")),
    "parallelize_module": _Argument("model", 1, _MESH),
    "apply_tp": _Argument("model", 1, ("tp_mesh", "device_mesh")),
    "apply_non_moe_tp": _Argument("model", 1, ("tp_mesh", "device_mesh")),
    "from_pretrained": _Argument("model", None, ("device_mesh",)),
    "PipelineStage": _Argument("pipeline", 6, ("group",)),
    "build_stage": _Argument("pipeline", 4, ("group",)),
    "context_parallel": _Argument("context", 0, ("mesh",)),
    "distribute_tensor": _Argument("dtensor", 1, _MESH),
    "distribute_module": _Argument("dtensor", 1, _MESH),
    "from_local": _Argument("dtensor", 1, _MESH),
    **{
        name: _Argument("dtensor", None, ("device_mesh",))
        for name in (
            "zeros",
            "ones",
            "empty",
            "full",
            "rand",
            "randn",
            "redistribute",
        )
    },
}
# Ranks of a mesh that are written out one by one.
_MAX_LISTED = 4096
# Arguments of any other function whose names say what they are for.
NAMED = ("_mesh", "_group", "_process_group", "_device_mesh")
_BY_PRIORITY: tuple[Role, ...] = (
    "apart",
    "experts",
    "model",
    "shard",
    "replicate",
)


class MeshCall(NamedTuple):
    """A mesh that a file makes."""

    layout: Layout
    source: Reader
    names: Sequence[Span]  # the place of each axis's name; empty for a mesh without names
    # Of the axes with their places in the shape, if the file has a shape
    sizes: Sequence[tuple[Whole, Span]] = ()
    total: Whole | None = None  # the number of ranks, if the file has it next to the shape
    listed: Span | None = None  # the place of the ranks, if the file lists them

    def rewrite(self, layout: Layout) -> str | None:
        """The file with another mesh of the same axes; ``None`` if it cannot express that."""
        if not self.sizes and self.listed is None:
            return None
        axes = self.layout.axes
        moved = layout.axes != axes
        if sorted(layout.axes) != sorted(axes) or (moved and not self._can_move(layout)):
            return None
        text = self.source.text
        edits = []
        # The text of a name or size moves as it is written: a constant stays a constant.
        if moved:
            name_of = dict(zip(axes, self.names, strict=True))
            for place, axis in zip(self.names, layout.axes, strict=True):
                edits.append(Edit(*place, text[slice(*name_of[axis])]))
        if self.listed is not None:
            if layout.world_size > _MAX_LISTED:
                return None
            edits.append(Edit(*self.listed, str(layout.grid.tolist())))
            return apply_edits(text, edits)
        if layout.ranks != range(layout.world_size):
            return None
        if self.total is not None and self.total != layout.world_size:
            edits.append(Edit(*self.total.span, str(layout.world_size)))
        for (here, at), axis, size in zip(self.sizes, layout.axes, layout.sizes, strict=True):
            old, place = self.sizes[axes.index(axis)]
            if moved:
                edits.append(Edit(*at, text[slice(*place)] if old == size else str(size)))
            elif here != size:
                edits.append(Edit(*here.span, str(size)))
        return apply_edits(text, edits)

    def _can_move(self, layout: Layout) -> bool:
        """Whether the axes have names, and torch accepts their order in ``mesh["a", "b"]``."""
        # torch refuses slices of a mesh whose axes are not in the order of the mesh.
        for node in self.source.nodes:
            parts = (
                node.slice.elts
                if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)
                else []
            )
            names = [getattr(one, "value", None) for one in parts]
            found = [layout.axes.index(name) for name in names if name in layout.axes]
            if len(found) == len(names) and found != sorted(found):
                return False
        return bool(self.names)


@dataclass(eq=False, slots=True)
class Root:
    """A mesh over all ranks that a call makes."""

    call: ast.Call
    mesh: MeshCall | None = None  # its layout; ``None`` if it is unknown
    error: UnknownMesh | MeshplanError | None = None
    # The axes of each flattened mesh, by name
    flattened: dict[str, tuple[int, ...]] = field(default_factory=dict)
    is_split: bool = False  # whether ``_unflatten`` makes another mesh of its parts
    moment: Moment = (0, ())  # as `Reader.moment`, when it was made
    place: int = 0  # among the meshes, in the order in which they are made

    def view(self) -> Mesh:
        """The mesh of all its axes."""
        assert self.mesh is not None
        names = self.mesh.layout.names or (None,) * len(self.mesh.layout.sizes)
        return Mesh(self, tuple(Axis(name, (i,)) for i, name in enumerate(names)))


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a mesh: one of its root, or several that are flattened."""

    name: str | None
    of: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh or a process group: axes of a root."""

    root: Root
    axes: tuple[Axis, ...]

    def take(self, names: Sequence[str]) -> Mesh | None:
        """``mesh["a", "b"]``; ``None`` if an axis is unknown."""
        known = {axis.name: axis for axis in self.axes}
        flat = self.root.flattened
        found = [
            known.get(name) or (Axis(name, flat[name]) if name in flat else None) for name in names
        ]
        return Mesh(self.root, tuple(axis for axis in found if axis)) if None not in found else None

    def flatten(self, name: str | None = None) -> Mesh:
        """The mesh of one axis over all of these."""
        if len(self.axes) == 1 and name is None:
            return self
        label = name or "_".join(str(axis.name) for axis in self.axes)
        return Mesh(
            self.root,
            (Axis(label, tuple(i for axis in self.axes for i in axis.of)),),
        )


@dataclass(slots=True)
class _AxisUse:
    """Evidence about one axis: ``strong`` comes before its name, ``weak`` after it."""

    strong: set[Role] = field(default_factory=set)
    weak: set[Role] = field(default_factory=set)
    kinds: set[_Kind] = field(default_factory=set)


class Uses:
    """The uses of all axes of a file."""

    def __init__(self) -> None:
        self._axes: dict[tuple[Root, int], _AxisUse] = {}
        # Kinds of calls that are given a mesh that is not followed.
        self.unread: set[_Kind] = set()

    def add_call(self, name: str, given: Arguments) -> None:
        """Note what a call of a function from elsewhere does with the meshes that it is given."""
        argument = CALLS.get(name)
        if argument is None:
            self._add_named(given)
            return
        values = [value for key, value in given.named.items() if key in argument.names]
        if argument.position is not None:
            values += given.positional[argument.position : argument.position + 1]
        for value in values:
            meshes = [one for one in list_values(value) if isinstance(one, Mesh)]
            if not meshes and value is not None and not isinstance(value, Items):
                self.unread.add(argument.kind)
            for mesh in meshes:
                self._add(argument.kind, mesh, given)
            if isinstance(value, Items) and argument.kind == "fsdp1":  # groups of hybrid sharding
                roles: tuple[Role, ...] = ("shard", "replicate")
                for (one, _), role in zip(value.entries or (), roles, strict=False):
                    for mesh in list_values(one):
                        if isinstance(mesh, Mesh):
                            self._note(mesh, 0, role, "fsdp1", weak=False)

    def _add_named(self, given: Arguments) -> None:
        """``tp_mesh=mesh["x"]``: the name of an argument of any other function."""
        for key, value in given.named.items():
            ending = next((end for end in NAMED if key.endswith(end)), None)
            role = "unknown" if ending is None else find_role(key.removesuffix(ending))
            for mesh in list_values(value) if role != "unknown" else ():
                if isinstance(mesh, Mesh):
                    for position in range(len(mesh.axes)):
                        one = role if len(mesh.axes) == 1 else None
                        self._note(mesh, position, one, "context", weak=True)

    def _add(self, kind: _Kind, mesh: Mesh, given: Arguments) -> None:
        roles, weak = (
            _find_roles(kind, mesh, given),
            kind in ("context", "dtensor"),
        )
        if kind == "dtensor" and len(mesh.axes) == 1:
            kind = "model"  # one reduction, of an axis
        for position, role in enumerate(roles):
            self._note(mesh, position, role, kind, weak)

    def _note(
        self,
        mesh: Mesh,
        position: int,
        role: Role | None,
        kind: _Kind,
        weak: bool,
    ) -> None:
        for index in mesh.axes[position].of:
            use = self._axes.setdefault((mesh.root, index), _AxisUse())
            use.kinds.add(kind)
            if role is not None:
                (use.weak if weak else use.strong).add(role)

    def find_roles(self, root: Root) -> tuple[Role, ...]:
        """The role of each axis by its use, or ``unknown``."""
        assert root.mesh is not None
        return tuple(self._find_role(root, i, axis) for i, axis in enumerate(root.mesh.layout.axes))

    def _find_role(self, root: Root, index: int, axis: str) -> Role:
        use, named = self._axes.get((root, index), _AxisUse()), find_role(axis)
        if use.strong:
            return named if named in use.strong else _choose(use.strong)
        return _choose(use.weak) if use.weak and named == "unknown" else "unknown"

    def find_kinds(self, root: Root) -> set[_Kind]:
        """The function or class that gets the mesh."""
        return {kind for key, use in self._axes.items() if key[0] is root for kind in use.kinds}


def _choose(roles: set[Role]) -> Role:
    """One of several roles, as of two branches of a program."""
    return next(role for role in _BY_PRIORITY if role in roles)


def _find_roles(kind: _Kind, mesh: Mesh, given: Arguments) -> Sequence[Role | None]:
    """The role that a call assigns to each axis of its mesh."""
    count = len(mesh.axes)
    by_position: tuple[Role, ...] = ("replicate", "shard")
    strategy = given.named.get("sharding_strategy")
    match kind:
        case "fsdp1" if isinstance(strategy, Path) and strategy.last == "NO_SHARD":
            return ["replicate"] * count  # as DDP
        case "fsdp2" | "fsdp1" if count <= 2:
            return by_position[-count:]
        case "ddp":
            return ["replicate"] * count
        case "pipeline":
            return ["apart"] * count
        case "model" if count == 1:
            plans: list[Value] = [
                given.named.get("parallelize_plan"),
                *given.positional[2:3],
            ]
            is_expert = any(isinstance(one, Record) and "Expert" in one.path for one in plans)
            return ["experts" if is_expert else "model"]
        case "context":
            return ["shard"] * count
        case "dtensor":
            whole = mesh.root.mesh is not None and count == len(mesh.root.mesh.layout.sizes)
            return ["replicate" if whole else "model"] * count
    return [None] * count
