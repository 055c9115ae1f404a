"""The exact sum of the squares of floats: integers that any order of summation reproduces.

A row is 138 numbers of int64. The first 136 are digits: the sum is that of
``digit[i] * 2**(32 * i - 2148)``. The square of the smallest float64 is 2^-2148, and that of the
largest is below 2^2048. The last two numbers count infinities and NaNs, whose squares are in no
digit. The sum of rows is the row of all elements; a digit has room for the sum of 2^28 rows. No
float is added or multiplied, so that no mode of a processor changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshplan.kernel._digest import byte_pieces, integers
from meshplan.kernel._library import DTYPES, available, library

_DIGITS, _POINT = 136, 2148
ROW_WORDS = _DIGITS + 2
"""Of a row."""
_DIGIT = (1 << 32) - 1
# Elements in plain torch at once: a digit gets less than 2^33 of each.
_PIECE = 1 << 20
# Bits of the fraction, bias of the exponent.
_FORMATS = {
    torch.float32: (23, 127),
    torch.bfloat16: (7, 127),
    torch.float16: (10, 15),
    torch.float64: (52, 1023),
}


def sum_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The row of all elements of strided tensors on ``device``, of float16, bfloat16, float32 or
    float64: int64 [138]. A complex number is two elements.
    """
    row = torch.zeros(ROW_WORDS, dtype=torch.int64, device=device)
    if device.type == "cpu" and available():
        for tensor in tensors:
            dtype = _dtype_of(tensor)
            for piece in byte_pieces(tensor, _PIECE * dtype.itemsize):
                count = piece.numel() // dtype.itemsize
                library().mp_add_squares(piece.data_ptr(), count, DTYPES[dtype], row.data_ptr())
        return row
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(_dtype_of(tensor), []).append(tensor)
    for dtype, found in by_dtype.items():
        for bits in _batches(found):
            _add(row, bits.to(torch.int64), *_FORMATS[dtype])
    return row


def value_of_squares(row: Sequence[int]) -> float:
    """The sum of a row, or of several rows added, rounded once to float64."""
    *digits, infinities, nans = row
    if nans or infinities:
        return float("nan" if nans else "inf")
    try:
        # Python rounds a quotient of integers once, to nearest even.
        return _sum_of(digits) / (1 << _POINT)
    except OverflowError:
        return float("inf")


def divide_row(row: Sequence[int], divisor: int) -> list[int]:
    """The row of a sum that is ``divisor`` times smaller, rounded down to units of 2^-2148."""
    *digits, infinities, nans = row
    total = _sum_of(digits) // divisor
    digits = [total >> (32 * place) & _DIGIT for place in range(_DIGITS)]
    return [*digits, infinities, nans]


def _sum_of(digits: Sequence[int]) -> int:
    return sum(digit << (32 * place) for place, digit in enumerate(digits))


def carry(row: Tensor) -> Tensor:
    """A row of the same sum whose digits are small again; the last dim holds the digits."""
    digits = row[..., : _DIGITS - 1]
    carried = digits >> 32
    digits &= _DIGIT
    row[..., 1:_DIGITS] += carried
    return row


def _dtype_of(tensor: Tensor) -> torch.dtype:
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def _batches(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The bits of all elements: few and small tensors, however many there are."""
    held: list[Tensor] = []
    for tensor in tensors:
        bits = integers(tensor)
        for piece in torch.split(bits.reshape(-1), _PIECE):
            if sum(one.numel() for one in held) + piece.numel() > _PIECE:
                yield torch.cat(held)
                held = []
            held.append(piece)
    if held:
        yield torch.cat(held)


def _add(row: Tensor, bits: Tensor, fraction: int, bias: int) -> None:
    width = (bias + 1).bit_length() + fraction
    bits = bits & ((1 << width) - 1)
    exponent, significand = bits >> fraction, bits & ((1 << fraction) - 1)
    special = exponent == 2 * bias + 1
    row[-2] += (special & (significand == 0)).sum()
    row[-1] += (special & (significand != 0)).sum()
    significand = (significand | ((exponent != 0).to(torch.int64) << fraction)).masked_fill(
        special, 0
    )
    # Subnormal numbers have the unit of exponent 1.
    place = 2 * (exponent.clamp(1, 2 * bias) - bias - fraction) + _POINT
    if fraction < 32:
        _deposit(row, significand * significand, place)
    else:
        upper, lower = significand >> 27, significand & ((1 << 27) - 1)
        _deposit(row, upper * upper, place + 54)
        _deposit(row, upper * lower, place + 28)
        _deposit(row, lower * lower, place)
    carry(row)


def _deposit(row: Tensor, value: Tensor, place: Tensor) -> None:
    """Add ``value * 2**place`` to the digits; values are below 2^55."""
    digit, shift = place >> 5, place & 31
    lower, upper = (value & _DIGIT) << shift, (value >> 32) << shift
    row.index_add_(0, digit, lower & _DIGIT)
    row.index_add_(0, digit + 1, (lower >> 32) + (upper & _DIGIT))
    row.index_add_(0, digit + 2, upper >> 32)
