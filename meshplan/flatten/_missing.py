"""Which ranks are missing after a reduction has failed in the backend.

Each rank notes its process in the store when it agrees on a group, and keeps the notes of ranks
near it, since the store may be lost with the rank that fails. After a failure, ranks of the same
host look these processes up. The state of a rank on another host, or in another namespace of
processes, is unknown.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from meshplan._calls import THIS_THREAD
from meshplan._torch import Store, default_group
from meshplan.flatten._agree import (
    AnsweringStore,
    Members,
    process_stat,
    roll_call,
)
from meshplan.flatten._create import (
    default_timeout,
    is_across_jobs,
    rank_in,
    store_of,
)
from meshplan.flatten._threads import is_forked
from meshplan.kernel import host

ProcessState = Literal["ended", "stopped", "alive", "unknown"]


def note_process(store: Store, rank: int) -> None:
    """Note in ``store`` which process is global rank ``rank``: this one."""
    number = os.getpid()
    found = process_stat(number)
    if found is not None:
        _, started = found
        try:
            where = host()
        except OSError:
            return
        store.set(_key(rank), json.dumps([where, number, started]))


# Ranks of one host have numbers that differ by less. In a large job no rank reads all notes.
_NEAR = 128
_POLL_SECONDS = 0.05
# By the group that numbers the ranks: the default group, or one across jobs.
_kept: WeakKeyDictionary[ProcessGroup, dict[int, bytes]] = WeakKeyDictionary()


def keep_processes(members: Members, group: ProcessGroup | None) -> None:
    """Keep what the members near this rank have noted, when they have agreed on ``group``."""
    near = [r for r in members.ranks if abs(r - members.rank) < _NEAR]
    keys = [_key(r) for r in near]
    if members.store.check(keys):
        notes = zip(near, members.store.multi_get(keys), strict=True)
        _kept.setdefault(_numbering(group), {}).update(notes)


def _numbering(group: ProcessGroup | None) -> ProcessGroup:
    return group if group is not None and is_across_jobs(group) else default_group()


def process_state(store: Store, rank: int) -> ProcessState:
    """The state of the process of global rank ``rank``; ``unknown`` unless it is on this host."""
    return _state(store.get(_key(rank))) if store.check([_key(rank)]) else "unknown"


def _state(note: bytes) -> ProcessState:
    where, number, started = json.loads(note)
    try:
        if where != host():
            return "unknown"
    except OSError:
        return "unknown"
    found = process_stat(number)
    # A number is given to another process once the first one has ended.
    if found is None or found[1] != started or found[0] in "ZX":
        return "ended"
    return "stopped" if found[0] in "Tt" else "alive"


def _key(rank: int) -> str:
    return f"meshplan/process/{rank}"


def format_failure(failure: BaseException) -> str:
    """The message of a backend, without the place in its source and without its advice."""
    first = str(failure).splitlines()[0] if str(failure) else ""
    return re.sub(r"^\[\S*\] ", "", first).split(". This is typically")[0]


# A roll call waits at most so long, and at most this share of a timeout longer than that.
_SECONDS = 10.0
_SHARE = 0.125


def roll_call_seconds(timeout: float, started: float) -> float:
    """How long ranks may report a failure of what has ``timeout`` seconds, and started at
    ``started`` of ``time.perf_counter``: what is left of them, and a share of their own.
    """
    left = max(timeout - (time.perf_counter() - started), 0.0)
    return min(_SECONDS, left + _SHARE * timeout)


@dataclass(frozen=True, slots=True)
class RollCall:
    """The facts that a rank has about the others after a failure."""

    seconds: float = 0.0  # how long the others were waited for; 0 if nothing could be found out
    late: bool = False  # whether the others reported the failure before, without this rank
    ended: tuple[int, ...] = ()  # ranks whose processes have ended
    stopped: tuple[int, ...] = ()  # ranks whose processes are stopped
    # Ranks that did not report the failure and may be alive. A running one may itself still wait
    # for a missing rank.
    silent: tuple[int, ...] = ()
    notes: tuple[tuple[int, str], ...] = ()  # the call in which each reporting rank was
    lost: bool = False  # the store did not answer, and no process on this host has ended

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are known to be missing; if there are none, all that may be."""
        return tuple(sorted((*self.ended, *self.stopped))) or self.silent


def find_missing(
    group: ProcessGroup,
    ranks: tuple[int, ...],
    device_type: str,
    started: float,
    name: str = "",
    note: str = "",
) -> RollCall:
    """Call the roll of ``ranks``, whose reduction over ``group`` has failed on this rank after it
    ``started``: the wait is a part of the timeout of the group's collectives. ``name``, the same on
    all, distinguishes groups of the same ranks; ``note`` is the failed call, for the others.
    Without a store only the state of processes on this host is known.
    """
    wait = roll_call_seconds(default_timeout(device_type, group), started)
    deadline = time.perf_counter() + wait
    if is_forked():
        return RollCall()
    name = f"{'-'.join(map(str, ranks))} {name}"
    try:
        store = AnsweringStore(store_of(group), wait)
        members = Members(store, ranks, rank_in(group), wait)
        absent, late, notes = roll_call(members, name, note)
        states = {rank: process_state(store, rank) for rank in absent}
    except (RuntimeError, ValueError):
        if THIS_THREAD.abort is not None and THIS_THREAD.abort.requested:
            return RollCall()
        # The store has gone with the rank that served it, or the default group with its owner.
        return _without_store(group, ranks, deadline)
    return RollCall(
        seconds=wait,
        late=late,
        ended=_in_state(states, "ended"),
        stopped=_in_state(states, "stopped"),
        silent=_in_state(states, "alive", "unknown"),
        notes=notes,
    )


def _without_store(group: ProcessGroup, ranks: tuple[int, ...], deadline: float) -> RollCall:
    """What the notes say that this rank has kept. A process that closes its connections, as after
    Ctrl-C, may take a moment to end.
    """
    try:
        kept, own = _kept.get(_numbering(group), {}), rank_in(group)
    except ValueError:
        return RollCall()
    while True:
        states = {r: _state(kept[r]) if r in kept else "unknown" for r in ranks if r != own}
        ended, stopped = (
            _in_state(states, "ended"),
            _in_state(states, "stopped"),
        )
        done = "alive" not in states.values() or time.perf_counter() > deadline
        if ended or stopped or done:
            return RollCall(ended=ended, stopped=stopped, lost=not (ended or stopped))
        time.sleep(_POLL_SECONDS)


def _in_state(states: Mapping[int, ProcessState], *wanted: ProcessState) -> tuple[int, ...]:
    return tuple(rank for rank, state in states.items() if state in wanted)
