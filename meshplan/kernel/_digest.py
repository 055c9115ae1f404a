"""The digest of a tensor: 128 bits that any order of summation reproduces.

It depends on dtype, shape and the bits of the elements in the order of their indices, and on
nothing else: not on strides, device, library or the pieces in which a tensor is read. Its
definition, version 1:

* The elements' bytes, little-endian, are split into blocks of 1024; the last is filled with zeros.
* A block is 128 pairs of 32-bit words ``(a, b)``. For each of two lanes it is hashed to the sum
  over the pairs of ``((a + k) mod 2^32) * ((b + k') mod 2^32)`` modulo 2^64, with keys for each
  word and lane. This is NH, of UMAC.
* A lane is the sum modulo 2^64, over the blocks, of ``mix(hash ^ random(2^32 + 2 block + lane))``,
  and of 64 bits of the sha256 of dtype and shape.
* ``random(n)`` is output n of the generator SplitMix64 from seed 0, ``mix`` its finaliser, which is
  a bijection. The key of word w in lane l is the upper half of ``random(256 l + w)``.

A change inside one 32-bit word never collides: a product keeps its value only if the keyed other
word is 0, and it has different keys in the two lanes. Two contents of one block collide with
probability at most 2^-64 over the choice of keys (Black et al., "UMAC", CRYPTO 1999), and several
blocks with 2^-128 if terms are taken for random (Bellare and Micciancio, EUROCRYPT 1997). The keys
are fixed and public: this finds faults and wrong arithmetic, not forgers.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from meshplan._bits import INTEGER_OF_SIZE, flatten
from meshplan._dtypes import name_of
from meshplan._torch import is_zerotensor
from meshplan.kernel._library import DTYPES, available, library
from meshplan.topology._reading import group_values

DIGEST_VERSION = "v1"
"""Digests of one version compare; other bits of a digest are another version."""

_LANES, _WORDS = 2, 256
_BLOCK_BYTES = 4 * _WORDS
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64 has it
_FIRST_BLOCK = 1 << 32
# On a CPU; pieces of a strided tensor are copied before they are read.
_COPIED_BYTES = 4 << 20
# In plain torch, on a CPU and elsewhere; temporary tensors are at most five times as large.
_CPU_PIECE_BYTES = 1 << 20
_PIECE_BYTES = 8 << 20


def digest_table(tensors: Sequence[Tensor]) -> Tensor:
    """The digests of strided tensors with data, of any dtypes: int64 CPU tensor [tensors, 2]."""
    # At most 64 MiB besides the tensors.
    return land([digest_words(tensor) for tensor in tensors])()


def land(words: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Begin to copy int64 [2] on any devices to the CPU, all of a device together, without a
    wait; returns what waits: int64 CPU tensor [tensors, 2].
    """
    rows = group_values((one.device, row) for row, one in enumerate(words))
    parts = [(some, _land(torch.stack([words[row] for row in some]))) for some in rows.values()]

    def read() -> Tensor:
        table = torch.empty((len(words), _LANES), dtype=torch.int64, device="cpu")
        for some, wait in parts:
            table[some] = wait()
        return table

    return read


def _land(words: Tensor) -> Callable[[], Tensor]:
    if words.device.type != "cuda":
        words = words.cpu()
        return lambda: words
    landed = torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=True)
    landed.copy_(words, non_blocking=True)
    done = torch.cuda.current_stream(words.device).record_event()

    def read() -> Tensor:
        done.synchronize()
        return landed

    return read


def digest_words(tensor: Tensor) -> Tensor:
    head = _head(tensor.dtype, tuple(tensor.shape))
    if tensor.device.type == "cpu" and available():
        return torch.tensor(_compiled(tensor, head), device="cpu")
    sums = torch.tensor(head, device="cpu")
    return sums.to(tensor.device, non_blocking=True) + _plain(tensor)


@lru_cache(maxsize=4096)
def _head(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The words of dtype and shape that are added to the lanes, as int64."""
    return hash_words(f"{name_of(dtype)}[{','.join(map(str, shape))}]")


def hash_words(text: str) -> tuple[int, int]:
    """128 bits of the sha256 of a text, as two int64."""
    first, second = struct.unpack_from("<2q", hashlib.sha256(text.encode()).digest())
    return first, second


def _compiled(tensor: Tensor, head: Sequence[int]) -> list[int]:
    lanes = (ctypes.c_longlong * _LANES)(*head)
    first = 0
    for piece in byte_pieces(tensor, _COPIED_BYTES):
        library().mp_digest(piece.data_ptr(), piece.numel(), first, lanes)
        first += _COPIED_BYTES // _BLOCK_BYTES
    return list(lanes)


def _plain(tensor: Tensor, first: int = 0) -> Tensor:
    """The sums over the blocks, which count from ``first``, in plain torch."""
    device = tensor.device
    sums = torch.zeros(_LANES, dtype=torch.int64, device=device)
    lanes = torch.arange(_LANES, device=device)
    for piece in byte_pieces(tensor, _CPU_PIECE_BYTES if device.type == "cpu" else _PIECE_BYTES):
        hashes = _hashes(piece)
        stop = first + hashes.shape[0]
        blocks = torch.arange(first, stop, device=device)
        numbers = 2 * blocks[:, None] + (lanes + (_FIRST_BLOCK + 1))
        sums += mixed(hashes ^ mixed(numbers * _GOLDEN)).sum(0)
        first = stop
    return sums


def _hashes(piece: Tensor) -> Tensor:
    """NH of each block of a piece: int64 [blocks, lanes]."""
    # int32 additions and int64 products wrap, as the definition has it modulo 2^32 and 2^64.
    short = -piece.numel() % _BLOCK_BYTES
    if short:
        piece = torch.cat([piece, piece.new_zeros(short)])
    elif piece.storage_offset() % 8 or piece.data_ptr() % 8:
        piece = piece.clone()
    words = piece.view(torch.int32).view(-1, _WORDS)
    keys = _keys(piece.device)
    hashes = []
    for lane in range(_LANES):
        # A little-endian int64 holds a pair, the first word in its lower half. The shift extends
        # the sign, and the mask removes it.
        pairs = (words + keys[lane]).view(torch.int64)
        products = pairs >> 32
        products &= 0xFFFFFFFF
        pairs &= 0xFFFFFFFF
        products *= pairs
        hashes.append(products.sum(1))
    return torch.stack(hashes, 1)


def mixed(z: Tensor) -> Tensor:
    """``mix``. Shifts of int64 extend the sign, and the masks remove it."""
    z = (z ^ ((z >> 30) & (_MASK >> 30))) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ ((z >> 27) & (_MASK >> 27))) * (0x94D049BB133111EB - (1 << 64))
    return z ^ ((z >> 31) & (_MASK >> 31))


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> Tensor:
    """The keys as int32 [lanes, words]; to read only."""
    numbers = torch.arange(1, _LANES * _WORDS + 1, device="cpu")
    keys = mixed(numbers * _GOLDEN) >> 32
    return keys.to(torch.int32).view(_LANES, _WORDS).to(device)


def integers(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers, with its strides; a view, except of a lazy conjugate. A
    complex tensor gets one more dim, of size 2.
    """
    plain = tensor.detach()
    if is_zerotensor(plain):
        # It has no memory.
        plain = plain.clone()
    plain = plain.resolve_conj()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    plain = plain.resolve_neg()
    return plain.view(INTEGER_OF_SIZE[plain.element_size()])


def byte_pieces(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """All bytes of a tensor in contiguous 1-D uint8 pieces of ``size`` bytes on its device, a
    multiple of 8; the last may be shorter. The boundaries do not depend on the strides.
    """
    # At most two pieces are copies at any time.
    plain = integers(tensor)
    if plain.is_contiguous():
        if plain.numel():
            yield from torch.split(flatten(plain).view(torch.uint8), size)
        return
    held: list[Tensor] = []
    room = size
    for part in _parts(plain, size):
        while part.numel():
            held.append(part[:room])
            part = part[room:]
            room -= held[-1].numel()
            if room == 0:
                yield torch.cat(held) if len(held) > 1 else held[0]
                held, room = [], size
    if held:
        yield torch.cat(held)


def _parts(plain: Tensor, size: int) -> Iterator[Tensor]:
    """As ``byte_pieces``, each of ``size`` bytes at most."""
    if plain.numel() == 0:
        return
    row = plain.element_size() * (plain.numel() // plain.shape[0])
    if row > size:
        for one in plain:
            yield from _parts(one, size)
        return
    for rows in torch.split(plain, size // row):
        yield flatten(rows).view(torch.uint8)


# The exact sum of the squares of floats: integers that any order of summation reproduces.
#
# A row is 138 numbers of int64. The first 136 are digits: the sum is that of ``digit[i] * 2**(32 *
# i - 2148)``. The square of the smallest float64 is 2^-2148, and that of the largest is below
# 2^2048. The last two numbers count infinities and NaNs, whose squares are in no digit. The sum of
# rows is the row of all elements; a digit has room for the sum of 2^28 rows. No float is added or
# multiplied, so that no mode of a processor changes a bit.

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
            dtype = tensor.dtype.to_real()
            for piece in byte_pieces(tensor, _PIECE * dtype.itemsize):
                count = piece.numel() // dtype.itemsize
                library().mp_add_squares(piece.data_ptr(), count, DTYPES[dtype], row.data_ptr())
        return row
    by_dtype = group_values((tensor.dtype.to_real(), tensor) for tensor in tensors)
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
