"""Threads take turns at making one group, and need not wait where they make different ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Turns"]


class Turns:
    """A lock for each key, for as long as somebody holds it or waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By key: its lock, and how many threads hold it or wait for it.
        self._taken: dict[object, tuple[threading.Lock, int]] = {}

    @contextmanager
    def take(self, key: object) -> Iterator[None]:
        """Hold the lock of ``key``."""
        with self._lock:
            lock, count = self._taken.get(key, (threading.Lock(), 0))
            self._taken[key] = (lock, count + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, count = self._taken[key]
                self._taken[key] = (lock, count - 1)
                if count == 1:
                    del self._taken[key]
