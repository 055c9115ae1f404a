"""Names and sizes of torch's dtypes, for what runs without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FLOAT8 = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_BYTES = {
    1: (
        "bool",
        "int8",
        "uint8",
        *(f"float8_{form}" for form in _FLOAT8),
        "float4_e2m1fn_x2",
    ),
    2: ("int16", "uint16", "float16", "bfloat16"),
    4: ("int32", "uint32", "float32", "complex32"),
    8: ("int64", "uint64", "float64", "complex64"),
    16: ("complex128",),
}
_ITEMSIZE = {name: size for size, names in _BYTES.items() for name in names}


def name_of(dtype: torch.dtype | str) -> str:
    """The name without ``torch.``, e.g. ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def itemsize(name: str) -> int:
    """Bytes of an element. Raises KeyError if it is not the name of a dtype of numbers."""
    return _ITEMSIZE[name]


def is_floating_point(name: str) -> bool:
    return "float" in name


def is_complex(name: str) -> bool:
    return name.startswith("complex")
