"""The registration of the backend with torch, and groups that torch does not create."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshplan._torch import Store
from meshplan.backend._derived import describe_group
from meshplan.backend._group import MeshplanProcessGroup
from meshplan.backend._options import NAME, BackendOptions


def create_group(made: Any, options: Any = None) -> MeshplanProcessGroup:
    """A group of the backend, for torch's ``Backend.register_backend``.

    Args:
        made: what torch knows of the group.
        options: the ``pg_options`` of the caller.
    """
    return MeshplanProcessGroup(made, options)


def create_group_across_jobs(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    options: BackendOptions | None,
) -> MeshplanProcessGroup:
    """A group of ranks that each have a default group of their own. The members agree through
    ``store`` for as long as the group lives. Without ``options``, those of the default group apply
    if it is of the backend. Raises RuntimeError, from torch, if members do not come.
    """
    # Each job has used other names before.
    if rank == 0:
        store.set("meshplan/name", f"meshplan/jobs/{uuid.uuid4().hex}")
    name = store.get("meshplan/name").decode()
    made = describe_group(name, store, rank, list(range(size)), timeout)
    group = MeshplanProcessGroup(made, options, across_jobs=True)
    group._set_group_name(name)
    return group


def register() -> None:
    """Register the backend for CPUs and CUDA devices, once."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create_group, True, ["cpu", "cuda"])
