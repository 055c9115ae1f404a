"""The lines of NCCL's logs by communicator and rank.

Source: ``INFO`` calls of ``src/init.cc``, ``src/mnnvl.cc``, ``src/graph/rings.cc`` and
``src/graph/connect.cc`` of NCCL 2.4 to 2.30. NCCL promises nothing about these lines, so unknown
lines are skipped.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshplan.errors import TopologyInputError

MARK = "NCCL INFO "
_PREFIX = 500  # characters that are searched before the mark
_LONGEST = 100_000  # of a line
_MOST_MEMBERS = 40_000  # ranks of all communicators together, which take a second or two

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
# torchrun --tee and its [rank3]:, mpirun --tag-output.
_LAUNCHED = re.compile(r"\[(?:rank|\d{1,7},)(\d{1,7})\]")
_HOP = re.compile(r"(?:Ring|Tree) \d+ : -?\d+ -> (\d{1,9}) ->", re.ASCII)
# children->rank->parent; up to NCCL 2.7 followed by the same the other way, up to 2.4 only that.
_TREE = re.compile(
    r"\[(\d{1,4})\] (?:(-?\d+(?:/-?\d+)*)->(\d{1,9})->(-?\d+)(?![/\d])"
    r"|(-?\d+)->(\d{1,9})->(-?\d+(?:/-?\d+)*))",
    re.ASCII,
)
# Size and id of a communicator; the id is empty if no line names one.
CommunicatorKey = tuple[int, str]


@dataclass(slots=True, eq=False)
class Member:
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
    hops: list[tuple[int, str]] = field(default_factory=list)  # the first 8
    hop_count: int = 0
    global_rank: int | None = None  # of the process, if the launcher wrote it in front

    def number(self, name: str) -> int | None:
        value = self.fields.get(name, "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else None

    def add(self, match: re.Match[str], body: str, line: int) -> None:
        """Add a line that does not name its communicator."""
        rank = None
        match match.lastgroup:
            case "channels":
                self.channels = int(match["channels"])
            case "rings":
                self.ring_count = int(match["rings"])
                self.rings.append((line, body))
                self.rank = 0  # only rank 0 of a communicator writes its rings
            case "trees":
                self.trees = (line, body)
                tree = _TREE.search(body)
                rank = tree and (tree[3] or tree[6])
            case "hop":
                self.hop_count += 1
                if self.hop_count <= 8:
                    self.hops.append((line, body))
                    hop = _HOP.match(body)
                    rank = hop and hop[1]
            case "clique":
                if clique := _CLIQUE.search(body):
                    self.clique = (clique[1], int(clique[2]), int(clique[3]))
            case "fabric":
                self.fabric = (_FABRIC.findall(body) or [""])[0]
        if rank and self.rank < 0:
            self.rank = int(rank)


def list_communicators(text: str) -> list[dict[int, Member]]:
    """The members of each communicator by rank, the largest first. A communicator is left out if a
    rank of it is missing, or if no line sets it apart.
    """
    found = group_members(scan(text)[0]).values()
    return [index_by_rank(members) or {} for members in found if is_whole(members)]


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


def _start_member(process: str, host: str, line: int, prefix: str) -> Member:
    launched = _LAUNCHED.search(prefix)
    rank = int(launched[1]) if launched else None
    return Member(process, host, line, global_rank=rank)


def scan(text: str) -> tuple[list[Member], list[int]]:
    threads: dict[str, tuple[str, str, str]] = {}
    current: dict[str, Member] = {}
    known: dict[tuple[str, str], Member] = {}
    members: list[Member] = []
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
        limit = text.find(MARK, counted + len(MARK), counted + _LONGEST)
        limit = counted + _LONGEST if limit < 0 else limit
        end = text.find("\n", counted, limit)
        body = text[counted + len(MARK) : limit if end < 0 else end].rstrip()
        if match.lastgroup != "comm":
            if thread not in current:
                current[thread] = _start_member(process, host, line, prefix)
                members.append(current[thread])
            current[thread].add(match, body, line)
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
                member = _start_member(process, host, line, prefix)
                members.append(member)
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


def group_members(members: Iterable[Member]) -> dict[CommunicatorKey, list[Member]]:
    """Members by communicator, the largest first, by id: addresses differ from rank to rank."""
    ids: dict[tuple[str, str], str] = {}
    found: dict[CommunicatorKey, list[Member]] = defaultdict(list)
    for member in members:
        fields = member.fields
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


def index_by_rank(members: Iterable[Member]) -> dict[int, Member] | None:
    """First member of each rank; ``None`` if these are members of several communicators."""
    found: dict[int, Member] = {}
    for member in members:
        if member.rank >= 0 and found.setdefault(member.rank, member).process != member.process:
            return None
    return dict(sorted(found.items()))


def is_whole(members: Sequence[Member]) -> bool:
    ranks, size = index_by_rank(members), members[0].size
    return ranks is not None and bool(ranks) and len(ranks) == size and max(ranks) < size
