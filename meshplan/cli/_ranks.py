"""What runs on every rank of a job: ``meshplan lint --live``, which gathers the placement of all
ranks, and ``meshplan links``, which times exchanges over each class of links, and fits costs.

Every class has its groups: the ranks of a domain, one rank of each domain of a node, one rank of
each node. All groups of a class exchange at the same time, as they do in a job, so the figures
include shared resources (a bus, an adapter, a core). Groups have at most ``MOST_RANKS`` ranks,
enough to separate launch from latency, and one size in each class; further ranks are omitted. Of
very large jobs the first ``MOST_GROUPS`` groups are timed, because each takes time to create.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from meshplan._torch import Store, default_store
from meshplan.cli._options import require_launcher, track
from meshplan.errors import GroupError, GroupStateError, TopologyError
from meshplan.flatten import discover
from meshplan.flatten._agree import AnsweringStore
from meshplan.topology import Cluster, Topology
from meshplan.topology._links import TimedExchange, fit_links

MOST_RANKS, MOST_GROUPS = 8, 128

# Bytes for each peer: latency decides, neither, and bandwidth. Halving also adds, which takes the
# more of its time the larger it is, so it shows no bandwidth.
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
BATCHED_SIZES = SIZES[:2]
# Calls between two barriers, of which the first ones connect and level how far ranks are apart.
_CALLS, _WARM_UP = 20, 2


def measure(backend: str | None, repeat: int, timeout: float) -> tuple[str, str]:
    """The links as JSON, and a line about them; the same on all ranks."""
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
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
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            raise TopologyError("one rank has no links; start two ranks or more")
        cluster = discover(default_store(), rank, world_size, timeout)
        found = time_exchanges(cluster.topology, device, repeat, timeout)
    finally:
        dist.destroy_process_group()
    links, error = fit_links(found)
    about: dict[str, Any] = {
        "ranks": world_size,
        "topology": str(cluster.topology),
        "backend": backend,
        "torch": torch.__version__,
        "exchanges": len(found),
        "median_error": round(error, 4),
    }
    line = f"{links}; {len(found)} exchanges, median error {error:.0%}; {cluster.topology}"
    return links.dumps(about), line


def group_by_class(topology: Topology) -> dict[str, list[list[int]]]:
    """Groups of equal size over each class of links. If domains are unknown, the ranks of a node
    form the class ``node``.
    """
    ranks = range(topology.world_size)
    nodes = [0 if topology.nodes is None else int(topology.nodes[rank]) for rank in ranks]
    # What the ranks of each class of links share, the nearest first.
    shared: dict[str, list[Any]] = {"node": nodes, "network": [0] * len(ranks)}
    if topology.domains is not None:
        shared = {
            "domain": [*zip(nodes, topology.domains.tolist(), strict=True)],
            **shared,
        }
    found = {}
    parts = [[rank] for rank in ranks]
    for name, keys in shared.items():
        wholes: dict[Any, list[list[int]]] = defaultdict(list)
        for part in parts:
            wholes[keys[part[0]]].append(part)
        # The first ranks of all parts, then their second ranks, up to the size of the smallest.
        groups = [list(group) for one in wholes.values() for group in zip(*one, strict=False)]
        if even := _split_evenly(groups):
            found[name] = even
        parts = [sorted(rank for part in one for rank in part) for one in wholes.values()]
    return found


def time_exchanges(
    topology: Topology, device: torch.device, repeat: int, timeout: float
) -> list[TimedExchange]:
    """Time all exchanges of all classes ``repeat`` times, on every rank; same result on all."""
    # Batches of messages are timed as recursive halving sends them, with the work of the host.
    found = []
    limit = timedelta(seconds=timeout)
    for name, groups in track("timing links of kind", list(group_by_class(topology).items())):
        size = len(groups[0])
        pairs = [group[i : i + 2] for group in groups for i in range(0, size - 1, 2)]
        # Halving has rounds of one message in groups of a power of two.
        even = [group[: 1 << size.bit_length() - 1] for group in groups]
        for these in [pairs, groups] if size > 2 else [groups]:
            with _open_groups(these, limit) as mine:
                found += _time_groups(name, these, mine, device, repeat, _exchange)
                if these is groups and groups == even:
                    found += _time_groups(name, these, mine, device, repeat, _halve)
        if groups != even:
            with _open_groups(even, limit) as mine:
                found += _time_groups(name, even, mine, device, repeat, _halve)
    return found


@contextmanager
def _open_groups(
    groups: Sequence[Sequence[int]], timeout: timedelta
) -> Iterator[dist.ProcessGroup | None]:
    # Every rank takes part in the creation of every group. Without a timeout torch waits half an
    # hour.
    made = [dist.new_group(list(group), timeout=timeout) for group in groups]
    rank = dist.get_rank()
    mine = next(
        (one for one, group in zip(made, groups, strict=True) if rank in group),
        None,
    )
    yield mine
    if mine is not None:
        dist.destroy_process_group(mine)


def _time_groups(
    name: str,
    groups: Sequence[Sequence[int]],
    mine: dist.ProcessGroup | None,
    device: torch.device,
    repeat: int,
    call: Callable[[Tensor, Tensor, dist.ProcessGroup], object],
) -> list[TimedExchange]:
    size, found = len(groups[0]), []
    rounds = 2 * (size.bit_length() - 1)
    for each in BATCHED_SIZES if call is _halve else SIZES:
        sent = torch.ones(size * each // 4, device=device)
        run = partial(call, sent, torch.empty_like(sent), mine) if mine else None
        seconds = _time_steadily(run, device, repeat)
        if call is _halve:
            nbytes = 2 * (size - 1) * each // rounds
            found.append(TimedExchange(name, rounds, nbytes, seconds, batched=True))
        else:
            found.append(TimedExchange(name, size - 1, each, seconds))
    return found


def _exchange(sent: Tensor, came: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(came, sent, group=group)


def _halve(sent: Tensor, came: Tensor, group: dist.ProcessGroup) -> None:
    # Not for `lint --live`, which times nothing: this takes half a second.
    from meshplan.collectives import deterministic_all_reduce

    # Strict: the time of another path would be taken for that of batches.
    deterministic_all_reduce(sent, out=came, path="halving", group=group, strict=True)


def _time_steadily(call: Callable[[], object] | None, device: torch.device, repeat: int) -> float:
    """The median over ``repeat`` calls of the slowest rank's seconds; no call takes none."""
    # The calls follow each other as in a job. After a barrier, ranks go on at different times, and
    # one call would take mostly as long as they differ.
    times = list[float]()
    while len(times) < repeat:
        # Ranks without a call wait here, no longer than for some calls of the others.
        dist.barrier()
        block = []
        for _ in range(_WARM_UP + min(_CALLS, repeat - len(times))):
            start = time.perf_counter()
            if call is not None:
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            block.append(time.perf_counter() - start)
        times += block[_WARM_UP:]
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(median(slowest.tolist()))


def _split_evenly(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    several = [group for group in groups if len(group) > 1]
    size = min((MOST_RANKS, *map(len, several)))
    pieces = (
        list(group[first : first + size])
        for group in several
        for first in range(0, len(group) - size + 1, size)
    )
    return list(islice(pieces, MOST_GROUPS))


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
