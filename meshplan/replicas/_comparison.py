"""The comparison of tensors over one mesh, whose axes of replicas are known for each of them.

When all agree there is one all-gather of 128 bytes of each rank:

* 128 bits of the list of tensors: step, mesh, and name, dtype, shape, placements of each, and
* for up to seven sets of axes along which tensors are replicated, the digest of the digests of
  those tensors. More sets than seven, which takes a mesh of four axes, need a second all-gather.

All ranks see the same words and take the same next step. If lists differ, one rank's list is
broadcast. If digests differ, those of the tensors of that set are gathered, in pieces; then pairs
of ranks compare the elements of the first few tensors, in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshplan._bits import element_index
from meshplan.errors import Divergence, ReplicaDivergenceError
from meshplan.kernel import digest_table
from meshplan.layout import Layout
from meshplan.replicas._axes import ReplicaAxes
from meshplan.replicas._channel import ReplicaChannel, check_lists, hash_lines
from meshplan.replicas._divergence import (
    find_differing_groups,
    format_divergences,
    group_positions,
    split_by_digest,
)
from meshplan.replicas._elements import compare_elements
from meshplan.replicas._tensors import NamedTensor

ROWS = 7
_GATHERED_BYTES = 16 << 20
_LISTED = 8
_COMPARED_CLASSES = 3


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The caller's ``step`` and ``details``, and whether FSDP2 reduces gradients of the source."""

    step: int | None
    details: int
    fsdp: bool


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """The tensors that are replicated along the same axes, and their digests."""

    axes: tuple[int, ...]
    tensors: list[NamedTensor]
    digests: Tensor


@dataclass(frozen=True, slots=True)
class _DivergentGroup:
    """A divergence whose elements have not been compared; ``classes`` are positions."""

    tensor: NamedTensor
    replicated: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]
    axes: tuple[int, ...]


def axis_labels(layout: Layout, axes: Sequence[int]) -> tuple[str, ...]:
    return tuple(layout.axes[axis] for axis in axes)


def group_by_axes(
    tensors: Sequence[NamedTensor], axes: ReplicaAxes, header: str
) -> tuple[list[ReplicaSet], list[str]]:
    """The replicated tensors by axes, and a list that must be the same on all ranks."""
    by_axes: dict[tuple[int, ...], list[NamedTensor]] = {}
    lines = [f"{header}, mesh {axes.layout}"]
    for tensor in tensors:
        along = axes.find(tensor)
        labels = ", ".join(axis_labels(axes.layout, along)) or "no axis"
        lines.append(f"{tensor}, replicas along {labels}")
        if along:
            by_axes.setdefault(along, []).append(tensor)
    sets = [
        ReplicaSet(along, by_axes[along], digest_table([one.local for one in by_axes[along]]))
        for along in sorted(by_axes)
    ]
    return sets, lines


def compare_sets(
    channel: ReplicaChannel,
    layout: Layout,
    sets: Sequence[ReplicaSet],
    lines: Sequence[str],
    options: CheckOptions,
    notes: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """Compare the tensors of ``sets``; returns the ``notes`` of all ranks, [ranks, notes, 2].

    ``notes`` travel in the rows of the first message that the sets leave free.
    """
    # One message of a fixed shape, whatever the tensors are: ranks with other lists must still be
    # able to exchange it. Sets beyond the seventh are sent only once the lists agree.
    totals = digest_table([one.digests for one in sets])
    first = torch.zeros((1 + ROWS, 2), dtype=torch.int64, device="cpu")
    first[0] = torch.tensor(hash_lines(lines), dtype=torch.int64, device="cpu")
    first[1 : 1 + len(sets)] = totals[:ROWS]
    if notes:
        first[-len(notes) :] = torch.tensor(notes, dtype=torch.int64, device="cpu")
    gathered = channel.gather(first)
    check_lists(channel, layout, gathered[:, 0], lines)
    every_note = gathered[:, 1 + ROWS - len(notes) :]
    gathered = gathered[:, 1:]
    if len(sets) > ROWS:
        gathered = torch.cat([gathered, channel.gather(totals[ROWS:])], 1)
    found: list[_DivergentGroup] = []
    names: set[str] = set()
    groups = 0
    for number, one in enumerate(sets):
        positions = group_positions(layout, one.axes)
        if find_differing_groups(gathered[:, number : number + 1], positions):
            # All ranks have read the same digests, so all gather those of the same tensors.
            wanted = max(_LISTED, options.details) - len(found)
            differing, candidates = _find_candidates(channel, layout, one, positions, wanted)
            found += candidates
            names |= set(differing)
            groups += len(differing)
    if not found:
        return every_note
    divergences = tuple(
        _describe(channel, layout, one, compare=number < options.details)
        for number, one in enumerate(found)
    )
    text = format_divergences(
        layout,
        divergences,
        tensors=len(names),
        compared=sum(len(one.tensors) for one in sets),
        groups=groups,
        step=options.step,
        order=_describe_order(channel, options, [one.tensor for one in found]),
    )
    raise ReplicaDivergenceError(
        text, divergences=divergences, tensors=len(names), step=options.step
    )


def _describe_order(
    channel: ReplicaChannel, options: CheckOptions, tensors: Sequence[NamedTensor]
) -> str:
    """How to reduce these tensors in one order, by what reduces them."""
    if channel.backend == "meshplan":
        return ""
    backend = "the backend, init_process_group('meshplan'),"
    if options.fsdp or all(tensor.mesh is None for tensor in tensors):
        return f"use {backend} for reductions of {'FSDP2' if options.fsdp else 'DDP'}"
    return f"use meshplan.install() for reductions of DTensor, {backend} for FSDP2 and DDP"


def _find_candidates(
    channel: ReplicaChannel, layout: Layout, one: ReplicaSet, groups: Tensor, wanted: int
) -> tuple[list[str], list[_DivergentGroup]]:
    """The name of a tensor for each group in which it differs; and the first ``wanted``."""
    # A digest has 16 bytes.
    rows = max(1, _GATHERED_BYTES // (16 * channel.size))
    found: list[_DivergentGroup] = []
    names: list[str] = []
    for start in range(0, len(one.tensors), rows):
        gathered = channel.gather(one.digests[start : start + rows])
        for row, group in find_differing_groups(gathered, groups):
            tensor = one.tensors[start + row]
            names.append(tensor.name)
            if len(found) < wanted:
                members = sorted(groups[group].tolist())
                parts = split_by_digest(layout, members, gathered[:, row], one.axes)
                found.append(_DivergentGroup(tensor, one.axes, *parts))
    return names, found


def _describe(
    channel: ReplicaChannel, layout: Layout, found: _DivergentGroup, compare: bool
) -> Divergence:
    parts = found.classes
    others = parts[1 : 1 + _COMPARED_CLASSES] if compare else ()
    return Divergence(
        name=found.tensor.name,
        what=str(found.tensor),
        replicated=axis_labels(layout, found.replicated),
        axes=axis_labels(layout, found.axes),
        classes=tuple(tuple(layout.ranks[place] for place in part) for part in parts),
        coordinates=tuple(
            tuple(element_index(place, layout.sizes) for place in part) for part in parts
        ),
        elements=tuple(
            compare_elements(
                channel, found.tensor.local, parts[0][0], part[0], layout.ranks[part[0]]
            )
            for part in others
        ),
    )
