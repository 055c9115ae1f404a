"""What a picture says in words: of a panel, a group, a rank, a hazard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from meshplan.lint._drawing._nodes import Node
from meshplan.lint._drawing._panel import Panel, axes_name, axis_name
from meshplan.lint._drawing._text import ranks_text, shorten, signature_text
from meshplan.planner import Hazard

__all__ = [
    "Mood",
    "group_name",
    "group_text",
    "hazard_lines",
    "members_text",
    "node_name",
    "panel_title",
    "rank_text",
    "summary",
    "verdict",
]

Mood = Literal["bad", "odd", "good"]

# Members of larger groups are not all looked at for a line of text.
_MANY = 5000
_MAX_AXES = 8


def panel_title(panel: Panel) -> str:
    """``groups of fsdp``."""
    return f"groups of {axes_name(panel.layout, panel.axes)}"


def verdict(panel: Panel) -> tuple[Mood, str] | None:
    """The worst verdict of the panel's hazards in a few words; ``None`` without hazards."""
    verdicts = {hazard.verdict for hazard in panel.hazards}
    if "may differ" in verdicts:
        return "bad", "siblings may differ"
    if "unknown topology" in verdicts:
        return "odd", "unknown: may differ"
    return ("good", "siblings alike in the model") if verdicts else None


def summary(panel: Panel) -> str:
    """How many groups there are, and how many of them fall unlike most."""
    count, size = panel.falls.members.shape
    text = f"{_count(count, 'group')} of {_count(size, 'rank')}"
    ways = panel.falls.ways
    if not ways:
        return f"{text}; how they fall on nodes is unknown"
    marked = int(panel.falls.marked.sum())
    if marked:
        plain = {way.signature for way in ways if not way.marked}
        usual = signature_text(plain.pop()) if len(plain) == 1 else "most of their siblings"
        return f"{text}; {marked} of {count} {'falls' if marked == 1 else 'fall'} unlike {usual}"
    distinct = len({way.signature for way in ways})
    if distinct > 1:
        return f"{text}; they fall on nodes in {distinct} ways"
    return f"{text}; all fall on nodes alike" if count > 1 else text


def hazard_lines(hazard: Hazard) -> list[str]:
    """A hazard in short lines; its own text says more."""
    who = f"{hazard.siblings} siblings along {', '.join(hazard.along)} must agree"
    if hazard.verdict == "unknown topology":
        return [f"{who}; order unknown"]
    if hazard.verdict == "none":
        names = " and ".join(name for name, _ in hazard.classes)
        return [f"{who}; {names} add alike in all of them"]
    orders = ", ".join(f"{count} by {name}" for name, count in hazard.classes if count > 1)
    lines = [f"{who}; orders: {orders}"]
    how = f"{hazard.algorithm}" if hazard.chunk is None else f"{hazard.algorithm}, a chunk"
    for example in hazard.examples:
        lines.append(f"{how}, ranks {ranks_text(example.ranks, 3)}: {example.expression}")
    return lines


def group_name(panel: Panel, group: int) -> str:
    """The coordinate of a group along the other axes, ``ddp=1``."""
    where = []
    for i in reversed(panel.outer):
        group, index = divmod(group, panel.layout.sizes[i])
        where.append((i, index))
    return _coordinate(panel, where[::-1]) or "all"


def members_text(panel: Panel, group: int) -> str:
    """The ranks of a group, ``5 to 9``."""
    members = panel.falls.members[group]
    if len(members) <= _MANY:
        return ranks_text(members.tolist())
    return f"{ranks_text(members[:9].tolist())} ({len(members)})"


def group_text(panel: Panel, group: int) -> str:
    """``ddp=1: ranks 5 to 9, on nodes (3, 2), unlike most siblings``."""
    text = f"{group_name(panel, group)}: ranks {members_text(panel, group)}"
    if not panel.falls.ways:
        return text
    way = panel.falls.ways[int(panel.falls.way[group])]
    text += f", on nodes {signature_text(way.signature)}"
    return text + (", unlike most siblings" if way.marked else "")


def rank_text(panel: Panel, rank: int, node: Node) -> list[str]:
    """A rank, its coordinate and its node, line by line."""
    coordinate = panel.coordinates.get(rank)
    where = "not in the mesh" if coordinate is None else _coordinate(panel, enumerate(coordinate))
    place = node_name(node)
    if panel.domains_known:
        place += f", domain {next(k for k, d in enumerate(node.domains) if rank in d)}"
    host = panel.hosts[rank] if rank < len(panel.hosts) else ""
    if host:
        place += f", host {shorten(host, 11, 600)}"
    return [f"rank {rank}: {where or 'the only one'}", place]


def node_name(node: Node) -> str:
    """``node 3``, or that it is not known."""
    return "nodes unknown" if node.number is None else f"node {node.number}"


def _coordinate(panel: Panel, indices: Iterable[tuple[int, int]]) -> str:
    """``ddp=1, fsdp=2``: of axes of size 1 nothing, of very many axes the first."""
    sized = [(i, index) for i, index in indices if panel.layout.sizes[i] > 1]
    text = ", ".join(f"{axis_name(panel.layout, i)}={index}" for i, index in sized[:_MAX_AXES])
    return f"{text}, …" if len(sized) > _MAX_AXES else text


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
