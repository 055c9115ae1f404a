"""Bits of tensors: distances between floats, single elements as text, and raw bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes with a distance in units in the last place."""
INTEGER_OF_SIZE = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
"""Integer dtypes by the bytes of an element."""
_LOWEST = -(1 << 63)


def max_ulps(found: Tensor, expected: Tensor) -> int:
    """The largest distance in units in the last place between the bits of floats, as signed
    integers [n], that are not NaN: exact for 64 bits too, 0 between -0.0 and 0.0 or if empty.
    """
    return int(_distance(found, expected).max()) - _LOWEST if found.numel() else 0


def differ_by_binade(found: Tensor, expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Where normal floats of ``dtype`` differ in sign or by more than a factor of 2: bool [n].

    ``found`` and ``expected`` as for ``max_ulps``.
    """
    return _distance(found, expected) > int(1 / torch.finfo(dtype).eps) + _LOWEST


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    """Units in the last place from one float to the other, minus 2^63: they are up to 2^64."""
    a, b = _count_from_zero(found), _count_from_zero(expected)
    # The difference wraps, and is an unsigned integer.
    return torch.where(a > b, a - b, b - a) ^ _LOWEST


def _count_from_zero(pattern: Tensor) -> Tensor:
    """Sign and magnitude as int64 that number the floats from zero."""
    wide = pattern.to(torch.int64)
    return torch.where(wide >= 0, wide, torch.iinfo(pattern.dtype).min - wide)


def element_index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, here = divmod(flat, size)
        index.append(here)
    return tuple(reversed(index))


def element_text(raw: Tensor, dtype: torch.dtype) -> str:
    """One element of ``dtype`` given as uint8 [itemsize]: ``0.5 (0x3f000000)``."""
    pattern = "0x" + bytes(reversed(raw.tolist())).hex()
    try:
        return f"{raw.clone().view(dtype)[0].item()!r} ({pattern})"
    except (RuntimeError, NotImplementedError):
        # Torch cannot read every dtype, e.g. two floats of four bits.
        return pattern


def flatten(tensor: Tensor) -> Tensor:
    """``tensor`` as one dim with stride 1, row-major; it shares memory where it can.

    A dim of at most one element keeps any stride in ``contiguous`` and ``view``, and torch refuses
    to view such a tensor in a dtype of another size.
    """
    flat = tensor.contiguous().view(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def tensor_of(data: bytes) -> Tensor:
    """Bytes, at least one, as uint8 [n] on the CPU."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor on any device, row-major; works without numpy."""
    raw = flatten(tensor.cpu()).view(torch.uint8)
    data = bytearray(raw.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(raw)
    return bytes(data)
