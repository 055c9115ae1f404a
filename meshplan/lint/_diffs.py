"""Unified diffs of changed files, as ``git apply`` and ``patch -p1`` read them."""

from __future__ import annotations

import re
from pathlib import Path

from meshplan.errors import PolicyError
from meshplan.lint._finding import Edit
from meshplan.lint._reporters.text import make_relative

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def make_diff(name: str, before: str, after: str) -> str:
    """The diff of a file whose name is relative to the working directory or absolute."""
    # After a tab is a date, and without one git ends a name at a blank.
    import difflib  # most runs need no diff, and this takes 3 ms

    path = make_relative(name).lstrip("/")
    path += "\t" * (" " in path)
    old, new = (_LINE.findall(text) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def write_edit(edit: Edit) -> None:
    """Change a file. Raises PolicyError if it is unreadable, or was changed since it was read."""
    path = Path(edit.file)
    try:
        content = path.read_bytes()
        mark = _BYTE_ORDER_MARK if content.startswith(_BYTE_ORDER_MARK) else b""
        if content != mark + edit.before.encode():
            raise PolicyError(
                f"{edit.file}: not written, because it is not the UTF-8 text that was linted; "
                "run the command again, or convert the file"
            )
        path.write_bytes(mark + edit.after.encode())
    except OSError as error:
        raise PolicyError(f"{edit.file}: cannot be written: {error.strerror}") from error
