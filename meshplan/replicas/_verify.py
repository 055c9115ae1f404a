"""Whether replicas hold the same bits: once, or every so many steps of a training loop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshplan._calls import Ticket, calls_of
from meshplan._message_text import format_first
from meshplan._torch import device_types_of
from meshplan._uncompiled import never_compiled, refuse_in_graph
from meshplan.errors import (
    GroupStateError,
    MeshplanError,
    PlacementError,
    PolicyError,
    ReplicaDivergenceError,
    ReplicaInputError,
    SignatureMismatchError,
)
from meshplan.flatten import is_worker_thread, this_rank
from meshplan.flatten._distinct_axes import (
    DistinctAxis,
    DistinctGroup,
    list_distinct,
    read_distinct,
)
from meshplan.kernel import DIGEST_VERSION, digest_table, hash_words
from meshplan.layout import Layout
from meshplan.record import ranks_text
from meshplan.replicas._comparison import (
    CheckOptions,
    CopiedTensor,
    RepairPlan,
    ReplicaAxes,
    ReplicaChannel,
    ReplicaReport,
    ReplicaSet,
    axis_labels,
    compare_sets,
)
from meshplan.replicas._tensors import (
    NamedTensor,
    TensorSource,
    holds_fsdp,
    named_tensors,
)


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
    distinct: Iterable[DistinctAxis] = (),
    grads: bool = False,
    step: int | None = None,
    details: int = 4,
) -> ReplicaReport | None:
    """Compare replicas by bits. All ranks of the mesh call it, or of the job without a mesh.

    Without a mesh, each DTensor is compared over its own mesh, along the axes where it is
    ``Replicate``, and a plain tensor over all ranks. Over a mesh that you pass, a plain tensor has
    a replica on every rank, and a DTensor also along the axes that its own mesh does not have.
    Shards of one tensor are not compared with each other. -0.0 and 0.0 differ, and so do NaNs with
    other bits. Each tensor is read once. If all agree on one mesh, 128 bytes are sent; several
    meshes and ``distinct`` take 128 bytes for each mesh and two messages more.

    Args:
        source: a module (its parameters and buffers), an optimizer (its state), a tensor, or a
            mapping or an iterable of these, nested at will. Equal on all ranks but for the values.
        mesh: any mesh or slice of one, named or not.
        distinct: axes along which ranks hold other parameters, such as experts or pipeline stages:
            names of axes of the meshes, (mesh, axis) pairs or process groups. Only ranks with the
            same coordinates along all of these are compared. Equal on all ranks.
        grads: gradients of parameters too.
        step: for the message; ranks that pass different steps are an error.
        details: of how many divergences to compare the elements.

    Returns:
        A report; ``None`` on a rank outside the mesh, where nothing is done.

    Raises:
        ReplicaDivergenceError: on all ranks, with one text; with several meshes or ``distinct``,
            each slice of a mesh has its own text, and ranks of other slices get the first one.
        SignatureMismatchError: on all ranks: some passed other tensors or another step.
        ReplicaInputError, PlacementError, PolicyError, AxisNameError, LayoutError: before anything
            is sent: a tensor that cannot be compared, such as a partial sum, a negative
            ``details``, an unknown axis, or a mesh that is not a DeviceMesh. On all ranks, if none
            passed a tensor.
        GroupAgreementError, GroupCreationError, GroupStateError: at the first use of a mesh.
    """
    refuse_in_graph("meshplan.verify_replicas")
    started = time.perf_counter()
    if _is_outside(mesh):
        return None
    with _take_ticket(mesh) as ticket:
        _check_count("details", details, 0)
        tensors = named_tensors(source, grads=grads)
        options = CheckOptions(step, details, holds_fsdp(source), ticket.number)
        parts = _compare(tensors, mesh, distinct, f"step {step}", options)
    sets = [(part.layout, one) for part in parts for one in part.sets]
    by_axes = Counter[tuple[str, ...]]()
    for layout, one in sets:
        by_axes[axis_labels(layout, one.axes)] += len(one.tensors)
    compared = [tensor for _, one in sets for tensor in one.tensors]
    names = {tensor.name for tensor in compared}
    return ReplicaReport(
        tensors=len(compared),
        elements=sum(tensor.local.numel() for tensor in compared),
        nbytes=sum(tensor.local.nbytes for tensor in compared),
        by_axes=tuple(by_axes.items()),
        unreplicated=tuple(tensor.name for tensor in tensors if tensor.name not in names),
        step=step,
        seconds=time.perf_counter() - started,
    )


def _compare(
    tensors: Sequence[NamedTensor],
    mesh: DeviceMesh | None,
    distinct: Iterable[DistinctAxis],
    about: str,
    options: CheckOptions,
) -> list[_MeshTensors]:
    scope_mesh = _default_mesh(tensors) if mesh is None else mesh
    layout = Layout.from_mesh(scope_mesh)
    source = options.repair.source if options.repair else None
    if source not in (None, *layout.ranks):
        raise PolicyError(f"source={source!r} is not a rank of mesh {layout}; pass one")
    parts = {scope_mesh: _MeshTensors(scope_mesh, layout)}
    for tensor in tensors:
        own = scope_mesh if mesh is not None or tensor.mesh is None else tensor.mesh
        # On ranks outside of its mesh a DTensor has no data.
        if own.get_coordinate() is not None:
            part = parts.setdefault(own, _MeshTensors(own, Layout.from_mesh(own)))
            part.tensors.append(tensor)
    own_meshes = [tensor.mesh for tensor in tensors if tensor.mesh is not None]
    declared = read_distinct(distinct, [scope_mesh, *own_meshes])
    scope, *others = parts.values()
    header = f"call {options.call}, digest {DIGEST_VERSION}, {about}"
    elsewhere = False
    if mesh is not None and not declared:
        scope.group(header)
        scope.compare(options)
    else:
        elsewhere = _compare_scope(scope, others, declared, header, options)
    if not tensors and not elsewhere:
        raise ReplicaInputError(
            "no rank passed a tensor, so nothing was compared; pass a module, or a list if a "
            "generator was used before"
        )
    return list(parts.values())


@dataclass(frozen=True, slots=True)
class ReplicaRepair:
    """The copies that ``repair_replicas`` made.

    Attributes:
        copies: those among the ranks that this one compares with.
        report: of the comparison after the copies.
    """

    copies: tuple[CopiedTensor, ...]
    report: ReplicaReport

    def __str__(self) -> str:
        lines = [f"copied {len(self.copies)} tensors; {self.report}"]
        for one in self.copies:
            to = format_first(one.ranks)
            lines.append(f"  {one.name}: from rank {one.source} to {to}")
        return "\n".join(lines)


@never_compiled
def repair_replicas(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    mesh: DeviceMesh | None = None,
    *,
    source: int | None = None,
    distinct: Iterable[DistinctAxis] = (),
    step: int | None = None,
) -> ReplicaRepair | None:
    """Copy parameters, buffers and state of optimizers to the replicas that differ, in place.

    All ranks of the mesh call it between steps, or of the job without a mesh. Each tensor gets
    the bits that more than half of its replicas hold. Then all are compared again. Every rank
    raises if one tensor cannot be repaired, and nothing is changed then. Gradients, schedulers,
    random states and data loaders are not copied.

    Args:
        model: as for ``verify_replicas``.
        optimizer: one, or all of them.
        mesh, distinct, step: as for ``verify_replicas``.
        source: a rank of the replica to copy, whatever most hold. Replicas of a shard copy from
            the rank with the coordinates of ``source`` along the axes of replicas.

    Returns:
        What was copied; ``None`` on a rank outside the mesh.

    Raises:
        ReplicaDivergenceError: there is no majority and no ``source``; steps or Python numbers
            of optimizers differ; or weights never were equal, as those of experts.
        ReplicaInputError: ``model`` is not a module.
        PolicyError: ``source`` is not a rank of the mesh.
        CollectiveError: ranks left while it copied. Others: as for a check.
    """
    refuse_in_graph("meshplan.repair_replicas")
    if _is_outside(mesh):
        return None
    distinct = list_distinct(distinct)
    with _take_ticket(mesh) as ticket:
        if not isinstance(model, nn.Module):
            raise ReplicaInputError(
                f"model is of type {type(model).__name__}; pass a torch.nn.Module"
            )
        # What is no optimizer is refused with the tensors.
        optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
        state = {"model": model, "optimizer": optimizers}
        tensors = named_tensors(state)
        # Each reading of a number makes a tensor of its own.
        again = {tensor.name: tensor.local for tensor in named_tensors(state)}
        plan = RepairPlan(
            source,
            fixed={one.name for one in tensors if again[one.name] is not one.local},
            parameters={f"model.{name}" for name, _ in model.named_parameters()},
        )
        about = f"step {step}, repair from {source}, {len(plan.fixed)} numbers"
        options = CheckOptions(step, 4, holds_fsdp(state), ticket.number, plan)
        _compare(tensors, mesh, distinct, about, options)
        failures = [one.run() for one in plan.copies]
    try:
        report = verify_replicas(state, mesh, distinct=distinct, step=step)
    except ReplicaDivergenceError as error:
        raise error from next(filter(None, failures), None)
    assert report is not None
    return ReplicaRepair(tuple(one.copied for one in plan.copies), report)


def _check_count(name: str, value: object, least: int) -> None:
    # Integers of numpy too.
    if not isinstance(value, SupportsIndex) or index(value) < least:
        raise PolicyError(f"{name}={value!r} is invalid; pass an integer of {least} or more")


def _is_outside(mesh: DeviceMesh | None) -> bool:
    """Whether this rank is not in the mesh. Raises LayoutError for what is not a DeviceMesh."""
    return mesh is not None and bool(Layout.from_mesh(mesh)) and mesh.get_coordinate() is None


def _take_ticket(mesh: DeviceMesh | None) -> Ticket:
    """Used up by a rank that raises alone: its next comparison is not taken for this one."""
    beside = is_worker_thread()
    kind = "cpu" if mesh is None else mesh.device_type
    groups = [_world()] if mesh is None else mesh.get_all_groups()
    order = None if mesh is None else tuple(Layout.from_mesh(mesh).ranks)
    calls = calls_of(*groups, order=order, beside=beside)
    return calls.take(f"{kind} of threads" if beside else kind)


def _world() -> ProcessGroup:
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        raise GroupStateError(
            "replicas are compared over all ranks, and there is no default group; call "
            "torch.distributed.init_process_group first, or pass a mesh"
        )
    return group


def _default_mesh(tensors: Sequence[NamedTensor]) -> DeviceMesh:
    group = _world()
    served = [device.type for device in device_types_of(group)]
    used = {tensor.local.device.type for tensor in tensors}
    device_type = next((one for one in served if one in used and one != "cpu"), None)
    device_type = device_type or ("cpu" if "cpu" in served else served[0])
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("rank",))


class ReplicaCheck:
    """Calls ``verify_replicas`` at every ``every``-th step.

    In a loop: ``check = ReplicaCheck(model, mesh, every=100)`` and then, on every rank of the mesh,
    ``check(step)`` or ``check()`` after each step; or once
    ``optimizer.register_step_post_hook(check.hook)``.

    Args:
        source, mesh, distinct, grads, details: as for ``verify_replicas``; ``source`` is read again
            each time, so that a module may change.
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
        distinct: Iterable[DistinctAxis] = (),
        grads: bool = False,
        details: int = 4,
    ) -> None:
        _check_count("every", every, 1)
        self.every, self.step = every, 0
        self._verify = partial(
            verify_replicas,
            source,
            mesh,
            distinct=list_distinct(distinct),
            grads=grads,
            details=details,
        )
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
        self.last = self._verify(step=self.step)
        return self.last

    def hook(self, *_: object) -> None:
        """As ``check()``; for ``torch.optim.Optimizer.register_step_post_hook``.

        Args:
            *_: the optimizer's arguments, not used.
        """
        self()


# One call over tensors on several meshes, or of ranks that hold other parameters.
#
# The ranks of the call are its scope: all ranks of the mesh that the caller passed, or of the job.
# They start with one message and end with another, so that all of them raise an error where one
# slice of a mesh differs. Between these each mesh is compared by its own ranks, in one order on
# all. The start message has a hash of this rank's coordinates along the declared axes, as ranks of
# equal ones hold the same parameters, and of each mesh, so that no rank waits there for one without
# tensors.

# Rows of the start message: the coordinates, and meshes. One row is left for plain tensors.
_NOTES = 6


@dataclass(slots=True)
class _MeshTensors:
    """Tensors that are compared over one mesh; ``layout`` shrinks to the ranks that compare."""

    mesh: DeviceMesh
    layout: Layout
    tensors: list[NamedTensor] = field(default_factory=list)
    sets: list[ReplicaSet] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def identity(self) -> tuple[object, ...]:
        """Of its mesh, on all ranks."""
        return tuple(self.layout.ranks), self.layout.sizes, self.layout.axes

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


def _compare_scope(
    scope: _MeshTensors,
    others: list[_MeshTensors],
    distinct: Sequence[DistinctGroup],
    header: str,
    options: CheckOptions,
) -> bool:
    """Compare all parts; whether any rank has tensors on other meshes, or with ``distinct``."""
    # Ranks that wait for each other on several meshes take them in the same order.
    others.sort(key=_MeshTensors.identity)
    first = scope
    if distinct:
        # Lists may differ between ranks that hold other parameters, so that the scope as a whole
        # compares none.
        header += f", distinct along {', '.join(group.label for group in distinct)}"
        first = _MeshTensors(scope.mesh, scope.layout, lines=[f"{header}, mesh {scope.layout}"])
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
    notes = [hash_words("\n".join(str(group.coordinate) for group in distinct))]
    notes += [hash_words(repr(part.identity())) for part in others]
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
    part: _MeshTensors,
    absent: list[int],
    header: str | None,
    options: CheckOptions,
) -> None:
    if absent:
        raise SignatureMismatchError(
            f"{ranks_text(absent)} passed no tensors on "
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
