"""The ranks of a job that torchrun started: their default group and their placement."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from meshplan._torch import Store
from meshplan.cli._options import require_launcher
from meshplan.errors import GroupError, GroupStateError, TopologyError
from meshplan.flatten import discover
from meshplan.flatten._agree import AnsweringStore
from meshplan.topology import Cluster

_DONE = "meshplan/lint/done"


@contextmanager
def open_default_group(backend: str, timeout: float) -> Iterator[torch.device]:
    """The default group while it is needed, with ``timeout`` seconds for every wait, and the device
    of its tensors: for ``"nccl"`` a GPU, else the CPU.
    """
    device = torch.device("cpu")
    if backend == "nccl":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if not dist.is_nccl_available() or local_rank >= torch.cuda.device_count():
            raise GroupStateError(
                f"backend nccl needs a GPU for each rank, and local rank {local_rank} has none; "
                "use --backend gloo"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield device
    finally:
        dist.destroy_process_group()


def find_live_cluster(environ: Mapping[str, str], timeout: float) -> Cluster:
    """Gather the placement of all ranks; every rank calls it, and gets the same result."""
    example = "lint --live --mesh ddp=8,fsdp=5"
    require_launcher(environ, "meshplan lint --live", example, TopologyError)
    try:
        found = rendezvous("env://", timeout=timedelta(seconds=timeout))
        store, rank, world_size = next(found)
        cluster = discover(store, rank, world_size, timeout)
        _leave_together(AnsweringStore(store, timeout), rank, world_size, timeout)
    except GroupError:
        raise
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())[:300]
        raise TopologyError(f"the ranks cannot be connected: {text}") from error
    return cluster


def _leave_together(store: Store, rank: int, world_size: int, timeout: float) -> None:
    """Rank 0 waits for the others: it may hold the store from which they still read."""
    count = store.add(_DONE, 1)
    if rank:
        return
    end = time.monotonic() + timeout
    while count < world_size and time.monotonic() < end:
        time.sleep(0.01)
        count = store.add(_DONE, 0)
