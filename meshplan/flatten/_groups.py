"""The process groups that steps run on: reuse what exists, else create, and keep.

One registry per process. It belongs to one default group: when that is destroyed or replaced, the
registry drops what it knows. It creates at most ``MAX_GROUPS`` groups and never destroys one behind
the caller's back, for destroying is collective too; ``shutdown`` does. It keeps no group alive:
torch does, until the group or the default group is destroyed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import GroupStateError
from meshplan.flatten._create import default_timeout, this_rank
from meshplan.flatten._join import (
    Group,
    Origin,
    agree_on,
    existing_group,
    join_group,
    refusal,
    with_peers,
)
from meshplan.flatten._signatures import Signatures
from meshplan.kernel import Communicator
from meshplan.layout import Layout

__all__ = ["MAX_GROUPS", "Block", "Group", "GroupRegistry", "Handle", "registry"]

MAX_GROUPS = 64
MAX_LAYOUTS = 1024


@dataclass(frozen=True, slots=True)
class _Known:
    """A ``Group`` without a hold on the process group. It does hold the shared memory."""

    pg: weakref.ref[ProcessGroup]
    ranks: tuple[int, ...]
    origin: Origin
    name: str
    peers: Communicator[Any] | None
    no_peers: str

    @classmethod
    def of(cls, group: Group) -> _Known:
        pg = weakref.ref(group.pg)
        return cls(pg, group.ranks, group.origin, group.name, group.peers, group.no_peers)

    def bare(self) -> Group | None:
        """The group without shared memory, or ``None`` if somebody has destroyed it."""
        pg = self.pg()
        if pg is None or pg not in c10d._world.pg_map:
            return None
        return Group(pg, self.ranks, self.origin, self.name)

    def group(self) -> Group | None:
        """The group, or ``None`` if it is destroyed or a reduction in its memory has failed."""
        group = self.bare()
        if group is None or (self.peers is not None and not self.peers.alive):
            return None
        return replace(group, peers=self.peers, no_peers=self.no_peers)


@dataclass(frozen=True, slots=True)
class Handle:
    """A found group, to be had again without a look-up while its default group lives."""

    known: _Known
    default: weakref.ref[ProcessGroup]

    def group(self) -> Group | None:
        """The group; ``None`` if it or its default group is gone."""
        return self.known.group() if self.default() is dist.group.WORLD else None


@dataclass(frozen=True, slots=True)
class Block:
    """One of the two groups of a hierarchical step, out of the ordered group over its axes.

    That group is cut in blocks of ``size`` consecutive ranks; ``size`` divides it.

    Attributes:
        kind: ``inner``: the block that this rank is in. ``outer``: the rank at this rank's place
            in each of the blocks.
        size: ranks in a block.
    """

    kind: Literal["inner", "outer"]
    size: int

    def of(self, ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The ranks out of ``ranks`` that go with ``rank``, in the same order."""
        block, place = divmod(ranks.index(rank), self.size)
        if self.kind == "outer":
            return ranks[place :: self.size]
        return ranks[block * self.size : (block + 1) * self.size]


_Key = tuple[tuple[int, ...], str, str, str, bool]
_LayoutKey = tuple[Layout, tuple[int, ...], Block | None, str, str, str, bool]


class GroupRegistry:
    """Finds, creates and remembers groups. Thread-safe; a creation holds other creations up."""

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self.max_groups = max_groups
        self._lock = threading.RLock()
        self._default: weakref.ref[ProcessGroup] | None = None
        self._groups: dict[_Key, _Known] = {}
        # The same groups by layout, which is hashed faster than long groups are listed.
        self._by_layout: dict[_LayoutKey, _Known] = {}
        # Layouts, axes and tokens on which all ranks of a group agreed before its blocks are used.
        self._met: set[tuple[Layout, tuple[int, ...], str]] = set()
        # By ranks, in debug mode only.
        self._signatures: dict[tuple[int, ...], Signatures] = {}

    def get(
        self,
        mesh: DeviceMesh,
        layout: Layout,
        axes: Sequence[int],
        *,
        token: str,
        timeout: float | None = None,
        block: Block | None = None,
        peers: bool = False,
    ) -> Group:
        """The group of this rank over ``axes`` of ``mesh``, ordered by mesh coordinate.

        The first call for a group is a vote of its members; the later ones look it up.

        Args:
            mesh: where axis groups and flattened meshes are looked for.
            layout: of ``mesh``.
            axes: positions, ascending.
            token: what the members must have in common (contract, path).
            timeout: seconds to wait for the other members; the default group's own if ``None``.
            block: only this part of the group.
            peers: with memory that its ranks share, where that is possible.

        Raises:
            GroupAgreementError: members missing or with another token; nobody has the group.
            GroupCreationError: the backend failed on some member.
            GroupStateError: no default group, a rank outside the mesh, a CUDA graph being
                captured, or more than ``max_groups`` groups, on any member.
        """
        if not dist.is_initialized():
            raise GroupStateError(
                "a reduction needs process groups and there is no default group; "
                "call torch.distributed.init_process_group first"
            )
        if mesh.get_coordinate() is None:
            raise GroupStateError(
                f"rank {this_rank()} is not in the mesh {layout}; only its members can reduce "
                "over it"
            )
        backend = _backend_name(mesh, axes)
        peers = peers and mesh.device_type in ("cpu", "cuda") and backend != "fake"
        by_layout = (layout, tuple(axes), block, backend, mesh.device_type, token, peers)
        # Not under the lock: another thread may hold it while it waits for other ranks.
        known = self._by_layout.get(by_layout) if self._is_of_default_group() else None
        group = None if known is None else known.group()
        if group is not None:
            return group
        with self._lock:
            self._follow_default_group()
            rank = this_rank()
            ranks = layout.group_of(rank, axes) or ()
            ranks = ranks if block is None else block.of(ranks, rank)
            key = (ranks, backend, mesh.device_type, token, peers)
            known = self._groups.get(key)
            if known is None and not peers:
                # With shared memory it serves as well.
                known = self._groups.get((*key[:4], True))
            group = None if known is None else known.group()
            if group is None:
                if known is not None and known.peers is not None:
                    known.peers.close()
                wait = default_timeout(mesh.device_type) if timeout is None else timeout
                group = self._join(mesh, axes, key, rank, wait)
                self._groups[key] = _Known.of(group)
            if len(self._by_layout) >= MAX_LAYOUTS:
                self._by_layout.clear()
            self._by_layout[by_layout] = _Known.of(group)
            return group

    def meet(
        self,
        mesh: DeviceMesh,
        layout: Layout,
        axes: Sequence[int],
        *,
        token: str,
        timeout: float | None = None,
    ) -> None:
        """Agree, once, with all ranks of the group over ``axes`` that blocks of it will reduce.

        Without it, who waits for a block of ranks that gave up on a missing one would name them.

        Args:
            mesh, layout, axes, token, timeout: as for ``get``.

        Raises:
            GroupAgreementError, GroupStateError: as for ``get``.
        """
        with self._lock:
            self._follow_default_group()
            rank = this_rank()
            key = (layout, tuple(axes), token)
            if key in self._met:
                return
            wait = default_timeout(mesh.device_type) if timeout is None else timeout
            agree_on(
                layout.group_of(rank, axes) or (),
                _backend_name(mesh, axes),
                mesh.device_type,
                rank=rank,
                token=token,
                timeout=wait,
            )
            if len(self._met) >= MAX_LAYOUTS:
                self._met.clear()
            self._met.add(key)

    def compare(self, group: Group, device_type: str, signature: str) -> None:
        """Meet the other members of ``group`` and compare what all bring: the debug mode.

        Args:
            group: from ``get``; all members call this as often as each other.
            device_type: of the mesh; its collectives' timeout is how long members wait.
            signature: equal on all members.

        Raises:
            SignatureMismatchError: on every member, where they differ.
            GroupAgreementError: members that did not come.
        """
        with self._lock:
            self._follow_default_group()
            known = self._signatures.get(group.ranks)
            if known is None:
                store = c10d._get_default_store()
                name = "-".join(map(str, group.ranks))
                known = Signatures.of(store, name, group.ranks, this_rank())
                self._signatures[group.ranks] = known
        wait = default_timeout(device_type)
        verdict = known.compare(signature, wait)
        if not verdict.unanimous:
            raise refusal(verdict, group.ranks, this_rank(), wait, "a reduction")

    def handle(self, group: Group) -> Handle:
        """A handle for a group that ``get`` has just returned."""
        world = dist.group.WORLD
        assert world is not None
        return Handle(_Known.of(group), weakref.ref(world))

    def shutdown(self) -> int:
        """Destroy the created groups, in name order, and forget all. Returns how many.

        Every rank that uses meshplan calls this, before ``destroy_process_group()``; there is
        nothing to do after it, for that destroys all groups itself.
        """
        with self._lock:
            self._follow_default_group()
            created = {g.name: g for g in self._groups.values() if g.origin == "created"}
            for name in sorted(created):
                group = created[name].bare()
                if group is not None:
                    dist.destroy_process_group(group.pg)
            self._forget()
            return len(created)

    def __len__(self) -> int:
        with self._lock:
            self._follow_default_group()
            return len(self._groups)

    def _is_of_default_group(self) -> bool:
        known = self._default
        current = dist.group.WORLD if dist.is_initialized() else None
        return known is not None and current is not None and known() is current

    def _follow_default_group(self) -> None:
        if not self._is_of_default_group():
            self._forget()
            current = dist.group.WORLD if dist.is_initialized() else None
            self._default = None if current is None else weakref.ref(current)

    def _forget(self) -> None:
        for known in self._groups.values():
            if known.peers is not None:
                known.peers.close()
        self._groups.clear()
        self._by_layout.clear()
        self._met.clear()
        self._signatures.clear()

    def _join(
        self,
        mesh: DeviceMesh,
        axes: Sequence[int],
        key: _Key,
        rank: int,
        timeout: float,
    ) -> Group:
        ranks, backend, device_type, token, peers = key
        found = existing_group(mesh, axes, ranks, backend) or self._kept(key)
        group = join_group(
            found,
            ranks,
            backend,
            device_type,
            rank=rank,
            token=token,
            objection=None if found else self._objection(device_type),
            timeout=timeout,
        )
        if not peers:
            return group
        return with_peers(
            group,
            device_type,
            rank=rank,
            token=token,
            objection=self._peers_objection(device_type),
            wait=timeout,
            # In use it waits as long as the collectives do that it stands for.
            timeout=default_timeout(device_type),
        )

    def _kept(self, key: _Key) -> Group | None:
        """The same group, made under another contract: one process group serves both."""
        for found, known in self._groups.items():
            group = known.bare() if found[:3] == key[:3] else None
            if group is not None:
                return replace(group, origin="kept")
        return None

    def _objection(self, device_type: str) -> str | None:
        count = len({g.name for g in self._groups.values() if g.origin == "created"})
        if count >= self.max_groups:
            return (
                f"{count} groups exist and the limit is {self.max_groups}; "
                "call meshplan.shutdown() between phases that use different meshes"
            )
        return _capture_objection(device_type)

    def _peers_objection(self, device_type: str) -> str | None:
        sharing = sum(k.peers is not None and k.peers.alive for k in self._groups.values())
        if sharing >= self.max_groups:
            return f"{sharing} groups share memory"
        return _capture_objection(device_type)


def _capture_objection(device_type: str) -> str | None:
    if device_type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    return (
        "a CUDA graph is being captured, in which no communicator can be created; "
        "call meshplan.prepare(mesh) before the capture"
    )


_REGISTRY = GroupRegistry()


def registry() -> GroupRegistry:
    """The registry of this process."""
    return _REGISTRY


def _backend_name(mesh: DeviceMesh, axes: Sequence[int]) -> str:
    # The mesh's own groups say which backend the user chose for it.
    return str(c10d._world.pg_map[mesh.get_group(axes[0])][0])
