"""The panels of a picture: one per set of reduced axes, with its groups, hazards and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshplan.layout import Layout
from meshplan.lint._drawing._falls import Falls, falls
from meshplan.lint._drawing._nodes import Node, Nodes
from meshplan.lint._drawing._text import clean, shorten
from meshplan.planner import Hazard
from meshplan.planner._problem import check_reach
from meshplan.topology import Topology

__all__ = ["Panel", "Picture", "axes_name", "axis_name", "picture"]

_MAX_PANELS = 6
# Ranks that are drawn in a panel, in all panels, and in all where a panel has many groups: a group
# takes about ten times the text of a rank. What is more is a sample.
_MAX_CELLS_OF_PANEL = 5000
_MAX_CELLS = 20000
_MAX_CELLS_OF_SMALL_GROUPS = 8000
_MANY_GROUPS = 2500
# Up to here every rank has its number and a text of its own.
_MAX_NUMBERS = 4096
_NAME_WIDTH = 130


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """The groups of one reduction.

    Attributes:
        layout: the mesh.
        topology: where ranks sit.
        hosts: name of the host of each rank; may be empty.
        axes: positions of the reduced axes, ascending.
        hazards: those of this reduction.
        falls: how its groups fall on nodes.
        nodes: those that are drawn.
        left_out: which nodes and ranks are not drawn; empty if all are.
        coordinates: mesh coordinate of each drawn rank that is in the mesh.
    """

    layout: Layout
    topology: Topology
    hosts: Sequence[str]
    axes: tuple[int, ...]
    hazards: tuple[Hazard, ...]
    falls: Falls
    nodes: tuple[Node, ...]
    left_out: str
    coordinates: dict[int, tuple[int, ...]]

    @property
    def harmful(self) -> bool:
        """Whether siblings that must agree may differ, as far as nodes are known."""
        return any(hazard.verdict == "may differ" for hazard in self.hazards)

    @property
    def outer(self) -> tuple[int, ...]:
        """Positions of the axes along which the groups are siblings."""
        return tuple(i for i in range(len(self.layout.sizes)) if i not in self.axes)

    def group_of(self, rank: int) -> int | None:
        """The number of a drawn rank's group; ``None`` if the rank is not in the mesh."""
        coordinate = self.coordinates.get(rank)
        if coordinate is None:
            return None
        number = 0
        for i in self.outer:
            number = number * self.layout.sizes[i] + coordinate[i]
        return number

    @property
    def domains_known(self) -> bool:
        """Whether domains are known, and so worth drawing."""
        return self.topology.domain_map is not None


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """What is drawn.

    Attributes:
        panels: at least one.
        left_out: titles of the panels that are not drawn.
        numbers: whether every rank has its number and a text of its own.
        subject: the mesh and where it sits, one line.
    """

    panels: tuple[Panel, ...]
    left_out: tuple[str, ...]
    numbers: bool
    subject: str


def picture(
    layout: Layout,
    topology: Topology,
    axes: Sequence[str | Sequence[str]],
    hazards: Sequence[Hazard],
    hosts: Sequence[str],
) -> Picture:
    """Choose what is drawn; the arguments are those of `draw_svg`."""
    check_reach(topology, layout)
    sets = _axis_sets(layout, axes, hazards)
    drawn = sets[:_MAX_PANELS]
    nodes = Nodes(layout, topology, hosts)
    panels = tuple(_panel(nodes, axes, of_axes, len(drawn)) for axes, of_axes in drawn)
    cells = sum(len(node.ranks) for panel in panels for node in panel.nodes)
    return Picture(
        panels=panels,
        left_out=tuple(axes_name(layout, axes) for axes, _ in sets[_MAX_PANELS:]),
        numbers=cells <= _MAX_NUMBERS,
        subject=clean(f"{_short(layout)}{' on' if topology.known else ','} {topology}"),
    )


def _axis_sets(
    layout: Layout, axes: Sequence[str | Sequence[str]], hazards: Sequence[Hazard]
) -> list[tuple[tuple[int, ...], tuple[Hazard, ...]]]:
    """Reduced axes and their hazards, in the order asked for; the rest of the hazards' axes last.

    Axes of size 1 change no group: they are left out unless there is nothing else.
    """
    found: dict[tuple[int, ...], list[Hazard]] = {}
    asked = [layout.axis_indices(one) for one in axes or (() if hazards else layout.axes)]
    for indices in asked:
        found.setdefault(tuple(i for i in indices if layout.sizes[i] > 1), [])
    for hazard in hazards:
        indices = layout.axis_indices(hazard.axes)
        found.setdefault(tuple(i for i in indices if layout.sizes[i] > 1), []).append(hazard)
    alone = found.pop((), [])
    if not found:
        found[asked[0] if asked else (0,)] = alone
    sets = [(indices, tuple(of_axes)) for indices, of_axes in found.items()]
    if len(sets) > _MAX_PANELS:
        sets.sort(key=lambda one: all(hazard.verdict == "none" for hazard in one[1]))
    return sets


def _panel(nodes: Nodes, axes: tuple[int, ...], hazards: tuple[Hazard, ...], panels: int) -> Panel:
    layout = nodes.layout
    found = falls(layout, axes, nodes.topology, hazards)
    many = len(found.members) > _MANY_GROUPS
    most = _MAX_CELLS_OF_SMALL_GROUPS if many else _MAX_CELLS
    drawn, left_out = nodes.draw(found, min(_MAX_CELLS_OF_PANEL, most // panels))
    ranks = {rank for node in drawn for rank in node.ranks}
    if isinstance(layout.ranks, range):
        start = layout.ranks[0]
        positions = {rank: rank - start for rank in ranks if rank in layout.ranks}
    else:
        positions = {rank: place for place, rank in enumerate(layout.ranks) if rank in ranks}
    coordinates = {rank: _coordinate(layout, place) for rank, place in positions.items()}
    return Panel(
        layout, nodes.topology, nodes.hosts, axes, hazards, found, drawn, left_out, coordinates
    )


def _coordinate(layout: Layout, position: int) -> tuple[int, ...]:
    coordinate = []
    for size in reversed(layout.sizes):
        position, index = divmod(position, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))


def axis_name(layout: Layout, axis: int) -> str:
    """The label of the axis at this position, shortened to fit into any line."""
    return _short_name(layout.axes[axis])


@lru_cache(maxsize=64)
def _short_name(name: str) -> str:
    return shorten(clean(name), 12, _NAME_WIDTH)


def axes_name(layout: Layout, axes: Sequence[int]) -> str:
    """The label of one axis, or those of several in brackets."""
    names = ", ".join(axis_name(layout, i) for i in axes)
    return names if len(axes) == 1 else f"({names})"


def _short(layout: Layout) -> str:
    names = tuple(axis_name(layout, i) for i in range(len(layout.sizes)))
    if names == layout.axes or len(set(names)) < len(names):
        return str(layout)
    return str(Layout(layout.sizes, names, layout.ranks))
