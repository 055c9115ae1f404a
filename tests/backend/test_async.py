"""Asynchronous reductions of the backend: order, overlap, errors and the life of the thread."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import meshplan
import meshplan.backend
from meshplan.collectives._lanes import OrderedThread
from tests.processes import arrive, run_ranks, start_all_reduce, wait_for

pytestmark = pytest.mark.processes


def thread_names() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("meshplan 0")]


def overlap(rank: int) -> list[Any]:
    """The caller goes on while another rank is late."""
    x = torch.full((1000,), float(rank))
    dist.all_reduce(torch.zeros(1))
    if rank == 1:
        wait_for("went on", 1)
    work = start_all_reduce(x)
    early = rank == 0 and work.is_completed()
    if rank == 0:
        arrive("went on")
    work.wait()
    return [early, x[0].item(), work.is_completed()]


def test_the_caller_goes_on_while_a_rank_is_late() -> None:
    assert run_ranks(overlap, 2, backend="meshplan") == [[False, 1.0, True]] * 2


def version_of_a_late_result(rank: int) -> list[int]:
    """How often the version of a result grows: when it is issued, and until it is there."""
    grown = []
    for number in range(3):  # The later ones repeat the first.
        x, out = torch.ones(6), torch.empty(3)
        calls = [
            (x, lambda x=x: start_all_reduce(x)),
            (out, lambda x=x, out=out: dist.reduce_scatter_single(out, x, async_op=True)),
        ]
        for name, (written, call) in enumerate(calls):
            before = written._version
            if rank == 1:
                wait_for(f"issued {number} {name}", 1)
            work = call()
            issued = written._version
            if rank == 0:
                arrive(f"issued {number} {name}")
            work.wait()
            grown += [issued - before, written._version - issued]
    return grown


def test_a_version_grows_when_the_reduction_is_issued() -> None:
    assert run_ranks(version_of_a_late_result, 2, backend="meshplan") == [[1, 0] * 6] * 2


def checkpoint_results(rank: int) -> list[Any]:
    """Steps of a checkpoint that saves the results of reductions, as torchtitan's does."""
    names = torch.ops._c10d_functional
    saved = (names.reduce_scatter_tensor.default, names.all_reduce.default)
    old_name = "reduce_scatter_tensor"
    reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or getattr(funcol, old_name)
    ran: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator in saved:
            ran[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def reduce(x: Tensor) -> Tensor:
        shard = reduce_scatter(x.detach(), "sum", 0, dist.group.WORLD)
        return (x * funcol.all_reduce(x.detach(), "sum", dist.group.WORLD)).sum() * shard.sum()

    gradients = []
    for step in range(3):
        x = (torch.arange(8.0) * (rank + 1) + step).requires_grad_()
        context = partial(create_selective_checkpoint_contexts, policy)
        checkpoint(reduce, x, use_reentrant=False, context_fn=context).backward()
        assert x.grad is not None
        gradients.append(x.grad.tolist())
    return [dict(ran), gradients]


def test_selective_checkpoints_repeat_no_reduction() -> None:
    found = run_ranks(checkpoint_results, 2, backend="meshplan")
    assert found == run_ranks(checkpoint_results, 2, backend="gloo")
    # Torch 2.11 calls the policy for saved results, too.
    assert [ran[False] for ran, _ in found] == [6] * 2


def keep_order(rank: int) -> list[float]:
    """Each reduction reads what the one before it has written, and no one waits."""
    x = torch.ones(1) * (rank + 1)
    works = [start_all_reduce(x) for _ in range(20)]
    out = torch.empty(1)
    last = dist.reduce_scatter_single(out, x.expand(2).contiguous() * 0 + 1, async_op=True)
    # Synchronous, and still behind all of them.
    dist.all_reduce(x)
    finish([*works, last])
    return [x.item(), out.item()]


def test_reductions_run_in_the_order_of_their_calls() -> None:
    assert run_ranks(keep_order, 2, backend="meshplan") == [[3.0 * 2**20, 2.0]] * 2


def call_functions(rank: int) -> list[float]:
    """A function and a redistribution over the group, while its reductions wait for a late rank."""
    x, y, z = (torch.full((4,), float(10**i)) for i in range(3))
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    if rank == 0:
        wait_for("issued", 1)
        # Not needed for the result: rank 1 comes to the function.
        time.sleep(0.3)
    works = [start_all_reduce(one) for one in (x, y)]
    if rank == 1:
        arrive("issued")
    else:
        finish(works)
    meshplan.deterministic_all_reduce(z)
    with meshplan.installed():
        total = DTensor.from_local(z, mesh, [Partial()]).full_tensor()
    finish(works)
    return [one[0].item() for one in (x, y, z, total)]


def finish(works: list[Any]) -> None:
    for work in works:
        work.wait()


def test_functions_have_an_order_of_their_own() -> None:
    assert run_ranks(call_functions, 2, backend="meshplan") == [[2.0, 20.0, 200.0, 400.0]] * 2


def disagree(rank: int) -> list[Any]:
    x = torch.ones(3 + rank)
    work = start_all_reduce(x)
    future = work.get_future()
    try:
        work.wait()
    except meshplan.MeshplanError as error:
        found = [error.code, type(work.exception()) is type(error)]
        try:
            future.wait()
        except RuntimeError as again:
            found.append("MP703" in str(again))
        return found
    return []


def test_errors_reach_wait_and_the_future() -> None:
    assert run_ranks(disagree, 2, backend="meshplan") == [["MP703", True, True]] * 2


def end_thread(rank: int) -> list[list[str]]:
    before = thread_names()
    work = start_all_reduce(torch.ones(1))
    work.wait()
    during = thread_names()
    del work
    dist.destroy_process_group()
    deadline = time.monotonic() + 200
    while thread_names() and time.monotonic() < deadline:
        time.sleep(0.01)
    after = thread_names()
    os.environ["MASTER_PORT"] = "0"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return [before, during, after]


def test_the_thread_starts_with_the_first_call_and_ends_with_the_group() -> None:
    found = run_ranks(end_thread, 2, backend="meshplan")
    assert found == [[[], ["meshplan 0"], []]] * 2


def fork(rank: int) -> str:
    start_all_reduce(torch.ones(1)).wait()
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=20))  # type: ignore[union-attr]
            found = "no error"
        except Exception as error:
            found = str(error)[:5] + " fork" * ("is a fork of process" in str(error))
        os.write(writer, found.encode())
        os._exit(0)
    os.wait()
    found = os.read(reader, 100).decode()
    dist.all_reduce(torch.ones(1))
    return found


def test_a_forked_process_is_refused() -> None:
    assert run_ranks(fork, 2, backend="meshplan") == ["MP503 fork"] * 2


def test_a_synchronous_job_waits_for_those_before_it() -> None:
    thread, done = OrderedThread("test"), []
    gate = threading.Event()

    def wait() -> None:
        gate.wait(30)
        done.append("async")

    future = thread.submit(wait)
    threading.Timer(0.2, gate.set).start()
    thread.run(lambda: done.append("sync"))
    assert done == ["async", "sync"]
    future.result(30)
    assert thread.run(threading.current_thread) is threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 / 0)
    assert thread.submit(lambda: 5).result(30) == 5


def test_what_callbacks_submit_runs_before_what_was_submitted_later() -> None:
    """The same on every rank: else different calls would be paired."""
    thread, done = OrderedThread("test"), []
    issued, finished = threading.Event(), threading.Event()

    def first() -> None:
        issued.wait(30)
        done.append("first")

    def callback(_: object) -> None:
        thread.submit(lambda: done.append("submitted")).result(30)
        thread.run(lambda: done.append("run"))
        finished.set()

    future = thread.submit(first)
    future.add_done_callback(callback)
    later = thread.submit(lambda: done.append("later"))
    issued.set()
    # Idle only once the callbacks have returned.
    thread.run(lambda: done.append("last"))
    later.result(30)
    assert finished.is_set()
    assert done == ["first", "submitted", "run", "later", "last"]
    # Behind its end, a callback runs where it is added.
    names: list[str] = []
    future.add_done_callback(lambda _: names.append(threading.current_thread().name))
    assert names == [threading.current_thread().name]


def reduce_in_callbacks(rank: int) -> list[float]:
    """As PowerSGD does: a callback reduces and waits, while other reductions are issued."""
    group: Any = dist.group.WORLD
    found = []

    def again(future: Any) -> Any:
        (x,) = future.wait()
        y = x * 10
        nested = start_all_reduce(y)
        return nested.get_future().wait()[0]

    futures = []
    for number in range(1, 5):
        work = start_all_reduce(torch.full((3,), float(number)))
        futures.append(work.get_future().then(again))
        if rank == number % 2:
            time.sleep(0.05)
    found = [future.wait()[0].item() for future in futures]
    x = torch.ones(1)
    group.allreduce([x]).wait()
    return [*found, x.item()]


def test_callbacks_reduce_and_wait() -> None:
    expected = [40.0, 80.0, 120.0, 160.0, 2.0]
    assert run_ranks(reduce_in_callbacks, 2, backend="meshplan") == [expected] * 2


def sleep_while_waiting(rank: int) -> float:
    """How often per second a rank gives up its core while it waits for a late one."""
    x = torch.ones(10)
    for _ in range(3):
        dist.all_reduce(x)
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    if rank == 0:
        arrive("waits")
    else:
        wait_for("waits", 1)
        time.sleep(1.5)
    dist.all_reduce(x)
    switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    return switches / (time.monotonic() - begun)


def test_a_rank_that_waits_sleeps() -> None:
    first, _ = run_ranks(sleep_while_waiting, 2, backend="meshplan")
    # Every second millisecond; one that polled came to 10000 on an idle machine.
    assert first < 1500
