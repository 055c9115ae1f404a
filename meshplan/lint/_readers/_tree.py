"""The syntax tree of a Python file: its scopes, with the names and attributes that each binds."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass

from meshplan.errors import LayoutError
from meshplan.lint._readers._changes import find_changed
from meshplan.lint._readers._scopes import (
    Binding,
    Branches,
    Scope,
    find_arms,
    find_bindings,
)

_RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex"})


@dataclass(frozen=True, slots=True)
class Store:
    """A value that is stored in an attribute; ``value`` is ``None`` if it is not an expression."""

    target: ast.Attribute
    value: ast.expr | None
    scope: Scope


class SourceTree:
    """A parsed file.

    Args:
        name: of the file.
        text: the source.

    Attributes:
        text: the source.
        scopes: of the module, its classes, functions and lambdas; the module first.
        uses: names and attributes that are read, but neither called nor compared.
        slices: the names in each ``[...]`` that has several.
        modules: first parts of the names of the imported modules.
        imported: the names that imports bind.
        stores: of each attribute name.
        methods: of all classes, by name.
        branches: around names that are read inside conditional statements.
        statements: calls that are statements of their own, outside conditional statements.

    Raises:
        LayoutError: it is not Python; the message names file and line.
    """

    def __init__(self, name: str, text: str) -> None:
        self.text = text
        self.scopes = [Scope()]
        self.uses: list[ast.expr] = []
        self.slices: list[tuple[str, ...]] = []
        self.modules: set[str] = set()
        self.imported: set[str] = set()
        self.stores: dict[str, list[Store]] = {}
        self.methods: dict[str, list[Scope]] = {}
        self.branches: dict[ast.AST, Branches] = {}
        self.statements: set[ast.Call] = set()
        self._renamed: dict[str, str] = {}
        self._plain: set[ast.AST] = set()  # called, compared, or a target of a plain assignment
        self._loads: list[tuple[ast.Name, Scope]] = []
        self._read_tree(_parse(name, text))

    def _read_tree(self, tree: ast.Module) -> None:
        """Bind all names, and list calls and uses."""
        parents: dict[ast.AST, ast.AST] = {}
        nodes: list[tuple[ast.AST, Scope, Branches]] = [(tree, self.scopes[0], ())]
        # Breadth-first without recursion: the list grows while it is read. Parents come first, so
        # an assignment marks its targets as plain before the targets themselves are visited.
        for node, scope, branches in nodes:
            self._bind(node, scope, branches)
            self._list_uses(node, scope, branches)
            inner, arms = scope, find_arms(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                inner, branches = self._open_scope(node, scope), ()
            for child in ast.iter_child_nodes(node):
                parents[child] = node
                if _expects_error(node) and isinstance(child, ast.stmt):
                    continue  # what a test refuses is never made
                around = (*branches, (node, arms[child])) if child in arms else branches
                nodes.append((child, inner, around))
        self.uses = [node for node in self.uses if node not in self._plain]
        # After all bindings are known: values that may change in place are no constants.
        changed = find_changed(self._loads, parents, self.resolve_callee)
        for one in self.scopes:
            one.bound |= {name: None for name, value in one.bound.items() if value in changed}
            one.calls.sort(key=lambda call: (call.lineno, call.col_offset))
            for values in one.bindings.values():
                values.sort(key=lambda binding: binding.end)

    def _list_uses(self, node: ast.AST, scope: Scope, branches: Branches) -> None:
        match node:
            case ast.Call():
                scope.calls.append(node)
                self._plain.add(node.func)
            case ast.Expr(ast.Call() as call) if not branches:
                self.statements.add(call)
            case ast.Compare():
                self._plain |= {node.left, *node.comparators}
            case ast.Name(ctx=ast.Load()):
                self._loads.append((node, scope))
                self.uses.append(node)
                if branches:
                    self.branches[node] = branches
            case ast.Attribute(ctx=ast.Load()):
                self.uses.append(node)
            case ast.Subscript() if len(read_slice(node)) > 1:
                self.slices.append(read_slice(node))
            case ast.Return(value=ast.expr() as value):
                scope.returns.append(value)

    def _open_scope(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef, scope: Scope
    ) -> Scope:
        inner = Scope(scope, is_class=isinstance(node, ast.ClassDef))
        scope.inner.append(inner)
        self.scopes.append(inner)
        if not isinstance(node, ast.Lambda):
            inner.node = node
            scope.definitions[node.name] = inner
            if scope.is_class:
                self.methods.setdefault(node.name, []).append(inner)
        return inner

    def _bind(self, node: ast.AST, scope: Scope, branches: Branches) -> None:
        """Bind the names of a node, and keep its imports."""
        # A second binding of a name makes its value unknown, whatever the order of execution.
        for target, value in find_bindings(node, self._plain):
            if isinstance(target, ast.Attribute):
                self.stores.setdefault(target.attr, []).append(Store(target, value, scope))
                continue
            name = target if isinstance(target, str) else target.id
            if name in scope.bound:
                scope.rebound.add(name)
                value_or_none = None
            else:
                value_or_none = value
            scope.bound[name] = value_or_none
            if value is not None:
                end = (value.end_lineno or 0, value.end_col_offset or 0)
                scope.bindings.setdefault(name, []).append(Binding(value, end, branches))
        match node:
            case ast.Assign(targets=[ast.Subscript(ast.Name(name), key)]):
                if (text := read_string(key)) is not None:
                    items = scope.items.setdefault(name, {})
                    items.setdefault(text, []).append(node.value)
            case ast.Import():
                self.modules |= {one.name.partition(".")[0] for one in node.names}
                self.imported |= {one.asname or one.name.partition(".")[0] for one in node.names}
            case ast.ImportFrom():
                if not node.level:
                    self.modules.add((node.module or "").partition(".")[0])
                self._renamed |= {one.asname: one.name for one in node.names if one.asname}
                self.imported |= {one.asname or one.name for one in node.names}
                scope.has_star |= any(one.name == "*" for one in node.names)
            # Another function may assign these names, so they are unknown in all scopes around.
            case ast.Global() | ast.Nonlocal():
                around: Scope | None = scope
                while around:
                    around.bound |= dict.fromkeys(node.names)
                    around = around.outer

    def resolve_callee(self, node: ast.expr) -> str:
        """The last part of the name that is called; of a renamed import, the original name."""
        last = format_dotted(node).rpartition(".")[2]
        return self._renamed.get(last, last) if isinstance(node, ast.Name) else last


def _expects_error(node: ast.AST) -> bool:
    """Whether this is ``with pytest.raises(...)`` or ``with self.assertRaises(...)``."""
    return isinstance(node, ast.With) and any(
        isinstance(one.context_expr, ast.Call)
        and format_dotted(one.context_expr.func).rpartition(".")[2] in _RAISES
        for one in node.items
    )


def format_dotted(node: ast.expr) -> str:
    """``a.b.c`` of such an expression; empty for any other."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def read_string(node: ast.expr) -> str | None:
    """The value of a literal string."""
    found = node.value if isinstance(node, ast.Constant) else None
    return found if isinstance(found, str) else None


def read_slice(node: ast.AST) -> tuple[str, ...]:
    """The names of ``mesh["a", "b"]`` or ``mesh["a"]``; empty for anything else."""
    if not isinstance(node, ast.Subscript):
        return ()
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    texts = [read_string(item) for item in items]
    return tuple(text for text in texts if text is not None) if None not in texts else ()


def _parse(name: str, text: str) -> ast.Module:
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
