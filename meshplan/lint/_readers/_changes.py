"""Lists, dicts and tensors that a file changes in place: their names are not constants.

A name keeps its value if every use of it is known to leave the value alone. Anything passed to an
unknown function, kept in an object or returned may change anywhere.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from meshplan.lint._readers._scopes import Scope

# A use reads a value, passes its items on, or may change it (``None``).
# Of calls through which an argument is followed.
_MAX_PASSES = 8
_Effect: TypeAlias = Literal["reads", "passes"] | None

# Supported calls whose result can be changed in place.
_MAKERS = frozenset({"list", "tensor", "arange", "view", "reshape"})
# Functions that read their arguments, and functions whose result has their items in it.
_BUILTINS = (
    frozenset({"all", "any", "bool", "id", "isinstance", "len", "print", "repr", "str", "type"}),
    frozenset(
        {"dict", "enumerate", "filter", "frozenset", "iter", "list", "map", "max", "min", "next"}
        | {"reversed", "set", "sorted", "sum", "tuple", "zip"}
    ),
)
# The same of methods of lists and tensors, and of methods that get one as an argument.
_PASSING = frozenset({"copy", "reshape", "view"})
_METHODS = (
    frozenset({"clone", "count", "dim", "index", "numel", "size", "tolist"}),
    _PASSING | {"get", "items", "keys", "values"},
)
_CALLEES = (
    frozenset(
        {"critical", "debug", "error", "exception", "format", "info", "join", "log", "warning"}
    ),
    _PASSING,
)
# Other functions that only read, by the last part of their name.
_READERS = frozenset(
    {"init_device_mesh", "DeviceMesh", "_unflatten", "new_group", "array", "prod", "tensor"}
)
_TESTS = (ast.Assert, ast.Compare, ast.Expr, ast.FormattedValue, ast.If, ast.UnaryOp, ast.While)
_LOOPS = (ast.AsyncFor, ast.BinOp, ast.comprehension, ast.For, ast.Match, ast.Starred)


def find_changed(
    loads: Sequence[tuple[ast.Name, Scope]],
    parents: Mapping[ast.AST, ast.AST],
    called: Callable[[ast.expr], str],
) -> set[ast.expr | None]:
    """The values of names that the file may change in place.

    Args:
        loads: all uses of names but bindings, each with its scope.
        parents: the node around each node.
        called: returns the last part of the called name, without renaming imports.
    """
    uses = _Uses(parents, called)
    _find_changed_parameters(loads, uses)
    changed: list[ast.expr] = []
    for name, scope in loads:
        resolved = scope.resolve(name)
        if resolved and uses.can_change(resolved[0]) and not uses.keep(name, scope, *resolved):
            changed.append(resolved[0])
    found: set[ast.expr | None] = set(changed)
    while changed:  # a value that shares items with a changed one is changed with it
        more = [one for one in uses.sharing.get(changed.pop(), []) if one not in found]
        changed += more
        found.update(more)
    return found


def _find_changed_parameters(loads: Sequence[tuple[ast.Name, Scope]], uses: _Uses) -> None:
    """Mark the parameters of the file's functions whose arguments may change in place."""
    inside: dict[Scope, list[tuple[ast.Name, Scope]]] = {}
    for name, scope in loads:
        binder = scope.find_binder(name.id)
        if binder is not None and isinstance(binder.node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = binder.node.args
            known = (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)
            if any(one.arg == name.id for one in known):
                inside.setdefault(binder, []).append((name, scope))
            uses.readers.add(binder)
    # A function reads its arguments only if those that it passes them on to do so too.
    for _ in range(_MAX_PASSES):
        is_done = True
        for binder, found in inside.items():
            for name, scope in found:
                value = ast.List([], ast.Load())  # as far as is known: numbers in a list
                if name.id not in binder.changed and not uses.keep(name, scope, value, binder):
                    binder.changed.add(name.id)
                    uses.readers.discard(binder)
                    is_done = False
        if is_done:
            return
    # A longer chain of calls: all of them may change what they are passed.
    uses.readers.clear()
    for binder, found in inside.items():
        binder.changed.update(name.id for name, _ in found)


class _Uses:
    """The effects of uses.

    Attributes:
        sharing: values that have items of another.
        readers: functions of the file that only read their arguments.
    """

    def __init__(
        self, parents: Mapping[ast.AST, ast.AST], called: Callable[[ast.expr], str]
    ) -> None:
        self._parents = parents
        self._called = called
        self.sharing: dict[ast.expr, list[ast.expr]] = {}
        self.readers: set[Scope] = set()
        self._changeable: dict[ast.expr, bool] = {}
        self._has_parts: dict[ast.expr, bool] = {}

    def can_change(self, value: ast.expr) -> bool:
        if value not in self._changeable:
            self._changeable[value] = can_change(value)
        return self._changeable[value]

    def keep(self, node: ast.expr, scope: Scope, value: ast.expr, home: Scope) -> bool:
        """Whether ``value``, used at ``node``, is the same after this use of it."""
        if value not in self._has_parts:
            self._has_parts[value] = _has_parts(value, home)
        has_parts = self._has_parts[value]
        # Follow the value outward from its use: ``list(zip(shape))`` passes its items through two
        # calls. The walk ends where the value is only read, may change, or gets a name.
        while True:
            use = self._parents[node]
            if isinstance(use, ast.Assign | ast.AnnAssign):
                return self._assign(node, use, scope, value, has_parts)
            effect, after = self._find_effect(node, use, scope)
            # Items that cannot change themselves, such as numbers, may be passed anywhere.
            if effect == "reads" or (effect and not has_parts):
                return True
            if effect is None or after is None:
                return False
            node = after

    def _find_effect(
        self, node: ast.expr, use: ast.AST, scope: Scope
    ) -> tuple[_Effect, ast.expr | None]:
        """Of a use; and the expression that it passes items on to, if it is one."""
        if isinstance(use, _TESTS) or (isinstance(use, ast.IfExp) and use.test is node):
            return "reads", None
        if isinstance(use, _LOOPS):
            return "passes", None
        if isinstance(use, ast.keyword):
            if use.arg is None:
                return "passes", None
            use = self._parents[use]
        match use:
            case ast.Subscript():
                if use.value is not node:
                    return "reads", None
                return ("passes" if isinstance(use.ctx, ast.Load) else None), use
            case ast.Attribute():
                call = self._parents[use]
                if isinstance(call, ast.Call) and call.func is use:
                    return _look_up_effect(use.attr, _METHODS), call
                return ("reads" if use.attr in ("ndim", "shape") else None), None
            case ast.Call():
                return self._find_effect_of_call(use, scope), use
        return None, None

    def _find_effect_of_call(self, use: ast.Call, scope: Scope) -> _Effect:
        """Of being an argument."""
        match use.func:
            case function if self._called(function) in _READERS:
                return "reads"
            case ast.Attribute(attr=name):
                return _look_up_effect(name, _CALLEES)
            case ast.Name(name) if (found := scope.find_definition(name)) is not None:
                return "reads" if found.origin in self.readers else None
            case ast.Name(name) if scope.find_binder(name) is None:
                return _look_up_effect(name, _BUILTINS)
        return None

    def _assign(
        self,
        node: ast.expr,
        use: ast.Assign | ast.AnnAssign,
        scope: Scope,
        value: ast.expr,
        has_parts: bool,
    ) -> bool:
        """Whether all targets are names for it alone: these are checked by themselves."""
        for target in use.targets if isinstance(use, ast.Assign) else [use.target]:
            if isinstance(target, ast.Tuple | ast.List):
                if has_parts:
                    return False
                continue
            resolved = scope.resolve(target)
            if not isinstance(target, ast.Name) or resolved is None:
                return False
            # ``grid = ranks.view(2, 4)``: the two values share items, so a change of one counts for
            # both. ``other = shape`` is the same value, whose further uses are checked anyway.
            if resolved[0] is node and self.can_change(node):
                self.sharing.setdefault(node, []).append(value)
            elif resolved[0] is not value:
                return False
        return True


def can_change(value: ast.expr) -> bool:
    """Whether a value can change in place: a list, a dict, a tensor, or a tuple of these."""
    if isinstance(value, ast.Tuple):
        return any(map(can_change, value.elts))
    return isinstance(value, ast.List | ast.Dict) or find_callee(value) in _MAKERS


def _has_parts(value: ast.expr, scope: Scope) -> bool:
    """Whether it holds something that can be changed: rows of a list, views of a tensor."""
    if isinstance(value, ast.Call) and find_callee(value) == "list" and len(value.args) == 1:
        resolved = scope.resolve(value.args[0])
        if resolved is None:
            return True
        value = resolved[0]
        if isinstance(value, ast.Call):
            return find_callee(value) != "range"
    if isinstance(value, ast.Dict):
        return any(map(can_change, value.values))
    return not isinstance(value, ast.List | ast.Tuple) or any(map(can_change, value.elts))


def _look_up_effect(name: str, kind: tuple[Set[str], Set[str]]) -> _Effect:
    return "reads" if name in kind[0] else "passes" if name in kind[1] else None


def find_callee(call: ast.expr) -> str:
    """The last part of the name that is called; of a method, the method."""
    match call:
        case ast.Call(ast.Attribute(attr=name)) | ast.Call(ast.Name(name)):
            return name
    return ""
