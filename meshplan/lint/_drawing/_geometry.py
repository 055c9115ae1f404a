"""Where nodes, domains and cells are placed: whole pixels, from the corner of their panel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshplan.lint._drawing._nodes import Node

__all__ = ["Box", "Cell", "Grid", "PlacedNode", "outline", "place"]

NODE_GAP = 10
NODE_PADDING = 6
WELL_PADDING = 4
WELL_GAP = 8
_FEW = 8


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, in pixels."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Cell:
    """The place of a rank: corner in pixels, and its well, row and column in the well."""

    rank: int
    x: int
    y: int
    well: int
    row: int
    column: int


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node, its box, the boxes of its domains, and its cells. Wells of a grid are numbered."""

    node: Node
    box: Box
    wells: tuple[Box, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """All nodes of a panel.

    Attributes:
        width, height: of all, in pixels.
        cell: size of a cell in pixels.
        gap: between cells.
        nodes: first down, then to the right.
    """

    width: int
    height: int
    cell: tuple[int, int]
    gap: int
    nodes: tuple[PlacedNode, ...]


def place(
    nodes: Sequence[Node],
    *,
    cell: tuple[int, int],
    gap: int,
    header: int,
    narrowest: int,
) -> Grid:
    """Place nodes in columns, one below the other, as groups of consecutive ranks go on.

    All boxes are of one size, so that cells are in line over the whole panel.

    Args:
        nodes: at least one.
        cell: width and height of a cell.
        gap: between cells.
        header: height of the line with the name of the node.
        narrowest: width of a box at least.
    """
    largest = max(len(domain) for node in nodes for domain in node.domains)
    most = max(len(node.domains) for node in nodes)
    columns = _columns(largest)
    # Domains in one row if few cells, else about as many across as down.
    across = most
    if most * columns > _FEW:
        across = max(_FEW // columns, math.isqrt(most - 1) + 1)
    down = -(-most // across)
    well = _size(largest, columns, cell, gap)
    step = (well[0] + WELL_GAP, well[1] + WELL_GAP)
    width = max(narrowest, across * step[0] - WELL_GAP + 2 * NODE_PADDING)
    height = header + down * step[1] - WELL_GAP + NODE_PADDING
    per_row = _per_row(len(nodes), width + NODE_GAP, height + NODE_GAP)
    per_column = -(-len(nodes) // per_row)
    placed = []
    wells = 0
    for i, node in enumerate(nodes):
        x = i // per_column * (width + NODE_GAP)
        y = i % per_column * (height + NODE_GAP)
        boxes, cells = [], []
        for k, domain in enumerate(node.domains):
            left = x + NODE_PADDING + k % across * step[0]
            top = y + header + k // across * step[1]
            boxes.append(Box(left, top, *_size(len(domain), columns, cell, gap)))
            for j, rank in enumerate(domain):
                row, column = divmod(j, columns)
                cells.append(
                    Cell(
                        rank,
                        left + WELL_PADDING + column * (cell[0] + gap),
                        top + WELL_PADDING + row * (cell[1] + gap),
                        wells + k,
                        row,
                        column,
                    )
                )
        wells += len(boxes)
        placed.append(PlacedNode(node, Box(x, y, width, height), tuple(boxes), tuple(cells)))
    used = -(-len(nodes) // per_column)
    return Grid(
        used * (width + NODE_GAP) - NODE_GAP,
        per_column * (height + NODE_GAP) - NODE_GAP,
        cell,
        gap,
        tuple(placed),
    )


def outline(cells: Iterable[Cell], cell: tuple[int, int], gap: int) -> str:
    """The border round cells of one group, as path data: in the middle of the gap round them."""
    places = {(c.well, c.row, c.column): c for c in cells}
    half = gap / 2
    width, height = cell[0] + gap, cell[1] + gap
    strokes: dict[tuple[str, float, float], float] = {}
    for (well, row, column), c in places.items():
        x, y = c.x - half, c.y - half
        for beside, key, length in (
            ((well, row - 1, column), ("h", x, y), width),
            ((well, row + 1, column), ("h", x, y + height), width),
            ((well, row, column - 1), ("v", x, y), height),
            ((well, row, column + 1), ("v", x + width, y), height),
        ):
            if beside not in places:
                strokes[key] = length
    return "".join(f"M{x:g} {y:g}{way}{length:g}" for way, x, y, length in _joined(strokes))


def _joined(
    strokes: dict[tuple[str, float, float], float],
) -> Iterator[tuple[str, float, float, float]]:
    """Strokes with those that go on from one another made one."""
    for way, x, y in sorted(strokes):
        length = strokes.get((way, x, y))
        if length is None:
            continue
        step, total = length, length
        while True:
            after = (way, x + total, y) if way == "h" else (way, x, y + total)
            if strokes.pop(after, None) is None:
                break
            total += step
        yield way, x, y, total


def _size(count: int, columns: int, cell: tuple[int, int], gap: int) -> tuple[int, int]:
    """Width and height of a well with so many cells."""
    rows = -(-count // columns)
    return (
        min(count, columns) * (cell[0] + gap) - gap + 2 * WELL_PADDING,
        rows * (cell[1] + gap) - gap + 2 * WELL_PADDING,
    )


def _columns(count: int) -> int:
    """Cells in a row of a domain of ``count``: one row if few, eight if that fits."""
    if count <= _FEW:
        return count
    if count % _FEW == 0 and count <= _FEW * 2 * _FEW:
        return _FEW
    least = math.isqrt(count - 1) + 1
    return min(range(least, 2 * least + 1), key=lambda columns: (-count % columns, columns))


def _per_row(count: int, width: int, height: int) -> int:
    """Nodes side by side, for a panel somewhat higher than wide at most."""
    fits = (n for n in range(1, count + 1) if 1.6 * n * width >= -(-count // n) * height)
    least = next(fits, count)
    return next((n for n in (least, least + 1) if count % n == 0), least)
