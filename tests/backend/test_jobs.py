"""What a training job does besides reductions, over the backend: checkpoints, restarts, graphs."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.checkpoint import checkpoint

import meshplan
import meshplan.backend
from tests.backend.native_calls import count_native_reductions
from tests.backend.training import STEPS, WORLD, build, read_shards, resume, summand, train
from tests.processes import run_ranks, start_all_reduce
from tests.programs import torchrun

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]


def contract_sum(seed: int = 0) -> Tensor:
    return meshplan.reduce_leaves([summand(r, seed) for r in range(WORLD)], "sum", [WORLD])


def create_again(rank: int) -> list[list[bool]]:
    """Default groups one after another, whose ranks have other numbers each time."""
    store = dist.FileStore(os.environ["MESHPLAN_TEST_STORE"], WORLD)
    found = []
    for number in range(4):
        place = (rank + number) % WORLD
        backend = "cpu:gloo,cuda:gloo" if number == 2 else "meshplan"
        dist.init_process_group(
            backend, store=dist.PrefixStore(str(number), store), rank=place, world_size=WORLD
        )
        half = dist.new_group(range(number % 2, WORLD, 2))
        x, y = summand(place), summand(place)
        work = start_all_reduce(x)
        dist.all_reduce(y)
        right = [torch.equal(y, contract_sum())] if number != 2 else [True]
        members = dist.get_process_group_ranks(half) if place % 2 == number % 2 else []
        if members:
            z = torch.ones(3)
            dist.all_reduce(z, group=half)
            right.append(z[0].item() == len(members))
        # The last one is destroyed before the first is waited for.
        dist.destroy_process_group()
        work.wait()
        found.append([*right, torch.equal(x, y)])
    return found


def test_default_groups_are_created_again_in_one_process() -> None:
    for found in run_ranks(create_again, WORLD, init=False):
        assert all(all(one) for one in found), found


def exchange_objects(rank: int) -> list[Any]:
    """Between two reductions before their waits."""
    x = summand(rank)
    works = [start_all_reduce(x)]
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, {"rank": rank})
    sent = [{"from": 2}] if rank == 2 else [None]
    dist.broadcast_object_list(sent, src=2)
    received: list[Any] = [None]
    dist.scatter_object_list(received, list("abcd") if rank == 0 else None, src=0)
    all_of: list[Any] | None = [None] * WORLD if rank == 1 else None
    dist.gather_object(rank * 2, all_of, dst=1)
    passed: list[Any] = ["to rank 3"] if rank == 0 else [None]
    if rank == 0:
        dist.send_object_list(passed, dst=3)
    if rank == 3:
        dist.recv_object_list(passed, src=0)
    works.append(start_all_reduce(x))
    for work in works:
        work.wait()
    right = torch.equal(x, contract_sum() * WORLD)
    return [gathered, sent, received, all_of, passed, right]


def test_objects_travel_between_reductions() -> None:
    found = run_ranks(exchange_objects, WORLD, backend="meshplan")
    for rank, (gathered, sent, received, all_of, passed, right) in enumerate(found):
        assert gathered == [{"rank": r} for r in range(WORLD)]
        assert (sent, received) == ([{"from": 2}], ["abcd"[rank]])
        assert all_of == ([0, 2, 4, 6] if rank == 1 else None)
        assert passed == (["to rank 3"] if rank in (0, 3) else [None])
        assert right


def compile_reductions(backend: str, rank: int) -> list[bool]:
    world, generator = dist.group.WORLD, torch.Generator().manual_seed(1)
    weight = torch.randn(10, 10, generator=generator)

    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole = funcol.all_reduce(x, "sum", world)
        shard = funcol.reduce_scatter_tensor(x * 2, "sum", 0, world)
        parts = funcol.all_reduce_coalesced([x * 4, (x * 8)[:5]], "sum", world)
        return whole @ weight, shard + 0, torch.cat(parts)

    x = summand(rank)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.dirname(os.environ["MESHPLAN_TEST_STORE"])
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    with count_native_reductions() as counts, warnings.catch_warnings():
        # Of modules of torch that the compiler imports.
        warnings.simplefilter("ignore", DeprecationWarning)
        found = [tensor for _ in range(2) for tensor in compiled(x, weight)]
    total = contract_sum()
    mine = (total * 2).chunk(WORLD)[rank]
    expected = [total @ weight, mine, torch.cat([total * 4, (total * 8)[:5]])] * 2
    same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
    return [*same, not any(counts.values())]


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_reductions_have_the_bits_of_the_contract(backend: str) -> None:
    run = partial(compile_reductions, backend)
    assert run_ranks(run, WORLD, backend="meshplan") == [[True] * 7] * WORLD


class Reducing(torch.nn.Module):
    """A layer with a reduction in its forward and in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(funcol.all_reduce(self.linear(x), "sum", dist.group.WORLD))


def recompute(rank: int) -> list[Any]:
    found = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        layer, x = Reducing(), summand(rank).requires_grad_()
        meshplan.clear_report()
        with count_native_reductions() as counts:
            out = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
            assert isinstance(out, Tensor)
            out.square().sum().backward()
        reductions = sum(entry["count"] for entry in meshplan.report().entries)
        grads = [x.grad, *(parameter.grad for parameter in layer.parameters())]
        found.append((grads, reductions, sum(counts.values())))
    plain, *others = found
    return [
        [torch.equal(a, b) for a, b in zip(grads, plain[0], strict=True)] + [reductions, native]
        for grads, reductions, native in others
    ]


def test_recomputed_activations_have_the_same_bits() -> None:
    """Forward, the forward again, and backward: three reductions instead of two."""
    for found in run_ranks(recompute, WORLD, backend="meshplan"):
        assert found == [[True, True, True, 3, 0]] * 2


def bits(tensors: list[Tensor]) -> list[Any]:
    return [tensor.view(torch.int32).tolist() for tensor in tensors]


def save_and_resume(rank: int) -> list[list[bool]]:
    """Each time in a default group of its own."""
    folder = os.path.dirname(os.environ["MESHPLAN_TEST_STORE"])
    store = dist.FileStore(os.environ["MESHPLAN_TEST_STORE"], WORLD)
    equal: list[list[bool]] = []
    saved: list[Tensor] = []
    expected: list[Tensor] = []
    for name in ("first", "now", "later"):
        own = dist.PrefixStore(name, store)
        dist.init_process_group("meshplan", store=own, rank=rank, world_size=WORLD)
        model, optimizer = build()
        if name == "first":
            train(model, optimizer, range(3))
            saved = read_shards(model, optimizer)
            weights, state = get_state_dict(model, optimizer)
            whole = {"model": weights, "optimizer": state}
            dcp.save(whole, checkpoint_id=f"{folder}/now")
            pending = dcp.async_save(whole, checkpoint_id=f"{folder}/later")
            # While the other one is written.
            train(model, optimizer, range(3, 6))
            pending.result()
            expected = read_shards(model, optimizer)
        else:
            resume(model, optimizer, f"{folder}/{name}")
            right = [read_shards(model, optimizer)]
            train(model, optimizer, range(3, 6))
            right.append(read_shards(model, optimizer))
            equal.append(
                [bits(a) == bits(b) for a, b in zip(right, (saved, expected), strict=True)]
            )
        dist.barrier()
        dist.destroy_process_group()
    return equal


def test_a_job_resumed_in_another_group_has_the_bits_of_one_that_went_on() -> None:
    for found in run_ranks(save_and_resume, WORLD, init=False):
        assert found == [[True] * 2] * 2


def train_without_a_death(_: int) -> list[Any]:
    model, optimizer = build()
    train(model, optimizer, range(STEPS))
    return bits(read_shards(model, optimizer))


@pytest.mark.full
def test_a_job_that_torchrun_restarts_has_the_bits_of_one_without_a_death(tmp_path: Path) -> None:
    words = "--max-restarts", "1", "-m", "tests.backend.training", tmp_path
    # Over gloo as well: in the agent's store, groups find addresses of the earlier attempt.
    done = torchrun(WORLD, *words, timeout=600, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "died").exists()
    expected = run_ranks(train_without_a_death, WORLD, backend="meshplan")
    for rank, shards in enumerate(expected):
        attempt, saved, found = torch.load(tmp_path / f"rank{rank}.pt")
        assert (attempt, saved) == ("1", [0, 1, 2])
        assert bits(found) == shards
