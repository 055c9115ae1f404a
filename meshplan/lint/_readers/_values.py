"""Values that a Python file determines, as `_constants` reads them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Span: TypeAlias = tuple[int, int]
Value: TypeAlias = Any
_MAX_EITHER = 16
# Classes whose methods set no attribute that a class of the file has.
_BASES = frozenset(
    {"ABC", "Enum", "Generic", "IntEnum", "LightningModule", "Module", "NamedTuple", "Protocol"}
    | {"TestCase", "object"}
)


class Unknown:
    """A value that the file does not determine; ``ranks`` if it needs the number of ranks."""

    def __init__(self, ranks: bool = False) -> None:
        self.ranks = ranks


UNKNOWN, UNKNOWN_RANKS = Unknown(), Unknown(ranks=True)


class Whole(int):
    """A whole number, and the place of the text that defines it."""

    span: Span = (0, 0)


class Text(str):
    """A text, and its place."""

    span: Span = (0, 0)


@dataclass(eq=False, slots=True)
class Items:
    """A tuple or a list: its items, each with its place; ``None`` if they are unknown."""

    entries: list[tuple[Value, Span]] | None
    span: Span = (0, 0)
    is_tuple: bool = False


@dataclass(eq=False, slots=True)
class Record:
    """A dict, an object of a class of the file, or what a function from elsewhere returned.

    Attributes:
        fields: by name; ``None`` if they are unknown.
        owner: the class, if the file has it.
        path: of the function that returned it.
        positional: the positional arguments of that function.
        moment: as `Reader.moment`, when it was made.
    """

    fields: dict[str, Value] | None
    owner: Class | None = None
    path: str = ""
    positional: list[Value] = field(default_factory=list)
    moment: tuple[int, int] = (0, 0)


@dataclass(eq=False, slots=True)
class Grid:
    """Ranks that are counted: ``arange(40).view(8, 5)``. A change of a view changes its base."""

    count: Value
    sizes: Items | None = None
    base: Grid | None = None
    is_changed: bool = False


@dataclass(frozen=True, slots=True)
class Path:
    """A dotted name from outside of the file."""

    name: str
    is_imported: bool = False

    @property
    def last(self) -> str:
        """Its last part."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Either:
    """One of several values."""

    values: tuple[Value, ...]


@dataclass(eq=False, slots=True)
class Scope:
    """The names of a module, a class or a call of a function."""

    outer: Scope | None = None
    is_class: bool = False
    names: dict[str, Value] = field(default_factory=dict)
    rebound: set[str] = field(default_factory=set)
    returns: list[Value] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Function:
    """A function of the file, with the object that it is a method of."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    scope: Scope
    defaults: dict[str, Value]
    owner: Class | None = None
    bound: Value = None


@dataclass(eq=False, slots=True)
class Class:
    """A class of the file."""

    node: ast.ClassDef
    scope: Scope
    bases: list[Value]
    made: list[Record] = field(default_factory=list)

    def find(self, name: str) -> Value:
        """An attribute of the class or of its bases; ``None`` if it has none."""
        found = [self.scope.names.get(name)]
        found += [one.find(name) for one in self.bases if isinstance(one, Class)]
        return next((one for one in found if one is not None), None)

    @property
    def is_open(self) -> bool:
        """Whether a class from elsewhere may set its attributes."""
        inside = [one.is_open if isinstance(one, Class) else _is_foreign(one) for one in self.bases]
        return any(inside)

    @property
    def has_fields(self) -> bool:
        """Whether its arguments are its attributes."""
        names = {*list_marks(self.node), *(getattr(one, "last", "") for one in self.bases)}
        bases = [one for one in self.bases if isinstance(one, Class)]
        return bool(names & {"dataclass", "NamedTuple"}) or any(one.has_fields for one in bases)


@dataclass(slots=True)
class Arguments:
    """The values that a call is given; ``is_complete`` unless ``*`` or ``**`` hides some."""

    positional: list[Value] = field(default_factory=list)
    named: dict[str, Value] = field(default_factory=dict)
    is_complete: bool = True

    def __iter__(self) -> Iterator[Value]:
        return iter((*self.positional, *self.named.values()))


def _is_foreign(base: Value) -> bool:
    return not (isinstance(base, Path) and base.last in _BASES)


def join(values: Sequence[Value]) -> Value:
    """The value that is one of several."""
    found: list[Value] = []
    for one in (inside for value in values for inside in list_values(value)):
        if not any(one is two or (is_constant(one) and one == two) for two in found):
            found.append(one)
    if len(found) == 1:
        return found[0]
    return Either(tuple(found)) if 0 < len(found) <= _MAX_EITHER else UNKNOWN


def list_values(value: Value) -> tuple[Value, ...]:
    """All that a value may be."""
    return value.values if isinstance(value, Either) else (value,)


def is_constant(value: Value) -> bool:
    """Whether it is a number, a text, a truth value or ``None``."""
    return value is None or isinstance(value, int | str | float)


def is_dict(value: Value) -> bool:
    """Whether it is a dict."""
    return isinstance(value, Record) and value.owner is None and not value.path


def list_marks(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    """The last parts of the names of the decorators."""
    marks = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
    names = {getattr(one, "attr", getattr(one, "id", "")) for one in marks}
    return names | ({"property"} if "cached_property" in names else set())


def list_keys(fields: Iterable[str]) -> Items:
    """The keys of a dict; those that are names of arguments have no place."""
    keys = [one if isinstance(one, Text) else Text(one) for one in fields]
    return Items([(one, one.span) for one in keys])


def find_callee(call: ast.expr) -> str:
    """The last part of the name that is called; of a method, the method."""
    match call:
        case ast.Call(ast.Attribute(attr=name)) | ast.Call(ast.Name(name)):
            return name
    return ""


def read_string(node: ast.AST) -> str | None:
    """The value of a literal string."""
    found = node.value if isinstance(node, ast.Constant) else None
    return found if isinstance(found, str) else None
