"""Exceptions of the job's signal handlers, which Python runs wherever its main thread is."""

from __future__ import annotations

import contextlib
import signal
from functools import partial
from typing import Any


def is_of_handler(error: BaseException) -> bool:
    """Whether a handler of the job has raised it, and not what observes the job."""
    codes = {_find_code(signal.getsignal(one)) for one in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None


def _find_code(handler: Any) -> Any:
    # SIG_DFL is none, though its class can be called.
    if not callable(handler):
        return None
    while isinstance(handler, partial):
        handler = handler.func
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


class suppress(contextlib.suppress):  # noqa: N801
    """That of Python, except for errors of the job's signal handlers."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return super().__exit__(kind, error, trace) and not is_of_handler(error)
