"""Which ranks are missing after a reduction has failed in the backend.

Each rank notes its process in the store when it agrees on a group. After a failure, ranks of the
same host look these processes up. The state of a rank on another host, or in another namespace of
processes, is unknown.
"""

from __future__ import annotations

import json
import os
import re
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshplan._torch import Store
from meshplan.flatten._across_jobs import rank_in, store_of
from meshplan.flatten._agree import roll_call
from meshplan.flatten._answering import AnsweringStore
from meshplan.flatten._create import default_timeout
from meshplan.flatten._threads import is_forked
from meshplan.kernel import host

ProcessState = Literal["ended", "stopped", "alive", "unknown"]


def note_process(store: Store, rank: int) -> None:
    """Note in ``store`` which process is global rank ``rank``: this one."""
    number = os.getpid()
    found = _stat(number)
    if found is not None:
        _, started = found
        try:
            where = host()
        except OSError:
            return
        store.set(_key(rank), json.dumps([where, number, started]))


# The first one of this process that has come here.
_default_group: weakref.ref[ProcessGroup] | None = None


def started_before(moment: float) -> bool:
    """Whether this process ran at ``moment``, in seconds since the epoch, and has one job.

    Else a note in the store that is of then may be for an earlier job on that store.
    """
    global _default_group
    world = dist.group.WORLD
    if _default_group is None and world is not None:
        _default_group = weakref.ref(world)
    found = _stat(os.getpid())
    if found is None or _default_group is None or _default_group() is not world:
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(found[1]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age < moment


def process_state(store: Store, rank: int) -> ProcessState:
    """What the process of global rank ``rank`` does; ``unknown`` unless it is on this host."""
    if not store.check([_key(rank)]):
        return "unknown"
    where, number, started = json.loads(store.get(_key(rank)))
    try:
        if where != host():
            return "unknown"
    except OSError:
        return "unknown"
    found = _stat(number)
    # A number is given to another process once the first one has ended.
    if found is None or found[1] != started or found[0] in "ZX":
        return "ended"
    return "stopped" if found[0] in "Tt" else "alive"


def _key(rank: int) -> str:
    return f"meshplan/process/{rank}"


def _stat(number: int) -> tuple[str, str] | None:
    """State and start time of a process; ``None`` if it does not exist."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may contain anything.
    words = text.rpartition(")")[2].split()
    return words[0], words[19]


def format_failure(failure: BaseException) -> str:
    """The message of a backend, without the place in its source and without its advice.

    Args:
        failure: what the backend raised.
    """
    first = str(failure).splitlines()[0] if str(failure) else ""
    return re.sub(r"^\[\S*\] ", "", first).split(". This is typically")[0]


_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RollCall:
    """What a rank knows of the others after a failure.

    Attributes:
        seconds: how long the others were waited for; 0 if nothing could be found out.
        late: whether the others reported the failure before, without this rank.
        ended, stopped: ranks whose processes have ended or are stopped.
        silent: ranks that did not report the failure and may be alive. One that runs may itself
            still wait for a rank that is missing.
        notes: the call in which each rank that reported the failure was.
    """

    seconds: float = 0.0
    late: bool = False
    ended: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    notes: tuple[tuple[int, str], ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are known to be missing; if there are none, all that may be."""
        return tuple(sorted((*self.ended, *self.stopped))) or self.silent


def find_missing(
    group: ProcessGroup, ranks: tuple[int, ...], device_type: str, name: str = "", note: str = ""
) -> RollCall:
    """Call the roll of ``ranks``, whose reduction has failed on this rank.

    Args:
        group: one that they reduce on. How long it allows its collectives bounds the wait.
        ranks: global ranks of all that reduce together.
        device_type: of the tensors.
        name: distinguishes groups of the same ranks; the same on all of them.
        note: the call that has failed on this rank, for the others.

    Returns:
        What is known. Nothing is, without a store.
    """
    wait = min(_SECONDS, default_timeout(device_type, group))
    if is_forked():
        return RollCall()
    name = f"{'-'.join(map(str, ranks))} {name}"
    try:
        store = AnsweringStore(store_of(group), wait)
        absent, late, notes = roll_call(
            store, name, ranks=ranks, rank=rank_in(group), wait=wait, note=note
        )
        states = {rank: process_state(store, rank) for rank in absent}
    except (RuntimeError, ValueError):
        # The store has gone with the rank that served it, or the default group with its owner.
        return RollCall()
    return RollCall(
        seconds=wait,
        late=late,
        ended=tuple(rank for rank, state in states.items() if state == "ended"),
        stopped=tuple(rank for rank, state in states.items() if state == "stopped"),
        silent=tuple(rank for rank, state in states.items() if state in ("alive", "unknown")),
        notes=notes,
    )
