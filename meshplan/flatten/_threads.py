"""Who may use a process group: not a fork of its process, and one thread at a time.

A forked process has its parent's process groups, and connections that are its parent's: what it
sent would reach the peers in the middle of what the parent sends.

Members of a group pair their calls in order, and the order of threads differs between ranks. So a
``threading.Thread`` reduces over groups that are kept for its mesh, apart from those of the main
thread. Threads that Python has not started, such as those in which autograd
runs backward on a GPU while the main thread waits, belong to the main thread.

The calls of one thread are in order with those of the main thread: of the thread that the main
thread waits for in ``Thread.join()`` without a timeout. It is in the main thread's place until it
ends, and so is a thread that such a thread waits for. One rank sees only its own threads, so the
ranks agree before a thread uses the main thread's groups (``_groups``). While that thread is alive,
no other may use them: if ``join`` was interrupted, the main thread is refused.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from types import FrameType

import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshplan.errors import GroupStateError

# From the start of a thread to the ``join`` of the thread that started it.
_SECONDS_TO_JOIN = 1.0

# Threads that were found in the main thread's place; one that has ended goes when another comes.
in_place: set[threading.Thread] = set()
_lock = threading.Lock()
# The default group that this process had from its parent, if it is a fork.
from_parent: weakref.ref[ProcessGroup] | None = None
_parent = os.getpid()


class _PlaceCache(threading.local):
    """Whether the thread was found there; once, so that it stays with what its ranks agreed on."""

    has_main_place: bool | None = None


_place_cache = _PlaceCache()


def is_worker_thread() -> bool:
    """Whether the caller is a thread that Python has started, other than the main thread."""
    current = threading.current_thread()
    return current is not threading.main_thread() and not isinstance(
        current, threading._DummyThread
    )


def has_main_place() -> bool:
    """Whether the calling thread is in the main thread's place: that waits until it ends. The
    thread that started it may not have called ``join`` yet, and gets a second for it.
    """
    current = threading.current_thread()
    if _place_cache.has_main_place is not None:
        return _place_cache.has_main_place
    _place_cache.has_main_place = False
    deadline = time.monotonic() + _SECONDS_TO_JOIN
    while not _main_waits_for(current):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    with _lock:
        in_place.difference_update([one for one in in_place if not _runs(one)])
        in_place.add(current)
    _place_cache.has_main_place = True
    return True


def check_turn(what: object, *, lent: bool) -> None:
    """Raise GroupStateError for a thread that would use a group while another thread has the turn:
    for a group of the main thread (``lent``), if that does not wait for this thread; on the main
    thread, if a thread in its place still runs.
    """
    if lent and is_worker_thread():
        if not has_main_place():
            raise GroupStateError(
                f"thread {threading.current_thread().name!r} called a reduction over {what}, a "
                "group of the main thread, which does not wait for this thread as it did for the "
                "one before; wait for each in Thread.join() without a timeout, or give this one a "
                "mesh of its own"
            )
    elif in_place and not is_worker_thread() and _joined_by(threading.main_thread()) is None:
        others = [one.name for one in tuple(in_place) if _runs(one)]
        if others:
            raise GroupStateError(
                f"the main thread called a reduction over {what} while thread {others[0]!r} "
                "runs, which reduces over groups of the main thread because that one waited for "
                "it; join it first, or give it a mesh of its own"
            )


def _runs(thread: threading.Thread) -> bool:
    # After an interrupted join(), is_alive() may be false while the thread runs (bpo-45274).
    return thread in threading.enumerate()


def _main_waits_for(thread: threading.Thread) -> bool:
    """Whether the main thread is in ``join`` of this thread, or of one that is, and so on."""
    waiting: threading.Thread | None = threading.main_thread()
    for _ in range(threading.active_count() + 1):
        waiting = None if waiting is None else _joined_by(waiting)
        if waiting is thread:
            return True
    return False


def _joined_by(waiting: threading.Thread) -> threading.Thread | None:
    """The thread that ``waiting`` waits for without a timeout, if it does."""
    frame: FrameType | None = sys._current_frames().get(waiting.ident or 0)
    while frame is not None and frame.f_globals is vars(threading):
        if frame.f_code is threading.Thread.join.__code__:
            given = frame.f_locals
            thread, timeout = given.get("self"), given.get("timeout")
            return thread if timeout is None and isinstance(thread, threading.Thread) else None
        frame = frame.f_back
    return None


def _remember() -> None:
    global from_parent, _parent
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    # Where one process plays one rank of a job that does not exist there are no connections.
    real = world is not None and dist.get_backend(world) != "fake"
    from_parent = weakref.ref(world) if world is not None and real else None
    # A fork has no other threads.
    in_place.clear()
    _parent = os.getppid()


os.register_at_fork(after_in_child=_remember)


def is_forked() -> bool:
    """Whether this process is a fork, and its default group another process's."""
    return from_parent is not None and from_parent() is dist.group.WORLD


def refuse_forked() -> None:
    """Raise GroupStateError if the default group is that of the process that forked this one."""
    if is_forked():
        raise GroupStateError(
            f"process {os.getpid()} is a fork of process {_parent}, which owns these process "
            "groups: peers would receive the messages of both, mixed; "
            "reduce in the parent, or start processes with 'spawn' and initialise "
            "torch.distributed in them"
        )
