"""What ``torch.compile`` is to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

from meshplan._torch import (
    FrameAction,
    FrameExecStrategy,
    is_absent,
    set_code_exec_strategy,
)
from meshplan.errors import InstallError

_Called = TypeVar("_Called", bound=Callable[..., Any])


def never_compiled(function: _Called) -> _Called:
    """Have a function, or the methods of a class of ours, and all that they call, run as they stand
    below compiled code: what a graph break leaves to Python is compiled piece by piece, down to the
    functions of ours. So is what torch calls from C++, such as DDP's reducer.
    """
    if isinstance(function, type):
        ours = [one for one in function.__mro__ if one.__module__.startswith("meshplan.")]
        for method in (value for one in ours for value in vars(one).values()):
            called = getattr(method, "fget", method)
            # A method that torch has decorated shares its code with others of torch.
            if (
                isinstance(called, FunctionType)
                and called.__globals__["__name__"][:9] == "meshplan."
            ):
                never_compiled(called)
        return function
    # Without them install() refuses; to import must be possible for that.
    if not is_absent(FrameAction, FrameExecStrategy, set_code_exec_strategy):
        strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
        set_code_exec_strategy(function.__code__, strategy)
    return function


def refuse_in_graph(what: str) -> None:
    """Keep dynamo from taking a call of ``what`` for a part of a graph: raise InstallError where it
    traces. Without ``fullgraph=True`` it makes two graphs then, with the call between them.
    """
    if torch.compiler.is_dynamo_compiling():
        raise InstallError(f"{what} cannot be in a graph; call it around what is compiled")
