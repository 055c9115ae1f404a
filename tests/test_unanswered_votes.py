"""A store that does not answer one rank in a vote: all ranks go on with one verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan.errors import GroupCreationError, GroupStateError, MeshplanError
from meshplan.flatten import _join
from meshplan.flatten._agree import vote
from tests.processes import arrive, run_ranks, wait_for

pytestmark = pytest.mark.processes
When = Literal["before it is counted", "after it is counted"]


@contextmanager
def unanswered(when: When, suffix: str) -> Iterator[None]:
    """The store does not answer this rank in a vote whose prefix ends in ``suffix``."""

    def ask(members: Any, prefix: str, *given: Any, **options: Any) -> Any:
        if not prefix.endswith(suffix):
            return vote(members, prefix, *given, **options)
        if when == "after it is counted":
            vote(members, prefix, *given, **options)
        raise GroupStateError("the store did not answer", unanswered=True)

    with mock.patch.object(_join, "vote", ask):
        yield


def reduce_over_backend(rank: int) -> Callable[[float], float]:
    group = dist.new_group(backend="meshplan", timeout=timedelta(seconds=10))

    def reduce(value: float) -> float:
        x = torch.full((3,), value)
        dist.all_reduce(x, group=group)
        return x[0].item()

    return reduce


def reduce_over_mesh(rank: int) -> Callable[[float], float]:
    mesh = DeviceMesh("cpu", [[1, 0]], mesh_dim_names=("a", "b"))
    meshplan.install(timeout=10.0)

    def reduce(value: float) -> float:
        local = torch.full((3,), value)
        d = DTensor.from_local(local, mesh["b"], (Partial(),), run_check=False)
        return d.redistribute(mesh["b"], (Replicate(),)).to_local()[0].item()

    return reduce


DOORS = {"backend": reduce_over_backend, "mesh": reduce_over_mesh}


def silent() -> Any:
    error = GroupStateError("the store did not answer", unanswered=True)
    return mock.patch.object(_join, "note_process", side_effect=error)


ONCE: tuple[When, ...] = ("before it is counted", "after it is counted")
LOST = [[partial(unanswered, when, suffix)] for when in ONCE for suffix in ("/ready", "/0")]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("losses", [*LOST, [*LOST[-1], silent]])
def test_rank_without_an_answer_comes_back_to_the_vote(door: str, losses: Any) -> None:
    def ranks(rank: int) -> list[float]:
        reduce = DOORS[door](rank)
        for lost in losses if rank == 1 else ():
            with lost(), pytest.raises(GroupStateError, match="answer"):
                reduce(10.0)
        return [reduce(value) for value in (1.0, 2.0)]

    assert run_ranks(ranks, 2) == [[2.0, 4.0]] * 2


@pytest.mark.parametrize("door", DOORS)
def test_rank_that_comes_back_late_reads_why_the_others_have_no_group(door: str) -> None:
    def ranks(rank: int) -> list[float]:
        reduce = DOORS[door](rank)
        if rank == 1:
            with (
                unanswered("before it is counted", "/ready"),
                pytest.raises(GroupStateError, match="answer"),
            ):
                reduce(10.0)
            wait_for("gave up", 1)
        with pytest.raises(GroupCreationError, match="rank 1 did not finish within"):
            reduce(10.0)
        arrive("gave up")
        return [reduce(value) for value in (1.0, 2.0)]

    assert run_ranks(ranks, 2) == [[2.0, 4.0]] * 2


def test_group_without_a_verdict_goes_with_its_parent() -> None:
    def ranks(rank: int) -> int:
        before = len(dist.distributed_c10d._world.pg_map)
        group = dist.new_group(backend="meshplan", timeout=timedelta(seconds=2))
        lost = unanswered("after it is counted", "/ready") if rank == 1 else nullcontext()
        with lost, pytest.raises(MeshplanError):
            dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)
        return len(dist.distributed_c10d._world.pg_map) - before

    assert run_ranks(ranks, 2) == [0, 0]
