"""The first use of a group has one time-out, however many rounds of its members it has."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import GroupAgreementError, GroupCreationError
from meshplan.flatten import _agree, _connect, _join, registry
from meshplan.layout import Layout
from meshplan.record import Record
from tests.processes import run_ranks

pytestmark = pytest.mark.processes
TOKEN, TIMEOUT = Record.of(use="first"), 8.0


class Clock:
    """Time passes for the waits of one rank only: each takes ``late`` seconds or its own end."""

    def __init__(self, late: float) -> None:
        self.now, self.late, self.asked = 0.0, late, list[float]()

    def vote(self, members: _agree.Members, *given: Any, **options: Any) -> _agree.VoteResult:
        """All other members come ``late``."""
        left = _agree.seconds_left(members.wait)
        self.asked.append(left)
        self.now += min(left, self.late)
        missing = () if left > self.late else members.ranks[1:]
        return _agree.VoteResult(missing=missing)

    def monotonic(self) -> float:
        return self.now


def wait_in(rounds: str, late: float) -> tuple[float, list[float], str]:
    """The seconds that the first use took, those that each round was allowed, and its error."""
    clock = Clock(late)
    watched = mock.Mock(wraps=time, monotonic=clock.monotonic)
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",))
    made = mock.Mock(return_value=mesh.get_group())
    error = ""
    with (
        mock.patch.object(_agree, "time", watched),
        mock.patch.object(_join, "time", watched),
        mock.patch.object(_join, "vote", clock.vote),
        mock.patch.object(_connect, "vote", clock.vote),
        mock.patch.object(_join, "warm_up"),
        mock.patch.object(_join, "create_members_only", made),
        mock.patch.object(_join.dist, "destroy_process_group"),
    ):
        try:
            if rounds == "lane":
                options = {"token": TOKEN, "timeout": TIMEOUT, "call": 1}
                _join.create_beside(mesh.get_group(), made, **options)
            elif rounds == "new":
                registry().of(mesh.get_group(), "cpu", token=TOKEN, apart=True, peers="always")
            else:
                layout = Layout.from_mesh(mesh)
                registry().get(mesh, layout, (0,), token=TOKEN, timeout=TIMEOUT, peers="always")
        except (GroupAgreementError, GroupCreationError) as found:
            error = str(found)
    return clock.now, clock.asked, error


@pytest.mark.parametrize("rounds", ["lane", "new", "axis"])
def test_rounds_of_a_first_use_share_one_timeout(rounds: str) -> None:
    """Members that are late in each round, as on a network that breaks, use up one time-out."""

    def ranks(rank: int) -> tuple[float, list[float], str]:
        found = wait_in(rounds, late=0.7 * TIMEOUT) if rank == 0 else (0.0, [0.0], "")
        dist.barrier()
        return found

    (waited, asked, error), _ = run_ranks(ranks, 2, collective_timeout=TIMEOUT)
    assert len(asked) == 2
    assert asked[0] == TIMEOUT
    assert waited <= 1.2 * TIMEOUT
    assert "rank 1 did not" in error


def test_wait_outside_of_a_first_use_has_its_own_timeout() -> None:
    assert _agree.seconds_left(3.0) == 3.0
    with _agree.first_use(1.0), _agree.first_use(100.0):
        assert _agree.seconds_left(0.5) == 0.5
        assert 0.0 < _agree.seconds_left(3.0) <= 1.2
    assert _agree.seconds_left(3.0) == 3.0
