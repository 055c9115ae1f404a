"""Lengths of the shards of a dim, as DTensor splits it, and of subtrees that fill a range."""

from __future__ import annotations

from collections.abc import Sequence


def chunk_sizes(size: int, chunks: int) -> list[int]:
    """Lengths of the ``chunks`` parts of a dim of ``size`` that ``torch.chunk`` would make, with
    the empty parts at the end that DTensor adds."""
    return [chunk_size(size, chunks, i) for i in range(chunks)]


def chunk_size(size: int, chunks: int, place: int) -> int:
    """Number ``place`` of ``chunk_sizes``."""
    width = -(-size // chunks)
    return max(0, min(width, size - place * width))


def nested_chunk_sizes(size: int, axes: Sequence[int]) -> list[int]:
    """As ``chunk_sizes``, where the dim is split once per axis, outermost first."""
    lengths = [size]
    for axis in axes:
        lengths = [part for length in lengths for part in chunk_sizes(length, axis)]
    return lengths


def cover_range(start: int, stop: int) -> list[tuple[int, int]]:
    """The largest aligned blocks of a power of two that fill ``[start, stop)``, in order.

    A block is ``[i * 2^j, (i + 1) * 2^j)``. An empty range has none.
    """
    blocks = []
    while start < stop:
        fits = 1 << (stop - start).bit_length() - 1
        size = min(fits, start & -start) if start else fits
        blocks.append((start, start + size))
        start += size
    return blocks
