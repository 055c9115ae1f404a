"""The contract, executed: plain torch, on any device. Every other path has these bits.

A reduction may be done in two parts with the same bits: ``combine_leaves`` over blocks of leaves
that are subtrees, ``finish_partials`` over their results. Subtrees are the blocks of the last
axes, and inside the next axis outward those of a power of two that divides its size.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshplan._dtypes import name_of
from meshplan._torch import disable_current_modes
from meshplan.contract import Contract, Op, check_dtype
from meshplan.errors import ContractError, ContractStateError, ContractTypeError
from meshplan.orders import EXACT_WORDS

# The exact sum of floats in plain torch: fixed-point integers, and one rounding at the end.
#
# A finite float is a whole number of units, where one unit is the smallest subnormal number of its
# dtype. Sums of whole numbers are exact, in any order. They have up to 2,098 bits and are kept as
# digits of 32 bits, each in an int64. All steps are integer operations on a few MiB at a time, so
# that the result does not depend on the device, nor on how it treats subnormal numbers.
#
# A sum of some of the leaves is kept as ``EXACT_WORDS`` words of 32 bits: its digits in two's
# complement, the lowest one first, and a word of ``_POSITIVE`` to ``_NONZERO`` in the last place.
# Below 2^31 leaves the digits fit: |sum| < 2^(277 + 31) < 2^319 units in float32, and 2^(2098 + 31)
# < 2^2143 in float64.

_BASE = 32
_DIGIT = (1 << _BASE) - 1
# Columns at a time: 36 MiB of digits in float64, 6 MiB in float32.
_COLUMNS = 1 << 16
# Integer dtype of the same width, bits of the fraction and of the exponent.
_FORMATS = {torch.float32: (torch.int32, 23, 8), torch.float64: (torch.int64, 52, 11)}
# In the last word: whether any leaf is +inf, -inf or NaN, and whether any is not -0.
_POSITIVE, _NEGATIVE, _NAN, _NONZERO = 1, 2, 4, 8


def combine_exactly(leaves: Sequence[Tensor]) -> Tensor:
    """The unrounded sum of ``leaves``, for ``finish_exactly``: int32, of shape
    ``(EXACT_WORDS[dtype], *leaf.shape)``. Equal for every order of the leaves.
    """
    flat = [leaf.reshape(-1) for leaf in leaves]
    words = _by_columns(_combine_columns, flat)
    return words.view(len(words), *leaves[0].shape)


def finish_exactly(partials: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of all leaves of ``dtype``, float32 or float64, rounded once, to nearest even, as a
    new contiguous tensor. ``partials`` are from ``combine_exactly``, of 2^30 leaves at most,
    together. A zero is +0 unless every leaf is -0. NaNs may have any payload.
    """
    flat = [partial.flatten(1) if partial.dim() > 1 else partial[:, None] for partial in partials]
    total = _by_columns(lambda parts: _finish_columns(parts, dtype), flat)
    return total.view(partials[0].shape[1:])


def _by_columns(function: Callable[[Sequence[Tensor]], Tensor], rows: Sequence[Tensor]) -> Tensor:
    columns = range(0, max(rows[0].shape[-1], 1), _COLUMNS)
    parts = [function([row[..., i : i + _COLUMNS] for row in rows]) for i in columns]
    return torch.cat(parts, dim=-1)


def _combine_columns(leaves: Sequence[Tensor]) -> Tensor:
    digits = _add_digits(leaves)
    _carry(digits)
    # The highest digit repeats the sign of the one below it.
    flags = torch.zeros_like(digits[-1])
    for leaf in leaves:
        bits = leaf.view(_FORMATS[leaf.dtype][0])
        for flag, found in (
            (_POSITIVE, leaf == torch.inf),
            (_NEGATIVE, leaf == -torch.inf),
            (_NAN, torch.isnan(leaf)),
            (_NONZERO, bits != torch.iinfo(bits.dtype).min),
        ):
            flags |= found.to(torch.int64) * flag
    digits[-1] = flags
    half = 1 << _BASE - 1
    return (((digits + half) & _DIGIT) - half).to(torch.int32)


def _finish_columns(partials: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    digits = partials[0].new_zeros(partials[0].shape, dtype=torch.int64)
    flags = torch.zeros_like(digits[-1])
    for partial in partials:
        words = partial.to(torch.int64)
        digits[:-2] += words[:-2] & _DIGIT
        digits[-2] += words[-2]
        flags |= words[-1]
    _carry(digits)
    negative = digits[-1] < 0
    total = round_digits(torch.where(negative, -digits, digits), negative, dtype)
    total = torch.where(flags & _NONZERO != 0, total, -0.0)
    total = torch.where(flags & _POSITIVE != 0, torch.inf, total)
    total = torch.where(flags & _NEGATIVE != 0, -torch.inf, total)
    nan = (flags & _NAN != 0) | (flags & (_POSITIVE | _NEGATIVE) == _POSITIVE | _NEGATIVE)
    return torch.where(nan, torch.nan, total)


def _add_digits(leaves: Sequence[Tensor]) -> Tensor:
    """Digits, least significant first, of the sum of the finite leaves; each of any sign."""
    integer, fraction_bits, exponent_bits = _FORMATS[leaves[0].dtype]
    count = EXACT_WORDS[name_of(leaves[0].dtype)]
    digits = leaves[0].new_zeros((count, leaves[0].numel()), dtype=torch.int64)
    for leaf in leaves:
        bits = leaf.view(integer).to(torch.int64)
        exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1)
        significand = bits & ((1 << fraction_bits) - 1)
        significand = significand + ((exponent > 0).to(torch.int64) << fraction_bits)
        significand = torch.where(torch.isfinite(leaf), significand, 0)
        shift = (exponent - 1).clamp(min=0)
        sign = torch.where(bits < 0, -1, 1)
        # The digits of the significand, each shifted over two digits.
        for half in range(fraction_bits // _BASE + 1):
            piece = ((significand >> half * _BASE) & _DIGIT) << (shift & _BASE - 1)
            for carry in range(2):
                place = (shift >> 5) + half + carry
                digit = (piece >> carry * _BASE) & _DIGIT
                digits.scatter_add_(0, place[None], (sign * digit)[None])
    return digits


def _carry(digits: Tensor) -> None:
    for i in range(len(digits) - 1):
        digits[i + 1] += digits[i] >> _BASE
        digits[i] &= _DIGIT


def round_digits(
    digits: Tensor, negative: Tensor, dtype: torch.dtype, unit: Tensor | int = 0
) -> Tensor:
    """A sum of digits, rounded once, to nearest even. ``digits``, int64 [digits, elements], least
    significant first, count ``2**unit`` smallest subnormal numbers of ``dtype``, float32 or
    float64. Their sum is not negative; ``negative`` elements get the other sign. The digits are
    changed.
    """
    integer, fraction_bits, exponent_bits = _FORMATS[dtype]
    _carry(digits)
    length = torch.zeros_like(digits[0])
    for i, digit in enumerate(digits):
        # frexp is exact here: a digit has at most 32 bits, the topmost one no more than that.
        bits = torch.frexp(digit.to(torch.float64)).exponent
        length = torch.where(digit != 0, i * _BASE + bits, length)
    # The lowest bits that the significand has no room for, `dropped` of them, or zeros to add.
    dropped = (length - fraction_bits - 1).clamp(min=-unit)
    kept, half, rest = (torch.zeros_like(length) for _ in range(3))
    for i, digit in enumerate(digits):
        kept |= _shift(digit, i * _BASE - dropped)
        half |= _shift(digit, i * _BASE - dropped + 1) & 1
        below = (dropped - 1 - i * _BASE).clamp(0, _BASE)
        rest |= digit & ((1 << below) - 1)
    # To nearest, ties to even.
    kept = kept + (half & ((rest != 0) | (kept & 1 != 0)).to(torch.int64) & (dropped > 0))
    # A carry beyond the significand goes into the exponent field, up to infinity.
    most = (1 << exponent_bits) - 3
    place = torch.where(length > 0, dropped + unit, 0)
    field = (place.clamp(max=most) << fraction_bits) + kept
    field = torch.where(place > most, (most + 2) << fraction_bits, field)
    sign = torch.where(negative, torch.iinfo(integer).min, 0)
    return (field + sign).to(integer).view(dtype)


def _shift(digit: Tensor, left: Tensor) -> Tensor:
    """``digit`` shifted to the left, or to the right; 0 where nothing of it is left."""
    up = digit << left.clamp(0, 62)
    down = digit >> (-left).clamp(0, 62)
    return torch.where(left >= 0, torch.where(left < 63, up, 0), down)


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
    leaves: Sequence[Tensor],
    op: Op,
    shape: Sequence[int],
    contract: Contract = Contract(),
) -> Tensor:
    """The first part of a reduction: one block of its leaves, for ``finish_partials``. A new
    contiguous tensor of ``partial_shape`` and of ``partial_dtype``, neither divided nor rounded for
    the last time: ``avg`` is a sum here. NaNs in it may have any payload. Raises as
    ``reduce_leaves``, and ContractError for a fold of floats in an order without parts.
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
    """The second part of a reduction: combine the results of ``combine_leaves`` for all blocks,
    row-major over ``shape``. The bits are those of ``reduce_leaves`` for all leaves, which are of
    ``dtype``. Raises as ``combine_leaves``, and for ``avg`` without a divisor or partials that are
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
    """Check that ``leaves`` fill ``shape``; returns them detached, without a lazy negation."""
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
        if (leaf.shape, leaf.dtype, leaf.device) != (
            first.shape,
            first.dtype,
            first.device,
        ):
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
    leaves: Sequence[Tensor],
    op: str,
    shape: Sequence[int],
    contract: Contract,
    dtype: torch.dtype,
) -> Tensor:
    """The sum or product in the accumulator's dtype; of one leaf, possibly that leaf itself."""
    refuse_flushed_subnormals(leaves[0])
    wide = accumulator(contract, dtype)
    if contract.sums_exactly(op, name_of(dtype)):
        return finish_exactly([combine_exactly([leaf.to(wide) for leaf in leaves])], wide)
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
    key, nan = total_order(leaves[0].contiguous().view(integer)), torch.isnan(leaves[0])
    for leaf in leaves[1:]:
        key = pick(key, total_order(leaf.contiguous().view(integer)))
        nan = nan | torch.isnan(leaf)
    return total_order(key).masked_fill_(nan, nan_bits).view(leaves[0].dtype)


def total_order(bits: Tensor) -> Tensor:
    """Sign-magnitude bits to two's complement and back: the map is its own inverse."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
