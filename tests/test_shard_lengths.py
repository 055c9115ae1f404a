"""Shards whose length is not that of torch's chunk: refused where that shows, never wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from meshplan.errors import GroupStateError, PlacementError
from tests.processes import arrive, run_ranks, wait_for

pytestmark = pytest.mark.processes

P, R, S = Partial(), Replicate(), Shard


def rows(mesh: DeviceMesh, lengths: Sequence[int], *placements: object) -> DTensor:
    """Rows 0, 1, 2, ... of two equal elements, of which the last axis splits off ``lengths``."""
    place = mesh.get_local_rank(mesh.ndim - 1)
    first = sum(lengths[:place])
    local = torch.arange(first, first + lengths[place], dtype=torch.float32)
    return DTensor.from_local(
        local.repeat_interleave(2).view(-1, 2),
        mesh,
        placements or [S(0)],
        run_check=False,
        shape=torch.Size((sum(lengths), 2)),
        stride=(2, 1),
    )


class TestMessages(TestCase):
    def test_shards_of_other_lengths_are_refused_until_all_ranks_restart(self) -> None:
        def ranks(rank: int) -> list[str]:
            mesh, messages = init_device_mesh("cpu", (2,)), []
            # Of another group: it goes on.
            equal = DeviceMesh.from_group(dist.new_group(), "cpu")
            assert equal == mesh
            with meshplan.installed():
                for target in (R, S(1)):
                    with pytest.raises(PlacementError) as caught:
                        rows(mesh, (3, 5)).redistribute(mesh, [target])
                    messages.append(str(caught.value))
                    assert rows(equal, (4, 4)).full_tensor().shape == (8, 2)
                    for placement in (S(0), P):
                        with pytest.raises(GroupStateError) as stopped:
                            rows(mesh, (4, 4), placement).redistribute(mesh, [R])
                        assert messages[0] in str(stopped.value)
                    meshplan.shutdown()
                    for lengths in ((4, 4), (4, 3)):
                        found = rows(mesh, lengths).full_tensor()
                        assert found[:, 0].tolist() == list(range(sum(lengths)))
            assert messages == messages[:1] * 2
            return messages

        found = run_ranks(ranks, 2)
        assert "has shape [5, 2]" in found[1][0]
        self.assertExpectedInline(
            found[0][0],
            """MP401: DTensor moves 4 elements on dim 0 of this rank's shard, which has shape [3, 2]: it splits 8 elements over the mesh as torch.chunk does. Pass such shards to DTensor.from_local, or gather others by meshplan.deterministic_all_gather(local, sizes=...). Ranks whose shards are right wait for this one until their timeout""",
        )


@pytest.mark.parametrize("backend", ["gloo", "meshplan"])
def test_call_after_a_refused_move_is_never_taken_for_it(backend: str) -> None:
    """A rank whose shard has the right length waits for the timeout, and gets no other values."""

    def ranks(rank: int) -> str:
        mesh = init_device_mesh("cpu", (3,))
        with meshplan.installed():
            for lengths in ((2, 4, 3), (3, 3, 3)):
                for _ in range(2):
                    with pytest.raises((ValueError, RuntimeError)) as caught:
                        rows(mesh, lengths).full_tensor()
                    if rank == 2:
                        arrive("failed")
                        wait_for("failed", 3)
                        return str(caught.value)
        arrive("failed")
        wait_for("failed", 3)
        return str(caught.value)

    found = run_ranks(ranks, 3, backend=backend, collective_timeout=4.0)
    assert all(text.startswith("MP503") for text in found[:2]), found
    assert re.search("Timed out|timeout|closed", found[2]), found[2]


def test_lengths_on_a_dim_that_stays_are_not_compared() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(32.0).view(8, 4)
        mine = (whole[:3], whole[3:])[mesh.get_local_rank(0)]
        local = mine.chunk(2, 1)[mesh.get_local_rank(1)].contiguous()
        with meshplan.installed():
            for _ in range(2):
                d = DTensor.from_local(local, mesh, [S(0), S(1)], shape=whole.shape, stride=(4, 1))
                assert d.redistribute(mesh, [S(0), R]).to_local().tolist() == mine.tolist()
                with pytest.raises(PlacementError):
                    d.redistribute(mesh, [S(0), S(0)])
                meshplan.shutdown()

    run_ranks(ranks, 4)


def test_shards_of_fsdp_and_tensor_parallel_are_moved() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for rows in (8, 6, 5, 1):
            style = ColwiseParallel() if rows > 1 else RowwiseParallel()
            torch.manual_seed(0)
            model = torch.nn.Linear(4, rows)
            before = [one.detach().clone() for one in model.parameters()]
            parallelize_module(model, mesh["tp"], style)
            fully_shard(model, mesh=mesh["dp"])
            with meshplan.installed():
                for _ in range(2):
                    moved = [one.full_tensor().tolist() for one in model.parameters()]
                    assert moved == [one.tolist() for one in before], rows

    run_ranks(ranks, 4)


def run_operators(length: int, told: str) -> list[int]:
    """The rows of this rank in what operators make of a tensor of 5 rows, of which it has some."""
    mesh, local = init_device_mesh("cpu", (4,)), torch.ones(length, 2)
    d = DTensor.from_local(local, mesh, [S(0)], shape=torch.Size((5, 2)), stride=(2, 1))
    if told == "prepare":
        meshplan.prepare(mesh)
    elif told != "shutdown":
        assert d.full_tensor().shape == (5, 2)
    made = (d.new_zeros((5, 2)), d.view(5, 2, 1), d.reshape(5, 1, 2), d[..., None].expand(5, 2, 3))
    return [len(one.to_local()) for one in made]


@pytest.mark.parametrize("told", ["redistribution", "thread", "prepare", "shutdown"])
def test_operators_have_the_shapes_of_this_rank_after_it_was_another(told: str) -> None:
    """Torch caches its steps, for which meshplan caches decisions, and what it calls operators with
    by equal meshes, the latter in each thread.
    """

    def ranks(_: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            for rank, length in ((2, 1), (0, 2)):
                dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
                with meshplan.installed():
                    if told == "thread":
                        found = pool.submit(run_operators, length, told).result()
                    else:
                        found = run_operators(length, told)
                    assert found == [length] * 4
                    if told == "shutdown":
                        meshplan.shutdown()
                dist.destroy_process_group()

    run_ranks(ranks, 1, init=False)


def test_shards_are_moved_as_those_of_this_rank_after_it_was_another() -> None:
    """Torch caches its steps by equal meshes, with shapes of the rank that the process had."""

    def ranks(rank: int) -> None:
        whole, kept = torch.arange(10.0).view(5, 2), None
        for number, mine in enumerate((rank, 3 - rank)):
            store = f"file://{os.environ['MESHPLAN_TEST_STORE']}.{number}"
            dist.init_process_group("gloo", init_method=store, rank=mine, world_size=4)
            mesh = init_device_mesh("cpu", (2, 2))
            with meshplan.installed():
                for _ in range(2):
                    d = distribute_tensor(whole, mesh, [S(0), S(0)])
                    part = d.redistribute(mesh, [S(0), R]).to_local()
                    assert part.tolist() == whole.split(3)[mesh.get_local_rank(0)].tolist()
                    assert d.full_tensor().tolist() == whole.tolist()
            # A mesh that lives on, or a cache of torch's, is equal to the next one.
            kept = mesh
            dist.barrier()
            dist.destroy_process_group()
        del kept

    run_ranks(ranks, 4, init=False)
