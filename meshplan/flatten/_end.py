"""The end of a process that has just reduced over gloo.

When a collective is done, gloo's thread gives the tensors back, for which it needs the interpreter.
Where the process ends in the milliseconds before it has it, Python (before 3.14) ends the thread
instead, in the middle of C++ that cannot be left so, and the process is aborted (SIGABRT) although
everything was right. Torch alone does the same.
"""

from __future__ import annotations

import atexit
import sys
import time
from functools import cache

__all__ = ["rest_at_end"]

# Threads that ask for the interpreter have it at once while the main thread sleeps; a busy machine
# may let them ask late.
_SECONDS = 0.05


@cache
def rest_at_end() -> None:
    """Let this process rest for a moment before it ends. To be called once or more."""
    if sys.version_info < (3, 14):
        atexit.register(time.sleep, _SECONDS)
