"""Colours of groups: told apart by the colour-blind, and never the same on groups that touch.

The first eight are the light scheme of Paul Tol ("Colour Schemes", technical note SRON/EPS/TN/
09-002), made for cells with dark text on them, with violet in the place of olive, and in the order
that puts the largest differences between one and the next. Further ones go round the hues.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable
from itertools import count, pairwise

__all__ = ["PALETTE", "assign", "colour"]

PALETTE = (
    "#77aadd",
    "#eedd88",
    "#99ddff",
    "#ee8866",
    "#9f8ff0",
    "#ffaabb",
    "#bbcc33",
    "#44bb99",
)

_GOLDEN = (5**0.5 - 1) / 2


def colour(number: int) -> str:
    """Colour ``number`` as ``#rrggbb``; light enough for dark text."""
    if number < len(PALETTE):
        return PALETTE[number]
    lightness = (0.84, 0.77, 0.71)[number % 3]
    red, green, blue = colorsys.hls_to_rgb(number * _GOLDEN % 1, lightness, 0.55)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def assign(cells: Iterable[tuple[float, float, int]]) -> dict[int, int]:
    """A colour number for each group.

    Args:
        cells: x, y and group of each cell. Neighbours are the next cells in the same row and in
            the same column, also across the gap between two nodes.

    Returns:
        Colour by group: group k of those drawn has colour k modulo 8 unless a neighbour has it.
    """
    placed = list(cells)
    touching: dict[int, set[int]] = {group: set() for _, _, group in placed}
    for line, along in ((1, 0), (0, 1)):
        placed.sort(key=lambda cell: (cell[line], cell[along]))
        for one, other in pairwise(placed):
            if one[line] == other[line] and one[2] != other[2]:
                touching[one[2]].add(other[2])
                touching[other[2]].add(one[2])
    found: dict[int, int] = {}
    for place, group in enumerate(sorted(touching)):
        taken = {found[other] for other in touching[group] if other in found}
        turn = ((place + step) % len(PALETTE) for step in range(len(PALETTE)))
        free = next((number for number in turn if number not in taken), None)
        if free is None:
            free = next(number for number in count(len(PALETTE)) if number not in taken)
        found[group] = free
    return found
