"""One call over tensors on several meshes, or of ranks that hold other parameters.

The ranks of the call are its scope: all ranks of the mesh that the caller passed, or of the job.
They start with one message and end with another, so that all of them raise an error where one slice
of a mesh differs. Between these each mesh is compared by its own ranks, in one order on all. The
start message has a hash of this rank's coordinates along the declared axes, as ranks of equal ones
hold the same parameters, and of each mesh, so that no rank waits there for one without tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshplan._message_text import format_first
from meshplan.errors import (
    MeshplanError,
    PlacementError,
    PolicyError,
    ReplicaDivergenceError,
    SignatureMismatchError,
)
from meshplan.flatten import this_rank
from meshplan.flatten._distinct_axes import DistinctGroup
from meshplan.kernel import digest_table
from meshplan.layout import Layout
from meshplan.replicas._comparison import (
    CheckOptions,
    ReplicaAxes,
    ReplicaChannel,
    ReplicaSet,
    axis_labels,
    compare_sets,
    hash_lines,
)
from meshplan.replicas._tensors import NamedTensor

# Rows of the start message: the coordinates, and meshes. One row is left for plain tensors.
_NOTES = 6


@dataclass(slots=True)
class MeshTensors:
    """Tensors that are compared over one mesh; ``layout`` shrinks to the ranks that compare."""

    mesh: DeviceMesh
    layout: Layout
    tensors: list[NamedTensor] = field(default_factory=list)
    sets: list[ReplicaSet] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def group(self, header: str) -> None:
        axes = ReplicaAxes(self.mesh, self.layout, this_rank())
        by_axes: dict[tuple[int, ...], list[NamedTensor]] = {}
        self.lines = [f"{header}, mesh {self.layout}"]
        for tensor in self.tensors:
            along = axes.find(tensor)
            labels = ", ".join(axis_labels(self.layout, along)) or "no axis"
            self.lines.append(f"{tensor}, replicas along {labels}")
            if along:
                by_axes.setdefault(along, []).append(tensor)
        self.sets = [
            ReplicaSet(along, found, digest_table([one.local for one in found]))
            for along, found in sorted(by_axes.items(), key=lambda pair: pair[0])
        ]

    def compare(self, options: CheckOptions) -> None:
        if self.layout.world_size > 1:
            channel = ReplicaChannel(self.mesh, self.layout, options.call)
            compare_sets(channel, self.sets, self.lines, options)


def compare_scope(
    scope: MeshTensors,
    others: list[MeshTensors],
    distinct: Sequence[DistinctGroup],
    header: str,
    options: CheckOptions,
) -> bool:
    """Compare all parts; whether any rank has tensors on other meshes, or with ``distinct``."""
    # Ranks that wait for each other on several meshes take them in the same order.
    others.sort(
        key=lambda part: (
            tuple(part.layout.ranks),
            part.layout.sizes,
            part.layout.axes,
        )
    )
    first = scope
    if distinct:
        # Lists may differ between ranks that hold other parameters, so that the scope as a whole
        # compares none.
        header += f", distinct along {', '.join(group.label for group in distinct)}"
        first = MeshTensors(scope.mesh, scope.layout, lines=[f"{header}, mesh {scope.layout}"])
        others += [scope] if scope.tensors else []
    else:
        for part in (scope, *others):
            part.group(header)
    if len(others) >= _NOTES:
        raise PolicyError(
            f"the tensors are on {len(others)} meshes, and one call compares at most "
            f"{_NOTES - 1}; compare the tensors of some meshes in another call"
        )
    ranks = tuple(scope.layout.ranks)
    if len(ranks) == 1:
        return bool(others)
    notes = [hash_lines([str(group.coordinate) for group in distinct])]
    for part in others:
        layout = part.layout
        notes.append(hash_lines([repr((layout.axes, layout.sizes, tuple(layout.ranks)))]))
    channel = ReplicaChannel(scope.mesh, scope.layout, options.call)
    padded = notes + [(0, 0)] * (_NOTES - len(notes))
    gathered = compare_sets(channel, first.sets, first.lines, options, padded)
    if not bool(gathered[:, 1:].any()):
        return False
    words = {
        rank: [tuple(row) for row in rows]
        for rank, rows in zip(ranks, gathered.tolist(), strict=True)
    }
    peers = {rank for rank, rows in words.items() if rows[0] == notes[0]}
    failure: MeshplanError | None = None
    for part, note in zip(others, notes[1:], strict=True):
        part.layout = _restrict(part.layout, peers)
        absent = [rank for rank in part.layout.ranks if note not in words[rank][1:]]
        try:
            _compare_part(part, absent, header if distinct else None, options)
        except (
            PlacementError,
            ReplicaDivergenceError,
            SignatureMismatchError,
        ) as error:
            failure = failure or error
    _share_failure(channel, failure, options.step)
    return True


def _compare_part(
    part: MeshTensors,
    absent: list[int],
    header: str | None,
    options: CheckOptions,
) -> None:
    if absent:
        raise SignatureMismatchError(
            f"rank{'s' if len(absent) > 1 else ''} {format_first(absent)} passed no tensors on "
            f"mesh {part.layout} to the comparison of replicas, and other ranks did; pass the same "
            "tensors on all ranks that share a mesh",
            rank=absent[0],
        )
    misplaced: PlacementError | None = None
    if header is not None:
        try:
            part.group(header)
        except PlacementError as error:
            # The other ranks of the mesh wait for this one: they get the text as its list.
            misplaced, part.lines = error, [str(error)]
    try:
        part.compare(options)
    finally:
        if misplaced is not None:
            raise misplaced


def _restrict(layout: Layout, ranks: set[int]) -> Layout:
    """The layout of those of ``ranks`` that are in it, with its axes if they fill some of them."""
    members = tuple(rank for rank in layout.ranks if rank in ranks)
    if len(members) == layout.world_size:
        return layout
    rank = this_rank()
    kept = [i for i in range(len(layout.sizes)) if ranks.issuperset(layout.group_of(rank, i) or ())]
    if kept and layout.group_of(rank, kept) == members:
        names = tuple(layout.axes[i] for i in kept)
        return Layout(tuple(layout.sizes[i] for i in kept), names, members)
    return Layout((len(members),), ("rank",), members)


def _share_failure(
    channel: ReplicaChannel, failure: MeshplanError | None, step: int | None
) -> None:
    flags = torch.tensor([failure is not None], dtype=torch.int64, device="cpu")
    failed = channel.gather(flags).flatten().nonzero().flatten().tolist()
    if not failed:
        return
    differing = failure.tensors if isinstance(failure, ReplicaDivergenceError) else 0
    text = str(failure.args[0]) if failure is not None else ""
    differing, text = channel.broadcast([differing, text], failed[0])
    if failure is not None:
        raise failure
    if differing:
        raise ReplicaDivergenceError(text, tensors=differing, step=step)
    rank = channel.layout.ranks[failed[0]]
    raise SignatureMismatchError(f"on rank {rank}: {text}", rank=rank)
