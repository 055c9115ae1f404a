"""``--backend meshplan``: the groups of a job are of the backend, and its script is unchanged."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from meshplan.backend import NAME, BackendOptions

_KEPT = {NAME, "fake", "mpi"}  # mpi has a rendezvous of its own, fake no data


def use_backend() -> None:
    """Let ``init_process_group`` and ``new_group`` create groups of the backend ``meshplan``, which
    move their data by the backend that the caller names.
    """
    for name in ("init_process_group", "new_group"):
        plain = getattr(dist, name)
        changed = _create_by_meshplan(plain)
        # Meshes and other libraries have imported the function, and so may the script have.
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is plain:
                setattr(module, name, changed)


def _create_by_meshplan(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @wraps(plain)
    def create(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        inner = str(given.get("backend") or "").lower()
        is_kept = _KEPT.intersection(part.rpartition(":")[2] for part in inner.split(","))
        # A further group without a name is as the default group.
        if not is_kept and (inner or "ranks" not in signature.parameters):
            given["backend"] = NAME
            # Options of NCCL go to the inner backend, which is then the default one.
            if inner and given.get("pg_options") is None:
                given["pg_options"] = BackendOptions(inner=inner)
        return plain(**given)

    return create
