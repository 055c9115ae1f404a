"""What names stand for in Python source: constants of a module and of its functions.

Only a name that is bound once, by a plain assignment, stands for what it is bound to, and only
where no star import may bind it again (and, by `_changes`, where nothing changes it in place).
Nothing is run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Names", "Scope", "names"]

_MAX_DEPTH = 20
_NAMED = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.ExceptHandler,
    ast.MatchAs,
    ast.MatchStar,
)


@dataclass(eq=False, slots=True)
class Scope:
    """The names of a module, a class or a function.

    Attributes:
        outer: the scope around it; ``None`` for the module.
        is_class: whether this is the body of a class, whose names functions inside do not see.
        bound: to what each name is bound; ``None`` if more than once, or by something else than a
            plain assignment.
        has_star: whether ``from module import *`` may bind any name here.
    """

    outer: Scope | None = None
    is_class: bool = False
    bound: dict[str, ast.expr | None] = field(default_factory=dict)
    has_star: bool = False

    def bind(self, name: str, value: ast.expr | None) -> None:
        """Another binding of a name."""
        self.bound[name] = None if name in self.bound else value

    def resolve(self, node: ast.expr) -> tuple[ast.expr, Scope] | None:
        """The node, or the expression that a name is bound to, and the scope it stands in.

        ``None`` for a name that has no one value.
        """
        scope: Scope | None = self
        for _ in range(_MAX_DEPTH):
            if not isinstance(node, ast.Name) or scope is None:
                break
            scope = scope.binder(node.id)
            found = None if scope is None or scope.has_star else scope.bound[node.id]
            if found is None:
                return None
            node = found
        return None if scope is None or isinstance(node, ast.Name) else (node, scope)

    def binder(self, name: str) -> Scope | None:
        """The scope that binds a name that is used here; ``None`` if the file does not."""
        scope: Scope | None = self
        while scope is not None and (
            name not in scope.bound or (scope.is_class and scope is not self)
        ):
            scope = scope.outer
        return scope


@dataclass(frozen=True, slots=True)
class Names:
    """What a file does with names.

    Attributes:
        calls: all calls, each with the scope that it is in, in order of lines.
        loads: all uses of names but bindings, each with the scope that it is in.
        scopes: all of them.
    """

    calls: list[tuple[ast.Call, Scope]]
    loads: list[tuple[ast.Name, Scope]]
    scopes: list[Scope]


def names(tree: ast.Module) -> Names:
    """The names of a file, with what they are bound to."""
    found = Names([], [], [Scope()])
    plain: set[ast.expr] = set()
    pending: list[tuple[ast.AST, Scope]] = [(tree, found.scopes[0])]
    while pending:
        node, scope = pending.pop()
        for name, value in _bindings(node, plain):
            scope.bind(name, value)
        if isinstance(node, ast.Global | ast.Nonlocal):
            _unbind_everywhere(node, scope)
        if isinstance(node, ast.ImportFrom) and any(one.name == "*" for one in node.names):
            scope.has_star = True
        if isinstance(node, ast.Call):
            found.calls.append((node, scope))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.loads.append((node, scope))
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            inner = Scope(scope, isinstance(node, ast.ClassDef))
            found.scopes.append(inner)
        pending += [(child, inner) for child in ast.iter_child_nodes(node)]
    found.calls.sort(key=lambda one: (one[0].lineno, one[0].col_offset))
    return found


def _bindings(node: ast.AST, plain: set[ast.expr]) -> Iterator[tuple[str, ast.expr | None]]:
    """The names that a node binds; ``plain`` collects targets that need not be looked at again."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            for one, value in _pairs(target, node.value):
                plain.add(one)
                yield one.id, value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        plain.add(node.target)
        if node.value is not None:
            yield node.target.id, node.value
    elif isinstance(node, ast.Name):
        # Loops, `with`, `del`, `+=`, `:=` and the like.
        if not isinstance(node.ctx, ast.Load) and node not in plain:
            yield node.id, None
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0], None
    elif isinstance(node, ast.arg):
        yield node.arg, None
    elif isinstance(node, _NAMED) and node.name:
        yield node.name, None


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.Name, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target, value
    elif (
        isinstance(target, ast.Tuple | ast.List)
        and isinstance(value, ast.Tuple | ast.List)
        and len(target.elts) == len(value.elts)
        and not any(isinstance(one, ast.Starred) for one in (*target.elts, *value.elts))
    ):
        for one, bound in zip(target.elts, value.elts, strict=True):
            if isinstance(one, ast.Name):
                yield one, bound


def _unbind_everywhere(node: ast.Global | ast.Nonlocal, scope: Scope) -> None:
    around: Scope | None = scope
    while around is not None:
        for name in node.names:
            around.bound[name] = None
        around = around.outer
