"""Where verbs write: files, and standard streams, which may be closed, full or not read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from meshplan.errors import PolicyError

__all__ = ["complain", "save", "say", "try_to_open"]


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


def save(name: str, text: str) -> None:
    """Write a file.

    Raises:
        PolicyError: that cannot be done.
    """
    try:
        Path(name).write_text(text, encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:
        raise _unwritable(name, error) from error


def try_to_open(name: str) -> None:
    """For what takes long before it is saved there. What the file holds stays.

    Raises:
        PolicyError: a file of this name cannot be written.
    """
    try:
        path = Path(name)
        is_new = not path.exists()
        # Whoever reads a pipe would take this for the end of it.
        if is_new or path.is_file() or path.is_dir():
            path.open("ab").close()
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise _unwritable(name, error) from error


def _unwritable(name: str, error: Exception) -> PolicyError:
    reason = getattr(error, "strerror", None) or error
    return PolicyError(f"{name[:200]}: cannot be written: {reason}")


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
