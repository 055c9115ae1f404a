"""Pictures of a mesh: ranks on nodes and domains, coloured by group, jagged siblings marked."""

from __future__ import annotations

from meshplan.lint._drawing._html import draw_html as draw_html
from meshplan.lint._drawing._svg import draw_svg as draw_svg

__all__ = ["draw_html", "draw_svg"]
