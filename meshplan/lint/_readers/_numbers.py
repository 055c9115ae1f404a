"""Whole numbers with their place in a text, arithmetic on them, and texts with other numbers."""

from __future__ import annotations

import ast
import operator
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from typing import NamedTuple, TypeGuard

from meshplan.layout import Layout

INSTEAD = "give the mesh with --mesh"
"""The end of messages about meshes that are not constants."""
RUN = f"use --run, or {INSTEAD}"
"""The same of meshes that a Python file computes."""
UNKNOWN_RANKS = (
    "depends on the number of ranks, which is unknown; "
    "pass --world-size, or --hosts and --node-size"
)
"""The end of messages about sizes that follow from the number of ranks."""
# Numbers of ranks are far smaller.
_LIMIT = 1 << 40
_MAX_DEPTH = 20
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Pow: operator.pow,
}


class UnknownMesh(Exception):
    """A mesh that depends on values of the running program."""

    def __init__(
        self, message: str, line: int | None = None, *, has_one_axis: bool = False
    ) -> None:
        super().__init__(message)
        self.line = line  # of the missing value, if it is not the line of the mesh
        # Of unknown size: its group has no siblings.
        self.has_one_axis = has_one_axis


class Whole(int):
    """A whole number, and the offsets in characters of the text that defines it."""

    span: tuple[int, int] = (0, 0)

    @classmethod
    def at(cls, value: int, start: int, end: int) -> Whole:
        """A number with its place."""
        found = cls(value)
        found.span = start, end
        return found


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, with a place or without, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


class Edit(NamedTuple):
    """``new`` in place of the characters from ``start`` to ``end``."""

    start: int
    end: int
    new: str


def apply_edits(text: str, edits: Iterable[Edit]) -> str | None:
    """The text after all edits; ``None`` if two of them overlap."""
    parts: list[str] = []
    done = 0
    for start, end, new in sorted(dict.fromkeys(edits), key=lambda edit: edit[:2]):
        if start < done:
            return None
        parts += [text[done:start], new]
        done = end
    return "".join([*parts, text[done:]])


def find_line(text: str, offset: int) -> int:
    """The line, from 1 on, of an offset."""
    return text.count("\n", 0, offset) + 1


def order_sizes(layout: Layout, order: Sequence[str]) -> dict[str, int] | None:
    """Size of each axis of ``order`` in ``layout``; 1 for an axis that it does not have.

    ``None`` if only another order of axes could express the layout: its ranks are not 0..n-1, it
    has another axis, or its axes of more than one rank come in another order.
    """
    sizes = dict(zip(layout.axes, layout.sizes, strict=True))
    long = [axis for axis in layout.axes if sizes[axis] > 1]
    if layout.ranks != range(layout.world_size) or long != [axis for axis in order if axis in long]:
        return None
    return {axis: sizes.get(axis, 1) for axis in order}


def evaluate(node: ast.expr, lookup: Callable[[str], int | None], depth: int = 0) -> int | None:
    """The value of an expression of whole numbers and names; ``None`` if it has none. Nothing is
    run. ``/`` is whole-number division without a remainder. ``lookup`` has the numbers of names.
    """
    match node:
        case ast.Constant(value) if type(value) is int:
            return value if abs(value) <= _LIMIT else None
        case ast.Name(name):
            return lookup(name)
        case ast.UnaryOp(ast.USub(), inside) if depth < _MAX_DEPTH:
            found = evaluate(inside, lookup, depth + 1)
            return None if found is None else -found
        case ast.BinOp(left, op, right) if depth < _MAX_DEPTH:
            first, second = (evaluate(one, lookup, depth + 1) for one in (left, right))
            return None if first is None or second is None else combine(op, first, second)
    return None


def combine(op: ast.operator, left: int, right: int) -> int | None:
    """The value of an operation of two whole numbers; ``None`` if it has none."""
    if type(op) not in _OPERATIONS:
        return None
    if isinstance(op, ast.Pow) and (not 0 <= right <= 40 or abs(left) > 1024):
        return None
    if isinstance(op, ast.Mod | ast.FloorDiv | ast.Div) and right == 0:
        return None
    if isinstance(op, ast.Div) and left % right:
        return None
    found = _OPERATIONS[type(op)](left, right)
    return found if abs(found) <= _LIMIT else None
