"""Meshes of one shape and the same axes: a call over one is never taken for a call of the other."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan.errors import MeshplanError
from tests.processes import run_ranks

pytestmark = pytest.mark.processes


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def reduce(over: DeviceMesh, value: float) -> float:
    """The sum over all ranks, or 0.0 after an error."""
    local = torch.full((3,), value)
    d = DTensor.from_local(local, over, (Partial(), Partial()), run_check=False)
    try:
        found = d.redistribute(over, (Replicate(), Replicate())).to_local()
    except MeshplanError:
        return 0.0
    assert len(set(found.tolist())) == 1
    return found[0].item()


def test_ranks_that_use_equal_meshes_in_different_orders_never_mix_them() -> None:
    def ranks(rank: int) -> list[float]:
        with meshplan.installed(timeout=6.0):
            order = [(mesh(), 1.0), (mesh(), 10.0)][:: 1 if rank < 2 else -1]
            found = [reduce(*one) for one in order]
            return found[:: 1 if rank < 2 else -1]

    sums = run_ranks(ranks, 4, collective_timeout=12.0)
    # Ranks that gave up on one mesh may meet over the other one.
    assert all(first in (0.0, 4.0) and second in (0.0, 40.0) for first, second in sums)
    assert any(0.0 in both for both in sums)


def test_equal_meshes_take_turns() -> None:
    def ranks(rank: int) -> list[float]:
        found = []
        with meshplan.installed(timeout=60.0):
            for again in (True, False):
                meshes = [mesh(), mesh()]
                for i in (0, 1, 1, 0, 1):
                    found.append(reduce(meshes[i], 10.0**i))
                threads = [
                    threading.Thread(target=lambda one=one: found.append(reduce(one, 3.0)))
                    for one in meshes
                ]
                for one in threads:
                    one.start()
                    one.join()
                found.append(reduce(meshes[0], 1.0))
                if again:
                    dist.barrier()
                    dist.destroy_process_group()
                    store = f"file://{os.environ['MESHPLAN_TEST_STORE']}.again"
                    dist.init_process_group("gloo", rank=rank, world_size=4, init_method=store)
        return found

    expected = [4.0, 40.0, 40.0, 4.0, 40.0, 12.0, 12.0, 4.0]
    assert run_ranks(ranks, 4) == [expected * 2] * 4
