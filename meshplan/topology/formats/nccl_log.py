"""Logs of NCCL with ``NCCL_DEBUG=INFO``: communicators, their nodes, rings, trees and channels.
They never show the GPUs that NVLink joins: ``domains`` is always ``None``.

Source: ``INFO`` calls of ``src/init.cc``, ``src/mnnvl.cc``, ``src/graph/rings.cc`` and
``src/graph/connect.cc`` of NCCL 2.4 to 2.30. NCCL promises nothing about these lines, so unknown
lines are skipped.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Groups, Note, Reading, group_values, parse_number

_MARK = "NCCL INFO "
_PREFIX = 500  # characters that are searched before the mark
_LONGEST = 100_000  # of a line
_MOST_MEMBERS = 40_000  # ranks of all communicators together, which take a second or two

# One scan finds the lines that matter: a log is mostly lines of transports and collectives.
_LINE = re.compile(
    r"NCCL INFO (?:"
    r"(?:\[Rank \d{1,9}\] )?(?:\w{1,60} )?(?P<comm>comm 0x)"
    r"|(?P<trees>Trees) \["
    r"|(?P<rings>Channel) \d{1,4}/\d{1,4} :(?= +\d{1,9}(?:\s|\.|$))"
    r"|(?P<hops>Ring|Tree) \d{1,4} : -?\d"
    r"|(?P<channels>\d{1,6}) coll channels"
    r"|MNNVL \d (?P<clique>cliqueId)"
    r"|MNNVL busId 0x\S{1,40} (?P<fabric>fabric)"
    r"|(?P<system>=== System) : maxBw)",
    re.ASCII,
)
_COMM = re.compile(r"comm (0x\S+) rank (\d{1,9}) n[rR]anks (\d{1,9})", re.ASCII)
_FIELD = re.compile(
    r"(nNodes|localRanks|localRank|MNNVL|commId|parent|childCount|splitCount|color) (-?\w[\w.]*)",
    re.ASCII,
)
# torchrun --tee and its [rank3]:, mpirun --tag-output.
_LAUNCHED = re.compile(r"\[(?:rank|\d{1,7},)(\d{1,7})\]")
# Before a rank stand its children and behind it its parent, or up to NCCL 2.4 the other way.
_RANK = re.compile(r"-> ?(\d{1,9}) ?->", re.ASCII)
# Size and id of a communicator; the id is empty if no line names one.
_Key = tuple[int, str]


@dataclass(slots=True, eq=False)
class _Member:
    process: str
    host: str
    line: int
    global_rank: int | None  # of the process, if the launcher wrote it in front
    comm: str = ""
    rank: int = -1
    size: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    # Line and text of the lines that do not name their communicator, by the group of `_LINE`.
    lines: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))

    def number(self, name: str) -> int | None:
        return parse_number(self.fields.get(name))

    def find(self, kind: str, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The match of the pattern in the last line of a kind."""
        return pattern.search(self.lines[kind][-1][1]) if kind in self.lines else None

    def find_rank(self) -> int:
        """The rank by rings, of which only rank 0 writes, and by trees; -1 if unknown."""
        if self.rank >= 0 or "rings" in self.lines:
            return max(self.rank, 0)
        lines = [*self.lines.get("trees", ()), *self.lines.get("hops", ())]
        found = (_RANK.search(body) for _, body in lines)
        return next((int(rank[1]) for rank in found if rank), -1)


def _split_prefix(prefix: str) -> tuple[str, str, str]:
    """Thread, process and host from ``host:pid:tid [dev]``; launchers write more in front."""
    rest = prefix.rstrip()
    if rest.endswith("]"):
        rest = rest[: max(rest.rfind("["), 0)].rstrip()
    parts = rest.rsplit(":", 2)
    if len(parts) != 3 or not parts[2].isdigit() or not parts[1].isdigit():
        return prefix, prefix, ""
    host = re.split(r"[\s>:\]|]", parts[0][-300:])[-1]
    process = f"{host}:{parts[1]}"
    return f"{process}:{parts[2]}", process, host


def _start_member(
    members: list[_Member], process: str, host: str, line: int, prefix: str
) -> _Member:
    launched = _LAUNCHED.search(prefix)
    members.append(_Member(process, host, line, int(launched[1]) if launched else None))
    return members[-1]


def _scan(text: str) -> tuple[list[_Member], list[int]]:
    # And the numbers of lines with the graph that NCCL searches.
    if _MARK not in text:
        raise TopologyInputError(
            "no line with 'NCCL INFO' found; run the job with NCCL_DEBUG=INFO and pass its log"
        )
    threads: dict[str, tuple[str, str, str]] = {}
    current: dict[str, _Member] = {}
    known: dict[tuple[str, str], _Member] = {}
    members: list[_Member] = []
    systems: list[int] = []
    line, counted = 1, 0
    for match in _LINE.finditer(text):
        line += text.count("\n", counted, match.start())
        counted = match.start()
        if match.lastgroup == "system":
            systems.append(line)
            continue
        start = max(counted - _PREFIX, 0)
        prefix = text[max(text.rfind("\n", start, counted) + 1, start) : counted]
        if prefix not in threads:
            threads[prefix] = _split_prefix(prefix)
        thread, process, host = threads[prefix]
        if len(members) > _MOST_MEMBERS:
            raise TopologyInputError(
                f"more than {_MOST_MEMBERS:,} ranks of communicators; pass the lines of one of "
                "them, as grep 'commId 0x...' finds them",
                line=line,
            )
        # Where newlines were lost, a line ends where the next one begins.
        limit = text.find(_MARK, counted + len(_MARK), counted + _LONGEST)
        limit = counted + _LONGEST if limit < 0 else limit
        end = text.find("\n", counted, limit)
        body = text[counted + len(_MARK) : limit if end < 0 else end].rstrip()
        if match.lastgroup != "comm":
            if thread not in current:
                current[thread] = _start_member(members, process, host, line, prefix)
            current[thread].lines[str(match.lastgroup)].append((line, body))
            continue
        found = _COMM.search(body)
        if not found:
            continue
        # Ranks of several communicators write in turn, and a process may reuse an address. A line
        # belongs to the known member unless it starts a new communicator or has another rank.
        member = known.get((process, found[1]))
        if member is None or "Init START" in body or member.rank != int(found[2]):
            member = current.get(thread)
            # Lines of a thread before its communicator is named belong to it.
            if member is None or member.comm or "Destroy" in body:
                member = _start_member(members, process, host, line, prefix)
        member.comm, member.rank, member.size = (
            found[1],
            int(found[2]),
            int(found[3]),
        )
        member.fields.update(_FIELD.findall(body[found.end() :]))
        known[process, found[1]] = current[thread] = member
        if "COMPLETE" in body:
            del current[thread]
    return members, systems


def _group_members(members: Iterable[_Member]) -> dict[_Key, list[_Member]]:
    """Members by communicator, the largest first, by id: addresses differ from rank to rank."""
    ids: dict[tuple[str, str], str] = {}
    found: dict[_Key, list[_Member]] = defaultdict(list)
    for member in members:
        fields, member.rank = member.fields, member.find_rank()
        name = fields.get("commId", "")
        if not name and "color" in fields:
            # A split communicator has no id: its ranks share parent, count of splits, and colour.
            parent = ids.get((member.process, fields.get("parent", "")), "")
            child = fields.get("childCount", fields.get("splitCount", ""))
            # A chain of splits must not make names that grow with it.
            name = f"{parent}/{child}/{fields['color']}"[-200:]
        ids[member.process, member.comm] = name
        found[member.size, name].append(member)
    return dict(sorted(found.items(), key=lambda item: -item[0][0]))


def _index_by_rank(members: Iterable[_Member]) -> dict[int, _Member] | None:
    """First member of each rank; ``None`` if these are members of several communicators."""
    found: dict[int, _Member] = {}
    for member in members:
        if member.rank >= 0 and found.setdefault(member.rank, member).process != member.process:
            return None
    return dict(sorted(found.items()))


def _is_whole(members: Sequence[_Member]) -> bool:
    ranks, size = _index_by_rank(members), members[0].size
    return ranks is not None and bool(ranks) and len(ranks) == size and max(ranks) < size


_CLIQUE = re.compile(r"cliqueId (\w{1,20}) cliqueSize (\d{1,9}) cliqueRank (\d{1,9})", re.ASCII)
_FABRIC = re.compile(r"fabric UUID (\S{1,80})", re.ASCII)
_CHANNELS = re.compile(r"\d{1,6}(?= coll channels)", re.ASCII)
_RING_COUNT = re.compile(r"(?<=/)\d{1,4}", re.ASCII)
_MOST_FINDINGS = 64
_SHOWN = 4  # rings, trees or communicators in the notes before "... N more"


def recognises(text: str) -> bool:
    return _MARK in text


def read(text: str) -> Reading:
    """Nodes of the largest communicator, if lines of all its ranks are in the log."""
    members, systems = _scan(text)
    found = _group_members(members)
    nodes, names, notes = _find_nodes(found)
    drawn = any({"trees", "rings", "hops"} & member.lines.keys() for member in members)
    for line in systems[:1]:
        message = "the graph that NCCL searches is not read: pass NCCL_TOPO_DUMP_FILE instead"
        notes.append(Note(message, line=line))
    notes += _compare_channels(found) + _summarize(found)
    if not members:
        notes.append(Note("no line has rings, trees or ranks; set NCCL_DEBUG_SUBSYS=INIT,GRAPH"))
    whole = bool(members) and all(map(_is_whole, found.values()))
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
    communicators: dict[_Key, list[_Member]],
) -> tuple[Groups | None, tuple[str, ...], list[Note]]:
    notes: list[Note] = []
    largest = max((size for size, _ in communicators), default=0)
    for (size, name), members in communicators.items():
        if not size or size < largest or len(notes) == _MOST_FINDINGS:
            break
        ranks = _index_by_rank(members)
        if ranks is None:
            why = "several of them, and no id assigns their lines"
        elif not _is_whole(members):
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


def _group_ranks(members: Sequence[_Member]) -> dict[str, list[int]] | None:
    counts = {member.number("nNodes") for member in members} - {None}
    # A clique is one node of NCCL, whatever its hosts are.
    if any(member.number("MNNVL") for member in members):
        found = _group_by_clique(members)
    else:
        by_host = group_values((member.host, member.rank) for member in members)
        found = None if "" in by_host else by_host
    if found is None or (counts and counts != {len(found)}):
        local = [(member.number("localRank"), member.number("localRanks")) for member in members]
        found = _fill_nodes([("", rank, size) for rank, size in local if rank is not None and size])
    return None if found is None or (counts and counts != {len(found)}) else found


def _group_by_clique(
    members: Sequence[_Member],
) -> dict[str, list[int]] | None:
    cliques = []
    found: dict[str, list[int]] = defaultdict(list)
    for member in members:
        clique, fabric = (
            member.find("clique", _CLIQUE),
            member.find("fabric", _FABRIC),
        )
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
    """Nodes from (label, position in its node, size of its node) of rank 0, 1, 2, ... ``None`` if
    several nodes have as many ranks as a rank's position, or one stays incomplete.
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
    return f"communicator{name and f' {name}'} of {size} ranks"


def _is_cut(ring: str, size: int) -> bool:
    """NCCL truncates lines of rings after 128 characters with "..."; others truncate without it."""
    return ring.endswith("...") or len(ring.split(":")[-1].split()) < size


def _count_channels(
    members: Sequence[_Member], kind: str, pattern: re.Pattern[str]
) -> dict[int, list[_Member]]:
    """_Members by the number of channels in their last line of a kind."""
    counts = ((member.find(kind, pattern), member) for member in members)
    return group_values((int(count[0]), member) for count, member in counts if count)


def _compare_channels(communicators: dict[_Key, list[_Member]]) -> list[Note]:
    notes: dict[int, list[Note]] = defaultdict(list)
    sizes: dict[int, dict[int, list[_Member]]] = defaultdict(lambda: defaultdict(list))
    for (size, name), members in communicators.items():
        counts = _count_channels(members, "channels", _CHANNELS)
        if len(counts) > 1 and name:
            notes[size].append(_note_counts(_describe(size, name), counts))
        # Never both: rings and counts are of different channels in some versions.
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


def _note_counts(what: str, counts: dict[int, list[_Member]]) -> Note:
    """At the line of a rare count, which is the one to investigate."""
    ordered = sorted(counts.items(), key=lambda item: -len(item[1]))
    shown = ", ".join(
        f"{count} (rank {members[0].rank}{f' and {len(members) - 1} more' * (len(members) > 1)})"
        for count, members in ordered[:_SHOWN]
    )
    return Note(
        f"{what}: channel counts differ: {shown}",
        "MP201",
        ordered[-1][1][0].line,
    )


def _summarize(communicators: dict[_Key, list[_Member]]) -> list[Note]:
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
            notes.append(
                Note(
                    f"... {len(lines) - _SHOWN} more {what}",
                    line=lines[_SHOWN][0],
                )
            )
    return notes


# Rings and trees, for `meshplan diagnose`.

_RING = re.compile(r"Channel (\d{1,4})/\d{1,4} :((?: +\d{1,9})+)\s*(\.\.\.)?", re.ASCII)
_RING_HOP = re.compile(r"Ring (\d{1,4}) : (\d{1,9}) -> (\d{1,9}) -> (\d{1,9})", re.ASCII)
# Children -> rank -> parent, of a channel.
_TREE = re.compile(
    r"\[(\d{1,4})\] (-?\d{1,9}(?:/-?\d{1,9})*)->(\d{1,9})->(-?\d{1,9})(?![/\d|])",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Communicator:
    processes: tuple[str, ...]  # of its ranks, by rank
    # Global rank of each process, if the launcher wrote all of them; else empty.
    launched: tuple[int, ...]
    # Ranks in ring order by channel, from rank 0 on; only whole rings.
    rings: Mapping[int, tuple[int, ...]]
    # Of each rank in the tree of a channel, in the order in which it adds them; only
    # trees of which every rank wrote its part.
    children: Mapping[int, tuple[tuple[int, ...], ...]]


def read_communicators(text: str) -> list[Communicator]:
    """The largest first, without those that lack a rank or that no line sets apart."""
    found = _group_members(_scan(text)[0]).values()
    return [_read(_index_by_rank(members) or {}) for members in found if _is_whole(members)]


def find_global_ranks(communicators: list[Communicator], world_size: int) -> dict[str, int]:
    """By process: the rank in the communicator of all ranks, else that of the launcher."""
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


def _read(members: Mapping[int, _Member]) -> Communicator:
    launched: list[Any] = [member.global_rank for member in members.values()]
    return Communicator(
        processes=tuple(member.process for member in members.values()),
        launched=() if None in launched else tuple(launched),
        rings=_read_rings(members),
        children=_read_trees(members),
    )


def _read_rings(members: Mapping[int, _Member]) -> dict[int, tuple[int, ...]]:
    size = len(members)
    rings = {}
    for _, line in members[0].lines.get("rings", ()):
        # NCCL cuts the line after 128 characters.
        if found := _RING.match(line):
            rings[int(found[1])] = tuple(map(int, found[2].split()))
    following: dict[int, dict[int, int]] = {}
    for member in members.values():
        for _, line in member.lines.get("hops", ()):
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
    members: Mapping[int, _Member],
) -> dict[int, tuple[tuple[int, ...], ...]]:
    trees: dict[int, dict[int, tuple[int, ...]]] = {}
    for member in members.values():
        for found in _TREE.finditer(member.lines.get("trees", [(0, "")])[-1][1]):
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
