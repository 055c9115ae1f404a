"""Threads that reduce beside the main thread, each of which needs groups that no other thread uses.

Members of a group meet in the order of their calls, and threads have no order in common from rank
to rank. So what a ``threading.Thread`` reduces goes over groups that are kept for its mesh, apart
from those of the main thread. Threads that Python has not started, such as those in which autograd
runs backward on a GPU while the main thread waits, belong to the main thread.
"""

from __future__ import annotations

import threading

__all__ = ["beside_main"]


def beside_main() -> bool:
    """Whether the caller is a thread that runs beside the main thread."""
    current = threading.current_thread()
    return current is not threading.main_thread() and not isinstance(
        current, threading._DummyThread
    )
