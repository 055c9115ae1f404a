"""The digest of a tensor: 128 bits that any order of summation reproduces.

Ranks compare digests. So these depend on dtype, shape and the bits of the elements in the order of
their indices, and on nothing else: not on strides, device, library or the pieces in which a tensor
is read. The definition, version 1:

* The elements' bytes, little-endian, are split into blocks of 1024; the last is filled with zeros.
* A block is 128 pairs of 32-bit words ``(a, b)``. For each of two lanes it is hashed to the sum
  over the pairs of ``((a + k) mod 2^32) * ((b + k') mod 2^32)`` modulo 2^64, with keys for each
  word and lane. This is NH, of UMAC.
* A lane is the sum modulo 2^64, over the blocks, of ``mix(hash ^ random(2^32 + 2 block + lane))``,
  and of 64 bits of the sha256 of dtype and shape.
* ``random(n)`` is output n of the generator SplitMix64 from seed 0, ``mix`` its finaliser, which is
  a bijection. The key of word w in lane l is the upper half of ``random(256 l + w)``.

What collides:

* A change inside one 32-bit word never does. It changes the word's product by the difference times
  the keyed other word, less than 2^64 in size, which is 0 only if the keyed other word is; the two
  lanes have different keys there, so in one lane it is not. That lane's hash of the block changes,
  hence its term, and no other term does.
* Two different contents of one block have the same hashes with probability at most 2^-64 over the
  choice of keys: 2^-32 in each of two lanes with independent keys (Black, Halevi, Krawczyk, Krovetz
  and Rogaway, "UMAC: Fast and Secure Message Authentication", CRYPTO 1999, theorem on NH). Elements
  that change places inside a block are a case of it.
* If several blocks differ their terms would have to cancel in both sums: 2^-128 if terms are taken
  for random, for which finaliser and block number in each term are there (sums of randomised
  blocks: Bellare and Micciancio, "A New Paradigm for Collision-Free Hashing", EUROCRYPT 1997).

The keys are fixed and public: this finds faults and wrong arithmetic, not forgers.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from meshplan._dtypes import name_of
from meshplan._torch import is_zerotensor
from meshplan.kernel._library import available, library

DIGEST_VERSION = "v1"
"""Digests of one version compare; other bits of a digest are another version."""

_LANES, _WORDS = 2, 256
_BLOCK_BYTES = 4 * _WORDS
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST_BLOCK = 1 << 32
# Of a strided tensor on a CPU: what is copied before it is read.
_COPIED_BYTES = 4 << 20
# In plain torch, on a CPU and elsewhere; temporary tensors are at most five times as large.
_CPU_PIECE_BYTES = 1 << 20
_PIECE_BYTES = 8 << 20
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_table(tensors: Sequence[Tensor]) -> Tensor:
    """The digests of strided tensors with data, of any dtypes: int64 CPU tensor [tensors, 2]."""
    # At most 64 MiB besides the tensors. 16 bytes for each tensor leave its device, all of a device
    # together.
    table = torch.empty((len(tensors), _LANES), dtype=torch.int64, device="cpu")
    elsewhere: dict[torch.device, list[int]] = {}
    for row, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            table[row] = digest_words(tensor)
        else:
            elsewhere.setdefault(tensor.device, []).append(row)
    for rows in elsewhere.values():
        table[rows] = torch.stack([digest_words(tensors[row]) for row in rows]).cpu()
    return table


def digest_words(tensor: Tensor) -> Tensor:
    """The digest of one tensor: int64 [2], on the tensor's device, without synchronisation."""
    head = _head(tensor.dtype, tuple(tensor.shape))
    if tensor.device.type == "cpu" and available():
        return torch.tensor(_compiled(tensor, head), dtype=torch.int64, device="cpu")
    sums = torch.tensor(head, dtype=torch.int64, device="cpu")
    return sums.to(tensor.device) + _plain(tensor)


@lru_cache(maxsize=4096)
def _head(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What dtype and shape add to the lanes, as int64 has it."""
    text = f"{name_of(dtype)}[{','.join(map(str, shape))}]"
    found = hashlib.sha256(text.encode()).digest()
    words = (found[8 * lane : 8 * lane + 8] for lane in range(_LANES))
    return tuple(int.from_bytes(word, "little", signed=True) for word in words)


def _signed(word: int) -> int:
    """Modulo 2^64, as int64 has it."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def _compiled(tensor: Tensor, head: Sequence[int]) -> list[int]:
    lanes = (ctypes.c_longlong * _LANES)(*head)
    add = library().mp_digest
    flat = flat_bytes(tensor)
    if flat is not None:
        add(flat.data_ptr(), flat.numel(), 0, lanes)
        return list(lanes)
    first = 0
    for piece in byte_pieces(tensor, _COPIED_BYTES):
        add(piece.data_ptr(), piece.numel(), first, lanes)
        first += _COPIED_BYTES // _BLOCK_BYTES
    return list(lanes)


def _plain(tensor: Tensor, first: int = 0) -> Tensor:
    """The sums over the blocks, which count from ``first``, in plain torch."""
    device = tensor.device
    sums = torch.zeros(_LANES, dtype=torch.int64, device=device)
    lanes = torch.arange(_LANES, dtype=torch.int64, device=device)
    for piece in byte_pieces(tensor, _CPU_PIECE_BYTES if device.type == "cpu" else _PIECE_BYTES):
        hashes = _hashes(piece)
        stop = first + hashes.shape[0]
        blocks = torch.arange(first, stop, dtype=torch.int64, device=device)
        numbers = 2 * blocks[:, None] + (lanes + (_FIRST_BLOCK + 1))
        sums += _mixed(hashes ^ _mixed(numbers * _signed(_GOLDEN))).sum(0)
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


def _mixed(z: Tensor) -> Tensor:
    """``mix``. Shifts of int64 extend the sign, and the masks remove it."""
    z = (z ^ ((z >> 30) & (_MASK >> 30))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & (_MASK >> 27))) * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & (_MASK >> 31))


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> Tensor:
    """The keys as int32 [lanes, words]; to read only."""
    numbers = torch.arange(1, _LANES * _WORDS + 1, dtype=torch.int64, device="cpu")
    keys = _mixed(numbers * _signed(_GOLDEN)) >> 32
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
    return plain.view(_INTEGER_OF_SIZE[plain.element_size()])


def flat_bytes(tensor: Tensor) -> Tensor | None:
    """All bytes as one 1-D uint8 view if they are contiguous, else ``None``."""
    plain = integers(tensor)
    return _flat(plain) if plain.is_contiguous() else None


def byte_pieces(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """All bytes of a tensor in contiguous 1-D uint8 pieces of ``size`` bytes on its device, a
    multiple of 8; the last may be shorter. The boundaries do not depend on the strides.
    """
    # At most two pieces are copies at any time.
    flat = flat_bytes(tensor)
    if flat is not None:
        if flat.numel():
            yield from torch.split(flat, size)
        return
    held: list[Tensor] = []
    room = size
    for part in _parts(integers(tensor), size):
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
        yield _flat(rows.contiguous())


def _flat(plain: Tensor) -> Tensor:
    # A tensor of at most one element may have any strides, and ``view`` refuses some.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
