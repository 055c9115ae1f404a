"""Logs of NCCL with ``NCCL_DEBUG=INFO``: communicators, their nodes, rings, trees and channels.
They never show the GPUs that NVLink joins: ``domains`` is always ``None``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from meshplan.topology._reading import Groups, Note, Reading
from meshplan.topology.formats._nccl_lines import (
    MARK,
    CommunicatorKey,
    Member,
    group_members,
    index_by_rank,
    is_whole,
    scan,
)

_CLIQUE = re.compile(r"cliqueId (\w{1,20}) cliqueSize (\d{1,9}) cliqueRank (\d{1,9})", re.ASCII)
_FABRIC = re.compile(r"fabric UUID (\S{1,80})", re.ASCII)
_CHANNELS = re.compile(r"\d{1,6}(?= coll channels)", re.ASCII)
_RING_COUNT = re.compile(r"(?<=/)\d{1,4}", re.ASCII)
_MOST_FINDINGS = 64
_SHOWN = 4  # rings, trees or communicators in the notes before "... N more"


def recognises(text: str) -> bool:
    return MARK in text


def read(text: str) -> Reading:
    """Nodes of the largest communicator, if lines of all its ranks are in the log."""
    members, systems = scan(text)
    found = group_members(members)
    nodes, names, notes = _find_nodes(found)
    drawn = any({"trees", "rings", "hops"} & member.lines.keys() for member in members)
    for line in systems[:1]:
        message = "the graph that NCCL searches is not read: pass NCCL_TOPO_DUMP_FILE instead"
        notes.append(Note(message, line=line))
    notes += _compare_channels(found) + _summarize(found)
    if not members:
        notes.append(Note("no line has rings, trees or ranks; set NCCL_DEBUG_SUBSYS=INIT,GRAPH"))
    whole = bool(members) and all(map(is_whole, found.values()))
    rings = [(one, member.size) for member in members for _, one in member.lines.get("rings", ())]
    return Reading(
        "NCCL log (GRAPH)" if systems and not drawn else "NCCL log",
        nodes=nodes,
        complete=whole and not any(_is_cut(ring, size) for ring, size in rings),
        notes=tuple(sorted(notes, key=lambda note: note.line or 0)),
        names=names,
        scope="ranks",
    )


def _find_nodes(
    communicators: dict[CommunicatorKey, list[Member]],
) -> tuple[Groups | None, tuple[str, ...], list[Note]]:
    notes: list[Note] = []
    largest = max((size for size, _ in communicators), default=0)
    for (size, name), members in communicators.items():
        if not size or size < largest or len(notes) == _MOST_FINDINGS:
            break
        ranks = index_by_rank(members)
        if ranks is None:
            why = "several of them, and no id assigns their lines"
        elif not is_whole(members):
            why = f"only {len(ranks)} of {size} ranks wrote here; join the logs of all: cat FILES"
        else:
            groups = _group_ranks(list(ranks.values()))
            if groups is not None:
                ordered = sorted((tuple(group), host) for host, group in groups.items())
                names = tuple(host for _, host in ordered)
                return tuple(group for group, _ in ordered), names, []
            why = "hosts, local ranks and the number of nodes do not fix the node of each rank"
        notes.append(Note(f"{_describe(size, name)}: {why}", line=members[0].line))
    return None, (), notes[:_SHOWN]


def _group_ranks(members: Sequence[Member]) -> dict[str, list[int]] | None:
    counts = {member.number("nNodes") for member in members} - {None}
    # A clique is one node of NCCL, whatever its hosts are.
    if any(member.number("MNNVL") for member in members):
        found = _group_by_clique(members)
    else:
        by_host: dict[str, list[int]] = defaultdict(list)
        for member in members:
            by_host[member.host].append(member.rank)
        found = None if "" in by_host else by_host
    if found is None or (counts and counts != {len(found)}):
        local = [(member.number("localRank"), member.number("localRanks")) for member in members]
        found = _fill_nodes([("", rank, size) for rank, size in local if rank is not None and size])
    return None if found is None or (counts and counts != {len(found)}) else found


def _group_by_clique(members: Sequence[Member]) -> dict[str, list[int]] | None:
    cliques = []
    found: dict[str, list[int]] = defaultdict(list)
    for member in members:
        clique, fabric = member.find("clique", _CLIQUE), member.find("fabric", _FABRIC)
        if clique is None:
            return None
        cliques.append((clique[1], int(clique[3]), int(clique[2])))
        found[f"{fabric[1] if fabric else ''} clique {clique[1]}".strip()].append(member.rank)
    if all(len(group) == cliques[rank][2] for group in found.values() for rank in group):
        return found
    # Cliques of two racks may have one number, and the line with the rack may be missing.
    return _fill_nodes(cliques)


def _fill_nodes(
    local: Sequence[tuple[str, int, int]],
) -> dict[str, list[int]] | None:
    """Nodes from (label, position in its node, size of its node) of rank 0, 1, 2, ... A rank
    belongs to the node that has as many ranks as its position. ``None`` if several match, or one
    stays incomplete.
    """
    found: dict[str, list[int]] = {}
    waiting: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for rank, (label, position, size) in enumerate(local):
        if position == 0:
            node = f"node {len(found)}"
            found[node] = []
        else:
            candidates = waiting[label, position, size]
            if len(candidates) != 1:
                return None
            node = candidates.pop()
        found[node].append(rank)
        if position + 1 < size:
            waiting[label, position + 1, size].append(node)
    return None if not local or any(waiting.values()) else found


def _describe(size: int, name: str) -> str:
    return f"communicator {name} of {size} ranks" if name else f"communicator of {size} ranks"


def _is_cut(ring: str, size: int) -> bool:
    """NCCL truncates lines of rings after 128 characters with "..."; others truncate without it."""
    return ring.endswith("...") or len(ring.split(":")[-1].split()) < size


def _count_channels(
    members: Sequence[Member], kind: str, pattern: re.Pattern[str]
) -> dict[int, list[Member]]:
    """Members by the number of channels in their last line of a kind."""
    found: dict[int, list[Member]] = defaultdict(list)
    for member in members:
        if count := member.find(kind, pattern):
            found[int(count[0])].append(member)
    return found


def _compare_channels(communicators: dict[CommunicatorKey, list[Member]]) -> list[Note]:
    notes: dict[int, list[Note]] = defaultdict(list)
    sizes: dict[int, dict[int, list[Member]]] = defaultdict(lambda: defaultdict(list))
    for (size, name), members in communicators.items():
        counts = _count_channels(members, "channels", _CHANNELS)
        if len(counts) > 1 and name:
            notes[size].append(_note_counts(_describe(size, name), counts))
        # Never rings with counts: the channels that each counts differ by version.
        for count, found in (counts or _count_channels(members, "rings", _RING_COUNT)).items():
            sizes[size][count] += found
    for size, counts in sizes.items():
        if size and len(counts) > 1 and size not in notes:
            notes[size].append(_note_counts(f"communicators of {size} ranks", counts))
    all_notes = [note for some in notes.values() for note in some]
    if (more := len(all_notes) - _MOST_FINDINGS) > 0:
        line = all_notes[_MOST_FINDINGS].line
        last = Note(f"... {more} more channel counts that differ", "MP201", line)
        all_notes[_MOST_FINDINGS:] = [last]
    return all_notes


def _note_counts(what: str, counts: dict[int, list[Member]]) -> Note:
    """At the line of a rare count, which is the one to investigate."""
    ordered = sorted(counts.items(), key=lambda item: -len(item[1]))
    shown = ", ".join(
        f"{count} (rank {members[0].rank}{f' and {len(members) - 1} more' * (len(members) > 1)})"
        for count, members in ordered[:_SHOWN]
    )
    return Note(f"{what}: channel counts differ: {shown}", "MP201", ordered[-1][1][0].line)


def _summarize(communicators: dict[CommunicatorKey, list[Member]]) -> list[Note]:
    notes = []
    for (size, name), members in list(communicators.items())[:_SHOWN]:
        if size:
            counts = [*_count_channels(members, "channels", _CHANNELS)]
            channels = f", {counts[0]} channels" if len(counts) == 1 else ""
            nodes = {member.number("nNodes") for member in members} - {None}
            on = f" on {nodes.pop()} nodes" if len(nodes) == 1 else ""
            mnnvl = ", multi-node NVLink" * any(member.number("MNNVL") for member in members)
            message = f"{_describe(size, name)}{on}{channels}{mnnvl}"
            notes.append(Note(message, line=members[0].line))
    if len(communicators) > _SHOWN:
        notes.append(Note(f"... {len(communicators) - _SHOWN} more communicators"))
    members = next(iter(communicators.values()), [])
    for kind, what in (
        ("rings", "rings"),
        ("trees", "ranks with trees"),
        ("hops", "lines of single rings and trees"),
    ):
        lines = [line for member in members for line in member.lines.get(kind, ())]
        for line, body in lines[:_SHOWN]:
            cut = " (the line is cut)" if kind == "rings" and _is_cut(body, members[0].size) else ""
            notes.append(Note(f"{' '.join(body[:400].split())[:160]}{cut}", line=line))
        if len(lines) > _SHOWN:
            notes.append(Note(f"... {len(lines) - _SHOWN} more {what}", line=lines[_SHOWN][0]))
    return notes
