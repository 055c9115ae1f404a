"""The calls of a group, which its ranks compare: counted on entry, refused once the group stopped.

The next call of a rank that fails alone, is late or skips a call would pair with another call of
its peers, often of the same shape. So every call takes a *ticket*, a number that counts the calls
of its group on this rank, and ranks with different tickets all raise (docs/adr/0020).

The count belongs to the process groups that the caller named, by identity and never by shape: two
meshes of equal shape count apart, even where they reduce over one group of torch. A call that fails
has used its ticket. Errors that every rank raises for one ticket leave the group usable; after any
other one the group has stopped on this rank, and each later call fails at once.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshplan._torch import resolve_process_group
from meshplan.errors import (
    CollectiveError,
    GroupStateError,
    MeshplanError,
    PeerTimeoutError,
    PlanNotRunError,
    SignatureMismatchError,
)

NO_TICKET = 0
"""The word of a call that no rank compares: simulated ranks, and calls that torch traces."""

_HALF = 1 << 32
_FIX = (
    "Call meshplan.shutdown() on every rank; where the process group itself has failed, destroy it "
    "on every rank and create it again, with the ranks that are left"
)
# Ranks may raise these in different calls, or one of them alone, with messages on their way.
_STOPPING = (CollectiveError, PeerTimeoutError, PlanNotRunError)
# Memory is missing (torch's allocator on CPUs), or the backend refuses the tensor, its dtype or the
# operation, as it does on every rank. Everything else is a failure between ranks, which gloo raises
# as plain ``RuntimeError``, in some cases without its name, such as "Application timeout caused
# pair closure".
_UNSENT = (
    "DefaultCPUAllocator",
    "Invalid scalar type",
    "Unconvertible NCCL type",
    "Cannot use ReduceOp.",
    "on complex tensors",
    "can't be cast to the desired output type",
    "not implemented for '",
    "ProcessGroupGloo::",
)


def is_unsent(error: BaseException) -> bool:
    """Whether nothing was sent: this rank had no memory, or the backend refused its tensor."""
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _UNSENT)


class Ticket:
    """One call of a group, whose ``number`` counts from 1 and is the same on every rank. As a
    context it stops the group if the call fails on this rank alone.
    """

    __slots__ = ("_calls", "_lane", "number")

    def __init__(self, calls: GroupCalls, lane: str, number: int) -> None:
        self._calls = calls
        self._lane = lane
        self.number = number

    @property
    def word(self) -> int:
        """Group, lane and number as ranks compare them: a signed number of 64 bits."""
        return self._calls.base(self._lane) | self.number % _HALF

    def __enter__(self) -> Ticket:
        calls = self._calls
        # On the path of each call, so the method is called only if it has something to do.
        if calls._works or calls._failure:
            calls.refuse_stopped()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        # For who counts the calls that fail before they have a ticket.
        error.used_ticket = True  # type: ignore[attr-defined]
        if isinstance(error, GroupStateError) and error.unanswered:
            # The peers give up on this rank in this call, at their pace. It comes back to the call.
            self._calls.give_back(self._lane, self.number)
        self._calls.stop_after(error)


def _is_of_all_ranks(error: BaseException) -> bool:
    if isinstance(error, SignatureMismatchError):
        return not error.unlike_calls
    if isinstance(error, MeshplanError):
        return not isinstance(error, _STOPPING)
    return is_unsent(error)


class GroupCalls:
    """The calls over some process groups on this rank. Their ``name`` is the same on all ranks that
    reduce together, and empty while they have not agreed on it.
    """

    def __init__(self, name: str = "", order: tuple[int, ...] | None = None) -> None:
        # No exception: its frames would keep the tensors of the call alive.
        self._failure = ""
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._bases: dict[str, int] = {}
        self.name = ""
        self._works: list[dist.Work] = []
        # Equal on all these ranks, like the name.
        self._order = (
            ""
            if order is None
            else f" in order {hashlib.sha1(repr(order).encode()).hexdigest()[:8]}"
        )
        if name:
            self.agree_on(name)

    def agree_on(self, name: str) -> None:
        """Set the name that the ranks have agreed on; compiled graphs find the calls by it."""
        self.name = name + self._order
        self._bases.clear()
        _NAMED[self.name] = self

    def take(self, lane: str) -> Ticket:
        """Take the ticket of a call, on entry and in the caller's thread. ``lane`` is the device
        type, and what else orders calls apart; equal on all ranks.
        """
        with self._lock:
            number = self._counts[lane] = self._counts.get(lane, 0) + 1
        return Ticket(self, lane, number)

    def count(self, lane: str) -> int:
        """How many tickets were taken."""
        return self._counts.get(lane, 0)

    def give_back(self, lane: str, number: int) -> None:
        """Let the next call have this number again, if it was the last one."""
        with self._lock:
            if self._counts.get(lane) == number:
                self._counts[lane] = number - 1

    def refuse_stopped(self) -> None:
        """Raise GroupStateError, with the first failure, if the group has stopped."""
        if self._works:
            self._note_failures()
        if self._failure:
            error = GroupStateError(
                f"group {self.name} has stopped, because a reduction failed before: "
                f"{self._failure}. {_FIX}"
            )
            # Raised before the context is entered, whose end would note it.
            error.used_ticket = True  # type: ignore[attr-defined]
            raise error

    def base(self, lane: str) -> int:
        """A digest of group and lane, in the upper half of a word."""
        base = self._bases.get(lane)
        if base is None:
            digest = hashlib.sha1(f"{self.name} {lane}".encode()).digest()
            base = self._bases[lane] = int.from_bytes(digest[:4], "little", signed=True) * _HALF
        return base

    def stop(self, error: BaseException, where: str = "") -> None:
        self._failure = self._failure or where + (str(error) or type(error).__name__)

    def stop_after(self, error: BaseException, where: str = "") -> None:
        """Stop unless every rank raises ``error`` in this call."""
        if not _is_of_all_ranks(error):
            self.stop(error, where)

    def stop_inside(self, error: Exception) -> None:
        """``stop_after`` an error of the inner backend: one rank alone may have called it."""
        self.stop_after(
            error,
            "the inner backend, which names no rank, failed on this rank: ",
        )

    def watch(self, work: dist.Work) -> None:
        """Stop if ``work`` of the inner backend fails, even if no caller waits for it. The next
        call finds that: a callback would run on a thread of the backend, also while Python ends.
        """
        with self._lock:
            self._works.append(work)

    def _note_failures(self) -> None:
        with self._lock:
            ended, pending = list[dist.Work](), list[dist.Work]()
            for work in self._works:
                (ended if work.is_completed() else pending).append(work)
            self._works = pending
        for work in ended:
            try:
                # At once: it has ended.
                work.wait()
            except Exception as error:
                self.stop_inside(error)

    def restart(self) -> None:
        """Count from 1 again and end a stop, once all ranks have left what went before."""
        with self._lock:
            self._failure = ""
            self._works = []
            self._counts.clear()


_restarted = 0.0
_Key = tuple[tuple[str, ...], tuple[int, ...] | None, bool]
# By the last group, the names of those before it, and the order of the ranks.
_CALLS: weakref.WeakKeyDictionary[ProcessGroup, dict[_Key, GroupCalls]] = (
    weakref.WeakKeyDictionary()
)
# Those of compiled graphs, which know them by name.
_NAMED: weakref.WeakValueDictionary[str, GroupCalls] = weakref.WeakValueDictionary()


def calls_of(
    *groups: ProcessGroup,
    order: tuple[int, ...] | None = None,
    beside: bool = False,
) -> GroupCalls:
    """The calls of the ranks that differ along ``groups``, one for each axis of a mesh.

    ``order`` has their global ranks by mesh coordinate: meshes in different orders have one process
    group of torch, and threads may reduce over each. ``beside``: of worker threads.
    """
    *others, last = groups
    if not others and order == tuple(dist.get_process_group_ranks(last)):
        order = None
    key = (
        tuple(group.group_name for group in others),
        order,
        beside and bool(others),
    )
    known = _CALLS.get(last)
    if known is None:
        known = _CALLS.setdefault(last, {})
    calls = known.get(key)
    if calls is None:
        calls = known.setdefault(key, GroupCalls("" if others else last.group_name, order))
    return calls


def keep_calls(group: ProcessGroup, calls: GroupCalls) -> None:
    """Let ``calls_of(group)`` be ``calls``, which ends with the group."""
    _CALLS[group] = {((), None, False): calls}


def take_named(name: str, lane: str) -> Ticket:
    """The ticket of a call that a compiled graph runs; the graph has the name of its groups. Raises
    GroupStateError if there are none.
    """
    # The living group of torch first: a group may have the name of one that was destroyed.
    try:
        return calls_of(resolve_process_group(name)).take(lane)  # type: ignore[arg-type]
    except RuntimeError as error:
        calls = _NAMED.get(name)
        if calls is None:
            raise GroupStateError(
                f"compiled code reduces over the process groups {name}, and this process has none "
                "of that name; call meshplan.prepare(mesh) before compiled code runs, on every rank"
            ) from error
    return calls.take(lane)


def restart_calls() -> None:
    global _restarted
    _restarted = time.time()
    for known in list(_CALLS.values()):
        for calls in known.values():
            calls.restart()


def restarted_before(moment: float) -> bool:
    """Whether calls were counted from 1 last before ``moment``, in seconds since the epoch."""
    return _restarted < moment


# Requests of other threads to end the waits of a reduction. A process group that is aborted sets
# its ``Abort``. Each wait of a reduction of that group checks the abort of the thread that runs it.


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
