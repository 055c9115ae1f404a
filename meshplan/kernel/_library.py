"""The compiled library: a plain C interface, loaded through ctypes, without torch's headers.

``pip install`` builds it where a C++ compiler is found, next to this module. One binary serves all
versions of torch and of Python; ctypes releases the interpreter lock while it runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from meshplan._installation import installation

# These numbers and structs are those of csrc/entry.cpp, csrc/region.h, csrc/peer.h and
# csrc/device_call.h.
ABI = 14
MAX_PEERS = 72
"""Ranks of a communicator at most."""
MAX_BLOCKS = 32
"""Blocks of a kernel on a GPU at most; they have to run at once."""
DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.uint8: 8,
}
OPS = {"sum": 0, "avg": 0, "product": 1, "max": 2, "min": 3}

_INT, _UINT, _POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
_INT64, _UINT64 = ctypes.c_longlong, ctypes.c_ulonglong


class Signature(ctypes.Structure):
    """The words of the record of a call, and zeros behind them."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class Peers(ctypes.Structure):
    _fields_ = (
        ("region", _POINTER * MAX_PEERS),
        ("world", _INT),
        ("rank", _INT),
        ("blocks", _INT),
        ("tile", _UINT),
    )

    @classmethod
    def of(cls, regions: Sequence[int], rank: int, blocks: int, tile: int) -> Peers:
        found = cls(world=len(regions), rank=rank, blocks=blocks, tile=tile)
        found.region[: len(regions)] = regions
        return found


# What both calls begin with, in C++ too.
CALL = (
    ("timeout_ns", _INT64),
    ("starts", _INT64 * (MAX_PEERS + 1)),
    ("divisor", _UINT64),
    ("signature", Signature),
    ("mode", _INT),
    ("item", _INT),
)


class PeerCall(ctypes.Structure):
    """All but the tensors of a reduction over peers."""

    _fields_ = (
        *CALL,
        ("dtype", _INT),
        ("op", _INT),
        ("order", _UINT),
        ("accumulate", _INT),
        ("node", _INT),
        ("axes", _INT),
        ("shape", _INT * 8),
        ("piece", _UINT),
        ("unused", _UINT),
    )


class DeviceCall(ctypes.Structure):
    _fields_ = (
        *CALL,
        ("piece", _UINT),
        ("chain", _INT),
        ("plan", ctypes.c_ubyte * MAX_PEERS),
    )


class Outcome(ctypes.Structure):
    """How a reduction over peers ended."""

    _fields_ = (
        ("fate", _INT),
        ("rank", _INT),
        ("block", _INT),
        ("phase", _INT),
        ("ended", _INT),
        ("unused", _INT),
        ("theirs", Signature),
    )


class Failure(ctypes.Structure):
    """How a reduction on a GPU ended, and the signature of this rank's call."""

    _fields_ = (("outcome", Outcome), ("mine", Signature))


class Failures(ctypes.Structure):
    """Reports of blocks on a GPU. ``any``: 0, or 1 and the index of one that has failed."""

    _fields_ = (("any", _UINT), ("unused", _UINT * 15), ("of", Failure * MAX_BLOCKS))


# Result and argument types, as csrc declares them.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "mp_fold": (
        _INT,
        [
            _POINTER,
            ctypes.POINTER(_POINTER),
            _INT,
            _INT64,
            *[_INT] * 2,
            _UINT,
            *[_INT] * 2,
            ctypes.POINTER(_INT),
            _INT,
            _UINT64,
            _INT,
        ],
    ),
    "mp_digest": (None, [_POINTER, _INT64, _INT64, _POINTER]),
    "mp_add_words": (None, [_POINTER, *[_INT64] * 3, *[_POINTER] * 2, _INT, _POINTER]),
    "mp_add_squares": (_INT, [_POINTER, _INT64, _INT, _POINTER]),
    "mp_integers": (
        _INT64,
        [_INT, *[_POINTER] * 4, _INT64, _INT, _INT, _INT, _UINT64],
    ),
    "mp_peer_bytes": (_UINT64, [_INT, _INT, _UINT, _INT]),
    "mp_peer_reduce": (_INT, [_POINTER] * 6),
}


def available() -> bool:
    return load()[0] is not None


def why_not() -> str | None:
    """Why it is not ``available``, and what to do; ``None`` if it is."""
    return load()[1]


def library() -> ctypes.CDLL:
    """The library; ``RuntimeError`` with the reason if it is not available."""
    found, reason = load()
    if found is None:
        raise RuntimeError(reason)
    return found


@lru_cache(maxsize=1)
def load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or why it is not available. Loaded once."""
    # In a checkout an earlier build may have left one that has the interpreter in its name.
    files = sorted(Path(__file__).parent.glob("_cpu*.so"), reverse=True)
    if not files:
        here = installation()
        reason = f"{here.uncompiled}, so that reductions on CPUs run in plain torch"
        return None, f"{reason}; install g++ or clang++, and then: {here.remedy}"
    try:
        found = ctypes.CDLL(str(files[0]))
        version = int(found.mp_abi_version())
    except (OSError, AttributeError) as error:
        return (
            None,
            f"{files[0].name} cannot be loaded ({error}); {installation().remedy}",
        )
    if version != ABI:
        return None, (
            f"{files[0].name} speaks interface {version}, this version of meshplan {ABI}; "
            f"{installation().remedy}"
        )
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found, None
