"""Ranks whose replicas differ from the rest: groups by digest, the report, and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshplan.errors import Divergence, Elements
from meshplan.layout import Layout

_SHOWN_RANKS = 4


def group_positions(layout: Layout, axes: Sequence[int]) -> Tensor:
    """Positions of the ranks that hold replicas along ``axes``: int64 [groups, ranks]."""
    return torch.tensor(Layout(layout.sizes).siblings(tuple(axes)), device="cpu")


def find_differing_groups(digests: Tensor, groups: Tensor) -> list[tuple[int, int]]:
    """Row and group wherever the ranks of a group do not agree, by row.

    Args:
        digests: [ranks of the mesh, rows, words], ranks by position.
        groups: from ``group_positions``.
    """
    # Every member is compared with the first: equality is transitive.
    found = digests[groups]
    differs = (found != found[:, :1]).any(3).any(1)
    return [(row, group) for row, group in differs.t().nonzero().tolist()]


def split_by_digest(
    layout: Layout, group: Sequence[int], digests: Tensor, axes: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """The classes of one group of ranks, and the axes along which two neighbours differ.

    Args:
        layout: of the mesh.
        group: positions in the mesh (row-major coordinates), ascending.
        digests: [ranks of the mesh, words] of one tensor.
        axes: of the group.

    Returns:
        Positions, those of one digest together: the class of the most ranks first, of equally
        large ones that of the lowest position; and axes, ascending.
    """
    of = {position: tuple(digests[position].tolist()) for position in group}
    classes: dict[tuple[int, ...], list[int]] = {}
    for position in group:
        classes.setdefault(of[position], []).append(position)
    ordered = sorted(classes.values(), key=lambda members: (-len(members), members[0]))
    # An axis counts if some line of the group along it has two digests. One bad rank counts along
    # all axes; a node whose ranks agree on other bits, only along the axes that leave it.
    along = []
    for axis in axes:
        lines = group_positions(layout, (axis,))
        mine = lines[torch.isin(lines[:, 0], torch.tensor(sorted(group), device="cpu"))]
        if any(len({of[position] for position in line}) > 1 for line in mine.tolist()):
            along.append(axis)
    return tuple(map(tuple, ordered)), tuple(along)


def _format_divergence(layout: Layout, found: Divergence) -> list[str]:
    along, replicated = ", ".join(found.axes), ", ".join(found.replicated)
    rest = "" if found.axes == found.replicated else f", though replicated along {replicated}"
    texts = {one.rank: f": {_format_elements(one, found.reference)}" for one in found.elements}
    lines = [f"  {found.what}: differs along {along}{rest}"]
    parts = list(zip(found.classes, found.coordinates, strict=True))
    for number, (ranks, coordinates) in enumerate(parts[: 1 + _SHOWN_RANKS]):
        text = texts.get(ranks[0], "") if number else ": the reference"
        lines.append(f"    {_format_ranks(layout, ranks, coordinates)}{text}")
    more = len(found.classes) - 1 - _SHOWN_RANKS
    return lines + ([f"    and {more} more different replicas"] if more > 0 else [])


def _format_elements(found: Elements, reference: int) -> str:
    if found.shapes is not None:
        mine, theirs = map(list, found.shapes)
        return f"its local shape is {mine}, that of rank {reference} {theirs}"
    if found.count == 0:
        return (
            "a second comparison found no difference: the tensor changes while it is compared; "
            "wait for the code that writes to it"
        )
    ulps = "" if found.max_ulps is None else f", at most {found.max_ulps} ulps apart"
    return (
        f"{found.count} of {found.numel} elements differ, first at index {found.index}: "
        f"{found.value}, on rank {reference} {found.reference}{ulps}"
    )


def _format_ranks(
    layout: Layout, ranks: tuple[int, ...], coordinates: tuple[tuple[int, ...], ...]
) -> str:
    shown = []
    for rank, place in list(zip(ranks, coordinates, strict=True))[:_SHOWN_RANKS]:
        at = ", ".join(f"{axis}={i}" for axis, i in zip(layout.axes, place, strict=True))
        shown.append(f"rank {rank} ({at})")
    more = len(ranks) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The compared tensors of this rank, all of which are equal.

    Attributes:
        tensors: how many.
        elements, nbytes: of their local data.
        by_axes: how many tensors were compared along which axes, by label.
        unreplicated: names of tensors that have one replica on the mesh.
        step: the given step number, or ``None``.
        seconds: duration of the whole comparison.
    """

    tensors: int
    elements: int
    nbytes: int
    by_axes: tuple[tuple[tuple[str, ...], int], ...]
    unreplicated: tuple[str, ...]
    step: int | None
    seconds: float

    def __str__(self) -> str:
        along = "; ".join(f"{count} along {', '.join(axes)}" for axes, count in self.by_axes)
        step = "" if self.step is None else f"step {self.step}: "
        compared = f"{self.tensors} tensors, {self.nbytes} bytes, agree on all ranks"
        single = len(self.unreplicated)
        rest = f"; {single} have one replica each" if single else ""
        return f"{step}{compared}{f' ({along})' if along else ''}{rest}, in {self.seconds:.3f} s"


def format_divergences(
    layout: Layout,
    divergences: tuple[Divergence, ...],
    *,
    tensors: int,
    compared: int,
    groups: int,
    step: int | None,
    order: str,
) -> str:
    """The text of the error.

    Args:
        layout: of the mesh.
        divergences: the first of them.
        tensors, compared: how many differ, and out of how many.
        groups: how many divergences there are in all.
        step: if given.
        order: how to reduce these tensors in one order; empty if they are on the backend already.
    """
    at = "" if step is None else f" at step {step}"
    lines = [f"replicas differ{at} in {tensors} of {compared} tensors, on mesh {layout}"]
    for divergence in divergences:
        lines += _format_divergence(layout, divergence)
    if groups > len(divergences):
        lines.append(f"  and {groups - len(divergences)} more groups of replicas")
    return "\n".join([*lines, _advise(divergences, order)])


def _advise(divergences: tuple[Divergence, ...], order: str) -> str:
    """What the evidence in the divergences suggests."""
    elements = [one for divergence in divergences for one in divergence.elements]
    compared = [one for one in elements if one.count]
    numel, count, unrelated = (
        sum(getattr(one, name) for one in compared) for name in ("numel", "count", "unrelated")
    )
    # Additions in other orders change most elements by little, and few of them by a factor of 2:
    # those near zero. Of independent weights three quarters differ by as much.
    if count * 10 >= numel * 9 > 0 and unrelated * 4 >= numel:
        axes = list(dict.fromkeys(axis for one in divergences for axis in one.axes))
        return (
            f"{unrelated} of {numel} elements differ in sign or by more than a factor of 2, so "
            "these replicas never held the same weights: initialise them with one seed, broadcast "
            f"them from one rank, or load one checkpoint{order and f', and {order}'}; if ranks "
            f"along {', '.join(axes)} hold other parameters, such as experts, name these axes in "
            "distinct="
        )
    # Two replicas do not show which of them is wrong.
    single = all(len(one.classes) == 2 and len(one.ranks) == 1 for one in divergences)
    odd = {rank for one in divergences for rank in one.ranks}
    if single and len(odd) == 1 and all(len(one.classes[0]) > 1 for one in divergences):
        return (
            f"only rank {odd.pop()} differs: test its hardware and memory, and go back to an "
            "earlier checkpoint"
        )
    if count:
        order = order or "meshplan.coverage() lists the reductions that are not in one order"
        return (
            f"replicas that drift apart are reduced in different orders: {order}; go back to an "
            "earlier checkpoint, or broadcast the weights from one rank"
        )
    reason = "" if elements else "pass details=4 to compare elements, which shows the reason; "
    return f"{reason}go back to an earlier checkpoint, or broadcast the weights from one rank"
