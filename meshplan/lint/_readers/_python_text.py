"""The text of a Python file: its syntax tree, places in it, and names whose meaning is known."""

from __future__ import annotations

import ast
import re
import warnings
from itertools import accumulate
from typing import Any

from meshplan._message_text import shorten
from meshplan.errors import LayoutError
from meshplan.lint._readers._values import Span

# Methods that leave their object as it is, and functions that leave their arguments.
METHODS = frozenset(
    {
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
    }
    | {"tolist", "values"}
)
FUNCTIONS = frozenset(
    {
        "DeviceMesh",
        "_unflatten",
        "all",
        "any",
        "array",
        "bool",
        "debug",
        "dict",
        "enumerate",
    }
    | {
        "error",
        "filter",
        "format",
        "info",
        "init_device_mesh",
        "int",
        "isinstance",
        "join",
        "len",
    }
    | {
        "list",
        "map",
        "max",
        "min",
        "new_group",
        "print",
        "prod",
        "range",
        "repr",
        "reversed",
    }
    | {"set", "sorted", "str", "sum", "tensor", "tuple", "type", "warning", "zip"}
)
# Functions that may bind any name of the module, and words of those that set attributes.
BINDERS = frozenset({"exec", "globals"})
OWN = frozenset({"locals", "vars"})
SETTERS = re.compile(
    r"adapt|adjust|apply|cli|complete|configure|fill|finali[sz]e|infer|load|merge|normali[sz]e"
    r"|override|overwrite|parse|prepare|read|resolve|set_|setattr|setup|tune|update|vars"
)
# Decorators that pass the arguments of a call on, and return what it returns.
WRAPPERS = frozenset(
    {
        "abstractmethod",
        "cache",
        "cached_property",
        "classmethod",
        "contextmanager",
        "disable",
    }
    | {
        "inference_mode",
        "lru_cache",
        "no_grad",
        "override",
        "property",
        "record",
        "setter",
    }
    | {"staticmethod", "wraps"}
)
# Decorators and metaclasses that keep the attributes of a class.
MARKS = frozenset(
    {"ABCMeta", "EnumMeta", "EnumType", "dataclass", "final", "runtime_checkable"}
    | {"total_ordering", "unique"}
)
# Modules whose functions have the names of Python's, and do the same.
STANDARD = frozenset({"builtins", "copy", "dataclasses", "numpy", "torch", "typing"})
RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex"})
LEAVES = (ast.Return, ast.Continue, ast.Break)


def parse(name: str, text: str) -> ast.Module:
    """The syntax tree.

    Raises:
        LayoutError: it is not Python; the message names file and line.
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
