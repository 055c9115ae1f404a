"""Python source: its calls, the constants that its names stand for, and where these are written.

A function that the file calls is read once for each call, with its arguments. Nothing is run.
"""

from __future__ import annotations

import ast
import re

from meshplan._message_text import shorten
from meshplan.lint._readers._arguments import (
    Arguments,
    Located,
    find_field,
    find_keyword,
    match_parameters,
)
from meshplan.lint._readers._changes import can_change
from meshplan.lint._readers._numbers import Number, evaluate
from meshplan.lint._readers._scopes import Scope
from meshplan.lint._readers._tree import SourceTree, Store, format_dotted, read_string

_MAX_DEPTH = 20
# Calls inside calls that are followed, and all calls of the file's own functions.
_MAX_CALLS_AROUND = 8
_MAX_CALLS = 2000
_SPACES = frozenset({"SimpleNamespace", "Namespace"})


class PythonSource(SourceTree):
    """A parsed file whose calls are followed.

    Args:
        name: of the file.
        text: the source.
        world_size: the value of ``get_world_size()`` and ``int(os.environ["WORLD_SIZE"])``.

    Attributes:
        calls: all calls with their scopes, in order of lines; those of a function once for each
            call of it.

    Raises:
        LayoutError: it is not Python; the message names file and line.
    """

    def __init__(self, name: str, text: str, world_size: int | None) -> None:
        super().__init__(name, text)
        self._world_size = world_size
        self.lacks_world_size = False  # an expression was read that needs it
        self._numbers: dict[tuple[ast.expr, Scope], int | None] = {}
        self._depth = 0
        self._count = 0  # of the calls that are followed
        self.calls: list[tuple[ast.Call, Scope]] = []
        self._entered: dict[Scope, list[Scope]] = {}  # by the scope of the definition
        self._made: dict[Scope, list[tuple[ast.Call, Scope]]] = {}  # calls of each class
        self._by_call: dict[tuple[ast.Call, Scope], Scope | None] = {}
        # Python's parser counts columns in bytes of UTF-8, and does not see a byte-order mark.
        self._bytes = text.encode()
        breaks = (one.end() for one in re.finditer(rb"\r\n|\r|\n", self._bytes))
        self._lines = [3 if text.startswith("\ufeff") else 0, *breaks]
        self._follow_calls()

    def _follow_calls(self) -> None:
        """List the calls of the module, of the functions that it calls, and of all others."""
        scopes = self.scopes
        called = {format_dotted(call.func).rpartition(".")[2] for s in scopes for call in s.calls}
        functions = [one for one in scopes if one.node is not None and not one.is_class]
        # A function that nothing calls is the start of a program: it comes before its callees.
        functions.sort(key=lambda one: one.node is not None and one.node.name in called)
        starts = {one: one for one in functions}
        done: set[Scope] = set()
        for first in (scopes[0], *functions):
            if first is not scopes[0] and first in self._entered:
                continue
            pending = [starts.get(first, first)]
            for scope in pending:  # the list grows while it is read
                if scope in done:
                    continue
                done.add(scope)
                for call in scope.calls:
                    self.calls.append((call, scope))
                    if (entered := self.enter(call, scope)) is not None:
                        pending.append(entered)
                for inner in scope.inner:
                    one = inner if inner.outer is scope else inner.copy_for_call(scope, scope.depth)
                    if inner.origin in starts:
                        starts[inner] = one
                    else:
                        pending.append(one)
        self.calls.sort(key=lambda one: (one[0].lineno, one[0].col_offset))

    def find_name(self, node: ast.expr, scope: Scope) -> str:
        """As `resolve_callee`, also of a name for the function: ``wrap = fsdp.fully_shard``."""
        binder = scope.find_binder(node.id) if isinstance(node, ast.Name) else None
        value = binder.bound[node.id] if binder is not None and isinstance(node, ast.Name) else None
        is_name = isinstance(value, ast.Name | ast.Attribute)
        return self.resolve_callee(value if value is not None and is_name else node)

    def enter(self, call: ast.Call, scope: Scope) -> Scope | None:
        """The scope of a call of a function of this file; ``None`` for any other call."""
        key = (call, scope)
        if key not in self._by_call:
            self._by_call[key] = None
            if scope.depth < _MAX_CALLS_AROUND:
                self._by_call[key] = self._enter(call, scope)
        return self._by_call[key]

    def _enter(self, call: ast.Call, scope: Scope) -> Scope | None:
        found = self.find_definition(call.func, scope)
        is_method = found is not None and found.outer is not None and found.outer.is_class
        if found is not None and isinstance(found.node, ast.ClassDef):
            self._made.setdefault(found.origin, []).append((call, scope))
            inside = found.definitions.get("__init__")
            found = None if inside is None else inside.copy_for_call(found, scope.depth)
            is_method = True
        if found is None or not isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        self._count += 1
        if self._count > _MAX_CALLS:
            return None
        decorators = {format_dotted(one) for one in found.node.decorator_list}
        new = found.copy_for_call(found.outer, scope.depth + 1)
        skip = int(is_method and "staticmethod" not in decorators)
        given = self.read_arguments(call, scope)
        new.arguments = match_parameters(found.node.args, skip, given, scope, found.outer or found)
        self._entered.setdefault(found.origin, []).append(new)
        return new

    def find_definition(self, node: ast.expr, scope: Scope) -> Scope | None:
        """The function, method or class of this file that an expression names."""
        if isinstance(node, ast.Name):
            return scope.find_definition(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        owner = self.find_class(node.value, scope)
        if owner is not None:
            inside = owner.definitions.get(node.attr)
            return None if inside is None else inside.copy_for_call(owner, scope.depth)
        methods = self.methods.get(node.attr, [])
        root = format_dotted(node.value).partition(".")[0]
        return (
            methods[0] if len(methods) == 1 and root not in {"", "torch", *self.imported} else None
        )

    def find_class(self, node: ast.expr, scope: Scope) -> Scope | None:
        """The class of this file that an expression is an instance of, or names."""
        if isinstance(node, ast.Name):
            method = scope
            while method.outer is not None and not method.outer.is_class:
                method = method.outer
            if isinstance(method.node, ast.FunctionDef) and method.outer is not None:
                first = next(iter(method.node.args.args), None)
                if first is not None and first.arg == node.id:
                    return method.outer
            found = scope.find_definition(node.id)
            if found is not None:
                return found if found.is_class else None
        resolved = self.resolve(node, scope)
        if resolved is None or not isinstance(resolved[0], ast.Call) or self._depth >= _MAX_DEPTH:
            return None
        self._depth += 1  # a name may stand for a call of its own method: x = x.build()
        try:
            made = self.find_definition(resolved[0].func, resolved[1])
        finally:
            self._depth -= 1
        return made if made is not None and made.is_class else None

    def find_instances(self, scope: Scope) -> list[Scope]:
        """The scopes of all calls of a function; its own if the file does not call it."""
        return self._entered.get(scope.origin) or [scope]

    def resolve(self, node: ast.expr, scope: Scope) -> Located | None:
        """As `Scope.resolve`, also through attributes, items and calls of the file's functions."""
        for _ in range(_MAX_DEPTH):
            found = scope.resolve(node)
            if found is None:
                return None
            node, scope = found
            further = self._resolve_once(node, scope)
            if further is None:
                return node, scope
            node, scope = further
        return None

    def _resolve_once(self, node: ast.expr, scope: Scope) -> Located | None:
        if self._depth >= _MAX_DEPTH:
            return None
        self._depth += 1
        try:
            match node:
                case ast.Attribute():
                    return self._resolve_attribute(node, scope)
                case ast.Subscript(value, ast.Constant(key)):
                    return self._resolve_item(value, key, scope)
                case ast.Call():
                    entered = self.enter(node, scope)
                    if entered is not None and len(entered.returns) == 1:
                        return entered.returns[0], entered
            return None
        finally:
            self._depth -= 1

    def read_arguments(self, call: ast.Call, scope: Scope) -> Arguments:
        """The arguments of a call, also of ``*`` and ``**`` that are written out."""
        found = Arguments()
        for argument in call.args:
            items: list[Located] | None = [(argument, scope)]
            if isinstance(argument, ast.Starred):
                items = self.read_items(argument.value, scope)
            if items is None:
                found.is_complete = False
                break
            found.positional += items
        for keyword in call.keywords:
            if keyword.arg is not None:
                found.named[keyword.arg] = (keyword.value, scope)
                continue
            match self.resolve(keyword.value, scope):
                case (ast.Dict(keys, values), home):
                    for key, value in zip(keys, values, strict=True):
                        name = None if key is None else read_string(key)
                        found.is_complete &= name is not None
                        found.named.setdefault(name or "", (value, home))
                case (ast.Call(ast.Name("dict"), [], keywords), home):
                    for one in keywords:
                        found.is_complete &= one.arg is not None
                        found.named.setdefault(one.arg or "", (one.value, home))
                case _:
                    found.is_complete = False
        return found

    def read_items(self, node: ast.expr, scope: Scope) -> list[Located] | None:
        """The items of a tuple or a list, also of ``tuple(x)``, ``x.values()`` and ``x + y``."""
        match self.resolve(node, scope):
            case (ast.Tuple(items) | ast.List(items), where):
                return [(item, where) for item in items]
            case (ast.Call(ast.Name("tuple" | "list"), [inside], []), where):
                return self.read_items(inside, where)
            case (ast.Call(ast.Attribute(value, "keys" | "values" as part), [], []), where):
                match self.resolve(value, where):
                    case (ast.Dict(keys, values), home) if None not in keys:
                        found = values if part == "values" else keys
                        return [(one, home) for one in found if one is not None]
            case (ast.BinOp(left, ast.Add(), right), where):
                first, second = self.read_items(left, where), self.read_items(right, where)
                return None if first is None or second is None else first + second
        return None

    def _resolve_item(self, node: ast.expr, key: object, scope: Scope) -> Located | None:
        """An item of a tuple, a list or a dict that is written out."""
        match self.resolve(node, scope):
            case (ast.Tuple(items) | ast.List(items), where) if type(key) is int:
                if -len(items) <= key < len(items):
                    return items[key], where
            case (ast.Dict(keys, values), where) if isinstance(key, str):
                found = [
                    v for k, v in zip(keys, values, strict=True) if k and read_string(k) == key
                ]
                return (found[0], where) if len(found) == 1 and None not in keys else None
        return None

    def _resolve_attribute(self, node: ast.Attribute, scope: Scope) -> Located | None:
        """An attribute of a namespace, an enumeration, a dataclass or another class."""
        made = self.resolve(node.value, scope)
        stores = self.stores.get(node.attr, [])
        if made and isinstance(made[0], ast.Constant):
            return made if node.attr == "value" else None  # a member of an enumeration
        if made and isinstance(made[0], ast.Call) and not stores:
            call, where = made[0], made[1]
            callee = self.resolve_callee(call.func)
            if callee in _SPACES:
                return find_keyword(call, node.attr, where)
            if callee == "replace" and call.args:
                rest = ast.copy_location(ast.Attribute(call.args[0], node.attr, ast.Load()), node)
                return find_keyword(call, node.attr, where) or (rest, where)
        owner = self.find_class(node.value, scope)
        if owner is None:
            return None
        if stores:
            found = self._resolve_store(stores, owner, scope) if len(stores) == 1 else None
        elif made and isinstance(made[0], ast.Call):
            found = self._resolve_field(node.attr, owner, (made[0], made[1]))
        elif isinstance(node.value, ast.Name) and scope.find_definition(node.value.id):
            found = self._resolve_field(node.attr, owner, None)  # of the class itself
        else:  # ``self``: the one object that the file makes
            calls = self._made.get(owner.origin, [])
            if len(calls) > 1 or (not calls and _is_dataclass(owner)):
                return None
            found = self._resolve_field(node.attr, owner, calls[0] if calls else None)
        return None if found is None or can_change(found[0]) else found

    def _resolve_store(self, stores: list[Store], owner: Scope, scope: Scope) -> Located | None:
        """The one value that is stored in an attribute of a class."""
        (store,) = stores
        home = self.find_class(store.target.value, store.scope)
        if store.value is None or home is None or home.origin is not owner.origin:
            return None
        if store.target.attr in owner.bound:
            return None
        if scope.origin is store.scope.origin:
            return store.value, scope
        scopes = self.find_instances(store.scope)
        return (store.value, scopes[0]) if len(scopes) == 1 else None

    def _resolve_field(
        self, name: str, owner: Scope, made: tuple[ast.Call, Scope] | None
    ) -> Located | None:
        """An attribute of a class, or the argument of the call that makes the object."""
        if made is not None and "__init__" not in owner.definitions:
            call, where = made
            is_derived = isinstance(owner.node, ast.ClassDef) and bool(owner.node.bases)
            if any(one.arg is None for one in call.keywords) or (
                call.args and is_derived and _is_dataclass(owner)
            ):
                return None
            if given := find_field(call, name, owner, where):
                return given
        value = owner.bound.get(name)
        if isinstance(value, ast.Call) and self.resolve_callee(value.func) == "field":
            return find_keyword(value, "default", owner)
        return None if value is None else (value, owner)

    def find_span(self, node: ast.expr) -> tuple[int, int]:
        """Offsets of a node, in characters."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._find_offset(node.lineno, node.col_offset),
            self._find_offset(node.end_lineno, node.end_col_offset),
        )

    def _find_offset(self, line: int, column: int) -> int:
        return len(self._bytes[: self._lines[line - 1] + column].decode())

    def shorten(self, node: ast.expr) -> str:
        """The source of a node, on one line of at most 60 characters."""
        start, end = self.find_span(node)
        return shorten(" ".join(self.text[start : min(end, start + 200)].split()))

    def read_number(self, node: ast.expr, scope: Scope) -> Number | None:
        """The whole number that an expression stands for, and the place that defines it."""
        resolved = self.resolve(node, scope)
        value = self.read_value(node, scope)
        return (
            None if value is None or not resolved else Number(value, *self.find_span(resolved[0]))
        )

    def read_value(self, node: ast.expr, scope: Scope) -> int | None:
        """The whole number that an expression stands for."""
        resolved = self.resolve(node, scope)
        if resolved is None:
            return None
        node, scope = resolved
        if (node, scope) not in self._numbers and self._depth < _MAX_DEPTH:
            self._numbers[node, scope] = None  # while it is unknown: a name may stand for itself

            def lookup(name: str) -> int | None:
                return self.read_value(ast.Name(name, ast.Load()), scope)

            def other(inside: ast.expr) -> int | None:
                found = None if inside is node else self.resolve(inside, scope)
                if found is None or found[0] is inside:
                    return self._read_number_of_ranks(inside)
                return self.read_value(*found)

            self._depth += 1
            self._numbers[node, scope] = evaluate(node, lookup, other)
            self._depth -= 1
        return self._numbers.get((node, scope))

    def _read_number_of_ranks(self, node: ast.expr) -> int | None:
        """The value of an expression that reads the number of ranks."""
        if not isinstance(node, ast.Call):
            return None
        name = format_dotted(node.func)
        variable = None
        if name.rpartition(".")[2] == "get_world_size" and not node.args and not node.keywords:
            variable = "WORLD_SIZE"
        if name == "int" and len(node.args) == 1:
            match node.args[0]:
                case ast.Subscript(value, key) if format_dotted(value).endswith("environ"):
                    variable = read_string(key)
                case ast.Call(function, [key, *_]) if format_dotted(function).endswith(
                    ("getenv", "environ.get")
                ):
                    variable = read_string(key)
        if variable != "WORLD_SIZE":
            return None
        self.lacks_world_size |= self._world_size is None
        return self._world_size


def _is_dataclass(owner: Scope) -> bool:
    decorators = owner.node.decorator_list if owner.node is not None else []
    names = [format_dotted(one.func if isinstance(one, ast.Call) else one) for one in decorators]
    return any(name.endswith("dataclass") for name in names)
