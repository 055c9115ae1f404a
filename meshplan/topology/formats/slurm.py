"""Slurm's ``topology.conf`` and ``topology.yaml``, ``scontrol show topology``, and lists of hosts.

Source: the manual pages topology.conf(5), topology.yaml(5) and scontrol(1). One NVLink switch
system joins a block of topology/block; a switch of topology/tree is one of the network. Neither
lists GPUs, so ``domains`` and ``nodes`` are ``None`` and notes have the hosts. ``blocks`` has those
of each block, which the node list of a job turns into domains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Note, Reading, compose_yaml

MAX_HOSTS = 1_000_000
"""Hosts that one list may have."""

_MOST_BRACKETS = 100_000  # Slurm writes few, whatever the size of the cluster
_MOST_LINES = 200_000
_SHOWN = 64  # blocks in the notes before "... N more"
_CONF = re.compile(
    r"^[ \t]{0,80}(?:BlockName|SwitchName|BlockSizes)=",
    re.IGNORECASE | re.MULTILINE,
)
_YAML = re.compile(r"^[ \t]{0,80}-[ \t]{1,80}topology:", re.MULTILINE)
_PAIR = re.compile(r"([A-Za-z]\w{0,40})=(\S*)", re.ASCII)
_CONF_KEYS = {
    "blockname",
    "blocksizes",
    "switchname",
    "nodes",
    "switches",
    "linkspeed",
}
# Further keys of `scontrol show topology`, whose aggregated blocks are made of the others.
_SHOWN_KEYS = {"blockindex", "blocksize", "level", "aggregatedblock"}
_NAMES = {
    "block",
    "switch",
    "ring",
    "name",
}  # keys of topology.yaml with the name of a thing
_HOST = re.compile(r"\s*((?:[^\s,\[\]]|\[[^\[\]]*\])++)\s*(,|$)")
# A text, or ranges of numbers: first, last, digits.
_Piece = str | list[tuple[int, int, int]]


def recognises(text: str) -> bool:
    return _CONF.search(text) is not None or _YAML.search(text) is not None


def read(text: str) -> Reading:
    """Names of blocks or switches; notes have the number of hosts of each."""
    if _CONF.search(text):
        return _read_conf(text)
    if _YAML.search(text):
        return _read_yaml(text)
    raise TopologyInputError(
        "no BlockName=, SwitchName= or '- topology:' found; pass topology.conf or topology.yaml"
    )


def expand_hosts(text: str) -> list[str]:
    """The names in a list of hosts, in its order: ``tux[08-10],foo`` is four names."""
    names: list[str] = []
    for pieces in _parse_hosts(text, MAX_HOSTS):
        made = [""]
        for piece in pieces:
            ends = [piece] if isinstance(piece, str) else []
            for first, last, width in () if isinstance(piece, str) else piece:
                ends += [f"{n:0{width}}" for n in range(first, last + 1)]
            made = [begin + end for begin in made for end in ends]
        names += made
    return names


def _parse_hosts(text: str, most: int) -> list[list[_Piece]]:
    """Items as texts and ranges in turn; bounded before anything is expanded."""
    # Each comma is one more host at least.
    if text.count(",") >= max(most, 1) or text.count("[") > _MOST_BRACKETS:
        raise TopologyInputError(f"more than {MAX_HOSTS:,} hosts, or {_MOST_BRACKETS:,} brackets")
    found: list[list[_Piece]] = []
    at, more = 0, bool(text.strip())
    while more:
        match = _HOST.match(text, at)
        if match is None:
            raise TopologyInputError(
                f"a host without a name, a blank or an unmatched bracket in {text[at : at + 40]!r}"
            )
        item = match[1]
        found.append(
            [
                _parse_ranges(piece, item) if index % 2 else piece
                for index, piece in enumerate(re.split(r"[\[\]]", item))
            ]
        )
        most -= _count_hosts(found[-1])
        if most < 0:
            raise TopologyInputError(f"more than {MAX_HOSTS:,} hosts, at {item[:40]!r}")
        at, more = match.end(), match[2] == ","
    return found


def _parse_ranges(text: str, item: str) -> list[tuple[int, int, int]]:
    """Ranges of ``0-3,012``: the first of a range has the digits of its numbers."""
    found = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        digits = first + last
        if not (first and last and digits.isascii() and digits.isdigit() and len(digits) <= 36):
            raise TopologyInputError(f"{part[:20]!r} is not a range of numbers in {item[:40]!r}")
        if int(last) < int(first):
            raise TopologyInputError(f"the range {part!r} runs downwards")
        found.append((int(first), int(last), len(first)))
    return found


def _count_hosts(pieces: list[_Piece]) -> int:
    count = 1
    for piece in pieces:
        if not isinstance(piece, str):
            # Bounded at once: products of many digits are slow.
            size = sum(last - first + 1 for first, last, _ in piece)
            count = min(count * size, MAX_HOSTS + 1)
    return count


def _read_conf(text: str) -> Reading:
    outline = _Outline()
    blocks, odd = False, set[str]()
    for line, content in _join_lines(text):
        words = content.split(maxsplit=len(_CONF_KEYS) + len(_SHOWN_KEYS))
        pairs = [_PAIR.fullmatch(word) for word in words]
        values = {pair[1].lower(): pair[2] for pair in pairs if pair}
        if len(values) < len(words):
            raise TopologyInputError(f"expected Name=value, got {content[:60]!r}", line=line)
        if "aggregatedblock" in values:
            continue
        for unknown in sorted(values.keys() - _CONF_KEYS - _SHOWN_KEYS - odd):
            odd.add(unknown)
            outline.notes.append(Note(f"{unknown} is not known and not read", line=line))
        blocks |= "blockname" in values or "blocksizes" in values
        outline.add_sizes(values.get("blocksizes", ""), line)
        for what in ("block", "switch"):
            if f"{what}name" in values:
                # Slurm lets one line stand for several switches with a list of names.
                outline.add(what, values[f"{what}name"], line)
                for key, child in (("nodes", "host"), ("switches", "switch")):
                    if key in values:
                        outline.add_children(values[key], child, line)
    return outline.make_reading("Slurm topology/block" if blocks else "Slurm topology/tree")


def _read_yaml(text: str) -> Reading:
    """Keys that name a thing, and the ``nodes`` and ``children`` after it, at any depth."""
    outline = _Outline()
    pending: list[tuple[str, Any, int]] = [("", one, 1) for one in reversed(compose_yaml(text))]
    # Anchors may name a node any number of times.
    for _ in range(_MOST_LINES):
        if not pending:
            return outline.make_reading("Slurm topology.yaml")
        key, node, line = pending.pop()
        outline.add_key(key, _format_node(node), line)
        items = [("", one, line) for one in node.value] if node.id == "sequence" else []
        if node.id == "mapping":
            items = [(one.value, inner, one.start_mark.line + 1) for one, inner in node.value]
            # Names first: a program may have sorted the keys.
            items.sort(key=lambda item: (item[0] != "topology", item[0] not in _NAMES))
        pending += reversed(items)
    raise TopologyInputError(f"more than {_MOST_LINES:,} values")


def _format_node(node: Any) -> str:
    if node.id == "scalar":
        return str(node.value)
    items = node.value if node.id == "sequence" else ()
    return ",".join(one.value for one in items if one.id == "scalar")


def _join_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, those that end in a backslash joined, by their first number."""
    if text.count("\n") > _MOST_LINES:
        raise TopologyInputError(f"more than {_MOST_LINES:,} lines")
    pieces: list[str] = []
    first = 1
    for line, content in enumerate([*text.split("\n"), ""], 1):
        first = first if pieces else line
        content = content.partition("#")[0].rstrip()
        pieces.append(content.removesuffix("\\"))
        if not content.endswith("\\"):
            if any(pieces):
                yield first, "".join(pieces)
            pieces.clear()


class _Outline:
    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.names: list[str] = []
        self.seen: set[str] = set()
        self.shown = 0
        self.hosts = 0
        self.parent = "hosts"
        # Of each view of the cluster: its blocks, and whether it is the default.
        self.views: list[list[tuple[str, str]]] = [[]]
        self.default: int | None = None

    def add(self, what: str, name: str, line: int) -> None:
        if not name or name in self.seen:
            raise TopologyInputError(f"a second {what} named {name[:40]!r}, or no name", line=line)
        self.seen.add(name)
        self.names.append(name)
        self.parent = f"{what} {name[:80]}"

    def add_children(self, value: str, child: str, line: int) -> None:
        try:
            number = sum(map(_count_hosts, _parse_hosts(value, MAX_HOSTS - self.hosts)))
        except TopologyInputError as error:
            raise TopologyInputError(str(error.args[0]), line=line) from None
        self.hosts += number
        if child == "host" and self.parent.startswith("block "):
            self.views[-1].append((self.names[-1], value))
        self.shown += 1
        if self.shown <= _SHOWN:
            plural = "" if number == 1 else "s" if child == "host" else "es"
            self.notes.append(Note(f"{self.parent}: {number} {child}{plural}", line=line))

    def add_sizes(self, sizes: str, line: int | None) -> None:
        if sizes:
            self.notes.append(Note(f"sizes of blocks: {sizes[:80]} hosts", line=line))

    def add_key(self, key: str, value: str, line: int) -> None:
        if key == "block_sizes":
            self.add_sizes(value, line)
        elif key == "topology":
            if len(self.views) <= _SHOWN:
                self.notes.append(Note(f"topology {value[:80]}", line=line))
            self.seen.clear()  # another view of the same cluster
            self.views.append([])
        elif key == "cluster_default" and value.lower() == "true":
            self.default = len(self.views) - 1
        elif key in _NAMES and value:
            self.add("torus" if key == "name" else key, value, line)
        elif key in {"nodes", "children"} and value:
            self.add_children(value, "host" if key == "nodes" else "switch", line)

    def make_reading(self, kind: str) -> Reading:
        if self.shown > _SHOWN:
            self.notes.append(Note(f"... {self.shown - _SHOWN} more of them"))
        views = [view for view in self.views if view]
        if self.default is not None and self.views[self.default]:
            views = [self.views[self.default]]
        return Reading(
            kind,
            complete=True,
            notes=tuple(self.notes),
            names=tuple(self.names),
            blocks=tuple(views[0]) if len(views) == 1 else (),
            scope="cluster",
        )


# The location of ranks in the environment that Slurm sets for the tasks of a job step.
#
# Source: the manual pages srun(1) and sbatch(1). Rank and task number are taken as equal, as in
# launchers that start one process for each task.

_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_MOST_NODES, _MOST_RANKS = 1_000_000, 2_000_000


def read_nodes(
    environ: Mapping[str, str],
    default: str = "block",
) -> tuple[int, ...] | None:
    """Node of each rank, by position in the list of nodes; ``None`` if unknown. sbatch sets no
    ``SLURM_DISTRIBUTION``, and then ``default`` holds.
    """
    hosts = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    tasks = environ.get("SLURM_TASKS_PER_NODE")
    order = environ.get("SLURM_DISTRIBUTION") or default
    if not hosts or not tasks:
        return None
    if order.lower() == "plane" and "SLURM_DIST_PLANESIZE" in environ:
        order = f"plane={environ['SLURM_DIST_PLANESIZE']}"
    nodes = len(expand_hosts(hosts))
    per_node = _parse_counts(tasks)
    if len(per_node) != nodes:
        raise TopologyInputError(
            f"SLURM_TASKS_PER_NODE={tasks[:40]} has {len(per_node)} nodes, and the list of "
            f"nodes has {nodes}; use both from one job step"
        )
    total = environ.get("SLURM_NTASKS")
    if total and not _NUMBER.fullmatch(total):
        raise TopologyInputError(f"SLURM_NTASKS={total[:40]!r} is not a number")
    if total and int(total) != sum(per_node):
        raise TopologyInputError(
            f"SLURM_NTASKS={total} and SLURM_TASKS_PER_NODE={tasks[:40]}, which is "
            f"{sum(per_node)} tasks; use both from one job step"
        )
    return assign_nodes(per_node, order)


def _parse_counts(text: str) -> list[int]:
    """``8(x4),4`` is five numbers."""
    counts: list[int] = []
    ranks = 0
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise TopologyInputError(
                f"SLURM_TASKS_PER_NODE has {part[:20]!r}; expected numbers like 8(x4),4"
            )
        count, times = int(match[1]), int(match[2] or 1)
        ranks += count * times
        if len(counts) + times > _MOST_NODES or ranks > _MOST_RANKS:
            raise TopologyInputError(
                f"SLURM_TASKS_PER_NODE={text[:40]} is more than {_MOST_RANKS:,} ranks"
            )
        counts += [count] * times
    return counts


def assign_nodes(per_node: Sequence[int], order: str) -> tuple[int, ...] | None:
    """Node of each rank if node i has ``per_node[i]`` of them; ``None`` for an unknown order."""
    # The further parts are about sockets and cores and change no node, except for Pack.
    words = re.split("[:,]", order.strip().lower())
    if "pack" in words:
        return None
    if words[0] == "block":
        turn = max(per_node, default=0)
    elif words[0] == "cyclic":
        turn = 1
    elif words[0].startswith("plane="):
        size = words[0].removeprefix("plane=")
        if not _NUMBER.fullmatch(size) or int(size) < 1:
            raise TopologyInputError(f"the distribution {order[:40]!r} needs a size from 1 up")
        turn = int(size)
    else:
        return None
    left = dict(enumerate(per_node))
    ranks: list[int] = []
    while left := {node: count for node, count in left.items() if count > 0}:
        for node, count in left.items():
            ranks += [node] * min(turn, count)
            left[node] = count - turn
    return tuple(ranks)
