"""Groups that are split off a group of the backend, or merged, reduce under its contract."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshplan
import meshplan.backend
from meshplan import BackendOptions, Contract
from meshplan.backend._group import MeshplanProcessGroup
from tests.backend.native_calls import count_native_reductions
from tests.processes import run_ranks

pytestmark = pytest.mark.processes
LEAVES = (1e20, 1.0, -1e20, 1.0)


def all_reduced(group: Any, leaf: float) -> float:
    x = torch.tensor([leaf])
    dist.all_reduce(x, group=group)
    return x.item()


def split(rank: int) -> dict[str, Any]:
    world = dist.group.WORLD
    assert isinstance(world, MeshplanProcessGroup)
    found: dict[str, Any] = {}
    # Not in ascending order, and members only.
    if rank != 3:
        part = world.split_group([2, 0, 1])
        assert isinstance(part, MeshplanProcessGroup)
        found["place"] = part.rank(), part.size(), part.group_name, part.group_desc
        found["options"] = part.options.contract.id, part.options.path
        with count_native_reductions() as counts:
            # Leaves in the order of the new group, by rank: ((1e20 + 1) - 1e20).
            found["sum"] = all_reduced(part, LEAVES[part.rank()])
            found["native"] = dict(counts)
        gathered = [torch.empty(1) for _ in range(3)]
        dist.all_gather(gathered, torch.tensor([float(rank)]), group=part)
        found["gathered"] = [one.item() for one in gathered]
        # The same ranks and name once more.
        again = world.split_group([2, 0, 1])
        found["again"] = all_reduced(again, 1.0)
        part.shutdown()
    found["others"] = [world.split_group([r for r in range(4) if r != rank])]
    named = world.split_group(
        [0, 1, 2, 3],
        timedelta(seconds=50),
        BackendOptions(Contract("tree")),
        "named",
        "described",
        [torch.device("cpu")],
    )
    assert isinstance(named, MeshplanProcessGroup)
    timeout = named.inner._get_backend(torch.device("cpu")).options._timeout
    found["named"] = named.group_name, named.group_desc, timeout.total_seconds()
    found["tree"] = all_reduced(named, LEAVES[rank])
    nested = named.split_group([0, 1]) if rank < 2 else None
    found["nested"] = None if nested is None else all_reduced(nested, 1.0)
    return found


def split_in_world(rank: int) -> dict[str, Any]:
    store = dist.FileStore(os.environ["MESHPLAN_TEST_STORE"], 4)
    options = BackendOptions(Contract("rank"), "exchange")
    dist.init_process_group("meshplan", store=store, rank=rank, world_size=4, pg_options=options)
    return split(rank)


def test_a_split_group_has_the_options_of_its_parent() -> None:
    for rank, found in enumerate(run_ranks(split_in_world, 4, init=False)):
        if rank != 3:
            place = {2: 0, 0: 1, 1: 2}[rank]
            assert found["place"] == (place, 3, "0:split:[2, 0, 1]", "default_pg:split")
            assert found["options"] == ("v1/rank/wide/once", "exchange")
            assert (found["sum"], found["native"]) == (0.0, {})
            assert found["gathered"] == [2.0, 0.0, 1.0]
            assert found["again"] == 3.0
        assert found["others"] == [None]
        assert found["named"] == ("named", "described", 50.0)
        assert found["tree"] == 0.0
        assert found["nested"] == (2.0 if rank < 2 else None)


def split_natively(rank: int) -> list[Any]:
    """From C++, which keeps no object of Python alive."""
    world: Any = dist.group.WORLD
    part = dist.ProcessGroup.split_group(world, [0, 1, 2], group_name="native")
    # The third summand is lost where gloo adds in the order of its ring.
    leaves = [torch.randn(50, generator=torch.Generator().manual_seed(r)) * 9**r for r in range(3)]
    x: Tensor = leaves[rank].clone()
    with count_native_reductions() as counts:
        dist.all_reduce(x, group=part)
    return [torch.equal(x, meshplan.reduce_leaves(leaves, "sum", [3])), dict(counts)]


def test_native_code_splits_into_groups_of_the_backend() -> None:
    assert run_ranks(split_natively, 3, backend="meshplan") == [[True, {}]] * 3


def merge(rank: int) -> list[Any]:
    world = dist.group.WORLD
    assert isinstance(world, MeshplanProcessGroup)
    half = world.split_group([0, 1] if rank < 2 else [2, 3])
    assert half is not None
    store = dist.PrefixStore("merge", dist.distributed_c10d._get_default_store())
    whole = half.merge_remote_group(store, 4, timedelta(seconds=60), "merged", "both")
    assert isinstance(whole, MeshplanProcessGroup)
    places = [torch.empty(1, dtype=torch.int64) for _ in range(4)]
    dist.all_gather(places, torch.tensor([rank]), group=whole)
    order = [int(place) for place in places]
    return [
        order[whole.rank()] == rank and sorted(order) == [0, 1, 2, 3],
        (whole.size(), whole.group_name, whole.group_desc),
        all_reduced(whole, LEAVES[whole.rank()]),
    ]


def test_merged_groups_number_ranks_as_they_come() -> None:
    expected = [True, (4, "merged", "both"), 0.0]
    assert run_ranks(merge, 4, backend="meshplan") == [expected] * 4


def refuse(rank: int) -> list[str]:
    world = dist.group.WORLD
    assert isinstance(world, MeshplanProcessGroup)
    cpu: Any = [torch.device("meta")]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: world.split_group([]),
        lambda: world.split_group([0, 0]),
        lambda: world.split_group([0, 2]),
        lambda: world.split_group([0, 1], device_types=cpu),
    )
    found = []
    for call in calls:
        with pytest.raises(meshplan.MeshplanError) as raised:
            call()
        found.append(str(raised.value))
    return found


def test_invalid_ranks_and_devices_are_refused() -> None:
    first, second = run_ranks(refuse, 2, backend="meshplan")
    assert first == second
    ranks = "; pass one or more different ranks from 0 to 1"
    assert first[:3] == [
        f"MP505: split_group got ranks {given} of a group of 2 ranks{ranks}"
        for given in ([], [0, 0], [0, 2])
    ]
    assert first[3].startswith("MP505: split_group got devices ['meta'], and the group has ['cpu'")


def merge_jobs(rank: int, path: str) -> list[bool]:
    """Each rank is a job of its own, and one has derived other groups before."""
    shared = dist.FileStore(os.environ["MESHPLAN_TEST_STORE"], 3)
    options = BackendOptions(path=path)
    store = dist.HashStore()
    dist.init_process_group("meshplan", store=store, rank=0, world_size=1, pg_options=options)
    world = dist.group.WORLD
    assert isinstance(world, MeshplanProcessGroup)
    if rank == 1:
        world.merge_remote_group(dist.PrefixStore("alone", store), 1, group_name="all")
    whole = world.merge_remote_group(dist.PrefixStore("merge", shared), 3, group_name="all")
    part = whole.split_group([2, 0, 1])
    assert isinstance(part, MeshplanProcessGroup)
    leaves = [torch.randn(50, generator=torch.Generator().manual_seed(r)) * 9**r for r in range(3)]
    found = []
    for group in (whole, part, whole):
        x = leaves[group.rank()].clone()
        with count_native_reductions() as counts:
            dist.all_reduce(x, group=group)
        found += [torch.equal(x, meshplan.reduce_leaves(leaves, "sum", [3])), dict(counts) == {}]
    # Ranks are those of the group: the global rank of each member is 0.
    with pytest.raises(meshplan.errors.SignatureMismatchError) as raised:
        whole.allreduce([torch.ones(4 + (whole.rank() == 2))]).wait()
    found.append("rank 2" in str(raised.value))
    lane = whole._lane
    with pytest.raises(meshplan.errors.GroupStateError, match="ranks of several jobs"):
        meshplan.deterministic_all_reduce(torch.ones(3), group=lane, async_op=True)
    return found


@pytest.mark.parametrize("path", ["auto", "exchange"])
def test_merged_jobs_reduce_in_the_order_of_the_group(path: str) -> None:
    assert run_ranks(partial(merge_jobs, path=path), 3, init=False) == [[True] * 7] * 3
