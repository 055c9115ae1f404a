"""What stands above the nodes of a panel: its title, verdict, and how its groups fall."""

from __future__ import annotations

from meshplan.lint._drawing._panel import Panel
from meshplan.lint._drawing._text import BOLD, clean, escape, shorten, signature_text, width, wrap
from meshplan.lint._drawing._words import hazard_lines, panel_title, summary, verdict

__all__ = ["PANEL_WIDTH", "header"]

PANEL_WIDTH = 440
_TITLE, _TEXT, _CHIP = 15, 12, 11
_SWATCH = 12
_LINE = 18
_MAX_WAYS = 8


def header(panel: Panel, room: int) -> tuple[str, int]:
    """The header as SVG, and its height in pixels; ``room``: width of the panel."""
    chip = verdict(panel)
    said = "" if chip is None else chip[1]
    taken = round(width(said, _CHIP)) + 16 if said else 0
    title = shorten(panel_title(panel), BOLD * _TITLE, room - taken - 12)
    parts = [f'<text y="15" font-size="{_TITLE}" font-weight="bold">{escape(title)}</text>\n']
    if chip is not None:
        x = round(width(title, BOLD * _TITLE)) + 12
        parts.append(
            f'<rect class="chip-{chip[0]}" x="{x}" width="{taken}" height="20" rx="10"/>'
            f'<text class="chip" x="{x + taken / 2:g}" y="14" font-size="{_CHIP}" '
            f'text-anchor="middle">{said}</text>\n'
        )
    y = 20
    for line in wrap(summary(panel), _TEXT, room, 2):
        y += _LINE
        parts.append(f'<text y="{y - 2}">{escape(line)}</text>\n')
    if panel.falls.ways:
        text, y = _ways(panel, room, y)
        parts.append(text)
    said_of_hazards = [line for hazard in panel.hazards for line in hazard_lines(hazard)]
    for said in [*dict.fromkeys(said_of_hazards), panel.left_out]:
        for line in wrap(clean(said), _TEXT, room, 2) if said else ():
            y += _LINE - 1
            parts.append(f'<text class="soft" y="{y - 2}">{escape(line)}</text>\n')
    return "".join(parts), y + 12


def _ways(panel: Panel, room: int, y: int) -> tuple[str, int]:
    """The ways in which groups fall on nodes, each with how many groups have it."""
    ways = panel.falls.ways
    y += _LINE
    said = "ranks per node:"
    parts = [f'<text y="{y - 2}">{said}</text>\n']
    x = round(width(said, _TEXT)) + 4
    for i, way in enumerate(ways[:_MAX_WAYS]):
        said = f"{way.groups} x {signature_text(way.signature)}"
        if i == _MAX_WAYS - 1 and len(ways) > _MAX_WAYS:
            rest = sum(other.groups for other in ways[i:])
            said = f"{rest} in {len(ways) - i} other ways"
        said = shorten(said, _TEXT, room - _SWATCH - 6)
        step = _SWATCH + 6 + round(width(said, _TEXT)) + 14
        if x and x + step - 14 > room:
            x, y = 0, y + _LINE
        fill = ' fill="url(#mp-j)"' if way.marked else ' class="grey"'
        parts.append(
            f'<rect x="{x}" y="{y - 12}" width="{_SWATCH}" height="{_SWATCH}"{fill}/>'
            f'<text x="{x + _SWATCH + 6}" y="{y - 2}">{escape(said)}</text>\n'
        )
        x += step
    return "".join(parts), y
