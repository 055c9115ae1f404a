"""The arguments of calls, and the parameters of the file's own functions that take them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from meshplan.lint._readers._scopes import Scope

Located: TypeAlias = "tuple[ast.expr, Scope]"
"""An expression, and the scope of its names."""


@dataclass(slots=True)
class Arguments:
    """The arguments of a call, with those of ``*`` and ``**`` that are written out.

    Attributes:
        positional: in order, up to the first that is unknown.
        named: by name.
        is_complete: whether all are known.
    """

    positional: list[Located] = field(default_factory=list)
    named: dict[str, Located] = field(default_factory=dict)
    is_complete: bool = True


def find_keyword(call: ast.Call, name: str, scope: Scope) -> Located | None:
    """The argument of this name, with its scope."""
    return next(((one.value, scope) for one in call.keywords if one.arg == name), None)


def find_field(call: ast.Call, name: str, owner: Scope, scope: Scope) -> Located | None:
    """The argument of a call of a dataclass for one of its fields.

    Args:
        call: of the class.
        name: of the field.
        owner: the scope of the class.
        scope: of the call.
    """
    fields = [
        one.target.id
        for one in (owner.node.body if owner.node else ())
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    ]
    if name in fields and fields.index(name) < len(call.args):
        return call.args[fields.index(name)], scope
    return find_keyword(call, name, scope)


def match_parameters(
    parameters: ast.arguments, skip: int, given: Arguments, scope: Scope, home: Scope
) -> dict[str, Located]:
    """The value of each parameter of a call; without those that are unknown.

    Args:
        parameters: of the function.
        skip: number of parameters that the call does not have, such as ``self``.
        given: the arguments of the call.
        scope: of the call.
        home: the scope of the defaults.
    """
    names = [one.arg for one in (*parameters.posonlyargs, *parameters.args)]
    known = {*names, *(one.arg for one in parameters.kwonlyargs)}
    found: dict[str, Located] = {}
    if given.is_complete:
        for name, default in zip(names[::-1], parameters.defaults[::-1], strict=False):
            found[name] = (default, home)
        for one, value in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
            if value is not None:
                found[one.arg] = (value, home)
    found |= zip(names[skip:], given.positional, strict=False)
    found |= {name: one for name, one in given.named.items() if name in known}
    # What ``*`` and ``**`` take is a tuple and a dict, if their items have one scope.
    rest = given.positional[len(names) - skip :]
    if parameters.vararg and given.is_complete and all(one[1] is scope for one in rest):
        items = ast.Tuple([one[0] for one in rest], ast.Load())
        found[parameters.vararg.arg] = (items, scope)
    others = {name: one for name, one in given.named.items() if name not in known}
    if parameters.kwarg and given.is_complete and all(o[1] is scope for o in others.values()):
        keys: list[ast.expr | None] = [ast.Constant(name) for name in others]
        values = [one[0] for one in others.values()]
        found[parameters.kwarg.arg] = (ast.Dict(keys, values), scope)
    return found
