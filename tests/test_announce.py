"""Torch's counters of collectives see each reduction as the one collective that it stands for."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import meshplan
from meshplan.backend import _group
from meshplan.collectives import _reduction
from meshplan.dtensor import _partial
from meshplan.errors import ContractTypeError
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.processes import run_ranks
from tests.traffic import Issued, Operators

pytestmark = pytest.mark.processes
P, R, S = Partial(), Replicate(), Shard
REDUCE, SCATTER, GATHER = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"
Call = Callable[[], Any]


def counted(function: Call) -> list[str]:
    """The collectives that ``CommDebugMode`` counts; ``DebugMode`` must list the same."""
    with CommDebugMode() as counts:
        function()
    with DebugMode() as debug:
        function()
    listed = re.findall(r"c10d(?:_functional)?::(\w+)", debug.debug_string())
    names = [
        str(op).rpartition(".")[2] for op, n in counts.get_comm_counts().items() for _ in " " * n
    ]
    moved = {"wait_tensor", "_wrap_tensor_autograd"}
    assert sorted(names) == sorted(name for name in listed if name not in moved)
    return sorted(names)


def wait_for(function: Any, *arguments: Any, **options: Any) -> None:
    function(*arguments, **options).wait()


def test_redistribution_counts_as_in_torch() -> None:
    """On its first call, which creates a group, and on later ones."""
    paths = ("auto", "exchange", "halving", "reference", "native")

    def ranks(rank: int) -> list[list[str]]:
        # An order of ranks that no group of torch has.
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]])
        pending = DTensor.from_local(torch.ones(4, 4), mesh, (P, P), run_check=False)
        sharded = DTensor.from_local(torch.ones(4, 4), mesh, (R, P), run_check=False)
        found = []
        for path in paths:
            meshplan.shutdown()
            with meshplan.installed(path=path):  # type: ignore[arg-type]
                for _ in range(2):
                    found.append(counted(lambda: pending.redistribute(mesh, (R, R))))
                found.append(counted(lambda: sharded.redistribute(mesh, (R, S(0)))))
                found.append(counted(lambda: sharded.redistribute(mesh, (R, R)).full_tensor()))
        return found

    expected = [[REDUCE], [REDUCE], [SCATTER], [REDUCE]] * len(paths)
    assert run_ranks(ranks, 4) == [expected] * 4


def test_each_function_counts_as_one_collective() -> None:
    def ranks(rank: int) -> list[list[str]]:
        x, found = torch.ones(4), []
        functions: list[Any] = [
            partial(meshplan.deterministic_all_reduce, x),
            partial(meshplan.deterministic_reduce_scatter, x),
            partial(meshplan.deterministic_all_gather, x),
            partial(meshplan.deterministic_all_reduce_coalesced, [x.clone(), torch.ones(5)]),
        ]
        for path in ("auto", "exchange"):
            for function in functions:
                found.append(counted(partial(function, path=path)))
                found.append(counted(partial(wait_for, function, path=path, async_op=True)))
        found.append(counted(partial(functions[0], path="native")))
        return found

    kinds = [kind for kind in (REDUCE, SCATTER, GATHER, REDUCE) for _ in range(2)]
    assert run_ranks(ranks, 2) == [[[kind] for kind in [*kinds, *kinds, REDUCE]]] * 2


def test_each_call_of_the_backend_counts_as_one_collective() -> None:
    def ranks(rank: int) -> list[list[str]]:
        x, half = torch.ones(4), torch.ones(2)
        world: Any = dist.group.WORLD
        calls: list[Call] = [
            lambda: dist.all_reduce(x),
            lambda: wait_for(dist.all_reduce, x, async_op=True),
            lambda: dist.reduce_scatter_single(half, x),
            lambda: wait_for(dist.reduce_scatter_single, half, x, async_op=True),
            lambda: dist.reduce_scatter(half, [half, half]),
            lambda: functional.all_reduce(x, "sum", world).wait(),
        ]
        # Steady reductions count as well.
        return [counted(call) for call in calls for _ in range(2)]

    kinds = [REDUCE, REDUCE, SCATTER, SCATTER, SCATTER, REDUCE]
    expected = [[kind] for kind in kinds for _ in range(2)]
    assert run_ranks(ranks, 2, backend="meshplan") == [expected] * 2


def test_counter_on_one_rank_changes_nothing_on_others() -> None:
    def ranks(rank: int) -> list[torch.Tensor]:
        mesh, found = init_device_mesh("cpu", (3,)), []
        x = order_sensitive(1000, rank=rank, world_size=3)
        for path in ("auto", "exchange"):
            with meshplan.installed(path=path):
                d = DTensor.from_local(x, mesh, (P,), run_check=False)
                if rank == 1:
                    with CommDebugMode():
                        found.append(d.full_tensor())
                else:
                    found.append(d.full_tensor())
                found.append(d.full_tensor())
        return found

    first, *others = (one for found in run_ranks(ranks, 3) for one in found)
    for other in others:
        assert_bitwise_equal(other, first)


def test_other_modes_see_the_collectives_issued() -> None:
    def ranks(rank: int) -> tuple[list[str], int, int, bool]:
        def call() -> None:
            meshplan.deterministic_all_reduce(torch.ones(4), path="exchange")

        with CommDebugMode() as counts, Issued() as issued, Operators() as outer:
            before = _get_current_dispatch_mode_stack()
            call()
            # A call that raises is not counted, and leaves the modes as they were.
            with pytest.raises(ContractTypeError):
                meshplan.deterministic_all_reduce(torch.ones(4, dtype=torch.int64), op="avg")
            call()
            same = before == _get_current_dispatch_mode_stack()
        names = [name for name in outer.names if "c10d" in name and "wait" not in name]
        return names, issued.total, counts.get_total_counts(), same

    names = ["c10d::alltoall_base_", "c10d::allgather_"] * 2
    assert run_ranks(ranks, 2) == [(names, 4, 2, True)] * 2


def test_no_graph_has_an_announced_collective() -> None:
    def ranks(rank: int) -> tuple[str, str]:
        mesh = init_device_mesh("cpu", (2,))

        def step(x: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(x, mesh, (P,), run_check=False).full_tensor() * 1.0

        with meshplan.installed(path="exchange"):
            step(torch.ones(3))
            plain = make_fx(step)(torch.ones(3)).code
            with CommDebugMode():
                watched = make_fx(step)(torch.ones(3)).code
        return plain, watched

    for plain, watched in run_ranks(ranks, 2):
        assert watched == plain
        assert "meta" not in plain


def test_nothing_is_announced_without_a_mode() -> None:
    def ranks(rank: int) -> None:
        mesh, x = init_device_mesh("cpu", (2,)), torch.ones(4)
        refused = mock.Mock(side_effect=AssertionError)
        with (
            mock.patch.object(_partial, "run_as_one", refused),
            mock.patch.object(_reduction, "run_as_one", refused),
            mock.patch.object(_group, "run_as_one", refused),
            meshplan.installed(),
        ):
            DTensor.from_local(x, mesh, (P,), run_check=False).full_tensor()
            meshplan.deterministic_all_reduce(x)
            dist.all_reduce(x)
            with CommDebugMode(), pytest.raises(AssertionError):
                dist.all_reduce(x)

    run_ranks(ranks, 2, backend="meshplan")
