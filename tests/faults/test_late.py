"""A rank that is stopped: for less time than the others allow, and for more."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshplan
from meshplan.flatten import _missing
from tests.faults.jobs import NEVER, attempt, end, right_bits, run_to_end, stop_for
from tests.processes import arrive, wait_for

pytestmark = pytest.mark.processes

LATE = 2


@pytest.mark.parametrize("path", ["auto", pytest.param("exchange", marks=pytest.mark.dist)])
def test_short_pause_of_a_rank_fails_nothing(path: str) -> None:
    """Before the first reduction, and between two."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        with meshplan.installed(path=path, timeout=60.0):
            for _ in range(2):
                if rank == LATE:
                    stop_for(3.0)
                right_bits(mesh, times=20)
        end()

    run_to_end(ranks, 3)


@pytest.mark.dist
@pytest.mark.parametrize("path", ["auto", "exchange"])
def test_long_pause_of_a_rank_fails_every_rank(path: str) -> None:
    """The others name it; it fails as well when it goes on, and all can leave."""

    def ranks(rank: int) -> tuple[str, str, Any]:
        _missing._SECONDS = 2.0
        mesh = init_device_mesh("cpu", (3,))
        with meshplan.installed(path=path, timeout=NEVER):
            right_bits(mesh)
            if rank == LATE:
                stop_for(14.0)
            name, message = attempt(lambda: right_bits(mesh, times=2))
        end()
        return name, message, dist.is_initialized()

    for rank, (name, message, initialized) in enumerate(
        run_to_end(ranks, 3, collective_timeout=4.0)
    ):
        assert not initialized
        if path == "auto":
            assert name == "PeerTimeoutError"
            late = "rank 2 (this one) did not" if rank == LATE else "rank 2 did not"
            assert f"{late} reach block" in message
        else:
            assert name == "CollectiveError"
            own = "the others gave up waiting for rank 2 (this one) before"
            other = "rank 2 is stopped or unreachable"
            assert (own if rank == LATE else other) in message, message


@pytest.mark.dist
def test_long_pause_before_the_first_reduction_names_the_rank() -> None:
    def ranks(rank: int) -> str:
        mesh = init_device_mesh("cpu", (3,))
        with meshplan.installed(timeout=4.0):
            if rank == LATE:
                stop_for(6.0)
                wait_for("error", 2)
            _, message = attempt(lambda: right_bits(mesh))
            # Or the others did not, if it waits for them.
            who = "" if rank == LATE else "rank 2 "
            assert f"{who}did not reach the first reduction" in message
            arrive("error")
            wait_for("error", 3)
        with meshplan.installed(timeout=60.0):
            right_bits(mesh)
        end()
        return message

    run_to_end(ranks, 3)
