"""Where two tensors differ, found piece by piece: first element, number of elements, distance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Difference", "index_of", "text_of"]

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_IEEE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LOWEST = -(1 << 63)


@dataclass(frozen=True, slots=True)
class Difference:
    """What was found so far.

    Attributes:
        count: elements that differ.
        first: flat index of the first of them, row-major; -1 if there is none.
        theirs, mine: its bytes as two 64-bit words.
        ulps: the largest distance in units in the last place of numbers that differ, 0 between -0.0
            and +0.0; -1 if there is none, for dtypes other than float16, bfloat16, float32 and
            float64 (and complex of them), or if a NaN is in each pair.
    """

    count: int = 0
    first: int = -1
    theirs: tuple[int, int] = (0, 0)
    mine: tuple[int, int] = (0, 0)
    ulps: int = -1

    def with_piece(
        self, theirs: Tensor, mine: Tensor, start: int, dtype: torch.dtype
    ) -> Difference:
        """With a further piece of both tensors.

        Args:
            theirs, mine: uint8 [bytes], whole elements on one device.
            start: bytes before it.
            dtype: of the elements.
        """
        size = dtype.itemsize
        differs = (theirs != mine).view(-1, size).any(1)
        count = int(differs.sum())
        if count == 0:
            return self
        found = replace(
            self, count=self.count + count, ulps=max(self.ulps, _ulps(theirs, mine, dtype))
        )
        if self.first >= 0:
            return found
        first = int(differs.to(torch.uint8).argmax())
        one = slice(first * size, first * size + size)
        return replace(
            found, first=start // size + first, theirs=_words(theirs[one]), mine=_words(mine[one])
        )


def _words(element: Tensor) -> tuple[int, int]:
    padded = torch.cat(
        [element.cpu(), torch.zeros(16 - element.numel(), dtype=torch.uint8, device="cpu")]
    )
    low, high = padded.view(torch.int64).tolist()
    return low, high


def _ulps(theirs: Tensor, mine: Tensor, dtype: torch.dtype) -> int:
    real = dtype.to_real() if dtype.is_complex else dtype
    if real not in _IEEE:
        return -1
    a, b = (one.clone().view(_INTEGER_OF_SIZE[real.itemsize]) for one in (theirs, mine))
    numbers = (a != b) & ~a.view(real).isnan() & ~b.view(real).isnan()
    a, b = _ordinals(a[numbers]), _ordinals(b[numbers])
    if a.numel() == 0:
        return -1
    # Up to 2^64: the difference wraps, and is compared as if it had no sign.
    apart = torch.where(a > b, a - b, b - a) ^ _LOWEST
    return (int(apart.max()) ^ _LOWEST) % (1 << 64)


def _ordinals(bits: Tensor) -> Tensor:
    """Sign and magnitude as int64 that count the floats from zero."""
    lowest = torch.iinfo(bits.dtype).min
    wide = bits.to(torch.int64)
    return torch.where(wide >= 0, wide, lowest - wide)


def index_of(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element by its row-major number."""
    index = []
    for size in reversed(shape):
        flat, here = divmod(flat, size)
        index.append(here)
    return tuple(reversed(index))


def text_of(words: tuple[int, int], dtype: torch.dtype) -> str:
    """An element's value, where it can be shown, and its bits: ``0.5 (0x3f000000)``."""
    raw = torch.tensor(words, dtype=torch.int64, device="cpu").view(torch.uint8)[: dtype.itemsize]
    pattern = "0x" + bytes(reversed(raw.tolist())).hex()
    try:
        return f"{raw.clone().view(dtype)[0].item()!r} ({pattern})"
    except (RuntimeError, NotImplementedError):
        # Torch has dtypes that it cannot read, such as two floats of four bits.
        return pattern
