"""Which siblings of a sequence of reductions must agree, and whether they do in the NCCL model.

Siblings must agree along an axis if they have the same inputs and must produce the same replica:
the axis is replicated at the source, or an earlier step reduced or gathered it, and it ends
replicated. Along an axis that is reduced later, is sharded or ends sharded, each group has its own
inputs or its own piece of the result.

One step at a time is enough. All members of a group get the same bits, in whatever order the group
adds, so every group hands one value to all siblings of the next step. The rule is also exact in
the model: a subtree of the final association is identified by its set of leaves, so equal results
need equal associations in every step.

The model can show that siblings may disagree. It cannot show that they agree on a real machine:
it excludes in-switch reductions (NVLS, CollNet), RCCL and GPUs without NVSwitch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from meshplan.layout import Integers
from meshplan.planner import nccl_order as order
from meshplan.planner._hazard import Example, Hazard
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
from meshplan.planner._siblings import ALGORITHMS, Algorithm, Siblings, cache_siblings
from meshplan.topology import Topology

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
        sort_ranks: ranks of a communicator ascend by global rank, as in groups that torch creates
            for a mesh; ``False``: by mesh coordinate, as in groups that meshplan creates. Both
            are the same on a mesh whose ranks ascend.
        channels: the most channels that NCCL uses (``NCCL_MAX_NCHANNELS``). By default one ring and
            two trees for each of the ranks of the fullest node, as on hosts with a network card for
            each GPU.
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
    check_reach(topology, problem.layout)
    sequence = choose_default_steps(problem) if steps is None else check_steps(problem, steps)
    if siblings_over is None:
        siblings_over = cache_siblings(
            problem.layout, topology, sort_ranks=sort_ranks, channels=channels
        )
    return _Analysis(problem, topology, siblings_over).run(sequence, with_examples)


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
    check_reach(topology, problem.layout)
    if not topology.known:
        return False
    sequence = choose_default_steps(problem) if steps is None else check_steps(problem, steps)
    return _Analysis(problem, topology, cache_siblings(problem.layout, topology)).is_uniform(
        sequence
    )


class _Analysis:
    """One call of `hazards`. The groups of a reduction are computed once for all fixes."""

    def __init__(
        self,
        problem: Problem,
        topology: Topology,
        siblings_over: Callable[[tuple[int, ...]], Siblings],
    ) -> None:
        self.problem = problem
        self.layout = problem.layout
        self.topology = topology
        self.replicated = {i for i, s in enumerate(problem.src) if s.kind == "replicate"}
        self._siblings_over = siblings_over

    def run(self, steps: Sequence[tuple[int, ...]], with_examples: bool) -> tuple[Hazard, ...]:
        judged = (self._judge(axes, held) for axes, held in self._iterate_reductions(steps))
        found = [hazard for hazard in judged if hazard is not None]
        if not with_examples or all(hazard.verdict == "none" for hazard in found):
            return tuple(found)
        fixes = self._suggest_fixes(steps)
        return tuple(self._explain(h, fixes) for h in found)

    def is_uniform(self, steps: Sequence[tuple[int, ...]]) -> bool:
        for axes, held in self._iterate_reductions(steps):
            along = self._find_axes_at_risk(axes, held)
            if along:
                siblings = self._siblings_over(axes)
                patterns = siblings.pattern[siblings.sets(along)]
                if not bool((patterns == patterns[:, :1]).all()):
                    return False
        return True

    def _iterate_reductions(
        self, steps: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], set[int]]]:
        """The steps that reduce, and the axes along which ranks hold equal values before them."""
        held = set(self.replicated)
        for axes in steps:
            if not self._is_gather(axes):
                yield axes, held
            held = held.union(axes)

    def _find_axes_at_risk(self, axes: tuple[int, ...], held: set[int]) -> tuple[int, ...]:
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
        """The hazard with fixes, and with examples if its siblings may differ."""
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

    def _suggest_fixes(self, steps: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
        src = self.problem.src
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
