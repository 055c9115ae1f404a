"""Slurm's lists of hosts, as the manual page of scontrol(1) writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshplan.errors import TopologyInputError

__all__ = ["MOST", "count", "hostlist", "parsed"]

MOST = 1_000_000  # hosts
_BRACKETS = 100_000  # Slurm writes few, whatever the size of the cluster
_Range = tuple[int, int, int]  # first, last, digits


def hostlist(text: str) -> list[str]:
    """Names that a list of hosts stands for, in its order: ``tux[08-10],foo`` is four names.

    Args:
        text: as Slurm writes it.

    Raises:
        TopologyInputError: brackets that are nested or left open, a range that is none, or more
            than 1,000,000 names.
    """
    names: list[str] = []
    for pieces in parsed(text, MOST):
        made = [""]
        for piece in pieces:
            ends = [piece] if isinstance(piece, str) else _numbers(piece)
            made = [begin + end for begin in made for end in ends]
        names += made
    return names


def parsed(text: str, most: int) -> list[list[str | list[_Range]]]:
    """Items as texts and ranges by turns; bounded before anything is expanded."""
    # Each comma is one more host at least.
    if text.count(",") >= max(most, 1) or text.count("[") > _BRACKETS:
        raise TopologyInputError(f"more than {MOST:,} hosts, or {_BRACKETS:,} brackets")
    found = []
    for item in _items(text):
        pieces: list[str | list[_Range]] = []
        for index, piece in enumerate(re.split(r"[\[\]]", item)):
            pieces.append(_ranges(piece, item) if index % 2 else piece)
        most -= count(pieces)
        if most < 0:
            raise TopologyInputError(f"more than {MOST:,} hosts, at {item[:40]!r}")
        found.append(pieces)
    return found


def count(pieces: list[str | list[_Range]]) -> int:
    made = 1
    for piece in pieces:
        if not isinstance(piece, str):
            # No more than is needed to see that it is too much: products of many digits are slow.
            made = min(made * sum(last - first + 1 for first, last, _ in piece), MOST + 1)
    return made


def _numbers(ranges: list[_Range]) -> list[str]:
    return [
        f"{number:0{width}}" for first, last, width in ranges for number in range(first, last + 1)
    ]


def _items(text: str) -> Iterator[str]:
    """Parts between commas that are not in brackets; blanks around them do not count."""
    begin, inside = 0, False
    for match in re.finditer(r"[\[\],]", text):
        if match[0] == ",":
            if not inside:
                yield _item(text[begin : match.start()])
                begin = match.end()
        elif inside is (match[0] == "["):
            raise TopologyInputError(f"brackets that do not match in {text[:40]!r}")
        else:
            inside = not inside
    if inside:
        raise TopologyInputError(f"a bracket is left open in {text[:40]!r}")
    if text.strip():
        yield _item(text[begin:])


def _item(item: str) -> str:
    item = item.strip()
    if not item or any(character.isspace() for character in item):
        raise TopologyInputError(f"a name of a host is empty or has a blank in it: {item[:40]!r}")
    return item


def _ranges(text: str, item: str) -> list[_Range]:
    """Ranges of ``0-3,012``: the first of a range tells the digits of its numbers."""
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
