"""The groups that a process has, and the shortcuts to them.

A table belongs to one default group: when that is destroyed or replaced, the table is emptied. It
keeps no group alive: torch does, until the group or the default group is destroyed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from meshplan._torch import WORLD
from meshplan.flatten import _threads
from meshplan.flatten._agree import Signatures
from meshplan.flatten._create import Sharing
from meshplan.flatten._join import Group, Origin
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


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """A ``Group`` by a weak reference to the process group. It does hold the shared memory."""

    pg: weakref.ref[ProcessGroup]
    ranks: tuple[int, ...]
    origin: Origin
    name: str
    peers: Communicator[Any] | None
    no_peers: str
    thread: str
    lent: bool

    @classmethod
    def of(cls, group: Group) -> GroupEntry:
        return cls(weakref.ref(group.pg), *(getattr(group, name) for name in _FACTS))

    def bare(self) -> Group | None:
        """The group without shared memory, or ``None`` if it is destroyed."""
        group = self._group(self.process_group(bare=True))
        return group and replace(group, peers=None, no_peers="")

    def group(self) -> Group | None:
        """The group, or ``None`` if it is destroyed or a reduction in its memory has failed."""
        return self._group(self.process_group())

    def __str__(self) -> str:
        return str(self._group(self.process_group(bare=True)))

    def process_group(self, bare: bool = False) -> ProcessGroup | None:
        """The process group of ``group``, or of ``bare``; ``None`` where that is."""
        if not bare and self.peers is not None and not self.peers.alive:
            return None
        # A destroyed group stays an object while a caller holds it; torch's own map forgets it.
        pg = self.pg()
        return None if pg is None or pg not in getattr(c10d, WORLD).pg_map else pg

    def _group(self, pg: ProcessGroup | None) -> Group | None:
        return None if pg is None else Group(pg, *(getattr(self, name) for name in _FACTS))


_FACTS = ("ranks", "origin", "name", "peers", "no_peers", "thread", "lent")


@dataclass(frozen=True, slots=True)
class GroupHandle:
    """A found group, available without a look-up until the registry forgets it. After ``shutdown``
    all ranks vote again, so that none may go on with a group found before.
    """

    known: GroupEntry  # without a hold on the process group
    default: weakref.ref[ProcessGroup]  # the default group that it belongs to
    book: GroupTable  # the table of the registry that has found it
    life: object  # of the table, at that time

    def group(self) -> Group | None:
        """The group; ``None`` if it or its default group is gone."""
        return None if self.process_group() is None else self.known.group()

    def process_group(self) -> ProcessGroup | None:
        """The process group of ``group``, or ``None`` where that is."""
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
        self._groups: dict[GroupKey, GroupEntry] = {}
        # The same groups by what a caller has at hand, which is hashed faster than many ranks are.
        self._shortcuts: dict[Hashable, GroupEntry] = {}
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
        return None if known is None else known.group()

    def add_shortcut(self, shortcut: Hashable, group: Group) -> None:
        """Let ``short`` find ``group``."""
        with self._lock:
            # A lost shortcut costs this rank one look-up. Other ranks need not lose theirs.
            if len(self._shortcuts) >= MAX_SHORTCUTS:
                self._shortcuts.clear()
            self._shortcuts[shortcut] = GroupEntry.of(group)

    def add(self, key: GroupKey, group: Group) -> None:
        """Let ``alive`` and ``kept`` find ``group``; let go of groups that were destroyed."""
        with self._lock:
            groups = [*self._groups.items()]
        self._drop([gone for gone, known in groups if known.bare() is None])
        with self._lock:
            self._groups[key] = GroupEntry.of(group)

    def release(self, pg: ProcessGroup) -> None:
        """Forget ``pg``, and close the memory of its ranks once the call under way has ended."""
        with self._lock:
            gone = [key for key, known in self._groups.items() if known.pg() is pg]
            found = self._shortcuts
            self._shortcuts = {key: one for key, one in found.items() if one.pg() is not pg}
        self._drop(gone)

    def _drop(self, keys: list[GroupKey]) -> None:
        for key in keys:
            known = self._groups.pop(key, None)
            # A fork cannot wait for a call that is under way in its parent.
            if known is not None and known.peers is not None and not is_forked():
                known.peers.close()

    def alive(self, key: GroupKey) -> Group | None:
        """The group of ``key``, if it lives."""
        with self._lock:
            known = self._groups.get(key)
            if known is None and key.peers == "never":
                # A group with shared memory also serves calls that never use it.
                others = (self._groups.get(key._replace(peers=s)) for s in ("always", "timed"))
                known = next(filter(None, others), None)
        group = None if known is None else known.group()
        # After a destroyed group or a failed reduction no rank may use the memory again: its flags
        # are of calls that will not finish.
        if group is None and known is not None and known.peers is not None:
            known.peers.close()
        return group

    def kept(self, key: GroupKey) -> Group | None:
        """The same group, made with or without shared memory: one process group serves both."""
        # A copy: `bare` asks torch, and the lock is not held while other code runs.
        with self._lock:
            groups = list(self._groups.items())
        for found, known in groups:
            matches = not known.lent and found._replace(peers=key.peers) == key
            group = known.bare() if matches else None
            if group is not None:
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
            entries = [known for known in self._groups.values() if known.pg() is pg]
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

    def _created(self) -> dict[str, GroupEntry]:
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
