"""The default group of a verb that torchrun starts on all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from meshplan.errors import GroupStateError

__all__ = ["default_group"]


@contextmanager
def default_group(backend: str, timeout: float) -> Iterator[torch.device]:
    """The default group while it is needed, and the device that its tensors are on.

    Args:
        backend: ``"nccl"`` has a GPU for each rank, any other the CPU.
        timeout: seconds for every wait.

    Raises:
        GroupStateError: no GPU for this rank.
        RuntimeError, ValueError: from torch, where the ranks cannot be connected.
    """
    device = torch.device("cpu")
    if backend == "nccl":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if not dist.is_nccl_available() or local_rank >= torch.cuda.device_count():
            raise GroupStateError(
                f"backend nccl needs a GPU for each rank, and local rank {local_rank} has none "
                "here; write --backend gloo"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield device
    finally:
        dist.destroy_process_group()
