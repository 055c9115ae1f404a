"""Whether a tensor stands for one that a compiled graph will have."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["is_traced"]

# Other subclasses stand for what a tracer or a simulation sees; one is a collective under way.
_PLAIN = (Tensor, torch.nn.Parameter, AsyncCollectiveTensor)


def is_traced(tensor: Tensor) -> bool:
    """Whether nothing is sent now: torch traces, or one process plays all ranks."""
    return (
        type(tensor) not in _PLAIN or torch.compiler.is_compiling() or get_proxy_mode() is not None
    )
