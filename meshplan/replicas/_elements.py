"""The comparison of elements after digests differ: two ranks compare a tensor piece by piece."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from meshplan._bits import FLOATS, differ_by_binade, element_index, element_text, max_ulps
from meshplan.errors import Elements
from meshplan.kernel import byte_pieces
from meshplan.replicas._channel import ReplicaChannel

# The size of a message. A few times as much is allocated.
PIECE_BYTES = 16 << 20
_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Difference:
    """The difference of two tensors of one dtype and shape; fields as of ``Elements``."""

    count: int = 0
    index: tuple[int, ...] | None = None
    value: str = ""
    reference: str = ""
    max_ulps: int | None = None
    unrelated: int = 0

    def add_piece(self, theirs: Tensor, mine: Tensor, start: int, like: Tensor) -> None:
        """Count a further piece of both tensors.

        Args:
            theirs, mine: uint8 [bytes], whole elements on one device.
            start: bytes before it.
            like: any tensor of the dtype and shape of the whole.
        """
        size = like.dtype.itemsize
        differs = (theirs != mine).view(-1, size).any(1)
        count = int(differs.sum())
        if count == 0:
            return
        if self.count == 0:
            first = int(differs.to(torch.uint8).argmax())
            one = slice(first * size, first * size + size)
            self.index = element_index(start // size + first, like.shape)
            self.value = element_text(mine[one], like.dtype)
            self.reference = element_text(theirs[one], like.dtype)
        self.count += count
        self._add_distances(theirs, mine, like.dtype)

    def _add_distances(self, theirs: Tensor, mine: Tensor, dtype: torch.dtype) -> None:
        real = dtype.to_real() if dtype.is_complex else dtype
        if real not in FLOATS:
            return
        a, b = (one.clone().view(_INTEGER_OF_SIZE[real.itemsize]) for one in (theirs, mine))
        numbers = (a != b) & ~a.view(real).isnan() & ~b.view(real).isnan()
        if not bool(numbers.any()):
            return
        self.max_ulps = max(max_ulps(a[numbers], b[numbers]), self.max_ulps or 0)
        far = numbers & differ_by_binade(a, b, real)
        self.unrelated += int(far.view(-1, dtype.itemsize // real.itemsize).any(1).sum())


def compare_elements(
    channel: ReplicaChannel, tensor: Tensor, reference: int, other: int, rank: int
) -> Elements:
    """Compare this tensor between two ranks. All ranks of the mesh call it and get the result.

    Args:
        channel: the ranks of the mesh.
        tensor: this rank's; only read by the two.
        reference, other: positions of the two.
        rank: the global rank at ``other``.
    """
    # Shapes first: local shapes may differ between replicas, and then elements do not correspond.
    mine, theirs = (
        tuple(channel.broadcast(list(tensor.shape), position)) for position in (other, reference)
    )
    numel = torch.Size(mine).numel()
    if mine != theirs:
        return Elements(rank, 0, None, "", "", None, numel, (mine, theirs))
    # Only the two exchange pieces; the others wait for the result in the broadcast.
    found, start = Difference(), 0
    if channel.position in (reference, other):
        for piece in byte_pieces(tensor, PIECE_BYTES):
            if channel.position == reference:
                channel.send(piece, other)
            else:
                found.add_piece(channel.receive(piece, reference), piece, start, tensor)
            start += piece.numel()
    fields = channel.broadcast(asdict(found), other)
    fields["index"] = None if fields["index"] is None else tuple(fields["index"])
    return Elements(rank=rank, numel=numel, **fields)
