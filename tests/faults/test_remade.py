"""A default group that is destroyed and made again in one process, of other ranks in other orders."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import meshplan
from meshplan.dtensor import _routes
from meshplan.flatten import registry
from tests.faults.jobs import count_resources, end, join, right_bits, run_to_end

pytestmark = pytest.mark.processes

ROUNDS = 20
# How the four processes come together in a round: the ranks of each job, in order.
JOBS = (
    ((0, 1, 2, 3),),
    ((2, 0), (3, 1)),
    ((3, 1, 0, 2),),
    ((1, 2, 0),),
    ((0, 3), (2, 1)),
)
KINDS = ("descriptors", "threads", "python threads", "mappings", "groups")


def test_twenty_default_groups_in_one_process_reduce_correctly() -> None:
    def ranks(rank: int) -> list[Counter[str]]:
        meshplan.install(timeout=60.0)
        holds = []
        for number in range(ROUNDS):
            jobs = JOBS[number % len(JOBS)]
            for order in [job for job in jobs if rank in job]:
                join(f"{number}-{jobs.index(order)}", order, rank)
                assert len(registry()._table) == 0
                assert _routes.discovered_cluster() is None
                world = len(order)
                # The same two meshes in every round would show stale entries.
                right_bits(DeviceMesh("cpu", list(range(world))))
                with meshplan.installed(path="exchange", timeout=60.0):
                    right_bits(DeviceMesh("cpu", [*range(1, world), 0]))
                assert len(registry()._table) > 0
                if number % 2:
                    end()
                else:
                    # Without shutdown, too.
                    dist.destroy_process_group()
            gc.collect()
            holds.append(count_resources())
        return holds

    for holds in run_to_end(ranks, 4, init=False):
        # Two rounds of the same jobs, both left by shutdown.
        middle, last = holds[9], holds[19]
        # Less than one a round: gloo releases its descriptors asynchronously.
        assert all(last[kind] - middle[kind] < 10 for kind in KINDS), (middle, last)
