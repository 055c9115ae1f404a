"""Words of a tensor that do not depend on its shards, and the elements that a rank holds.

An element's bits are one or two 32-bit numbers. Each is multiplied by a key for each index of its
element, and the products are added modulo 2^64, in two lanes with other keys. So any shards of a
tensor add up to its words, in any order. Keys are odd: a change of one number changes both lanes.
This finds faults, not forgers: if several numbers change, both lanes stay with a small probability.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meshplan.kernel import integers, mixed

LANES = 2
# Numbers that are converted to int64 at a time, and keys of a dim that are kept.
_PIECE = 1 << 17
_KEPT = 1 << 12
_LOWER = (1 << 32) - 1
_PRIME = 0x9E3779B97F4A7C15 - (1 << 64)

Spans = tuple[tuple[int, int], ...]
"""For each dim, the first index and the one after the last."""


def find_spans(
    shape: Sequence[int],
    sizes: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[object],
) -> Spans | None:
    """The indices of a DTensor's elements on the rank at a coordinate; ``None``: unknown."""
    orders: dict[int, list[int]] = {}
    for axis in reversed(range(len(placements))):
        one: Any = placements[axis]
        if one.is_replicate():
            continue
        if one.is_partial() or not hasattr(one, "dim"):
            return None
        order, before, at = orders.setdefault(one.dim % len(shape), []), 1, 0
        # A strided shard divides what this many pieces of axes to its right have left. It is no
        # shard to torch's is_shard.
        while before < getattr(one, "split_factor", 1) and at < len(order):
            before *= sizes[order[at]]
            at += 1
        order.insert(at, axis)
    spans = [(0, size) for size in shape]
    for dim, order in orders.items():
        for axis in order:
            start, stop = spans[dim]
            size = -(-(stop - start) // sizes[axis])
            start = min(stop, start + coordinate[axis] * size)
            spans[dim] = start, min(stop, start + size)
    return tuple(spans)


def find_words(local: Tensor, spans: Spans) -> Tensor:
    """The words of a rank's elements: int64 [2] on the tensor's device."""
    bits = integers(local)
    # Complex numbers have two parts, and a number of eight bytes has two halves.
    wide = bits.element_size() == 8
    spans = (*spans, *((0, n) for n in bits.shape[len(spans) :]), *[(0, 2)] * wide)
    if not bits.numel():
        return torch.zeros(LANES, dtype=torch.int64, device=bits.device)
    if not bits.dim():
        bits, spans = bits.reshape(1), ((0, 1), *spans)
    return _add_up(bits, spans, 0)


def _add_up(bits: Tensor, spans: Spans, dim: int) -> Tensor:
    rest = 1
    for start, stop in spans[1:]:
        rest *= stop - start
    if rest > _PIECE and bits.dim() > 1:
        parts = torch.stack([_add_up(one, spans[1:], dim + 1) for one in bits], 1)
        return (_keys_of(dim, *spans[0], bits.device) * parts).sum(1)
    columns, first, total = (
        _multiply_keys(spans[1:], dim + 1, bits.device),
        spans[0][0],
        None,
    )
    step = max(1, _PIECE // rest)
    for at in range(0, len(bits), step):
        piece = bits[at : at + step].to(torch.int64)
        if bits.element_size() == 8:
            piece = torch.stack((piece & _LOWER, piece >> 32), -1)
        keys = _keys_of(dim, first + at, first + at + len(piece), bits.device)
        found = (_multiply(keys, piece.reshape(len(piece), -1)) * columns).sum(1)
        total = found if total is None else total + found
    assert total is not None
    return total


def _multiply(keys: Tensor, numbers: Tensor) -> Tensor:
    """int64 [lanes, rows] by [rows, columns]: [lanes, columns]."""
    # Torch multiplies no int64 matrices elsewhere, and here those of few columns slowly.
    if numbers.device.type != "cpu" or 1 < numbers.shape[1] <= 8:
        return (keys[:, None, :] * numbers.t()).sum(2)
    return torch.stack([torch.mv(numbers.t(), one) for one in keys])


@lru_cache(maxsize=32)
def _multiply_keys(spans: Spans, dim: int, device: torch.device) -> Tensor:
    """The keys of dims, the first of which is number ``dim``: int64 [lanes, elements]."""
    found = torch.ones((LANES, 1), dtype=torch.int64, device=device)
    for number, (start, stop) in enumerate(spans, dim):
        keys = _keys_of(number, start, stop, device)
        found = (found[:, :, None] * keys[:, None, :]).reshape(LANES, -1)
    return found


def _keys_of(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    """The keys of indices: int64 [lanes, stop - start]."""
    return (_make_keys if stop - start > _KEPT else _keep_keys)(dim, start, stop, device)


def _make_keys(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    lanes = torch.arange(LANES, dtype=torch.int64, device=device)[:, None]
    indices = torch.arange(start, stop, dtype=torch.int64, device=device)
    # Indices end below 2^40: no two of these numbers are the same.
    return mixed((((2 * dim + lanes + 2) << 40) + indices) * _PRIME) | 1


_keep_keys = lru_cache(maxsize=512)(_make_keys)


def find_weights(text: str) -> tuple[int, int, int]:
    """Of a tensor, from its name: those of its words, as odd int64, and that of its elements."""
    found = hashlib.sha256(text.encode()).digest()
    first, second, third = (
        int.from_bytes(found[at : at + 8], "little", signed=True) for at in (0, 8, 16)
    )
    return first | 1, second | 1, third
