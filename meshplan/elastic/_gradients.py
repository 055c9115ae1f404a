"""Gradients of FSDP2 and DDP models, added over rounds in the tree over all micro-batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshplan._torch import BatchNorm
from meshplan.backend._group import MeshplanProcessGroup
from meshplan.elastic._hooks import (
    LeafSums,
    check_batch_norms,
    keep_bucket,
    keep_buffers,
    reset_shards,
    sum_shards,
    watch_gradients,
)
from meshplan.elastic._micro_batches import (
    MicroBatches,
    check_count,
    mix,
    seed_micro_batch,
)
from meshplan.errors import ContractError, ElasticError
from meshplan.integrations.ddp import check_group
from meshplan.kernel import reduce_into


class GradientAccumulator:
    """Adds the gradients of a step's micro-batches with the same bits on any number of ranks.

        accumulator = GradientAccumulator(model, 16, mesh)
        for batch in batches:  # M / W of them, rounded up
            with accumulator.round():
                loss(model(batch)).backward()
        accumulator.finish()
        meshplan.clip_grad_norm_(model.parameters(), 1.0)

    In each round the gradients of a slice go to the rank that owns the slice, which adds them in
    the contract's tree over all micro-batches. At most ``log2(M) + 1`` partial sums of its slice
    are kept: of its shards in FSDP2, of one of W slices in DDP.

    Attributes:
        micro_batches: those of this rank, and the number of finished steps.
    """

    def __init__(
        self,
        model: nn.Module,
        micro_batches: int,
        mesh: DeviceMesh | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        """Change how ``model`` reduces gradients: call it on every rank, before the first backward.

        FSDP2 gets a custom reduce-scatter, a factor of 1 and sums instead of averages; DDP a
        communication hook. The contract is that of the groups (``BackendOptions``).

        Args:
            model: after the last ``fully_shard``, or a ``DistributedDataParallel``. Parameters of
                float32 or float64; FSDP2 may compute in 16 bits and reduce in float32.
            micro_batches: M, of a step on all ranks together. It is fixed for a run.
            mesh: of FSDP2: the axes over which it was sharded, replicas before shards, without
                those of tensor parallelism. DDP has a process group.
            seed: seed torch's random numbers in each round by (seed, step, micro-batch), so that
                dropout does not depend on the number of ranks; ``None``: leave them.

        Raises:
            ElasticError: more ranks than micro-batches, a model that is not supported, or other
                numbers on another rank.
            IntegrationError: groups of another backend, or parameters on several meshes.
            ContractError: another contract than of ``order="tree"`` and ``accumulate="wide"``.
        """
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._norms = [one for one in model.named_modules() if isinstance(one[1], BatchNorm)]
        self._mesh = mesh
        if isinstance(model, DistributedDataParallel):
            if mesh is not None:
                raise ElasticError("mesh is for FSDP2, and DDP has a process group; omit mesh")
            groups = [check_group(model.process_group, "the model")]
        elif mesh is not None and any(isinstance(one, FSDPModule) for one in model.modules()):
            groups = [check_group(mesh.get_group(axis), "the mesh") for axis in range(mesh.ndim)]
            _check_order(mesh)
        else:
            raise ElasticError(
                f"model is a {type(model).__name__}; pass a DistributedDataParallel, or a model "
                "after fully_shard and its mesh"
            )
        self._contract = groups[0].options.contract
        self._groups = groups
        _check_options(groups)
        rank, ranks = 0, 1
        for group in groups:
            rank = rank * group.size() + group.rank()
            ranks *= group.size()
        self._check_agreement(micro_batches, seed)
        self.micro_batches = MicroBatches(micro_batches, ranks=ranks, rank=rank)
        self._seed = seed
        self._unreduced = False
        self._round = 0
        # Those of the last round, whose memory gets the means.
        self._gradients: dict[str, Tensor] = {}
        # Parameters not frozen in the step, and those that this rank's micro-batches use. Of those
        # not watched, all with one are used.
        self._trained: set[str] = set()
        self._used: set[str] = set()
        # What rounds of the step do: one list, if collectives match.
        self._sequences: set[str] = set()
        self._checked: set[str] = set()
        self._check({name for name, one in self._parameters.items() if one.requires_grad})
        self._over_ddp = isinstance(model, DistributedDataParallel)
        self._sums = LeafSums(self._contract, groups, self._over_ddp)
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(self._sums, keep_bucket)
        else:
            sum_shards(model, ranks, self._sums)
            watch_gradients(model, self._sums)

    @contextmanager
    def round(self) -> Iterator[None]:
        """A block with the forward and the backward of this rank's next micro-batch.

        Gradients are taken out of ``parameter.grad`` at its end.

        Raises:
            ElasticError: all rounds are done, the last one raised an exception, a parameter has a
                gradient already, a batch norm trains, or the gradients were not reduced or were
                reduced several times.
        """
        self._check_start()
        dealt, at = self.micro_batches, self.micro_batches.index(self._round)
        repeated = dealt.is_repeated(self._round)
        first, last = self._round * dealt.ranks, self._round + 1 == dealt.rounds
        self._sums.begin(first, repeated=repeated, last=last)
        # A repeated one leaves random numbers and buffers as they were.
        seeded = repeated or self._seed is not None
        try:
            with (
                keep_buffers(self._model) if repeated else nullcontext(),
                seed_micro_batch(self._seed or 0, dealt.step, at) if seeded else nullcontext(),
            ):
                yield
        finally:
            self._sums.in_round = False
        found = {name: one.grad for name, one in self._parameters.items() if one.grad is not None}
        refused = 1
        try:
            self._check_found(found)
            refused = 0
        finally:
            # DDP's ranks exchange next, and would wait for one that raises.
            every = self._gather([refused], torch.int64) if self._over_ddp else []
        if [1] in every:
            raise ElasticError(
                f"data-parallel rank {every.index([1])} raised an error in round {self._round}, as "
                "its log states; call reset on every rank, and begin the step again"
            )
        self._used |= {
            *self._sums.counts,
            *(found.keys() - self._sums.watched.keys()),
        }
        if self._over_ddp:
            for name, parameter in self._parameters.items():
                if id(parameter) in self._sums.reached and name not in found:
                    found[name] = torch.zeros_like(parameter)
            with torch.no_grad():
                self._sums.add_buckets(found[name] for name in self._parameters if name in found)
        # Flat gradients of the same parameters are added.
        self._sequences.add(" ".join([*self._sums.calls, *sorted(found)]))
        self._gradients = found if last else {}
        self._round += 1
        for name in found:
            self._parameters[name].grad = None
        self._sums.failed = False

    def _check_start(self) -> None:
        self._check_failed()
        check_batch_norms(self._norms)
        if self._round == self.micro_batches.rounds:
            raise ElasticError(
                f"all {self._round} rounds of this step are done; call finish, and then the "
                "optimizer, or reset to begin the step again"
            )
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                raise ElasticError(
                    f"parameter {name!r} has a gradient before the round; call "
                    "optimizer.zero_grad() after each step, and backward inside of round only"
                )
        trained = {name for name, one in self._parameters.items() if one.requires_grad}
        if self._round and trained != self._trained:
            raise ElasticError(
                f"parameter {min(trained ^ self._trained)!r} was frozen, or trained again, within "
                "the step; set requires_grad between steps"
            )
        self._trained = trained

    def _check_failed(self) -> None:
        self._check_unreduced()
        if self._sums.failed:
            # Gradients that FSDP2 did not reduce would be added to this round's.
            raise ElasticError(
                f"an exception ended round {self._round}, or backward was called outside of it; "
                "call reset on every rank, and begin the step again"
            )

    def _check_found(self, found: dict[str, Tensor]) -> None:
        reached = self._sums.reached
        lost = sorted(set(self._sums.counts) - found.keys())
        if not found or lost or (self._over_ddp and not reached):
            self._unreduced = not self._over_ddp
            raise ElasticError(
                f"no gradient{f' of {lost[0]!r}' if lost else ''} was reduced in round "
                f"{self._round}; call backward once in it, without no_sync, and with "
                "set_requires_gradient_sync(True); replace no parameter"
            )
        counts = Counter(self._sums.counts)
        for name in found if self._over_ddp else ():
            counts[name] = reached[id(self._parameters[name])]
            if not counts[name]:
                raise ElasticError(
                    f"parameter {name!r} has a gradient that DDP did not reduce in round "
                    f"{self._round}; freeze parameters before DDP is constructed, and have DDP "
                    "ignore none that is trained"
                )
        # Without zeros, FSDP2 adds gradients of different parameters that ranks use.
        idle = (self._sums.watched.keys() & self._trained) - counts.keys()
        if idle and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ElasticError(
                f"no gradient of parameter {min(idle)!r} in round {self._round}, and FSDP2 of "
                f"torch {torch.__version__} would add those of other parameters to it; use every "
                "parameter in each micro-batch, freeze it, or use torch 2.13 or newer"
            )
        repeated = {name for name, times in counts.items() if times > 1}
        if repeated:
            raise ElasticError(
                f"parameter {min(repeated)!r} got several gradients in round {self._round}, "
                "whose sum depends on the number of ranks; call backward once in it, and shard a "
                "module that forward calls several times with its parent"
            )
        self._check(found.keys())

    def finish(self, divisor: int | None = None) -> None:
        """Set ``parameter.grad`` to the mean over all micro-batches, and count a finished step.

        A micro-batch that does not use a parameter counts as a gradient of zeros. A parameter that
        none of the step uses has no gradient, so that an optimizer leaves it as it is.

        Args:
            divisor: divide the sums by it instead of M, such as by the number of tokens of the
                step if the loss of a micro-batch is a sum. The same on every rank.

        It waits for the device, to compare all of this between ranks.

        Raises:
            ElasticError: a round is missing or failed, ``divisor`` is not a positive integer, or
                ranks differ in it, in the number of finished steps or in the reduced gradients.
        """
        self._check_failed()
        rounds = self.micro_batches.rounds
        if self._round != rounds:
            raise ElasticError(
                f"{self._round} of {rounds} rounds are done; compute {rounds} micro-batches on "
                "each rank before finish"
            )
        if divisor is not None and (not isinstance(divisor, int) or not 1 <= divisor < 2**63):
            raise ElasticError(f"divisor={divisor!r}; pass an integer from 1 to 2**63 - 1")
        divisor = divisor or self.micro_batches.count
        used = self._agree_on_step(divisor)
        with torch.no_grad():
            # Those of an FSDP module are views of one memory.
            flats = {}
            for name in used & self._gradients.keys():
                whole = self._parameters[name].grad = self._gradients[name]
                # Autograd would record each access to it.
                local = whole.to_local() if isinstance(whole, DTensor) else whole
                memory = local.untyped_storage()
                numel = memory.nbytes() // local.element_size()
                flats[memory.data_ptr()] = local.as_strided((numel,), (1,), 0)
            for flat in flats.values():
                reduce_into(flat, [flat], "avg", (1,), self._contract, divisor=divisor)
        self._forget()
        self.micro_batches.finish_step()

    def reset(self) -> None:
        """Forget the gradients of this step, to begin it again, such as after an exception.

        Call it on every rank, and make a new iterator of the data loader. A DDP model whose
        backward raised must be made again: torch refuses its next forward.

        Raises:
            ElasticError: FSDP2 keeps gradients that were not reduced.
        """
        self._check_unreduced()
        reset_shards(self._model)
        for parameter in self._parameters.values():
            parameter.grad = None
        self._forget()

    def _check_unreduced(self) -> None:
        if self._unreduced:
            raise ElasticError(
                "a round ended without a reduction, and FSDP2 adds its gradients to the next "
                "ones; make the model again from the last checkpoint"
            )

    def _forget(self) -> None:
        self._round, self._gradients, self._sums.failed = 0, {}, False
        self._used.clear()
        self._sequences.clear()

    def sum_scalars(self, values: Sequence[Tensor | float]) -> float:
        """The exact sum of a number of each micro-batch, rounded once: a loss, a token count.

        Call it on every rank. It waits for the device.

        Args:
            values: one for each round of this rank, such as losses: numbers, or tensors of one
                element. Integers are exact up to 2^53. That of a repeated micro-batch is left out.

        Returns:
            The sum over all M micro-batches, the same on any number of ranks. Infinite if the sum
            exceeds float64.

        Raises:
            ElasticError: another number of values.
        """
        if len(values) != self.micro_batches.rounds:
            raise ElasticError(
                f"got {len(values)} values for {self.micro_batches.rounds} rounds; pass one for "
                "each round of this rank"
            )
        # A repeated micro-batch adds nothing.
        repeated = self.micro_batches.is_repeated(len(values) - 1)
        numbers = [*map(float, values[: len(values) - repeated]), *[0.0] * repeated]
        return exact_sum([one for row in self._gather(numbers, torch.float64) for one in row])

    def _gather(self, numbers: list[Any], dtype: torch.dtype) -> list[list[Any]]:
        """The numbers of each rank, in mesh order."""
        device, rows = next(iter(self._parameters.values())).device, [numbers]
        for group in [one for one in reversed(self._groups) if one.size() > 1]:
            mine = torch.tensor(rows, dtype=dtype, device=device)
            every = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(every, mine, group=group)
            rows = torch.cat(every).tolist()
        return rows

    def _check(self, names: Set[str]) -> None:
        for name in sorted(names - self._checked):
            _check_parameter(name, self._parameters[name], self._mesh)
        self._checked |= names

    def _check_agreement(self, micro_batches: int, seed: int | None) -> None:
        """Raise an error on all ranks if their numbers differ."""
        check_count(micro_batches)
        mine = [micro_batches, seed is not None, *divmod(seed or 0, 1 << 32)]
        every = self._gather(mine, torch.int64)
        rows = [(m, (high << 32) + low if seeded else None) for m, seeded, high, low in every]
        if found := _differing_rank(rows):
            rank, other, first = found
            raise ElasticError(
                f"data-parallel rank {rank} has (micro_batches, seed) = {other}, rank 0 "
                f"{first}; pass the same on all ranks"
            )

    def _agree_on_step(self, divisor: int) -> set[str]:
        """Parameters that any rank used; raises on all if steps differ."""
        numbers = [divisor, self.micro_batches.step, len(self._sequences)]
        flags = [int(name in self._used) for name in self._parameters]
        rows = self._gather([*numbers, mix(*sorted(self._sequences)) >> 1, *flags], torch.int64)
        found = _differing_rank([tuple(row[:4]) for row in rows])
        if found and found[1][:2] != found[2][:2]:
            rank, other, first = found
            raise ElasticError(
                f"data-parallel rank {rank} has (divisor, finished steps) = {other[:2]}, "
                f"rank 0 {first[:2]}; pass the same divisor and load the same checkpoint on "
                "all ranks"
            )
        if found or len(self._sequences) > 1:
            # Several ranks would reduce those of each other.
            raise ElasticError(
                "micro-batches of the step call or unshard different FSDP modules, or their "
                "backward reaches different calls; do the same in the same order in each, or shard "
                "a module that differs with its parent"
            )
        used = zip(self._parameters, *(row[4:] for row in rows), strict=True)
        return {name for name, *flags in used if any(flags)}


def _differing_rank(rows: list[tuple[Any, ...]]) -> tuple[int, Any, Any] | None:
    """The first rank with other numbers than rank 0, its numbers and those of rank 0."""
    return next(((at, row, rows[0]) for at, row in enumerate(rows) if row != rows[0]), None)


def exact_sum(numbers: Sequence[float]) -> float:
    """The sum of numbers, rounded once; infinite if it exceeds float64."""
    others = [one for one in numbers if not math.isfinite(one)]
    if others:
        return sum(others)
    total = sum(map(Fraction, numbers), Fraction())
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


# Groups and meshes over which FSDP2 adds shards in the order of micro-batches.


def _check_options(groups: Sequence[MeshplanProcessGroup]) -> None:
    """Refuse groups of several contracts, or of one whose subtrees are no sums of gradients."""
    contract = groups[0].options.contract
    # Sums in float64 would be rounded to the dtype of gradients in each round.
    if (contract.order, contract.accumulate) != ("tree", "wide"):
        raise ContractError(
            f"gradients under {contract.id} cannot be added in rounds; use "
            "Contract(order='tree', accumulate='wide')"
        )
    for group in groups:
        options = group.options
        if options.contract != contract or options.policy == "fast":
            raise ElasticError(
                f"a group reduces under {options.contract.id} with policy={options.policy!r}, "
                f"another under {contract.id}; pass the same BackendOptions of "
                "policy='deterministic' to all groups"
            )


def _check_order(mesh: DeviceMesh) -> None:
    """Refuse replicas whose shards are in different orders."""
    for axis in range(mesh.ndim):
        # Torch orders the ranks of a group by their numbers, whatever their order in the mesh.
        places = mesh.mesh.argsort(axis).argsort(axis).movedim(axis, 0)
        places = places.reshape(mesh.size(axis), -1)
        if bool((places != places[:, :1]).any()):
            raise ElasticError(
                f"the groups of {mesh} along axis {axis} have ranks in different orders: "
                f"{mesh.mesh.tolist()}. Torch sorts them, and FSDP2 then adds other shards; pass "
                "a mesh with the same order in all groups of an axis"
            )


def _check_parameter(name: str, parameter: nn.Parameter, mesh: DeviceMesh | None) -> None:
    """Refuse a parameter of 16 bits, or that ``mesh`` does not shard."""
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ElasticError(
            f"parameter {name!r} is {parameter.dtype}, to which each round would be "
            "rounded; keep parameters in float32, and compute in 16 bits by "
            "MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32) or autocast"
        )
    found = []
    if mesh is not None and isinstance(parameter, DTensor):
        # Replicas and shards come before the axes of tensor parallelism.
        replicated = [one.is_replicate() for one in parameter.placements[: mesh.ndim]]
        found = _axes(parameter.device_mesh, replicated)
    if mesh is not None and found != _axes(mesh, [True] * (mesh.ndim - 1) + [False]):
        raise ElasticError(
            f"parameter {name!r} is not sharded over {mesh}; pass the mesh that "
            "fully_shard got, and shard all parameters over it"
        )


def _axes(mesh: DeviceMesh, replicated: Sequence[bool]) -> list[tuple[list[int], bool]]:
    return [
        (dist.get_process_group_ranks(mesh.get_group(axis)), one)
        for axis, one in enumerate(replicated)
    ]
