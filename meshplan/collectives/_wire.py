"""What is sent as it is: all-to-all and all-gather, by torch's functional collectives.

Nothing is computed on the way, so that a dtype that no backend sends goes as another of its size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["all_gather", "all_to_all", "as_sent"]

_ops = torch.ops._c10d_functional


def as_sent(tensor: Tensor) -> Tensor:
    """A view of ``tensor`` in a dtype that backends send: gloo and NCCL have no int16."""
    return tensor.view(torch.float16) if tensor.dtype is torch.int16 else tensor


def all_to_all(
    tensor: Tensor, received: Sequence[int], sent: Sequence[int], group: ProcessGroup
) -> Tensor:
    """Send ``sent[r]`` elements to rank r of ``group``, and receive ``received[r]`` from it.

    Args:
        tensor: 1-D, contiguous: what is sent, in the order of the ranks.
        received, sent: one count for each rank.
        group: of this rank and others.

    Returns:
        1-D, what has come, in the order of the ranks; not waited for.
    """
    found: Tensor = _ops.all_to_all_single(as_sent(tensor), received, sent, group.group_name)
    return found if found.dtype is tensor.dtype else found.view(tensor.dtype)


def all_gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The tensors of all ranks of ``group``, one after the other along the first dim.

    Args:
        tensor: contiguous, of one shape on all ranks.
        group: of this rank and others.

    Returns:
        Not waited for.
    """
    found: Tensor = _ops.all_gather_into_tensor(as_sent(tensor), group.size(), group.group_name)
    return found if found.dtype is tensor.dtype else found.view(tensor.dtype)
