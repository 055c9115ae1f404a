"""What the boxes, colours and hatchings of a picture mean."""

from __future__ import annotations

from meshplan.lint._drawing._colours import PALETTE
from meshplan.lint._drawing._panel import Picture
from meshplan.lint._drawing._text import width

__all__ = ["legend"]

_TEXT = 12
_LINE = 22


def legend(found: Picture, room: int) -> tuple[str, int]:
    """The legend as SVG, and its height; ``room``: width of the picture."""
    entries = []
    panels = found.panels
    if panels[0].nodes[0].number is not None:
        entries.append(('<rect class="node" x="1" y="1" width="20" height="12" rx="3"/>', "node"))
    if panels[0].domains_known:
        entries.append(
            ('<rect class="well" width="22" height="14" rx="2"/>', "domain (NVLink, xGMI)")
        )
    fills = "".join(
        f'<rect x="{8 * i}" width="7" height="14" fill="{colour}"/>'
        for i, colour in enumerate(PALETTE[:3])
    )
    repeat = any(len(panel.falls.members) > len(PALETTE) for panel in panels)
    more = ", colours come again" if repeat else ""
    entries.append((fills, f"one colour: ranks of one group{more}"))
    if any(bool(panel.falls.marked.any()) for panel in panels):
        hatched = '<rect x="1" y="1" width="20" height="12" fill="url(#mp-j)"/>'
        edge = '<path class="edge" d="M1 1h20v12h-20z"/>'
        harmful = any(panel.harmful for panel in panels)
        if harmful:
            entries.append(
                (
                    f'{hatched}<g class="bad">{edge}</g>',
                    "unlike its siblings: may add in another order",
                )
            )
        if any(bool(p.falls.marked.any()) and not p.harmful for p in panels):
            entries.append((hatched + edge, "falls on nodes unlike most groups"))
    if any(
        rank not in panel.coordinates
        for panel in panels
        for node in panel.nodes
        for rank in node.ranks
    ):
        entries.append(
            ('<rect class="out" x="1" y="1" width="20" height="12"/>', "rank not in the mesh")
        )
    parts = [f'<path class="rule" d="M0 0.5h{room}"/>\n']
    x, y = 0, 14
    for mark, said in entries:
        step = 30 + round(width(said, _TEXT))
        if x and x + step > room:
            x, y = 0, y + _LINE
        parts.append(
            f'<g transform="translate({x},{y})">{mark}<text x="30" y="11">{said}</text></g>\n'
        )
        x += step + 22
    return "".join(parts), y + 18
