"""One job on other placements: its certificate is the same over the backend, and not over NCCL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor

import meshplan
from meshplan.run._compare import compare_files
from meshplan.testing import nccl_model, order_sensitive
from tests.cli import meshplan as command
from tests.multinode.cluster import cluster
from tests.multinode.launch import job
from tests.processes import run_ranks
from tests.run.observing import JOBS, observe_ranks, observed, run_script
from tests.test_run_jobs import torchrun

pytestmark = pytest.mark.processes

# The ranks of the mesh in the order of its coordinates, and the host of each rank.
PLACES = (
    ("0 1 2 3", "0 0 0 0"),
    ("0 2 1 3", "0 0 0 1"),
    # Ranks do not ascend along either axis, where torch puts shards by rank.
    ("3 1 2 0", "1 0 1 0"),
)


def run_at(path: Path, mesh: str, ranks: str, hosts: str, backend: str = "meshplan") -> str:
    """Run the job, and return the path of its certificate."""
    variables = {"JOB_MESH": mesh, "JOB_RANKS": ranks, "JOB_HOSTS": hosts}

    def run(rank: int) -> Any:
        host = f"host{hosts.split()[rank]}"
        own = variables | {"RANK": str(rank), "MESHPLAN_HOST": host}
        with mock.patch.dict(os.environ, own):
            found = observed(f"certify={path} every=1")
            run_script("placed")
            return found.finish(None)

    nccl_model.register()
    found = run_ranks(run, 4, backend=backend)[0]["certificate"]
    # Four parameters with two states each.
    assert (found["links"], found["tensors"], found["not_certified"]) == (4, 12, {})
    return str(path)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["2 2", "4"])
def test_placements_have_one_chain_over_the_backend(mesh: str, tmp_path: Path) -> None:
    first, *rest = (
        run_at(tmp_path / str(number), mesh, *place) for number, place in enumerate(PLACES)
    )
    for path, sizes in zip(rest, ("[1, 3]", "[2, 2]"), strict=True):
        text, status = compare_files(first, path)
        assert status == 0, text
        assert f"\ncondition hosts: [4] against {sizes}\nsame: 4 steps, 12 tensors" in text


def test_placements_have_other_chains_over_a_modelled_nccl(tmp_path: Path) -> None:
    paths = [
        run_at(tmp_path / str(number), "4", "0 1 2 3", hosts, backend="nccl_model")
        for number, hosts in enumerate(("0 0 0 0", "0 0 0 1"))
    ]
    text, status = compare_files(*paths)
    assert status == 1
    assert "\ndiffer: first at step 1: parameter 0.bias " in text


def train_by_rank(order: Any, ranks: str) -> None:
    """Each rank has its own summand, whatever its place in the mesh, and both axes are one sum."""
    mesh = DeviceMesh("cpu", torch.tensor([int(one) for one in ranks.split()]).view(2, 2))
    weight: Any = nn.Parameter(distribute_tensor(torch.ones(64), mesh, [Replicate()] * 2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with meshplan.installed(contract=meshplan.Contract(order=order)):
        for step in range(3):
            local = weight.to_local(grad_placements=[Partial()] * 2)
            own = order_sensitive(64, rank=dist.get_rank(), world_size=4, seed=step)
            (local * own).sum().backward()
            weight.grad = weight.grad.redistribute(mesh, [Replicate()] * 2)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.full
@pytest.mark.parametrize("order", ["tree", "exact"])
def test_data_dealt_by_rank_has_one_chain_under_the_exact_order_only(
    order: str, tmp_path: Path
) -> None:
    paths = [tmp_path / str(number) for number in range(len(PLACES))]
    for path, (ranks, _) in zip(paths, PLACES, strict=True):

        def train(*_: Any, ranks: str = ranks) -> None:
            train_by_rank(order, ranks)

        report = observe_ranks(train, 4, f"certify={path} every=1")[1]
        assert report["certificate"]["links"] == 3
    for path in paths[1:]:
        text, status = compare_files(str(paths[0]), str(path))
        assert status == (order == "tree"), text


@pytest.mark.dist
def test_one_host_and_two_have_one_chain(tmp_path: Path) -> None:
    """By the command and by the variable; the hosts are namespaces where the kernel allows it."""
    whole = tmp_path / "whole"
    options = ("--every", "1", "--backend", "meshplan", "--certify", str(whole))
    done = torchrun(tmp_path, "placed", 4, *options, JOB_MESH="2 2", JOB_RANKS="0 1 2 3")
    assert done.status == 0, done.errors
    with cluster(2) as hosts:
        for number, ranks in enumerate(("0 1 2 3", "3 1 2 0")):
            path = tmp_path / str(number)
            env = {"JOB_MESH": "2 2", "JOB_RANKS": ranks}
            env["MESHPLAN_RUN"] = f"every=1 backend=meshplan certify={path}"
            with job(hosts, str(JOBS / "placed"), (3, 1), env=env) as started:
                assert not any(started.wait(600)), started.tails()
            status, out, errors = command("compare", str(whole), str(path))
            assert "\ncondition hosts: [4] against [1, 3]\nsame: 4 steps, 12 tensors" in out, out
            assert (status, errors) == (0, "")
