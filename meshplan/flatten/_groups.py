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
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import GroupStateError
from meshplan.flatten._create import default_timeout, this_rank
from meshplan.flatten._join import (
    Group,
    agree_on,
    existing_group,
    join_group,
    refusal,
    with_peers,
)
from meshplan.flatten._known import Block, Handle, Key, Known
from meshplan.flatten._signatures import Signatures
from meshplan.layout import Layout

__all__ = ["MAX_GROUPS", "Block", "Group", "GroupRegistry", "Handle", "registry"]

MAX_GROUPS = 64
MAX_LAYOUTS = 1024


_LayoutKey = tuple[Layout, tuple[int, ...], Block | None, str, str, str, bool]


class GroupRegistry:
    """Finds, creates and remembers groups. Thread-safe; a creation holds other creations up."""

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self.max_groups = max_groups
        self._lock = threading.RLock()
        self._default: weakref.ref[ProcessGroup] | None = None
        self._groups: dict[Key, Known] = {}
        # The same groups by layout, which is hashed faster than long groups are listed.
        self._by_layout: dict[_LayoutKey, Known] = {}
        self._by_name: dict[tuple[str, str, str, bool, bool], Known] = {}
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
            key = Key(ranks, backend, mesh.device_type, token, peers)
            group = self._alive(key)
            if group is None:
                wait = default_timeout(mesh.device_type) if timeout is None else timeout
                found = existing_group(mesh, axes, ranks, backend)
                group = self._join(found, key, rank, wait)
            if len(self._by_layout) >= MAX_LAYOUTS:
                self._by_layout.clear()
            self._by_layout[by_layout] = Known.of(group)
            return group

    def of(
        self,
        pg: ProcessGroup,
        device_type: str,
        *,
        token: str,
        peers: bool = False,
        apart: bool = False,
    ) -> Group:
        """A group that the user made, ordered by its own ranks. The first call is a vote, as above.

        Args:
            pg: this rank is a member. How long it allows its collectives is how long members wait.
            device_type: of the tensors.
            token, peers: as for ``get``.
            apart: another process group of the same ranks, created for work that runs beside what
                ``pg`` does.

        Raises:
            GroupAgreementError, GroupCreationError, GroupStateError: as for ``get``.
        """
        given = (pg.group_name, device_type, token, peers, apart)
        known = self._by_name.get(given) if self._is_of_default_group() else None
        group = None if known is None else known.group()
        if group is not None and (apart or group.pg is pg):
            return group
        with self._lock:
            self._follow_default_group()
            ranks = tuple(dist.get_global_rank(pg, i) for i in range(pg.size()))
            backend = str(c10d._world.pg_map[pg][0])
            usable = peers and device_type in ("cpu", "cuda") and backend != "fake"
            use = f"{'apart from' if apart else 'given'} {pg.group_name}"
            key = Key(ranks, backend, device_type, token, usable, use)
            group = self._alive(key)
            if group is None:
                found = None if apart else Group(pg, ranks, "given", pg.group_name)
                group = self._join(found, key, this_rank(), default_timeout(device_type, pg))
            if len(self._by_name) >= MAX_LAYOUTS:
                self._by_name.clear()
            self._by_name[given] = Known.of(group)
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
        return Handle(Known.of(group), weakref.ref(world))

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
        self._by_name.clear()
        self._met.clear()
        self._signatures.clear()

    def _alive(self, key: Key) -> Group | None:
        known = self._groups.get(key)
        if known is None and not key.peers:
            # With shared memory it serves as well.
            known = self._groups.get(key._replace(peers=True))
        group = None if known is None else known.group()
        if group is None and known is not None and known.peers is not None:
            known.peers.close()
        return group

    def _join(self, found: Group | None, key: Key, rank: int, timeout: float) -> Group:
        found = found or self._kept(key)
        group = join_group(
            found,
            key.ranks,
            key.backend,
            key.device_type,
            rank=rank,
            token=key.token,
            objection=None if found else self._objection(key.device_type),
            timeout=timeout,
            use=key.use,
        )
        if key.peers:
            group = with_peers(
                group,
                key.device_type,
                rank=rank,
                token=key.token,
                objection=self._peers_objection(key.device_type),
                wait=timeout,
                # In use it waits as long as the collectives do that it stands for.
                timeout=default_timeout(key.device_type, group.pg),
                use=key.use,
            )
        self._groups[key] = Known.of(group)
        return group

    def _kept(self, key: Key) -> Group | None:
        """The same group, made under another contract: one process group serves both."""
        for found, known in self._groups.items():
            alike = found._replace(token=key.token, peers=key.peers) == key
            group = known.bare() if alike else None
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
