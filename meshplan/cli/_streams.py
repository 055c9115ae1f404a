"""Standard output and error, to which verbs write; they may be closed, full or not read."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from meshplan.errors import PolicyError

__all__ = ["complain", "say"]


def say(text: str) -> None:
    """Write to standard output, now: a verb's status holds though its reader has seen enough.

    Raises:
        PolicyError: it is closed, or takes nothing.
    """
    error = _write(sys.stdout, text)
    if error is not None and not isinstance(error, BrokenPipeError):
        reason = error.strerror or error
        raise PolicyError(f"standard output: cannot be written: {reason}") from error


def complain(text: str) -> None:
    """Write to standard error; where that takes nothing, the status has to say it."""
    _write(sys.stderr, text)


def _write(stream: TextIO | None, text: str) -> OSError | None:
    """Why nothing can be written there, if that is so."""
    if stream is None:  # closed when the process began
        return OSError("it is closed")
    # Names of files may hold what the encoding of a terminal does not.
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        # Python would try once more at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None
