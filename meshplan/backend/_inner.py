"""The groups of the inner backend that a group of the backend ``meshplan`` consists of.

One carries the calls that move data. The other one carries reductions and nothing else: they run
on a thread of their own, and two threads may not order one group's messages. It is created in the
first reduction: many groups of a job never reduce, and each one takes descriptors and threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from meshplan._torch import WORLD, PrefixStore
from meshplan.backend._options import NAME
from meshplan.errors import BackendError, GroupStateError
from meshplan.flatten import keep_store
from meshplan.flatten._create import (
    attempt_store,
    create_uncounted,
    descriptor_objection,
    rest_at_end,
)


def default_inner() -> str:
    """The backends that torch takes for CPUs and, where there are some, for GPUs."""
    if torch.cuda.is_available() and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def create_inner_group(
    use: str,
    attempt: str = "",
    *,
    name: str,
    backend: str,
    store: Any,
    rank: int,
    ranks: Sequence[int],
    size: int,
    timeout: timedelta,
    options: Any = None,
    across_jobs: bool = False,
) -> ProcessGroup:
    """Create a plain group of the same ranks; every member calls it at the same time. ``use``
    separates the groups of one group of the backend, which has the ``name``, ``attempt`` those that
    its members have agreed on; ``ranks`` is empty for the default group and across jobs. Raises
    BackendError if torch does not have the backend, GroupStateError if this process may not open as
    many descriptors, and torch's RuntimeError if the backend cannot connect the members.
    """
    for part in backend.split(","):
        one = part.rpartition(":")[2]
        if not dist.is_backend_available(one):
            raise BackendError(
                f"torch has no backend {one!r} for inner={backend!r}; register it, or pass one "
                "that torch has, such as inner='gloo'"
            )
    objection = descriptor_objection(backend, size)
    if objection is not None:
        raise GroupStateError(f"group {name} of {size} ranks cannot be created: {objection}")
    group = create_uncounted(
        size,
        rank,
        ranks,
        backend,
        PrefixStore(use, attempt_store(attempt, backend, store) if attempt else store),
        name=f"{name}/{use}",
        timeout=timeout,
        options=options,
        use=use,
    )
    if across_jobs:
        keep_store(group, PrefixStore(f"agreements/{use}", store))
    if "gloo" in backend:
        rest_at_end()
    return group


def destroy_inner_group(group: ProcessGroup, *, all_are_destroyed: bool) -> None:
    """Destroy an inner group that still exists. With ``all_are_destroyed`` torch destroys all
    groups, and forgets this one itself.
    """
    if group not in getattr(c10d, WORLD).pg_map:
        return
    if all_are_destroyed:
        group.shutdown()
    else:
        dist.destroy_process_group(group)


def check_device(kind: str, config: str) -> None:
    """Refuse tensors of a device for which a group was created with another backend: raises
    BackendError if torch put the group in the place of that backend's.
    """
    named = dict(part.split(":") for part in config.split(","))
    if named.get(kind, NAME) != NAME:
        raise BackendError(
            f"the group has backend {config!r}, and torch uses one group for all devices if "
            f"one of them has '{NAME}'; pass '{NAME}' for each device, and name other backends "
            "in BackendOptions(inner=...)"
        )
