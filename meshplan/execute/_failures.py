"""Errors of a failed reduction: they name the missing ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

from meshplan._calls import is_unsent
from meshplan._message_text import format_first
from meshplan.errors import CollectiveError, MeshplanError, PeerTimeoutError
from meshplan.execute._gloo import break_connections, is_gloo
from meshplan.execute._groups import StepGroups
from meshplan.execute._provenance import Purpose
from meshplan.flatten import (
    RollCall,
    find_missing,
    format_failure,
    is_across_jobs,
)


def raise_failure(
    error: RuntimeError,
    groups: StepGroups,
    device_type: str,
    purpose: Purpose,
    started: float,
) -> NoReturn:
    """Raise what ``error`` of a backend or of shared memory is to the caller of a reduction that
    began at ``started`` of ``time.perf_counter``: CollectiveError if the backend failed,
    PeerTimeoutError with what is known of the other ranks. ``error`` itself, with a note on where,
    if memory is missing or the backend does not support the dtype.
    """
    call, rank = f"{purpose.request}, {purpose.planned}", groups.rank
    on_cpu = device_type == "cpu"
    if isinstance(error, PeerTimeoutError) and on_cpu and not error.ended:
        # Ranks of another contract wait in other memory. Of all contracts: the name of the call
        # must not depend on them.
        shared = "shared memory"
        roll = find_missing(groups.flat, groups.members, device_type, started, shared, call)
        stopped = f". {_ranks(roll.stopped, 'is', 'are')} stopped" * bool(roll.stopped)
        raise PeerTimeoutError(
            f"{error.args[0]}{stopped}{_differing(roll)}{_waited(started)}",
            rank=error.rank,
            block=error.block,
            phase=error.phase,
        ) from error
    if isinstance(error, MeshplanError):
        raise error
    found = error
    if not is_unsent(error):
        if on_cpu or is_gloo(device_type, groups):
            break_connections(groups)
        name = "" if groups.whole is None else groups.whole.group_name
        roll = find_missing(groups.levels[0], groups.members, device_type, started, name, call)
        found = CollectiveError(
            f"a reduction over {purpose.group} failed on rank {rank}: {format_failure(error)}; "
            f"{_found_out(roll, rank)}{_differing(roll)}{_waited(started)}. {_remedy(groups)}",
            missing=roll.missing,
        )
    # What a backend says of a rank that is gone names no rank, no tensor and no mesh.
    found.add_note(f"meshplan: in {call}, on {purpose.group}")
    if found is error:
        raise error
    raise found from error


def _waited(started: float) -> str:
    return f". This rank waited {time.perf_counter() - started:.1f} s"


def _remedy(groups: StepGroups) -> str:
    if is_across_jobs(groups.levels[0]):
        return "The group is unusable: shut it down, and create one with the ranks that are left"
    return (
        "These groups are unusable: call meshplan.shutdown() and destroy_process_group(), then "
        "init_process_group() with the ranks that are left"
    )


def _found_out(roll: RollCall, rank: int) -> str:
    """Which ranks are missing; a rank that may be alive is never said to be, only a candidate."""
    known = [f"{_ranks(roll.ended, 'has', 'have')} ended"] * bool(roll.ended)
    known += [f"{_ranks(roll.stopped, 'is', 'are')} stopped or unreachable"] * bool(roll.stopped)
    if known:
        return " and ".join(known)
    if roll.late:
        found = f"the others gave up waiting for rank {rank} (this one) before"
        if roll.silent:
            found += f"; {_ranks(roll.silent)} did not report the failure to them either"
        return found
    if roll.silent:
        return (
            f"{_ranks(roll.silent)} did not report it too within {roll.seconds:g} s: one that "
            "ended, is stopped, late or in another branch, or one that still waits for such a rank"
        )
    if roll.seconds > 0:
        return "all of its ranks report it: look for a late rank or a failing network"
    lost = "the store did not answer, so no rank can be asked, and none on this host has ended; "
    return f"{lost * roll.lost}look for a rank that ended, hangs or took another branch"


def _differing(roll: RollCall) -> str:
    by_call: dict[str, list[int]] = {}
    for who, call in roll.notes:
        by_call.setdefault(call, []).append(who)
    if len(by_call) < 2:
        return ""
    shown = (f"{_ranks(who)} in {call}" for call, who in by_call.items())
    return ". The ranks were in different calls: " + "; ".join(shown)


def _ranks(who: Sequence[int], one: str = "", several: str = "") -> str:
    shown = format_first(who, 16)
    return f"rank {shown} {one}".strip() if len(who) == 1 else f"ranks {shown} {several}".strip()
