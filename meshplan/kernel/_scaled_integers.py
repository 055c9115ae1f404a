"""Summands as integers of one unit per element, and the exact sum rounded once.

Numbers of float16, bfloat16 and float32 are summed in float32, or in float64 if that is the
accumulator; numbers of float64 in float64. On a CPU the compiled library does it
(csrc/integers.cpp); here is the definition, in plain torch.

An element's code, one byte, is compared over the ranks by maximum: 0 for -0.0, 1 for +0.0, else 2
more than the exponent field less 1, where a subnormal number has field 1. In float64 eight fields
share a code. Code 255 also stands for all larger fields: such elements are left to the contract's
definition. The largest field F of the maximum code sets the unit: a summand of that field has
``width`` bits and a sign, and those of smaller fields have less. ``width`` is what the sum of all
ranks leaves room for: in float32, 62 bits in one int64. In float64 there are two: the lower word
holds the lowest bits, which are never negative.

A summand is rounded down to whole units. Its lowest field counts 1 if that lost anything. So the
sum S of all ranks' units and the count c of lossy summands arrive together, and the exact sum lies
in [S, S + c] units. If both ends have one rounding, so has everything between; if not, the element
is ambiguous. With 62 bits a count has no room above 1024 ranks: there, all summands count as
lossy, and no sum of 2^20 of them overflows.

All of it are integer operations, and products of float64 with powers of two that are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshplan.definition import round_digits
from meshplan.kernel._host_peers import large_pages
from meshplan.kernel._library import DTYPES, available, library

MAX_RANKS = 1 << 20
"""Summands at most: a summand then has 42 bits for each word."""
_MOST_COUNTED = 1 << 10
_MINUS_ZERO, _PLUS_ZERO, _TOO_LARGE = 0, 1, 255
_CODES, _SCALE, _FINISH = range(3)
# Elements in plain torch at once.
_PIECE = 1 << 20


@dataclass(frozen=True)
class _Format:
    """An accumulator: its integer; bits of fraction and exponent, and those not in a code."""

    integer: torch.dtype
    fraction: int
    exponent: int
    grain: int

    def tops(self, codes: Tensor) -> Tensor:
        return ((codes.to(torch.int64) - 2).clamp_(min=0) << self.grain) + (1 << self.grain)


_FORMATS = {
    torch.float32: _Format(torch.int32, 23, 8, 0),
    torch.float64: _Format(torch.int64, 52, 11, 3),
}


@dataclass(frozen=True)
class _Widths:
    """Bits of a summand without its sign, of its last word, and of the count of lossy summands."""

    width: int
    low: int
    count: int

    @classmethod
    def of(cls, ranks: int, accumulator: torch.dtype) -> _Widths:
        room = (ranks - 1).bit_length()
        count = room + 1 if ranks <= _MOST_COUNTED else 0
        low = 62 - room - count
        return cls(low if words_of(accumulator) == 1 else low + 62 - room, low, count)


def words_of(accumulator: torch.dtype) -> int:
    """The number of int64 words of a summand."""
    return 2 if accumulator is torch.float64 else 1


def find_codes(summand: Tensor, accumulator: torch.dtype) -> Tensor:
    """The codes of a flat, contiguous tensor of float16, bfloat16, float32 or float64: uint8.
    ``accumulator`` is float32 or float64.
    """
    codes = torch.empty_like(summand, dtype=torch.uint8)
    if _compiled(_CODES, summand, codes, None, None, accumulator, 0, None) is None:
        for piece, out in _pieces(summand, codes):
            out.copy_(_codes(piece.to(accumulator), _FORMATS[accumulator]))
    return codes


def to_integers(
    summand: Tensor, codes: Tensor, ranks: int, accumulator: torch.dtype, out: Tensor
) -> None:
    """The integers of one of ``ranks``, at most ``MAX_RANKS``, into ``out``: contiguous int64
    [words_of(accumulator), elements]. ``codes`` is the maximum over all ranks.
    """
    if _compiled(_SCALE, summand, codes, out, None, accumulator, ranks, None) is None:
        how = _Widths.of(ranks, accumulator)
        for piece, code, words in _pieces(summand, codes, out):
            words.copy_(_scale(piece.to(accumulator), code, how, _FORMATS[accumulator]))


def from_integers(
    total: Tensor,
    codes: Tensor,
    ranks: int,
    accumulator: torch.dtype,
    dtype: torch.dtype,
    divisor: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The sums in ``dtype``, divided by ``divisor``, and the places of the elements that are
    ambiguous: 0 in the sums. ``total`` is the sum of `to_integers` over all ranks.
    """
    result = large_pages(torch.empty_like(codes, dtype=dtype))
    unclear = torch.empty_like(codes, dtype=torch.bool)
    count = _compiled(_FINISH, result, codes, total, unclear, accumulator, ranks, divisor)
    if count == 0:
        return result, codes.new_empty(0, dtype=torch.int64)
    if count is None:
        how = _Widths.of(ranks, accumulator)
        for words, code, out, mask in _pieces(total, codes, result, unclear):
            value, ambiguous = _finish(words, code, ranks, how, accumulator)
            if divisor is not None:
                # On the device: CUDA multiplies by the reciprocal of a number of the host.
                value /= torch.full((), divisor, dtype=value.dtype, device=value.device)
            out.copy_(value)
            mask.copy_(ambiguous)
    return result, unclear.nonzero().view(-1)


def _compiled(
    stage: int,
    floats: Tensor,
    codes: Tensor,
    words: Tensor | None,
    unclear: Tensor | None,
    accumulator: torch.dtype,
    ranks: int,
    divisor: int | None,
) -> int | None:
    """``None`` where there is no compiled code; else how many elements are ambiguous."""
    if floats.device.type != "cpu" or not available():
        return None
    tensors = (floats, codes, words, unclear)
    assert all(one is None or one.is_contiguous() for one in tensors)
    found: int = library().mp_integers(
        stage,
        *(None if one is None else one.data_ptr() for one in tensors),
        codes.numel(),
        DTYPES[floats.dtype],
        int(accumulator is torch.float64),
        ranks,
        divisor or 0,
    )
    assert found >= 0, (stage, floats.dtype)
    return found


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(one, _PIECE, -1) for one in tensors), strict=True)


def _fields(summand: Tensor, how: _Format) -> tuple[Tensor, Tensor]:
    """The bits of floats, and their exponent fields: int64."""
    bits = summand.view(how.integer).to(torch.int64)
    return bits, (bits >> how.fraction) & ((1 << how.exponent) - 1)


def _codes(summand: Tensor, how: _Format) -> Tensor:
    bits, field = _fields(summand, how)
    codes = (((field.clamp_(min=1) - 1) >> how.grain) + 2).clamp_(max=_TOO_LARGE)
    codes.masked_fill_(bits == 0, _PLUS_ZERO)
    return codes.masked_fill_(bits == torch.iinfo(how.integer).min, _MINUS_ZERO)


def _scale(summand: Tensor, codes: Tensor, widths: _Widths, how: _Format) -> Tensor:
    bits, field = _fields(summand, how)
    units = bits & ((1 << how.fraction) - 1)
    units |= (field > 0).to(torch.int64) << how.fraction
    units.masked_fill_(field > 253 << how.grain, 0)
    units = torch.where(bits < 0, -units, units)
    # A code that is too small could only come from a fault. It must not overflow the sum.
    right = (how.tops(codes) - field.clamp(min=1)).clamp_(min=0)
    shift = widths.width - how.fraction - 1 - right
    down = (-shift).clamp_(0, 63)
    lossy = ((units >> down) << down) != units
    last = _shift(units, shift)
    words = [last]
    if widths.width > widths.low:
        words = [_shift(units, shift - widths.low), last & ((1 << widths.low) - 1)]
    if widths.count:
        words[-1] = (words[-1] << widths.count) | lossy.to(torch.int64)
    return torch.stack(words)


def _shift(value: Tensor, left: Tensor) -> Tensor:
    """``value * 2**left``, rounded down, modulo 2^64."""
    up = torch.where(left < 64, value << left.clamp(0, 63), 0)
    return torch.where(left >= 0, up, value >> (-left).clamp(0, 63))


def _finish(
    words: Tensor, codes: Tensor, ranks: int, widths: _Widths, accumulator: torch.dtype
) -> tuple[Tensor, Tensor]:
    how, count = _FORMATS[accumulator], widths.count
    last = words[-1]
    lossy = last & ((1 << count) - 1) if count else ranks
    last = last >> count
    # Units of the smallest subnormal number, as a power of two.
    place = how.tops(codes) + how.fraction - widths.width
    ends = []
    for units in (last, last + lossy):
        if words_of(accumulator) == 1:
            ends.append(_round(units, place - 149))
        else:
            ends.append(_round_wide(words[0], units, widths.low, place))
    low, high = (end.view(how.integer) for end in ends)
    unclear = ((low != high) & (codes > _PLUS_ZERO)) | (codes == _TOO_LARGE)
    # Without other summands a zero has the sign of all of them.
    value = ends[0].masked_fill_(unclear | (codes == _PLUS_ZERO), 0.0)
    return value.masked_fill_(codes == _MINUS_ZERO, -0.0), unclear


def _round(units: Tensor, exponent: Tensor) -> Tensor:
    """``units * 2**exponent`` as float32, rounded once."""
    # Of more than 32 bits the lowest become one that is set if any of them is: float64 holds the
    # rest, and its conversion to float32 is the only rounding.
    size = units.abs()
    bits = ((size.to(torch.float64).view(torch.int64) >> 52) - 1022).clamp_(min=0)
    dropped = (bits - 32).clamp_(min=0)
    kept = size >> dropped
    kept |= ((kept << dropped) != size).to(torch.int64)
    power = ((dropped + exponent + 1023) << 52).view(torch.float64)
    value = (kept.to(torch.float64) * power).to(torch.float32)
    return torch.where(units < 0, -value, value)


def _round_wide(upper: Tensor, lower: Tensor, low: int, place: Tensor) -> Tensor:
    """``(upper * 2**low + lower) * 2**(place - 1074)`` as float64, rounded once."""
    upper, lower = upper + (lower >> low), lower & ((1 << low) - 1)
    negative = upper < 0
    upper = torch.where(negative, -upper - (lower != 0).to(torch.int64), upper)
    lower = torch.where(negative, -lower, lower) & ((1 << low) - 1)
    # In digits of 32 bits; ``low`` is between 41 and 61, and both are below 2^62.
    mask = (1 << 32) - 1
    second, third = (upper & mask) << low - 32, (upper >> 32) << low - 32
    digits = [lower & mask, (lower >> 32) + (second & mask)]
    digits += [(second >> 32) + (third & mask), third >> 32]
    return round_digits(torch.stack(digits), negative, torch.float64, place)
