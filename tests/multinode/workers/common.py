"""Shared code of the ranks of these jobs: messages to the test, inputs, checks on all ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

import meshplan
from meshplan.testing import order_sensitive
from tests.processes import BRING_UP, shorten

FOLDER = Path(os.environ["MESHPLAN_TEST_FOLDER"])
RANK = int(os.environ["RANK"])
RANKS_PER_HOST = tuple(map(int, os.environ["MESHPLAN_TEST_RANKS"].split(",")))


def say(what: str, value: Any) -> None:
    """Send a message to the test, which reads all of it or nothing."""
    file = FOLDER / f"{what}.{RANK}.json"
    written = file.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(value))
    written.rename(file)


def wait_for_message(what: str, seconds: float) -> None:
    """Wait for that message of the test."""
    deadline = time.monotonic() + seconds
    while not (FOLDER / f"{what}.told").exists():
        assert time.monotonic() < deadline, f"the test did not say {what!r} in {seconds:g} s"
        time.sleep(0.02)


def start(seconds: float = 60.0) -> None:
    """The default group, over gloo."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=max(seconds, BRING_UP)))
    # gloo lets a rank continue before its peers have connected to it.
    dist.barrier()
    shorten(seconds)


def run(function: Callable[[], Any]) -> None:
    """Run a rank; what ``function`` returns is its result."""
    result = function()
    say("result", result)
    if dist.is_initialized():
        meshplan.shutdown()
        dist.destroy_process_group()


def failure(function: Callable[[], Any]) -> dict[str, Any]:
    """What ``function`` raises, and how many seconds that took."""
    began = time.monotonic()
    try:
        function()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "notes": list(getattr(error, "__notes__", ())),
            "missing": list(getattr(error, "missing", ())),
            "differing": list(getattr(error, "differing", ())),
            "seconds": time.monotonic() - began,
        }
    return {"type": "", "text": "", "seconds": time.monotonic() - began}


def cyclic() -> list[int]:
    """The ranks dealt out over the hosts in turn: the first of each host, the second of each, ..."""
    hosts = []
    first = 0
    for count in RANKS_PER_HOST:
        hosts.append(range(first, first + count))
        first += count
    return [ranks[i] for i in range(max(RANKS_PER_HOST)) for ranks in hosts if i < len(ranks)]


def leaves(
    count: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    """A summand for each place of a mesh, the same list on every rank."""
    numel = torch.Size(shape).numel()
    return [
        order_sensitive(numel, rank=i, world_size=count, dtype=dtype, seed=seed).view(*shape)
        for i in range(count)
    ]


def summand(mesh: DeviceMesh, leaf: Tensor, axes: Sequence[int]) -> DTensor:
    """A DTensor that is ``Partial`` along ``axes`` and replicated along the others."""
    from torch.distributed.tensor import Replicate

    placements = [Partial() if i in axes else Replicate() for i in range(mesh.ndim)]
    return DTensor.from_local(leaf, mesh, placements, run_check=False)


def distinct(tensor: Tensor) -> int:
    """How many bit patterns of ``tensor`` there are over all ranks: gathered and compared whole."""
    # Bytes: gloo sends no integers of 16 bits.
    mine = tensor.detach().contiguous().view(torch.uint8).flatten()
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return len({one.numpy().tobytes() for one in gathered})
