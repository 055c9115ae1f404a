"""The comparison of replicas over a mesh, once or every so many steps.

When all agree there is one all-gather of 128 bytes of each rank:

* 128 bits of the list of tensors: step, mesh, and name, dtype, shape, placements of each, and
* for up to seven sets of axes along which tensors are replicated, the digest of the digests of
  those tensors. More sets than seven, which takes a mesh of four axes, need a second all-gather.

All ranks see the same words and take the same next step. If lists differ, one rank's list is
broadcast. If digests differ, those of the tensors of that set are gathered, in pieces; then pairs
of ranks compare the elements of the first few tensors, in pieces.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshplan._bits import element_index
from meshplan._torch import device_types_of
from meshplan._uncompiled import never_compiled, refuse_in_graph
from meshplan.errors import Divergence, GroupStateError, PolicyError, ReplicaDivergenceError
from meshplan.flatten import this_rank
from meshplan.kernel import DIGEST_VERSION, digest_table
from meshplan.layout import Layout
from meshplan.replicas._axes import ReplicaAxes
from meshplan.replicas._channel import ReplicaChannel, check_lists, hash_lines
from meshplan.replicas._divergence import (
    ReplicaReport,
    find_differing_groups,
    format_divergences,
    group_positions,
    split_by_digest,
)
from meshplan.replicas._elements import compare_elements
from meshplan.replicas._tensors import NamedTensor, TensorSource, named_tensors

__all__ = ["ReplicaCheck", "digest", "verify_replicas"]

_SETS = 7
_GATHERED_BYTES = 16 << 20
_LISTED = 8
_COMPARED_CLASSES = 3


@dataclass(frozen=True, slots=True)
class _ReplicaSet:
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


def digest(tensor: Tensor) -> str:
    """The digest of a tensor as 32 hexadecimal digits: of dtype, shape and bits of all elements.

    It is computed on the tensor's device, and 16 bytes leave that device. Of a DTensor it is that
    of the local shard. ``meshplan.kernel._digest`` defines it and its collisions.

    Raises:
        ReplicaInputError: the tensor has no data of its own, or consists of several.
    """
    table = digest_table([one.local for one in named_tensors(tensor)])
    words = table[0] if len(table) == 1 else digest_table([table])[0]
    return "".join((word % (1 << 64)).to_bytes(8, "little").hex() for word in words.tolist())


@never_compiled
def verify_replicas(
    source: TensorSource,
    mesh: DeviceMesh | None = None,
    *,
    grads: bool = False,
    step: int | None = None,
    details: int = 4,
) -> ReplicaReport | None:
    """Compare replicas of ``mesh`` by bits. All ranks of the mesh call it.

    A plain tensor has a replica on every rank of the mesh. A DTensor has replicas along the axes
    where it is ``Replicate``, and along those that its own mesh does not have; shards of one
    tensor are not compared with each other. -0.0 and 0.0 differ, and so do NaNs with other bits.

    When all agree this reads each tensor once, and sends 128 bytes.

    Args:
        source: a module (its parameters and buffers), an optimizer (its state), a tensor, or a
            mapping or an iterable of these, nested at will. Equal on all ranks but for the values.
        mesh: any mesh or slice of one, named or not; all ranks of the default group if ``None``.
        grads: gradients of parameters too.
        step: for the message; ranks that pass different steps are an error.
        details: of how many divergences to compare the elements.

    Returns:
        A report; ``None`` on a rank outside the mesh, where nothing is done.

    Raises:
        ReplicaDivergenceError: on all ranks of the mesh with one text.
        SignatureMismatchError: on all ranks of the mesh: some passed other tensors or another
            step.
        ReplicaInputError, PlacementError, PolicyError: before anything is sent: a tensor that
            cannot be compared, such as a partial sum, or a negative ``details``.
        GroupAgreementError, GroupCreationError, GroupStateError: at the first use of a mesh.
    """
    refuse_in_graph("meshplan.verify_replicas")
    started = time.perf_counter()
    if details < 0:
        raise PolicyError(f"details={details} is negative; pass 0 or more")
    tensors = named_tensors(source, grads=grads)
    if mesh is None:
        mesh = _default_mesh(tensors)
    if mesh.get_coordinate() is None:
        return None
    layout = Layout.from_mesh(mesh)
    sets, lines, unreplicated = _group_by_axes(
        tensors, ReplicaAxes(mesh, layout, this_rank()), step
    )
    if layout.world_size > 1:
        _compare(ReplicaChannel(mesh, layout), layout, sets, lines, step, details)
    compared = [tensor for one in sets for tensor in one.tensors]
    return ReplicaReport(
        tensors=len(compared),
        elements=sum(tensor.local.numel() for tensor in compared),
        nbytes=sum(tensor.local.numel() * tensor.local.element_size() for tensor in compared),
        by_axes=tuple((_labels(layout, one.axes), len(one.tensors)) for one in sets),
        unreplicated=unreplicated,
        step=step,
        seconds=time.perf_counter() - started,
    )


def _default_mesh(tensors: Sequence[NamedTensor]) -> DeviceMesh:
    """All ranks as a mesh of one axis, on the device that the tensors and the group share."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        raise GroupStateError(
            "replicas are compared over all ranks, and there is no default group; call "
            "torch.distributed.init_process_group first, or pass a mesh"
        )
    served = [device.type for device in device_types_of(group)]
    used = {tensor.local.device.type for tensor in tensors}
    device_type = next((one for one in served if one in used and one != "cpu"), None)
    device_type = device_type or ("cpu" if "cpu" in served else served[0])
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("rank",))


def _labels(layout: Layout, axes: Sequence[int]) -> tuple[str, ...]:
    return tuple(layout.axes[axis] for axis in axes)


def _group_by_axes(
    tensors: Sequence[NamedTensor], axes: ReplicaAxes, step: int | None
) -> tuple[list[_ReplicaSet], list[str], tuple[str, ...]]:
    """The tensors by axes; a list that must be the same on all ranks; the names of the rest."""
    by_axes: dict[tuple[int, ...], list[NamedTensor]] = {}
    lines = [f"digest {DIGEST_VERSION}, step {step}, mesh {axes.layout}"]
    unreplicated = []
    for tensor in tensors:
        along = axes.find(tensor)
        labels = ", ".join(_labels(axes.layout, along)) or "no axis"
        lines.append(f"{tensor}, replicas along {labels}")
        if along:
            by_axes.setdefault(along, []).append(tensor)
        else:
            unreplicated.append(tensor.name)
    sets = [
        _ReplicaSet(along, by_axes[along], digest_table([one.local for one in by_axes[along]]))
        for along in sorted(by_axes)
    ]
    return sets, lines, tuple(unreplicated)


def _compare(
    channel: ReplicaChannel,
    layout: Layout,
    sets: Sequence[_ReplicaSet],
    lines: Sequence[str],
    step: int | None,
    details: int,
) -> None:
    # One message of a fixed shape, whatever the tensors are: ranks with other lists must still be
    # able to exchange it. Sets beyond the seventh are sent only once the lists agree.
    totals = digest_table([one.digests for one in sets])
    first = torch.zeros((1 + _SETS, 2), dtype=torch.int64, device="cpu")
    first[0] = torch.tensor(hash_lines(lines), dtype=torch.int64, device="cpu")
    first[1 : 1 + len(sets)] = totals[:_SETS]
    gathered = channel.gather(first)
    check_lists(channel, layout, gathered[:, 0], lines)
    gathered = gathered[:, 1:]
    if len(sets) > _SETS:
        gathered = torch.cat([gathered, channel.gather(totals[_SETS:])], 1)
    found: list[_DivergentGroup] = []
    names: set[str] = set()
    groups = 0
    for number, one in enumerate(sets):
        positions = group_positions(layout, one.axes)
        if find_differing_groups(gathered[:, number : number + 1], positions):
            # All ranks have read the same digests, so all gather those of the same tensors.
            wanted = max(_LISTED, details) - len(found)
            differing, candidates = _find_candidates(channel, layout, one, positions, wanted)
            found += candidates
            names |= set(differing)
            groups += len(differing)
    if not found:
        return
    divergences = tuple(
        _describe(channel, layout, one, compare=number < details)
        for number, one in enumerate(found)
    )
    text = format_divergences(
        layout,
        divergences,
        tensors=len(names),
        compared=sum(len(one.tensors) for one in sets),
        groups=groups,
        step=step,
    )
    raise ReplicaDivergenceError(text, divergences=divergences, tensors=len(names), step=step)


def _find_candidates(
    channel: ReplicaChannel, layout: Layout, one: _ReplicaSet, groups: Tensor, wanted: int
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
        replicated=_labels(layout, found.replicated),
        axes=_labels(layout, found.axes),
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


class ReplicaCheck:
    """Calls ``verify_replicas`` at every ``every``-th step.

    In a loop: ``check = ReplicaCheck(model, mesh, every=100)`` and then, on every rank of the mesh,
    ``check(step)`` or ``check()`` after each step; or once
    ``optimizer.register_step_post_hook(check.hook)``.

    Args:
        source, mesh, grads, details: as for ``verify_replicas``; ``source`` is read again each
            time, so that a module may change.
        every: steps from one comparison to the next.

    Attributes:
        step: the number of the last step; set it after loading a checkpoint.
        last: the last report; ``None`` before the first, and on ranks outside the mesh.

    Raises:
        PolicyError: ``every`` is less than 1.
    """

    def __init__(
        self,
        source: TensorSource,
        mesh: DeviceMesh | None = None,
        *,
        every: int = 100,
        grads: bool = False,
        details: int = 4,
    ) -> None:
        if every < 1:
            raise PolicyError(f"every={every} is not a number of steps; pass 1 or more")
        self.source = source
        self.mesh = mesh
        self.every = every
        self.grads = grads
        self.details = details
        self.step = 0
        self.last: ReplicaReport | None = None

    def __call__(self, step: int | None = None) -> ReplicaReport | None:
        """Compare, if it is time.

        Args:
            step: number of the finished step; one more than the last if ``None``.

        Returns:
            The report, if this rank compared now; else ``None``.

        Raises:
            ReplicaDivergenceError and others: as ``verify_replicas``. The next step may be checked
                again.
        """
        self.step = self.step + 1 if step is None else step
        if self.step % self.every:
            return None
        self.last = verify_replicas(
            self.source, self.mesh, grads=self.grads, step=self.step, details=self.details
        )
        return self.last

    def hook(self, *_: object) -> None:
        """As ``check()``; for ``torch.optim.Optimizer.register_step_post_hook``.

        Args:
            *_: the optimizer's arguments, not used.

        Raises:
            ReplicaDivergenceError: as ``check()``.
        """
        self()
