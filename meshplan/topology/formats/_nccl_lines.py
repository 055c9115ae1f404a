"""What each rank of each communicator wrote into a log of NCCL."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshplan.errors import TopologyInputError

__all__ = ["MARK", "Key", "Member", "communicators", "scan"]

MARK = "NCCL INFO "
_PREFIX = 500  # characters before the mark that are looked at
_LONGEST = 100_000  # characters of a line
# Ranks of communicators, all together. As many take a second or two.
_MOST = 40_000

# One scan finds the lines that matter: a log is mostly lines of transports and collectives.
_LINE = re.compile(
    r"NCCL INFO (?:"
    r"(?:\[Rank \d{1,9}\] )?(?:\w{1,60} )?(?P<comm>comm 0x)"
    r"|(?P<trees>Trees) \["
    r"|(?P<ring>Channel) \d{1,4}/(?P<rings>\d{1,4}) :(?= +\d{1,9}(?:\s|\.|$))"
    r"|(?P<hop>Ring|Tree) \d{1,4} : -?\d"
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
_CLIQUE = re.compile(r"cliqueId (\w{1,20}) cliqueSize (\d{1,9}) cliqueRank (\d{1,9})", re.ASCII)
_FABRIC = re.compile(r"fabric UUID (\S{1,80})", re.ASCII)
_HOP = re.compile(r"(?:Ring|Tree) \d+ : -?\d+ -> (\d{1,9}) ->", re.ASCII)
# children->rank->parent; up to NCCL 2.7 followed by the same the other way, up to 2.4 only that.
_TREE = re.compile(
    r"\[(\d{1,4})\] (?:(-?\d+(?:/-?\d+)*)->(\d{1,9})->(-?\d+)(?![/\d])"
    r"|(-?\d+)->(\d{1,9})->(-?\d+(?:/-?\d+)*))",
    re.ASCII,
)


@dataclass(slots=True, eq=False)
class Member:
    """What the lines of one rank tell about one communicator."""

    process: str
    host: str
    line: int
    comm: str = ""
    rank: int = -1
    size: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    clique: tuple[str, int, int] | None = None
    fabric: str = ""
    channels: int | None = None
    trees: tuple[int, str] | None = None
    rings: list[tuple[int, str]] = field(default_factory=list)
    ring_count: int | None = None
    hops: list[tuple[int, str]] = field(default_factory=list)  # the first few of them
    hop_count: int = 0

    def number(self, name: str) -> int | None:
        value = self.fields.get(name, "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else None


def _process(prefix: str) -> tuple[str, str, str]:
    """Thread, process and host, from what stands before ``NCCL INFO``: ``host:pid:tid [dev]``.

    Launchers write more in front of it, so it is taken apart from its end.
    """
    rest = prefix.rstrip()
    if rest.endswith("]"):
        rest = rest[: max(rest.rfind("["), 0)].rstrip()
    parts = rest.rsplit(":", 2)
    if len(parts) != 3 or not parts[2].isdigit() or not parts[1].isdigit():
        return prefix, prefix, ""
    host = re.split(r"[\s>:\]|]", parts[0][-300:])[-1]
    process = f"{host}:{parts[1]}"
    return f"{process}:{parts[2]}", process, host


def scan(text: str) -> tuple[list[Member], list[int]]:
    """Members in order of their first line, and the lines where a graph begins.

    Raises:
        TopologyInputError: more ranks of communicators than a log of one job has.
    """
    threads: dict[str, tuple[str, str, str]] = {}
    current: dict[str, Member] = {}
    known: dict[tuple[str, str], Member] = {}
    members: list[Member] = []
    systems: list[int] = []
    line, counted = 1, 0
    for match in _LINE.finditer(text):
        line += text.count("\n", counted, match.start())
        counted = match.start()
        kind = match.lastgroup
        if kind == "system":
            systems.append(line)
            continue
        start = max(counted - _PREFIX, 0)
        prefix = text[max(text.rfind("\n", start, counted) + 1, start) : counted]
        if prefix not in threads:
            threads[prefix] = _process(prefix)
        thread, process, host = threads[prefix]
        if len(members) > _MOST:
            raise TopologyInputError(
                f"more than {_MOST:,} ranks of communicators; give the lines of one of them, as "
                "grep 'commId 0x...' finds them",
                line=line,
            )
        # Where newlines were lost, a line ends where the next one begins.
        limit = text.find(MARK, counted + len(MARK), counted + _LONGEST)
        limit = counted + _LONGEST if limit < 0 else limit
        end = text.find("\n", counted, limit)
        body = text[counted + len(MARK) : limit if end < 0 else end].rstrip()
        if kind == "comm":
            found = _COMM.search(body)
            if not found:
                continue
            member = known.get((process, found[1]))
            if member is None or "Init START" in body or member.rank != int(found[2]):
                member = current.get(thread)
                # Lines of a thread before its communicator is named belong to it.
                if member is None or member.comm or "Destroy" in body:
                    member = Member(process, host, line)
                    members.append(member)
            member.comm, member.rank, member.size = found[1], int(found[2]), int(found[3])
            member.fields.update(_FIELD.findall(body[found.end() :]))
            known[process, found[1]] = current[thread] = member
            if "COMPLETE" in body:
                del current[thread]
            continue
        if thread not in current:
            current[thread] = Member(process, host, line)
            members.append(current[thread])
        _add(current[thread], match, body, line)
    return members, systems


def _add(member: Member, match: re.Match[str], body: str, line: int) -> None:
    """One line of a member that does not name its communicator."""
    kind = match.lastgroup
    if kind == "channels":
        member.channels = int(match["channels"])
    elif kind == "rings":
        member.ring_count = int(match["rings"])
        member.rings.append((line, body))
        member.rank = 0  # only rank 0 of a communicator writes its rings
    elif kind == "trees":
        member.trees = (line, body)
        tree = _TREE.search(body)
        if tree and member.rank < 0:
            member.rank = int(tree[3] or tree[6])
    elif kind == "hop":
        member.hop_count += 1
        if member.hop_count > 8:
            return
        member.hops.append((line, body))
        hop = _HOP.match(body)
        if hop and member.rank < 0:
            member.rank = int(hop[1])
    elif kind == "clique":
        clique = _CLIQUE.search(body)
        if clique:
            member.clique = (clique[1], int(clique[2]), int(clique[3]))
    elif kind == "fabric":
        fabric = _FABRIC.search(body)
        member.fabric = fabric[1] if fabric else ""


# Size and id of a communicator; the id is empty if no line names one.
Key = tuple[int, str]


def communicators(members: Iterable[Member]) -> dict[Key, list[Member]]:
    """Members by communicator, the largest first; addresses differ from rank to rank, ids do not.

    A communicator that was split off has no id of its own: what its ranks share is the parent, how
    many were split off before it, and the colour.
    """
    ids: dict[tuple[str, str], str] = {}
    found: dict[Key, list[Member]] = defaultdict(list)
    for member in members:
        told = member.fields
        name = told.get("commId", "")
        if not name and "color" in told:
            parent = ids.get((member.process, told.get("parent", "")), "")
            child = told.get("childCount", told.get("splitCount", ""))
            # A chain of splits must not make names that grow with it.
            name = f"{parent}/{child}/{told['color']}"[-200:]
        ids[member.process, member.comm] = name
        found[member.size, name].append(member)
    return dict(sorted(found.items(), key=lambda item: -item[0][0]))
