"""The meshes that expressions of a Python file stand for, and the axes that they are made of.

A slice, a flattened mesh and a process group are axes of the mesh that they come from. A name may
stand for several meshes: those of all assignments that may hold where it is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from meshplan.errors import MeshplanError
from meshplan.lint._readers._mesh_calls import MeshCall, MeshReader
from meshplan.lint._readers._numbers import UnknownMesh
from meshplan.lint._readers._scopes import Binding, Scope, exclude_each_other
from meshplan.lint._readers._source import PythonSource
from meshplan.lint._readers._tree import read_string

MAKERS = frozenset({"init_device_mesh", "DeviceMesh"})
_MAX_DEPTH = 60
_MAX_VALUES = 16
_MAX_ROOTS = 256


@dataclass(eq=False, slots=True)
class Root:
    """A mesh over all ranks that a call makes.

    Attributes:
        call: that makes it.
        scope: of the call.
        mesh: its layout; ``None`` if it is unknown.
        error: why it is unknown.
        parent: the mesh that ``_unflatten`` splits, if any.
        parts: for each axis, the axes of ``parent`` that it is, or is a part of.
        flattened: the axes of each flattened mesh, by name.
        is_split: whether another mesh is made of its parts.
    """

    call: ast.Call
    scope: Scope
    mesh: MeshCall | None = None
    error: UnknownMesh | MeshplanError | None = None
    parent: Root | None = None
    parts: tuple[tuple[int, ...], ...] = ()
    flattened: dict[str, tuple[int, ...]] = field(default_factory=dict)
    is_split: bool = False


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
        found = []
        for name in names:
            axis = next((one for one in self.axes if one.name == name), None)
            if axis is None:
                if name not in self.root.flattened:
                    return None
                axis = Axis(name, self.root.flattened[name])
            found.append(axis)
        return Mesh(self.root, tuple(found))

    def flatten(self, name: str | None = None) -> Mesh:
        """The mesh of one axis over all of these."""
        if len(self.axes) == 1 and name is None:
            return self
        label = name or "_".join(str(axis.name) for axis in self.axes)
        return Mesh(self.root, (Axis(label, tuple(i for axis in self.axes for i in axis.of)),))


@dataclass(frozen=True, slots=True)
class Items:
    """A tuple or a list."""

    items: tuple[tuple[ast.expr, Scope], ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Values under names, as of a dict."""

    items: tuple[tuple[str, ast.expr, Scope], ...]


Value: TypeAlias = Mesh | Items | Record


class MeshValues:
    """Follows meshes through a file.

    Args:
        source: the file.

    Attributes:
        roots: all meshes that calls make, by call.
    """

    def __init__(self, source: PythonSource) -> None:
        self._source = source
        self._reader = MeshReader(source)
        self.roots: dict[tuple[ast.Call, Scope, Root | None], Root] = {}
        self._values: dict[tuple[ast.expr, Scope], tuple[Value, ...]] = {}
        self._depth = 0
        calls = [one for one in source.calls if isinstance(one[0].func, ast.Name | ast.Attribute)]
        for call, scope in calls:
            if source.resolve_callee(call.func) in MAKERS:
                self.find(call, scope)
        # A slice may name a mesh that is flattened anywhere: find these names first.
        for method in ("_unflatten", "_flatten", "_flatten"):
            self._values.clear()
            for call, scope in calls:
                if isinstance(call.func, ast.Attribute) and call.func.attr == method:
                    self.find(call, scope)
        self._values.clear()

    def find(self, node: ast.expr, scope: Scope) -> tuple[Value, ...]:
        """All that an expression may stand for."""
        key = (node, scope)
        if key not in self._values:
            if self._depth >= _MAX_DEPTH:
                return ()
            self._values[key] = ()  # while it is unknown: a name may stand for itself
            self._depth += 1
            found = list(dict.fromkeys(self._find(node, scope)))
            self._depth -= 1
            self._values[key] = tuple(found[:_MAX_VALUES])
        return self._values[key]

    def find_meshes(self, node: ast.expr, scope: Scope) -> list[Mesh]:
        """The meshes and groups among `find`."""
        return [value for value in self.find(node, scope) if isinstance(value, Mesh)]

    def _find(self, node: ast.expr, scope: Scope) -> Iterator[Value]:
        match node:
            case ast.Name():
                yield from self._find_name(node, scope)
            case ast.Attribute():
                yield from self._find_attribute(node, scope)
            case ast.Subscript():
                yield from self._find_item(node, scope)
            case ast.Call():
                yield from self._find_call(node, scope)
            case ast.Tuple(items) | ast.List(items):
                yield Items(tuple((item, scope) for item in items))
            case ast.Dict(keys, values):
                pairs = zip(keys, values, strict=True)
                named = ((read_string(key), value) for key, value in pairs if key is not None)
                yield Record(tuple((key, value, scope) for key, value in named if key))
            case ast.DictComp(ast.Name(key), ast.Subscript(base, ast.Name(name))) if key == name:
                yield from self.find(base, scope)  # its items are those of the mesh
            case ast.IfExp(body=body, orelse=orelse):
                yield from (*self.find(body, scope), *self.find(orelse, scope))
            case ast.BoolOp(values=either):
                for one in either:
                    yield from self.find(one, scope)
            case ast.NamedExpr(value=inside) | ast.Await(value=inside):
                yield from self.find(inside, scope)

    def _find_name(self, node: ast.Name, scope: Scope) -> Iterator[Value]:
        binder = scope.find_binder(node.id)
        if binder is None:
            return
        bindings, is_certain = self._list_bindings(node, scope, binder)
        if node.id in binder.arguments and not is_certain:
            yield from self.find(*binder.arguments[node.id])
        for binding in bindings:
            yield from self.find(binding.value, binder)
        if items := binder.items.get(node.id):
            pairs = ((key, one) for key, values in items.items() for one in values)
            yield Record(tuple((key, one, binder) for key, one in pairs))

    def _list_bindings(
        self, node: ast.Name, scope: Scope, binder: Scope
    ) -> tuple[Sequence[Binding], bool]:
        """The assignments that may hold at a name, and whether one of them is certain to run."""
        bindings = binder.bindings.get(node.id, [])
        if scope.origin is not binder.origin:
            return bindings, False
        place = (node.lineno, node.col_offset)
        around = self._source.branches.get(node, ())
        found = []
        for one in reversed(bindings):
            if one.end > place or exclude_each_other(one.branches, around):
                continue
            found.append(one)
            if set(one.branches) <= set(around):
                return found, True
        # In a loop, a later assignment may come first.
        return found or bindings, False

    def _find_attribute(self, node: ast.Attribute, scope: Scope) -> Iterator[Value]:
        resolved = self._source.resolve(node, scope)
        if resolved is not None and resolved[0] is not node:
            yield from self.find(*resolved)
            return
        owner = self._source.find_class(node.value, scope)
        for store in self._source.stores.get(node.attr, ()):
            home = self._source.find_class(store.target.value, store.scope)
            if store.value is None or (owner and home and owner.origin is not home.origin):
                continue
            same = scope.origin is store.scope.origin
            for one in [scope] if same else self._source.find_instances(store.scope):
                yield from self.find(store.value, one)
        method = None if owner is None else owner.definitions.get(node.attr)
        for value in () if method is None else method.returns:  # a property
            yield from self.find(value, method or scope)

    def _find_item(self, node: ast.Subscript, scope: Scope) -> Iterator[Value]:
        names = self._read_names(node.slice, scope)
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        for value in self.find(node.value, scope):
            match value:
                case Mesh():
                    if names and (mesh := value.take(names)) is not None:
                        yield mesh
                case Items(items):
                    if type(index) is int and -len(items) <= index < len(items):
                        yield from self.find(*items[index])
                case Record(items):
                    for name, one, where in items:
                        if names == [name]:
                            yield from self.find(one, where)

    def _read_names(self, node: ast.expr, scope: Scope) -> list[str]:
        """The names in ``mesh["a", "b"]``; empty if one is unknown."""
        resolved = self._source.resolve(node, scope)
        if resolved is None:
            return []
        items, where = [resolved[0]], resolved[1]
        if isinstance(resolved[0], ast.Tuple | ast.List):
            items = resolved[0].elts
        found = [self._source.resolve(item, where) for item in items]
        texts = [None if one is None else read_string(one[0]) for one in found]
        return [text for text in texts if text is not None] if None not in texts else []

    def _find_call(self, node: ast.Call, scope: Scope) -> Iterator[Value]:
        entered = self._source.enter(node, scope)
        if entered is not None:
            for returned in entered.returns:
                yield from self.find(returned, entered)
            return
        called = self._source.resolve_callee(node.func)
        if called in MAKERS:
            yield from self._make(node, scope)
        elif isinstance(node.func, ast.Attribute):
            for value in self.find(node.func.value, scope):
                if isinstance(value, Mesh):
                    yield from self._find_method(value, node.func.attr, node, scope)
                elif isinstance(value, Record) and node.func.attr == "get" and node.args:
                    for name, one, where in value.items:
                        if self._read_names(node.args[0], scope) == [name]:
                            yield from self.find(one, where)
        elif called == "dict":
            named = ((one.arg, one.value) for one in node.keywords)
            yield Record(tuple((key, one, scope) for key, one in named if key))
        elif called in ("cast", "list", "tuple") and node.args:
            yield from self.find(node.args[-1], scope)

    def _make(self, node: ast.Call, scope: Scope) -> Iterator[Value]:
        key = (node, scope, None)
        if key not in self.roots:
            root = self.roots[key] = Root(node, scope)
            try:
                if len(self.roots) > _MAX_ROOTS:
                    raise UnknownMesh(f"the file makes more than {_MAX_ROOTS} meshes")
                root.mesh = self._reader.read(node, scope)
            except (UnknownMesh, MeshplanError) as error:
                root.error = error
        yield from _view(self.roots[key])

    def _find_method(
        self, mesh: Mesh, method: str, node: ast.Call, scope: Scope
    ) -> Iterator[Value]:
        given: Mapping[str | None, ast.expr] = {one.arg: one.value for one in node.keywords}
        first = next(iter(node.args), None)
        match method:
            case "_flatten":
                name = given.get("mesh_dim_name", first)
                names = [] if name is None else self._read_names(name, scope)
                flat = mesh.flatten(names[0] if names else None)
                if flat.axes[0].name is not None:
                    mesh.root.flattened[flat.axes[0].name] = flat.axes[0].of
                yield flat
            case "_unflatten":
                yield from self._split(mesh, given.get("dim", first), node, scope)
            case "get_group":
                where = given.get("mesh_dim", first)
                if where is None:
                    yield mesh.flatten()
                elif (axis := self._find_axis(mesh, where, scope)) is not None:
                    yield Mesh(mesh.root, (axis,))
            case "__getitem__" if first is not None:
                names = self._read_names(first, scope)
                if names and (part := mesh.take(names)) is not None:
                    yield part

    def _find_axis(self, mesh: Mesh, node: ast.expr, scope: Scope) -> Axis | None:
        """The axis of a name or a position."""
        if (position := self._source.read_value(node, scope)) is not None:
            inside = -len(mesh.axes) <= position < len(mesh.axes)
            return mesh.axes[position] if inside else None
        names = self._read_names(node, scope)
        found = mesh.take(names) if len(names) == 1 else None
        return None if found is None else found.axes[0]

    def _split(
        self, mesh: Mesh, where: ast.expr | None, node: ast.Call, scope: Scope
    ) -> Iterator[Value]:
        """The mesh with one of its axes split by ``_unflatten``."""
        parent = mesh.root
        key = (node, scope, parent)
        if key not in self.roots:
            root = self.roots[key] = Root(node, scope, parent=parent)
            parent.is_split = True
            axis = None if where is None else self._find_axis(mesh, where, scope)
            try:
                if axis is None or parent.mesh is None:
                    raise UnknownMesh("the axis that _unflatten splits is not a constant")
                first, last = min(axis.of), max(axis.of)
                if axis.of != tuple(range(first, last + 1)):
                    raise UnknownMesh("_unflatten splits axes that are not next to each other")
                root.mesh = self._reader.split(parent.mesh, first, last, node, scope)
                count = len(root.mesh.layout.sizes) - len(parent.mesh.layout.sizes) + last - first
                whole = tuple(range(first, last + 1))
                root.parts = (
                    *((i,) for i in range(first)),
                    *(whole for _ in range(count + 1)),
                    *((i,) for i in range(last + 1, len(parent.mesh.layout.sizes))),
                )
            except (UnknownMesh, MeshplanError) as error:
                root.error = error
        root = self.roots[key]
        if root.mesh is None:
            return
        # The axes of the mesh that was split: those of a slice stay a slice.
        kept = {i for axis in mesh.axes for i in axis.of}
        for value in _view(root):
            axes = [
                a for a, parts in zip(value.axes, root.parts, strict=True) if set(parts) <= kept
            ]
            yield Mesh(root, tuple(axes))


def _view(root: Root) -> Iterator[Mesh]:
    """The root as a mesh, if it is known."""
    if root.mesh is not None:
        names = root.mesh.layout.names or (None,) * len(root.mesh.layout.sizes)
        yield Mesh(root, tuple(Axis(name, (i,)) for i, name in enumerate(names)))
