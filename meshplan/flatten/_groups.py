"""The process groups that steps run on: reuse what exists, else create, and keep.

One registry per process. It creates at most ``MAX_GROUPS`` groups and destroys none, for that is
collective too; ``shutdown`` does. Threads that reduce concurrently with the main one have groups of
their own: see ``_threads``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshplan._calls import GroupCalls, calls_of, restart_calls
from meshplan._torch import default_group
from meshplan.errors import GroupStateError
from meshplan.flatten._agree import Members, Signatures, first_use
from meshplan.flatten._create import (
    Sharing,
    capture_objection,
    default_timeout,
    descriptor_objection,
    is_across_jobs,
    possible_sharing,
    rest_at_end,
    this_rank,
)
from meshplan.flatten._group_table import (
    Block,
    Group,
    GroupHandle,
    GroupKey,
    GroupTable,
    KeyedLock,
)
from meshplan.flatten._join import (
    agree_on,
    agree_on_name,
    agree_on_place,
    backend_name,
    drop_unanswered,
    existing_group,
    join_group,
    members_of,
    refusal,
    share_memory,
)
from meshplan.flatten._threads import (
    check_turn,
    has_main_place,
    is_worker_thread,
    refuse_forked,
)
from meshplan.kernel import Communicator
from meshplan.record import Record

if TYPE_CHECKING:
    from meshplan.layout import Layout

MAX_GROUPS = 64
"""Groups that a registry creates at most, and that share memory at most."""


class GroupRegistry:
    """Finds, creates and remembers groups. Thread-safe: threads wait for each other where they need
    the same group, and only there. Else one of them could wait for ranks whose threads wait in the
    opposite order.
    """

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        # At most so many groups are created, and so many share memory. A member at the limit
        # refuses for all.
        self.max_groups = max_groups
        self._table = GroupTable()
        self._locks = KeyedLock()

    def get(
        self,
        mesh: DeviceMesh,
        layout: Layout,  # of ``mesh``
        axes: Sequence[int],  # positions, ascending
        *,
        token: Record,  # must match on all members at the first call (contract, path)
        timeout: float | None = None,  # seconds to wait for members; ``None``: the default group's
        block: Block | None = None,  # only this part of the group
        peers: Sharing = "never",  # with memory that its ranks share, where that is possible
        call: int = 0,  # the number of the call that needs the group; 0: not counted
    ) -> Group:
        """The group of this rank over ``axes`` of ``mesh``, ordered by mesh coordinate. The first
        call for a group is a vote of its members; later ones look it up. Raises GroupAgreementError
        if members are missing or differ: no member has the group then. GroupCreationError: the
        backend failed on one. GroupStateError: one cannot take part, or its store is silent.
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
        backend = backend_name(mesh.get_group(axes[0]))
        peers = possible_sharing(peers, mesh.device_type, backend)
        beside, ranks = (
            is_worker_thread(),
            layout.group_of(this_rank(), axes) or (),
        )
        calls = calls_of(*map(mesh.get_group, axes), order=ranks, beside=beside)
        shortcut = (
            calls,
            layout,
            tuple(axes),
            block,
            backend,
            mesh.device_type,
            peers,
            beside,
        )
        group = self._table.short(shortcut)
        if group is not None:
            check_turn(group, lent=group.lent)
            return group
        refuse_forked()
        with _first_use(mesh, layout, axes, calls, timeout, call) as members:
            token, name = token.adding(calls=calls.name), calls.name
            if block is not None:
                members = replace(members, ranks=block.of(ranks, members.rank))
            # Over one axis a mesh has a group of its own. Over several, equal meshes may share one
            # that torch or meshplan has: the calls of each are told apart by their tickets.
            own = f"axis {name}" if len(axes) == 1 and block is None else ""
            key = GroupKey(members.ranks, backend, mesh.device_type, peers, own)
            main = key
            if beside:
                key = key._replace(use=f"threads of {name}")
            with self._alone(key):
                group = self._table.alive(key)
                if group is None:
                    if beside:
                        group = self._for_thread(mesh, axes, key, main, members, token)
                    else:
                        check_turn(f"the group of ranks {key.ranks}", lent=False)
                        found = existing_group(mesh, axes, key.ranks, backend)
                        group = self._join(found, key, members, token)
                check_turn(group, lent=group.lent)
                self._table.add_shortcut(shortcut, group)
                return group

    def of(
        self,
        pg: ProcessGroup,
        device_type: str,
        *,
        token: Record,
        peers: Sharing = "never",
        # Another process group of the same ranks, for work concurrent with that of ``pg``.
        apart: bool = False,
        call: int = 0,
    ) -> Group:
        """A group that the user made, ordered by its own ranks; this rank is a member. The first
        call is a vote, as in ``get``, for as long as ``pg`` allows its collectives. Raises as
        ``get``.
        """
        shortcut = (pg.group_name, device_type, peers, apart)
        group = self._table.short(shortcut)
        if group is not None and (apart or group.pg is pg):
            return group
        refuse_forked()
        if apart and is_across_jobs(pg):
            raise GroupStateError(
                f"the group {pg.group_name} has ranks of several jobs, which cannot create the "
                "second group that async_op=True needs; leave it out"
            )
        ranks = tuple(dist.get_global_rank(pg, i) for i in range(pg.size()))
        backend = backend_name(pg)
        usable = possible_sharing(peers, device_type, backend)
        use = f"{'apart from' if apart else 'given'} {pg.group_name}"
        key = GroupKey(ranks, backend, device_type, usable, use)
        with self._alone(key):
            group = self._table.alive(key)
            if group is None:
                found = None if apart else Group.of(pg, ranks, "given")
                wait = default_timeout(device_type, pg)
                with first_use(wait):
                    group = self._join(found, key, members_of(pg, ranks, wait, call), token)
            self._table.add_shortcut(shortcut, group)
            return group

    def release(self, pg: ProcessGroup) -> None:
        """Forget ``pg``, which is about to be destroyed, and release the memory of its ranks."""
        self._table.release(pg)
        drop_unanswered(pg)

    def meet(
        self,
        mesh: DeviceMesh,
        layout: Layout,
        axes: Sequence[int],
        *,
        token: Record,
        timeout: float | None = None,
        call: int = 0,
    ) -> None:
        """Agree, once, with all ranks of the group over ``axes`` that blocks of it will reduce.
        Without it, an error would name the waiting ranks of a block in place of the missing
        one. Raises GroupAgreementError and GroupStateError as ``get``.
        """
        refuse_forked()
        beside, ranks = (
            is_worker_thread(),
            layout.group_of(this_rank(), axes) or (),
        )
        calls = calls_of(*map(mesh.get_group, axes), order=ranks, beside=beside)
        key = (calls, layout, tuple(axes), beside)
        with self._alone(key):
            if key in self._table.meetings:
                return
            backend = backend_name(mesh.get_group(axes[0]))
            with _first_use(mesh, layout, axes, calls, timeout, call) as members:
                if backend != "fake":
                    # The whole group's name: a rank that would reduce over that is found as well.
                    use = f"threads of {calls.name}" if beside else ""
                    whole = GroupKey(ranks, backend, mesh.device_type, "never", use)
                    agree_on(
                        None,
                        whole.group_name(),
                        members,
                        token.adding(calls=calls.name, group="in blocks"),
                        self._table.why_no_meeting(),
                    )
            self._table.meetings.add(key)

    def compare(self, group: Group, device_type: str, signature: Record) -> None:
        """Compare ``signature`` with the other members of ``group``, as audits and the debug mode
        do. Raises SignatureMismatchError on every member if they differ, and GroupAgreementError.
        """
        wait = default_timeout(device_type)
        name = "-".join(map(str, group.ranks))
        if is_worker_thread() or is_across_jobs(group.pg):
            name += f" {group.name}"

        members = members_of(group.pg, group.ranks, wait)
        votes = self._table.signatures(name, lambda: Signatures.of(members, name))
        verdict = votes.compare(signature, wait)
        if not verdict.unanimous:
            raise refusal(verdict, members, "a reduction")

    def memory_of(self, pg: ProcessGroup) -> list[Communicator[Any]]:
        """The memory that the ranks of ``pg`` have mapped; empty if they share none."""
        return self._table.memory_of(pg)

    def handle(self, group: Group) -> GroupHandle:
        """A handle for a group that ``get`` or ``of`` has just returned."""
        world = dist.group.WORLD
        assert world is not None
        return GroupHandle(group, weakref.ref(world), self._table, self._table.life)

    def shutdown(self) -> int:
        """Destroy the created groups, in name order, and forget all. Returns how many. Every rank
        calls this before ``destroy_process_group()``; after that nothing is left to do, for it
        destroys all groups. A forked process forgets its parent's groups, and destroys none of
        them.
        """
        created = self._table.take_created()
        restart_calls()
        if dist.is_initialized():
            drop_unanswered(default_group())
        with ExitStack() as stack:
            # All of them, whatever one of them raises.
            for group in reversed(created):
                stack.callback(dist.destroy_process_group, group.pg)
        return len(created)

    def unlock_fork(self) -> None:
        """In a forked child: threads of the parent may have held locks, and are not here."""
        self._table.unlock_fork()
        self._locks = KeyedLock()

    @contextmanager
    def _alone(self, key: object) -> Iterator[None]:
        """Only one thread at a time makes the group of ``key``, in whatever form."""
        if isinstance(key, GroupKey):
            # With or without shared memory it is one process group.
            key = key._replace(peers="never")
        self._table.follow_default_group()
        with self._locks.take(key):
            yield

    def _for_thread(
        self,
        mesh: DeviceMesh,
        axes: Sequence[int],
        key: GroupKey,
        main: GroupKey,
        members: Members,
        token: Record,
    ) -> Group:
        """The main thread's group where that waits for the thread on all members, or another."""
        why = agree_on_place(key, members, has_main_place())
        if why:
            # What torch made may be used by other threads for other meshes.
            group = self._join(None, key, members, token)
            group = replace(group, thread=f"the thread's own: {why}")
        else:
            found = existing_group(mesh, axes, key.ranks, key.backend)
            group = self._table.alive(main) or self._join(found, main, members, token)
            group = replace(
                group,
                thread="the main thread's, which waits for this thread",
                lent=True,
            )
        self._table.add(key, group)
        return group

    def _join(
        self,
        found: Group | None,
        key: GroupKey,
        members: Members,
        token: Record,
    ) -> Group:
        found = found or self._table.kept(key)
        objection = None if found else self._objection(key)
        group, agreed = join_group(found, key, members, token=token, objection=objection)
        if key.peers != "never":
            try:
                objection = self._peers_objection(key.device_type)
                group = share_memory(group, key, members, objection=objection, agreed=agreed)
            except BaseException:
                # All ranks have the group without memory, and none may create it again.
                if group.origin == "created":
                    self._table.add(key._replace(peers="never"), group)
                raise
        self._table.add(key, group)
        if key.device_type == "cpu" and key.backend != "fake":
            rest_at_end()
        return group

    def _objection(self, key: GroupKey) -> str | None:
        count = self._table.created()
        if count >= self.max_groups:
            return (
                f"{count} groups exist and the limit is {self.max_groups}; "
                "call meshplan.shutdown() between phases that use different meshes"
            )
        lacking = descriptor_objection(key.backend, len(key.ranks))
        return capture_objection(key.device_type) or lacking

    def _peers_objection(self, device_type: str) -> str | None:
        sharing = self._table.sharing()
        if sharing >= self.max_groups:
            return f"{sharing} groups share memory"
        return capture_objection(device_type)


_REGISTRY = GroupRegistry()

os.register_at_fork(after_in_child=_REGISTRY.unlock_fork)


def registry() -> GroupRegistry:
    """The registry of this process."""
    return _REGISTRY


@contextmanager
def _first_use(
    mesh: DeviceMesh,
    layout: Layout,
    axes: Sequence[int],
    calls: GroupCalls,
    timeout: float | None,
    call: int,
) -> Iterator[Members]:
    """The members of the groups over ``axes``, who have agreed on the name of ``calls``."""
    wait = default_timeout(mesh.device_type) if timeout is None else timeout
    with first_use(wait):
        ranks = layout.group_of(this_rank(), axes) or ()
        yield agree_on_name(mesh, layout, axes, calls, members_of(None, ranks, wait, call))
