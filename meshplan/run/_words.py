"""Words of a tensor that do not depend on its shards, and the elements that a rank holds.

An element's bits are one or two 32-bit numbers. Each is multiplied by a key for each index of its
element, and the products are added modulo 2^64, in two lanes with other keys. So any shards of a
tensor add up to its words, in any order. Keys are odd: a change of one number changes both lanes.
This finds faults, not forgers: if several numbers change, both lanes stay with a small probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meshplan.kernel import available, hash_words, integers, library, mixed

LANES = 2
# Numbers that are converted at a time, and those of a row at most.
_PIECE = 1 << 16
_COLUMNS = 1 << 11
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
    return _add_up(bits, spans)


def _add_up(bits: Tensor, spans: Spans) -> Tensor:
    rest = math.prod(stop - start for start, stop in spans[1:])
    total = torch.zeros(LANES, dtype=torch.int64, device=bits.device)
    start, stop = spans[0]
    alone = len(spans) == 1 and stop - start > _COLUMNS
    dim, cut = 0, stop
    if rest > _COLUMNS:
        dim = next(dim for dim, size in enumerate(bits.shape) if dim and size > 1)
        cut = sum(spans[dim]) // 2
    elif alone:
        # Whole blocks are rows below: their numbers have the same keys.
        cut = (start + _COLUMNS if start % _COLUMNS else stop) // _COLUMNS * _COLUMNS
    first, last = spans[dim]
    if cut < last:
        # The words of the parts of a tensor add up to its own.
        for one in ((first, cut), (cut, last)):
            part = bits.narrow(dim, one[0] - first, one[1] - one[0])
            total += _add_up(part, (*spans[:dim], one, *spans[dim + 1 :]))
        return total
    if alone:
        bits = bits.view(-1, _COLUMNS)
        keys = _draw(0, start // _COLUMNS, stop // _COLUMNS, bits.device)
        columns = _draw(1, 0, _COLUMNS, bits.device)
    else:
        keys = _keys_of(0, start, stop, bits.device)
        columns = _multiply_keys(spans[1:], bits.device)
    numbers = columns.shape[1]
    if bits.device.type == "cpu" and available() and bits[0].is_contiguous():
        library().mp_add_words(
            bits.data_ptr(),
            len(bits),
            bits.stride(0),
            numbers,
            keys.data_ptr(),
            columns.data_ptr(),
            bits.element_size(),
            total.data_ptr(),
        )
        return total
    # On a GPU each piece is some launches.
    step = max(1, (_PIECE << 5 * bits.is_cuda) // numbers)
    for piece, some in zip(torch.split(bits, step), torch.split(keys, step, 1), strict=True):
        piece = piece.to(torch.int64)
        if bits.element_size() == 8:
            piece = torch.stack((piece & _LOWER, piece >> 32), -1)
        products = some[:, None] * piece.reshape(-1, numbers).t()
        total += (products.sum(2) * columns).sum(1)
    return total


@lru_cache(maxsize=256)
def _multiply_keys(spans: Spans, device: torch.device) -> Tensor:
    """The keys of all dims but the first: int64 [lanes, elements]."""
    found = torch.ones((LANES, 1), dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(spans, 1):
        keys = _keys_of(dim, start, stop, device)
        found = (found[:, :, None] * keys[:, None, :]).reshape(LANES, -1)
    return found


def _keys_of(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    """The keys of indices, each of a block of them and of a place in it: int64 [lanes, indices].
    Few short spans of a job differ. Keys of long ones would take as much memory as their tensor.
    """
    make = _keep_keys if stop - start <= _COLUMNS else _make_keys
    return make(dim, start, stop, device)


def _make_keys(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    first, last = start // _COLUMNS, -(-stop // _COLUMNS)
    blocks = _draw(2 * dim, first, last, device)
    places = _draw(2 * dim + 1, 0, _COLUMNS, device)
    keys = (blocks[:, :, None] * places[:, None, :]).view(LANES, -1)
    return keys[:, start - first * _COLUMNS : stop - first * _COLUMNS].contiguous()


_keep_keys = lru_cache(maxsize=64)(_make_keys)


@lru_cache(maxsize=512)
def _draw(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    lanes = torch.arange(LANES, device=device)[:, None]
    numbers = torch.arange(start, stop, device=device)
    # Below 2^40: no two of these numbers are the same.
    return mixed((((2 * dim + lanes + 2) << 40) + numbers) * _PRIME) | 1


def find_weights(text: str) -> tuple[int, int]:
    """Of the words of a tensor, from its name: odd int64."""
    first, second = hash_words(text)
    return first | 1, second | 1


def format_words(words: Sequence[int]) -> str:
    return "".join(f"{one % (1 << 64):016x}" for one in words)
