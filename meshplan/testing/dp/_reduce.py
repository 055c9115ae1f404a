"""The batch gradient: the contract's tree over the leaves of the global batch.

One process computes the parts of all ranks, or the ranks of a process group one part each.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshplan._chunks import cover_range
from meshplan._message_text import format_first
from meshplan.collectives._options import AnyOp, read_op
from meshplan.contract import Contract, Op
from meshplan.definition import combine_leaves, finish_partials, partial_dtype
from meshplan.errors import ContractError, GroupError
from meshplan.testing._bitwise import digest, first_difference
from meshplan.testing._ranks import LeafRange, RankGroup, join_blocks
from meshplan.testing.dp._leaves import (
    LossFn,
    SampleLeaves,
    batch_size,
    count_leaves,
    samples_per_rank,
)

# Elements of one exchange, over all blocks of all ranks.
_CHUNK = 1 << 24
_SHOWN = 8

PartialGradients = dict[str, Tensor]
"""Unfinished gradients of a block of leaves, without parameters that none of them uses."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the leaves are combined."""

    op: Op
    divisor: int | None
    contract: Contract

    def __post_init__(self) -> None:
        if self.op not in ("sum", "avg"):
            raise ContractError(f"op={self.op!r} of gradients; pass 'sum' or 'avg'")
        divisor = self.divisor
        if divisor is not None and (self.op != "avg" or not 1 <= divisor < 1 << 63):
            raise ContractError(
                f"divisor={divisor} with op='{self.op}'; a divisor is a whole number from 1 to "
                "2**63 - 1 and needs op='avg'"
            )
        if self.contract.order != "tree":
            raise ContractError(
                f"leaves of a batch are combined in order='tree', got order='{self.contract.order}'"
                "; pass a contract of that order, or all leaves to reduce_leaves"
            )

    def leaf(self, gradient: Tensor) -> Tensor:
        return combine_leaves([gradient], "sum", (1,), self.contract)

    def combine(self, left: Tensor, right: Tensor) -> Tensor:
        # Rounded once, partials have the accumulator's dtype already, which is not raised again.
        contract = self.contract if self.contract.rounding == "node" else Contract()
        return combine_leaves([left, right], "sum", (2,), contract)

    def finish(
        self,
        blocks: Iterable[tuple[LeafRange, Tensor]],
        count: int,
        dtype: torch.dtype,
    ) -> Tensor:
        total = join_blocks(blocks, count, self.combine)
        divisor = (self.divisor or count) if self.op == "avg" else None
        return finish_partials([total], self.op, (1,), self.contract, dtype, divisor)


def reduce_range(
    leaf: Callable[[int], dict[str, Tensor | None]],
    indices: range,
    reduction: Reduction,
) -> list[tuple[LeafRange, PartialGradients]]:
    """The subtrees of the leaves ``indices``; at most log2 of their number + 2 exist at a time."""

    def subtree(start: int, stop: int) -> PartialGradients:
        if stop - start == 1:
            return {n: reduction.leaf(g) for n, g in leaf(start).items() if g is not None}
        middle = (start + stop) // 2
        left = subtree(start, middle)
        right = subtree(middle, stop)
        for name in list(right):
            value = right.pop(name)
            left[name] = reduction.combine(left[name], value) if name in left else value
        return left

    return [(block, subtree(*block)) for block in cover_range(indices.start, indices.stop)]


def dp_gradients(
    model: nn.Module,
    loss_fn: LossFn,
    inputs: Any,
    targets: Any,
    *,
    world: int | Sequence[int] = 1,
    op: AnyOp = "avg",
    divisor: int | None = None,
    samples_per_leaf: int = 1,
    seed: int = 0,
    contract: Contract | None = None,
) -> dict[str, Tensor | None]:
    """The gradients of a global batch over ``world`` data-parallel ranks, in one process.

    The leaf is the gradient of one sample, run through the model alone. Leaves are combined by the
    contract's tree over their indices in the global batch: each rank combines its own into the
    subtrees inside its range, and their values are joined. The tree does not depend on ranks, so
    the bits are the same for any number of ranks and any sizes of their parts, and the same as
    those of ``meshplan.definition.reduce_leaves`` over all leaves.

    This requires that a leaf has the same bits wherever it is computed: one machine type, one build
    of torch, the same settings and the same number of threads (``deterministic_controls``), and
    kernels that return the same bits when they run twice. The model must return the same result
    for a sample whatever ran before: plain Python attributes and random numbers other than torch's
    are not restored. Larger ``samples_per_leaf`` are faster, and have other bits.

    Args:
        model, loss_fn, inputs, targets, samples_per_leaf, seed: as for ``sample_gradients``; here
            the whole global batch.
        world: the number of ranks, with parts that differ by one leaf at most; or the number of
            samples of each rank, 0 allowed.
        op: ``avg`` or ``sum``, or torch's ``ReduceOp`` of that name. ``avg``: the sum, then one
            division by the number of leaves. It is the gradient of the mean over the batch if
            ``loss_fn`` is a mean over its leaf.
        divisor: for ``avg``, divide by this instead, e.g. by a number of tokens.
        contract: ``order="tree"``, with any accumulator and rounding; ``Contract()`` if ``None``.

    Returns:
        By parameter name, a new tensor of the parameter's shape and dtype. ``None`` where no
        sample uses the parameter. Where some do, the others count as -0.0, which changes no sum.

    Raises:
        ContractError, ContractTypeError: as ``sample_gradients``; and ContractError for a batch
            without samples, an unknown ``op``, a divisor without ``avg``, sizes that do not add
            up to the batch, or ``order="rank"``, which has no parts.
        ContractStateError: the CPU flushes subnormal numbers to zero.
    """
    reduction = Reduction(read_op(op), divisor, Contract() if contract is None else contract)
    leaves = SampleLeaves(model, loss_fn, inputs, targets, samples_per_leaf, seed)
    _check_not_empty(leaves.count)
    partials: list[tuple[LeafRange, PartialGradients]] = []
    for indices in _rank_ranges(world, batch_size((inputs, targets)), samples_per_leaf):
        partials += reduce_range(leaves.gradients, indices, reduction)
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in leaves.parameters.items():
        blocks = [(block, partial.pop(name)) for block, partial in partials if name in partial]
        finished = reduction.finish(blocks, leaves.count, parameter.dtype) if blocks else None
        gradients[name] = finished
    return gradients


def _rank_ranges(world: int | Sequence[int], samples: int, samples_per_leaf: int) -> list[range]:
    if isinstance(world, int):
        counts = samples_per_rank(samples, world, True, samples_per_leaf)
    else:
        counts = list(world)
        if sum(counts) != samples or min(counts, default=0) < 0:
            raise ContractError(
                f"world={counts} does not place the {samples} samples of the batch; pass the "
                f"number of samples of each rank, 0 or more, {samples} together"
            )
    ends = accumulate((count_leaves(size, samples_per_leaf) for size in counts), initial=0)
    return [range(first, last) for first, last in pairwise(ends)]


def distributed_dp_gradients(
    model: nn.Module,
    loss_fn: LossFn,
    local_inputs: Any,
    local_targets: Any,
    *,
    group: dist.ProcessGroup | None = None,
    op: AnyOp = "avg",
    divisor: int | None = None,
    samples_per_leaf: int = 1,
    seed: int = 0,
    contract: Contract | None = None,
) -> dict[str, Tensor | None]:
    """``dp_gradients`` where every rank of ``group`` holds a part of the global batch.

    The global batch is the parts in the order of the group's ranks. They may differ in size, and
    be empty on some ranks. The bits are those of ``dp_gradients`` over the whole batch, on all
    ranks. A rank sends at most ``2 * log2(samples)`` gradients.

    Before a sample is run the ranks compare parameters and buffers bit by bit, arguments, torch's
    version, threads, kind of processor. Every rank of ``group`` must call this; if one raises, all
    do.

    Args:
        model, loss_fn, op, divisor, samples_per_leaf, seed, contract: as for ``dp_gradients``;
            the same on all ranks.
        local_inputs, local_targets: this rank's part of the batch, as ``inputs`` and ``targets``
            there.
        group: ``None``: all ranks.

    Returns:
        As ``dp_gradients``: by parameter name, the same bits on every rank.

    Raises:
        ContractError, ContractTypeError, ContractStateError: as ``dp_gradients``.
        GroupStateError: no process group is initialised, or this rank is not in ``group``.
        SignatureMismatchError: models, arguments or settings of ranks differ; before a sample is
            run.
        GroupError: another rank raised, with its message.
    """
    ranks = RankGroup(group)

    def prepare() -> tuple[tuple[Reduction, SampleLeaves], dict[str, Any]]:
        reduction = Reduction(read_op(op), divisor, Contract() if contract is None else contract)
        leaves = SampleLeaves(model, loss_fn, local_inputs, local_targets, samples_per_leaf, seed)
        # E.g. avg/8/v1/tree/wide/once.
        about = f"{reduction.op}/{divisor or 'leaves'}/{reduction.contract.id}"
        equal = {
            "the reduction": about,
            "samples_per_leaf": samples_per_leaf,
            "seed": seed,
            **_settings(next(iter(leaves.parameters.values())).device),
            "the model (sha256)": _hash_model(model),
        }
        return (reduction, leaves), {"leaves": leaves.count, "equal": equal}

    (reduction, leaves), records = ranks.run(prepare, GroupError)
    ranks.check_equal(
        [record["equal"] for record in records],
        "no sample was run: pass the same model and arguments, and enter "
        "deterministic_controls(), on every rank",
    )
    ends = list(accumulate((record["leaves"] for record in records), initial=0))
    count, ranges = ends[-1], list(pairwise(ends))
    _check_not_empty(count)
    leaves.first = ends[ranks.position]

    def compute() -> tuple[list[tuple[LeafRange, PartialGradients]], list[list[str]]]:
        indices = range(*ranges[ranks.position])
        partials = reduce_range(leaves.gradients, indices, reduction)
        return partials, [list(partial) for _, partial in partials]

    partials, used = ranks.run(compute, GroupError)
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in leaves.parameters.items():
        present = [name in names for of_rank in used for names in of_rank]
        mine = [(block, partial.pop(name, None)) for block, partial in partials]
        gradients[name] = None
        if any(present):
            gradients[name] = _exchange(parameter, mine, ranges, present, count, reduction, ranks)
    return gradients


def _exchange(
    parameter: nn.Parameter,
    mine: list[tuple[LeafRange, Tensor | None]],
    ranges: list[LeafRange],
    present: list[bool],
    count: int,
    reduction: Reduction,
    ranks: RankGroup,
) -> Tensor:
    """The gradient of one parameter, from this rank's values; ``present`` is of all blocks."""
    dtype = partial_dtype("sum", parameter.dtype, reduction.contract)
    result = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    flat = result.view(-1)
    rows = max(len(cover_range(*one)) for one in ranges)
    step = max(_CHUNK // (rows * len(ranges)), 1)
    for low in range(0, flat.numel(), step):
        zeros = flat[low : low + step].new_zeros((), dtype=dtype).expand_as(flat[low : low + step])
        part = [
            (block, zeros if value is None else value.view(-1)[low : low + step])
            for block, value in mine
        ]
        everywhere = zip(ranks.gather_blocks(part, ranges, zeros), present, strict=True)
        values = [pair for pair, here in everywhere if here]
        flat[low : low + step] = reduction.finish(values, count, parameter.dtype)
    return result


def _check_not_empty(count: int) -> None:
    if count == 0:
        raise ContractError("the global batch has no samples; pass at least one")


def _settings(device: torch.device) -> dict[str, Any]:
    processor = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        processor = f"{torch.cuda.get_device_name(device)} and {processor}"
    autocast = torch.is_autocast_enabled(device.type)
    return {
        "the version of torch": torch.__version__,
        "the processor": processor,
        "the number of threads": torch.get_num_threads(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cuDNN's benchmark": torch.backends.cudnn.benchmark,
        "autocast": str(torch.get_autocast_dtype(device.type)) if autocast else "off",
    }


def _hash_model(model: nn.Module) -> str:
    whole = hashlib.sha256()
    for name, module in model.named_modules():
        whole.update(f"{name} {module.training} ".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole.update(f"{name} {tensor.requires_grad} {digest(tensor)} ".encode())
    return whole.hexdigest()[:16]


def compare_gradients(
    candidate: Mapping[str, Tensor | None],
    reference: Mapping[str, Tensor | None],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Assert that two sets of gradients agree: in every bit, unless a tolerance is given.

    Args:
        candidate, reference: tensors on any device (or ``None``: no gradient) by parameter name.
        rtol, atol: as for ``torch.testing.assert_close``, which then compares; NaNs are equal
            there. With both 0, -0.0 is not 0.0.

    Raises:
        AssertionError: names the parameters that differ, and how.
        ContractError: the two have different parameters, or a tolerance is negative or not finite.
    """
    if not all(0 <= tolerance < math.inf for tolerance in (rtol, atol)):
        raise ContractError(f"rtol={rtol}, atol={atol}; pass finite tolerances, 0 or more")
    if candidate.keys() != reference.keys():
        lacks = sorted(reference.keys() - candidate.keys())
        extra = sorted(candidate.keys() - reference.keys())
        raise ContractError(
            f"gradients of different parameters: {format_first(lacks, _SHOWN) or 'none'} only in "
            f"the reference, {format_first(extra, _SHOWN) or 'none'} only in the candidate; "
            "compare gradients of one model"
        )
    if rtol or atol:
        pair = dict(candidate), dict(reference)
        torch.testing.assert_close(*pair, rtol=rtol, atol=atol, equal_nan=True, check_device=False)
        return
    lines = []
    for name, wanted in sorted(reference.items()):
        found = candidate[name]
        if found is None or wanted is None:
            if found is not wanted:
                side = "candidate" if found is None else "reference"
                lines.append(f"{name}: no gradient in the {side}")
        elif text := first_difference(found, wanted):
            lines.append(f"{name}: {text}")
    if lines:
        head = f"gradients of {len(lines)} of {len(reference)} parameters differ in their bits"
        raise AssertionError("\n  ".join([head, *lines[:_SHOWN]]))
