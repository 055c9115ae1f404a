"""The groups that a process has, and the shortcuts to them.

A table belongs to one default group: when that is destroyed or replaced, the table is emptied. It
keeps no group alive: torch does, until the group or the default group is destroyed.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from meshplan._torch import WORLD, default_group
from meshplan.errors import GroupStateError
from meshplan.flatten import _threads
from meshplan.flatten._agree import Signatures
from meshplan.flatten._create import Sharing, is_across_jobs
from meshplan.flatten._threads import is_forked
from meshplan.kernel import Communicator


class KeyedLock:
    """A lock for each key, for as long as a thread holds it or waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: weakref.WeakValueDictionary[object, threading.Lock] = (
            weakref.WeakValueDictionary()
        )

    @contextmanager
    def take(self, key: object) -> Iterator[None]:
        """Hold the lock of ``key``."""
        with self._lock:
            lock = self._taken.setdefault(key, threading.Lock())
        with lock:
            yield


Origin = Literal["created", "kept", "default", "axis", "flattened", "given"]


@dataclass(frozen=True, slots=True)
class Group:
    """A process group whose group ranks follow mesh coordinates. It holds the memory that its ranks
    share, and the process group by a weak reference.
    """

    held: weakref.ref[ProcessGroup]
    ranks: tuple[int, ...]  # global ranks in group order
    # ``created`` by meshplan, ``kept`` from another contract that created it, or found: the
    # ``default`` group, an ``axis`` group of the mesh, a mesh that the user ``flattened``, or one
    # that was ``given``.
    origin: Origin
    name: str  # torch's name for it
    peers: Communicator[Any] | None = None  # memory that its ranks share, if requested and possible
    no_peers: str = ""  # why there is no such memory, if requested
    thread: str = ""  # for a thread's group: whose it is, the main thread's or its own, and why
    lent: bool = False  # it is the main thread's

    @classmethod
    def of(cls, pg: ProcessGroup, ranks: tuple[int, ...], origin: Origin) -> Group:
        return cls(weakref.ref(pg), ranks, origin, pg.group_name)

    @property
    def pg(self) -> ProcessGroup:
        """The process group. Raises GroupStateError if it was destroyed."""
        pg = self.held()
        if pg is None:
            raise GroupStateError(
                f"{self} was destroyed; call meshplan.prepare(mesh) on every rank"
            )
        return pg

    def process_group(self, bare: bool = False) -> ProcessGroup | None:
        """The process group; ``None`` if it is destroyed or, unless ``bare``, a reduction in the
        memory of its ranks has failed.
        """
        if not bare and self.peers is not None and not self.peers.alive:
            return None
        # A destroyed group stays an object while a caller holds it; torch's own map forgets it.
        pg = self.held()
        return None if pg is None or pg not in getattr(c10d, WORLD).pg_map else pg

    def bare(self) -> Group | None:
        """The group without shared memory, or ``None`` if it is destroyed."""
        if self.process_group(bare=True) is None:
            return None
        return replace(self, peers=None, no_peers="")

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        thread = f" ({self.thread})" if self.thread else ""
        name = find_axis(self.held()) or self.name
        return f"{self.origin} group {name} of {len(self.ranks)} ranks: {shown}{thread}"


def find_axis(group: ProcessGroup | None) -> str:
    """The axis of the mesh that the group belongs to; empty if it is of no mesh."""
    desc = getattr(group, "group_desc", "")
    return desc.removeprefix("mesh_") if desc.startswith("mesh_") else ""


@dataclass(frozen=True, slots=True)
class GroupHandle:
    """A found group, available without a look-up until the registry forgets it. After ``shutdown``
    all ranks vote again, so that none may go on with a group found before.
    """

    known: Group
    default: weakref.ref[ProcessGroup]  # the default group that it belongs to
    book: GroupTable  # the table of the registry that has found it
    life: object  # of the table, at that time

    def process_group(self) -> ProcessGroup | None:
        """The process group; ``None`` if it or its default group is gone."""
        # As ``is_forked``, without a call: every reduction asks.
        world, parents = dist.group.WORLD, _threads.from_parent
        if self.book.life is not self.life or self.default() is not world:
            return None
        forked = parents is not None and parents() is world
        return None if forked else self.known.process_group()


@dataclass(frozen=True, slots=True)
class Block:
    """One of the two groups of a hierarchical step, out of the ordered group over its axes, which
    is split in blocks of ``size`` consecutive ranks; ``size`` divides it.
    """

    # ``inner``: the block that this rank is in. ``outer``: the rank at this rank's place in each
    # block.
    kind: Literal["inner", "outer"]
    size: int

    def of(self, ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The ranks out of ``ranks``, the ordered whole group, that go with ``rank``, in the same
        order.
        """
        block, place = divmod(ranks.index(rank), self.size)
        if self.kind == "outer":
            return ranks[place :: self.size]
        return ranks[block * self.size : (block + 1) * self.size]


class GroupKey(NamedTuple):
    """What identifies a group; ``use`` separates groups that are equal in all else. The contract is
    no part of it: one group, and one region of shared memory, serves every contract and path.
    Headers and signatures compare those in each reduction.
    """

    ranks: tuple[int, ...]
    backend: str
    device_type: str
    peers: Sharing
    use: str = ""

    def group_name(self, group: ProcessGroup | None = None) -> str:
        """``meshplan:`` and the SHA-1 of ordered ranks, backend, device type, default group and
        use. It is the same on every member and in every run, so that caches find compiled graphs,
        which hold group names.
        """
        identity = f"{[*self.ranks]} {self.backend} {self.device_type}"
        # Members across jobs have several default groups, which the name leaves out.
        if group is None or not is_across_jobs(group):
            default = default_group()
            identity += f" {default.group_name} {default.size()}"
        if self.use:
            identity += f" {self.use}"
        return f"meshplan:{hashlib.sha1(identity.encode()).hexdigest()}"


MAX_SHORTCUTS = 1024
MAX_MEETINGS = 1024


class GroupTable:
    """Groups by their keys, by shortcuts, and the agreements of their members. Thread-safe: nothing
    here waits for other ranks.
    """

    def __init__(self) -> None:
        # Another object each time that all is forgotten.
        self.life = object()
        self._lock = threading.RLock()
        self._default: weakref.ref[ProcessGroup] | None = None
        self._groups: dict[GroupKey, Group] = {}
        # The same groups by what a caller has at hand, which is hashed faster than many ranks are.
        self._shortcuts: dict[Hashable, Group] = {}
        # What members have agreed on, once.
        self.meetings: set[Hashable] = set()
        # By ranks and use, in debug mode only.
        self._signatures: dict[str, Signatures] = {}

    def __len__(self) -> int:
        with self._lock:
            self.follow_default_group()
            return len(self._groups)

    def follow_default_group(self) -> None:
        """Drop all, if it is of a default group that is not the default group any more."""
        with self._lock:
            if not self._is_of_default_group():
                self._forget()
                current = dist.group.WORLD if dist.is_initialized() else None
                self._default = None if current is None else weakref.ref(current)

    def unlock_fork(self) -> None:
        """In a forked child: a thread of the parent may have held the lock, and is not here."""
        self._lock = threading.RLock()

    def short(self, shortcut: Hashable) -> Group | None:
        """The living group that ``shortcut`` was added for, without a lock."""
        if not self._is_of_default_group() or is_forked():
            return None
        known = self._shortcuts.get(shortcut)
        return None if known is None or known.process_group() is None else known

    def add_shortcut(self, shortcut: Hashable, group: Group) -> None:
        """Let ``short`` find ``group``."""
        with self._lock:
            # A lost shortcut costs this rank one look-up. Other ranks need not lose theirs.
            if len(self._shortcuts) >= MAX_SHORTCUTS:
                self._shortcuts.clear()
            self._shortcuts[shortcut] = group

    def add(self, key: GroupKey, group: Group) -> None:
        """Let ``alive`` and ``kept`` find ``group``; let go of groups that were destroyed."""
        with self._lock:
            groups = [*self._groups.items()]
        self._drop([gone for gone, known in groups if known.process_group(bare=True) is None])
        with self._lock:
            self._groups[key] = group

    def release(self, pg: ProcessGroup) -> None:
        """Forget ``pg``, and close the memory of its ranks once the call under way has ended."""
        with self._lock:
            gone = [key for key, known in self._groups.items() if known.held() is pg]
            found = self._shortcuts
            self._shortcuts = {key: one for key, one in found.items() if one.held() is not pg}
        self._drop(gone)

    def _drop(self, keys: list[GroupKey]) -> None:
        for key in keys:
            known = self._groups.pop(key, None)
            # A fork cannot wait for a call that is under way in its parent.
            if known is not None and known.peers is not None and not is_forked():
                known.peers.close()

    def alive(self, key: GroupKey) -> Group | None:
        """The group of ``key``, if it is alive."""
        with self._lock:
            known = self._groups.get(key)
            if known is None and key.peers == "never":
                # A group with shared memory also serves calls that never use it.
                others = (self._groups.get(key._replace(peers=s)) for s in ("always", "timed"))
                known = next(filter(None, others), None)
        if known is None or known.process_group() is not None:
            return known
        # After a destroyed group or a failed reduction no rank may use the memory again: its flags
        # are of calls that will not finish.
        if known.peers is not None:
            known.peers.close()
        return None

    def kept(self, key: GroupKey) -> Group | None:
        """The same group, made with or without shared memory: one process group serves both."""
        # A copy: `bare` asks torch, and the lock is not held while other code runs.
        with self._lock:
            groups = list(self._groups.items())
        for found, known in groups:
            matches = not known.lent and found._replace(peers=key.peers) == key
            if matches and (group := known.bare()) is not None:
                return replace(group, origin="kept")
        return None

    def created(self) -> int:
        """How many groups were created and not yet destroyed by ``take_created``."""
        with self._lock:
            self.follow_default_group()
            return len(self._created())

    def memory_of(self, pg: ProcessGroup) -> list[Communicator[Any]]:
        """The memory that was mapped for reductions over ``pg``."""
        with self._lock:
            entries = [known for known in self._groups.values() if known.held() is pg]
        return [known.peers for known in entries if known.peers is not None]

    def sharing(self) -> int:
        """How many groups share memory."""
        with self._lock:
            found = (k.peers for k in self._groups.values() if not k.lent)
            return sum(peers is not None and peers.alive for peers in found)

    def take_created(self) -> list[Group]:
        """The created groups in the order of their names, for the caller to destroy; forget all. A
        forked process destroys none of its parent's.
        """
        with self._lock:
            self.follow_default_group()
            created = {} if is_forked() else self._created()
            self._forget()
        # Destroying a group may wait for its members, so all ranks go through them in one order.
        found = [created[name].bare() for name in sorted(created)]
        return [group for group in found if group is not None]

    def why_no_meeting(self) -> str | None:
        """Why no further agreement can be added; ``None`` if one can."""
        # No agreement is forgotten to make room: ranks have agreed with different others, and a
        # rank that had forgotten would wait for those that have not.
        if len(self.meetings) < MAX_MEETINGS:
            return None
        return (
            f"{MAX_MEETINGS} different reductions in blocks were agreed on, which is the limit; "
            "call meshplan.shutdown() between phases that use different meshes"
        )

    def signatures(self, name: str, make: Callable[[], Signatures]) -> Signatures:
        """The signatures of ``name``, made once."""
        with self._lock:
            self.follow_default_group()
            if name not in self._signatures:
                self._signatures[name] = make()
            return self._signatures[name]

    def _created(self) -> dict[str, Group]:
        return {g.name: g for g in self._groups.values() if g.origin == "created" and not g.lent}

    def _is_of_default_group(self) -> bool:
        known = self._default
        current = dist.group.WORLD if dist.is_initialized() else None
        return known is not None and current is not None and known() is current

    def _forget(self) -> None:
        self._drop([*self._groups])
        # Handles compare it by identity: from here on none of them is current.
        self.life = object()
        self._shortcuts.clear()
        self.meetings.clear()
        self._signatures.clear()
