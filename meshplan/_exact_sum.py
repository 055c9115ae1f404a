"""The exact sum of floats in plain torch: fixed-point integers, and one rounding at the end.

A finite float is a whole number of units, where one unit is the smallest subnormal number of its
dtype. Sums of whole numbers are exact, in any order. They have up to 2,098 bits and are kept as
digits of 32 bits, each in an int64. All steps are integer operations on a few MiB at a time, so
that the result does not depend on the device, nor on how it treats subnormal numbers.

A sum of some of the leaves is kept as ``EXACT_WORDS`` words of 32 bits: its digits in two's
complement, the lowest one first, and a word of ``_POSITIVE`` to ``_NONZERO`` in the last place.
Below 2^31 leaves the digits fit: |sum| < 2^(277 + 31) < 2^319 units in float32, and
2^(2098 + 31) < 2^2143 in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshplan._dtypes import name_of
from meshplan.orders import EXACT_WORDS

_BASE = 32
_DIGIT = (1 << _BASE) - 1
# Columns at a time: 36 MiB of digits in float64, 6 MiB in float32.
_COLUMNS = 1 << 16
# Integer dtype of the same width, bits of the fraction and of the exponent.
_FORMATS = {torch.float32: (torch.int32, 23, 8), torch.float64: (torch.int64, 52, 11)}
# In the last word: whether any leaf is +inf, -inf or NaN, and whether any is not -0.
_POSITIVE, _NEGATIVE, _NAN, _NONZERO = 1, 2, 4, 8


def sum_exactly(leaves: Sequence[Tensor]) -> Tensor:
    """The sum of ``leaves``, rounded once, to nearest even.

    Args:
        leaves: at most 2^30, float32 or float64, of one shape, dtype and device.

    Returns:
        A new contiguous tensor of their shape and dtype. A zero is +0 unless every leaf is -0. NaNs
        may have any payload.
    """
    return finish_exactly([combine_exactly(leaves)], leaves[0].dtype)


def combine_exactly(leaves: Sequence[Tensor]) -> Tensor:
    """The unrounded sum of ``leaves``, for ``finish_exactly``.

    Args:
        leaves: as for ``sum_exactly``.

    Returns:
        int32, of shape ``(EXACT_WORDS[dtype], *leaf.shape)``. Equal for every order of the leaves.
    """
    flat = [leaf.reshape(-1) for leaf in leaves]
    words = _by_columns(_combine_columns, flat)
    return words.view(len(words), *leaves[0].shape)


def finish_exactly(partials: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of all leaves, rounded once.

    Args:
        partials: from ``combine_exactly``, of 2^30 leaves at most, together.
        dtype: of the leaves: float32 or float64.

    Returns:
        As ``sum_exactly``.
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
    """A sum of digits, rounded once, to nearest even.

    Args:
        digits: int64 [digits, elements], least significant first; their sum is not negative. They
            are changed.
        negative: which elements get the other sign.
        dtype: of the result, float32 or float64.
        unit: the digits count ``2**unit`` smallest subnormal numbers.
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
