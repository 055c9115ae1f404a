"""Whether a reduction is only noted down, for a graph that runs later."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["is_traced"]

# Other subclasses stand for what a tracer or a simulation sees; one is a collective under way.
_PLAIN = (Tensor, torch.nn.Parameter, AsyncCollectiveTensor)


def is_traced(tensor: Tensor) -> bool:
    """Whether nothing is sent now: torch traces, a CUDA graph is captured, or ranks are simulated.

    Args:
        tensor: what is to be reduced.
    """
    return (
        type(tensor) not in _PLAIN
        or torch.compiler.is_compiling()
        or get_proxy_mode() is not None
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )
