"""A killed rank: the others name it within the timeout, leave, and continue without it."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshplan
from meshplan.execute.paths import _exchange, _hierarchical
from meshplan.flatten import _join, _missing
from meshplan.topology import Link, Links, Topology
from tests.faults.jobs import (
    NEVER,
    Outcome,
    attempt,
    die,
    end,
    join,
    join_over_tcp,
    partial_over,
    right_bits,
    run_job,
)
from tests.marks import full, longest
from tests.processes import (
    arrive,
    nothing_stays_in_shared_memory,
    patience,
    shorten,
    wait_for,
)
from tests.programs import capture

pytestmark = pytest.mark.processes

VICTIM = 1
SURVIVORS = (0, 2, 3)
TWO_NODES = Topology.uniform(4, node_size=2, links=Links(node=Link(1e-7, 1e12), group=0.0))
PATHS: dict[str, dict[str, Any]] = {
    "peers": {"path": "two_shot"},
    "exchange": {"path": "exchange"},
    "halving": {"path": "halving"},
    "hierarchical": {"path": "exchange", "topology": TWO_NODES},
}


@pytest.fixture(autouse=True)
def _short_roll_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_missing, "_SECONDS", 2.0)


def dies(*arguments: object, **options: object) -> None:
    die()


def go_on(rank: int, number: int = 0) -> None:
    """Leave the group, form a new one without the victim, and reduce."""
    end()
    join(number, SURVIVORS, rank)
    with meshplan.installed():
        right_bits(init_device_mesh("cpu", (3,)))
        # Descending ranks need a new group.
        right_bits(DeviceMesh("cpu", [2, 0, 1]))
    end()


def survivors(outcomes: list[Outcome]) -> list[tuple[str, str]]:
    assert outcomes[VICTIM].exit_code == -9
    found = [outcomes[rank] for rank in SURVIVORS]
    assert not any(outcome.failure for outcome in found), found
    assert [outcome.exit_code for outcome in found] == [0, 0, 0]
    return [outcome.value for outcome in found]


def job(path: str, prepare: Callable[[], None], *, warm: bool, mesh: Any) -> list[Any]:
    """The victim runs ``prepare`` before the redistribution in which it dies."""

    def ranks(rank: int) -> tuple[str, str]:
        device_mesh = mesh()
        with meshplan.installed(timeout=NEVER if warm else 1.0, **PATHS[path]):
            if warm:
                right_bits(device_mesh)
                entries = [e for e in meshplan.report().entries if e["ran"] != "torch"]
                blocks = any("in blocks of" in e["planned"] for e in entries)
                assert blocks == (path == "hierarchical")
            if rank == VICTIM:
                prepare()
            shorten(6.0)
            with patience(3):
                found = attempt(lambda: right_bits(device_mesh, times=100_000 if warm else 1))
        go_on(rank)
        return found

    return survivors(run_job(ranks, 4))


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2))


def turned() -> DeviceMesh:
    return DeviceMesh("cpu", [3, 1, 0, 2])


@pytest.mark.parametrize(
    ("path", "mesh"),
    [full("exchange", turned), longest("peers", square), longest("hierarchical", square)],
)
def test_kill_before_group_creation_is_named(path: str, mesh: Any) -> None:
    for name, message in job(path, die, warm=False, mesh=mesh):
        assert name == "GroupAgreementError"
        assert message.startswith("MP501: rank 1 did not reach the first reduction")


@pytest.mark.parametrize(
    "moment", [pytest.param("create_members_only", marks=pytest.mark.dist), "warm_up"]
)
def test_kill_during_group_creation_is_named(moment: str) -> None:
    """After the vote: all have said that they come."""

    def prepare() -> None:
        setattr(_join, moment, dies)

    found = job("exchange", prepare, warm=False, mesh=turned)
    for name, message in found:
        assert name == "GroupCreationError"
        assert "the group of ranks 3, 1, 0, 2 was agreed on but could not be created" in message
        # With it may be named who still waits for it.
        assert re.search(r"ranks? (\d, )*1(, \d)* (still missing \d\.\d s|did not finish)", message)


def inside(path: str) -> None:
    if path == "exchange":
        # Between its all-to-all and its all-gather.
        _exchange.fold = dies  # type: ignore[assignment]
    elif path == "hierarchical":
        # After all that is sent inside nodes.
        _hierarchical.finish_partials = dies  # type: ignore[assignment]
    else:
        threading.Timer(0.2, die).start()


@pytest.mark.parametrize(
    "path", ["peers", "exchange", pytest.param("hierarchical", marks=pytest.mark.dist)]
)
def test_kill_inside_a_collective_is_named(path: str) -> None:
    found = job(path, lambda: inside(path), warm=True, mesh=square)
    for name, message in found:
        assert name == ("PeerTimeoutError" if path == "peers" else "CollectiveError")
        assert "rank 1 has ended" in message, message


def stop_serving(store: list[dist.TCPStore]) -> None:
    """As after Ctrl-C: the interpreter takes the store and the connections down, and then ends."""
    store.clear()
    dist.destroy_process_group()
    threading.Event().wait(1.0)
    os._exit(1)


@pytest.mark.parametrize("how", ["killed", "interrupted"])
@pytest.mark.parametrize(
    "path", ["exchange", *(pytest.param(p, marks=pytest.mark.dist) for p in ("auto", "halving"))]
)
def test_rank_that_takes_the_store_with_it_is_named(how: str, path: str) -> None:
    def ranks(rank: int) -> tuple[str, str]:
        store = join_over_tcp(rank, 3)
        with meshplan.installed(timeout=NEVER, path=path):
            mesh = init_device_mesh("cpu", (3,))
            right_bits(mesh)
            dist.barrier()
            if rank == 0:
                die() if how == "killed" else stop_serving(store)
            found = attempt(lambda: right_bits(mesh))
        # Without a store, a rank that leaves after its own failure is one that has ended.
        arrive("failed")
        wait_for("failed", 2)
        end()
        return found

    outcomes = run_job(ranks, 3, init=False)
    assert outcomes[0].exit_code == (-9 if how == "killed" else 1)
    for name, message in (outcome.value for outcome in outcomes[1:]):
        assert name == ("PeerTimeoutError" if path == "auto" else "CollectiveError")
        assert "rank 0 has ended" in message, message


def test_lost_store_is_why_ranks_on_other_hosts_are_not_named() -> None:
    def ranks(rank: int) -> str:
        _missing.host = lambda: f"host {rank}"
        store = join_over_tcp(rank, 2)
        with meshplan.installed(timeout=NEVER, path="exchange"):
            mesh = init_device_mesh("cpu", (2,))
            right_bits(mesh)
            if rank == 0:
                die()
            _, message = attempt(lambda: right_bits(mesh))
        assert not store
        end()
        return message

    message = run_job(ranks, 2, init=False)[1].value
    assert (
        "the store did not answer, so no rank can be asked, and none on this host has ended"
        in message
    )


class TestMessages(TestCase):
    def test_backend_failure_is_reported(self) -> None:
        def ranks(rank: int) -> str:
            _missing._SECONDS = 2.0
            with meshplan.installed(path="exchange", timeout=60.0):
                mesh = init_device_mesh("cpu", (3,))
                right_bits(mesh)
                if rank == VICTIM:
                    die()
                _, message = attempt(lambda: right_bits(mesh))
            end()
            message = re.sub(r"waited \d+\.\d s", "waited N s", message)
            return re.sub(
                r"failed on rank \d: .*?; ", "failed on rank N: (what gloo says); ", message
            )

        outcomes = run_job(ranks, 3)
        assert outcomes[0].value == outcomes[2].value, outcomes
        self.assertExpectedInline(
            outcomes[0].value,
            """MP504: a reduction over default group 0 of 3 ranks: 0, 1, 2 failed on rank N: (what gloo says); rank 1 has ended. This rank waited N s. These groups are unusable: call meshplan.shutdown() and destroy_process_group(), then init_process_group() with the ranks that are left""",
        )

    def test_loss_of_the_store_is_reported(self) -> None:
        def ranks(rank: int) -> str:
            store = join_over_tcp(rank, 3)
            if rank == 0:
                die()
            port = Path(os.environ["MESHPLAN_TEST_STORE"]).with_name("port").read_text()
            with suppress(ConnectionError):
                while True:
                    socket.create_connection(("127.0.0.1", int(port))).close()
                    time.sleep(0.05)
            with meshplan.installed(timeout=NEVER):
                mesh = DeviceMesh("cpu", [2, 0, 1])
                _, message = attempt(lambda: partial_over(mesh).full_tensor())
            assert not store
            end()
            message = re.sub(r"was lost: .*?; ", "was lost: (what the socket says); ", message)
            return re.sub(r":\d+ ", ":(port) ", message)

        outcomes = run_job(ranks, 3, init=False)
        assert outcomes[1].value == outcomes[2].value, outcomes
        self.assertExpectedInline(
            outcomes[1].value,
            """MP503: the store of the default group at 127.0.0.1:(port) was lost: (what the socket says); look whether the process that holds it (torchrun's agent on the first host, or rank 0) has ended""",
        )


@pytest.mark.dist
def test_survivors_exit_cleanly() -> None:
    """With what runs at exit, after ``shutdown`` and without it; nothing is left in shared memory."""
    command = [sys.executable, "-m", "tests.faults.exits"]
    with nothing_stays_in_shared_memory():
        found = capture(command, check=True, cwd=Path(__file__).parents[2])
    lines = sorted(found.stdout.splitlines())
    # Of each path: rank 0 leaves in order, rank 1 is killed, rank 2 only ends, rank 3 raises.
    ends = ("0 exits 0", "1 exits -9", "2 exits 0", "3 exits 1")
    assert lines == sorted(f"{path} {text}" for path in ("exchange", "two_shot") for text in ends)
