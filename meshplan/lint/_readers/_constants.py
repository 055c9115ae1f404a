"""Constants of a Python file: the values that its names have where each call is made.

The file is parsed and never run. Its statements are read in order with the values of its literals,
both sides of each condition, and a function once for each call. A function that the file does not
call is read at the end, with unknown arguments. What this cannot show is `UNKNOWN`: lists and dicts
that an unknown function gets, and all that a loop changes.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from meshplan._message_text import shorten
from meshplan.errors import LayoutError
from meshplan.lint._readers._numbers import combine
from meshplan.lint._readers._values import (
    UNKNOWN,
    UNKNOWN_RANKS,
    Arguments,
    Class,
    Function,
    Grid,
    Items,
    Path,
    Record,
    Scope,
    Span,
    Text,
    Unknown,
    Value,
    Whole,
    find_callee,
    is_constant,
    is_dict,
    join,
    list_keys,
    list_marks,
    list_values,
)

_MAX_STEPS, _MAX_NESTING, _MAX_CALLS = 60_000, 60, 8
_MAX_UNROLLED, _MAX_ITEMS = 16, 1024
# Methods that leave their object as it is, and functions that leave their arguments.
_METHODS = frozenset(
    {"clone", "copy", "count", "dim", "get", "index", "items", "keys", "numel", "shape", "size"}
    | {"tolist", "values"}
)
_FUNCTIONS = frozenset(
    {"DeviceMesh", "_unflatten", "all", "any", "array", "bool", "debug", "dict", "enumerate"}
    | {"error", "filter", "format", "info", "init_device_mesh", "int", "isinstance", "join", "len"}
    | {"list", "map", "max", "min", "new_group", "print", "prod", "range", "repr", "reversed"}
    | {"set", "sorted", "str", "sum", "tensor", "tuple", "type", "warning", "zip"}
)
# Functions that may bind any name of the module, and words of those that set attributes.
_BINDERS = frozenset({"exec", "globals"})
_SETTERS = re.compile(
    r"apply|cli|configure|load|merge|override|overwrite|parse|read|setattr|update|vars"
)
# Decorators that pass the arguments of a call on.
_WRAPPERS = frozenset(
    {"cached_property", "classmethod", "inference_mode", "no_grad", "property", "record"}
    | {"staticmethod"}
)


class TooLong(Exception):
    """The file has more calls than are followed."""


def parse(name: str, text: str) -> ast.Module:
    """The syntax tree.

    Raises:
        LayoutError: it is not Python; the message names file and line.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text.removeprefix("\ufeff"))
    except SyntaxError as error:
        where = f"{name}:{error.lineno}" if error.lineno else name
        why = " ".join(str(error.msg).split())[:100]
        raise LayoutError(
            f"{where}: cannot be parsed as Python ({why}); is the file complete?"
        ) from None
    except (ValueError, MemoryError, RecursionError):
        raise LayoutError(f"{name}: cannot be parsed as Python: nested too deeply") from None


class Reader:
    """Reads a file; its subclass answers the calls of functions from elsewhere.

    Args:
        tree: of the file.
        text: its source.
        world_size: the number of ranks, if it is known.

    Attributes:
        run: 0 in the module, then one for each function that the file does not call.
        depth: of conditions around the statement that is read.
        stack: the calls of functions that are being read.
        read_calls: the calls that were read.
    """

    def __init__(self, tree: ast.Module, text: str, world_size: int | None) -> None:
        self.tree, self.text = tree, text
        self.world_size = UNKNOWN_RANKS if world_size is None else Whole(world_size)
        self.stack: tuple[ast.AST, ...] = ()
        self.run = self.depth = self._steps = self._nesting = 0
        self.read_calls: set[ast.Call] = set()
        every = [*ast.walk(tree)]
        self.calls = [node for node in every if isinstance(node, ast.Call)]
        self._renamed = {
            name.asname: name.name
            for node in every
            if isinstance(node, ast.ImportFrom)
            for name in node.names
            if name.asname
        }
        # Another function may bind these names, or set these attributes, at any time.
        shared = [node.names for node in every if isinstance(node, ast.Global | ast.Nonlocal)]
        self._shared = {name for names in shared for name in names}
        # How often the file binds or changes what a name or an attribute stands for.
        self._changes = Counter(name for node in every for name in _list_changes(node))
        self._functions: dict[ast.AST, Function] = {}
        self._entered: set[ast.AST] = set()
        # Python's parser counts columns in bytes of UTF-8, and does not see a byte-order mark.
        data = text.encode()
        breaks = (one.end() for one in re.finditer(rb"\r\n|\r|\n", data))
        self._lines = [3 if text.startswith("\ufeff") else 0, *breaks]
        self._characters = [0, *accumulate(byte & 0xC0 != 0x80 for byte in data)]

    def read_file(self) -> None:
        """Read the module, then the functions that it does not call.

        Raises:
            TooLong: it has more calls than are followed.
        """
        self._read_block(self.tree.body, Scope())
        called = {find_callee(call) for call in self.calls}
        while left := [one for one in self._functions.values() if one.node not in self._entered]:
            # A function that nothing calls comes before those that it calls.
            for one in sorted(left, key=lambda one: one.node.name in called):
                if one.node not in self._entered:
                    self.run += 1
                    self._read_uncalled(one)

    def answer(self, path: Path, given: Arguments, node: ast.Call) -> Value:
        """The value of a call of a function from elsewhere; ``None`` if this has no answer."""
        raise NotImplementedError

    def find_item(self, value: Value, index: Value) -> Value:
        """An item of a value that this does not know."""
        raise NotImplementedError

    def call_method(self, value: Value, name: str, given: Arguments, node: ast.Call) -> Value:
        """The value of a method of such a value."""
        raise NotImplementedError

    def note_attribute(self, owner: Value, name: str, line: int) -> None:
        """Note that the file sets an attribute."""
        raise NotImplementedError

    @property
    def moment(self) -> tuple[int, int]:
        """The run, and the conditions around the statement that is read."""
        return self.run, self.depth

    def find_span(self, node: ast.AST) -> Span:
        """Offsets of a node, in characters."""
        one: Any = node
        ends = (one.lineno, one.col_offset), (one.end_lineno, one.end_col_offset)
        first, last = (self._characters[self._lines[line - 1] + column] for line, column in ends)
        return first, last

    def resolve_callee(self, node: ast.expr) -> str:
        """The last part of the name that is called; of a renamed import, the original name."""
        last = getattr(node, "attr", getattr(node, "id", ""))
        return self._renamed.get(last, last) if isinstance(node, ast.Name) else last

    def shorten(self, node: ast.expr) -> str:
        """The source of a node, on one line of at most 60 characters."""
        start, end = self.find_span(node)
        return shorten(" ".join(self.text[start : min(end, start + 200)].split()))

    # Statements.

    def _read_block(self, body: Sequence[ast.stmt], scope: Scope) -> bool:
        """Read statements in order; whether the end of them is never reached."""
        ended = False
        for one in body:
            ended |= self._read_statement(one, scope)
        return ended

    def _read_statement(self, node: ast.stmt, scope: Scope) -> bool:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._define(node, scope)
            case ast.ClassDef():
                self._define_class(node, scope)
            case ast.Return(value):
                scope.returns.append(None if value is None else self.read(value, scope))
                return True
            case ast.Raise() | ast.Continue() | ast.Break():
                self._read_children(node, scope)
                return True
            case ast.If(test):
                self.read(test, scope)
                return self._read_branches([node.body, node.orelse], scope)
            case ast.For() | ast.AsyncFor() | ast.While():
                self._read_loop(node, scope)
            case ast.With() | ast.AsyncWith():
                return self._read_with(node, scope)
            case ast.Try() | ast.TryStar():
                self._read_branches([node.body, []], scope)
                self._blur(node.body, scope)
                self._read_branches([node.orelse, *(one.body for one in node.handlers)], scope)
                return self._read_block(node.finalbody, scope)
            case ast.Match():
                self.read(node.subject, scope)
                scope.names |= dict.fromkeys(_list_targets([node]), UNKNOWN)
                self._read_branches([[], *(one.body for one in node.cases)], scope)
            case _:
                self._read_binding(node, scope)
        return False

    def _read_binding(self, node: ast.stmt, scope: Scope) -> None:
        """Read a simple statement."""
        match node:
            case ast.Assign(targets, value):
                found = self.read(value, scope)
                for target in targets:
                    self._store(target, found, scope)
            case ast.AnnAssign(target, value=ast.expr() as value):
                self._store(target, self.read(value, scope), scope)
            case ast.AugAssign(target, op, value):
                left, right = self.read(target, scope), self.read(value, scope)
                self.change(left)
                self._store(target, self._combine(op, left, right, node), scope)
            case ast.Delete(targets):
                for target in targets:
                    self._store(target, UNKNOWN, scope)
            case ast.Import(names) | ast.ImportFrom(names=names):
                start = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
                for one in names:
                    if one.name == "*":
                        self._forget(scope)
                    name = one.name if one.asname or start else one.name.partition(".")[0]
                    self._bind(one.asname or name, Path(start + name, is_imported=True), scope)
            case _:
                self._read_children(node, scope)

    def _define_class(self, node: ast.ClassDef, scope: Scope) -> None:
        inner = Scope(scope, is_class=True)
        found = Class(node, inner, [self.read(one, scope) for one in node.bases])
        self._bind(node.name, found, scope)
        self._read_block(node.body, inner)
        for one in inner.names.values():
            if isinstance(one, Function) and one.scope is inner:
                one.owner = found

    def _read_with(self, node: ast.With | ast.AsyncWith, scope: Scope) -> bool:
        for item in node.items:
            self.read(item.context_expr, scope)
            if item.optional_vars is not None:
                self._store(item.optional_vars, UNKNOWN, scope)
        if any(find_callee(item.context_expr) in _RAISES for item in node.items):
            inside = [two for one in node.body for two in ast.walk(one)]
            self.read_calls |= {one for one in inside if isinstance(one, ast.Call)}
            return False  # what a test refuses is never made
        return self._read_block(node.body, scope)

    def _read_children(self, node: ast.AST, scope: Scope) -> None:
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.expr):
                self.read(one, scope)

    def _forget(self, scope: Scope) -> None:
        """Forget the values of the module's names, which a star or ``exec`` may bind again."""
        while scope.outer is not None:
            scope = scope.outer
        _forget_values(scope.names)

    def _read_branches(self, bodies: Sequence[Sequence[ast.stmt]], scope: Scope) -> bool:
        """Read statements of which one list runs; whether the end of all is never reached."""
        before = scope.names
        ends: list[dict[str, Value]] = []
        left = False
        for body in bodies:
            scope.names = dict(before)
            self.depth += 1
            ended = self._read_block(body, scope)
            self.depth -= 1
            if not ended:
                ends.append(scope.names)
            elif any(isinstance(two, _LEAVES) for one in body for two in ast.walk(one)):
                left = True
        self.depth += left  # up to the end of the function, unless the program ends
        names = dict.fromkeys(name for end in ends or [before] for name in end)
        scope.names = {
            name: join([end.get(name, UNKNOWN) for end in ends or [before]]) for name in names
        }
        return not ends

    def _read_loop(self, node: ast.For | ast.AsyncFor | ast.While, scope: Scope) -> None:
        """Read the body twice: first for what it changes, then with that unknown."""
        item = None if isinstance(node, ast.While) else self._find_any(self.read(node.iter, scope))
        before, changed = dict(scope.names), _list_targets(node.body)
        self.depth += 1
        for _ in range(2):
            scope.names |= {name: UNKNOWN for name in changed if name in before}
            if isinstance(node, ast.While):
                self.read(node.test, scope)
            else:
                self._store(node.target, item, scope)
            self._read_block(node.body, scope)
        self.depth -= 1
        scope.names |= {name: join([before[name], scope.names[name]]) for name in before}
        self._blur(node.body, scope)
        self._read_block(node.orelse, scope)

    def _blur(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """Note that statements may have been left at any place."""
        for name in _list_targets(body):
            scope.names[name] = join([scope.names.get(name, UNKNOWN), UNKNOWN])

    def _find_any(self, value: Value) -> Value:
        """What an item of a value may be."""
        if isinstance(value, Items) and value.entries is not None:
            return join([one for one, _ in value.entries])
        if not isinstance(value, Grid) or value.sizes is not None:
            self.change(value)
        return UNKNOWN

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        for one in node.decorator_list:
            self.read(one, scope)
        args = node.args
        positional = [*args.posonlyargs, *args.args]
        pairs = [*zip(reversed(positional), reversed(args.defaults), strict=False)]
        pairs += [(a, b) for a, b in zip(args.kwonlyargs, args.kw_defaults, strict=True) if b]
        defaults = {one.arg: self.read(default, scope) for one, default in pairs}
        self._functions[node] = Function(node, scope, defaults)
        self._bind(node.name, self._functions[node], scope)

    # Names and attributes.

    def _bind(self, name: str, value: Value, scope: Scope) -> None:
        if name in scope.names:
            scope.rebound.add(name)
        scope.names[name] = UNKNOWN if name in self._shared else value

    def _find_name(self, name: str, scope: Scope) -> Value:
        one: Scope | None = scope
        while one is not None:
            if name in one.names and (one is scope or not one.is_class):
                found = one.names[name]
                # A function that the file does not call may run between two assignments.
                if one is scope:
                    return found
                return self._forget_late(name, found, is_open=name in one.rebound)
            one = one.outer
        return Path(name)

    def _forget_late(self, name: str, value: Value, is_open: bool = True) -> Value:
        """A value that is bound outside of a function which the file does not call."""
        is_changed = is_open if is_constant(value) else isinstance(value, Items) or is_dict(value)
        is_late = self.run > 0 and is_changed and self._changes[name] > 1
        return UNKNOWN if is_late else value

    def _store(self, target: ast.expr, value: Value, scope: Scope) -> None:
        match target:
            case ast.Name(name):
                self._bind(name, value, scope)
            case ast.Starred(value=inside):
                self._store(inside, UNKNOWN, scope)
            case ast.Tuple(parts) | ast.List(parts):
                entries = value.entries if isinstance(value, Items) else None
                values = [UNKNOWN] * len(parts)
                if entries is not None and len(entries) == len(parts):
                    values = [one for one, _ in entries]
                else:
                    self.change(value)
                for part, one in zip(parts, values, strict=True):
                    self._store(part, one, scope)
            case ast.Attribute(inside, name):
                self._set(self.read(inside, scope), name, value)
                self.note_attribute(self.read(inside, scope), name, target.lineno)
            case ast.Subscript(inside, index):
                key = self.read(index, scope)
                self._set(self.read(inside, scope), key if isinstance(key, Text) else None, value)

    def _set(self, owner: Value, name: str | None, value: Value) -> None:
        """Set an attribute or an item."""
        for one in list_values(owner):
            if name is None or not isinstance(one, Class | Record):
                self.change(one)
                self.change(value)  # it may be changed wherever it is kept
                continue
            fields = one.scope.names if isinstance(one, Class) else one.fields
            if fields is None:
                continue
            run, depth = (0, 0) if isinstance(one, Class) else one.moment
            is_sure = one is owner and run == self.run and depth >= self.depth
            old = fields.get(name)
            if old is None and isinstance(one, Record) and one.owner is not None:
                old = one.owner.find(name)
            # Before its first value, an attribute of an object of elsewhere has another one.
            is_first = old is None and not (isinstance(one, Record) and one.path)
            fields[name] = value if is_sure or is_first else join([old or UNKNOWN, value])

    def change(self, value: Value) -> None:
        """Note that a list, a dict or a tensor may have changed, and all that is in it."""
        for one in list_values(value):
            inside: list[Value] = []
            if isinstance(one, Items) and one.entries is not None:
                inside = [entry for entry, _ in one.entries]
                one.entries = one.entries if one.is_tuple else None
            elif is_dict(one) and one.fields is not None:
                inside, one.fields = [*one.fields.values()], None
            while isinstance(one, Grid) and not one.is_changed:
                one.is_changed, one = True, one.base
            for entry in inside:
                self.change(entry)

    def _forget_fields(self, value: Value) -> None:
        """Note that all attributes of an object may have changed."""
        if isinstance(value, Record) and not is_dict(value):
            value.fields = None
        elif isinstance(value, Class):
            _forget_values(value.scope.names)

    def _find_attribute(self, value: Value, name: str) -> Value:
        return join([self._find_attribute_of(one, name) for one in list_values(value)])

    def _find_attribute_of(self, value: Value, name: str) -> Value:
        if name == "__dict__":
            self._forget_fields(value)
        match value:
            case Path():
                return Path(f"{value.name}.{name}", value.is_imported)
            case Class():
                return self._forget_late(name, self._find_member(value.find(name), value, value))
            case Record(owner=Class() as owner):
                if value.fields is not None and name in value.fields:
                    return self._forget_late(name, value.fields[name])
                found = owner.find(name)
                is_closed = value.fields is not None and not owner.is_open
                if not is_closed and not isinstance(found, Function):
                    return UNKNOWN
                return self._forget_late(name, self._find_member(found, value, owner))
            case Record(fields=dict() as fields) if value.path:
                inside = Record({}, None, f"{value.path}.{name}", moment=value.moment)
                return fields.setdefault(name, inside) if value.owner is None else UNKNOWN
            case int() | str() if name == "value":
                return value  # a member of an enumeration
        if name not in _METHODS:
            self.change(value)
        return UNKNOWN

    def _find_member(self, found: Value, value: Value, owner: Class) -> Value:
        """An attribute of a class, as of one of its objects."""
        if isinstance(found, Record) and found.path.endswith("field"):
            return (found.fields or {}).get("default", UNKNOWN)
        if not isinstance(found, Function):
            return UNKNOWN if found is None else found
        marks = list_marks(found.node)
        if "staticmethod" in marks or (value is owner and "classmethod" not in marks):
            return found
        bound = owner if "classmethod" in marks else value
        method = Function(found.node, found.scope, found.defaults, found.owner, bound)
        return self._enter(method, Arguments(), found.node) if "property" in marks else method

    # Expressions.

    def read(self, node: ast.expr, scope: Scope) -> Value:
        """The value of an expression."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise TooLong
        if self._nesting >= _MAX_NESTING:
            return UNKNOWN
        self._nesting += 1
        try:
            return self._read(node, scope)
        finally:
            self._nesting -= 1

    def _read(self, node: ast.expr, scope: Scope) -> Value:
        match node:
            case ast.Constant(value):
                return self._place(value, node)
            case ast.Name(name):
                return self._find_name(name, scope)
            case ast.Attribute(inside, name):
                return self._find_attribute(self.read(inside, scope), name)
            case ast.Tuple(parts) | ast.List(parts):
                entries = self._read_items(parts, scope)
                return Items(entries, self.find_span(node), isinstance(node, ast.Tuple))
            case ast.Dict(keys, values):
                names = [None if key is None else self.read(key, scope) for key in keys]
                fields: dict[Any, Value] = dict(
                    zip(names, [self.read(one, scope) for one in values], strict=True)
                )
                is_known = all(isinstance(one, Text) for one in names)
                return Record(fields if is_known else None, moment=self.moment)
            case ast.Subscript(inside, index):
                return self._find_item(self.read(inside, scope), self.read(index, scope))
            case ast.Call():
                return self._call(node, scope)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._read_comprehension(node, scope)
        return self._read_operation(node, scope)

    def _read_operation(self, node: ast.expr, scope: Scope) -> Value:
        match node:
            case ast.BinOp(left, op, right):
                return self._combine(op, self.read(left, scope), self.read(right, scope), node)
            case ast.UnaryOp(ast.USub(), inside):
                value = self.read(inside, scope)
                return self._place(-value, node) if isinstance(value, Whole) else UNKNOWN
            case ast.IfExp(test, body, orelse):
                self.read(test, scope)
                return join([self.read(body, scope), self.read(orelse, scope)])
            case ast.BoolOp(values=values):
                self.depth += 1
                found = join([self.read(one, scope) for one in values])
                self.depth -= 1
                return found
            case ast.NamedExpr(target, inside):
                value = self.read(inside, scope)
                self._store(target, value, scope)
                return value
            case ast.Await(inside):
                return self.read(inside, scope)
            case ast.Lambda(args, body):
                parameters = [one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
                self.depth += 1
                self.read(body, Scope(scope, names=dict.fromkeys(parameters, UNKNOWN)))
                self.depth -= 1
                return UNKNOWN
        self._read_children(node, scope)
        return UNKNOWN

    def _place(self, value: object, node: ast.AST) -> Value:
        """A constant, with the place of its text."""
        found: Value = value
        if type(value) is int or isinstance(value, str):
            found = Whole(value) if isinstance(value, int) else Text(value)
            found.span = self.find_span(node)
        return found if is_constant(value) else UNKNOWN

    def _read_items(
        self, parts: Sequence[ast.expr], scope: Scope
    ) -> list[tuple[Value, Span]] | None:
        found: list[tuple[Value, Span]] | None = []
        for part in parts:
            inside = self.read(part.value if isinstance(part, ast.Starred) else part, scope)
            entries: list[tuple[Value, Span]] | None = [(inside, self.find_span(part))]
            if isinstance(part, ast.Starred):
                entries = inside.entries if isinstance(inside, Items) else None
            found = None if found is None or entries is None else [*found, *entries]
        return found if found is None or len(found) <= _MAX_ITEMS else None

    def _read_comprehension(self, node: Any, scope: Scope) -> Value:
        """What a comprehension has: ``{name: mesh[name] for name in NAMES}`` item by item."""
        inner = Scope(scope)
        source = self.read(node.generators[0].iter, scope)
        entries = source.entries if isinstance(source, Items) else None
        is_simple = len(node.generators) == 1 and not node.generators[0].ifs
        is_known = entries is not None and is_simple and len(entries) <= _MAX_UNROLLED
        items = [one for one, _ in entries or ()] if is_known else [self._find_any(source)]
        found: list[tuple[Any, Value]] = []
        self.depth += 1
        for item in items:
            self._store(node.generators[0].target, item, inner)
            for part in node.generators[1:]:
                self._store(part.target, self._find_any(self.read(part.iter, inner)), inner)
            for test in (one for part in node.generators for one in part.ifs):
                self.read(test, inner)
            key = self.read(node.key, inner) if isinstance(node, ast.DictComp) else None
            found.append((key, self.read(getattr(node, "elt", None) or node.value, inner)))
        self.depth -= 1
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            span = self.find_span(node)
            return Items([(one, span) for _, one in found] if is_known else None, span)
        is_known = is_known and all(isinstance(key, Text) for key, _ in found)
        return Record(dict(found) if is_known else None, moment=self.moment)

    def _combine(self, op: ast.operator, left: Value, right: Value, node: ast.AST) -> Value:
        match left, right:
            case Whole(), Whole():
                number = combine(op, left, right)
                return UNKNOWN if number is None else self._place(number, node)
            case Items(entries=list() as first), Items(entries=list() as second):
                if isinstance(op, ast.Add) and len(first) + len(second) < _MAX_ITEMS:
                    return Items(first + second, self.find_span(node), left.is_tuple)
        needs = any(isinstance(one, Unknown) and one.ranks for one in (left, right))
        return UNKNOWN_RANKS if needs else UNKNOWN

    def _find_item(self, value: Value, index: Value) -> Value:
        pairs = [(one, key) for one in list_values(value) for key in list_values(index)]
        found = [self._find_item_of(*pair) for pair in pairs]
        # Of several meshes, that with the axes.
        known = [one for one in found if not isinstance(one, Unknown)]
        return join(found if not known or any(map(is_constant, known)) else known)

    def _find_item_of(self, value: Value, key: Value) -> Value:
        match value:
            case Items(entries=list() as entries) if isinstance(key, Whole):
                return entries[key][0] if -len(entries) <= key < len(entries) else UNKNOWN
            case Record(fields=dict() as fields) if isinstance(key, Text) and is_dict(value):
                return fields.get(key, UNKNOWN)
            case Path(name) if name.endswith("environ") and key == "WORLD_SIZE":
                return self.world_size
        return self.find_item(value, key)

    # Calls.

    def _call(self, node: ast.Call, scope: Scope) -> Value:
        self.read_calls.add(node)
        owner, method, function = UNKNOWN, "", None
        if isinstance(node.func, ast.Attribute):
            owner, method = self.read(node.func.value, scope), node.func.attr
            if isinstance(owner, Path | Class | Record) and not is_dict(owner):
                function = self._find_attribute(owner, method)
        else:
            function = self.read(node.func, scope)
        given = self._read_arguments(node, scope)
        made_of = owner.owner if isinstance(owner, Record) else None
        if function is UNKNOWN and made_of is not None and made_of.is_open:
            self._forget_fields(owner)  # a method of a class from elsewhere
        choices = list_values(function)
        known = [one for one in choices if isinstance(one, Function | Class | Path)]
        found = [self._call_one(one, given, node, scope) for one in known]
        if not known:
            name = method or find_callee(node)
            found = [self._call_method(one, name, given, node) for one in list_values(owner)]
        return join(found + [UNKNOWN] * (0 < len(known) < len(choices)))

    def _call_one(
        self, function: Function | Class | Path, given: Arguments, node: ast.Call, scope: Scope
    ) -> Value:
        if isinstance(function, Function):
            return self._enter(function, given, node)
        if isinstance(function, Class):
            return self._make(function, given, node)
        if function.last in _BINDERS and not function.is_imported:
            self._forget(scope)
        return self._call_path(function, given, node)

    def _call_path(self, path: Path, given: Arguments, node: ast.Call) -> Value:
        """The value of a call of a function from elsewhere."""
        found = self.answer(path, given, node)
        found = self._call_builtin(path, given, node) if found is None else found
        for one in given if path.last not in _FUNCTIONS and found is None else ():
            self.change(one)
            if _SETTERS.search(path.last.lower()):
                self._forget_fields(one)
        fields = dict(given.named) if given.is_complete else None
        made = Record(fields, None, path.name, given.positional, self.moment)
        return made if found is None else found

    def _call_builtin(self, path: Path, given: Arguments, node: ast.Call) -> Value:
        """The value of some functions of Python and torch; ``None`` for all others."""
        first = next(iter(given.positional), None)
        match path.last, first:
            case "int", Whole() | Unknown():
                return first
            case "len", Items(entries=list() as entries):
                return Whole(len(entries))
            case "tuple" | "list" | "tensor", Items(entries=entries):
                copy = None if entries is None else [*entries]
                return Items(copy, first.span, path.last == "tuple")
            case "tuple" | "list", Record(fields=dict() as fields) if is_dict(first):
                return list_keys(fields)
            case "dict", None if given.is_complete:
                return Record(dict(given.named), moment=self.moment)
            case "cast", _ if len(given.positional) == 2:
                return given.positional[1]
            case "replace", Record(fields=dict() as fields) if given.is_complete:
                made = Record(fields | given.named, first.owner, first.path, moment=self.moment)
                for name in given.named:
                    self.note_attribute(made, name, node.lineno)
                return made
        return self._count_ranks(path, given)

    def _count_ranks(self, path: Path, given: Arguments) -> Value:
        first = next(iter(given.positional), None)
        match path.last, first:
            case "list" | "tensor", Grid():
                return Grid(first.count, first.sizes, first)
            case "arange" | "range", _ if len(given.positional) == 1:
                return Grid(first)
            case "get_world_size", None:
                return self.world_size
            case "get" | "getenv", "WORLD_SIZE":
                return self.world_size
        return None

    def _call_method(self, value: Value, name: str, given: Arguments, node: ast.Call) -> Value:
        """The value of a method of a list, a dict, a tensor, or an unknown value."""
        match value, name:
            case (Unknown(), _) | (Record(path=str()), _) if not is_dict(value):
                return self._call_path(Path(name, is_imported=True), given, node)
            case Record(path="", fields=dict() as fields), "keys" | "values":
                if name == "keys":
                    return list_keys(fields)
                return Items([(one, getattr(one, "span", (0, 0))) for one in fields.values()])
            case Record(path="", fields=dict() as fields), "get" if given.positional:
                return self._find_item(value, given.positional[0])
            case Grid(), "view" | "reshape":
                sizes = next(iter(given.positional), None)
                if not isinstance(sizes, Items):
                    spans = [self.find_span(one) for one in node.args]
                    sizes = Items([*zip(given.positional, spans, strict=False)])
                return Grid(value.count, sizes, value)
            case Items() | Grid() | Record(), _:
                for one in (value, *given) if name not in _METHODS else ():
                    self.change(one)
                return UNKNOWN
        return self.call_method(value, name, given, node)

    def _read_arguments(self, node: ast.Call, scope: Scope) -> Arguments:
        entries = self._read_items(node.args, scope)
        found = Arguments([one for one, _ in entries or ()], is_complete=entries is not None)
        for keyword in node.keywords:
            value = self.read(keyword.value, scope)
            if keyword.arg is not None:
                found.named[keyword.arg] = value
            elif is_dict(value) and value.fields is not None:
                found.named |= value.fields
            else:
                found.is_complete = False
        return found

    def _enter(self, function: Function, given: Arguments, node: ast.AST) -> Value:
        """Read the body of a function with the arguments of a call."""
        too_deep = len(self.stack) >= _MAX_CALLS or self._nesting > _MAX_NESTING // 2
        if too_deep or node in self.stack:
            for one in given:
                self.change(one)
            return UNKNOWN
        self._entered.add(function.node)
        scope = Scope(function.scope, names=self._match(function, given))
        stack, depth = self.stack, self.depth
        self.stack = (*stack, node)
        self._read_block(function.node.body, scope)
        self.stack, self.depth = stack, depth
        return join(scope.returns or [None])

    def _match(self, function: Function, given: Arguments) -> dict[str, Value]:
        """The values of the parameters."""
        args, known = function.node.args, given.is_complete
        names = [one.arg for one in (*args.posonlyargs, *args.args)]
        bound = [] if function.bound is None else [function.bound]
        positional = [*bound, *given.positional]
        every = [*names, *(one.arg for one in args.kwonlyargs)]
        found: dict[str, Value] = {key: Record({}, None, key, moment=self.moment) for key in every}
        # A decorator such as click.command takes arguments from elsewhere.
        is_plain = list_marks(function.node) <= _WRAPPERS
        found |= function.defaults if known and is_plain else {}
        found |= dict(zip(names, positional, strict=False))
        rest = {key: one for key, one in given.named.items() if key not in found}
        found |= {key: one for key, one in given.named.items() if key in found}
        if args.vararg is not None:
            more: list[tuple[Value, Span]] = [(one, (0, 0)) for one in positional[len(names) :]]
            found[args.vararg.arg] = Items(more if known else None)
        if args.kwarg is not None:
            found[args.kwarg.arg] = Record(rest if known else None, moment=self.moment)
        return found

    def _make(self, owner: Class, given: Arguments, node: ast.AST) -> Record:
        """An object of a class."""
        found = Record({}, owner, moment=self.moment)
        owner.made.append(found)
        start = owner.find("__init__")
        if isinstance(start, Function):
            method = Function(start.node, start.scope, start.defaults, start.owner, found)
            self._enter(method, given, node)
        elif owner.has_fields:
            targets = [one.target for one in owner.node.body if isinstance(one, ast.AnnAssign)]
            fields = [one.id for one in targets if isinstance(one, ast.Name)]
            is_derived = any(isinstance(one, Class) for one in owner.bases)
            is_known = given.is_complete and not (given.positional and is_derived)
            values = dict(zip(fields, given.positional, strict=False)) | given.named
            found.fields = values if is_known else None
            after = owner.find("__post_init__")
            if isinstance(after, Function):
                method = Function(after.node, after.scope, after.defaults, after.owner, found)
                self._enter(method, Arguments(), node)
        if owner.find("__getattribute__") or owner.find("__setattr__"):
            found.fields = None
        return found

    def _read_uncalled(self, function: Function) -> None:
        """Read a function that the file does not call, with unknown arguments."""
        owner: Class | None = function.owner
        bound: Value = None
        marks = list_marks(function.node)
        unknown = Arguments(is_complete=False)
        if owner is not None and "staticmethod" not in marks:
            if len(owner.made) == 1:
                bound = owner.made[0]
            elif owner.made or owner.has_fields:
                bound = Record(None, owner, moment=self.moment)
            else:
                bound = self._make(owner, unknown, owner.node)
                if function.node in self._entered:
                    return
            bound = owner if "classmethod" in marks else bound
        method = Function(function.node, function.scope, function.defaults, owner, bound)
        self._enter(method, unknown, function.node)
        self._entered.add(function.node)


_RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex"})
_LEAVES = (ast.Return, ast.Continue, ast.Break)


def _forget_values(names: dict[str, Value]) -> None:
    for name, value in names.items():
        names[name] = value if isinstance(value, Function | Class | Path) else UNKNOWN


def _list_changes(node: ast.AST) -> list[str]:
    """The names and attributes that a node binds; twice those that it changes in place."""
    found: list[ast.AST] = []
    match node:
        case ast.Name(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
            found = [node]
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            found = [value, value]
        case ast.Call(ast.Attribute(value=value, attr=name)) if name not in _METHODS:
            found = [value, value]
    return [getattr(one, "attr", getattr(one, "id", "")) for one in found]


def _list_targets(body: Sequence[ast.stmt]) -> list[str]:
    """The names that statements bind, without those of inner functions."""
    found: dict[str, None] = {}
    pending: list[ast.AST] = [*body]
    for node in pending:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = None
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                found[node.id] = None
            if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
                found[node.name] = None
            pending += ast.iter_child_nodes(node)
    return list(found)
