"""The process groups that integrations accept."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from meshplan.backend import NAME
from meshplan.backend._group import MeshplanProcessGroup
from meshplan.errors import IntegrationError


def check_group(group: Any, owner: str) -> MeshplanProcessGroup:
    """``group``, if it is one of the backend."""
    if isinstance(group, MeshplanProcessGroup):
        return group
    raise IntegrationError(
        f"{owner} has a group of the backend {dist.get_backend(group)!r}, which reduces in its own "
        f"order; call torch.distributed.init_process_group({NAME!r}), or pass a group of "
        f"new_group(backend={NAME!r})"
    )
