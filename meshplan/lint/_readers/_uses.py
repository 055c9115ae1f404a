"""The roles of axes from their use: the calls of a Python file that get each mesh.

Sources of positions and names of arguments: torch 2.11 to 2.15, ``distributed/fsdp``,
``distributed/_composable``, ``distributed/tensor``, ``distributed/pipelining``,
``nn/parallel/distributed.py``. ``apply_...`` are torchtitan's own functions.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from meshplan.lint._readers._mesh_calls import MeshCall
from meshplan.lint._readers._meshes import Items, Mesh, MeshValues, Record, Root, Value
from meshplan.lint._readers._scopes import Scope
from meshplan.lint._readers._source import PythonSource
from meshplan.lint._roles import Role, find_role

_Kind = Literal["fsdp2", "fsdp1", "ddp", "dtensor", "model", "pipeline", "context"]


class _Argument(NamedTuple):
    """The argument that takes a mesh or a group: its position and its names."""

    kind: _Kind
    position: int | None
    names: tuple[str, ...]


_MESH = ("device_mesh", "mesh")
_CALLS: Mapping[str, _Argument] = {
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
        for name in ("zeros", "ones", "empty", "full", "rand", "randn", "redistribute")
    },
}
# Arguments of any other function whose names say what they are for.
_NAMED = ("_mesh", "_group", "_process_group", "_device_mesh")
_BY_PRIORITY: tuple[Role, ...] = ("apart", "experts", "model", "shard", "replicate")


@dataclass(slots=True)
class _AxisUse:
    """What is known of one axis: ``strong`` comes before its name, ``weak`` after it."""

    strong: set[Role] = field(default_factory=set)
    weak: set[Role] = field(default_factory=set)
    kinds: set[_Kind] = field(default_factory=set)


class Uses:
    """The uses of all axes of a file.

    Attributes:
        unread: kinds of calls that are given a mesh that is not followed.
    """

    def __init__(self, roots: Iterable[Root]) -> None:
        self._axes: dict[tuple[Root, int], _AxisUse] = {}
        self._roots = [root for root in roots if root.mesh is not None]
        self.unread: set[_Kind] = set()

    def axis(self, root: Root, index: int) -> _AxisUse:
        """The use of an axis of a root, without that of its parent."""
        return self._axes.setdefault((root, index), _AxisUse())

    def add(self, mesh: Mesh, position: int, role: Role | None, kind: _Kind, weak: bool) -> None:
        """Note the use of one axis of a mesh."""
        for index in mesh.axes[position].of:
            use = self.axis(mesh.root, index)
            use.kinds.add(kind)
            if role is not None:
                (use.weak if weak else use.strong).add(role)

    def find_roles(self, root: Root) -> tuple[Role, ...]:
        """The role of each axis by its use, or ``unknown``."""
        assert root.mesh is not None
        return tuple(self._find_role(root, i, axis) for i, axis in enumerate(root.mesh.layout.axes))

    def _find_role(self, root: Root, index: int, axis: str) -> Role:
        uses = list(self._list_uses(root, index))
        named = find_role(axis)
        strong = {role for use in uses for role in use.strong}
        if strong:
            return named if named in strong else _choose(strong)
        weak = {role for use in uses for role in use.weak}
        return _choose(weak) if weak and named == "unknown" else "unknown"

    def find_kinds(self, root: Root) -> set[_Kind]:
        """What the mesh is given to."""
        assert root.mesh is not None
        count = len(root.mesh.layout.sizes)
        return {k for i in range(count) for use in self._list_uses(root, i) for k in use.kinds}

    def _list_uses(self, root: Root, index: int) -> Iterator[_AxisUse]:
        """The uses of an axis, and of the axes that it was split from."""
        yield self.axis(root, index)
        if root.parent is None or root.mesh is None:
            return
        for i in root.parts[index]:
            yield from self._list_uses(root.parent, i)
        # Dense layers and experts have a mesh each, and the outer axes of both are one.
        same = _describe_axis(root.mesh, index)
        for other in self._roots:
            if other.parent is root.parent and other is not root and other.mesh is not None:
                for i in range(len(other.mesh.layout.sizes)):
                    if _describe_axis(other.mesh, i) == same:
                        yield self.axis(other, i)


def _describe_axis(mesh: MeshCall, index: int) -> tuple[str, int, int]:
    """The name, the size and the stride of an axis."""
    layout = mesh.layout
    return layout.axes[index], layout.sizes[index], math.prod(layout.sizes[index + 1 :])


def _choose(roles: set[Role]) -> Role:
    """One of several roles, as of two branches of a program."""
    return next(role for role in _BY_PRIORITY if role in roles)


def find_uses(source: PythonSource, values: MeshValues) -> Uses:
    """The uses of the axes of all meshes of a file.

    Args:
        source: the file.
        values: its meshes.
    """
    uses = Uses(values.roots.values())
    for call, scope in source.calls:
        name = source.find_name(call.func, scope)
        if name == "partial" and call.args:
            name = source.find_name(call.args[0], scope)
            call = ast.copy_location(ast.Call(call.args[0], call.args[1:], call.keywords), call)
        if source.find_definition(call.func, scope) is not None:
            continue  # what the function of this file does with its arguments is read there
        argument = _CALLS.get(name)
        if argument is None:
            _read_names(call, scope, values, uses)
            continue
        for value in _find_argument(call, scope, argument, values, uses):
            _add_use(argument.kind, value, call, source, values, uses)
    return uses


def _find_argument(
    call: ast.Call, scope: Scope, argument: _Argument, values: MeshValues, uses: Uses
) -> Iterator[Value]:
    """What a call is given as its mesh."""
    nodes = [(one.value, scope) for one in call.keywords if one.arg in argument.names]
    if argument.position is not None and argument.position < len(call.args):
        nodes.append((call.args[argument.position], scope))
    for keyword in call.keywords:
        for record in values.find(keyword.value, scope) if keyword.arg is None else ():
            if isinstance(record, Record):
                nodes += [(one, home) for key, one, home in record.items if key in argument.names]
    for node, home in nodes:
        found = values.find(node, home)
        yield from found
        if not found and not isinstance(node, ast.Constant):
            uses.unread.add(argument.kind)


def _add_use(
    kind: _Kind, value: Value, call: ast.Call, source: PythonSource, values: MeshValues, uses: Uses
) -> None:
    """Note the use of the axes of a mesh, or of the groups of FSDP1's hybrid sharding."""
    if isinstance(value, Items) and kind == "fsdp1":
        pair: tuple[Role, ...] = ("shard", "replicate")
        for (node, home), role in zip(value.items, pair, strict=False):
            for mesh in values.find_meshes(node, home):
                uses.add(mesh, 0, role, kind, weak=False)
    if not isinstance(value, Mesh):
        return
    roles, weak = _find_roles(kind, value, call, source), kind in ("context", "dtensor")
    if kind == "dtensor" and len(value.axes) == 1:
        kind = "model"  # one reduction, of an axis
    for position, role_of_axis in enumerate(roles):
        uses.add(value, position, role_of_axis, kind, weak)


def _find_roles(
    kind: _Kind, mesh: Mesh, call: ast.Call, source: PythonSource
) -> Sequence[Role | None]:
    """The role that a call assigns to each axis of its mesh."""
    count = len(mesh.axes)
    by_position: tuple[Role, ...] = ("replicate", "shard")
    match kind:
        case "fsdp1" if _is_unsharded(call):
            return ["replicate"] * count
        case "fsdp2" | "fsdp1" if count <= 2:
            return by_position[-count:]
        case "ddp":
            return ["replicate"] * count
        case "pipeline":
            return ["apart"] * count
        case "model" if count == 1:
            plan = [one.value for one in call.keywords if one.arg == "parallelize_plan"]
            nodes = [*plan, *call.args[2:3]]
            names = {source.resolve_callee(n.func) for n in nodes if isinstance(n, ast.Call)}
            return ["experts" if any("Expert" in name for name in names) else "model"]
        case "context":
            return ["shard"] * count
        case "dtensor":
            whole = mesh.root.mesh is not None and count == len(mesh.root.mesh.layout.sizes)
            return ["replicate" if whole else "model"] * count
    return [None] * count


def _is_unsharded(call: ast.Call) -> bool:
    """Whether FSDP1 replicates, as DDP does."""
    strategy = next((one.value for one in call.keywords if one.arg == "sharding_strategy"), None)
    return isinstance(strategy, ast.Attribute) and strategy.attr == "NO_SHARD"


def _read_names(call: ast.Call, scope: Scope, values: MeshValues, uses: Uses) -> None:
    """``tp_mesh=mesh["x"]``: the name of an argument of any other function."""
    for keyword in call.keywords:
        ending = next((end for end in _NAMED if (keyword.arg or "").endswith(end)), None)
        if keyword.arg is None or ending is None:
            continue
        role = find_role(keyword.arg.removesuffix(ending))
        for mesh in values.find_meshes(keyword.value, scope) if role != "unknown" else ():
            for position in range(len(mesh.axes)):
                uses.add(mesh, position, role if len(mesh.axes) == 1 else None, "context", True)
