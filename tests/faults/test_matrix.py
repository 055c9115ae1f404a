"""Every fault on every path: each survivor raises in time, and no live rank is named as missing."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import meshplan
from meshplan.errors import MeshplanError
from meshplan.flatten import _missing
from meshplan.topology import Link, Links, Topology
from tests.faults.jobs import NEVER, die, end, join, right_bits, run_job, stop_for
from tests.marks import full, longest
from tests.processes import set_timeout

pytestmark = pytest.mark.processes

SECONDS = 8.0
ODD = 1
FAULTS = ("killed", "stopped", "late", "shape", "contract")
PATHS = ("peers", "exchange", "halving", "hierarchical")
PLANNED = {
    "peers": "exchange,",
    "exchange": "exchange,",
    "halving": "halving,",
    "hierarchical": "in blocks of 2",
}


class Found(NamedTuple):
    """What a rank has seen."""

    name: str
    message: str
    missing: tuple[int, ...]


def world_of(ranks: int, path: str) -> int:
    """Blocks of two ranks each: the hierarchical form needs an even number."""
    return ranks + 1 if path == "hierarchical" else ranks


def mesh_of(world: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (world,))
    # Torch gives groups of mesh axes half an hour, whatever the default group was given.
    set_timeout(timedelta(seconds=SECONDS), mesh.get_group(0))
    return mesh


def reduce(mesh: DeviceMesh, numel: int = 1000) -> None:
    summand = DTensor.from_local(torch.ones(numel), mesh, (Partial(),), run_check=False)
    summand.full_tensor() + 0


def attempt(function: Callable[[], object]) -> Found:
    try:
        function()
    except MeshplanError as error:
        missing = getattr(error, "missing", ())
        if not missing and hasattr(error, "phase"):
            missing = (error.rank,)
        return Found(type(error).__name__, str(error), missing)
    return Found("", "", ())


def fault_on(fault: str, mesh: DeviceMesh, how: dict[str, Any]) -> Found:
    """What the odd rank does."""
    if fault == "killed":
        die()
    if fault == "stopped":
        stop_for(2 * SECONDS)
    if fault == "late":
        time.sleep(2 * SECONDS)
    if fault == "contract":
        other = meshplan.Contract(rounding="node")
        with meshplan.installed(**{**how, "contract": other}):
            return attempt(lambda: reduce(mesh))
    with meshplan.installed(**how):
        return attempt(lambda: reduce(mesh, 1001 if fault == "shape" else 1000))


def prepare(mesh: DeviceMesh, how: dict[str, Any]) -> None:
    """All groups exist: no agreement round is left that could see the fault."""
    with meshplan.installed(**how):
        reduce(mesh)


def check(fault: str, path: str, rank: int, found: Found) -> None:
    assert found.name, (fault, path, rank)
    if fault in ("shape", "contract"):
        assert found.name == "SignatureMismatchError", found
        assert re.search(r"rank 1\b", found.message), found
        return
    if rank == ODD:
        # It came too late: the others have given up.
        assert "(this one)" in found.message or found.missing == (), found
        return
    assert found.name == ("PeerTimeoutError" if path == "peers" else "CollectiveError"), found
    assert found.missing == (ODD,), found
    if fault in ("killed", "stopped") and path != "peers":
        state = "has ended" if fault == "killed" else "is stopped or unreachable"
        assert f"rank 1 {state}" in found.message, found
    elif path != "peers":
        # A rank that is only late: the message calls it a candidate.
        assert "rank 1 did not report it too within" in found.message, found
        assert "or one that still waits for such a rank" in found.message


def run_fault(fault: str, path: str, world: int) -> None:
    nodes = Topology.uniform(world, node_size=2, links=Links(node=Link(1e-7, 1e12), group=0.0))
    how: dict[str, Any] = {"timeout": NEVER, "path": "exchange"}
    if path == "peers":
        how["path"] = "two_shot"
    if path == "halving":
        how["path"] = "halving"
    if path == "hierarchical":
        how["topology"] = nodes

    def ranks(rank: int) -> Found:
        _missing._SECONDS = SECONDS
        mesh = mesh_of(world)
        prepare(mesh, how)
        assert any(PLANNED[path] in entry["planned"] for entry in meshplan.report().entries)
        if rank == ODD:
            found = fault_on(fault, mesh, how)
        else:
            with meshplan.installed(**how):
                found = attempt(lambda: reduce(mesh))
        if fault in ("shape", "contract"):
            with meshplan.installed(**how):
                right_bits(mesh)
            end()
            return found
        end()
        left = [r for r in range(world) if r != ODD]
        if rank != ODD:
            join("fault", left, rank)
            with meshplan.installed(timeout=60.0):
                right_bits(init_device_mesh("cpu", (len(left),)))
            end()
        return found

    outcomes = run_job(ranks, world, collective_timeout=SECONDS)
    for rank, outcome in enumerate(outcomes):
        if rank == ODD and fault == "killed":
            assert outcome.exit_code == -9
            continue
        assert (outcome.failure, outcome.exit_code) == ("", 0), rank
        check(fault, path, rank, outcome.value)


CASES = [
    (longest if ranks == 5 or fault in ("stopped", "late") else full)(ranks, fault, path)
    for ranks, fault, path in itertools.product((3, 5), FAULTS, PATHS)
]


@pytest.mark.parametrize(("ranks", "fault", "path"), CASES)
def test_fault_raises_on_every_survivor(ranks: int, fault: str, path: str) -> None:
    run_fault(fault, path, world_of(ranks, path))
