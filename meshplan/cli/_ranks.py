"""The placement of the ranks of a job that torchrun started."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed.rendezvous import rendezvous

from meshplan._torch import Store
from meshplan.cli._options import require_launcher
from meshplan.errors import GroupError, TopologyError
from meshplan.flatten import discover
from meshplan.flatten._agree import AnsweringStore
from meshplan.topology import Cluster

_DONE = "meshplan/lint/done"


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
