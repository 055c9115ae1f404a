"""Slurm's ``topology.conf`` and ``topology.yaml``, and its lists of hosts.

Source: the manual pages topology.conf(5) and topology.yaml(5) of Slurm, and those of scontrol(1)
for lists of hosts. A block of topology/block is what one NVLink switch system joins, a switch of
topology/tree is one of the network: neither tells GPUs, so ``domains`` and ``nodes`` are ``None``
and the hosts are told in notes.

``topology.yaml`` is read line by line, as the standard library has no YAML: ``key: value``,
``- item`` and comments by indentation, and nothing else of YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Note, Reading
from meshplan.topology.formats._hostlist import MOST, count, hostlist, parsed

__all__ = ["hostlist", "read", "recognises"]

_CONF = re.compile(
    r"^[ \t]{0,80}(?:BlockName|SwitchName|BlockSizes)=", re.IGNORECASE | re.MULTILINE
)
_YAML = re.compile(r"^[ \t]{0,80}-[ \t]{1,80}topology:", re.MULTILINE)
_PAIR = re.compile(r"([A-Za-z]\w{0,40})=(\S*)", re.ASCII)
_ITEM = re.compile(r"( *)((?:- +)*)(?:([A-Za-z_]\w{0,40}):(?:\s+(.*))?|(\S.*))$", re.ASCII)
_CONF_KEYS = {"blockname", "blocksizes", "switchname", "nodes", "switches", "linkspeed"}
_LINES = 200_000
_SHOWN = 64  # blocks in the notes before "... N more"


def recognises(text: str) -> bool:
    """Whether there is a block, a switch or a named topology in ``text``."""
    return _CONF.search(text) is not None or _YAML.search(text) is not None


def read(text: str) -> Reading:
    """Names of blocks or switches; notes tell how many hosts each has.

    Args:
        text: ``topology.conf`` or ``topology.yaml``.

    Raises:
        TopologyInputError: neither file, a line that is not understood, or a list of hosts that
            is none.
    """
    if _CONF.search(text):
        return _conf(text)
    if _YAML.search(text):
        return _yaml(text)
    raise TopologyInputError(
        "no BlockName=, SwitchName= or '- topology:' found; give topology.conf or topology.yaml"
    )


def _conf(text: str) -> Reading:
    found = _Found()
    blocks, odd = False, set[str]()
    for line, content in _logical(text):
        words = content.split(maxsplit=len(_CONF_KEYS))
        pairs = [_PAIR.fullmatch(word) for word in words]
        told = {pair[1].lower(): pair[2] for pair in pairs if pair}
        if len(told) < len(words):
            raise TopologyInputError(f"expected Name=value, found {content[:60]!r}", line=line)
        for unknown in sorted(told.keys() - _CONF_KEYS - odd):
            odd.add(unknown)
            found.notes.append(Note(f"{unknown} is not known and not read", line=line))
        blocks |= "blockname" in told or "blocksizes" in told
        if "blocksizes" in told:
            found.sizes(told["blocksizes"], line)
        for what in ("block", "switch"):
            if f"{what}name" in told:
                # Slurm lets one line stand for several switches with a list of names.
                found.add(what, told[f"{what}name"], line)
                for key, child in (("nodes", "host"), ("switches", "switch")):
                    if key in told:
                        found.count(told[key], child, line)
    return found.reading("Slurm topology/block" if blocks else "Slurm topology/tree")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, by number, with their indentation."""
    line, counted = 1, 0
    for number, match in enumerate(re.finditer(r"\S[^\n]*", text)):
        line += text.count("\n", counted, match.start())
        counted = match.start()
        if number == _LINES:
            raise TopologyInputError(f"more than {_LINES:,} lines", line=line)
        yield line, text[text.rfind("\n", 0, counted) + 1 : match.end()].rstrip()


def _logical(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, those that end in a backslash joined, by their first number."""
    pieces: list[str] = []
    first = last = 0
    for line, content in _lines(text):
        if pieces and line > last + 1:  # a blank line ends what a backslash goes on with
            yield first, "".join(pieces)
            pieces = []
        content = content.partition("#")[0].rstrip()
        first, last = (first if pieces else line), line
        pieces.append(content.removesuffix("\\"))
        if not content.endswith("\\"):
            if any(pieces):
                yield first, "".join(pieces)
            pieces = []
    if any(pieces):
        yield first, "".join(pieces)


def _yaml(text: str) -> Reading:
    """Keys that name a thing, and ``nodes`` and ``children`` after it, whatever they lie in."""
    found = _Found()
    sizes: list[str] | None = None
    for line, content in _lines(text):
        content = re.split(r"(?:^|\s)#", content, maxsplit=1)[0].rstrip()
        if not content or content in {"---", "..."}:
            continue
        key, value = _key(content, line)
        if not key and sizes is not None:
            sizes.append(value)
            continue
        found.sizes(",".join(sizes or ()), line - 1)
        sizes = [] if key == "block_sizes" and not value else None
        found.key(key, value, line)
    found.sizes(",".join(sizes or ()), None)
    return found.reading("Slurm topology.yaml")


def _key(content: str, line: int) -> tuple[str, str]:
    """Key and value of a line; the key is empty for an item of a list."""
    item = _ITEM.match(content)
    if "\t" in content[: len(content) - len(content.lstrip())]:
        raise TopologyInputError("YAML is indented by blanks, found a tab", line=line)
    if item is None or (not item[3] and not item[2]):
        raise TopologyInputError(f"expected 'key: value', found {content[:60]!r}", line=line)
    value = (item[4] or item[5] or "").strip().strip("'\"")
    if value.startswith(tuple("{&*|>!%@")):
        raise TopologyInputError(f"{value[0]} of YAML is not read here", line=line)
    return item[3] or "", value


class _Found:
    """Names in order, with notes on what each has."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.names: list[str] = []
        self.names_seen: set[str] = set()
        self.shown = 0
        self.topologies = 0
        self.named = 0
        self.what = ""

    def add(self, what: str, name: str, line: int) -> None:
        if not name or name in self.names_seen:
            raise TopologyInputError(f"a second {what} named {name[:40]!r}, or no name", line=line)
        self.names_seen.add(name)
        self.names.append(name)
        self.what = f"{what} {name[:80]}"

    def count(self, value: str, child: str, line: int) -> None:
        try:
            number = sum(map(count, parsed(value, MOST - self.named)))
        except TopologyInputError as error:
            raise TopologyInputError(str(error).partition(": ")[2], line=line) from None
        self.named += number
        self.shown += 1
        if self.shown <= _SHOWN:
            many = "" if number == 1 else "s" if child == "host" else "es"
            told = f"{self.what or 'hosts'}: {number} {child}{many}"
            self.notes.append(Note(told, line=line))

    def sizes(self, sizes: str, line: int | None) -> None:
        if sizes:
            self.notes.append(Note(f"sizes of blocks: {sizes[:80]} hosts", line=line))

    def key(self, key: str, value: str, line: int) -> None:
        """One line of topology.yaml."""
        if key == "block_sizes":
            self.sizes(value.strip("[]"), line)
        elif key == "topology":
            self.topologies += 1
            if self.topologies <= _SHOWN:
                self.notes.append(Note(f"topology {value[:80]}", line=line))
            self.names_seen.clear()  # another view of the same cluster
        elif key in {"block", "switch", "ring", "name"} and value:
            self.add("torus" if key == "name" else key, value, line)
        elif key in {"nodes", "children"} and value:
            self.count(value, "host" if key == "nodes" else "switch", line)

    def reading(self, kind: str) -> Reading:
        if self.shown > _SHOWN:
            self.notes.append(Note(f"... {self.shown - _SHOWN} more of them"))
        return Reading(
            kind,
            complete=True,
            notes=tuple(self.notes),
            names=tuple(self.names),
            scope="cluster",
        )
