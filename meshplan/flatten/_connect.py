"""Memory that the members of a group share: voted on, mapped by all, voted on again.

Where one of them is on another host, has no compiled library or device, or cannot map it, all
members read that reason.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from meshplan import kernel
from meshplan.errors import PolicyError
from meshplan.flatten._agree import (
    Members,
    VoteResult,
    gather_texts,
    open_round,
    seconds_left,
    vote,
)
from meshplan.kernel import (
    MAX_BLOCKS,
    MAX_PEERS,
    CompileError,
    Device,
    DeviceCommunicator,
    DriverError,
    HostCommunicator,
    Ipc,
    MemoryHandle,
    Regions,
    SharedMemory,
    Symmetric,
    TimedPaths,
    Transport,
    TransportError,
    device_of,
    device_region_bytes,
    host,
    region_bytes,
    timed_paths,
)
from meshplan.kernel._mapping_check import DeviceProbe, HostProbe, lost_word
from meshplan.record import Record

LINKS_VARIABLE = "MESHPLAN_LINKS"
_POLL_SECONDS = 0.001
_FAREWELL_SECONDS = 5.0


class SeveralHosts(str):
    """Why ranks share no memory: each ``near`` consecutive ones are on one of several hosts."""

    near = 1
    links = ""  # of the first rank, as JSON, if known
    round = ""  # in which all let links be timed; empty if one does not


@dataclass(frozen=True, slots=True)
class _Sharers:
    """The ranks that connect, and the name of the memory that they share."""

    members: Members
    name: str

    @property
    def place(self) -> int:
        return self.members.ranks.index(self.members.rank)

    def offers(self, mine: Record) -> tuple[str, dict[int, Record] | str | VoteResult]:
        """The round's prefix; and each member's offer, why they share nothing, or a verdict."""
        ranks = self.members.ranks
        prefix, past = open_round(self.members, f"peers/{self.name}{self.members.call or ''}")
        verdict = past or vote(self.members, prefix, mine)
        if verdict.missing:
            return prefix, verdict
        # A vote without tokens is one on equal offers.
        offers = verdict.tokens or dict.fromkeys(ranks, mine)
        for who, offer in offers.items():
            if (reason := offer.get("no")) is not None:
                return prefix, f"rank {who}: {reason}"
        hosts = [offers[who].get("host") for who in ranks]
        if len({*hosts}) > 1:
            found = SeveralHosts(
                "its ranks are on several hosts, or in containers that cannot see each other"
            )
            found.near = math.gcd(*(len([*same]) for _, same in groupby(hosts)))
            found.links = str(offers[ranks[0]].get("links"))
            if found.links.startswith(LINKS_VARIABLE):
                raise PolicyError(f"rank {ranks[0]}: {found.links}")
            if all(offer.get("links") != "0" for offer in offers.values()):
                found.round = prefix
            return prefix, found
        return prefix, offers

    def vote_mapped(self, prefix: str, failure: str | None) -> VoteResult:
        return vote(
            self.members,
            f"{prefix}/mapped",
            Record.of(vote="mapped"),
            veto=failure,
        )

    def exchange(self, prefix: str, text: str, what: str = "handle") -> list[str]:
        """Every member's text, in group order. Raises TransportError if a member has none."""
        texts = gather_texts(self.members, prefix, what, text, f"{prefix}/mapped")
        if isinstance(texts, int):
            raise TransportError(f"rank {texts} has shared no memory")
        return texts

    def lost_word(self, prefix: str, probe: HostProbe | DeviceProbe) -> str | None:
        """The first word that a member wrote and this rank's memory lacks, as text."""
        seed = secrets.token_hex(16)
        probe.write(seed)
        # A member's seed comes when its words are written.
        seeds = self.exchange(prefix, seed, "seed")
        return lost_word(probe.take(), seeds, self.place, self.members.ranks)

    def close(self, prefix: str) -> int:
        """Report that this rank maps nothing any more; returns how many ranks have."""
        return self.members.store.add(f"{prefix}/closed", 1)

    def wait_closed(self, prefix: str) -> bool:
        """Report it, and wait a moment for the others; whether all have reported it."""
        try:
            closed = self.close(prefix)
            deadline = time.monotonic() + _FAREWELL_SECONDS
            while closed < len(self.members.ranks):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_SECONDS)
                closed = self.members.store.add(f"{prefix}/closed", 0)
        except RuntimeError:
            # The store has gone, and with it the job.
            return False
        return True


def connect(
    members: Members,  # whose ``call`` is a text that only those in the same call have
    name: str,  # of the communicator: the same on every member and in every run
    *,
    objection: str | None = None,  # why this rank shares no memory
    timeout: float,  # seconds that the communicator waits for a peer
) -> HostCommunicator | str | VoteResult:
    """Map memory of this host with the other members. Returns the communicator, the reason why
    there is none, or the verdict of a vote that members did not reach.
    """
    ranks = members.ranks
    if not 2 <= len(ranks) <= MAX_PEERS:
        return f"a group of {len(ranks)} ranks; shared memory serves 2 to {MAX_PEERS}"
    sharers = _Sharers(members, name)
    prefix, offers = sharers.offers(_host_offer() if objection is None else Record.of(no=objection))
    if not isinstance(offers, dict):
        return offers
    memory, failure = _map_memory(sharers, prefix)
    # A mapping that succeeded may still lead elsewhere, so each member looks for the words that the
    # others wrote, before any of them may trust it.
    if memory is not None:
        size = region_bytes(len(ranks))
        regions = [memory.address + size * p for p in range(len(ranks))]
        try:
            failure = sharers.lost_word(prefix, HostProbe(regions, sharers.place, size))
        except TransportError as error:
            failure = str(error)
    verdict = sharers.vote_mapped(prefix, failure)
    if memory is not None:
        memory.unshare()
        if verdict.unanimous:
            return HostCommunicator(name, ranks, sharers.place, memory, timeout)
        memory.close()
    return verdict if verdict.veto is None else "rank {}: {}".format(*verdict.veto)


def _host_offer() -> Record:
    """Where this rank could map memory, or why it could not."""
    reason = kernel.why_not()
    if reason is not None:
        return Record.of(no=reason)
    links = os.environ.get(LINKS_VARIABLE, "")
    try:
        if links not in ("", "0"):
            from meshplan.topology import Links  # needs numpy

            links = Links.loads(Path(links).read_text(encoding="utf-8")).dumps()
    except (OSError, ValueError) as error:
        links = (
            f"{LINKS_VARIABLE}={links}: {error}; "
            "write 0, the path of a file of meshplan links, or unset it"
        )
    try:
        return Record.of(host=host(), links=links)
    except OSError as error:
        return Record.of(no=error)


def _map_memory(sharers: _Sharers, prefix: str) -> tuple[SharedMemory | None, str | None]:
    """The memory, or why this rank has not mapped it. The first rank makes it."""
    members, key = sharers.members, f"{prefix}/handle"
    store, ranks = members.store, members.ranks
    try:
        if sharers.place == 0:
            memory = SharedMemory.create(len(ranks) * region_bytes(len(ranks)))
            memory.note(0, os.getpid())
            store.set(key, json.dumps(asdict(memory.handle)))
            return memory, None
        deadline = time.monotonic() + seconds_left(members.wait)
        while not store.check([key]):
            if store.check([f"{prefix}/mapped/verdict"]) or time.monotonic() > deadline:
                return None, f"rank {ranks[0]} has shared no memory"
            time.sleep(_POLL_SECONDS)
        memory = SharedMemory.open(MemoryHandle(**json.loads(store.get(key))))
        memory.note(sharers.place, os.getpid())
        return memory, None
    except OSError as error:
        return None, f"no shared memory: {error}"


def connect_devices(
    group_name: str,
    members: Members,
    name: str,
    *,
    objection: str | None = None,
    timeout: float,
    timed: bool = False,
    # The device of this rank; torch's current one by default.
    find: Callable[[], Device] | None = None,
    # In order; IPC, then symmetric memory by default.
    transports: Sequence[Transport] | None = None,
    lanes: int = 512,  # of a block, 1 to 512
) -> DeviceCommunicator | str | VoteResult:
    """Reach the memory of the other members' GPUs; returns as ``connect``. With ``timed``, only if
    that was timed to be faster than an exchange on these GPUs.
    """
    count = len(members.ranks)
    if not 2 <= count <= MAX_PEERS:
        return f"a group of {count} ranks; memory of GPUs serves 2 to {MAX_PEERS}"
    sharers = _Sharers(members, name)
    gpu: str | None = None
    paths: TimedPaths | str | None = None
    if timed and objection is None:
        gpu = torch.cuda.get_device_name()
        paths = timed_paths(gpu, count)
    limit = paths.one_shot_bytes if isinstance(paths, TimedPaths) else None
    objection = paths if isinstance(paths, str) else objection
    device, mine = None, Record.of(no=objection)
    if objection is None:
        device, mine = _device_offer(find or (lambda: device_of(torch.cuda.current_device())))
        mine = mine.adding(gpu=gpu, one_shot_bytes=limit)
    prefix, offers = sharers.offers(mine)
    if not isinstance(offers, dict):
        return offers
    kinds = ("kind", "gpu", "one_shot_bytes")
    if len({tuple(offer.get(word) for word in kinds) for offer in offers.values()}) > 1:
        return "its ranks have GPUs of several kinds"
    assert device is not None
    blocks = min(
        MAX_BLOCKS,
        *[int(offer.get("blocks") or 0) for offer in offers.values()],
    )
    reasons = []
    # What fails on one member is given up by all. So the vote decides, not this rank's result.
    for transport in (Ipc(), Symmetric(group_name)) if transports is None else transports:
        inside = f"{prefix}/{transport.name}"
        held, failure = _map_device(
            sharers,
            inside,
            transport,
            device,
            blocks,
            timeout,
            lanes,
            limit,
        )
        verdict = sharers.vote_mapped(inside, failure)
        if verdict.unanimous and isinstance(held, DeviceCommunicator):
            return held
        if held is not None:
            held.close()
        else:
            # No rank waits for this one before it gives its memory back.
            sharers.close(inside)
        if verdict.veto is None:
            return verdict
        reasons.append("{}: rank {}: {}".format(transport.name, *verdict.veto))
    return "; ".join(reasons)


def _device_offer(
    find: Callable[[], Device],
) -> tuple[Device | None, Record]:
    """This rank's device and memory, or why it shares none."""
    reason = kernel.why_not()
    if reason is not None:
        return None, Record.of(no=reason)
    try:
        where = host()
    except OSError:
        # Memory of GPUs, unlike that of CPUs, needs no ``/proc``.
        where = socket.gethostname()
    try:
        device = find()
        return device, Record.of(host=where, kind=device.driver.kind, blocks=device.processors)
    except (DriverError, CompileError) as error:
        return None, Record.of(no=error)


def _map_device(
    sharers: _Sharers,
    prefix: str,
    transport: Transport,
    device: Device,
    blocks: int,
    timeout: float,
    lanes: int,
    one_shot_bytes: int | None,
) -> tuple[DeviceCommunicator | Regions | None, str | None]:
    """The communicator; or the memory that there is, and why this rank has no communicator."""
    regions, place, members = None, sharers.place, sharers.members
    try:
        regions = transport.open(
            device,
            device_region_bytes(len(members.ranks), blocks),
            place,
            partial(sharers.exchange, prefix),
            partial(sharers.wait_closed, prefix),
        )
        probe = DeviceProbe(
            device,
            regions.addresses,
            place,
            blocks,
            seconds_left(members.wait),
        )
        with device.driver.current():
            lost = sharers.lost_word(prefix, probe)
        if lost is not None:
            return regions, lost
        communicator = DeviceCommunicator(
            sharers.name,
            members.ranks,
            place,
            device,
            regions,
            timeout,
            blocks=blocks,
            lanes=lanes,
            one_shot_bytes=one_shot_bytes,
        )
    except TransportError as error:
        return error.regions or regions, str(error)
    except DriverError as error:
        return regions, str(error)
    return communicator, None
