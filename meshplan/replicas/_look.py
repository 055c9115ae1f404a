"""The second look at replicas that differ: two ranks compare elements, and tell all the others."""

from __future__ import annotations

import torch
from torch import Tensor

from meshplan.kernel import byte_pieces
from meshplan.replicas._divergence import Elements
from meshplan.replicas._elements import Difference
from meshplan.replicas._talk import Talk

__all__ = ["PIECE_BYTES", "look"]

# What travels at a time, and what is held beside the tensors, a few times over.
PIECE_BYTES = 16 << 20

_DIMS = 64


def look(talk: Talk, tensor: Tensor, reference: int, other: int, rank: int) -> Elements:
    """Compare this tensor between two ranks; all ranks of the mesh call it and get the answer.

    Args:
        talk: the ranks of the mesh.
        tensor: this rank's; only read by the two.
        reference, other: positions of the two.
        rank: the global rank at ``other``.
    """
    shape = tuple(tensor.shape)
    found = Difference()
    theirs = shape
    if talk.position == reference:
        _send(talk, tensor, other)
    elif talk.position == other:
        theirs, found = _receive(talk, tensor, reference)
    unsigned = (found.ulps + 1 + (1 << 63)) % (1 << 64) - (1 << 63)
    words = [found.count, found.first, unsigned, *found.mine, *found.theirs]
    words = talk.tell([*words, *_padded(shape), *_padded(theirs)], other)
    count, first, unsigned, a, b, c, d = words[:7]
    mine = tuple(words[8 : 8 + words[7]])
    theirs = tuple(words[9 + _DIMS : 9 + _DIMS + words[8 + _DIMS]])
    if mine != theirs:
        return Elements(rank, 0, None, "", "", None, torch.Size(mine).numel(), (mine, theirs))
    ulps = unsigned % (1 << 64) - 1
    difference = Difference(count, first, mine=(a, b), theirs=(c, d), ulps=ulps)
    return Elements.of(rank, difference, mine, tensor.dtype)


def _padded(shape: tuple[int, ...]) -> list[int]:
    return [len(shape), *shape, *[0] * (_DIMS - len(shape))]


def _send(talk: Talk, tensor: Tensor, to: int) -> None:
    talk.send(torch.tensor(_padded(tuple(tensor.shape)), device="cpu"), to)
    if talk.receive(torch.zeros(1, dtype=torch.int64, device="cpu"), to).item():
        for piece in byte_pieces(tensor, PIECE_BYTES):
            talk.send(piece, to)


def _receive(talk: Talk, tensor: Tensor, source: int) -> tuple[tuple[int, ...], Difference]:
    shape = tuple(tensor.shape)
    ndim, *sizes = talk.receive(torch.tensor(_padded(shape), device="cpu"), source).tolist()
    theirs = tuple(sizes[:ndim])
    talk.send(torch.tensor([int(theirs == shape)], device="cpu"), source)
    found = Difference()
    if theirs == shape:
        start = 0
        for piece in byte_pieces(tensor, PIECE_BYTES):
            found = found.with_piece(talk.receive(piece, source), piece, start, tensor.dtype)
            start += piece.numel()
    return theirs, found
