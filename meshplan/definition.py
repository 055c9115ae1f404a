"""The contract, executed: plain torch, on any device. Every other path has these bits.

A reduction may be done in two parts with the same bits: ``combine_leaves`` over blocks of leaves
that are subtrees, ``finish_partials`` over their results. Subtrees are the blocks of the last
axes, and inside the next axis outward those of a power of two that divides its size.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from meshplan._dtypes import name_of
from meshplan._exact_sum import combine_exactly, finish_exactly, sum_exactly
from meshplan._torch import disable_current_modes
from meshplan.contract import Contract, Op, check_dtype
from meshplan.errors import ContractError, ContractStateError, ContractTypeError
from meshplan.orders import EXACT_WORDS

# Integer dtype with the same bits, and the canonical quiet NaN in it.
NAN_BITS = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
    torch.float64: (torch.int64, 0x7FF8000000000000),
}
_SMALLEST_SUBNORMAL = math.ulp(0.0)
# From this many elements on, torch computes on several threads (at::internal::GRAIN_SIZE).
_GRAIN = 32768
_checked_threads = threading.local()


def accumulator(contract: Contract, dtype: torch.dtype) -> torch.dtype:
    found: torch.dtype = getattr(torch, contract.accumulator(name_of(dtype)))
    return found


def partial_dtype(op: str, dtype: torch.dtype, contract: Contract) -> torch.dtype:
    """The dtype that ``combine_leaves`` returns for leaves of ``dtype``."""
    found: torch.dtype = getattr(torch, contract.partial(op, name_of(dtype)).dtype)
    return found


def partial_shape(
    shape: Sequence[int], op: str, dtype: torch.dtype, contract: Contract
) -> tuple[int, ...]:
    """The shape that ``combine_leaves`` returns for leaves of ``shape``.

    In an exact order it has one dim more, in front: the words of each sum (``EXACT_WORDS``).
    """
    if not contract.sums_exactly(op, name_of(dtype)):
        return tuple(shape)
    return EXACT_WORDS[contract.accumulator(name_of(dtype))], *shape


def reduce_leaves(
    leaves: Sequence[Tensor],
    op: Op,
    shape: Sequence[int],
    contract: Contract = Contract(),
    *,
    divisor: int | None = None,
) -> Tensor:
    """Combine ``leaves`` in contract order. Out of place; no communication.

    Args:
        leaves: one tensor per coordinate, row-major over ``shape``; all of one shape, dtype and
            device, any strides. float32, float64, float16, bfloat16, int8 to int64 or uint8.
            Not differentiated through.
        op: ``sum``, ``avg``, ``max``, ``min`` or ``product``.
        shape: sizes of the reduced axes, outermost first; their product is ``len(leaves)``.
        contract: order, accumulator and rounding.
        divisor: for ``avg`` only: divide the sum by this instead of by ``len(leaves)`` (for
            reductions that are a sum along some axes and a mean along others).

    Returns:
        A new contiguous tensor of the leaves' shape and dtype.

    Raises:
        ContractError: unknown ``op``, no leaves, leaves that do not fill ``shape``, or a divisor
            without ``avg``.
        ContractTypeError: a dtype outside the contract, leaves that differ in shape, dtype or
            device, ``avg`` of integers, or ``product`` of floats in an exact order.
        ContractStateError: this thread, or one of torch's worker threads, flushes subnormal
            numbers to zero.
    """
    leaves = check_leaves(leaves, op, shape, divisor)
    dtype = leaves[0].dtype
    check_dtype(op, dtype, contract)
    if divisor is None and op == "avg":
        divisor = len(leaves)
    return _finish(leaves, op, shape, contract, dtype, divisor)


def combine_leaves(
    leaves: Sequence[Tensor], op: Op, shape: Sequence[int], contract: Contract = Contract()
) -> Tensor:
    """The first part of a reduction: one block of its leaves, for ``finish_partials``.

    Args:
        leaves, op, contract: as for ``reduce_leaves``. ``avg`` is a sum here.
        shape: sizes of the axes of the block, outermost first.

    Returns:
        A new contiguous tensor of ``partial_shape`` and of ``partial_dtype``, neither divided nor
        rounded for the last time. NaNs in it may have any payload.

    Raises:
        ContractError, ContractTypeError, ContractStateError: as ``reduce_leaves``; and
            ContractError for a fold of floats in an order without parts, e.g. ``"rank"``.
    """
    leaves = check_leaves(leaves, op, shape, None)
    dtype = leaves[0].dtype
    check_dtype(op, dtype, contract)
    contract.check_parts(op, dtype)
    if op in ("max", "min"):
        return _reduce_extremum(leaves, op)
    if contract.sums_exactly(op, name_of(dtype)):
        refuse_flushed_subnormals(leaves[0])
        return combine_exactly([leaf.to(accumulator(contract, dtype)) for leaf in leaves])
    result = _fold(leaves, op, shape, contract, dtype)
    return _round_to(result, partial_dtype(op, dtype, contract), leaves[0])


def finish_partials(
    partials: Sequence[Tensor],
    op: Op,
    shape: Sequence[int],
    contract: Contract,
    dtype: torch.dtype,
    divisor: int | None = None,
) -> Tensor:
    """The second part of a reduction: combine the results of ``combine_leaves`` for all blocks.

    Args:
        partials: one per block, row-major over ``shape``.
        op, contract: as for ``combine_leaves``.
        shape: sizes of the axes over the blocks, outermost first.
        dtype: of the leaves.
        divisor: required for ``avg``: divides the sum.

    Returns:
        The result of ``reduce_leaves`` for all leaves, bit for bit: a new contiguous tensor of
        ``dtype``.

    Raises:
        ContractError, ContractTypeError, ContractStateError: as ``combine_leaves``; and
            ContractError for ``avg`` without a divisor, ContractTypeError for partials that are
            not of ``partial_dtype``.
    """
    partials = check_leaves(partials, op, shape, divisor)
    check_dtype(op, dtype, contract)
    contract.check_parts(op, dtype)
    wanted = partial_dtype(op, dtype, contract)
    if partials[0].dtype is not wanted:
        raise ContractTypeError(
            f"partials of {op} of {dtype} are {wanted} under {contract.id}, got "
            f"{partials[0].dtype}; pass the results of combine_leaves"
        )
    if op == "avg" and divisor is None:
        raise ContractError(
            f"an average in parts needs a divisor, got {len(partials)} partials without one; pass "
            "divisor, the number of leaves"
        )
    if not contract.sums_exactly(op, name_of(dtype)):
        return _finish(partials, op, shape, contract, dtype, divisor)
    wide, first = accumulator(contract, dtype), partials[0]
    words = EXACT_WORDS[name_of(wide)]
    if first.dim() == 0 or len(first) != words:
        raise ContractTypeError(
            f"exact partials of {wide} have {words} words in their first dim, got a tensor of "
            f"{list(first.shape)}; pass the results of combine_leaves"
        )
    refuse_flushing_thread()
    total = finish_exactly(partials, wide)
    return _divide_and_round(total, dtype, divisor, None)


def check_leaves(
    leaves: Sequence[Tensor], op: str, shape: Sequence[int], divisor: int | None
) -> list[Tensor]:
    """Check that ``leaves`` fill ``shape``; returns them detached, without a lazy negation.

    Raises:
        ContractError, ContractTypeError: as ``reduce_leaves``.
    """
    if not leaves or math.prod(shape) != len(leaves) or min(shape, default=1) < 1:
        raise ContractError(
            f"axes of sizes {list(shape)} need {math.prod(shape)} leaves, got {len(leaves)}; "
            "pass one leaf per coordinate, row-major"
        )
    if divisor is not None and (op != "avg" or not 1 <= divisor < 2**63):
        raise ContractError(
            f"divisor={divisor} with op={op!r}; a divisor is a whole number from 1 to 2**63 - 1 "
            "and needs op='avg'"
        )
    first = leaves[0]
    for i, leaf in enumerate(leaves):
        if (leaf.shape, leaf.dtype, leaf.device) != (first.shape, first.dtype, first.device):
            raise ContractTypeError(
                f"leaf {i} is {leaf.dtype} {tuple(leaf.shape)} on {leaf.device}, leaf 0 is "
                f"{first.dtype} {tuple(first.shape)} on {first.device}; all leaves must match"
            )
    return [leaf.detach().resolve_neg() for leaf in leaves]


def canonicalize_nans(out: Tensor) -> Tensor:
    """Make every NaN in ``out`` the canonical one, in place; returns ``out``."""
    if out.dtype in NAN_BITS:
        integer, nan = NAN_BITS[out.dtype]
        out.view(integer).masked_fill_(torch.isnan(out), nan)
    return out


def refuse_flushed_subnormals(leaf: Tensor) -> None:
    """Raise where the CPU threads that compute on ``leaf`` do not keep subnormal numbers."""
    if leaf.device.type != "cpu" or not leaf.is_floating_point():
        return
    # torch.set_flush_denormal changes this thread's floating-point mode, for Python's own
    # arithmetic as well; torch cannot report the mode.
    refuse_flushing_thread()
    threads = torch.get_num_threads()
    if not hasattr(_checked_threads, "counts"):
        _checked_threads.counts = set()
    if leaf.numel() >= _GRAIN and threads not in _checked_threads.counts:
        # Worker threads keep the mode in which they were started, so one check is enough.
        with disable_current_modes():
            probe = torch.ones(threads * _GRAIN, dtype=torch.int32, device="cpu")
            flushed = bool(((probe.view(torch.float32) * 1.0).view(torch.int32) == 0).any())
        if flushed:
            raise _flushing_error("one of torch's worker threads")
        _checked_threads.counts.add(threads)


def refuse_flushing_thread() -> None:
    """Raise where this thread does not keep subnormal numbers."""
    if _SMALLEST_SUBNORMAL * 1.0 == 0.0:
        raise _flushing_error("this thread")


def _flushing_error(thread: str) -> ContractStateError:
    return ContractStateError(
        f"{thread} flushes subnormal numbers to zero, the contract keeps them; "
        "call torch.set_flush_denormal(False) on every rank, before any computation"
    )


def _finish(
    leaves: Sequence[Tensor],
    op: str,
    shape: Sequence[int],
    contract: Contract,
    dtype: torch.dtype,
    divisor: int | None,
) -> Tensor:
    if op in ("max", "min"):
        # Exact in any order and any dtype, hence no accumulator.
        return _reduce_extremum(leaves, op)
    result = _fold(leaves, op, shape, contract, dtype)
    return _divide_and_round(result, dtype, divisor, leaves[0])


def _divide_and_round(
    result: Tensor, dtype: torch.dtype, divisor: int | None, leaf: Tensor | None
) -> Tensor:
    """The end of a reduction, in memory that is not ``leaf``'s."""
    if divisor is not None:
        # A tensor on the device, not a Python number: CUDA multiplies by the reciprocal of a host
        # scalar, which is not the IEEE division.
        count = torch.full((), divisor, dtype=result.dtype, device=result.device)
        result = torch.div(result, count)
    return canonicalize_nans(_round_to(result, dtype, leaf))


def _fold(
    leaves: Sequence[Tensor], op: str, shape: Sequence[int], contract: Contract, dtype: torch.dtype
) -> Tensor:
    """The sum or product in the accumulator's dtype; of one leaf, possibly that leaf itself."""
    refuse_flushed_subnormals(leaves[0])
    wide = accumulator(contract, dtype)
    if contract.sums_exactly(op, name_of(dtype)):
        return sum_exactly([leaf.to(wide) for leaf in leaves])
    combine = torch.mul if op == "product" else torch.add

    def node(left: Tensor, right: Tensor) -> Tensor:
        value = combine(left, right)
        return value.to(dtype).to(wide) if contract.rounding == "node" else value

    result: Tensor = contract.ordering.expression(shape, lambda i: leaves[i].to(wide), node)
    return result


def _round_to(result: Tensor, dtype: torch.dtype, leaf: Tensor | None) -> Tensor:
    return result.to(dtype, copy=result is leaf).contiguous()


def _reduce_extremum(leaves: Sequence[Tensor], op: str) -> Tensor:
    """The maximum or minimum: new memory, contiguous, NaNs canonical."""
    pick = torch.maximum if op == "max" else torch.minimum
    if leaves[0].dtype not in NAN_BITS:
        result = leaves[0].clone()
        for leaf in leaves[1:]:
            result = pick(result, leaf)
        return result.contiguous()
    # Integer keys order the floats totally, with -0.0 below +0.0; torch.maximum on floats leaves
    # the choice between equal zeros to the vector unit.
    integer, nan_bits = NAN_BITS[leaves[0].dtype]
    key, nan = _total_order(leaves[0].contiguous().view(integer)), torch.isnan(leaves[0])
    for leaf in leaves[1:]:
        key = pick(key, _total_order(leaf.contiguous().view(integer)))
        nan = nan | torch.isnan(leaf)
    return _total_order(key).masked_fill_(nan, nan_bits).view(leaves[0].dtype)


def _total_order(bits: Tensor) -> Tensor:
    """Sign-magnitude bits to two's complement and back: the map is its own inverse."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
