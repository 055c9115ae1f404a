"""Values that a Python file determines, its text, and names whose meaning is known."""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

from meshplan._message_text import shorten
from meshplan.errors import LayoutError
from meshplan.lint._readers._numbers import Whole

Span: TypeAlias = tuple[int, int]
Value: TypeAlias = Any
Moment: TypeAlias = tuple[int, tuple[int, ...]]
_MAX_EITHER, _MAX_LINE = 16, 60
# Classes whose methods set no attribute that a class of the file has.
_BASES = {
    "ABC",
    "Enum",
    "Generic",
    "IntEnum",
    "LightningModule",
    "Module",
    "NamedTuple",
    "Protocol",
    "TestCase",
    "object",
}


class Unknown:
    """A value that the file does not determine; ``ranks`` if it needs the number of ranks."""

    def __init__(self, ranks: bool = False) -> None:
        self.ranks = ranks


UNKNOWN, UNKNOWN_RANKS = Unknown(), Unknown(ranks=True)


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
    """A dict, an object of a class of the file, or what a function from elsewhere returned."""

    fields: dict[str, Value] | None  # by name; ``None`` if they are unknown
    owner: Class | None = None  # the class, if the file has it
    path: str = ""  # of the function that returned it
    # The positional arguments of that function
    positional: list[Value] = field(default_factory=list)
    moment: Moment = (0, ())  # as `Reader.moment`, when it was made


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
    is_part: bool = False
    names: dict[str, Value] = field(default_factory=dict)
    rebound: set[str] = field(default_factory=set)
    returns: list[Value] = field(default_factory=list)
    function: Function | None = None

    def find_function(self) -> Scope:
        """The scope around a comprehension."""
        return self.outer.find_function() if self.is_part and self.outer is not None else self


@dataclass(eq=False, slots=True)
class Function:
    """A function of the file, with the object that it is a method of."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    scope: Scope
    defaults: dict[str, Value]
    owner: Class | None = None
    bound: Value = None
    setter: Function | None = None
    is_plain: bool = True


@dataclass(eq=False)
class Class:
    """A class of the file."""

    node: ast.ClassDef
    scope: Scope
    bases: list[Value]
    is_altered: bool = False  # whether a metaclass or a decorator may replace its attributes
    made: list[Record] = field(default_factory=list)
    line: tuple[Class, ...] = ()  # the class and those of the file that it derives from
    # The class and those that derive from it, up to a number
    kinds: list[Class] = field(default_factory=list)

    def __post_init__(self) -> None:
        above = [one for base in self.bases if isinstance(base, Class) for one in base.line]
        self.line = (self, *dict.fromkeys(above[:_MAX_LINE]))

    def find(self, name: str) -> Value:
        """An attribute of the class or of its bases; ``None`` if it has none."""
        found = self.scope.names.get(name)
        return self.find_above(name) if found is None else found

    def find_above(self, name: str) -> Value:
        """An attribute of its bases."""
        found = (one.scope.names.get(name) for one in self.line[1:])
        return next((one for one in found if one is not None), None)

    @property
    def is_open(self) -> bool:
        """Whether a class from elsewhere may set its attributes."""
        bases = [base for one in self.line for base in one.bases if not isinstance(base, Class)]
        return not all(isinstance(base, Path) and base.last in _BASES for base in bases)

    @cached_property
    def fields(self) -> list[str]:
        """The names of its own fields, in order."""
        notes = [one for one in self.node.body if isinstance(one, ast.AnnAssign)]
        fields = [one for one in notes if "ClassVar" not in ast.unparse(one.annotation)]
        return [one.target.id for one in fields if isinstance(one.target, ast.Name)]

    @property
    def has_fields(self) -> bool:
        """Whether its arguments are its attributes."""
        bases = {getattr(base, "last", "") for one in self.line for base in one.bases}
        marks = {mark for one in self.line for mark in list_marks(one.node)}
        return bool((bases | marks) & {"dataclass", "NamedTuple"})


@dataclass(frozen=True, slots=True)
class Parent:
    """``super()`` in a method of a class, and the object that the method is of."""

    owner: Class
    bound: Value


@dataclass(slots=True)
class Arguments:
    """The arguments of a call; ``is_complete`` unless ``*`` or ``**`` hides some."""

    positional: list[Value] = field(default_factory=list)
    named: dict[str, Value] = field(default_factory=dict)
    is_complete: bool = True

    def __iter__(self) -> Iterator[Value]:
        return iter((*self.positional, *self.named.values()))


def join(values: Sequence[Value]) -> Value:
    """The value that is one of several."""
    found: list[Value] = []
    for one in (inside for value in values for inside in list_values(value)):
        if not any(one is two or (is_constant(one) and one == two) for two in found):
            found.append(one)
        if len(found) > _MAX_EITHER:
            return UNKNOWN
    if len(found) == 1:
        return found[0]
    return Either(tuple(found)) if found else UNKNOWN


def list_values(value: Value) -> tuple[Value, ...]:
    """All that a value may be."""
    return value.values if isinstance(value, Either) else (value,)


def list_parts(value: Value) -> list[Value]:
    """All that a value may be, and what is in its lists and dicts."""
    found = {id(one): one for one in list_values(value)}
    pending = [*found.values()]
    for one in pending:
        inside: list[Value] = []
        if isinstance(one, Items):
            inside = [entry for entry, _ in one.entries or ()]
        elif is_dict(one):
            inside = [*(one.fields or {}).values()]
        new = {id(two): two for part in inside for two in list_values(part)}
        pending += [two for key, two in new.items() if key not in found]
        found |= new
    return pending


def is_constant(value: Value) -> bool:
    """Whether it is a number, a text, a truth value or ``None``."""
    return value is None or isinstance(value, int | str | float)


def read_default(value: Value) -> Value:
    """What a program has unless its user sets it: a number of ranks from 2 on. Most users of a
    program set what is 0, 1 or -1 by default.
    """
    if isinstance(value, Text) and value.isdecimal() and len(value) < 12:
        value = Whole.at(int(value), *value.span)
    return value if isinstance(value, Unknown) or (type(value) is Whole and value > 1) else UNKNOWN


def count_ranks(
    path: Path,
    given: Arguments,
    world_size: Value,
    per_node: Value,
) -> Value:
    """What a call returns that makes ranks or counts them; ``None`` for other calls."""
    first = next(iter(given.positional), None)
    match path.last, first:
        case "list" | "tensor", Grid():
            return Grid(first.count, first.sizes, first)
        case "arange" | "range", _ if len(given.positional) == 1:
            return Grid(first)
        case "arange" | "range", 0 if len(given.positional) == 2:
            return Grid(given.positional[1])
        case "get_world_size", None if not given.named and not path.name.startswith("."):
            return world_size
        # JAX counts the devices of all hosts, and torch.cpu.device_count() is 1.
        case "device_count", None if path.is_imported and path.name in _COUNTERS:
            return per_node
        case "get" | "getenv", "WORLD_SIZE" | "LOCAL_WORLD_SIZE":
            return world_size if first == "WORLD_SIZE" else per_node
        case "get" | "getenv", Text() if len(given.positional) == 2 and (
            path.name.endswith(("environ.get", "getenv")) and not LAUNCHED.search(first)
        ):
            return read_default(given.positional[1])
    return None


def find_argument(words: Sequence[str], names: Sequence[str]) -> Whole | Text | None:
    """The value of an option among the arguments of a program; ``None`` without the option."""
    found = None
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in names:
            text = value if equals else "".join(words[place + 1 : place + 2])
            found = Whole(text) if re.fullmatch(r"-?[0-9]{1,12}", text) else Text(text)
    return found


def is_dict(value: Value) -> bool:
    """Whether it is a dict."""
    return isinstance(value, Record) and value.owner is None and not value.path


def list_marks(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
) -> set[str]:
    """The last parts of the names of the decorators."""
    names = {find_callee(one) for one in node.decorator_list}
    return names | ({"property"} if "cached_property" in names else set())


def find_callee(node: ast.AST) -> str:
    """The last part of the name of a decorator, or of what is called: of a method, the method."""
    named = node.func if isinstance(node, ast.Call) else node
    return str(getattr(named, "attr", getattr(named, "id", "")))


def list_keys(fields: Iterable[str]) -> Items:
    """The keys of a dict; those that are names of arguments have no place."""
    keys = [one if isinstance(one, Text) else Text(one) for one in fields]
    return Items([(one, one.span) for one in keys])


def read_string(node: ast.AST) -> str | None:
    """The value of a literal string."""
    found = node.value if isinstance(node, ast.Constant) else None
    return found if isinstance(found, str) else None


def join_names(ends: Sequence[dict[str, Value]]) -> dict[str, Value]:
    """The names after one of several branches."""
    found = dict(ends[0])
    for name in dict.fromkeys(name for end in ends for name in end):
        values = [end.get(name, UNKNOWN) for end in ends]
        is_one = all(one is values[0] for one in values)
        found[name] = values[0] if is_one else join(values)
    return found


def list_targets(body: Sequence[ast.AST]) -> list[str]:
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


def forget_values(names: dict[str, Value]) -> None:
    """Forget what names stand for, except functions and classes."""
    for name, value in names.items():
        names[name] = value if isinstance(value, Function | Class | Path) else UNKNOWN


# Methods that leave their object as it is, and functions that leave their arguments.
METHODS = {
    "clone",
    "copy",
    "count",
    "dim",
    "get",
    "index",
    "items",
    "keys",
    "numel",
    "shape",
    "size",
    "tolist",
    "values",
}
_CHANGING = {"delattr", "eval", "exec", "getattr", "setattr", "super", "vars"}
FUNCTIONS = {
    *({*dir(builtins)} - _CHANGING),
    "DeviceMesh",
    "_unflatten",
    "array",
    "debug",
    "error",
    "info",
    "init_device_mesh",
    "join",
    "new_group",
    "prod",
    "tensor",
    "warning",
}
# Functions that may bind any name of the module, and words of those that set attributes.
BINDERS = {"exec", "globals"}
OWN = {"locals", "vars"}
SETTERS = re.compile(
    r"adapt|adjust|apply|cli|complete|configure|fill|finali[sz]e|infer|load|merge|normali[sz]e"
    r"|override|overwrite|parse|prepare|read|resolve|set_|setattr|setup|tune|update|vars"
)
# Decorators that pass the arguments of a call on, and return what it returns.
WRAPPERS = {
    "abstractmethod",
    "cache",
    "cached_property",
    "classmethod",
    "contextmanager",
    "disable",
    "inference_mode",
    "lru_cache",
    "no_grad",
    "override",
    "property",
    "record",
    "setter",
    "staticmethod",
    "wraps",
}
# Decorators and metaclasses that keep the attributes of a class.
MARKS = {
    "ABCMeta",
    "EnumMeta",
    "EnumType",
    "dataclass",
    "final",
    "runtime_checkable",
    "total_ordering",
    "unique",
}
# Modules whose functions have the names of Python's, and do the same.
STANDARD = {"builtins", "copy", "dataclasses", "numpy", "torch", "typing"}
# Variables that launchers set.
LAUNCHED = re.compile(r"RANK|WORLD|NODE|GPU|PROC|DEVICE|LOCAL|SLURM|MPI|PMI")
RAISES = {"raises", "assertRaises", "assertRaisesRegex"}
_COUNTERS = {f"torch.{one}.device_count" for one in ("cuda", "xpu", "accelerator")}
LEAVES = (ast.Return, ast.Continue, ast.Break)


@lru_cache(maxsize=1)
def parse(name: str, text: str) -> ast.Module:
    """The syntax tree, which several readers of one file share. Raises LayoutError with file and
    line if it is not Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text.removeprefix("\ufeff"))
    except (SyntaxError, ValueError) as error:
        # Python before 3.11.4 raises ValueError for null bytes.
        line = getattr(error, "lineno", None)
        where = f"{name}:{line}" if line else name
        why = " ".join(str(getattr(error, "msg", error)).split())[:100]
        raise LayoutError(
            f"{where}: cannot be parsed as Python ({why}); is the file complete?"
        ) from None
    except (MemoryError, RecursionError):
        raise LayoutError(f"{name}: cannot be parsed as Python: nested too deeply") from None


class PythonText:
    """A syntax tree with the places of its nodes."""

    def __init__(self, tree: ast.Module, text: str) -> None:
        self.tree, self.text = tree, text
        self.nodes = [*ast.walk(tree)]
        self._renamed = {
            name.asname: name.name
            for node in self.nodes
            if isinstance(node, ast.ImportFrom)
            for name in node.names
            if name.asname
        }
        # Python's parser counts columns in bytes of UTF-8, and does not see a byte-order mark.
        data = text.encode()
        breaks = (one.end() for one in re.finditer(rb"\r\n|\r|\n", data))
        self._lines = [3 if text.startswith("\ufeff") else 0, *breaks]
        self._characters = [0, *accumulate(byte & 0xC0 != 0x80 for byte in data)]

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


def list_changes(node: ast.AST) -> list[str]:
    """The names and attributes that a node binds; twice those that it changes in place."""
    found: list[ast.AST] = []
    match node:
        case ast.Name(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
            found = [node]
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            found = [value, value]
        case ast.Call(ast.Attribute(value=value, attr=name)) if name not in METHODS:
            found = [value, value]
    return [getattr(one, "attr", getattr(one, "id", "")) for one in found]
