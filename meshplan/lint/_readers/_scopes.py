"""The names of a Python file: where each is bound, and to which expressions.

Only a name that is bound once, by a plain assignment or as a parameter of a function that the file
calls, stands for a single value. Meshes are followed through every binding that may hold.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from meshplan.lint._readers._changes import can_change

_MAX_DEPTH = 20
_NAMED = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.ExceptHandler,
    ast.MatchAs,
    ast.MatchStar,
)
Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Branches: TypeAlias = tuple[tuple[ast.AST, str], ...]
"""The conditional statements around a node, outermost first, each with the arm that it is in."""


class Binding(NamedTuple):
    """One value that a name may have.

    Attributes:
        value: the expression.
        end: line and column of the end of the assignment.
        branches: around the assignment.
    """

    value: ast.expr
    end: tuple[int, int]
    branches: Branches


@dataclass(eq=False, slots=True)
class Scope:
    """The names of a module, a class or a function, or of one call of a function.

    Attributes:
        outer: the scope around it; ``None`` for the module.
        node: the definition; ``None`` for a module or a lambda.
        is_class: whether this is the body of a class, whose names functions inside do not see.
        bound: the value of each name; ``None`` if it is bound more than once, or by anything but
            a plain assignment.
        bindings: all values of each name, in order of lines.
        rebound: names that are bound more than once.
        changed: parameters whose argument may change in place.
        items: of each name, the values that are stored under a literal key.
        has_star: whether ``from module import *`` may bind any name here.
        definitions: functions and classes by name, each with its own scope.
        inner: the scopes of its definitions and lambdas.
        calls: the calls in it, without those of ``inner``.
        returns: the values that it returns.
        arguments: of the call that this scope is for, by parameter; with the scope of each.
        depth: number of calls around this one.
        origin: the scope of the definition; itself if it is not for one call.
    """

    outer: Scope | None = None
    node: Definition | None = None
    is_class: bool = False
    bound: dict[str, ast.expr | None] = field(default_factory=dict)
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    rebound: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    items: dict[str, dict[str, list[ast.expr]]] = field(default_factory=dict)
    has_star: bool = False
    definitions: dict[str, Scope] = field(default_factory=dict)
    inner: list[Scope] = field(default_factory=list)
    calls: list[ast.Call] = field(default_factory=list)
    returns: list[ast.expr] = field(default_factory=list)
    arguments: dict[str, tuple[ast.expr, Scope]] = field(default_factory=dict)
    depth: int = 0
    origin: Scope = field(init=False)

    def __post_init__(self) -> None:
        self.origin = self

    def copy_for_call(self, outer: Scope | None, depth: int) -> Scope:
        """A scope for one call of this definition, without arguments."""
        new = replace(self, outer=outer, arguments={}, depth=depth)
        new.origin = self.origin
        return new

    def find_binder(self, name: str) -> Scope | None:
        """The scope that binds a name used here; ``None`` if the file does not."""
        # As in Python, functions inside a class do not see the names of its body.
        scope: Scope | None = self
        while scope and (name not in scope.bound or (scope.is_class and scope is not self)):
            scope = scope.outer
        return scope

    def find_definition(self, name: str) -> Scope | None:
        """The scope of the one function or class of this name, with ``outer`` as seen from here."""
        binder = self.find_binder(name)
        found = None if binder is None else binder.definitions.get(name)
        if binder is None or found is None or name in binder.rebound or binder.has_star:
            return None
        return found if found.outer is binder else found.copy_for_call(binder, binder.depth)

    def resolve(self, node: ast.expr) -> tuple[ast.expr, Scope] | None:
        """The node, or the expression that a name is bound to, and the scope of either.

        ``None`` for a name without a single value.
        """
        # Follow names to names, at most `_MAX_DEPTH` times: ``n = m; m = n`` never ends.
        scope: Scope | None = self
        is_changed = False
        for _ in range(_MAX_DEPTH):
            if not isinstance(node, ast.Name) or scope is None:
                break
            scope = scope.find_binder(node.id)
            if scope is None or scope.has_star:
                return None
            if node.id in scope.arguments:
                if node.id in scope.rebound:
                    return None
                is_changed |= node.id in scope.changed
                node, scope = scope.arguments[node.id]
                continue
            found = scope.bound[node.id]
            if found is None:
                return None
            node = found
        if scope is None or isinstance(node, ast.Name) or (is_changed and can_change(node)):
            return None
        return node, scope


def find_bindings(
    node: ast.AST, plain: set[ast.AST]
) -> Iterator[tuple[ast.Name | ast.Attribute | str, ast.expr | None]]:
    """The names and attributes that a node binds, each with its value.

    Args:
        node: any.
        plain: collects targets of plain assignments.
    """
    match node:
        case ast.Assign():
            for target in node.targets:
                for one, value in _pair(target, node.value):
                    plain.add(one)
                    yield one, value
        case ast.AnnAssign(target=ast.Name() | ast.Attribute() as target):
            plain.add(target)
            if node.value is not None:
                yield target, node.value
        case ast.Name(ctx=ast.Store() | ast.Del()) if node not in plain:
            yield node, None  # loops, `with`, `del`, `+=`, `:=` and the like
        case ast.Attribute(ctx=ast.Store() | ast.Del()) if node not in plain:
            yield node, None
        case ast.alias():
            yield node.asname or node.name.partition(".")[0], None
        case ast.arg():
            yield node.arg, None
    if isinstance(node, _NAMED) and node.name:
        yield node.name, None


def _pair(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.Name | ast.Attribute, ast.expr]]:
    """The names and attributes of a target, each with its value."""
    if isinstance(target, ast.Name | ast.Attribute):
        yield target, value
    if not isinstance(target, ast.Tuple | ast.List):
        return
    items = value.elts if isinstance(value, ast.Tuple | ast.List) else None
    both = [*target.elts, *(items or ())]
    if any(isinstance(one, ast.Starred) for one in both):
        return
    if items is not None and len(items) != len(target.elts):
        return
    for i, one in enumerate(target.elts):
        if isinstance(one, ast.Name | ast.Attribute):
            yield one, _take_item(value, i) if items is None else items[i]


def _take_item(value: ast.expr, index: int) -> ast.expr:
    """``value[index]``, placed where ``value`` is."""
    place = ast.copy_location(ast.Constant(index), value)
    return ast.copy_location(ast.Subscript(value, place, ast.Load()), value)


def exclude_each_other(first: Branches, second: Branches) -> bool:
    """Whether two nodes are in different arms of one conditional statement."""
    arms = dict(first)
    return any(arms.get(node, arm) != arm for node, arm in second)


def find_arms(node: ast.AST) -> dict[ast.AST, str]:
    """The children of a conditional statement that do not always run, each with its arm."""
    if isinstance(node, ast.Match):
        return {case: f"case {i}" for i, case in enumerate(node.cases)}
    if not isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try):
        return {}
    arms = {"body": node.body, "else": node.orelse, "except": getattr(node, "handlers", [])}
    return {child: arm for arm, children in arms.items() for child in children}
