"""Where verbs write what they found: standard output, whatever became of it."""

from __future__ import annotations

import os
import sys

__all__ = ["say"]


def say(text: str) -> None:
    """Write to standard output, now: a verb's status holds though its reader has seen enough."""
    # Names of files may hold what the encoding of a terminal does not.
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader is gone, as `head` is. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
