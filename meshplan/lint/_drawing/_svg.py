"""A picture of a mesh as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.layout import Layout
from meshplan.lint._drawing._cells import Cells, cells
from meshplan.lint._drawing._header import PANEL_WIDTH, header
from meshplan.lint._drawing._legend import legend
from meshplan.lint._drawing._panel import Picture, picture
from meshplan.lint._drawing._style import FONT, css, patterns
from meshplan.lint._drawing._text import BOLD, attribute, clean, escape, shorten, wrap
from meshplan.planner import Hazard
from meshplan.topology import Topology

__all__ = ["draw_svg", "headline", "write_svg"]

_MARGIN = 20
_PANEL_GAP = 36
_WIDEST = 1500
_TITLE, _TEXT = 18, 12


def draw_svg(
    layout: Layout,
    topology: Topology,
    *,
    axes: Sequence[str | Sequence[str]],
    hazards: Sequence[Hazard] = (),
    title: str = "",
    hosts: Sequence[str] = (),
) -> str:
    """The ranks of a mesh on their nodes and domains, coloured by group, as one SVG document.

    A panel for each of ``axes`` and for each other set of axes that a hazard reduces over. Groups
    that touch never have one colour; groups that fall on nodes unlike most of their siblings are
    hatched and outlined. Of a mesh that is too large a sample of nodes is drawn, and the picture
    says so. The same arguments give the same text.

    Args:
        layout: the mesh.
        topology: where ranks sit.
        axes: the reduced axes of each panel: a label, or several labels of one flattened
            reduction. Axes of size 1 are left out. Without ``axes`` and ``hazards``: each axis.
        hazards: what `meshplan.planner.hazards` has found for this mesh and topology.
        title: headline; the mesh if empty.
        hosts: name of the host of each rank, or empty.

    Raises:
        AxisNameError: the mesh has no such axis.
        TopologyError: the topology lacks a rank of the mesh.
    """
    return write_svg(picture(layout, topology, axes, hazards, hosts), title)


@dataclass(frozen=True, slots=True)
class _Drawn:
    header: str
    header_height: int
    cells: Cells
    bad: bool

    @property
    def width(self) -> int:
        return max(PANEL_WIDTH, self.cells.width)


def write_svg(found: Picture, title: str, *, heading: bool = True) -> str:
    """The SVG document of a picture; without ``heading``, the page that it is in says the title."""
    drawn = []
    for panel in found.panels:
        body = cells(panel, numbers=found.numbers)
        text, height = header(panel, max(PANEL_WIDTH, body.width))
        drawn.append(_Drawn(text, height, body, panel.harmful))
    rows = _rows(drawn)
    width = max(sum(one.width + _PANEL_GAP for one in row) - _PANEL_GAP for row in rows)
    top, y = _heading(found, title, width, heading)
    parts = [top]
    for row in rows:
        x = _MARGIN
        below = max(one.header_height for one in row)
        for one in row:
            bad = ' class="bad"' if one.bad else ""
            parts.append(
                f'<g transform="translate({x},{y})"{bad}>\n{one.header}'
                f'<g transform="translate(0,{below})">\n{one.cells.text}</g>\n</g>\n'
            )
            x += one.width + _PANEL_GAP
        y += below + max(one.cells.height for one in row) + _PANEL_GAP
    key, height = legend(found, width)
    parts.append(f'<g transform="translate({_MARGIN},{y - _PANEL_GAP // 2})">\n{key}</g>\n')
    y += height - _PANEL_GAP // 2 + _MARGIN
    name = attribute(headline(found, title))
    colours = sorted({number for one in drawn for number in one.cells.colours})
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mp" width="{width + 2 * _MARGIN}" '
        f'height="{y}" viewBox="0 0 {width + 2 * _MARGIN} {y}" '
        f"font-family='{FONT}' font-size=\"{_TEXT}\" aria-label={name}>\n"
        f"<style>\n{css(colours)}</style>\n<defs>\n{patterns(colours)}</defs>\n"
        f'<rect class="page" width="100%" height="100%"/>\n{"".join(parts)}</svg>\n'
    )


def headline(found: Picture, title: str) -> str:
    """The title, or the mesh; of a very long one the beginning and the end."""
    return shorten(clean(title).strip() or found.subject, _TEXT, 5000)


def _rows(drawn: Sequence[_Drawn]) -> list[list[_Drawn]]:
    """Panels side by side as long as they fit."""
    rows: list[list[_Drawn]] = [[]]
    left = _WIDEST
    for one in drawn:
        if rows[-1] and one.width > left:
            rows.append([])
            left = _WIDEST
        rows[-1].append(one)
        left -= one.width + _PANEL_GAP
    return rows


def _heading(found: Picture, title: str, width: int, shown: bool) -> tuple[str, int]:
    """The title if it is to be shown, what is not drawn, and where the panels begin."""
    name = headline(found, title)
    said = [found.subject] if shown and name != found.subject else []
    if found.left_out:
        said.append(f"not drawn, to keep the picture small: groups of {', '.join(found.left_out)}")
    lines = [(line, _TITLE) for line in wrap(name, BOLD * _TITLE, width, 3)] if shown else []
    lines += [(line, _TEXT) for text in said for line in wrap(text, _TEXT, width, 3)]
    y = _MARGIN
    text = ""
    for line, size in lines:
        y += size + (6 if size == _TITLE else 9)
        style = 'font-size="18" font-weight="bold"' if size == _TITLE else 'class="soft"'
        text += f'<text x="{_MARGIN}" y="{y - 4}" {style}>{escape(line)}</text>\n'
    return text, y + (18 if text else 0)
