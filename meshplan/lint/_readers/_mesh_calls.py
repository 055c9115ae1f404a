"""Calls that make device meshes: the sizes, names and ranks that they are given, and where."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshplan.errors import LayoutError
from meshplan.layout import Layout
from meshplan.lint._readers._arguments import Located
from meshplan.lint._readers._changes import find_callee
from meshplan.lint._readers._numbers import INSTEAD, Edit, Number, UnknownMesh, apply_edits
from meshplan.lint._readers._scopes import Scope
from meshplan.lint._readers._source import PythonSource
from meshplan.lint._readers._tree import read_string
from meshplan.lint._spec import MAX_AXES, find_nested_shape, make_layout

# Ranks of a mesh that are written out one by one.
_MAX_LISTED = 4096
_MAX_NESTED = 1 << 14


# What makes ranks: the first argument of Colossal-AI's DeviceMesh, where torch's has a device type.
_RANKS = frozenset({"arange", "range", "tensor", "Tensor", "reshape", "view"})


class _Size(NamedTuple):
    """A size: its number, and its place in the shape."""

    number: Number
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class MeshCall:
    """A mesh that a file makes.

    Attributes:
        layout: the mesh.
        source: the file.
        names: the place of each axis's name; empty for a mesh without names.
        sizes: of the axes, if the file has a shape.
        count: the number of ranks, if the file has it next to the shape.
        listed: the place of the ranks, if the file lists them.
    """

    layout: Layout
    source: PythonSource
    names: Sequence[tuple[int, int]]
    sizes: Sequence[_Size] = ()
    count: Number | None = None
    listed: tuple[int, int] | None = None

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
        if self.count is not None and self.count.value != layout.world_size:
            edits.append(Edit(self.count.start, self.count.end, str(layout.world_size)))
        for here, axis, size in zip(self.sizes, layout.axes, layout.sizes, strict=True):
            old = self.sizes[axes.index(axis)]
            if moved:
                new = text[old.start : old.end] if old.number.value == size else str(size)
                edits.append(Edit(here.start, here.end, new))
            elif here.number.value != size:
                edits.append(Edit(here.number.start, here.number.end, str(size)))
        return apply_edits(text, edits)

    def _can_move(self, layout: Layout) -> bool:
        """Whether the axes have names, and torch accepts their order in ``mesh["a", "b"]``."""
        # torch refuses slices of a mesh whose axes are not in the order of the mesh.
        for names in self.source.slices:
            found = [layout.axes.index(name) for name in names if name in layout.axes]
            if len(found) == len(names) and found != sorted(found):
                return False
        return bool(self.names)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


class MeshReader:
    """Reads meshes of calls; raises `UnknownMesh` for anything that is not a constant."""

    def __init__(self, source: PythonSource) -> None:
        self._source = source

    def read(self, call: ast.Call, scope: Scope) -> MeshCall:
        """The mesh of a call of ``init_device_mesh`` or ``DeviceMesh``.

        Raises:
            LayoutError: an invalid mesh.
        """
        called = self._source.resolve_callee(call.func)
        given = self._source.read_arguments(call, scope)
        shape = given.named.get("mesh_shape" if called == "init_device_mesh" else "mesh")
        if shape is None:
            shape = next(iter(given.positional[1:]), None)
        if shape is None:
            raise UnknownMesh(f"{called} is called without its second argument here; {INSTEAD}")
        if "mesh_dim_names" not in given.named and not given.is_complete:
            raise UnknownMesh(f"{called} is called with ** here, which may name axes; {INSTEAD}")
        labels, places = self._read_names(given.named.get("mesh_dim_names"))
        if called == "DeviceMesh":
            first = self._source.resolve(*given.positional[0]) if given.positional else None
            if (
                first
                and isinstance(first[0], ast.List | ast.Tuple | ast.Call)
                and (not isinstance(first[0], ast.Call) or find_callee(first[0]) in _RANKS)
            ):
                raise UnknownMesh(f"a DeviceMesh of another library takes ranks first; {INSTEAD}")
            return self._read_ranks(*shape, labels, places)
        items = self._source.read_items(*shape)
        if items is None:
            raise UnknownMesh(
                f"the shape {self._source.shorten(shape[0])} is not a constant; {INSTEAD}"
            )
        sizes = self._read_sizes(items)
        layout = make_layout([size.number.value for size in sizes], labels)
        return MeshCall(layout, self._source, places, sizes)

    def split(
        self, mesh: MeshCall, first: int, last: int, call: ast.Call, scope: Scope
    ) -> MeshCall:
        """The mesh whose axes ``first`` to ``last`` a call of ``_unflatten`` splits.

        Raises:
            LayoutError: sizes that do not fill the axes.
        """
        given = self._source.read_arguments(call, scope)
        order = ("dim", "mesh_sizes", "mesh_dim_names")
        named = dict(zip(order, given.positional, strict=False)) | given.named
        shape = named.get("mesh_sizes")
        items = None if shape is None else self._source.read_items(*shape)
        if items is None:
            shown = self._source.shorten(call if shape is None else shape[0])
            raise UnknownMesh(f"the sizes {shown} of _unflatten are not constants; {INSTEAD}")
        sizes = self._read_sizes(items)
        names, places = self._read_names(named.get("mesh_dim_names"))
        old = mesh.layout
        values = [size.number.value for size in sizes]
        if math.prod(values) != math.prod(old.sizes[first : last + 1]) or len(names or ()) != len(
            sizes
        ):
            shown = " x ".join(map(str, old.sizes[first : last + 1]))
            raise LayoutError(
                f"_unflatten needs one name for each size, and sizes that fill {shown}, got "
                f"{' x '.join(map(str, values))}; use other sizes"
            )
        labels = [*old.axes[:first], *(names or ()), *old.axes[last + 1 :]]
        ranks = None if old.ranks == range(old.world_size) else old.grid.flatten().tolist()
        layout = make_layout([*old.sizes[:first], *values, *old.sizes[last + 1 :]], labels, ranks)
        # Only the parts of a mesh that is one axis can be written in another order or size.
        if len(old.sizes) > 1 or mesh.listed is not None:
            return MeshCall(layout, self._source, ())
        count = mesh.sizes[0].number if mesh.count is None else mesh.count
        return MeshCall(layout, self._source, places, sizes, count)

    def _read_names(self, given: Located | None) -> tuple[list[str] | None, list[tuple[int, int]]]:
        """The names of the axes, if they have some, and the place of each."""
        found = None if given is None else self._source.resolve(*given)
        if given is None or (found and _is_none(found[0])):
            return None, []
        items = self._source.read_items(*given)
        if items is None:
            shown = self._source.shorten(given[0])
            raise UnknownMesh(f"mesh_dim_names={shown} is not a constant; {INSTEAD}")
        names, places = [], []
        for item, where in items:
            bound = self._source.resolve(item, where)
            name = None if bound is None else read_string(bound[0])
            if name is None:
                shown = self._source.shorten(item)
                raise UnknownMesh(
                    f"{shown} in mesh_dim_names is not a constant; give it with --mesh"
                )
            names.append(name)
            places.append(self._source.find_span(item))
        return names, places

    def _read_sizes(self, items: Sequence[tuple[ast.expr, Scope]]) -> list[_Size]:
        if len(items) > MAX_AXES:
            raise LayoutError(f"a mesh has up to {MAX_AXES} axes, got {len(items)}")
        found = []
        for item, scope in items:
            self._source.lacks_world_size = False
            number = self._source.read_number(item, scope)
            if number is None:
                ranks = "pass --world-size, or " if self._source.lacks_world_size else ""
                raise UnknownMesh(
                    f"{self._source.shorten(item)} is not a constant; {ranks}{INSTEAD}",
                    has_one_axis=len(items) == 1 and not isinstance(item, ast.Starred),
                )
            found.append(_Size(number, *self._source.find_span(item)))
        return found

    def _read_ranks(
        self, node: ast.expr, scope: Scope, labels: list[str] | None, places: list[tuple[int, int]]
    ) -> MeshCall:
        """The mesh of listed ranks, ``arange(40).view(8, 5)`` and the like."""
        shown = self._source.shorten(node)
        resolved = self._source.resolve(node, scope)
        if resolved and find_callee(resolved[0]) in ("tensor", "list"):
            resolved = self._resolve_argument(*resolved)
        sizes = None
        if resolved and isinstance(resolved[0], ast.List | ast.Tuple):
            ranks = self._read_nested(*resolved)
            if ranks is not None:
                layout = make_layout(find_nested_shape(ranks), labels, ranks)
                listed = self._source.find_span(resolved[0])
                return MeshCall(layout, self._source, places, listed=listed)
        elif resolved and find_callee(resolved[0]) in ("view", "reshape"):
            sizes = self._read_view(*resolved)
            resolved = self._resolve_receiver(*resolved)
        count = None
        if resolved and find_callee(resolved[0]) in ("arange", "range"):
            counted = self._resolve_argument(*resolved)
            count = self._source.read_number(*counted) if counted else None
        if count is None:
            is_counted = resolved is not None and find_callee(resolved[0]) in ("arange", "range")
            raise UnknownMesh(
                f"the ranks {shown} are not constants; {INSTEAD}",
                has_one_axis=is_counted and sizes is None,
            )
        if sizes is None:
            sizes = [_Size(count, count.start, count.end)]
        values = [size.number.value for size in sizes]
        if -1 in values:
            raise UnknownMesh(f"a size of -1 in {shown} is not supported; use the size")
        layout = make_layout(values, labels)
        if layout.world_size != count.value:
            raise LayoutError(
                f"{count.value} ranks do not fill the shape {' x '.join(map(str, values))}; "
                f"use arange({layout.world_size})"
            )
        return MeshCall(layout, self._source, places, sizes, count)

    def _read_view(self, node: ast.expr, scope: Scope) -> list[_Size]:
        """The sizes of ``view(8, 5)`` or ``view((8, 5))``."""
        assert isinstance(node, ast.Call)
        items = self._source.read_items(node.args[0], scope) if len(node.args) == 1 else None
        return self._read_sizes(items or [(one, scope) for one in node.args])

    def _read_nested(self, node: ast.expr, scope: Scope) -> object:
        """Nested lists of numbers; ``None`` if an item is not a constant."""
        # Without recursion: a file may nest lists deeper than Python's stack.
        root: list[object] = []
        pending: list[tuple[ast.expr, list[object], int]] = [(node, root, 0)]
        for _ in range(_MAX_NESTED + 1):
            if not pending:
                return root[0]
            one, into, depth = pending.pop()
            if depth > 32:
                break
            if isinstance(one, ast.List | ast.Tuple):
                inner: list[object] = []
                into.append(inner)
                pending += [(item, inner, depth + 1) for item in reversed(one.elts)]
            else:
                value = self._source.read_value(one, scope)
                if value is None:
                    break
                into.append(value)
        return None

    def _resolve_argument(self, node: ast.expr, scope: Scope) -> tuple[ast.expr, Scope] | None:
        """The one argument of a call."""
        match node:
            case ast.Call(args=[argument]):
                return self._source.resolve(argument, scope)
        return None

    def _resolve_receiver(self, node: ast.expr, scope: Scope) -> tuple[ast.expr, Scope] | None:
        """The object of a method call."""
        match node:
            case ast.Call(func=ast.Attribute(value=receiver)):
                return self._source.resolve(receiver, scope)
        return None
