"""What is remembered of each mesh while it lives: its layout, and the plans for it."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from meshplan.layout import Layout

__all__ = ["Known", "known"]


@dataclass(slots=True)
class Known:
    """What is known of one mesh.

    Attributes:
        layout: read once.
        descending: axes along which ranks do not ascend in every group.
        by_coordinate: those of them along which shards were cut by coordinate (``_shard_order``).
        routes, by_placement: of the seam.
    """

    layout: Layout
    descending: frozenset[int]
    by_coordinate: set[int] = field(default_factory=set)
    routes: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    by_placement: dict[tuple[Any, ...], Any] = field(default_factory=dict)


# Owned by this module; an entry goes with its mesh, and holds no mesh itself.
_MESHES: weakref.WeakKeyDictionary[DeviceMesh, Known] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def known(device_mesh: DeviceMesh) -> Known:
    """What is known of a mesh; the same object while the mesh, or an equal one, lives."""
    with _LOCK:
        entry = _MESHES.get(device_mesh)
        if entry is None:
            # While tracing, the mesh's rank tensor must be read for real.
            with _disable_current_modes():
                layout = Layout.from_mesh(device_mesh)
            wide = [i for i, size in enumerate(layout.sizes) if size > 1]
            entry = Known(layout, frozenset(i for i in wide if not layout.ascends(i)))
            _MESHES[device_mesh] = entry
        return entry
