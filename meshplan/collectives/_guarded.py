"""One reduction at a time on a process group, and what it means that one has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshplan.collectives._groups import StepGroups
from meshplan.collectives._provenance import Purpose
from meshplan.errors import CollectiveError, GroupStateError, MeshplanError
from meshplan.flatten import missing_members, shown_failure

__all__ = ["guarded"]

_Result = TypeVar("_Result")

# Groups on which a reduction is being sent, and by which thread; only for so long.
_busy: dict[ProcessGroup, list[threading.Thread]] = {}


def guarded(
    run: Callable[[], _Result], groups: StepGroups, device_type: str, purpose: Purpose
) -> _Result:
    """Run what a reduction sends.

    Args:
        run: sends it on ``groups``.
        groups: a step's.
        device_type: of the tensors.
        purpose: what was asked, planned and found, for the words of an error.

    Raises:
        GroupStateError: another thread of this process is in a reduction over one of the groups.
        CollectiveError: the backend has failed.
        RuntimeError: there is no memory, or the backend has no such dtype; as torch raises it, with
            a note on where.
    """
    mine = [threading.current_thread()]
    taken = []
    try:
        for group in groups.all:
            owner = _busy.setdefault(group, mine)
            if owner is not mine:
                raise GroupStateError(
                    f"thread {mine[0].name!r} came to a reduction over {purpose.group} while "
                    f"thread {owner[0].name!r} is in one: ranks meet in the order of their calls, "
                    "and threads have no order that is the same on all ranks; reduce over one mesh "
                    "on one thread, or give each thread a mesh of its own"
                )
            taken.append(group)
        return run()
    except MeshplanError:
        raise
    except RuntimeError as error:
        # What a backend says of a rank that is gone names no rank, no tensor and no mesh.
        note = f"meshplan: in {purpose.asked}, {purpose.planned}, on {purpose.group}"
        if _is_of_this_rank(error):
            error.add_note(note)
            raise
        failed = _failed(error, groups, device_type, purpose.group)
        failed.add_note(note)
        raise failed from error
    finally:
        for group in taken:
            del _busy[group]


def _is_of_this_rank(error: RuntimeError) -> bool:
    """Whether there is no memory, or the backend has no such dtype: nothing was sent.

    Callers look for the one by its type, or, for torch's allocator on the CPU, by its words; for
    the other gloo and NCCL have words of their own. Anything else is a failure between ranks: gloo
    raises them as plain ``RuntimeError``, some, such as "Application timeout caused pair closure",
    without its name.
    """
    words = ("DefaultCPUAllocator", "Invalid scalar type", "Unconvertible NCCL type")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _failed(
    error: RuntimeError, groups: StepGroups, device_type: str, what: str
) -> CollectiveError:
    rank = dist.get_rank()
    name = "" if groups.whole is None else groups.whole.group_name
    absent, seconds = missing_members(groups.levels[0], groups.members, device_type, name)
    found_out = "look for a rank that ended, hangs or took another branch"
    if absent is None:
        found_out = f"the others gave up waiting for rank {rank} (this one) before"
    elif absent:
        shown = ", ".join(map(str, absent[:16])) + (", ..." if len(absent) > 16 else "")
        found_out = (
            f"rank{'s' if len(absent) > 1 else ''} {shown} did not report it too within "
            f"{seconds:g} s: ended, stopped, in another branch, or still waiting for such a rank"
        )
    elif seconds > 0:
        found_out = (
            "all of its ranks report it: look for one that came late, or a network that fails"
        )
    return CollectiveError(
        f"a reduction over {what} failed on rank {rank}: {shown_failure(error)}; {found_out}. "
        "These groups are of no more use: call meshplan.shutdown() and destroy_process_group(), "
        "then init_process_group() with the ranks that are left",
        missing=absent or (),
    )
