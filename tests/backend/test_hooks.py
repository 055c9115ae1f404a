"""Whoever takes a future or a list of works: DDP's hooks, coalescing, sequence numbers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
)
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel

import meshplan
import meshplan.backend
from tests.backend.native_calls import count_native_reductions
from tests.processes import run_ranks, start_all_reduce
from tests.refusals import refusal

pytestmark = pytest.mark.processes
RANKS = 3


def then_double(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook of a user: two reductions, chained by futures."""
    first = start_all_reduce(bucket.buffer(), group=group)

    def again(future: Any) -> Tensor:
        (total,) = future.value()
        dist.all_reduce(total, group=group)
        result: Tensor = total
        return result

    return first.get_future().then(again)


# Torch compares annotations with types, and here they are strings.
then_double.__annotations__ = {
    "bucket": dist.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}


def register(name: str, model: DistributedDataParallel) -> None:
    builtin = dist.BuiltinCommHookType.__members__
    if name in builtin:
        model._register_builtin_comm_hook(builtin[name])
    elif name == "then_double":
        model.register_comm_hook(None, then_double)
    elif name == "power_sgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(None, getattr(default_hooks, name))


def train(name: str, rank: int) -> tuple[bool, dict[str, int]]:
    """Whether the gradients of all ranks are equal after four steps, and what ran natively."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)), bucket_cap_mb=0.001
    )
    register(name, model)
    torch.manual_seed(rank + 1)
    with count_native_reductions() as counts:
        for _ in range(4):
            model.zero_grad()
            (model(torch.randn(8, 16)) * 3.0**rank).square().sum().backward()
    same = True
    for parameter in model.parameters():
        assert parameter.grad is not None
        found = [torch.empty_like(parameter) for _ in range(RANKS)]
        dist.all_gather(found, parameter.grad)
        same = same and all(torch.equal(one, found[0]) for one in found)
        same = same and bool(parameter.grad.isfinite().all()) and bool(parameter.grad.any())
    return same, dict(counts)


def test_hooks_of_ddp_reduce_under_the_contract() -> None:
    hooks = ("ALLREDUCE", "allreduce_hook", "fp16_compress_hook", "power_sgd", "then_double")

    def ranks(rank: int) -> dict[str, tuple[bool, dict[str, int]]]:
        return {name: train(name, rank) for name in hooks}

    assert run_ranks(ranks, RANKS, backend="meshplan") == [dict.fromkeys(hooks, (True, {}))] * RANKS


def compress_natively(rank: int) -> str:
    return refusal(RuntimeError, train, "FP16_COMPRESS", rank)


def test_the_compressing_hook_of_native_code_requires_a_future_of_native_code() -> None:
    """A limit of torch: Python's futures have no type. It is an error, and no wrong number."""
    for found in run_ranks(compress_natively, RANKS, backend="meshplan"):
        assert "ProcessGroup::allreduce should return TensorList" in found


def leaves() -> list[Tensor]:
    return [
        torch.randn(60, generator=torch.Generator().manual_seed(r)) * 9**r for r in range(RANKS)
    ]


def coalesce(rank: int) -> list[str]:
    """With and without ``async_ops`` and a device, over every collective that torch coalesces."""
    # Torch 2.13 has deprecated two names, which other versions need.
    warnings.simplefilter("ignore", FutureWarning)
    whole, wrong = meshplan.reduce_leaves(leaves(), "sum", [RANKS]), []
    for is_async, device in itertools.product((False, True), (None, torch.device("cpu"))):
        how: Any = {"async_ops": is_async, "device": device}
        parts = list(leaves()[rank].split(7))
        outs = [torch.empty(10), torch.empty(10)]
        halves = leaves()[rank].view(RANKS, 2, 10).transpose(0, 1)
        gathered = [torch.empty(RANKS), torch.empty(2 * RANKS)]
        with count_native_reductions() as counts:
            with _coalescing_manager(**how) as reduced:
                for part in parts:
                    dist.all_reduce(part)
            with _coalescing_manager(**how) as scattered:
                for out, half in zip(outs, halves, strict=True):
                    dist.reduce_scatter_tensor(out, half.reshape(-1))
            with _coalescing_manager(**how) as moved:
                for i, out in enumerate(gathered):
                    dist.all_gather_into_tensor(out, torch.full((i + 1,), float(rank)))
            for manager in (reduced, scattered, moved) if is_async else ():
                manager.wait()
        found: dict[str, tuple[Tensor, Tensor]] = {
            "all_reduce": (torch.cat(parts), whole),
            "reduce_scatter": (torch.cat(outs), whole.chunk(RANKS)[rank]),
            "all_gather": (gathered[1], torch.arange(RANKS).repeat_interleave(2).float()),
        }
        wrong += [f"{how} {k}" for k, (a, b) in found.items() if not torch.equal(a, b)]
        wrong += list(counts)
    return wrong


def test_coalesced_collectives_have_the_bits_of_the_contract() -> None:
    assert run_ranks(coalesce, RANKS, backend="meshplan") == [[]] * RANKS


def take_futures(rank: int) -> list[Any]:
    """Each kind of work has a future whose value is what was written."""
    warnings.simplefilter("ignore", FutureWarning)
    x, out = leaves()[rank], torch.empty(20)
    lengths = [30, 0, 30]
    uneven = torch.empty(lengths[rank])
    calls: tuple[Callable[[], Any], ...] = (
        lambda: dist.all_reduce(x.clone(), async_op=True),
        lambda: dist.reduce(x.clone(), 1, async_op=True),
        lambda: dist.reduce_scatter_tensor(out, x, async_op=True),
        lambda: dist.reduce_scatter(uneven, list(x.split(lengths)), async_op=True),
    )
    whole = meshplan.reduce_leaves(leaves(), "sum", [RANKS])
    expected = [
        whole,
        whole if rank == 1 else x,
        whole.chunk(RANKS)[rank],
        whole.split(lengths)[rank],
    ]
    found = []
    for call, total in zip(calls, expected, strict=True):
        work = call()
        (value,) = work.get_future().then(lambda future: future.value()).wait()
        found.append(torch.equal(value, total))
        found.append(work.is_completed() and work.is_success() and work.wait())
    return found


def test_futures_hold_what_was_written() -> None:
    assert run_ranks(take_futures, RANKS, backend="meshplan") == [[True] * 8] * RANKS


def fail_in_backward(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    calls = lambda: dist.all_reduce(torch.ones(3)), lambda: model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"(?s)MP703.*float32\[3\]"):
        calls[rank]()


def test_reduction_that_fails_ends_the_backward_with_its_error() -> None:
    """DDP's reducer is C++: what Python sets as a future's exception is a value there."""
    run_ranks(fail_in_backward, 2, backend="meshplan")


def count_sequence(_: int) -> list[int]:
    """Torch's debug mode compares these numbers between ranks."""
    group: Any = dist.group.WORLD
    numbers = [group._get_sequence_number_for_group()]
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
        numbers.append(group._get_sequence_number_for_group())
    dist.barrier()
    dist.broadcast(torch.ones(2), 0)
    numbers.append(group._get_sequence_number_for_group())
    return [b - a for a, b in itertools.pairwise(numbers)]


def test_sequence_numbers_count_every_collective() -> None:
    plain = run_ranks(count_sequence, 2, backend="gloo")
    assert run_ranks(count_sequence, 2, backend="meshplan") == plain
