"""The contents of a picture: the panel of each reduction, its groups, and the nodes it draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import numpy.typing as npt

from meshplan.layout import Integers, Layout
from meshplan.lint._drawing._text import clean, format_axes, format_axis, shorten
from meshplan.planner import Hazard
from meshplan.planner._hazards import Siblings
from meshplan.planner._problem import check_reach
from meshplan.topology import Topology

_MAX_PANELS = 6
# Ranks drawn in a panel, in all panels, and in all where a panel has many groups: a group takes
# about ten times the text of a rank. Beyond these limits a sample is drawn.
_MAX_CELLS_OF_PANEL = 5000
_MAX_CELLS = 20000
_MAX_CELLS_OF_SMALL_GROUPS = 8000
_MANY_GROUPS = 2500
# Up to here every rank has its number and a text of its own.
_MAX_NUMBERS = 4096
# Above so many nodes, a picture is a sample of so many.
_MAX_NODES, _SAMPLE = 640, 48
# Marked groups whose nodes go into a sample, and ranks of each.
_MAX_GROUPS, _MAX_RANKS = 512, 4096


@dataclass(frozen=True, slots=True)
class SignatureClass:
    """Groups with one signature, either all marked or none.

    Attributes:
        signature: ranks per node, nodes in order of their first rank.
        marked: whether these groups differ from most of their siblings.
        groups: how many.
        first: number of the first of them.
    """

    signature: tuple[int, ...]
    marked: bool
    groups: int
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class GroupSignatures:
    """The groups of one reduction.

    Attributes:
        members: global ranks, an int64 array [groups, ranks per group]; groups by the coordinate
            of the other axes, row-major.
        marked: which groups differ from most of their siblings, a bool array [groups].
        class_of: position in ``classes`` of each group, an int64 array [groups].
        classes: unmarked ones first, then by descending frequency; empty if the nodes are unknown.
    """

    members: Integers
    marked: npt.NDArray[np.bool_]
    class_of: Integers
    classes: tuple[SignatureClass, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One node as it is drawn.

    Attributes:
        number: its place among the nodes of the mesh; ``None`` if nodes are unknown.
        domains: drawn ranks by domain, ascending; one entry if domains are unknown.
        left_out: ranks that are not drawn.
        hosts: names of the hosts of the drawn ranks.
    """

    number: int | None
    domains: tuple[tuple[int, ...], ...]
    left_out: int
    hosts: tuple[str, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All drawn ranks."""
        return tuple(rank for domain in self.domains for rank in domain)


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """The groups of one reduction.

    Attributes:
        layout: the mesh.
        topology: rank placement.
        hosts: name of the host of each rank; may be empty.
        axes: positions of the reduced axes, ascending.
        hazards: those of this reduction.
        groups: all of them, with their signatures.
        nodes: the drawn ones.
        left_out: a line about the nodes and ranks that are not drawn; empty if all are.
        coordinates: mesh coordinate of each drawn rank that is in the mesh.
        group_of: number of the group of each drawn rank that is in the mesh.
    """

    layout: Layout
    topology: Topology
    hosts: Sequence[str]
    axes: tuple[int, ...]
    hazards: tuple[Hazard, ...]
    groups: GroupSignatures
    nodes: tuple[Node, ...]
    left_out: str
    coordinates: dict[int, tuple[int, ...]]
    group_of: dict[int, int]

    @property
    def harmful(self) -> bool:
        """Whether siblings that must agree may differ; false while nodes are unknown."""
        return any(hazard.verdict == "may differ" for hazard in self.hazards)

    @property
    def domains_known(self) -> bool:
        """Whether domains are known, and so worth drawing."""
        return self.topology.domain_map is not None


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """The contents of a picture.

    Attributes:
        panels: at least one.
        left_out: axes of the panels that are not drawn.
        numbers: whether every rank has its number and a text of its own.
        subject: the mesh and its placement, one line.
        hazards: as given.
    """

    panels: tuple[Panel, ...]
    left_out: tuple[str, ...]
    numbers: bool
    subject: str
    hazards: tuple[Hazard, ...]


def compose_picture(
    layout: Layout,
    topology: Topology,
    axes: Sequence[str | Sequence[str]],
    hazards: Sequence[Hazard] = (),
    hosts: Sequence[str] = (),
) -> Picture:
    """Choose panels and nodes: of a large mesh a sample of nodes, which the picture states.

    Args:
        layout: the mesh.
        topology: rank placement.
        axes: the reduced axes of each panel: a label, or several labels of one flattened
            reduction. Axes of size 1 are left out. Without ``axes`` and ``hazards``: each axis.
        hazards: the results of `meshplan.planner.hazards` for this mesh and topology; each further
            set of axes that they reduce over has a panel too.
        hosts: name of the host of each rank, or empty.

    Raises:
        AxisNameError: the mesh has no such axis.
        TopologyError: the topology lacks a rank of the mesh.
    """
    check_reach(topology, layout)
    sets = _collect_axes(layout, axes, hazards)
    drawn = sets[:_MAX_PANELS]
    nodes = _MeshNodes(layout, topology, hosts)
    panels = tuple(_compose_panel(nodes, axes, of_axes, len(drawn)) for axes, of_axes in drawn)
    names = tuple(format_axis(layout, i) for i in range(len(layout.sizes)))
    if names != layout.axes and len(set(names)) == len(names):
        layout = Layout(layout.sizes, names, layout.ranks)
    return Picture(
        panels=panels,
        left_out=tuple(format_axes(layout, axes) for axes, _ in sets[_MAX_PANELS:]),
        numbers=sum(len(n.ranks) for panel in panels for n in panel.nodes) <= _MAX_NUMBERS,
        subject=shorten(clean(f"{layout}{' on' if topology.known else ','} {topology}"), 12, 5000),
        hazards=tuple(hazards),
    )


def _collect_axes(
    layout: Layout, axes: Sequence[str | Sequence[str]], hazards: Sequence[Hazard]
) -> list[tuple[tuple[int, ...], tuple[Hazard, ...]]]:
    """Reduced axes and their hazards, requested ones first, then the rest of the hazards' axes.

    Axes of size 1 change no group: they are left out unless there is nothing else.
    """
    requested = [layout.axis_indices(one) for one in axes or (() if hazards else layout.axes)]
    pairs: list[tuple[tuple[int, ...], tuple[Hazard, ...]]] = [(one, ()) for one in requested]
    pairs += [(layout.axis_indices(hazard.axes), (hazard,)) for hazard in hazards]
    found: dict[tuple[int, ...], tuple[Hazard, ...]] = {}
    for indices, hazard in pairs:
        key = tuple(i for i in indices if layout.sizes[i] > 1)
        found[key] = (*found.get(key, ()), *hazard)
    alone = found.pop((), ())
    if not found:
        found[requested[0] if requested else (0,)] = alone
    sets = list(found.items())
    if len(sets) > _MAX_PANELS:
        sets.sort(key=lambda one: all(hazard.verdict == "none" for hazard in one[1]))
    return sets


def _compose_panel(
    nodes: _MeshNodes, axes: tuple[int, ...], hazards: tuple[Hazard, ...], panels: int
) -> Panel:
    layout = nodes.layout
    groups = classify_groups(layout, axes, nodes.topology, hazards)
    many = len(groups.members) > _MANY_GROUPS
    most = _MAX_CELLS_OF_SMALL_GROUPS if many else _MAX_CELLS
    drawn, left_out = nodes.choose(groups, min(_MAX_CELLS_OF_PANEL, most // panels))
    ranks = [rank for node in drawn for rank in node.ranks]
    in_grid, in_groups = np.isin(layout.grid, ranks), np.isin(groups.members, ranks)
    at = map(tuple, np.argwhere(in_grid).tolist())
    coordinates = dict(zip(layout.grid[in_grid].tolist(), at, strict=True))
    numbers = in_groups.nonzero()[0].tolist()
    group_of = dict(zip(groups.members[in_groups].tolist(), numbers, strict=True))
    where = (layout, nodes.topology, nodes.hosts)
    return Panel(*where, axes, hazards, groups, drawn, left_out, coordinates, group_of)


def classify_groups(
    layout: Layout, axes: tuple[int, ...], topology: Topology, hazards: Sequence[Hazard]
) -> GroupSignatures:
    """Group the siblings over ``axes`` by signature, and mark those that differ from most.

    Without ``hazards`` a group is marked if its signature is not the most frequent one. If a
    hazard has siblings that may differ, a group is marked if it differs from most of the
    siblings that it must agree with: in ranks per node, in which members share a node, or in the
    order of ranks. If every hazard finds siblings identical, no group is marked.

    Args:
        layout: the mesh.
        axes: positions of the reduced axes, ascending.
        topology: rank placement.
        hazards: those of this reduction.
    """
    if not topology.known:
        members = layout.siblings(axes)
        zeros = np.zeros(len(members), dtype=np.int64)
        return GroupSignatures(members, zeros.astype(np.bool_), zeros, ())
    siblings = Siblings(layout, axes, topology, sort_ranks=True)
    pattern = siblings.pattern
    # Several patterns have one signature: AABB and ABAB both have two ranks on each node.
    numbers: dict[tuple[int, ...], int] = {}
    of_pattern = [numbers.setdefault(one, len(numbers)) for one in siblings.signatures]
    number = np.array(of_pattern, dtype=np.int64)[pattern]
    marked = np.zeros(len(pattern), dtype=np.bool_)
    if not hazards:
        marked = _differ_from_most(number, np.arange(len(number))[None])
    for hazard in hazards:
        if hazard.verdict == "may differ":
            marked |= _differ_from_most(pattern, siblings.sets(layout.axis_indices(hazard.along)))
    keys, first, class_of, counts = np.unique(
        2 * number + marked, return_index=True, return_inverse=True, return_counts=True
    )
    signatures = list(numbers)
    order = np.lexsort((first, -counts, keys % 2))
    classes = tuple(
        SignatureClass(signatures[key // 2], bool(key % 2), groups, group)
        for key, groups, group in np.stack((keys, counts, first))[:, order].T.tolist()
    )
    return GroupSignatures(siblings.members, marked, np.argsort(order)[class_of], classes)


def _differ_from_most(key: Integers, sets: Integers) -> npt.NDArray[np.bool_]:
    """Whether a group's key is not the most frequent one of its set, bool [groups].

    Among keys that are equally frequent in the set, the overall most frequent one counts as the
    usual one, then the one that appears first.
    """
    kinds = int(key.max()) + 1
    pair, count = np.unique(np.arange(len(sets))[:, None] * kinds + key[sets], return_counts=True)
    overall = np.bincount(key)[pair % kinds]
    # By set, then the most frequent; pairs ascend already, and the sort is stable.
    ranked = pair[np.lexsort((-overall, -count, pair // kinds))]
    usual = ranked[np.unique(ranked // kinds, return_index=True)[1]] % kinds
    differs = np.zeros(len(key), dtype=np.bool_)
    differs[sets] = key[sets] != usual[:, None]
    return differs


class _MeshNodes:
    """The nodes that hold ranks of a mesh.

    Nodes are numbered 0, 1, ... by their lowest rank in the mesh, independent of their names in
    the topology. Ranks on these nodes that are not in the mesh are drawn as well.
    """

    def __init__(self, layout: Layout, topology: Topology, hosts: Sequence[str]) -> None:
        self.layout = layout
        self.topology = topology
        self.hosts = hosts
        self._in_mesh = np.sort(layout.grid, axis=None)
        self._names: Integers | None = None
        if topology.known:
            nodes = topology.nodes_of(self._in_mesh)
            assert nodes is not None
            names, first = np.unique(nodes, return_index=True)
            self._names = names[first.argsort()]
            self._numbers = {name: i for i, name in enumerate(self._names.tolist())}

    def choose(self, groups: GroupSignatures, budget: int) -> tuple[tuple[Node, ...], str]:
        """The nodes to draw, at most ``budget`` ranks in all, and a line about the others.

        All nodes if they fit, else a sample: nodes of the first usual group, those of the first
        marked groups, then the first of the rest.
        """
        total = 1 if self._names is None else len(self._names)
        room = -(-budget // 4) if total > 1 else budget
        sizes = (len(self._find_ranks(i)) for i in range(min(total, _MAX_NODES)))
        if total <= _MAX_NODES and sum(sizes) <= budget:
            return tuple(self._make_node(i, budget) for i in range(total)), ""
        if total == 1:
            node = self._make_node(0, budget)
            drawn = len(node.ranks)
            return (node,), f"{drawn} of {drawn + node.left_out} ranks drawn: the first"
        chosen: list[int] = []
        jagged = 0
        left = budget
        for i, of_marked in self._order_nodes(groups, total):
            size = min(len(self._find_ranks(i)), room)
            if size > left or len(chosen) == _SAMPLE:
                break
            left -= size
            chosen.append(i)
            jagged += of_marked
        nodes = tuple(self._make_node(i, room) for i in sorted(chosen))
        text = f"{len(nodes)} of {total} nodes drawn: "
        if jagged:
            text += "those that hold the first jagged groups"
            text += "" if jagged > len(nodes) - 4 else ", and the first of the others"
        elif max(chosen) >= len(chosen):
            text += "those of the first group, and the first of the others"
        else:
            text += "the first"
        if any(node.left_out for node in nodes):
            text += f", and of each at most {room} ranks"
        return nodes, text

    def _order_nodes(self, groups: GroupSignatures, total: int) -> Iterator[tuple[int, bool]]:
        """Nodes in the order in which they are worth drawing, and whether for a marked group."""
        seen: set[int] = set()
        usual = (~groups.marked).nonzero()[0][:1].tolist()
        marked = groups.marked.nonzero()[0][:_MAX_GROUPS].tolist()
        for group in (*usual, *marked):
            nodes = self.topology.nodes_of(groups.members[group][:_MAX_RANKS])
            assert nodes is not None
            of_marked = bool(groups.marked[group])
            # Of an unmarked group a few nodes, for comparison.
            for name in islice(dict.fromkeys(nodes.tolist()), None if of_marked else 3):
                i = self._numbers[name]
                if i not in seen:
                    seen.add(i)
                    yield i, of_marked
        yield from ((i, False) for i in range(total) if i not in seen)

    @cached_property
    def _by_node(self) -> tuple[Integers, Integers]:
        """Nodes of all ranks, sorted, and the ranks in that order."""
        assert self.topology.nodes is not None
        ranks = self.topology.nodes.argsort(kind="stable")
        return self.topology.nodes[ranks], ranks

    def _find_ranks(self, i: int) -> Integers:
        """The ranks on node ``i``, ascending, in the mesh or not."""
        if self._names is None:
            return self._in_mesh
        nodes, ranks = self._by_node
        start, stop = np.searchsorted(nodes, [self._names[i], self._names[i] + 1])
        return ranks[start:stop]

    def _make_node(self, i: int, room: int) -> Node:
        ranks = self._find_ranks(i)
        total = len(ranks)
        if total > room:
            # Ranks of the mesh go first.
            inside = np.isin(ranks, self._in_mesh)
            ranks = np.sort(np.concatenate([ranks[inside], ranks[~inside]])[:room])
        drawn = ranks.tolist()
        of_rank = self.topology.domains
        domains: dict[int | None, list[int]] = {}
        for rank in drawn:
            domains.setdefault(None if of_rank is None else int(of_rank[rank]), []).append(rank)
        hosts = dict.fromkeys(self.hosts[rank] for rank in drawn if rank < len(self.hosts))
        return Node(
            number=None if self._names is None else i,
            domains=tuple(map(tuple, domains.values())),
            left_out=total - len(drawn),
            hosts=tuple(name for name in hosts if name),
        )
