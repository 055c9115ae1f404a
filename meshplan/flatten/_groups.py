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
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import GroupAgreementError, GroupCreationError, GroupStateError
from meshplan.flatten._agree import Verdict, open_round, vote
from meshplan.flatten._create import (
    attempt_store,
    create_members_only,
    default_timeout,
    group_name,
    this_rank,
    warm_up,
)
from meshplan.layout import Layout

__all__ = ["MAX_GROUPS", "Group", "GroupRegistry", "Handle", "registry"]

MAX_GROUPS = 64
MAX_LAYOUTS = 1024

Origin = Literal["created", "kept", "default", "axis", "flattened"]


@dataclass(frozen=True, slots=True)
class Group:
    """A process group whose group ranks follow mesh coordinates.

    Attributes:
        pg: torch's process group.
        ranks: global ranks in group order.
        origin: ``created`` by meshplan, or ``kept`` from another contract that created it; or
            found: the ``default`` group, an ``axis`` group of the mesh, a mesh that the user
            ``flattened``.
        name: torch's name for it.
    """

    pg: ProcessGroup
    ranks: tuple[int, ...]
    origin: Origin
    name: str

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return f"{self.origin} group {self.name} of {len(self.ranks)} ranks: {shown}"


@dataclass(frozen=True, slots=True)
class _Known:
    """A ``Group`` without a hold on the process group."""

    pg: weakref.ref[ProcessGroup]
    ranks: tuple[int, ...]
    origin: Origin
    name: str

    @classmethod
    def of(cls, group: Group) -> _Known:
        return cls(weakref.ref(group.pg), group.ranks, group.origin, group.name)

    def group(self) -> Group | None:
        """The group, or ``None`` if somebody has destroyed it."""
        pg = self.pg()
        if pg is None or pg not in c10d._world.pg_map:
            return None
        return Group(pg, self.ranks, self.origin, self.name)


@dataclass(frozen=True, slots=True)
class Handle:
    """A found group, to be had again without a look-up while its default group lives."""

    known: _Known
    default: weakref.ref[ProcessGroup]

    def group(self) -> Group | None:
        """The group; ``None`` if it or its default group is gone."""
        return self.known.group() if self.default() is dist.group.WORLD else None


_Key = tuple[tuple[int, ...], str, str, str]


class GroupRegistry:
    """Finds, creates and remembers groups. Thread-safe; a creation holds other creations up."""

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self.max_groups = max_groups
        self._lock = threading.RLock()
        self._default: weakref.ref[ProcessGroup] | None = None
        self._groups: dict[_Key, _Known] = {}
        # The same groups by layout, which is hashed faster than long groups are listed.
        self._by_layout: dict[tuple[Layout, tuple[int, ...], str, str, str], _Known] = {}

    def get(
        self,
        mesh: DeviceMesh,
        layout: Layout,
        axes: Sequence[int],
        *,
        token: str,
        timeout: float | None = None,
    ) -> Group:
        """The group of this rank over ``axes`` of ``mesh``, ordered by mesh coordinate.

        The first call for a group is a vote of its members; the later ones look it up.

        Args:
            mesh: where axis groups and flattened meshes are looked for.
            layout: of ``mesh``.
            axes: positions, ascending.
            token: what the members must have in common (contract, path).
            timeout: seconds to wait for the other members; the default group's own if ``None``.

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
        by_layout = (layout, tuple(axes), backend, mesh.device_type, token)
        # Not under the lock: another thread may hold it while it waits for other ranks.
        known = self._by_layout.get(by_layout) if self._is_of_default_group() else None
        group = None if known is None else known.group()
        if group is not None:
            return group
        with self._lock:
            self._follow_default_group()
            rank = this_rank()
            ranks = layout.group_of(rank, axes) or ()
            key = (ranks, backend, mesh.device_type, token)
            known = self._groups.get(key)
            group = None if known is None else known.group()
            if group is None:
                wait = default_timeout(mesh.device_type) if timeout is None else timeout
                group = self._join(mesh, axes, key, rank, wait)
                self._groups[key] = _Known.of(group)
            if len(self._by_layout) >= MAX_LAYOUTS:
                self._by_layout.clear()
            self._by_layout[by_layout] = _Known.of(group)
            return group

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
                group = created[name].group()
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
        self._groups.clear()
        self._by_layout.clear()

    def _join(
        self,
        mesh: DeviceMesh,
        axes: Sequence[int],
        key: _Key,
        rank: int,
        timeout: float,
    ) -> Group:
        ranks, backend, device_type, token = key
        found = _existing(mesh, axes, ranks, backend) or self._kept(key)
        if backend == "fake":
            # One process plays one rank of a job that does not exist: there is nobody to ask.
            return found or _create(ranks, backend, device_type, "meshplan/fake")
        store = c10d._get_default_store()
        prefix, refused = open_round(store, group_name(ranks, backend, device_type), rank)
        verdict = refused or vote(
            store,
            prefix,
            ranks=ranks,
            rank=rank,
            token=f"{token}, {f'on the {found.origin} group' if found else 'on a new group'}",
            timeout=timeout,
            veto=None if found else self._objection(device_type),
        )
        if not verdict.unanimous:
            raise _refusal(verdict, ranks, rank, timeout)
        if found is not None:
            return found
        return _connect(ranks, backend, device_type, prefix, rank, timeout)

    def _kept(self, key: _Key) -> Group | None:
        """The same group, made under another contract: one communicator serves both."""
        for found, known in self._groups.items():
            group = known.group() if found[:3] == key[:3] else None
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
        if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
            return (
                "a CUDA graph is being captured, in which no communicator can be created; "
                "call meshplan.prepare(mesh) before the capture"
            )
        return None


_REGISTRY = GroupRegistry()


def registry() -> GroupRegistry:
    """The registry of this process."""
    return _REGISTRY


def _backend_name(mesh: DeviceMesh, axes: Sequence[int]) -> str:
    # The mesh's own groups say which backend the user chose for it.
    return str(c10d._world.pg_map[mesh.get_group(axes[0])][0])


def _existing(
    mesh: DeviceMesh, axes: Sequence[int], ranks: tuple[int, ...], backend: str
) -> Group | None:
    candidates: list[tuple[Origin, ProcessGroup]] = []
    world = c10d._get_default_group()
    candidates.append(("default", world))
    if len(axes) == 1:
        candidates.append(("axis", mesh.get_group(axes[0])))
    candidates += [
        ("flattened", flat.get_group())
        for flat in mesh._get_root_mesh()._flatten_mapping.values()
        if flat.ndim == 1 and flat.get_coordinate() is not None
    ]
    for origin, pg in candidates:
        # The group's own rank order, not the mesh's: torch sorts the ranks of most groups.
        ordered = tuple(dist.get_process_group_ranks(pg))
        if ordered == ranks and c10d._world.pg_map[pg][0] == backend:
            return Group(pg=pg, ranks=ranks, origin=origin, name=pg.group_name)
    return None


def _connect(
    ranks: tuple[int, ...], backend: str, device_type: str, prefix: str, rank: int, timeout: float
) -> Group:
    failure: Exception | None = None
    group: Group | None = None
    try:
        group = _create(ranks, backend, device_type, prefix)
        warm_up(group.pg, device_type, timeout)
    except (RuntimeError, ValueError) as error:
        failure = error
    verdict = vote(
        c10d._get_default_store(),
        f"{prefix}/ready",
        ranks=ranks,
        rank=rank,
        token="ready",
        timeout=timeout,
        veto=None if failure is None else f"{type(failure).__name__}: {failure}",
    )
    if verdict.unanimous and group is not None:
        return group
    if group is not None:
        dist.destroy_process_group(group.pg)
    who, reason = verdict.veto or (None, "")
    if verdict.missing:
        reason = f"{_ranks(verdict.missing)} did not finish within {timeout:g} s"
    elif who is not None:
        reason = f"rank {who} failed: {reason}"
    raise GroupCreationError(
        f"the group of ranks {_shown(ranks)} was agreed on but could not be created, {reason}; "
        "the members have dropped it and the next call tries again"
    ) from failure


def _create(ranks: tuple[int, ...], backend: str, device_type: str, prefix: str) -> Group:
    name = group_name(ranks, backend, device_type)
    pg = create_members_only(
        ranks,
        name=name,
        backend=backend,
        store=attempt_store(prefix),
        timeout=default_timeout(device_type),
    )
    return Group(pg=pg, ranks=ranks, origin="created", name=name)


def _refusal(
    verdict: Verdict, ranks: tuple[int, ...], rank: int, timeout: float
) -> GroupAgreementError | GroupStateError:
    if verdict.veto is not None:
        who, reason = verdict.veto
        return GroupStateError(
            f"rank {who} cannot join the group of ranks {_shown(ranks)}: {reason}"
        )
    if verdict.missing:
        others = tuple(r for r in verdict.missing if r != rank)
        if len(others) < len(verdict.missing):
            late = "this rank" + (f" and {_ranks(others)}" if others else "")
        else:
            late = _ranks(others)
        return GroupAgreementError(
            f"{late} did not come within {timeout:g} s to the first reduction over ranks "
            f"{_shown(ranks)}, so nobody started it; every rank of the group must run the same "
            "redistribution: look for a rank that died or took another branch",
            missing=verdict.missing,
        )
    common = max(verdict.tokens.values(), key=list(verdict.tokens.values()).count)
    differing = tuple(sorted(r for r, t in verdict.tokens.items() if t != common))
    return GroupAgreementError(
        f"{_ranks(differing)} came to the first reduction over ranks {_shown(ranks)} with "
        f"'{verdict.tokens[differing[0]]}', the others with '{common}', so nobody started it; "
        "give meshplan.install the same arguments, and call meshplan.shutdown, on every rank",
        differing=differing,
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_shown(ranks)}"


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (
        f", ... ({len(ranks)} ranks)" if len(ranks) > 16 else ""
    )
