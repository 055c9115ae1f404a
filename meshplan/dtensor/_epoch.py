"""How often the process groups of this process became others.

Compiled graphs name process groups. Under the name of one that was destroyed there is none, or in
another life of the default group another one.
"""

from __future__ import annotations

import threading
import weakref

import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["begin_epoch", "epoch"]

_lock = threading.Lock()
_count = 0
_world: weakref.ref[ProcessGroup] | None = None


def begin_epoch() -> None:
    """Groups that graphs may name are destroyed."""
    global _count
    with _lock:
        _count += 1


def epoch() -> int:
    """Another number after ``begin_epoch``, and when the default group is another one."""
    global _count, _world
    world = dist.group.WORLD
    if world is not None and (_world is None or _world() is not world):
        with _lock:
            if _world is None or _world() is not world:
                _count += 1
                _world = weakref.ref(world)
    return _count
