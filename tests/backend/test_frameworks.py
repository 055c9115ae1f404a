"""Libraries that know nothing of meshplan, over its backend; and the DTensor plugin over it."""

from __future__ import annotations

import re
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import meshplan
import meshplan.backend
from meshplan.errors import FallbackRefusedError
from tests.processes import run_ranks, warm_compiler

pytestmark = pytest.mark.processes


def train_strictly(_: int) -> bool:
    """No warning and no error of the plugin for libraries whose groups are of the backend."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    with meshplan.installed(strict=True):
        sharded = nn.Linear(8, 8)
        fully_shard(sharded, mesh=mesh)
        sharded(torch.ones(2, 8)).sum().backward()
        replicated = DistributedDataParallel(nn.Linear(8, 8), process_group=mesh.get_group("ddp"))
        replicated(torch.ones(2, 8)).sum().backward()
        # A group of gloo is still reported.
        gloo = dist.new_group(backend="gloo")
        plain = DistributedDataParallel(nn.Linear(8, 8), process_group=gloo)
        with pytest.raises(FallbackRefusedError):
            plain(torch.ones(2, 8)).sum().backward()
    return True


def test_strict_mode_accepts_what_the_backend_reduces() -> None:
    assert run_ranks(train_strictly, 4, backend="meshplan") == [True] * 4


def compile_strictly(_: int) -> list[bool]:
    """DDP and spmd_types, eager and compiled, over groups of the backend and of gloo."""
    spmd = pytest.importorskip("spmd_types")

    def reduces(group: Any, compiled: bool) -> bool:
        def run(x: Tensor) -> Tensor:
            found: Tensor = spmd.all_reduce(x * 2, group, src=spmd.P, dst=spmd.R)
            return found + 1

        torch._dynamo.reset()
        function = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
        with warnings.catch_warnings():
            # Dynamo makes an instance of an autograd function.
            warnings.simplefilter("ignore")
            try:
                return bool((function(torch.ones(3)) == 5).all())
            except Exception as error:
                if not re.search("spmd_types.* is outside the contract", str(error)):
                    raise
                return False

    ours, gloo = dist.new_group(), dist.new_group(backend="gloo")
    with meshplan.installed(strict=True):
        model = DistributedDataParallel(nn.Linear(8, 8), process_group=ours)
        torch.compile(model, backend="aot_eager")(torch.ones(2, 8)).sum().backward()
        return [reduces(group, way) for group in (ours, gloo) for way in (False, True)]


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="its Dynamo passes no group of Python's to spmd_types",
)
def test_strict_mode_accepts_compiled_code_that_the_backend_reduces() -> None:
    warm_compiler()
    found = run_ranks(compile_strictly, 2, backend="meshplan")
    # What spmd_types compiles is not followed; ``coverage`` counts it.
    assert found == [[True, True, False, True]] * 2


def synchronize(x: Tensor) -> Tensor:
    """What dynamo leaves to Python, between two graphs."""
    x = x + 1
    dist.broadcast(x, 0)
    dist.all_reduce(x, async_op=True).wait()  # type: ignore[union-attr]
    dist.barrier()
    return x * 2


def call_below_compiled_code(rank: int) -> tuple[bool, list[float]]:
    """DDP, whose reducer broadcasts from C++ in the second step; and calls of the script."""
    trained = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        run = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            torch.manual_seed(2 * step + rank)
            run(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.detach().view(torch.int32).tolist() for p in model.parameters()])
    with warnings.catch_warnings():
        # Dynamo says what it leaves to Python.
        warnings.simplefilter("ignore")
        found = torch.compile(synchronize, backend="aot_eager")(torch.full((2,), float(rank)))
    return trained[0] == trained[1], found.tolist()


def test_torch_calls_groups_below_compiled_code() -> None:
    warm_compiler()
    assert run_ranks(call_below_compiled_code, 2, backend="meshplan") == [(True, [4.0] * 2)] * 2


def reduce_while_another_thread_compiles(rank: int) -> list[float]:
    """The flag of torch is set for the whole process, on the rank that still compiles."""
    found = []
    for _ in range(3):
        x = torch.full((2,), 1.0 + rank)
        work = dist.all_reduce(x, async_op=True)
        with mock.patch("torch.compiler._is_compiling_flag", rank == 0):
            dist.all_reduce(x.clone())
            work.wait()  # type: ignore[union-attr]
        found += x.tolist()
    return found


def test_a_thread_that_compiles_changes_no_reduction_of_another() -> None:
    run = reduce_while_another_thread_compiles
    assert run_ranks(run, 2, backend="meshplan") == [[3.0] * 6] * 2
