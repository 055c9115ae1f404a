"""Caches of each live mesh: its layout, and the routes planned for it.

The seam has further caches for each thread. One comparison shows whether these are valid: ``FACTS``
gets a new token whenever something changes that a decision may depend on.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from meshplan._torch import disable_current_modes, thread_of_mesh
from meshplan.layout import Layout


@dataclass(slots=True, weakref_slot=True)
class MeshEntry:
    """The cached values of one mesh.

    Attributes:
        layout: read once.
        device_type: of the mesh.
        descending: axes along which ranks do not ascend in every group.
        by_coordinate: those of them along which tensors were sharded in the order of coordinates
            (``_shard_order``).
        routes, by_placement: the caches of ``_routes``.
    """

    layout: Layout
    device_type: str
    descending: frozenset[int]
    by_coordinate: set[int] = field(default_factory=set)
    routes: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    by_placement: dict[tuple[Any, ...], Any] = field(default_factory=dict)


# Neither table keeps a mesh alive. _MESHES finds the entry of a mesh by identity; _EQUAL lets equal
# meshes, which torch treats as one, share an entry. Meshes are not hashed for this: a mesh stores
# its hash, which differs between processes, and torch's cache of compiled graphs on disk includes
# every stored value of a mesh.
_MESHES = WeakIdKeyDictionary()
_EQUAL: weakref.WeakValueDictionary[tuple[Any, ...], MeshEntry] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


class _Facts:
    """``token`` changes with the installation, the topology, and the order of shards."""

    __slots__ = ("token",)

    def __init__(self) -> None:
        self.token = object()


FACTS = _Facts()


def change_facts() -> None:
    """Invalidate every cached decision. Call it after the change."""
    FACTS.token = object()


def mesh_entry(device_mesh: DeviceMesh) -> MeshEntry:
    """The entry of a mesh; the same object while the mesh, or an equal one, lives."""
    found: MeshEntry | None = _MESHES.get(device_mesh)  # type: ignore[no-untyped-call]
    if found is not None:
        return found
    with _LOCK:
        return _entry(device_mesh)


def _entry(device_mesh: DeviceMesh) -> MeshEntry:
    # While torch traces, the mesh's tensor of ranks must be read outside of the trace.
    with disable_current_modes():
        layout = Layout.from_mesh(device_mesh)
    # The values that torch compares; the thread counts only where threads simulate ranks.
    key = (layout, device_mesh.device_type, thread_of_mesh(device_mesh))
    entry = _EQUAL.get(key)
    if entry is None:
        wide = [i for i, size in enumerate(layout.sizes) if size > 1]
        descending = frozenset(i for i in wide if not layout.ascends(i))
        entry = MeshEntry(layout, device_mesh.device_type, descending)
        _EQUAL[key] = entry
    _MESHES[device_mesh] = entry
    return entry
