"""The orders in which sibling communicators of a log add, and which of them differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshplan.layout import Layout
from meshplan.planner import nccl_order as order
from meshplan.planner._hazards import ALGORITHMS, Algorithm
from meshplan.topology._reading import group_values
from meshplan.topology.formats.nccl_log import Communicator


@dataclass(frozen=True, slots=True)
class ObservedSiblings:
    """The communicators over some axes of a mesh."""

    axes: tuple[str, ...]  # names of the axes
    groups: tuple[tuple[int, ...], ...]  # global ranks of each, by mesh coordinate
    # By algorithm, the positions in ``groups`` of each order of additions.
    orders: dict[Algorithm, tuple[tuple[int, ...], ...]]
    # By algorithm with several orders: the first channel in which two groups differ, and the
    # additions in each, over global ranks.
    examples: dict[Algorithm, tuple[int, str, str]]
    missing: int  # how many groups of these axes the log lacks
    # By algorithm, positions in ``groups`` without a whole ring or tree in the log.
    unread: dict[Algorithm, tuple[int, ...]]

    @property
    def differ(self) -> tuple[Algorithm, ...]:
        """The algorithms under which siblings add in different orders."""
        return tuple(name for name, orders in self.orders.items() if len(orders) > 1)


def compare_siblings(
    layout: Layout,
    communicators: Sequence[Communicator],
    ranks: dict[str, int],
) -> list[ObservedSiblings]:
    """The communicators of each set of axes that has several of 3 or more ranks in the log;
    ``ranks`` has the global rank of each process.
    """
    by_members: dict[tuple[int, ...], Communicator] = {}
    for one in communicators:
        members = tuple(sorted(ranks.get(process, -1) for process in one.processes))
        by_members.setdefault(members, one)
    wide = [i for i, size in enumerate(layout.sizes) if size > 1]
    found = []
    for count in range(1, len(wide)):
        for axes in itertools.combinations(wide, count):
            groups = layout.siblings(axes).tolist()
            if len(groups[0]) < 3:
                continue  # a sum of two commutes
            pairs = [(group, by_members.get(tuple(sorted(group)))) for group in groups]
            known = [(group, one) for group, one in pairs if one is not None]
            if len(known) > 1:
                names = tuple(layout.axes[i] for i in axes)
                found.append(_compare(names, known, ranks, len(groups)))
    return found


def _compare(
    axes: tuple[str, ...],
    known: Sequence[tuple[list[int], Communicator]],
    ranks: dict[str, int],
    groups: int,
) -> ObservedSiblings:
    orders: dict[Algorithm, tuple[tuple[int, ...], ...]] = {}
    examples: dict[Algorithm, tuple[int, str, str]] = {}
    unread: dict[Algorithm, tuple[int, ...]] = {}
    labels = [[ranks[process] for process in one.processes] for _, one in known]
    for algorithm in ALGORITHMS:
        # By channel, a text that is equal for siblings that add in the same order. They have equal
        # inputs at equal mesh coordinates, whatever their ranks in NCCL.
        forms = [
            _draw_orders(algorithm, one, [*map(group.index, here)], order.canonical)
            for (group, one), here in zip(known, labels, strict=True)
        ]
        parts = group_values(
            (tuple(sorted(form.items())), position) for position, form in enumerate(forms) if form
        )
        orders[algorithm] = tuple(map(tuple, parts.values()))
        unread[algorithm] = tuple(i for i, form in enumerate(forms) if not form)
        if len(parts) > 1:
            first, second = (positions[0] for positions in list(parts.values())[:2])
            one, two = forms[first], forms[second]
            channel = next(c for c in sorted({*one, *two}) if one.get(c) != two.get(c))
            left, right = (
                _draw_orders(algorithm, known[i][1], labels[i]).get(channel, "no such channel")
                for i in (first, second)
            )
            examples[algorithm] = channel, left, right
    members = tuple(tuple(group) for group, _ in known)
    return ObservedSiblings(axes, members, orders, examples, groups - len(known), unread)


def _draw_orders(
    algorithm: Algorithm,
    one: Communicator,
    labels: Sequence[int],
    change: Callable[[order.Tree], order.Tree] = lambda tree: tree,
) -> dict[int, str]:
    """By channel, the additions over ``labels`` of the ranks in NCCL; trees after ``change``."""
    if algorithm == "ring":
        return {c: " ".join(str(labels[rank]) for rank in ring) for c, ring in one.rings.items()}
    trees = {c: _make_tree(down) for c, down in one.children.items()}
    return {
        c: order.draw(change(order.relabel(tree, labels.__getitem__))) for c, tree in trees.items()
    }


def _make_tree(children: Sequence[Sequence[int]]) -> order.Tree:
    """``((own + first) + second) + third`` at every rank, over ranks of the communicator."""
    (root,) = set(range(len(children))) - {child for ranks in children for child in ranks}
    parents_first = [root]
    for rank in parents_first:
        parents_first += children[rank]
    sums: dict[int, order.Tree] = {}
    for rank in reversed(parents_first):
        total: order.Tree = rank
        for child in children[rank]:
            total = (total, sums.pop(child))
        sums[rank] = total
    return sums[root]
