"""What ``torch.compile`` is to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from meshplan._torch import (
    FrameAction,
    FrameExecStrategy,
    is_absent,
    set_code_exec_strategy,
)
from meshplan.errors import InstallError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """Have a function, and all that it calls, run as it stands below compiled code: what a graph
    break leaves to Python is compiled piece by piece, down to the functions of ours.
    """
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
