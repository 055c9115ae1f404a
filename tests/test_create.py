"""Groups that only some ranks create: torch creates its own over them as if there were none."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import GroupCreationError, GroupStateError, MeshplanError
from meshplan.flatten import _create, _join, registry
from meshplan.layout import Layout
from meshplan.record import Record
from tests.processes import run_ranks

pytestmark = pytest.mark.processes
SOON = timedelta(seconds=20)
CPU = torch.device("cpu", 0)


def connect(how: str, backend: str | None = None) -> list[float]:
    """The sums of ones over torch's groups of ranks 1 and 2, and of 0 and 3."""
    pairs = [[1, 2], [0, 3]]
    mine = pairs[dist.get_rank() in (0, 3)]
    if how == "split_group":
        return [split(pairs)]
    if how == "new_group of members":
        found = [dist.new_group(mine, SOON, backend, use_local_synchronization=True)]
    else:
        found = [dist.new_group(pair, SOON, backend) for pair in pairs]
    sums = []
    for pg in found:
        if pg is not None and pg != dist.GroupMember.NON_GROUP_MEMBER:
            ones = torch.ones(1)
            dist.all_reduce(ones, group=pg)
            sums.append(ones.item())
    return sums


def split(pairs: list[list[int]]) -> float:
    """How many ranks split the default group under this rank's name."""
    world: Any = dist.group.WORLD
    world.bound_device_id = CPU
    # Torch splits groups of accelerators only.
    with (
        mock.patch("torch.accelerator.is_available", return_value=True),
        mock.patch("torch.accelerator.current_accelerator", return_value=CPU),
        mock.patch.object(dist.ProcessGroup, "split_group", return_value=None) as called,
    ):
        assert dist.split_group(None, pairs, SOON, world._get_backend(CPU).options) is None
    world.bound_device_id = None
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, called.call_args.kwargs["group_name"])
    return float(names.count(names[dist.get_rank()]))


HOW = ["new_group", "new_group of members", "split_group"]


def reduce_over(mesh: DeviceMesh) -> str:
    """How the group over the second axis came to be."""
    layout = Layout.from_mesh(mesh)
    return registry().get(mesh, layout, (1,), token=Record.of(test=""), timeout=20.0).origin


def restart(rank: int) -> None:
    """A default group in place of the first one, which all ranks have destroyed."""
    dist.barrier()
    dist.destroy_process_group()
    store = f"file://{os.environ['MESHPLAN_TEST_STORE']}.again"
    dist.init_process_group("gloo", rank=rank, world_size=4, init_method=store)


@pytest.mark.parametrize("how", HOW)
def test_torch_connects_ranks_of_which_some_have_created_groups(how: str) -> None:
    def ranks(rank: int) -> list[list[float]]:
        found = []
        for first in (True, False):
            # Groups of torch are in ascending order of ranks, so these are not.
            mesh = DeviceMesh("cpu", [[1, 0], [3, 2]])
            if rank < 2:
                assert reduce_over(mesh) == "created"
            found.append(connect(how))
            if rank > 1:
                assert reduce_over(mesh) == "created"
            found.append(connect(how))
            if first:
                restart(rank)
        return found

    assert run_ranks(ranks, 4) == [[[2.0]] * 4] * 4


@pytest.mark.parametrize("how", HOW[1:])
def test_torch_connects_ranks_of_which_some_have_failed_to_create_groups(how: str) -> None:
    def ranks(rank: int) -> list[list[float]]:
        mesh = DeviceMesh("cpu", [[1, 0], [3, 2]])
        found = []
        if rank < 2:
            broken = RuntimeError("no connection") if rank == 1 else None
            with (
                mock.patch.object(_join, "warm_up", side_effect=broken),
                pytest.raises(GroupCreationError),
            ):
                reduce_over(mesh)
        found.append(connect(how))
        if rank < 2:
            assert reduce_over(mesh) == "created"
            # Only this rank's group goes, as a rank that ends its work early does it.
            if rank == 1:
                registry().shutdown()
        found.append(connect(how))
        return found

    assert run_ranks(ranks, 4) == [[[2.0]] * 2] * 4


def test_torch_connects_a_rank_of_the_backend_with_one_of_gloo() -> None:
    def ranks(rank: int) -> list[list[float]]:
        # Each rank has one group besides the default one.
        backend = "meshplan" if rank < 2 else "gloo"
        mine = [0, 1] if rank < 2 else [2, 3]
        pg = dist.new_group(mine, SOON, backend, use_local_synchronization=True)
        found = [connect(how, "meshplan") for how in HOW[1:]]
        dist.all_reduce(torch.ones(1), group=pg)
        found += [connect(how) for how in HOW[1:]]
        return found

    assert run_ranks(ranks, 4) == [[[2.0]] * 4] * 4


def test_created_groups_are_found_by_name_only() -> None:
    def ranks(rank: int) -> list[bool]:
        mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("a",))
        layout = Layout.from_mesh(mesh)
        pg = registry().get(mesh, layout, (0,), token=Record.of(test=""), timeout=20.0).pg
        world = c10d._world
        return [
            c10d._resolve_process_group(pg.group_name) == pg,
            world.pg_names[pg] == pg.group_name,
            pg in world.tags_to_pg[""],
            pg in world.pg_map,
        ]

    assert run_ranks(ranks, 2) == [[True, True, False, True]] * 2


def test_threads_that_create_first_groups_at_once_keep_all_names() -> None:
    """Torch's names are replaced once; a second replacement would lose what was named since."""
    both, named = threading.Barrier(2), threading.Event()

    class Names(dict[Any, str]):
        def keys(self) -> Any:
            with suppress(threading.BrokenBarrierError):
                # The other thread copies them too, or waits for this one.
                both.wait(timeout=1.0)
                if threading.current_thread().name == "last":
                    named.wait(timeout=20.0)
            return super().keys()

        def __iter__(self) -> Iterator[Any]:
            return super().__iter__()

    def name_group(*given: Any, group_name: str, **_: Any) -> tuple[Any, None]:
        c10d._pg_names[group := mock.Mock()] = group_name
        named.set()
        return group, None

    def create() -> None:
        name = threading.current_thread().name
        store, seconds = dist.HashStore(), timedelta(seconds=20)
        _create.create_uncounted(1, 0, [0], "gloo", store, name=name, timeout=seconds)

    with (
        mock.patch.object(c10d, "_pg_names", Names(kept="kept")),
        mock.patch.object(_create, "new_process_group", name_group),
    ):
        threads = [threading.Thread(target=create, name=name) for name in ("first", "last")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30.0)
        assert sorted(c10d._pg_names.values()) == ["first", "kept", "last"]


def test_group_whose_ranks_have_not_shared_memory_is_kept() -> None:
    def ranks(rank: int) -> list[Any]:
        mesh, token = DeviceMesh("cpu", [1, 0]), Record.of(test="")
        layout = Layout.from_mesh(mesh)
        get = partial(registry().get, mesh, layout, (0,), token=token, peers="always")
        failure = GroupStateError("no memory") if rank == 1 else None
        share = mock.patch.object(_join, "connect", side_effect=failure)
        with share if failure else nullcontext(), pytest.raises(MeshplanError):
            get(timeout=3.0)
        group = get(timeout=20.0)
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group.pg)
        return [group.origin, group.peers is not None, ones.item()]

    assert run_ranks(ranks, 2) == [["kept", True, 2.0]] * 2


@pytest.mark.parametrize("lazy", ["0", "True"])
def test_lazy_gloo_needs_no_descriptor_for_each_rank(lazy: str) -> None:
    def ranks(rank: int) -> str:
        os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
        mesh = DeviceMesh("cpu", [1, 0, 3, 2])
        layout, token = Layout.from_mesh(mesh), Record.of(test="")
        # Room for a group that has connected each rank to two others.
        used = len(os.listdir("/proc/self/fd")) - 1
        limits = used + 6 + _create._LOOKUPS, used + 100
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        try:
            return registry().get(mesh, layout, (0,), token=token, timeout=20.0).origin
        except GroupStateError as error:
            return str(error).partition("ulimit")[1]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits[1:] * 2)

    assert run_ranks(ranks, 4) == [{"0": "ulimit", "True": "created"}[lazy]] * 4
