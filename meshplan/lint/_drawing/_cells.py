"""The nodes of a panel as SVG: boxes, domains, and the ranks, coloured by group."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.lint._drawing._colours import assign
from meshplan.lint._drawing._geometry import Box, Cell, Grid, PlacedNode, outline, place
from meshplan.lint._drawing._header import PANEL_WIDTH
from meshplan.lint._drawing._panel import Panel
from meshplan.lint._drawing._text import escape, short_forms, shorten, width
from meshplan.lint._drawing._words import group_text, node_name, rank_text

__all__ = ["Cells", "cells"]

_NUMBER, _NAME = 11, 11
NEWLINE = "\n"


@dataclass(frozen=True, slots=True)
class Cells:
    """The nodes of a panel, written.

    Attributes:
        text: SVG.
        width, height: in pixels.
        colours: numbers of the colours that are used.
    """

    text: str
    width: int
    height: int
    colours: frozenset[int]


def cells(panel: Panel, *, numbers: bool) -> Cells:
    """Write the nodes of a panel; with ``numbers`` each rank has its number and its own text."""
    grid = _grid(panel, numbers)
    groups: dict[int | None, list[tuple[Cell, PlacedNode]]] = {}
    for node in grid.nodes:
        for cell in node.cells:
            groups.setdefault(panel.group_of(cell.rank), []).append((cell, node))
    colours = assign(
        (cell.x, cell.y, group)
        for group, members in groups.items()
        if group is not None
        for cell, _ in members
    )
    text = [_boxes(panel, grid), '<g class="cells">\n']
    for group, members in groups.items():
        if group is None:
            said = "not in the mesh"
            fill = "out"
        else:
            said = group_text(panel, group)
            fill = f"{'j' if panel.falls.marked[group] else 'k'}{colours[group]}"
        text.append(f'<g class="{fill}">')
        if numbers:
            text += [_cell(panel, grid, cell, node, said) for cell, node in members]
        else:
            text.append(_many([cell for cell, _ in members], grid, said))
        if fill.startswith("j"):
            border = outline((cell for cell, _ in members), grid.cell, grid.gap)
            text.append(f'<path class="edge" d="{border}"/>')
        text.append("</g>\n")
    text.append("</g>\n")
    return Cells("".join(text), grid.width, grid.height, frozenset(colours.values()))


def _grid(panel: Panel, numbers: bool) -> Grid:
    """The places of all nodes; few cells are drawn larger, to fill the panel."""
    narrowest = round(width(node_name(panel.nodes[-1]), _NAME)) + 14
    if not numbers:
        return place(panel.nodes, cell=(10, 10), gap=2, header=20, narrowest=narrowest)
    longest = max(max(node.ranks) for node in panel.nodes)
    least = max(26, round(width(str(longest), _NUMBER)) + 8)
    grid = place(panel.nodes, cell=(least, 22), gap=3, header=22, narrowest=narrowest)
    in_row = len({cell.x for node in grid.nodes for cell in node.cells})
    more = min(least, (PANEL_WIDTH - grid.width) // in_row)
    if more < 4:
        return grid
    return place(panel.nodes, cell=(least + more, 28), gap=3, header=22, narrowest=narrowest)


def _boxes(panel: Panel, grid: Grid) -> str:
    short = short_forms(name for node in panel.nodes for name in node.hosts)
    domains = panel.domains_known
    parts = []
    for placed in grid.nodes:
        parts.append(_rect(placed.box, "node", ' rx="5"'))
        parts.append(_label(placed, short))
        if domains:
            parts += [_rect(well, "well", ' rx="3"') for well in placed.wells]
        parts.append("\n")
    return "".join(parts)


def _label(placed: PlacedNode, short: dict[str, tuple[str, ...]]) -> str:
    """The name of a node, and of its host where there is room."""
    node, box = placed.node, placed.box
    name = node_name(node)
    text = f'<text x="{box.x + 7}" y="{box.y + 15}" font-size="{_NAME}">{name}</text>'
    forms: tuple[str, ...] = ()
    if node.left_out:
        forms = (f"{node.left_out} more ranks", f"+{node.left_out}")
    elif node.hosts:
        forms = short[node.hosts[0]] if len(node.hosts) == 1 else (f"{len(node.hosts)} hosts",)
    room = box.width - 24 - width(name, _NAME)
    if forms and room >= width("…12", _NAME):
        hosts = ", ".join(shorten(host, _NAME, 400) for host in node.hosts[:8])
        full = f"<title>{escape(hosts)}</title>" if hosts else ""
        fits = next((form for form in forms if width(form, _NAME) <= room), forms[-1])
        shown = escape(shorten(fits, _NAME, room))
        text += (
            f'<text x="{box.x + box.width - 7}" y="{box.y + 15}" class="soft" '
            f'font-size="{_NAME}" text-anchor="end">{full}{shown}</text>'
        )
    return text


def _cell(panel: Panel, grid: Grid, cell: Cell, placed: PlacedNode, said: str) -> str:
    w, h = grid.cell
    lines = rank_text(panel, cell.rank, placed.node)
    off = ' class="off"'
    if cell.rank in panel.coordinates:
        lines.append(said)
        off = ""
    return (
        f'<rect x="{cell.x}" y="{cell.y}" width="{w}" height="{h}">'
        f"<title>{NEWLINE.join(map(escape, lines))}</title></rect>"
        f'<text x="{cell.x + w / 2:g}" y="{cell.y + h // 2 + 4}"{off}>{cell.rank}</text>'
    )


def _many(here: list[Cell], grid: Grid, said: str) -> str:
    w, h = grid.cell
    path = "".join(f"M{c.x} {c.y}h{w}v{h}h-{w}z" for c in here)
    return f'<path d="{path}"><title>{escape(said)}</title></path>'


def _rect(box: Box, name: str, more: str) -> str:
    return (
        f'<rect class="{name}" x="{box.x}" y="{box.y}" width="{box.width}" '
        f'height="{box.height}"{more}/>'
    )
