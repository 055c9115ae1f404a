"""Lists and tensors that a file changes in place: their names are no constants.

A name keeps its value where all that is done with it is known to leave it alone. What is handed to
a function that is not known here, kept in an object or returned may be changed anywhere.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Literal, TypeAlias

from meshplan.lint._readers._scopes import Names, Scope

__all__ = ["unbind_changed"]

_Effect: TypeAlias = Literal["looks", "hands on", "may change"]

# Calls that give something that can be changed in place, of those that the reader understands.
_MAKERS = frozenset({"list", "tensor", "arange", "view", "reshape"})
# Builtins that look at their arguments, and those whose result has their items in it.
_LOOK = frozenset({"all", "any", "bool", "id", "isinstance", "len", "print", "repr", "str", "type"})
_PASS_ON = frozenset(
    {"dict", "enumerate", "filter", "frozenset", "iter", "list", "map", "max", "min", "next"}
    | {"reversed", "set", "sorted", "sum", "tuple", "zip"}
)
# Others that only look, by the last part of their name, and those of them that are methods.
_LOOKERS = frozenset({"init_device_mesh", "DeviceMesh", "new_group", "array", "prod", "tensor"})
_LOOKING_METHODS = frozenset(
    {"critical", "debug", "error", "exception", "format", "info", "join", "log", "warning"}
)
# Methods of lists and tensors.
_METHODS_LOOK = frozenset({"clone", "count", "dim", "index", "numel", "size", "tolist"})
_METHODS_PASS_ON = frozenset({"copy", "reshape", "view"})
_TESTS = (ast.Assert, ast.Compare, ast.Expr, ast.FormattedValue, ast.If, ast.UnaryOp, ast.While)
_ITERATES = (ast.AsyncFor, ast.BinOp, ast.comprehension, ast.For, ast.Match, ast.Starred)


def unbind_changed(tree: ast.Module, names: Names, called: Callable[[ast.expr], str]) -> None:
    """Take the values of names that are bound to what may be changed in place.

    Args:
        tree: of the file.
        names: of the file; changed.
        called: the last part of the name that is called, by its name where it comes from.
    """
    around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    uses = _Uses(around, called, {}, {})
    changed: list[ast.expr] = []
    parted: dict[ast.expr, bool] = {}
    for name, scope in names.loads:
        resolved = scope.resolve(name)
        if resolved is not None and uses.can_change(resolved[0]):
            value, home = resolved
            if value not in parted:
                parted[value] = _has_parts(value, home)
            if not uses.leaves_alone(name, scope, value, has_parts=parted[value]):
                changed.append(value)
    seen = set(changed)
    while changed:  # what shares its items with something that is changed is changed with it
        found = uses.parts.get(changed.pop(), [])
        changed += [one for one in found if one not in seen]
        seen.update(found)
    for one in names.scopes:
        one.bound |= {name: None for name, value in one.bound.items() if value in seen}


@dataclass(frozen=True, slots=True)
class _Uses:
    around: Mapping[ast.AST, ast.AST]
    called: Callable[[ast.expr], str]
    parts: dict[ast.expr, list[ast.expr]]  # what has items of what
    known: dict[ast.expr, bool]  # what can be changed

    def can_change(self, value: ast.expr) -> bool:
        if value not in self.known:
            self.known[value] = _can_change(value)
        return self.known[value]

    def leaves_alone(
        self, node: ast.expr, scope: Scope, value: ast.expr, *, has_parts: bool
    ) -> bool:
        """Whether the value, or a part of it at ``node``, is the same after this use of it."""
        while True:
            use = self.around[node]
            if isinstance(use, ast.Assign | ast.AnnAssign):
                return self._assigns(node, use, scope, value, has_parts=has_parts)
            effect, after = self._effect(node, use, scope)
            if effect == "looks" or (effect == "hands on" and not has_parts):
                return True
            if effect == "may change" or after is None:
                return False
            node = after

    def _effect(
        self, node: ast.expr, use: ast.AST, scope: Scope
    ) -> tuple[_Effect, ast.expr | None]:
        """Of a use; and the expression that it hands parts of the value on to, if it is one."""
        if isinstance(use, _TESTS) or (isinstance(use, ast.IfExp) and use.test is node):
            return "looks", None
        if isinstance(use, _ITERATES):
            return "hands on", None
        if isinstance(use, ast.Subscript):
            if use.value is not node:
                return "looks", None
            return ("hands on" if isinstance(use.ctx, ast.Load) else "may change"), use
        if isinstance(use, ast.keyword):
            use = self.around[use]
        if isinstance(use, ast.Attribute):
            call = self.around[use]
            if isinstance(call, ast.Call) and call.func is use:
                return _of_name(use.attr, _METHODS_LOOK, _METHODS_PASS_ON), call
            return ("looks" if use.attr in ("ndim", "shape") else "may change"), None
        if not isinstance(use, ast.Call):
            return "may change", None
        if self.called(use.func) in _LOOKERS:
            return "looks", None
        if isinstance(use.func, ast.Attribute):
            return _of_name(use.func.attr, _LOOKING_METHODS, _METHODS_PASS_ON), use
        if isinstance(use.func, ast.Name) and scope.binder(use.func.id) is None:
            return _of_name(use.func.id, _LOOK, _PASS_ON), use
        return "may change", None

    def _assigns(
        self,
        node: ast.expr,
        use: ast.Assign | ast.AnnAssign,
        scope: Scope,
        value: ast.expr,
        *,
        has_parts: bool,
    ) -> bool:
        """Whether only names get it that stand for it alone: they are looked at by themselves."""
        for target in use.targets if isinstance(use, ast.Assign) else [use.target]:
            if isinstance(target, ast.Tuple | ast.List):
                if has_parts:
                    return False
                continue
            resolved = scope.resolve(target)
            if not isinstance(target, ast.Name) or resolved is None:
                return False
            if resolved[0] is node and self.can_change(node):
                self.parts.setdefault(node, []).append(value)
            elif resolved[0] is not value:
                return False
        return True


def _can_change(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple):
        return any(_can_change(item) for item in value.elts)
    if isinstance(value, ast.Call):
        return _last(value.func) in _MAKERS
    return isinstance(value, ast.List)


def _has_parts(value: ast.expr, scope: Scope) -> bool:
    """Whether there is something in it that can be changed: rows of a list, views of a tensor."""
    if isinstance(value, ast.Call) and _last(value.func) == "list" and len(value.args) == 1:
        resolved = scope.resolve(value.args[0])
        if resolved is None:
            return True
        value = resolved[0]
        if isinstance(value, ast.Call):
            return _last(value.func) != "range"
    return not isinstance(value, ast.List | ast.Tuple) or any(map(_can_change, value.elts))


def _of_name(name: str, looks: Set[str], hands_on: Set[str]) -> _Effect:
    return "looks" if name in looks else "hands on" if name in hands_on else "may change"


def _last(node: ast.expr) -> str:
    """The last part of a name, of whatever it is a part."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
