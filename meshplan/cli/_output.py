"""Output of the verbs: standard streams, which may be closed, full or unread; files; tables."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

from meshplan.errors import PolicyError
from meshplan.lint._reporters.text import escape_line


def say(text: str) -> None:
    """Write lines to standard output and flush."""
    # A reader that leaves early does not change the status.
    error = _write(sys.stdout, text)
    if error is not None and not isinstance(error, BrokenPipeError):
        reason = error.strerror or error
        raise PolicyError(f"standard output: cannot be written: {reason}") from error


def complain(text: str) -> None:
    """Write to standard error; if that fails, only the exit status reports the error."""
    _write(sys.stderr, text)


def refuse(error: Exception) -> int:
    """Report in one line why a command cannot run; the exit status."""
    # Names from files may be in it: escape_line removes control characters for terminals.
    complain(f"meshplan: {escape_line(str(error))}\n")
    return 2


def save(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:
        raise _make_error(name, error) from error


def try_to_open(name: str) -> None:
    """Check before a long computation that a file can be written. Its content stays."""
    try:
        path = Path(name)
        try:
            mode = path.stat().st_mode
            # Not a pipe: closing it would end the input of its reader.
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                path.open("ab").close()
        except FileNotFoundError:
            # Not under its name: ranks check at once, and would remove the file of each other.
            beside = path.parent / f".meshplan-{os.getpid()}"
            beside.open("ab").close()
            beside.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise _make_error(name, error) from error


_T = TypeVar("_T")


def track(what: str, items: Sequence[_T]) -> Iterator[_T]:
    """The items, with a line about the present one (``meshplan: reading file 3 of 2460``) on a
    terminal, on rank 0 after a second, and not in CI.
    """
    stream: TextIO | None = sys.stderr
    shows = stream is not None and stream.isatty() and not os.environ.get("CI")
    shows &= os.environ.get("TERM") != "dumb" and os.environ.get("RANK", "0") == "0"
    due = time.monotonic() + 1.0
    is_shown = False
    try:
        for number, item in enumerate(items, 1):
            if shows and (now := time.monotonic()) >= due:
                due, is_shown = now + 0.1, True
                import shutil  # it loads all compressions, which takes 5 ms

                width = shutil.get_terminal_size().columns - 1
                complain("\r\x1b[K" + f"meshplan: {what} {number} of {len(items)}"[:width])
            yield item
    finally:
        if is_shown:
            complain("\r\x1b[K")


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines of equal columns, and a line below the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width for width in widths]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [rows[0], rule, *rows[1:]]
    ]


def _make_error(name: str, error: Exception) -> PolicyError:
    reason = getattr(error, "strerror", None) or error
    return PolicyError(f"{name[:200]}: cannot be written: {reason}")


def _write(stream: TextIO | None, text: str) -> OSError | None:
    if stream is None:  # closed when the process began
        return OSError("it is closed")
    # Names of files may have characters that the encoding of a terminal lacks.
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        # Python would try again at exit, and report an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None
