"""Whether a Python file runs every reduction of a mesh under ``order="exact"``.

A finding that does not apply costs a reader minutes, and one that is missing costs a run. So this
holds only if the file shows all of it: one call, which always runs before the mesh is made, with
arguments that are constants, and no other call that could replace it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from meshplan.lint._readers._arguments import Located
from meshplan.lint._readers._scopes import Scope
from meshplan.lint._readers._source import PythonSource
from meshplan.lint._readers._tree import format_dotted

_INSTALLS = frozenset({"install", "installed", "uninstall"})
_GROUPS = frozenset(
    {"init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"}
    | {"split_group", "shrink_group", "_set_pg_options"}
)
_OPTIONS = ("contract", "path", "policy", "inner", "audit", "strict", "timeout")
# Collectives outside DTensor, and the groups that they need.
_COLLECTIVES = ("all_reduce", "reduce_scatter", "get_group", "get_all_groups")


def installs_exact(source: PythonSource, mesh: ast.Call, scope: Scope) -> bool:
    """Whether ``meshplan.install`` runs all DTensor reductions of a mesh under the exact order.

    Args:
        source: the file.
        mesh: the call that makes the mesh.
        scope: of that call.
    """
    found = _find_earlier(source, "install", _INSTALLS, mesh, scope)
    called = {source.resolve_callee(call.func) for one in source.scopes for call in one.calls}
    if found is None or any(name.startswith(_COLLECTIVES) for name in called):
        return False
    return _is_exact(source, _read_arguments(source, *found, ()))


def has_exact_backend(source: PythonSource, mesh: ast.Call, scope: Scope) -> bool:
    """Whether the backend reduces under the exact order in all groups, and refuses the rest.

    Args:
        source, mesh, scope: as for `installs_exact`.
    """
    found = _find_earlier(source, "init_process_group", _GROUPS, mesh, scope)
    keywords = {key.arg for one in source.scopes for call in one.calls for key in call.keywords}
    if found is None or "backend_override" in keywords or source.stores.keys() & set(_OPTIONS):
        return False
    given = _read_arguments(source, *found, ("backend",))
    if _read_constant(source, given.get("backend")) != "meshplan":
        return False
    options = _read_call(source, given.get("pg_options"), "BackendOptions", _OPTIONS)
    return _read_constant(source, options.get("strict")) is True and _is_exact(source, options)


def _find_earlier(
    source: PythonSource, name: str, others: frozenset[str], mesh: ast.Call, scope: Scope
) -> tuple[ast.Call, Scope] | None:
    """The call of ``name`` that always runs before the mesh is made.

    ``None`` if there is none, or if the file also names one of ``others``.
    """
    calls = [
        (call, one)
        for one in source.scopes
        for call in one.calls
        if source.resolve_callee(call.func) in others
    ]
    uses = [use for use in source.uses if source.resolve_callee(use) in others]
    if "meshplan" not in source.modules or len(calls) != 1 or uses:
        return None
    ((call, home),) = calls
    if source.resolve_callee(call.func) != name or call not in source.statements:
        return None
    if not _is_imported(source, call, home):
        return None
    # The body of a function runs after what stands before its definition.
    around: Scope | None = scope
    while around is not None and around.origin is not home:
        around = around.outer
    return (call, home) if around is not None and call.lineno < mesh.lineno else None


def _is_exact(source: PythonSource, given: dict[str, Located]) -> bool:
    """Whether the arguments name the exact order, and nothing that leaves a reduction out."""
    contract = _read_call(source, given.get("contract"), "Contract", ("order",))
    policy, path = given.get("policy"), given.get("path")
    if policy is not None and _read_constant(source, policy) != "deterministic":
        return False
    if path is not None and _read_constant(source, path) in (None, "native"):
        return False
    return _read_constant(source, contract.get("order")) == "exact"


def _read_call(
    source: PythonSource, node: Located | None, name: str, positional: Sequence[str]
) -> dict[str, Located]:
    """The arguments of a call of meshplan's ``name``; empty for anything else."""
    match None if node is None else source.resolve(*node):
        case (ast.Call() as call, home) if source.resolve_callee(call.func) == name:
            if _is_imported(source, call, home):
                return _read_arguments(source, call, home, positional)
    return {}


def _is_imported(source: PythonSource, call: ast.Call, scope: Scope) -> bool:
    """Whether the callee, or the module that has it, is a name that only an import binds."""
    name = format_dotted(call.func).partition(".")[0]
    binder = scope.find_binder(name)
    if binder is None or name not in source.imported or name in binder.arguments:
        return False
    return (
        binder.bound[name] is None and name not in binder.rebound and name not in binder.definitions
    )


def _read_arguments(
    source: PythonSource, call: ast.Call, scope: Scope, positional: Sequence[str]
) -> dict[str, Located]:
    """The arguments by name; empty if one of them is unknown or has no name here."""
    given = source.read_arguments(call, scope)
    if not given.is_complete or len(given.positional) > len(positional):
        return {}
    return dict(zip(positional, given.positional, strict=False)) | given.named


def _read_constant(source: PythonSource, node: Located | None) -> object:
    """The value of an argument; ``None`` also if it is unknown."""
    found = None if node is None else source.resolve(*node)
    return found[0].value if found and isinstance(found[0], ast.Constant) else None
