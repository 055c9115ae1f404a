"""The colours and lines of pictures, on light and on dark ground."""

from __future__ import annotations

from collections.abc import Iterable

from meshplan.lint._drawing._colours import colour

__all__ = ["FONT", "HATCH", "css", "patterns"]

FONT = 'system-ui,"Segoe UI","DejaVu Sans",sans-serif'

# Diagonal strokes of a tile of 6 pixels, with the ends that reach in from its neighbours.
HATCH = "M-1 1l2-2M0 6l6-6M5 7l2-2"

_LIGHT = """\
.mp .page{fill:#fff}
.mp text{fill:#1b1f24}
.mp .soft{fill:#57606a}
.mp .node{fill:#fff;stroke:#8c959f}
.mp .well{fill:#e6eaef}
.mp .out{fill:none;stroke:#8c959f;stroke-dasharray:2 2}
.mp .edge{fill:none;stroke:#57606a;stroke-linecap:square}
.mp .bad .edge{stroke:#b3001b;stroke-width:2.5}
.mp .rule{stroke:#d0d7de}
.mp .grey{fill:#d0d7de}
.mp .chip-bad{fill:#b3001b}
.mp .chip-odd{fill:#7a5200}
.mp .chip-good{fill:#0b6b43}
.mp text.chip{fill:#fff}
.mp .cells text{fill:#14171a;stroke:none;text-anchor:middle;font-size:11px;pointer-events:none}
.mp .cells text.off{fill:#57606a}
.mp .cells:hover g{opacity:.25}
.mp .cells:hover g:hover{opacity:1}
"""

_DARK = """\
@media (prefers-color-scheme:dark){
.mp .page{fill:#0f1318}
.mp text{fill:#e6edf3}
.mp .soft{fill:#9da7b3}
.mp .node{fill:#161b22;stroke:#6e7681}
.mp .well{fill:#2a313a}
.mp .out{stroke:#6e7681}
.mp .edge{stroke:#b1bac4}
.mp .bad .edge{stroke:#ff5c5c}
.mp .rule{stroke:#30363d}
.mp .cells text{fill:#14171a}
.mp .cells text.off{fill:#9da7b3}
}
"""


def css(colours: Iterable[int]) -> str:
    """The style sheet of a picture that uses these colours."""
    rules = [f".mp .k{n}{{fill:{colour(n)}}}\n.mp .j{n}{{fill:url(#mp-j{n})}}\n" for n in colours]
    return _LIGHT + "".join(rules) + _DARK


def patterns(colours: Iterable[int]) -> str:
    """The hatched fills in these colours, and the grey one of legends."""
    tiles = [("mp-j", "#d0d7de"), *((f"mp-j{n}", colour(n)) for n in colours)]
    return "".join(
        f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{fill}"/>'
        f'<path d="{HATCH}" stroke="#14171a" stroke-width="1.1" stroke-opacity=".3"/>'
        "</pattern>\n"
        for name, fill in tiles
    )
