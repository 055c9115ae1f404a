"""The compiled library: a plain C interface, loaded through ctypes, without torch's headers.

It is built by ``pip install`` where a C++ compiler is found, and lies beside this module. One
binary serves all versions of torch; ctypes gives the interpreter lock back while it runs.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

__all__ = ["ABI", "available", "library", "why_not"]

ABI = 1


def available() -> bool:
    """Whether the compiled library is there and speaks this version's interface."""
    return _load()[0] is not None


def why_not() -> str | None:
    """Why it is not ``available``, and what to do; ``None`` if it is."""
    return _load()[1]


def library() -> ctypes.CDLL:
    """The library.

    Raises:
        RuntimeError: it is not available, with the reason.
    """
    found, reason = _load()
    if found is None:
        raise RuntimeError(reason)
    return found


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    files = sorted(Path(__file__).parent.glob("_cpu*.so"))
    if not files:
        return None, (
            "meshplan was installed without a C++ compiler, so that reductions on CPUs run in "
            "plain torch; install g++ or clang++ and then meshplan again (pip install "
            "--force-reinstall --no-deps meshplan)"
        )
    try:
        found = ctypes.CDLL(str(files[0]))
        version = int(found.mp_abi_version())
    except (OSError, AttributeError) as error:
        return None, f"{files[0].name} cannot be loaded ({error}); install meshplan again"
    if version != ABI:
        return None, (
            f"{files[0].name} speaks interface {version}, this version of meshplan {ABI}; "
            "install meshplan again"
        )
    found.mp_fold.restype = ctypes.c_int
    found.mp_fold.argtypes = [
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_longlong,
        *[ctypes.c_int] * 5,
        ctypes.POINTER(ctypes.c_int),
        ctypes.c_int,
        ctypes.c_ulonglong,
        ctypes.c_int,
    ]
    return found, None
