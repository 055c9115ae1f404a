"""The rings and trees of communicators, as NCCL wrote them to a log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.errors import TopologyInputError
from meshplan.topology.formats._nccl_lines import MARK, Member, list_communicators

_RING = re.compile(r"Channel (\d{1,4})/\d{1,4} :((?: +\d{1,9})+)\s*(\.\.\.)?", re.ASCII)
_RING_HOP = re.compile(r"Ring (\d{1,4}) : (\d{1,9}) -> (\d{1,9}) -> (\d{1,9})", re.ASCII)
# Children -> rank -> parent.
_TREE = re.compile(
    r"\[(\d{1,4})\] (-?\d{1,9}(?:/-?\d{1,9})*)->(\d{1,9})->(-?\d{1,9})(?![/\d|])",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Communicator:
    """One communicator of a log."""

    name: str  # its size and a line of the log
    processes: tuple[str, ...]  # of its ranks, by rank
    # Global rank of each process, if the launcher wrote all of them; else empty.
    launched: tuple[int, ...]
    # Ranks in ring order by channel, from rank 0 on; only whole rings.
    rings: Mapping[int, tuple[int, ...]]
    # Of each rank in the tree of a channel, in the order in which it adds them; only
    # trees of which every rank wrote its part.
    children: Mapping[int, tuple[tuple[int, ...], ...]]


def read_communicators(text: str) -> list[Communicator]:
    if MARK not in text:
        raise TopologyInputError(
            "no line with 'NCCL INFO' found; run the job with NCCL_DEBUG=INFO and pass its log"
        )
    return [_read(members) for members in list_communicators(text)]


def find_global_ranks(communicators: list[Communicator], world_size: int) -> dict[str, int]:
    """The global rank of each process. It is the rank in the communicator of all ranks; without
    one, the rank that the launcher wrote.
    """
    for one in communicators:
        if len(set(one.processes)) == world_size:
            return {process: rank for rank, process in enumerate(one.processes)}
    found: dict[str, int] = {}
    for one in communicators:
        found.update(zip(one.processes, one.launched, strict=False))
    if found and all(process in found for one in communicators for process in one.processes):
        return found
    raise TopologyInputError(
        f"the global rank of each process is unknown: no communicator of {world_size} ranks is "
        "complete in the log, and lines do not begin with [rank0]:; pass the logs of all ranks of "
        "a job that called torch.distributed.barrier() over all ranks, or of torchrun --tee 3"
    )


def _read(members: Mapping[int, Member]) -> Communicator:
    launched = [member.global_rank for member in members.values()]
    return Communicator(
        name=f"communicator of {len(members)} ranks, line {members[0].line}",
        processes=tuple(member.process for member in members.values()),
        launched=tuple(rank for rank in launched if rank is not None)
        if None not in launched
        else (),
        rings=_read_rings(members),
        children=_read_trees(members),
    )


def _read_rings(members: Mapping[int, Member]) -> dict[int, tuple[int, ...]]:
    size = len(members)
    rings = {}
    for _, line in members[0].rings:
        # NCCL cuts the line after 128 characters.
        if found := _RING.match(line):
            rings[int(found[1])] = tuple(map(int, found[2].split()))
    following: dict[int, dict[int, int]] = {}
    for member in members.values():
        for _, line in member.hops:
            if hop := _RING_HOP.match(line):
                following.setdefault(int(hop[1]), {})[int(hop[3])] = int(hop[4])
    for channel, after in following.items():
        ring = [0]
        while len(ring) < size and after.get(ring[-1], 0):
            ring.append(after[ring[-1]])
        rings[channel] = tuple(ring)
    whole = list(range(size))
    return {c: ring for c, ring in sorted(rings.items()) if sorted(ring) == whole and ring[0] == 0}


def _read_trees(
    members: Mapping[int, Member],
) -> dict[int, tuple[tuple[int, ...], ...]]:
    trees: dict[int, dict[int, tuple[int, ...]]] = {}
    for member in members.values():
        for found in _TREE.finditer(member.trees[1] if member.trees else ""):
            down = tuple(int(one) for one in found[2].split("/") if int(one) >= 0)
            trees.setdefault(int(found[1]), {})[int(found[3])] = down
    size = len(members)
    return {
        channel: tuple(down[rank] for rank in range(size))
        for channel, down in sorted(trees.items())
        if _is_tree(down, size)
    }


def _is_tree(down: Mapping[int, tuple[int, ...]], size: int) -> bool:
    children = [child for ranks in down.values() for child in ranks]
    roots = set(range(size)) - set(children)
    if sorted(down) != list(range(size)) or len(roots) != 1 or len(children) != size - 1:
        return False
    below = list(roots)
    for rank in below:
        below += down[rank]
    return sorted(below) == list(range(size))
