"""Requests of other threads to end the waits of a reduction.

A process group that is aborted sets its ``Abort``. Each wait of a reduction of that group
checks the abort of the thread that runs it.
"""

from __future__ import annotations

import threading

from meshplan.errors import GroupStateError


class Abort:
    """A request to abort the process group ``name``."""

    __slots__ = ("_name", "requested")

    def __init__(self, name: str) -> None:
        self._name = name
        self.requested = False

    def error(self, waited_for: str = "") -> GroupStateError:
        """The error of a reduction of the group, and what it has waited for."""
        waited = f" while it waited for {waited_for}" if waited_for else ""
        return GroupStateError(
            f"{self._name} was aborted{waited}; destroy it and create it again, with the ranks "
            "that are left"
        )


class _ThisThread(threading.local):
    """``abort``: of the reduction that this thread runs, if it belongs to a group that has one."""

    abort: Abort | None = None


# Reductions read it without a call: most of them belong to no group that has an abort.
THIS_THREAD = _ThisThread()


def check_aborted(waited_for: str = "") -> None:
    """Raise GroupStateError if the group of the reduction that this thread runs was aborted."""
    abort = THIS_THREAD.abort
    if abort is not None and abort.requested:
        raise abort.error(waited_for)
