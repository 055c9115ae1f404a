"""Large pages behind large tensors."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import lru_cache
from typing import Any

from torch import Tensor

__all__ = ["LARGE_BYTES", "large_pages"]

# From here on the C library takes fresh memory for every tensor and gives it back, so that each
# page is faulted in again at every call: in pages of 4 KB that takes longer than to write it.
LARGE_BYTES = 32 << 20


def large_pages(tensor: Tensor) -> Tensor:
    """Let the system back a new, contiguous ``tensor`` with large pages, if it has them to give.

    It is a hint: where it is not understood, or not heeded, nothing changes but time.

    Returns:
        ``tensor``.
    """
    advise = _madvise()
    if advise is not None and tensor.nbytes >= LARGE_BYTES:
        # Whole pages that are the tensor's alone.
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, stop - start, mmap.MADV_HUGEPAGE)
    return tensor


@lru_cache(maxsize=1)
def _madvise() -> Any:
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    advise.restype = ctypes.c_int
    return advise
