"""Which siblings of a sequence of reductions must agree, and whether they do in the NCCL model.

Siblings must agree along an axis if they have the same inputs and must produce the same replica:
the axis is replicated at the source, or an earlier step reduced or gathered it, and it ends
replicated. Along any other axis each group has its own inputs or its own piece of the result.

One step at a time is enough: all members of a group get the same bits, so every group hands one
value to all siblings of the next step. The rule is also exact in the model: a subtree of the final
association is identified by its set of leaves, so equal results need equal associations in every
step.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Literal, TypeAlias, TypeVar, get_args

import numpy as np

from meshplan._message_text import elide, format_first
from meshplan.layout import Integers, Layout
from meshplan.planner import nccl_order as order
from meshplan.planner._problem import (
    SHARDED,
    Problem,
    Spec,
    can_merge,
    check_reach,
    check_steps,
    choose_default_steps,
    has_contract,
    is_exact,
)
from meshplan.topology import Topology
from meshplan.topology._reading import group_values

_T = TypeVar("_T")

Verdict = Literal["none", "may differ", "unknown topology"]

_MAX_SIGNATURES, _MAX_RANKS = 6, 6  # of a printed hazard


@dataclass(frozen=True, slots=True)
class Example:
    """One group of a hazard, and an order in which it may add."""

    # Global ranks, in the order of their ranks in the communicator.
    ranks: tuple[int, ...]
    # Ranks per node, nodes in order of their first rank.
    signature: tuple[int, ...]
    expression: str  # the additions, over global ranks, e.g. ``(0+(5+10))``


@dataclass(frozen=True, slots=True)
class Hazard:
    """A reduction whose sibling groups must agree, and the known orders of their additions.

    Attributes:
        axes: positions of the reduced axes, ascending; axes of size 1 are left out.
        labels: labels of the reduced axes.
        along: labels of the axes along which siblings must agree.
        op: the reduction.
        group_size: ranks in a group.
        groups: groups of the reduction.
        siblings: how many groups must agree together.
        signatures: ranks per node of each different placement of a group, by first appearance;
            empty if the topology is unknown.
        classes: per modelled algorithm, the largest number of different associations of additions
            among siblings that must agree; empty if the topology is unknown.
        unknown: algorithms and libraries with an undocumented order, which are never safe.
        algorithm, channel: those that ``examples`` shows; ``None`` without examples.
        chunk: the ring chunk that ``examples`` shows; ``None`` for the tree.
        examples: two siblings that may add in different orders: those on the fewest nodes, then
            those with the lowest rank. Empty unless the verdict is ``may differ``.
        fixes: fixes in words, for the whole sequence of reductions; empty for the verdict
            ``none``.
    """

    axes: tuple[int, ...]
    labels: tuple[str, ...]
    along: tuple[str, ...]
    op: str
    group_size: int
    groups: int
    siblings: int
    signatures: tuple[tuple[int, ...], ...]
    classes: tuple[tuple[Algorithm, int], ...]
    unknown: tuple[str, ...]
    algorithm: Algorithm | None = None
    channel: int | None = None
    chunk: int | None = None
    examples: tuple[Example, ...] = ()
    fixes: tuple[str, ...] = ()

    @property
    def may_differ(self) -> tuple[Algorithm, ...]:
        return tuple(name for name, count in self.classes if count > 1)

    @property
    def verdict(self) -> Verdict:
        """``none``: in the model, all siblings add in one order; it does not cover ``unknown``."""
        if not self.classes:
            return "unknown topology"
        return "may differ" if self.may_differ else "none"

    def __str__(self) -> str:
        lines = [
            f"{self.op} over ({', '.join(self.labels)}), {self.groups} groups of "
            f"{self.group_size}: {self.siblings} siblings along ({', '.join(self.along)}) hold "
            "the same inputs and must agree",
            f"  {self._describe_orders()}",
        ]
        if self.signatures:
            shown = [
                elide(f"({', '.join(map(str, s))})") for s in self.signatures[:_MAX_SIGNATURES]
            ]
            rest = len(self.signatures) - len(shown)
            more = f" and {rest} more" if rest else ""
            lines.append(f"  ranks per node: {'; '.join(shown)}{more}")
        where = f" channel {self.channel}" if self.channel else ""
        where += "" if self.chunk is None else f" chunk {self.chunk}"
        for example in self.examples:
            ranks = format_first(example.ranks, _MAX_RANKS)
            lines.append(f"  {self.algorithm}{where}, ranks {ranks}: {elide(example.expression)}")
        if self.fixes:
            lines.append(f"  fixes: {'; '.join(self.fixes)}")
        return "\n".join(lines)

    def _describe_orders(self) -> str:
        unknown = ", ".join(self.unknown)
        if self.verdict == "unknown topology":
            return f"may differ: node placement unknown, so the order is unknown under {unknown}"
        if self.verdict == "none":
            names = " and ".join(name for name, _ in self.classes)
            return f"identical under {names} in the model; order undocumented under {unknown}"
        orders = ", ".join(f"{name} ({count} orders)" for name, count in self.classes if count > 1)
        return f"may differ under {orders}; order undocumented under {unknown}"


# The groups of one reduction by node placement, and NCCL's order in each.
#
# A mesh of a million ranks has hundreds of thousands of groups and few different node placements.
# So ranks are arrays, and Python code handles one group of each *pattern*: the sets of members that
# share a node, and the communicator rank of each member. The model uses no other fact about a
# group, so groups of one pattern have one association.

Algorithm: TypeAlias = Literal["ring", "tree"]
"""NCCL algorithms with a modelled order of additions."""
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

_MAX_DRAWN = 4
_MAX_FORMS = 1 << 16


class Siblings:
    """All groups over ``axes``, and the orders in which NCCL may add in them.

    Args:
        layout: the mesh.
        axes: positions of the reduced axes, ascending.
        topology: rank placement; its nodes must be known.
        sort_ranks: NCCL ranks ascend by global rank, as in groups of torch for a mesh; else by
            mesh coordinate, as in groups of meshplan. Both are the same if a mesh's ranks ascend.
        channels: the most channels that NCCL uses (``NCCL_MAX_NCHANNELS``); ``None``: one ring and
            two trees for each head (`nccl_order`), with as many heads as the fullest node of a
            group has ranks, as on hosts with a network card for each GPU.

    Attributes:
        members: global ranks by NCCL rank, an int64 array [groups, ranks per group]; groups by
            the coordinate of the other axes, row-major.
        pattern: number of each group's pattern, an int64 array [groups]; patterns are numbered
            by the first group that has them.
    """

    def __init__(
        self,
        layout: Layout,
        axes: tuple[int, ...],
        topology: Topology,
        *,
        sort_ranks: bool = True,
        channels: int | None = None,
    ) -> None:
        self.sizes = tuple(s for i, s in enumerate(layout.sizes) if i not in axes)
        self.outer = tuple(i for i in range(len(layout.sizes)) if i not in axes)
        members = layout.siblings(axes)
        # Position by mesh coordinate of the member with NCCL rank 0, 1, ...: siblings have equal
        # inputs at equal coordinates, in whatever order the communicator has them.
        place: Integers | None = None
        if sort_ranks and bool((members[:, 1:] < members[:, :-1]).any()):
            place = members.argsort(axis=1)
            members = np.take_along_axis(members, place, axis=1)
        self.members = members
        nodes = topology.nodes_of(members)
        assert nodes is not None
        labels = _label_equal(nodes)
        keys = labels if place is None else np.concatenate([labels, place], axis=1)
        self.pattern, first = find_distinct_rows(keys)
        self._first_group = first
        self._labels = labels[first]
        self._place = None if place is None else place[first]
        self._most_channels = channels
        self._find_form = lru_cache(maxsize=_MAX_FORMS)(self._make_form)
        # The texts are examples of several hazards.
        self.draw = lru_cache(maxsize=_MAX_DRAWN)(self._draw)
        self._number = cache(self._number_orders)

    @property
    def size(self) -> int:
        """Ranks per group."""
        return int(self.members.shape[1])

    @cached_property
    def _nodes(self) -> list[tuple[tuple[int, ...], ...]]:
        return [*map(order.nodes_of_group, self._labels.tolist())]

    @cached_property
    def signatures(self) -> tuple[tuple[int, ...], ...]:
        """Ranks per node for each pattern, nodes in order of their first NCCL rank."""
        return tuple(tuple(map(len, nodes)) for nodes in self._nodes)

    def sets(self, along: Sequence[int]) -> Integers:
        """Groups that differ only along the axes ``along``: an int64 array [sets, groups]."""
        inner = [i for i, axis in enumerate(self.outer) if axis in along]
        rest = [i for i in range(len(self.outer)) if i not in inner]
        width = math.prod(self.sizes[i] for i in inner)
        grid = np.arange(len(self.pattern)).reshape(self.sizes)
        return grid.transpose(*rest, *inner).reshape(-1, width)

    @cached_property
    def heads(self) -> int:
        """Heads of the nodes of each group; a group on one node repeats its only one."""
        return max(map(order.count_heads, self.signatures))

    @cached_property
    def channels(self) -> range:
        """The channels of each group. Those of one number add the same part of a message."""
        return range(min(2 * self.heads, self._most_channels or 2 * self.heads))

    def associations(self, algorithm: Algorithm, groups: Integers) -> Integers:
        """A number for each of ``groups`` (positions in ``members``), int64 of their shape: equal
        if and only if both add in the same order under ``algorithm``, in every channel and
        chunk. Numbers of two calls cannot be compared.
        """
        patterns = self.pattern[groups]
        present = tuple(np.flatnonzero(np.bincount(patterns.ravel())).tolist())
        numbers: Integers = self._number(algorithm, present)[patterns]
        return numbers

    def _number_orders(self, algorithm: Algorithm, patterns: tuple[int, ...]) -> Integers:
        """For each pattern the number of its order; 0 for those not among ``patterns``."""
        matching = [list(patterns)]
        # Most patterns already differ in the first channel. Only the others need the next one.
        for channel in self.channels:
            if all(len(part) == 1 for part in matching):
                break
            matching = [
                part for whole in matching for part in self._split(algorithm, whole, channel)
            ]
        table = np.zeros(len(self._first_group), dtype=np.int64)
        for number, part in enumerate(matching):
            table[part] = number
        return table

    def find_channel(self, algorithm: Algorithm, one: int, other: int) -> int:
        """The first channel in which groups ``one`` and ``other`` differ under ``algorithm``."""
        pair = [int(self.pattern[one]), int(self.pattern[other])]
        return next(c for c in self.channels if len(self._split(algorithm, pair, c)) > 1)

    def ring(self, group: int, channel: int = 0) -> tuple[int, ...]:
        """The ring of a group in a channel, as places by mesh coordinate."""
        ring = order.join_rings(self._nodes[self.pattern[group]], channel % self.heads)
        return tuple(map(self._place_leaf(group), ring))

    def tree(
        self,
        algorithm: Algorithm,
        group: int,
        chunk: int,
        channel: int = 0,
    ) -> order.Tree:
        """The association of global ranks under ``algorithm`` in a ``channel`` of a ``group``.
        Each ``chunk`` of the message starts at another rank of a ring; a tree ignores it.
        """
        nodes, head = self._nodes[self.pattern[group]], channel % self.heads
        ranks = self.members[group].tolist()
        if algorithm == "ring":
            tree = order.ring_tree(order.join_rings(nodes, head), chunk)
        else:
            tree = order.node_tree(nodes, head, second=channel >= self.heads)
        return order.relabel(tree, ranks.__getitem__)

    def _draw(self, algorithm: Algorithm, group: int, chunk: int, channel: int) -> str:
        return order.draw(self.tree(algorithm, group, chunk, channel))

    def smallest(self, groups: Integers) -> int:
        """Of ``groups``, the one on the fewest nodes; of several such, that of the lowest rank."""
        nodes = np.array([len(s) for s in self.signatures])[self.pattern[groups]]
        lowest = self.members[groups].min(axis=1)
        return int(groups[np.lexsort((lowest, nodes))[0]])

    def _split(
        self,
        algorithm: Algorithm,
        patterns: list[int],
        channel: int,
    ) -> list[list[int]]:
        """Parts of ``patterns`` that add in one order in a channel."""
        if len(patterns) == 1 or self.size <= 2:  # a sum of two commutes
            return [patterns]
        forms = ((self._find_form(algorithm, channel, pattern), pattern) for pattern in patterns)
        return list(group_values(forms).values())

    def _make_form(self, algorithm: Algorithm, channel: int, pattern: int) -> bytes:
        """A digest of the order in a channel, as the order itself is as long as a group."""
        if algorithm == "ring":
            # The ring itself is the canonical form. Chunk c adds the chain x[c+1], x[c+2], ...,
            # x[c] along the ring x. Commuting additions can swap only the first two leaves of a
            # chain: each later leaf is the difference of two partial sums. With 3 or more ranks,
            # x[c] is such a later leaf in chunk c. So two rings that agree in all chunks have the
            # same x[c] for every c, hence are equal; and equal rings agree in every chunk.
            ring = np.array(self.ring(int(self._first_group[pattern]), channel))
            return hashlib.sha256(ring.tobytes()).digest()
        # A sum is known by its lowest leaf. Each other leaf is the lowest of a sum that is once
        # added to one with a lower leaf. That leaf, and the number of sums before, determine all
        # pairs.
        size = self.size
        pairs, added = array("q", bytes(8 * size)), [0] * size

        def join(one: int, other: int) -> int:
            low, high = (one, other) if one < other else (other, one)
            pairs[high] = low * size + added[low]
            added[low] += 1
            return low

        self.fold_tree(int(self._first_group[pattern]), int, join, channel)
        return hashlib.sha256(pairs.tobytes()).digest()

    def fold_tree(
        self,
        group: int,
        leaf: Callable[[int], _T],
        join: Callable[[_T, _T], _T],
        channel: int = 0,
    ) -> _T:
        """Evaluate the tree of a ``group`` in a ``channel``: ``leaf`` on the place of each rank by
        mesh coordinate, ``join`` on each pair.
        """
        place = self._place_leaf(group)
        return order.fold_nodes(
            self._nodes[self.pattern[group]],
            channel % self.heads,
            channel >= self.heads,
            lambda rank: leaf(place(rank)),
            join,
        )

    def _place_leaf(self, group: int) -> Callable[[int], int]:
        if self._place is None:
            return int
        place: list[int] = self._place[self.pattern[group]].tolist()
        return place.__getitem__


def cache_siblings(
    layout: Layout,
    topology: Topology,
    *,
    sort_ranks: bool = True,
    channels: int | None = None,
) -> Callable[[tuple[int, ...]], Siblings]:
    return cache(
        lambda axes: Siblings(layout, axes, topology, sort_ranks=sort_ranks, channels=channels)
    )


def _label_equal(rows: Integers) -> Integers:
    """For each entry of int64 [n, m], the column of the first equal entry in its row."""
    column = rows.argsort(axis=1, kind="stable")
    values = np.take_along_axis(rows, column, axis=1)
    starts = np.zeros_like(column)
    starts[:, 1:] = np.arange(1, rows.shape[1]) * (values[:, 1:] != values[:, :-1])
    # Each entry gets the start of its run of equal values. The sort is stable, so the first
    # column of the run is there.
    run = np.maximum.accumulate(starts, axis=1)
    found = np.empty_like(column)
    np.put_along_axis(found, column, np.take_along_axis(column, run, axis=1), axis=1)
    return found


def find_distinct_rows(rows: Integers) -> tuple[Integers, Integers]:
    """Number the distinct rows of int64 [n, m] in order of appearance: the number of each row [n],
    and for each number its first row [distinct].
    """
    # Sorting hashes is much cheaper than sorting rows. Equal rows have equal hashes. If unequal
    # rows collide, the comparison fails and the rows themselves are sorted.
    number, first = _number_by_appearance(_hash_rows(rows))
    if not np.array_equal(rows[first][number], rows):
        number, first = _number_by_appearance(rows)
    return number, first


def _hash_rows(rows: Integers) -> Integers:
    # Modulo 2**64. numpy.random takes long to import.
    weights = np.arange(1, 2 * rows.shape[1], 2) ** 15
    found: Integers = (rows * weights).sum(axis=1)
    return found


def _number_by_appearance(keys: Integers) -> tuple[Integers, Integers]:
    _, first, number = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    order = first.argsort()
    renumber = np.empty_like(order)
    renumber[order] = np.arange(len(order))
    numbers: Integers = renumber[number.reshape(len(keys))]
    return numbers, first[order]


_UNMODELLED = ("nvls", "collnet", "rccl")
_IDENTICAL = "identical orders of additions under ring and tree"


def hazards(
    problem: Problem,
    topology: Topology,
    *,
    steps: Sequence[Sequence[int | str]] | None = None,
    sort_ranks: bool = True,
    channels: int | None = None,
    siblings_over: Callable[[tuple[int, ...]], Siblings] | None = None,
    with_examples: bool = True,
) -> tuple[Hazard, ...]:
    """The reductions that can make replicas differ if the backend chooses their order.

    The policy and contract of ``problem`` do not matter: under the contract there is no hazard.

    Args:
        problem: the redistribution. A dtype of integers makes every reduction safe.
        topology: rank placement; it must include the highest rank of the layout.
        steps: the axes of each reduction, in the order of execution; several axes are one
            flattened reduction. An axis that goes from sharded to replicated may be a step too:
            the point at which it is gathered. torch gathers inner axes before it reduces outer
            ones. An axis that ``steps`` omits is gathered after the last reduction. By default
            all partial axes are one reduction (one for each axis if their arithmetic differs).
        sort_ranks, channels: as for ``Siblings``.
        siblings_over: the groups over axes, of the same layout, topology and options, for callers
            that check several problems of a large mesh. By default they are computed in each call.
        with_examples: whether to write out the orders of two groups; seconds for those of 100,000
            ranks.

    Returns:
        A ``Hazard`` for each reduction that is not safe in every order, in the order of the steps.
        Omitted: groups of 1 or 2 ranks (IEEE addition commutes), ``max``, ``min`` and integers
        (exact), and reductions without siblings that must agree. A reduction to shards is
        checked as an all-reduce, because the ring of a reduce-scatter differs in no more cases.

    Raises:
        TopologyError: the layout has a rank that the topology lacks.
        PlacementError: ``steps`` has an axis that is not pending or an axis twice, has an empty
            step, omits a partial axis, or mixes operations that cannot be reduced together.
        AxisNameError: ``steps`` names an axis that the mesh does not have.
    """
    if siblings_over is None:
        siblings_over = cache_siblings(
            problem.layout, topology, sort_ranks=sort_ranks, channels=channels
        )
    return _Analysis(problem, topology, steps, siblings_over).run(with_examples)


def are_uniform(
    problem: Problem,
    topology: Topology,
    *,
    steps: Sequence[Sequence[int | str]] | None = None,
) -> bool:
    """Whether all siblings that must agree have the same node placement; ``False`` if nodes are
    unknown. Arguments and errors are those of `hazards`.
    """
    # Stricter than `hazards`: it does not rely on different placements that add in the same order.
    # Faster, because it computes no orders.
    siblings_over = cache_siblings(problem.layout, topology)
    return _Analysis(problem, topology, steps, siblings_over).is_uniform()


class _Analysis:
    def __init__(
        self,
        problem: Problem,
        topology: Topology,
        steps: Sequence[Sequence[int | str]] | None,
        siblings_over: Callable[[tuple[int, ...]], Siblings],
    ) -> None:
        check_reach(topology, problem.layout)
        self.steps = choose_default_steps(problem) if steps is None else check_steps(problem, steps)
        self.problem = problem
        self.layout = problem.layout
        self.topology = topology
        self.replicated = {i for i, s in enumerate(problem.src) if s.kind == "replicate"}
        self._siblings_over = siblings_over

    def run(self, with_examples: bool) -> tuple[Hazard, ...]:
        judged = (self._judge(axes, held) for axes, held in self._iterate_reductions())
        found = [hazard for hazard in judged if hazard is not None]
        if not with_examples or all(hazard.verdict == "none" for hazard in found):
            return tuple(found)
        fixes = self._suggest_fixes()
        return tuple(self._explain(h, fixes) for h in found)

    def is_uniform(self) -> bool:
        if not self.topology.known:
            return False
        for axes, held in self._iterate_reductions():
            along = self._find_axes_at_risk(axes, held)
            if along and len(_find_mixed_sets(self._siblings_over(axes), along)):
                return False
        return True

    def _iterate_reductions(self) -> Iterator[tuple[tuple[int, ...], set[int]]]:
        """The steps that reduce, and the axes along which ranks hold equal values before them."""
        held = set(self.replicated)
        for axes in self.steps:
            if not self._is_gather(axes):
                yield axes, held
            held = held.union(axes)

    def _find_axes_at_risk(
        self,
        axes: tuple[int, ...],
        held: set[int],
    ) -> tuple[int, ...]:
        """The axes along which siblings must agree; none if every order has the same bits."""
        group_size = math.prod(self.layout.sizes[i] for i in axes)
        if group_size <= 2 or is_exact(self.problem, axes):
            return ()
        return self._find_agreeing_axes(axes, held)

    def _judge(self, axes: tuple[int, ...], held: set[int]) -> Hazard | None:
        sizes, labels, dst = self.layout.sizes, self.layout.axes, self.problem.dst
        along = self._find_axes_at_risk(axes, held)
        if not along:
            return None
        group_size = math.prod(sizes[i] for i in axes)
        scattered = any(dst[i].kind in SHARDED for i in axes)
        hazard = Hazard(
            axes=axes,
            labels=tuple(labels[i] for i in axes),
            along=tuple(labels[i] for i in along),
            op=_name_operation([self.problem.src[i] for i in axes]),
            group_size=group_size,
            groups=self.layout.world_size // group_size,
            siblings=math.prod(sizes[i] for i in along),
            signatures=(),
            classes=(),
            # NCCL has the algorithm PAT for reduce-scatter and all-gather only.
            unknown=(*_UNMODELLED, "pat") if scattered else _UNMODELLED,
        )
        if not self.topology.known:
            return replace(hazard, unknown=(*ALGORITHMS, *hazard.unknown))
        siblings = self._siblings_over(axes)
        return replace(
            hazard,
            classes=_count_orders(siblings, _find_mixed_sets(siblings, along)),
            signatures=tuple(dict.fromkeys(siblings.signatures)),
        )

    def _explain(self, hazard: Hazard, fixes: tuple[str, ...]) -> Hazard:
        if hazard.verdict == "none":
            return hazard
        hazard = replace(hazard, fixes=fixes)
        if not hazard.may_differ:
            return hazard
        siblings = self._siblings_over(hazard.axes)
        mixed = _find_mixed_sets(siblings, self.layout.axis_indices(hazard.along))
        return _add_examples(hazard, siblings, mixed)

    def _find_agreeing_axes(self, axes: tuple[int, ...], held: set[int]) -> tuple[int, ...]:
        return tuple(
            i
            for i in sorted(held - set(axes))
            if self.layout.sizes[i] > 1 and self.problem.dst[i].kind == "replicate"
        )

    def _is_gather(self, axes: tuple[int, ...]) -> bool:
        return self.problem.src[axes[0]].kind in SHARDED

    def _suggest_fixes(self) -> tuple[str, ...]:
        src, steps = self.problem.src, self.steps
        reductions = [axes for axes in steps if not self._is_gather(axes)]
        gathers = [axes for axes in steps if self._is_gather(axes)]
        flat = tuple(sorted(i for axes in reductions for i in axes))
        fixes = []
        if can_merge([src[i] for i in flat]):
            better = self._find_safe_order(reductions) if len(steps) > 1 else None
            if better is not None:
                then = f", then gather {self._format_steps(gathers)}" if gathers else ""
                fixes.append(
                    f"reduce in the order {self._format_steps(better)}{then}: {_IDENTICAL}"
                )
            if len(reductions) > 1 and self._is_safe(flat, self.replicated):
                alone = not self._find_agreeing_axes(flat, self.replicated)
                why = "no siblings remain" if alone else _IDENTICAL
                fixes.append(f"reduce over {self._format_steps([flat])} at once: {why}")
        if has_contract(self.problem, flat):
            fixes.append("use the contract (policy 'deterministic'): the order never varies")
        return tuple(fixes)

    def _find_safe_order(
        self, reductions: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, ...]] | None:
        # Greedy from the end. A step adds its axes to those along which later siblings must agree,
        # so moving a step earlier never makes it unsafe. If a step is safe in the last place, any
        # safe order stays safe when that step moves to its end: no search is needed.
        left, later = list(reductions), list[tuple[int, ...]]()
        while left:
            held = self.replicated.union(*left)
            last = next((axes for axes in reversed(left) if self._is_safe(axes, held)), None)
            if last is None:
                return None
            left.remove(last)
            later.insert(0, last)
        return later

    def _is_safe(self, axes: tuple[int, ...], held: set[int]) -> bool:
        hazard = self._judge(axes, held)
        return hazard is None or hazard.verdict == "none"

    def _format_steps(self, steps: Sequence[tuple[int, ...]]) -> str:
        labels = self.layout.axes
        return ", ".join(f"({', '.join(labels[i] for i in axes)})" for axes in steps)


def _find_mixed_sets(siblings: Siblings, along: tuple[int, ...]) -> Integers:
    """The sets of siblings with several patterns: groups of one pattern add in one order."""
    sets = siblings.sets(along)
    patterns = siblings.pattern[sets]
    mixed: Integers = sets[(patterns != patterns[:, :1]).any(axis=1)]
    return mixed


def _count_orders(siblings: Siblings, mixed: Integers) -> tuple[tuple[Algorithm, int], ...]:
    """Associations per algorithm in the worst set."""
    classes: list[tuple[Algorithm, int]] = []
    for algorithm in ALGORITHMS:
        count = 1
        if len(mixed):
            ordered = np.sort(siblings.associations(algorithm, mixed), axis=1)
            count += int((ordered[:, 1:] != ordered[:, :-1]).sum(axis=1).max())
        classes.append((algorithm, count))
    return tuple(classes)


def _add_examples(hazard: Hazard, siblings: Siblings, mixed: Integers) -> Hazard:
    # Prefer the tree, which is last: it has one expression for the whole message, a ring has one
    # for each chunk.
    algorithm = hazard.may_differ[-1]
    numbers = siblings.associations(algorithm, mixed)
    differ = (numbers != numbers[:, :1]).any(axis=1)
    mixed, numbers = mixed[differ], numbers[differ]
    # The first example is the group that is easiest to read, the second one of its siblings in
    # another order.
    first = siblings.smallest(mixed.flatten())
    row = int((mixed == first).any(axis=1).argmax())
    other = numbers[row] != numbers[row][mixed[row] == first]
    second = siblings.smallest(mixed[row][other])
    channel = siblings.find_channel(algorithm, first, second)
    # Different rings may still agree in some chunks: show a chunk in which these two differ.
    chunk = None
    if algorithm == "ring":
        one, two = (siblings.ring(group, channel) for group in (first, second))
        chunk = next(
            c
            for c in range(hazard.group_size)
            if not order.same_bits(order.ring_tree(one, c), order.ring_tree(two, c))
        )
    examples = tuple(
        Example(
            ranks=tuple(siblings.members[group].tolist()),
            signature=siblings.signatures[int(siblings.pattern[group])],
            expression=siblings.draw(algorithm, group, chunk or 0, channel),
        )
        for group in (first, second)
    )
    return replace(hazard, algorithm=algorithm, channel=channel, chunk=chunk, examples=examples)


def _name_operation(specs: Sequence[Spec]) -> str:
    if specs[0].kind == "partial":
        return "avg" if any(s.op == "avg" for s in specs) else f"{specs[0].op}"
    return specs[0].text if specs[0].norm is None else f"{specs[0].norm:g}-norm"
