"""Constants of a Python file: the values that its names have where each call is made.

The file is parsed and never run. Its statements are read in order with the values of its literals,
both sides of each condition, and a function once for each call. A function that the file does not
call is read at the end, with unknown arguments, and one that it passes on when it does so too. What
this cannot show is `UNKNOWN`: lists and dicts that an unknown function gets, all that a loop
changes, and what decorators, metaclasses and functions from elsewhere may replace.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from meshplan.lint._readers._numbers import Whole, combine
from meshplan.lint._readers._values import (
    BINDERS,
    FUNCTIONS,
    LEAVES,
    MARKS,
    METHODS,
    OWN,
    RAISES,
    SETTERS,
    STANDARD,
    UNKNOWN,
    UNKNOWN_RANKS,
    WRAPPERS,
    Arguments,
    Class,
    Function,
    Grid,
    Items,
    Moment,
    Parent,
    Path,
    PythonText,
    Record,
    Scope,
    Span,
    Text,
    Unknown,
    Value,
    count_ranks,
    find_callee,
    forget_values,
    is_constant,
    is_dict,
    join,
    join_names,
    list_changes,
    list_keys,
    list_marks,
    list_parts,
    list_targets,
    list_values,
)

_MAX_STEPS, _MAX_NESTING, _MAX_CALLS = 60_000, 60, 8
_MAX_UNROLLED, _MAX_ITEMS = 16, 1024
_LOCAL_SIZE = "LOCAL_WORLD_SIZE"


class TooLong(Exception):
    """The file has more calls than the reader follows."""


class Reader(PythonText):
    """Reads a file; its subclass answers the calls of functions from elsewhere. ``run`` is 0 in the
    module, then one for each function that the file does not call. ``conditions`` are around the
    statement that is read, each branch with a number of its own; ``stack`` has the calls that are
    being read, and ``options`` those of ``argparse`` that the file defines.
    """

    arguments: Sequence[str] = ()  # of the program

    def __init__(
        self, tree: ast.Module, text: str, world_size: int | None, per_node: int | None = None
    ) -> None:
        super().__init__(tree, text)
        self.world_size = UNKNOWN_RANKS if world_size is None else Whole(world_size)
        per_node = None if "VISIBLE_DEVICES" in text else per_node  # the file chooses some
        self.per_node = UNKNOWN if per_node is None else Whole(per_node)
        self.stack: tuple[ast.AST, ...] = ()
        self.conditions: tuple[int, ...] = ()
        self.run = self._runs = self._branches = self._steps = self._nesting = 0
        self.read_calls: set[ast.Call] = set()
        self.options: set[str] = set()
        every = self.nodes
        self.calls = [node for node in every if isinstance(node, ast.Call)]
        # Another function may bind these names, or set these attributes, at any time.
        shared = [node.names for node in every if isinstance(node, ast.Global | ast.Nonlocal)]
        self._shared = {name for names in shared for name in names}
        # How often the file binds or changes what a name or an attribute stands for.
        self._changes = Counter(name for node in every for name in list_changes(node))
        self._has_walrus = any(isinstance(node, ast.NamedExpr) for node in every)
        self._functions: dict[ast.AST, Function] = {}
        self._entered: set[ast.AST] = set()
        self._passed_on: set[ast.AST] = set()

    def read_file(self) -> None:
        """Read the module, then the functions that it does not call. Raises TooLong."""
        self._read_block(self.tree.body, Scope())
        called = {find_callee(call) for call in self.calls}
        self._entered -= self._passed_on
        while left := [one for one in self._functions.values() if one.node not in self._entered]:
            # A function that nothing calls comes before those that it calls.
            for one in sorted(left, key=lambda one: one.node.name in called):
                if one.node not in self._entered:
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
    def moment(self) -> Moment:
        """The run, and the conditions around the statement that is read."""
        return self.run, self.conditions

    @contextmanager
    def _under_condition(self) -> Iterator[None]:
        before = self.conditions
        self._branches += 1
        self.conditions = (*before, self._branches)
        yield
        self.conditions = before

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
                self._attempt(node.body, scope)
                self._read_branches([node.orelse, *(one.body for one in node.handlers)], scope)
                return self._read_block(node.finalbody, scope)
            case ast.Match():
                self.read(node.subject, scope)
                scope.names |= dict.fromkeys(list_targets([node]), UNKNOWN)
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
        bases = [self.read(one, scope) for one in node.bases]
        found = Class(
            node,
            inner,
            bases,
            is_altered=self._is_altered(node, bases),
        )
        for one in found.line:
            one.kinds += [found] * (len(one.kinds) <= _MAX_UNROLLED)
        self._bind(node.name, found, scope)
        self._read_block(node.body, inner)
        for one in inner.names.values():
            if isinstance(one, Function) and one.scope is inner:
                one.owner = found

    def _is_altered(self, node: ast.ClassDef, bases: Sequence[Value]) -> bool:
        """Whether a metaclass, a decorator or a base may replace the attributes of a class."""
        marks = list_marks(node) | {find_callee(one.value) for one in node.keywords}
        above = [one for base in bases if isinstance(base, Class) for one in base.line]
        hooked = any(one.is_altered or one.find("__init_subclass__") for one in above)
        return not marks <= MARKS or hooked or len(above) > _MAX_NESTING

    def _read_with(self, node: ast.With | ast.AsyncWith, scope: Scope) -> bool:
        for item in node.items:
            self.read(item.context_expr, scope)
            if item.optional_vars is not None:
                self._store(item.optional_vars, UNKNOWN, scope)
        if any(find_callee(item.context_expr) in RAISES for item in node.items):
            inside = [two for one in node.body for two in ast.walk(one)]
            self.read_calls |= {one for one in inside if isinstance(one, ast.Call)}
            return False  # what a test refuses is never made
        if any(find_callee(item.context_expr) == "suppress" for item in node.items):
            self._attempt(node.body, scope)
            return False
        return self._read_block(node.body, scope)

    def _read_children(self, node: ast.AST, scope: Scope) -> None:
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.expr):
                self.read(one, scope)

    def _forget(self, scope: Scope) -> None:
        """Forget the values of the module's names, which a star or ``exec`` may bind again."""
        while scope.outer is not None:
            scope = scope.outer
        self._count_names(scope.names)
        forget_values(scope.names)

    def _read_branches(self, bodies: Sequence[Sequence[ast.stmt]], scope: Scope) -> bool:
        """Read statements of which one list runs; whether the end of all is never reached."""
        before = scope.names
        ends: list[dict[str, Value]] = []
        left = False
        for body in bodies:
            scope.names = dict(before)
            self._count_names(before)
            with self._under_condition():
                ended = self._read_block(body, scope)
            if not ended:
                ends.append(scope.names)
            elif any(isinstance(two, LEAVES) for one in body for two in ast.walk(one)):
                left = True
        if left:  # up to the end of the function, unless the program ends
            self._branches += 1
            self.conditions = (*self.conditions, self._branches)
        scope.names = join_names(ends or [before])
        return not ends

    def _read_loop(self, node: ast.For | ast.AsyncFor | ast.While, scope: Scope) -> None:
        """Read the body twice: first for what it changes, then with that unknown."""
        item = None if isinstance(node, ast.While) else self._find_any(self.read(node.iter, scope))
        before, changed = dict(scope.names), list_targets(node.body)
        for _ in range(2):
            scope.names |= {name: UNKNOWN for name in changed if name in before}
            with self._under_condition():
                if isinstance(node, ast.While):
                    self.read(node.test, scope)
                else:
                    self._store(node.target, item, scope)
                self._read_block(node.body, scope)
        scope.names |= join_names([before, {name: scope.names[name] for name in before}])
        self._count_names(before)
        self._blur(node.body, scope)
        self._read_block(node.orelse, scope)

    def _attempt(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """Read statements of which each may be the last one."""
        self._read_branches([body, []], scope)
        self._blur(body, scope)

    def _blur(self, body: Sequence[ast.AST], scope: Scope) -> None:
        """Note that statements may have been left at any place."""
        for name in list_targets(body):
            scope.names[name] = join([scope.names.get(name, UNKNOWN), UNKNOWN])

    def _find_any(self, value: Value) -> Value:
        """The possible items of a value."""
        if isinstance(value, Items) and value.entries is not None:
            found = join([one for one, _ in value.entries])
            if found is not UNKNOWN:
                return found
        if not isinstance(value, Grid) or value.sizes is not None:
            self.change(value)
        return UNKNOWN

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        marks = [self.read(one, scope) for one in node.decorator_list]
        args = node.args
        positional = [*args.posonlyargs, *args.args]
        pairs = [*zip(reversed(positional), reversed(args.defaults), strict=False)]
        pairs += [(a, b) for a, b in zip(args.kwonlyargs, args.kw_defaults, strict=True) if b]
        defaults = {one.arg: self.read(default, scope) for one, default in pairs}
        names = [find_callee(one) for one in node.decorator_list]
        is_plain = all(
            name in WRAPPERS or isinstance(mark, Function)
            for name, mark in zip(names, marks, strict=True)
        )
        self._functions[node] = found = Function(
            node,
            scope,
            defaults,
            is_plain=is_plain,
        )
        getter = scope.names.get(node.name)
        if "setter" in list_marks(node) and isinstance(getter, Function):
            getter.setter = found
            return
        for one in reversed(marks):
            # A decorator of the file; calls keep in mind those from elsewhere.
            if isinstance(one, Function) and isinstance(found, Function):
                found = self._enter(one, Arguments([found]), node)
        self._bind(node.name, found, scope)

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

    def _forget_late(self, name: str, value: Value, is_open: bool = True, least: int = 2) -> Value:
        """A value that is bound outside of a function which the file does not call."""
        is_changed = is_open if is_constant(value) else isinstance(value, Items) or is_dict(value)
        is_late = self.run > 0 and is_changed and self._changes[name] >= least
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
                self.set_field(self.read(inside, scope), name, value)
                self.note_attribute(self.read(inside, scope), name, target.lineno)
            case ast.Subscript(inside, index):
                key = self.read(index, scope)
                owner = self._read_target(inside, scope)
                self.set_field(owner, key if isinstance(key, Text) else None, value)

    def _read_target(self, node: ast.expr, scope: Scope) -> Value:
        """The object that is changed in place: that of a name now, not later."""
        inner = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        run = self.run
        self.run = 0 if isinstance(inner, ast.Name) else run
        found = self.read(node, scope)
        self.run = run
        return found

    def set_field(self, owner: Value, name: str | None, value: Value) -> None:
        """Set an attribute or an item."""
        for one in list_values(owner):
            if name is None or not isinstance(one, Class | Record):
                self.change(one)
                self.change(value)  # it may be changed wherever it is kept
                continue
            fields = one.scope.names if isinstance(one, Class) else one.fields
            old = None
            if isinstance(one, Record) and one.owner is not None:
                old = one.owner.find(name)
            if isinstance(old, Record) and not is_dict(old) and not old.path.endswith("field"):
                is_kept = old.owner is not None and old.owner.find("__set__") is None
                value = value if is_kept else UNKNOWN
            if isinstance(old, Function) and old.setter is not None:
                self._enter(replace(old.setter, bound=one), Arguments([value]), old.setter.node)
                continue
            if fields is None:
                continue
            run, around = (0, ()) if isinstance(one, Class) else one.moment
            is_whole = around[: len(self.conditions)] == self.conditions
            is_sure = one is owner and run == self.run and is_whole
            old = fields.get(name, old)
            # Before its first value, an object of elsewhere has another one, and a dict has none.
            is_first = old is None and not (isinstance(one, Record) and one.owner is None)
            fields[name] = value if is_sure or is_first else join([old or UNKNOWN, value])

    def change(self, value: Value) -> None:
        """Note that a list, a dict or a tensor may have changed, and all that is in it."""
        for one in list_parts(value):
            if isinstance(one, Items):
                one.entries = one.entries if one.is_tuple else None
            elif is_dict(one):
                one.fields = None
            while isinstance(one, Grid) and not one.is_changed:
                one.is_changed, one = True, one.base

    def forget_fields(self, value: Value) -> None:
        """Note that all attributes of an object, or of those in a list, may have changed."""
        for one in list_parts(value):
            if isinstance(one, Record) and not is_dict(one):
                one.fields = None
            elif isinstance(one, Class):
                forget_values(one.scope.names)

    def _find_attribute(self, value: Value, name: str) -> Value:
        return join([self._find_attribute_of(one, name) for one in list_values(value)])

    def _find_attribute_of(self, value: Value, name: str) -> Value:
        match value:
            case Path():
                return Path(f"{value.name}.{name}", value.is_imported)
            case Class():
                found = UNKNOWN if value.is_altered else value.find(name)
                return self._forget_late(name, self._find_member(found, value, value))
            case Parent(owner, bound):
                return self._find_member(owner.find_above(name), bound, owner)
            case Record() if name == "__dict__":
                self.forget_fields(value)
            case Record(owner=Class() as owner):
                return self._find_field(value, owner, name)
            case Record(fields=dict() as fields) if value.path:
                inside = Record({}, None, f"{value.path}.{name}", moment=value.moment)
                if isinstance(fields.get(name), int) and fields[name] < 0:
                    return UNKNOWN  # the object replaces it
                return self._forget_late(name, fields.setdefault(name, inside), least=1)
            case int() | str() if name == "value":
                return value  # a member of an enumeration
        if name not in METHODS:
            self.change(value)
        return UNKNOWN

    def _find_field(self, value: Record, owner: Class, name: str) -> Value:
        """An attribute of an object of a class of the file."""
        if name == "__class__":
            return owner
        if value.fields is not None and name in value.fields:
            return self._forget_late(name, value.fields[name])
        found = owner.find(name)
        is_closed = value.fields is not None and not owner.is_open
        if not is_closed and not isinstance(found, Function):
            return UNKNOWN
        return self._forget_late(name, self._find_member(found, value, owner))

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
        method = replace(found, bound=bound)
        return self._enter(method, Arguments(), found.node) if "property" in marks else method

    # Expressions.

    def read(self, node: ast.expr, scope: Scope) -> Value:
        """The value of an expression."""
        self._count_steps(1)
        if self._nesting >= _MAX_NESTING:
            return UNKNOWN
        self._nesting += 1
        try:
            return self._read(node, scope)
        finally:
            self._nesting -= 1

    def _count_names(self, names: Sized) -> None:
        # A copy of all names takes as long as a step for this many.
        self._count_steps(len(names) // 8)

    def _count_steps(self, count: int) -> None:
        self._steps += count
        if self._steps > _MAX_STEPS:
            raise TooLong

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
                with self._under_condition():
                    found = join([self.read(body, scope), self.read(orelse, scope)])
                self._blur([body, orelse] * self._has_walrus, scope)
                return found
            case ast.BoolOp(values=values):
                with self._under_condition():
                    found = join([self.read(one, scope) for one in values])
                self._blur(values[1:] * self._has_walrus, scope)
                return found
            case ast.NamedExpr(target, inside):
                value = self.read(inside, scope)
                self._store(target, value, scope)
                if scope.is_part:
                    self._blur([target], scope.find_function())
                return value
            case ast.Await(inside):
                return self.read(inside, scope)
            case ast.Lambda(args, body):
                parameters = [one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
                with self._under_condition():
                    self.read(body, Scope(scope, names=dict.fromkeys(parameters, UNKNOWN)))
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
        """The items of a comprehension: ``{name: mesh[name] for name in NAMES}`` item by item."""
        inner = Scope(scope, is_part=True)
        source = self.read(node.generators[0].iter, scope)
        entries = source.entries if isinstance(source, Items) else None
        is_simple = len(node.generators) == 1 and not node.generators[0].ifs
        is_known = entries is not None and is_simple and len(entries) <= _MAX_UNROLLED
        items = [one for one, _ in entries or ()] if is_known else [self._find_any(source)]
        found: list[tuple[Any, Value]] = []
        with self._under_condition():
            for item in items:
                self._store(node.generators[0].target, item, inner)
                for part in node.generators[1:]:
                    self._store(part.target, self._find_any(self.read(part.iter, inner)), inner)
                for test in (one for part in node.generators for one in part.ifs):
                    self.read(test, inner)
                key = self.read(node.key, inner) if isinstance(node, ast.DictComp) else None
                found.append((key, self.read(getattr(node, "elt", None) or node.value, inner)))
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
            case Path(name) if name.endswith("environ") and key in ("WORLD_SIZE", _LOCAL_SIZE):
                return self.per_node if key == _LOCAL_SIZE else self.world_size
            case Path("sys.modules"):
                return value
        return self.find_item(value, key)

    # Calls.

    def _call(self, node: ast.Call, scope: Scope) -> Value:
        self.read_calls.add(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return self._find_parent(scope)
        owner, method, function = UNKNOWN, "", None
        if isinstance(node.func, ast.Attribute):
            method = node.func.attr
            read = self.read if method in METHODS else self._read_target
            owner = read(node.func.value, scope)
            if isinstance(owner, Path | Class | Record | Parent) and not is_dict(owner):
                function = self._find_attribute(owner, method)
        else:
            function = self.read(node.func, scope)
        given = self._read_arguments(node, scope)
        made_of = owner.owner if isinstance(owner, Record) else None
        if function is UNKNOWN and made_of is not None and made_of.is_open:
            self.forget_fields(owner)  # a method of a class from elsewhere
        choices = list_values(function)
        known = [one for one in choices if isinstance(one, Function | Class | Path)]
        found = [self._call_one(one, given, node, scope) for one in known]
        if not known:
            name = method or find_callee(node)
            found = [self._call_method(one, name, given, node) for one in list_values(owner)]
        return join(found + [UNKNOWN] * (0 < len(known) < len(choices)))

    def _find_parent(self, scope: Scope) -> Value:
        """The object of ``super()`` in a method."""
        one: Scope | None = scope
        while one is not None:
            if one.function is not None and one.function.owner is not None:
                return Parent(one.function.owner, one.function.bound)
            one = one.outer
        return UNKNOWN

    def _call_one(
        self,
        function: Function | Class | Path,
        given: Arguments,
        node: ast.Call,
        scope: Scope,
    ) -> Value:
        if isinstance(function, Function):
            found = self._enter(function, given, node)
            # A mesh that it makes is one, whatever a decorator from elsewhere returns.
            kinds = Items | Record | Grid
            hidden = any(is_constant(one) or isinstance(one, kinds) for one in list_values(found))
            return UNKNOWN if hidden and not function.is_plain else found
        if isinstance(function, Class):
            return self._make(function, given, node)
        first = next(iter(given), None)
        is_own = function.last in OWN and first is None
        is_own |= function.last == "setattr" and first == Path("sys.modules", is_imported=True)
        if is_own or (function.last in BINDERS and not function.is_imported):
            self._forget(scope)
        return self._call_path(function, given, node)

    def _call_path(self, path: Path, given: Arguments, node: ast.Call) -> Value:
        """The value of a call of a function from elsewhere."""
        found = self.answer(path, given, node)
        found = self._call_builtin(path, given, node) if found is None else found
        for one in given if path.last not in FUNCTIONS and found is None else ():
            if SETTERS.search(path.last.lower()):
                self.forget_fields(one)
            self.change(one)
            is_new = isinstance(one, Function) and one.node not in self._passed_on
            if is_new and path.last not in WRAPPERS:
                # It may run now or later, with any arguments.
                self._passed_on.add(one.node)
                self._read_uncalled(one)
        # A function may return anything, a class keeps what it is given.
        known = given.named if path.last[:1].isupper() else {}
        fields = dict(known) if given.is_complete else None
        made = Record(fields, None, path.name, given.positional, self.moment)
        return made if found is None else found

    def _call_builtin(self, path: Path, given: Arguments, node: ast.Call) -> Value:
        """The value of some functions of Python and torch; ``None`` for all others."""
        first = next(iter(given.positional), None)
        if path.is_imported and path.name.partition(".")[0] not in STANDARD:
            return count_ranks(path, given, self.world_size, self.per_node)
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
            case "type", Record(owner=Class() as owner):
                return owner
            case "cast", _ if len(given.positional) == 2:
                return given.positional[1]
            case "replace", Record(fields=dict() as fields) if given.is_complete:
                made = Record(fields | given.named, first.owner, first.path, moment=self.moment)
                for name in given.named:
                    self.note_attribute(made, name, node.lineno)
                return made
        return count_ranks(path, given, self.world_size, self.per_node)

    def _call_method(self, value: Value, name: str, given: Arguments, node: ast.Call) -> Value:
        """The value of a method of a list, a dict, a tensor, or an unknown value."""
        match value, name:
            case Record(path=path), _ if path.endswith("ArgumentParser"):
                return self.call_method(value, name, given, node)
            case (Unknown(), _) | (Record(path=str()), _) if not is_dict(value):
                return self._call_path(Path(f".{name}", is_imported=True), given, node)
            case Record(path="", fields=dict() as fields), "keys" | "values":
                if name == "keys":
                    return list_keys(fields)
                return Items([(one, getattr(one, "span", (0, 0))) for one in fields.values()])
            case Record(path="", fields=dict() as fields), "items" if len(fields) < _MAX_ITEMS:
                pairs = [Items([(key, (0, 0)), (one, (0, 0))]) for key, one in fields.items()]
                return Items([(one, (0, 0)) for one in pairs])
            case Record(path="", fields=dict() as fields), "get" if given.positional:
                return self._find_item(value, given.positional[0])
            case Grid(), "view" | "reshape" if not given.named:
                sizes = next(iter(given.positional), None)
                if not isinstance(sizes, Items):
                    spans = [self.find_span(one) for one in node.args]
                    sizes = Items([*zip(given.positional, spans, strict=False)])
                return Grid(value.count, sizes, value)
            case Items() | Grid() | Record(), _:
                for one in (value, *given) if name not in METHODS else ():
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
                self._count_names(value.fields)
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
        names = self._match(function, given)
        scope = Scope(function.scope, names=names, function=function)
        stack, conditions = self.stack, self.conditions
        self.stack = (*stack, node)
        self._read_block(function.node.body, scope)
        self.stack, self.conditions = stack, conditions
        return join(scope.returns or [None])

    def _match(self, function: Function, given: Arguments) -> dict[str, Value]:
        """The values of the parameters."""
        args, known = function.node.args, given.is_complete
        names = [one.arg for one in (*args.posonlyargs, *args.args)]
        bound = [] if function.bound is None else [function.bound]
        positional = [*bound, *given.positional]
        every = [*names, *(one.arg for one in args.kwonlyargs)]
        self._count_names(every)
        found: dict[str, Value] = {key: Record({}, None, key, moment=self.moment) for key in every}
        if not function.is_plain:
            # A decorator such as click.command takes arguments from elsewhere.
            given, positional = Arguments(is_complete=False), bound
        found |= function.defaults if known and function.is_plain else {}
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
        self._count_names(owner.scope.names)
        found = Record({}, owner, moment=self.moment)
        owner.made.append(found)
        start = owner.find("__init__")
        if isinstance(start, Function):
            self._enter(replace(start, bound=found), given, node)
        elif owner.has_fields:
            fields = owner.fields
            is_derived = any(isinstance(one, Class) for one in owner.bases)
            is_known = given.is_complete and not (given.positional and is_derived)
            values = dict(zip(fields, given.positional, strict=False)) | given.named
            found.fields = values if is_known else None
            after = owner.find("__post_init__")
            if isinstance(after, Function):
                self._enter(replace(after, bound=found), Arguments(), node)
        hooks = ("__getattribute__", "__new__", "__setattr__")
        if owner.is_altered or any(map(owner.find, hooks)):
            found.fields = None
        return found

    def _read_uncalled(self, function: Function) -> None:
        """Read a function that the file does not call, with unknown arguments."""
        run, conditions = self.run, self.conditions
        self._runs += 1
        self.run, self.conditions = self._runs, ()
        was_entered = function.node in self._entered
        every = self._list_bound(function)
        if function.node in self._entered and not was_entered:
            every = []  # an `__init__` that has just made the object
        for bound in every:
            one = replace(function, bound=bound)
            self._enter(one, Arguments(is_complete=False), function.node)
        self._entered.add(function.node)
        self.run, self.conditions = run, conditions

    def _list_bound(self, function: Function) -> list[Value]:
        """The objects that a method may be called of."""
        owner, marks = function.owner, list_marks(function.node)
        if owner is None or function.bound is not None or "staticmethod" in marks:
            return [function.bound]
        kinds = [one for one in owner.kinds if one.find(function.node.name) is function]
        if "classmethod" in marks:
            return [*kinds]
        found: list[Value] = []
        if len(owner.kinds) > _MAX_UNROLLED:
            found = [Record(None, owner, moment=self.moment)]
        for one in kinds:
            if len(one.made) == 1:
                found.append(one.made[0])
            elif one.made or one.has_fields:
                found.append(Record(None, one, moment=self.moment))
            else:
                found.append(self._make(one, Arguments(is_complete=False), one.node))
        return found
