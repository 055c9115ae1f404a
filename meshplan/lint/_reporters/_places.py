"""Names of files as other programs want them: relative to where the linter runs."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from urllib.parse import quote

__all__ = ["relative", "uri"]


def relative(file: str) -> str:
    """``file`` without ``./`` and the like; relative to the working directory if it is in it."""
    path = PurePath(os.path.normpath(file))
    try:
        here = PurePath(os.getcwd())
    except OSError:  # it has been removed
        return path.as_posix()
    return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()


def uri(file: str) -> str:
    """A URI reference for ``file``: relative, or with ``file://`` if it is elsewhere.

    Bytes that are not UTF-8 are kept; a colon in the first part is not taken for a scheme.
    """
    # These halves of surrogate pairs stand for no byte, so they come from no file system.
    path = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", relative(file))
    quoted = quote(path.encode("utf-8", errors="surrogateescape"), safe="/")
    return f"file://{quoted}" if path.startswith("/") else quoted
