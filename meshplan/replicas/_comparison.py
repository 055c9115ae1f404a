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

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from meshplan._bits import (
    FLOATS,
    INTEGER_OF_SIZE,
    bytes_of,
    differ_by_binade,
    element_index,
    element_text,
    flatten,
    max_ulps,
    tensor_of,
)
from meshplan._torch import WORLD, root_mesh_of
from meshplan._torch import functional_operators as _ops
from meshplan.errors import (
    Divergence,
    Elements,
    GroupAgreementError,
    GroupStateError,
    PlacementError,
    ReplicaDivergenceError,
    SignatureMismatchError,
)
from meshplan.execute._failures import raise_failure
from meshplan.execute._gloo import is_gloo
from meshplan.execute._groups import StepGroups
from meshplan.execute._provenance import Purpose
from meshplan.flatten import registry, this_rank
from meshplan.kernel import DIGEST_VERSION, byte_pieces, digest_table, hash_words
from meshplan.layout import Layout
from meshplan.record import Record, ranks_text
from meshplan.replicas._tensors import NamedTensor
from meshplan.topology._reading import group_values

# The axes of a mesh along which a tensor is replicated.

_Coordinates = dict[int, tuple[int, ...] | None]


class ReplicaAxes:
    def __init__(self, mesh: DeviceMesh, layout: Layout, rank: int) -> None:
        self.mesh = mesh
        self.layout = layout
        self.rank = rank
        self.wide = tuple(i for i, size in enumerate(layout.sizes) if size > 1)
        self._cache: dict[tuple[DeviceMesh, tuple[Placement, ...]], tuple[int, ...]] = {}

    def find(self, tensor: NamedTensor) -> tuple[int, ...]:
        """The axes, ascending, along which ranks hold replicas of ``tensor``; none of size 1. A
        plain tensor has replicas everywhere. A DTensor has them along the axes of its own mesh
        where it is ``Replicate``, and along axes of the root mesh that its own mesh is a slice of.
        Its mesh need not be the one of the comparison: the coordinates of ranks in both count.
        """
        if tensor.mesh is None:
            return self.wide
        key = (tensor.mesh, tensor.placements)
        if key not in self._cache:
            self._cache[key] = self._find(tensor, tensor.mesh)
        return self._cache[key]

    def _find(self, tensor: NamedTensor, mesh: DeviceMesh) -> tuple[int, ...]:
        # An axis of the comparison may run along several axes of the tensor's mesh, or leave that
        # mesh. The coordinates of the same ranks in both layouts show which.
        own = Layout.from_mesh(mesh)
        places = {rank: own.coordinate(rank) for rank in own.ranks} if own != self.layout else {}
        found = []
        for axis in self.wide:
            touched, outside = self._axes_along(tensor, own, places, axis)
            placements = [tensor.placements[i] for i in touched]
            label = self.layout.axes[axis]
            if any(placement.is_partial() for placement in placements):
                raise PlacementError(
                    f"{tensor} is a partial sum along {label}, so its ranks hold summands and not "
                    "replicas; redistribute it to Replicate first, or leave it out"
                )
            if len({placement.is_replicate() for placement in placements}) > 1:
                raise PlacementError(
                    f"{tensor} is replicated along some axes of its mesh {own} and sharded along "
                    f"others, and {label} runs along both; compare on a mesh that has them as "
                    "axes of their own"
                )
            # Ranks outside the tensor's mesh hold the same tensor on a sibling slice of one root.
            # Slices of another root may hold other tensors.
            if outside and root_mesh_of(mesh) != root_mesh_of(self.mesh):
                raise self._foreign(tensor, own)
            if all(placement.is_replicate() for placement in placements):
                found.append(axis)
        self._check_group(tensor, own, places, found)
        return tuple(found)

    def _axes_along(
        self, tensor: NamedTensor, own: Layout, places: _Coordinates, axis: int
    ) -> tuple[set[int], bool]:
        """The tensor's axes that this axis runs along, and whether it leaves the tensor's mesh."""
        if own == self.layout:
            return {axis}, False
        mine = places.get(self.rank)
        line = [places.get(r) for r in self.layout.group_of(self.rank, axis) or ()]
        inside = [place for place in line if place is not None]
        # All ranks of the line are on the tensor's mesh, or this one alone: a part of them would be
        # compared with ranks of which nothing is known.
        if mine is None or 1 < len(inside) < len(line):
            raise self._foreign(tensor, own)
        touched = {i for place in inside for i, here in enumerate(place) if here != mine[i]}
        return touched, len(inside) < len(line)

    def _check_group(
        self, tensor: NamedTensor, own: Layout, places: _Coordinates, axes: list[int]
    ) -> None:
        """All ranks that hold a replica hold the same shard, diagonally too."""
        # Each axis alone was checked. Along two at once, ranks may still differ in a sharded axis,
        # if one mesh is not a grid of the other.
        mine = places.get(self.rank)
        if mine is None or not axes:
            return
        kinds = enumerate(tensor.placements)
        # A strided shard is no shard to torch's is_shard.
        sharded = [i for i, one in kinds if not (one.is_replicate() or one.is_partial())]
        for rank in self.layout.group_of(self.rank, axes) or ():
            place = places.get(rank) or mine
            if any(place[i] != mine[i] for i in sharded):
                raise self._foreign(tensor, own)

    def _foreign(self, tensor: NamedTensor, own: Layout) -> PlacementError:
        return PlacementError(
            f"{tensor} is placed on mesh {own}, whose axes are not axes of the mesh "
            f"{self.layout}; leave mesh out to compare each tensor on its own mesh, or pass one "
            "that both are slices of"
        )


# Messages between the ranks of a mesh: words of all, records of one, bytes from one to another.
#
# Every wait is bounded by the timeout of the group.

# Of one rank's list; the rest is not sent.
_CHARACTERS = 16 << 20
_SHOWN_LINES = 5


class ReplicaChannel:
    """The ranks of a mesh, by position: row-major coordinates."""

    def __init__(self, mesh: DeviceMesh, layout: Layout, call: int) -> None:
        axes = tuple(range(len(layout.sizes)))
        token = Record.of(replicas=DIGEST_VERSION)
        try:
            group = registry().get(mesh, layout, axes, token=token, call=call)
        except GroupAgreementError as error:
            raise GroupAgreementError(
                f"replicas could not be compared: {error.args[0]}",
                missing=error.missing,
                differing=error.differing,
            ) from error
        # It sends nothing, so every comparison would succeed.
        self.backend: str = getattr(c10d, WORLD).pg_map[group.pg][0]
        if self.backend == "fake":
            raise GroupStateError(
                "the mesh is on the 'fake' backend, which sends nothing, so there are no replicas "
                "to compare; initialise the process group with a real backend"
            )
        self._group: ProcessGroup = group.pg
        self.mesh, self.layout = mesh, layout
        self.size = layout.world_size
        self.position = layout.ranks.index(this_rank())
        self._device = torch.device(mesh.device_type)
        if is_gloo(mesh.device_type, StepGroups(self._group)):
            # Its messages between two ranks take no address of a GPU.
            self._device = torch.device("cpu")
        # A mesh has only the type of its devices; this rank's is the current one.
        if self._device.type != "cpu":
            index = torch.accelerator.current_device_index()
            self._device = torch.device(mesh.device_type, index)

    def gather(self, words: Tensor) -> Tensor:
        """All ranks' int64 ``words``, of one shape: CPU tensor [ranks, ...]."""
        mine = flatten(words.to(self._device))
        found, name = mine.new_empty(self.size * mine.numel()), self._group.group_name
        with self._moving("all_gather"):
            # With an output, because of gloo: see GlooWire.all_gather.
            _ops.wait_tensor(_ops.all_gather_into_tensor_out(mine, self.size, name, out=found))
        return found.cpu().view(self.size, *words.shape)

    @contextmanager
    def _moving(self, what: str) -> Iterator[None]:
        """Raise the errors of a reduction, which name missing ranks."""
        started = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            purpose = Purpose("verify_replicas", what, f"group {self._group.group_name}")
            raise_failure(error, StepGroups(self._group), self._device.type, purpose, started)

    def broadcast(self, record: Any, source: int) -> Any:
        """On all ranks, the JSON record of the rank at position ``source``."""
        data = json.dumps(record, ensure_ascii=False).encode(errors="replace")
        # The length first: the receivers must allocate. Bytes of ranks other than the source are
        # overwritten.
        size = torch.tensor([len(data)], device=self._device)
        with self._moving("broadcast"):
            dist.broadcast(size, group=self._group, group_src=source)
            text = tensor_of(data[: int(size)].ljust(int(size))).to(self._device)
            dist.broadcast(text, group=self._group, group_src=source)
        return json.loads(bytes_of(text))

    def send(self, data: Tensor, to: int) -> None:
        with self._moving("send"):
            dist.send(data.to(self._device).contiguous(), group=self._group, group_dst=to)

    def receive(self, like: Tensor, source: int) -> Tensor:
        found = torch.empty_like(like, device=self._device, memory_format=torch.contiguous_format)
        with self._moving("recv"):
            dist.recv(found, group=self._group, group_src=source)
        return found.to(like.device)


def check_lists(channel: ReplicaChannel, gathered: Tensor, lines: Sequence[str]) -> None:
    layout = channel.layout
    words = [tuple(row) for row in gathered.tolist()]
    # Every rank computes the following from the same words, so all take the same branches and join
    # the same broadcasts.
    counts = Counter(words)
    if len(counts) == 1:
        return
    common = max(counts, key=lambda one: (counts[one], -words.index(one)))
    odd = [position for position, one in enumerate(words) if one != common]
    text = channel.broadcast("\n".join(lines)[:_CHARACTERS], words.index(common))
    theirs = text.split("\n")
    mine, common_lines = set(lines), set(theirs)
    changes = [f"only there '{line}'" for line in lines if line not in common_lines]
    changes += [f"only on the others '{line}'" for line in theirs if line not in mine]
    shown = "; ".join(changes[:_SHOWN_LINES])
    if len(changes) > _SHOWN_LINES:
        shown += f"; and {len(changes) - _SHOWN_LINES} more"
    # The text of one rank, so that the error is the same on all.
    text = channel.broadcast(shown[:_CHARACTERS], odd[0])
    ranks = [layout.ranks[position] for position in odd]
    raise SignatureMismatchError(
        f"{ranks_text(ranks)} passed other tensors to the comparison of "
        f"replicas than the other ranks of mesh {layout}; on rank {ranks[0]}: {text}; pass the "
        "same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks "
        "that share them",
        rank=layout.ranks[words.index(common)] if channel.position in odd else ranks[0],
        unlike_calls=len(set(re.findall(r"'call (\d+), digest", text))) > 1,
    )


# The size of a message. A few times as much is allocated.
PIECE_BYTES = 16 << 20


@dataclass(slots=True)
class Difference:
    count: int = 0
    index: tuple[int, ...] | None = None
    value: str = ""
    reference: str = ""
    max_ulps: int | None = None
    unrelated: int = 0

    def add_piece(self, theirs: Tensor, mine: Tensor, start: int, like: Tensor) -> None:
        size = like.dtype.itemsize
        differs = (theirs != mine).view(-1, size).any(1)
        count = int(differs.sum())
        if count == 0:
            return
        if self.count == 0:
            first = int(differs.to(torch.uint8).argmax())
            one = slice(first * size, first * size + size)
            self.index = element_index(start // size + first, like.shape)
            self.value = element_text(mine[one], like.dtype)
            self.reference = element_text(theirs[one], like.dtype)
        self.count += count
        self._add_distances(theirs, mine, like.dtype)

    def _add_distances(self, theirs: Tensor, mine: Tensor, dtype: torch.dtype) -> None:
        real = dtype.to_real()
        if real not in FLOATS:
            return
        a, b = (one.clone().view(INTEGER_OF_SIZE[real.itemsize]) for one in (theirs, mine))
        numbers = (a != b) & ~a.view(real).isnan() & ~b.view(real).isnan()
        if not bool(numbers.any()):
            return
        self.max_ulps = max(max_ulps(a[numbers], b[numbers]), self.max_ulps or 0)
        far = numbers & differ_by_binade(a, b, real)
        self.unrelated += int(far.view(-1, dtype.itemsize // real.itemsize).any(1).sum())


def compare_elements(
    channel: ReplicaChannel, tensor: Tensor, reference: int, other: int
) -> Elements:
    rank = channel.layout.ranks[other]
    # Shapes first: local shapes may differ between replicas, and then elements do not correspond.
    mine, theirs = (
        tuple(channel.broadcast(list(tensor.shape), position)) for position in (other, reference)
    )
    numel = torch.Size(mine).numel()
    if mine != theirs:
        return Elements(rank=rank, numel=numel, shapes=(mine, theirs), **asdict(Difference()))
    # Only the two exchange pieces; the others wait for the result in the broadcast.
    found, start = Difference(), 0
    if channel.position in (reference, other):
        for piece in byte_pieces(tensor, PIECE_BYTES):
            if channel.position == reference:
                channel.send(piece, other)
            else:
                found.add_piece(channel.receive(piece, reference), piece, start, tensor)
            start += piece.numel()
    fields = channel.broadcast(asdict(found), other)
    fields["index"] = None if fields["index"] is None else tuple(fields["index"])
    return Elements(rank=rank, numel=numel, **fields)


# Ranks whose replicas differ from the rest: groups by digest, the report, and messages.

_SHOWN_RANKS = 4


def group_positions(layout: Layout, axes: Sequence[int]) -> Tensor:
    """Positions of the ranks that hold replicas along ``axes``: int64 [groups, ranks]."""
    return torch.tensor(Layout(layout.sizes).siblings(tuple(axes)), device="cpu")


def find_differing_groups(digests: Tensor, groups: Tensor) -> list[tuple[int, int]]:
    """Row and group wherever the ranks of a group do not agree, by row."""
    # Every member is compared with the first: equality is transitive.
    found = digests[groups]
    differs = (found != found[:, :1]).any(3).any(1)
    return [(row, group) for row, group in differs.t().nonzero().tolist()]


def split_by_digest(
    layout: Layout, group: Sequence[int], digests: Tensor, axes: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """The classes of one group of ranks, and the axes along which two neighbours differ. The class
    of the most ranks is first, of equally large ones that of the lowest position.
    """
    of = {position: tuple(digests[position].tolist()) for position in group}
    classes = group_values((of[position], position) for position in group)
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
    texts = {one.rank: f": {format_elements(one, found.reference)}" for one in found.elements}
    lines = [f"  {found.what}: differs along {along}{rest}"]
    parts = list(zip(found.classes, found.coordinates, strict=True))
    for number, (ranks, coordinates) in enumerate(parts[: 1 + _SHOWN_RANKS]):
        text = texts.get(ranks[0], "") if number else ": the reference"
        lines.append(f"    {_format_ranks(layout, ranks, coordinates)}{text}")
    more = len(found.classes) - 1 - _SHOWN_RANKS
    return lines + ([f"    and {more} more different replicas"] if more > 0 else [])


def format_elements(found: Elements, reference: int) -> str:
    if found.shapes is not None:
        mine, theirs = map(list, found.shapes)
        return f"its local shape is {mine}, that of rank {reference} {theirs}"
    if found.count == 0:
        return (
            "a second comparison found no difference: the tensor changes while it is compared; "
            "wait for the code that writes to it"
        )
    ulps = "" if found.max_ulps is None else f", at most {found.max_ulps} ulp apart"
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
        compared = "nothing was compared"
        if self.tensors:
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
    """The text of the error; ``order`` is how to reduce these tensors in one order."""
    at = "" if step is None else f" at step {step}"
    lines = [f"replicas differ{at} in {tensors} of {compared} tensors, on mesh {layout}"]
    for divergence in divergences:
        lines += _format_divergence(layout, divergence)
    if groups > len(divergences):
        lines.append(f"  and {groups - len(divergences)} more groups of replicas")
    return "\n".join([*lines, advise(divergences, order)[1]])


def advise(divergences: tuple[Divergence, ...], order: str) -> tuple[str | None, str]:
    """The cause that the evidence in the divergences suggests, if any, and what to do."""
    elements = [one for divergence in divergences for one in divergence.elements]
    compared = [one for one in elements if one.count]
    numel, count, unrelated = (
        sum(getattr(one, name) for one in compared) for name in ("numel", "count", "unrelated")
    )
    # Additions in other orders change most elements by little, and few of them by a factor of 2:
    # those near zero. Of independent weights three quarters differ by as much.
    if count * 10 >= numel * 9 > 0 and unrelated * 4 >= numel:
        axes = list(dict.fromkeys(axis for one in divergences for axis in one.axes))
        return "never equal", (
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
        return "one rank", (
            f"only rank {odd.pop()} differs: test its hardware and memory, and go back to an "
            "earlier checkpoint"
        )
    # Another order of additions moves one element of many by little.
    far = all(one.count == 1 and (one.max_ulps or 0) >= _FAR_ULPS for one in compared)
    if count and not far:
        order = order or "meshplan.coverage() lists the reductions that are not in one order"
        return "order", (
            f"replicas that drift apart are reduced in different orders: {order}; go back to an "
            "earlier checkpoint, or call meshplan.repair_replicas"
        )
    reason = "" if elements else "pass details=4 to compare elements, which shows the reason; "
    if count:
        reason = "one element differs by far, as by a flipped bit: test the hardware; "
    return (
        None,
        f"{reason}go back to an earlier checkpoint, or call meshplan.repair_replicas",
    )


ROWS = 7
_GATHERED_BYTES = 16 << 20
_LISTED = 8
_COMPARED_CLASSES = 3
_FAR_ULPS = 1 << 12
_LEAST_EVIDENCE = 16  # elements that can show that replicas were never equal


@dataclass(frozen=True, slots=True)
class CheckOptions:
    step: int | None
    details: int
    fsdp: bool  # whether FSDP2 reduces gradients of the source
    call: int  # the number of its ticket
    repair: RepairPlan | None = None  # plans copies where there would be an error


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    axes: tuple[int, ...]
    tensors: list[NamedTensor]
    digests: Tensor


@dataclass(frozen=True, slots=True)
class _DivergentGroup:
    tensor: NamedTensor
    replicated: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]
    axes: tuple[int, ...]


def axis_labels(layout: Layout, axes: Sequence[int]) -> tuple[str, ...]:
    return tuple(layout.axes[axis] for axis in axes)


def compare_sets(
    channel: ReplicaChannel,
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
    layout, totals = channel.layout, digest_table([one.digests for one in sets])
    first = torch.zeros((1 + ROWS, 2), dtype=torch.int64, device="cpu")
    first[0] = torch.tensor(hash_words("\n".join(lines)), device="cpu")
    first[1 : 1 + len(sets)] = totals[:ROWS]
    if notes:
        first[-len(notes) :] = torch.tensor(notes, device="cpu")
    gathered = channel.gather(first)
    check_lists(channel, gathered[:, 0], lines)
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
            wanted = wanted if options.repair is None else sys.maxsize
            differing, candidates = _find_candidates(channel, one, positions, wanted)
            found += candidates
            names |= set(differing)
            groups += len(differing)
    refusal = options.repair.add(channel, found) if found and options.repair else ""
    if not found or (options.repair and not refusal):
        return every_note
    found = found[: max(_LISTED, options.details)]
    divergences = tuple(
        _describe(channel, one, compare=number < options.details)
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
        text + (f"\nnothing was repaired: {refusal}" if refusal else ""),
        divergences=divergences,
        tensors=len(names),
        step=options.step,
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
    channel: ReplicaChannel,
    one: ReplicaSet,
    groups: Tensor,
    wanted: int,
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
                parts = split_by_digest(channel.layout, members, gathered[:, row], one.axes)
                found.append(_DivergentGroup(tensor, one.axes, *parts))
    return names, found


def _describe(channel: ReplicaChannel, found: _DivergentGroup, compare: bool) -> Divergence:
    layout, parts = channel.layout, found.classes
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
            compare_elements(channel, found.tensor.local, parts[0][0], part[0]) for part in others
        ),
    )


# Copies, all of which are planned before the first tensor is written.


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor that ``repair_replicas`` has copied.

    Attributes:
        name: of the tensor, after ``model.`` or ``optimizer.``.
        source: global rank that has sent its bits.
        ranks: global ranks that had other bits.
    """

    name: str
    source: int
    ranks: tuple[int, ...]


@dataclass(slots=True)
class RepairPlan:
    source: int | None
    fixed: Set[str]  # tensors made of numbers: writing to these changes nothing
    parameters: Set[str]
    copies: list[_Copy] = field(default_factory=list)

    def add(self, channel: ReplicaChannel, found: Sequence[_DivergentGroup]) -> str:
        """Plan copies of tensors; returns why that is refused, the same on all ranks."""
        ranks = channel.layout.ranks
        for one in found:
            name = one.tensor.name
            steps = name.startswith("optimizer.") and name.endswith(".step")
            if steps or name in self.fixed:
                what = "count of steps" if steps else "Python number"
                return f"{name} is a {what}; load one checkpoint on all ranks"
            first = self._choose(channel, one)
            if first is None:
                got = "" if self.source is None else f", and none on rank {self.source}"
                return (
                    f"no bits of {name} are on most of its ranks{got}; "
                    "pass as source= a rank whose replica is right"
                )
            divergence = _describe(channel, one, compare=True)
            parts = divergence.elements
            never = advise((divergence,), "")[0] == "never equal"
            weights = name in self.parameters and parts[0].numel >= _LEAST_EVIDENCE
            if (never and weights) or any(part.shapes for part in parts):
                return (
                    f"{name} never was the same on these ranks; name axes of experts "
                    "in distinct=, or load one checkpoint"
                )
            others = [i for part in one.classes if first not in part for i in part]
            copied = CopiedTensor(name, ranks[first], tuple(ranks[i] for i in others))
            self.copies.append(_Copy(channel, one.tensor.local, first, others, copied))
        return ""

    def _choose(self, channel: ReplicaChannel, one: _DivergentGroup) -> int | None:
        layout = channel.layout
        whole = Layout.from_mesh(channel.mesh)
        labels = axis_labels(layout, one.replicated)
        # Ranks that hold the other shards of that replica; of other groups, the source alone.
        known = set(labels) <= set(whole.axes)
        shards = [axis for axis in whole.axes if known and axis not in labels]
        source = -1 if self.source is None else self.source
        replica = whole.group_of(source, shards) or ()
        group = [place for part in one.classes for place in part]
        chosen = [place for place in group if layout.ranks[place] in replica]
        if not chosen and 2 * len(one.classes[0]) > len(group):
            chosen = list(one.classes[0])
        return chosen[0] if chosen else None


class _Copy(NamedTuple):
    channel: ReplicaChannel
    tensor: Tensor
    source: int
    others: list[int]
    copied: CopiedTensor

    def run(self) -> RuntimeError | None:
        """Send or write; returns a failure to write."""
        place, source = self.channel.position, self.source
        if place == source:
            for other in self.others:
                for piece in byte_pieces(self.tensor, PIECE_BYTES):
                    self.channel.send(piece, other)
        elif place in self.others:
            pieces = byte_pieces(self.tensor, PIECE_BYTES)
            received = [self.channel.receive(piece, source) for piece in pieces]
            bits = torch.cat(received).view(self.tensor.dtype)
            try:
                self.tensor.detach().copy_(bits.view(self.tensor.shape))
            except RuntimeError as error:
                return error
        return None
