"""Whole-number arithmetic on syntax trees. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Callable

__all__ = ["evaluate"]

# Numbers of ranks are far smaller.
_LIMIT = 1 << 40
_MAX_DEPTH = 20


def evaluate(
    node: ast.expr,
    lookup: Callable[[str], int | None],
    other: Callable[[ast.expr], int | None] = lambda node: None,
    depth: int = 0,
) -> int | None:
    """The value of an expression of whole numbers and names; ``None`` if it has none.

    Args:
        node: the expression.
        lookup: the number that a name stands for, or ``None``.
        other: the number that anything but a number, a name or arithmetic stands for, or ``None``.
        depth: how deep in an expression this is.

    ``/`` is whole-number division where it leaves no rest.
    """
    if depth > _MAX_DEPTH:
        return None
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int and abs(node.value) <= _LIMIT else None
    if isinstance(node, ast.Name):
        return lookup(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = evaluate(node.operand, lookup, other, depth + 1)
        return None if value is None else -value
    if isinstance(node, ast.BinOp):
        left = evaluate(node.left, lookup, other, depth + 1)
        right = evaluate(node.right, lookup, other, depth + 1)
        return None if left is None or right is None else _operation(node.op, left, right)
    return other(node)


def _operation(operator: ast.operator, left: int, right: int) -> int | None:
    found: int | None = None
    if isinstance(operator, ast.Add):
        found = left + right
    elif isinstance(operator, ast.Sub):
        found = left - right
    elif isinstance(operator, ast.Mult):
        found = left * right
    elif isinstance(operator, ast.Pow):
        found = left**right if 0 <= right <= 40 and abs(left) <= 1024 else None
    elif right == 0:
        found = None
    elif isinstance(operator, ast.Mod):
        found = left % right
    elif isinstance(operator, ast.FloorDiv) or (isinstance(operator, ast.Div) and not left % right):
        found = left // right
    return found if found is not None and abs(found) <= _LIMIT else None
