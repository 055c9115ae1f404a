"""How a group is made: looked for among torch's, voted on, created, voted on again."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from meshplan._calls import GroupCalls, restarted_before
from meshplan._spans import span
from meshplan._torch import (
    WORLD,
    default_group,
    flattened_meshes_of,
    root_mesh_of,
)
from meshplan.errors import (
    UNLIKE_CALLS,
    GroupAgreementError,
    GroupCreationError,
    GroupStateError,
    SignatureMismatchError,
)
from meshplan.flatten._agree import (
    AnsweringStore,
    Members,
    VoteResult,
    first_use,
    gave_up_on,
    open_round,
    seconds_left,
    started_before,
    vote,
    wait_for_ranks,
)
from meshplan.flatten._connect import SeveralHosts, connect, connect_devices
from meshplan.flatten._create import (
    create_members_only,
    default_timeout,
    descriptor_objection,
    peer_timeout,
    rank_in,
    store_of,
    this_rank,
    warm_up,
)
from meshplan.flatten._group_table import Group, GroupKey, Origin
from meshplan.flatten._missing import (
    format_failure,
    keep_processes,
    note_process,
    roll_call_seconds,
)
from meshplan.record import Record, differences, ranks_text

if TYPE_CHECKING:
    from meshplan.layout import Layout
    from meshplan.topology import Links


# Along each group of an axis, by what all members have in common: how many names were agreed on.
# What else a member has reduced, the others need not have.
_NAMES_AGREED: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()


def agree_on_name(
    mesh: DeviceMesh,
    layout: Layout,
    axes: Sequence[int],
    calls: GroupCalls,
    members: Members,  # of the groups over ``axes`` of ``mesh``
) -> Members:
    """Agree on the name of ``calls``, the same on all ranks that differ there. Returns the members,
    with the key under which they noted their arrival. If the rank that passes on the names is
    missing, raises GroupAgreementError on the others, and on that rank if it arrives later.
    """
    if calls.name:
        return members
    # A rank knows the names of its own groups only, and those of an axis have different names. So
    # all take those of the rank at coordinate 0 of these axes: along each axis, from the last to
    # the first, the rank at coordinate 0 passes them on.
    groups = {axis: mesh.get_group(axis) for axis in axes}
    names = ", ".join(group.group_name for group in groups.values())
    store, rank = members.store, members.rank
    deadline = time.monotonic() + seconds_left(members.wait)
    # With the layout: an earlier default group on the same store may have used a group's name.
    place = f"meshplan/names/{layout} {list(axes)}"
    agreed = [_NAMES_AGREED.setdefault(group, Counter()) for group in groups.values()]
    # A rank waits for one that may wait itself: the error names those that have not come at all.
    arrivals = f"{place} {[*members.ranks]} {agreed[-1][place]}"
    fake = backend_name(groups[axes[0]]) == "fake"
    if not fake:
        store.set(f"{arrivals}/{rank}", names)
        members = replace(members, arrivals=arrivals)
    for axis, group in reversed([] if fake else [*groups.items()]):
        first, *_ = layout.group_of(rank, (axis,)) or (rank,)
        key = f"{place}/{group.group_name}/{_NAMES_AGREED[group][place]}"
        if first == rank:
            store.set(key, names)
            gave_up = f"{key}/gave up in call {members.call}"
            if (
                members.call
                and store.check([gave_up])
                and started_before(float(store.get(gave_up)))
            ):
                raise refusal(VoteResult(missing=(rank,)), members)
            continue
        while not store.check([key]):
            if time.monotonic() > deadline:
                began = time.time() - members.wait / 2
                store.set(f"{key}/gave up in call {members.call}", str(began))
                absent = tuple(r for r in members.ranks if not store.check([f"{arrivals}/{r}"]))
                raise refusal(VoteResult(missing=absent or (first,)), members)
            time.sleep(_POLL_SECONDS)
        names = store.get(key).decode()
    for counts in agreed:
        counts[place] += 1
    calls.agree_on(names)
    return members


def agree_on_place(key: GroupKey, members: Members, in_place: bool) -> str:
    """Agree with the other members on whose groups the calling threads use; each rank has one
    thread. Returns why they use groups of their own; empty if all use those of the main thread.
    ``in_place``: this rank's thread is in the main thread's place. Raises as ``GroupRegistry.get``.
    """
    token = Record.of(main_thread="waits" if in_place else "goes on")
    tokens = dict.fromkeys(key.ranks, token)
    if key.backend != "fake":
        prefix, past = open_round(members, f"{key.group_name()}/place")
        verdict = past or vote(members, prefix, token)
        if verdict.missing or verdict.veto is not None:
            raise refusal(verdict, members)
        tokens = verdict.tokens or tokens
    going = sorted(r for r, token in tokens.items() if token.get("main_thread") == "goes on")
    if not going:
        return ""
    shown = "every rank" if len(going) == len(key.ranks) else ranks_text(going)
    return f"the main thread of {shown} did not wait for its thread in join() without a timeout"


_LOG = logging.getLogger("meshplan")
_POLL_SECONDS = 0.001

# Bytes. The large ones of a host exceed the burst that limited links let pass.
_SMALL, _LARGE = 1 << 6, 1 << 19
_SIZES, _TIMED_TURNS = ("small", "large"), 3


class Hosts(NamedTuple):
    """Each ``near`` consecutive ranks are on one host."""

    near: int
    links: Links | None = None  # those of CPUs
    timed: bool = False  # by this job; else the same in every run


HOSTS: WeakKeyDictionary[ProcessGroup, Hosts] = WeakKeyDictionary()
"""Of groups on several hosts that were to share memory."""


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """A vote of which this rank does not know the verdict, as the store did not answer it. The
    others may have continued. So the next call of this rank, which has the same ticket, reads that
    verdict instead of waiting for the others in another vote.
    """

    prefix: str
    made: ProcessGroup | None  # the group that this rank has created, if that was the question
    moment: float  # in seconds since the epoch


# By the group whose members vote (for a group to be created: the default group), and name.
_UNANSWERED: WeakKeyDictionary[ProcessGroup, dict[str, _Unanswered]] = WeakKeyDictionary()


def _unanswered(pg: ProcessGroup | None) -> dict[str, _Unanswered]:
    return _UNANSWERED.setdefault(pg or default_group(), {})


def members_of(
    pg: ProcessGroup | None,
    ranks: tuple[int, ...],
    wait: float,
    call: int = 0,
) -> Members:
    """``ranks``, who agree through the store of ``pg`` (``None``: of a group to be created)."""
    rank = this_rank() if pg is None else rank_in(pg)
    return Members(AnsweringStore(store_of(pg), wait), ranks, rank, wait, call)


def drop_unanswered(pg: ProcessGroup) -> None:
    """Destroy what this rank has created for the members of ``pg``, and none has decided on."""
    for left in _UNANSWERED.pop(pg, {}).values():
        if left.made is not None and left.made in getattr(c10d, WORLD).pg_map:
            dist.destroy_process_group(left.made)


def join_group(
    found: Group | None,  # the group, if this rank has one already
    key: GroupKey,
    members: Members,
    *,
    token: Record,  # must match on all members
    objection: str | None,  # why this rank cannot join, for all to read
) -> tuple[Group, str]:
    """Agree with the other members on the group of ``key``, and create it if none was found.
    Returns it and the prefix of the round in the store, which no other agreement has. Raises as
    ``GroupRegistry.get``.
    """
    pg, ranks = found.pg if found else None, key.ranks
    name = key.group_name(pg)
    how = partial(create_members_only, ranks, key.backend, key.device_type, name=name)
    if key.backend == "fake":
        # One process simulates one rank: there are no others to vote.
        return found or Group.of(how(prefix="meshplan/fake"), ranks, "created"), ""
    # Also for a group that this rank has: a member without it would create one, alone.
    token = token.adding(group=found.origin if found else "new")
    prefix = agree_on(pg, name, members, token, objection)
    if found is not None:
        return found, prefix
    with span("group"):
        create = partial(how, prefix=prefix)
        pg = _connect(create, None, name, members, prefix, key.device_type)
        return Group.of(pg, ranks, "created"), prefix


def create_beside(
    pg: ProcessGroup,
    create: Callable[[str], ProcessGroup],
    *,
    token: Record,
    timeout: float,
    call: int,
) -> ProcessGroup:
    """Agree with the other members of ``pg`` on a second group of them, for CPUs, and let all of
    them ``create`` it, from the prefix of the round. Raises as ``GroupRegistry.get``.
    """
    ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(pg))
    backend = backend_name(pg)
    if backend == "fake":
        return create("meshplan/fake")
    # The round of the first reduction over the group: members that differ are found there.
    name = GroupKey(ranks, backend, "cpu", "never", f"given {pg.group_name}").group_name(pg)
    objection = descriptor_objection(backend, len(ranks))
    members = members_of(pg, ranks, timeout, call)
    with first_use(timeout):
        prefix = agree_on(pg, name, members, token.adding(group="new"), objection)
        return _connect(partial(create, prefix), pg, name, members, prefix)


def _find_absent(missing: tuple[int, ...], members: Members) -> tuple[int, ...]:
    """Of ranks missing in a vote, those that also missed the names before it; else all of them."""
    if not members.arrivals or not missing:
        return missing
    # Others wait there for an absent rank.
    came = members.store.check
    return tuple(r for r in missing if not came([f"{members.arrivals}/{r}"])) or missing


def agree_on(
    pg: ProcessGroup | None,
    name: str,
    members: Members,
    token: Record,
    objection: str | None = None,
) -> str:
    """Hold a vote on ``name``; returns its key prefix if all said yes. Raises as
    ``GroupRegistry.get``.
    """
    unanswered = _unanswered(pg)
    left = unanswered.get(name)
    if left is not None and left.made is not None:
        # All have agreed, and the group waits for the verdict on it.
        return left.prefix
    if left is not None and not restarted_before(left.moment):
        # After ``shutdown`` all agree again.
        left = None
    store, ranks, rank = members.store, members.ranks, members.rank
    note_process(store, rank)
    deadline = time.monotonic() + members.wait
    # Members may come in different calls: one has given up on the others, or failed alone, and gone
    # on. Those that are behind raise, so that their next call is that of the others, who wait.
    while True:
        prefix, verdict = (left.prefix, None) if left else open_round(members, name)
        # The store answers again.
        unanswered.pop(name, None)
        if verdict is not None and verdict.missing:
            raise refusal(verdict, members)
        try:
            now = replace(members, wait=max(deadline - time.monotonic(), 0.0))
            again = left is not None
            verdict = verdict or vote(now, prefix, token, veto=objection, again=again)
        except GroupStateError as error:
            if error.unanswered:
                unanswered[name] = _Unanswered(prefix, None, time.time())
            raise
        left = None
        if verdict.unanimous:
            # The verdict stays, for ranks that come later; what led to it is not read again. All go
            # on: no member may fail here alone.
            with suppress(RuntimeError):
                keep_processes(members, pg)
                for key in (
                    f"{prefix}/token/{rank}",
                    f"{prefix}/entered/{rank}",
                ):
                    store.delete_key(key)
            return prefix
        verdict = replace(verdict, missing=_find_absent(verdict.missing, members))
        brought = {r: token.get("call") for r, token in verdict.tokens.items()}
        calls = {r: int(number) for r, number in brought.items() if number}
        latest = max(calls.values(), default=0)
        behind = [r for r, number in calls.items() if number < latest]
        places = f"places/{len(ranks)}"
        if not all(
            gave_up_on(store, name, r, calls[r]) or gave_up_on(store, places, r) for r in behind
        ):
            raise _unlike(calls, members)
        if rank in behind:
            raise _passed(calls, members)
        if len(set(calls.values())) < 2:
            raise refusal(verdict, members)


def _passed(calls: Mapping[int, int], members: Members) -> GroupAgreementError:
    """The error of a rank on which its peers gave up in an earlier step of their call."""
    ranks, rank = members.ranks, members.rank
    call = calls[rank]
    ahead = tuple(r for r, number in calls.items() if number > call)
    return GroupAgreementError(
        f"rank {rank} (this one) was late for call {call} of the group of {ranks_text(ranks)}: "
        f"{ranks_text(ahead)} gave up waiting for it and went on to call "
        f"{max(calls.values())}. No rank started call {call}; every rank of the group "
        "must make the same calls",
        missing=(rank,),
        differing=ahead,
    )


def _unlike(calls: Mapping[int, int], members: Members) -> SignatureMismatchError:
    """The error of ranks of which one skipped or repeated a call, or failed alone in one."""
    ranks, rank = members.ranks, members.rank
    numbers = sorted(set(calls.values()))
    shown = "; ".join(
        f"{ranks_text([r for r, number in calls.items() if number == one])} in call {one}"
        for one in numbers
    )
    other = next(r for r, number in calls.items() if number != calls.get(rank))
    return SignatureMismatchError(
        f"the ranks in the first reduction over {ranks_text(ranks)} are in different "
        f"calls: {shown}. {UNLIKE_CALLS}",
        rank=other,
        unlike_calls=True,
    )


def share_memory(
    group: Group,
    key: GroupKey,
    members: Members,
    *,
    objection: str | None,  # why this rank shares no more memory, for all to read
    # Key prefix of the round that agreed on the group: rounds about memory match members of the
    # same call only.
    agreed: str = "",
) -> Group:
    """The group with memory that its ranks share, or with the reason why there is none. All members
    hold it and call this. Raises GroupAgreementError if a member is missing.
    """
    # On GPUs perhaps only if it was timed to be faster on them.
    timed = key.peers == "timed"
    kind = "timed peers" if timed else "peers"
    name = key._replace(backend=kind).group_name(group.pg)
    on_gpus = partial(connect_devices, group.pg.group_name, timed=timed)
    meet = connect if key.device_type == "cpu" else on_gpus
    found = meet(
        replace(members, call=agreed),
        name,
        objection=objection,
        # In use it waits almost as long as the collectives do that it stands for.
        timeout=peer_timeout(key.device_type, group.pg),
    )
    if isinstance(found, VoteResult):
        raise refusal(found, members)
    if isinstance(found, str):
        _LOG.info("[meshplan] %s: path exchange, no peers: %s", group, found)
        if isinstance(found, SeveralHosts) and key.device_type == "cpu":
            HOSTS[group.pg] = _find_hosts(group, found, members)
        return replace(group, no_peers=found)
    limit = found.one_shot_bytes
    _LOG.info(
        "[meshplan] %s: %s, one_shot up to %d bytes, two_shot above",
        group,
        found,
        limit,
    )
    return replace(group, peers=found)


def _find_hosts(group: Group, found: SeveralHosts, members: Members) -> Hosts:
    """Take the first rank's links, or time messages between hosts and agree on the longest."""
    from meshplan.topology import Link, Links  # needs numpy
    from meshplan.topology._links import CPU_LINKS

    near = found.near
    if found.links not in ("", "0"):
        return Hosts(near, Links.loads(found.links))
    if not found.round:
        return Hosts(near)
    times = _time_messages(group.pg, near, members.wait, found.round)
    mine = Record.of(**dict(zip(_SIZES, times, strict=False)))
    verdict = vote(replace(members, call=0), f"{found.round}/links", mine)
    if verdict.missing:
        raise refusal(verdict, members)
    # A vote without tokens is one on equal ones.
    tokens = [*verdict.tokens.values()] or [mine]
    if not all(token.get("large") for token in tokens):
        # A rank came late, or could not: the next reduction shows why.
        return Hosts(near)
    small, large = (max(float(t.get(size) or 0) for t in tokens) for size in _SIZES)
    # A small message takes the time of a start, which messages inside a host take too. On a busy
    # machine that may hide the rest: half of a large one is none.
    network = Link(0.0, (_LARGE // near - _SMALL) / max(large - small, large / 2))
    node = Link(0.0, CPU_LINKS.node.bandwidth)
    timed = replace(CPU_LINKS, node=node, network=network, launch=small)
    return Hosts(near, timed, timed=True)


def _time_messages(pg: ProcessGroup, near: int, wait: float, name: str) -> Sequence[float]:
    """The seconds of a small and a large message to the next host; less if a rank is late."""
    to, come = ((pg.rank() + way) % pg.size() for way in (near, -near))
    times = list[float]()
    # A thread of an earlier round may still wait for a rank that failed in it.
    tag = zlib.crc32(name.encode()) & 0x3FFFFFFF
    limit = timedelta(seconds=default_timeout("cpu", pg))

    def swap() -> None:
        with suppress(RuntimeError):
            for nbytes in (_SMALL, _LARGE // near):
                rows = torch.zeros(2, nbytes, dtype=torch.uint8, device="cpu")
                turns = []
                for _ in range(_TIMED_TURNS):
                    started = time.perf_counter()
                    sent = pg.send([rows[0]], to, tag)
                    pg.recv([rows[1]], come, tag).wait(limit)
                    sent.wait(limit)
                    turns.append(time.perf_counter() - started)
                # The others hold times in which a rank had no core.
                times.append(min(turns))

    # A wait that ends early breaks gloo's connections, which a late rank needs.
    thread = threading.Thread(target=swap, daemon=True)
    thread.start()
    # Ranks that wait for a dead one reach the vote before the others give up on them.
    thread.join(seconds_left(wait) / 2)
    return tuple(times)


def backend_name(pg: ProcessGroup) -> str:
    """The user's choice for ``pg``."""
    return str(getattr(c10d, WORLD).pg_map[pg][0])


def existing_group(
    mesh: DeviceMesh,
    axes: Sequence[int],
    ranks: tuple[int, ...],
    backend: str,
) -> Group | None:
    """A group of torch's with these ranks in this order: default, axis, or a flattened mesh. Of
    several ``axes``, the group of one may serve too: ``ranks`` may be a block of theirs.
    """
    candidates: list[tuple[Origin, ProcessGroup]] = []
    default = default_group()
    if len(axes) > 1 or mesh.get_group(axes[0]) is default:
        candidates.append(("default", default))
    candidates += [("axis", mesh.get_group(axis)) for axis in axes]
    candidates += [
        ("flattened", flat.get_group())
        for flat in flattened_meshes_of(root_mesh_of(mesh)).values()
        if flat.ndim == 1 and flat.get_coordinate() is not None
    ]
    for origin, pg in candidates:
        # The group's own rank order, not the mesh's: torch sorts the ranks of most groups.
        ordered = tuple(dist.get_process_group_ranks(pg))
        if ordered == ranks and backend_name(pg) == backend:
            return Group.of(pg, ranks, origin)
    return None


def _connect(
    create: Callable[[], ProcessGroup],
    pg: ProcessGroup | None,  # whose members create a second one; ``None``: a group of other ranks
    name: str,
    members: Members,
    prefix: str,
    device_type: str = "",  # of a group that is not known to work; it is warmed up
) -> ProcessGroup:
    started, timeout, ranks = (
        time.perf_counter(),
        members.wait,
        members.ranks,
    )
    failure: Exception | None = None
    left = _unanswered(pg).pop(name, None)
    group = left.made if left else None
    # A backend may fail on some members only. The second vote reports that, so that all keep
    # the group or all drop it.
    try:
        if group is None:
            group = create()
            if device_type:
                warm_up(group, device_type, timeout)
    except (RuntimeError, ValueError) as error:
        failure = error
    # The creation of a group that is warmed up has the default group's time.
    limit = max(timeout, default_timeout(device_type)) if device_type else timeout
    # Others whose creation fails a moment later are not missing.
    wait = min(
        roll_call_seconds(limit, started),
        seconds_left(timeout) + timeout / 16,
    )
    kept = False
    try:
        verdict = vote(
            replace(members, call=0),
            f"{prefix}/ready",
            Record.of(group="ready"),
            veto=None if failure is None else _reason(failure, members, pg, prefix, wait),
            again=left is not None,
        )
        kept = verdict.unanimous
    except GroupStateError as error:
        kept = error.unanswered and failure is None
        if kept:
            _unanswered(pg)[name] = _Unanswered(prefix, group, time.time())
        raise
    finally:
        # After other errors of the vote too: others may have dropped theirs.
        if group is not None and not kept:
            dist.destroy_process_group(group)
    if kept and group is not None:
        return group
    who, reason = verdict.veto or (None, "")
    if verdict.missing:
        reason = f"{ranks_text(verdict.missing)} did not finish within {timeout:g} s"
    elif who is not None:
        reason = f"rank {who} failed: {reason}"
    raise GroupCreationError(
        f"the group of {ranks_text(ranks)} was agreed on but could not be created, {reason}; "
        "the members have dropped it and the next call tries again"
    ) from failure


def _reason(
    failure: Exception,
    members: Members,
    pg: ProcessGroup | None,
    prefix: str,
    wait: float,
) -> str:
    """Why this rank refuses, and which ranks its failure may come from."""
    store, rank = AnsweringStore(store_of(pg), wait), members.rank
    # Present, so that others that have failed do not name this rank.
    store.set(f"{prefix}/ready/token/{rank}", Record.of(group="failed").pack())
    others = [r for r in members.ranks if r != rank]
    missing = wait_for_ranks(store, f"{prefix}/ready", others, wait)
    absent = f" ({ranks_text(missing)} still missing {wait:.1f} s later)" if missing else ""
    return f"{type(failure).__name__}: {format_failure(failure)}{absent}"


def refusal(
    verdict: VoteResult, members: Members, what: str = "the first reduction"
) -> GroupAgreementError | GroupStateError:
    """The error for the caller of a vote that said no."""
    ranks, rank = members.ranks, members.rank
    if verdict.veto is not None:
        who, reason = verdict.veto
        return GroupStateError(f"rank {who} cannot join the group of {ranks_text(ranks)}: {reason}")
    if verdict.missing:
        others = tuple(r for r in verdict.missing if r != rank)
        if len(others) < len(verdict.missing):
            late = "this rank" + (f" and {ranks_text(others)}" if others else "")
        else:
            late = ranks_text(others)
        return GroupAgreementError(
            f"{late} did not reach {what} over {ranks_text(ranks)} within {members.wait:g} s, so "
            "no rank started it; every rank of the group must make the same calls: look for a rank "
            "that died or took another branch",
            missing=verdict.missing,
        )
    common = max(verdict.tokens.values(), key=list(verdict.tokens.values()).count)
    differing = tuple(sorted(r for r, t in verdict.tokens.items() if t != common))
    return GroupAgreementError(
        f"{ranks_text(differing)} called {what} over {ranks_text(ranks)} with other settings "
        f"than the others. Different: {differences(verdict.tokens)}. No rank started it; "
        "pass the same arguments (to meshplan.install, or to the call) on every rank; after "
        "meshplan.install call meshplan.shutdown there",
        differing=differing,
    )
