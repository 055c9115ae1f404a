"""Inputs that paths and kernels have to take as they are."""

from __future__ import annotations

import torch
from torch import Tensor


def at_byte(values: Tensor, offset: int) -> Tensor:
    """The same values on a CPU, at an address that is ``offset`` beyond a multiple of 16."""
    store = torch.empty(values.nbytes + 32, dtype=torch.uint8)
    first = -store.data_ptr() % 16 + offset
    raw = store[first : first + values.nbytes]
    raw.copy_(values.view(torch.uint8))
    return torch.frombuffer(
        store.numpy().data, dtype=values.dtype, count=values.numel(), offset=first
    )
