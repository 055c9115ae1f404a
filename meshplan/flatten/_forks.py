"""Processes that were forked while process groups existed, and may not use what they inherited.

The connections of an inherited group are its parent's. What a fork sends on them reaches the peers
in the middle of what the parent sends, and a fork that destroys them takes them from the parent.
"""

from __future__ import annotations

import os
import weakref

import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshplan.errors import GroupStateError

__all__ = ["inherited", "refuse_inherited"]

# The default group that this process had from its parent, if it is a fork.
_inherited: weakref.ref[ProcessGroup] | None = None
_parent = os.getpid()


def _remember() -> None:
    global _inherited, _parent
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    # Where one process plays one rank of a job that does not exist there are no connections.
    real = world is not None and dist.get_backend(world) != "fake"
    _inherited = weakref.ref(world) if world is not None and real else None
    _parent = os.getppid()


os.register_at_fork(after_in_child=_remember)


def inherited() -> bool:
    """Whether this process is a fork, and its default group another process's."""
    return _inherited is not None and _inherited() is dist.group.WORLD


def refuse_inherited() -> None:
    """Refuse to reduce over what is another process's.

    Raises:
        GroupStateError: the default group is that of the process that forked this one.
    """
    if inherited():
        raise GroupStateError(
            f"process {os.getpid()} is a fork of process {_parent}, whose process groups these "
            "are: what it sent would reach the peers in the middle of what its parent sends; "
            "reduce in the parent, or start processes with 'spawn' and initialise "
            "torch.distributed in them"
        )
