"""The backend on a GPU. Run by ``make test-gpu``; skipped where there is none.

NCCL refuses two ranks on one GPU. There, ranks reduce through the memory that they share, over gloo,
or over a backend that carries CUDA tensors through the host; NCCL is inside groups of one rank.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import meshplan
from meshplan._torch.process_group import PythonProcessGroup
from meshplan.definition import reduce_leaves
from tests.devices import have_equal_bits
from tests.inputs import draw_leaves
from tests.processes import run_ranks, start_all_reduce
from tests.programs import load_script
from tests.test_gpu import gpus, ready

COUNT = gpus()
MISSING = [name for name in ("numpy", "networkx") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(MISSING), reason=f"the backend needs {', '.join(MISSING)}"),
    pytest.mark.skipif(COUNT == 0, reason="no GPU"),
    pytest.mark.timeout(600),
]
two_gpus = pytest.mark.skipif(COUNT < 2, reason="NCCL refuses two ranks on one GPU; one GPU here")
NUMEL = 50_004
# Some seconds on the stream: longer than the other process can keep the GPU.
LONG = 6_000_000_000
SHORT = 100_000_000


class HostGroup(PythonProcessGroup):
    """Carries CUDA tensors through the host, over gloo, and makes the host wait."""

    def __init__(self, made: Any, _: object = None) -> None:
        super().__init__(made.group_rank, made.group_size, made.store, made.timeout)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        there = [one.cpu() for one in tensors]
        work = self.inner.allreduce(there, opts)
        work.wait()
        for one, found in zip(tensors, there, strict=True):
            one.copy_(found)
        return work

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        there = output.cpu()
        work = self.inner._allgather_base(there, tensor.cpu())
        work.wait()
        output.copy_(there)
        return work

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            work = self.all_gather_single(output, tensor, opts)
        return work

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, come: Any, go: Any, opts: Any = None
    ) -> Any:
        there = output.cpu()
        work = self.inner.alltoall_base(there, tensor.cpu(), come, go)
        work.wait()
        output.copy_(there)
        return work

    alltoall_base = all_to_all_single


def backend_group(inner: str, path: str | None = None) -> Any:
    """A group of all ranks; ``through_host`` is the class above."""
    # Where numpy is missing, this module is imported, too.
    import meshplan.backend

    if inner == "through_host" and inner not in dist.Backend.backend_list:
        dist.Backend.register_backend(inner, HostGroup, True, ["cpu", "cuda"])
    options = meshplan.BackendOptions(inner=inner, path=path, strict=path is not None)
    return dist.new_group(backend="meshplan", pg_options=options)


def leaves_of(ranks: int, seed: int = 0) -> list[Tensor]:
    return draw_leaves(ranks, NUMEL, seed=seed)


def sum_of(leaves: list[Tensor], op: Any = "sum") -> Tensor:
    return reduce_leaves(leaves, op, (len(leaves),))


def wrong_results(rank: int, ranks: int, group: Any) -> list[str]:
    """Which kinds of reductions have other bits than the contract's."""
    leaves = leaves_of(ranks)
    total, wrong = sum_of(leaves), []

    def check(name: str, found: Tensor, expected: Tensor) -> None:
        if not have_equal_bits(found, expected):
            wrong.append(name)

    for turn in range(3):
        x = leaves[rank].cuda()
        dist.all_reduce(x, group=group)
        check(f"all_reduce {turn}", x, total)
        x = leaves[rank].cuda()
        work = start_all_reduce(x, dist.ReduceOp.AVG, group=group)
        work.wait()
        check(f"async average {turn}", x, sum_of(leaves, "avg"))
        if turn == 0:
            check("result", work.result()[0], sum_of(leaves, "avg"))
        mine = leaves[rank].cuda()
        out = torch.empty(NUMEL // ranks, device="cuda")
        dist.reduce_scatter_tensor(out, mine, group=group)
        check(f"reduce_scatter_tensor {turn}", out, total.view(ranks, -1)[rank])
        x = leaves[rank].cuda()
        dist.reduce(x, dist.get_global_rank(group, ranks - 1), group=group)
        check(f"reduce {turn}", x, total if rank == ranks - 1 else leaves[rank])
        factor = 0.3 + rank
        x = leaves[rank].cuda()
        dist.all_reduce(x, dist._make_nccl_premul_sum(factor), group=group)
        scaled = [leaf * torch.tensor(0.3 + r) for r, leaf in enumerate(leaves)]
        check(f"premul {turn}", x, sum_of(scaled))
        pair = [leaves[rank].cuda() for _ in range(2)]
        with dist.distributed_c10d._coalescing_manager(group):
            for one in pair:
                dist.all_reduce(one, group=group)
        check(f"coalesced {turn}", torch.cat(pair), total.repeat(2))
    return wrong


def wrong_orders(rank: int, ranks: int, group: Any) -> list[str]:
    """Which waits between streams are missing; each of them is held up."""
    leaves = leaves_of(ranks)
    total, wrong = sum_of(leaves), []
    other = torch.cuda.Stream()
    mine = leaves[rank].cuda()
    torch.cuda.synchronize()
    for turn in range(3):
        # The input is written late.
        x = torch.zeros(NUMEL, device="cuda")
        torch.cuda._sleep(SHORT)
        x.copy_(mine)
        work = start_all_reduce(x, group=group)
        # Another stream waits, and reads.
        with torch.cuda.stream(other):
            work.wait()
            found = x * 1.0
        torch.cuda.synchronize()
        if not have_equal_bits(found, total):
            wrong.append(f"other stream {turn}")
        # The input is let go of, and its memory is written again.
        x = torch.zeros(NUMEL, device="cuda")
        out = torch.empty(NUMEL // ranks, device="cuda")
        torch.cuda._sleep(SHORT)
        x.copy_(mine)
        work = dist.reduce_scatter_tensor(out, x, group=group, async_op=True)
        assert work is not None
        del x
        torch.full((NUMEL,), 7.0, device="cuda")
        work.wait()
        if not have_equal_bits(out * 1.0, total.view(ranks, -1)[rank]):
            wrong.append(f"memory {turn}")
        # A callback reads the result.
        x = mine.clone()
        torch.cuda._sleep(SHORT)
        work = start_all_reduce(x, group=group)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2.0)
        if not have_equal_bits(doubled.wait() * 1.0, total * 2.0):
            wrong.append(f"future {turn}")
    return wrong


@contextmanager
def refused_host_waits() -> Iterator[None]:
    """Torch raises an error where an operator makes the host wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steady_without_waits(rank: int, group: Any) -> bool:
    """The third call of a kind makes no operator wait, and returns while the device is busy."""
    x = torch.ones(NUMEL, device="cuda")
    for _ in range(2):
        dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    busy.record()
    with refused_host_waits():
        dist.all_reduce(x, group=group)
        work = start_all_reduce(x, group=group)
        work.wait()
        late = not work.is_completed() and not busy.query()
    torch.cuda.synchronize()
    return late and work.is_completed()


def overlapped(rank: int, group: Any) -> bool:
    """The reduction ends while the stream of the caller is busy with what came later."""
    x = torch.ones(NUMEL, device="cuda")
    for _ in range(2):
        dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    work = start_all_reduce(x, group=group)
    torch.cuda._sleep(LONG)
    busy = torch.cuda.Event()
    busy.record()
    while not work.is_completed() and not busy.query():
        time.sleep(0.001)
    early = not busy.query()
    torch.cuda.synchronize()
    return early


def wrong_replays(rank: int, ranks: int, group: Any) -> list[int]:
    """Which replays of a graph of two reductions have other bits; eager calls are between them."""
    static = torch.zeros(NUMEL, device="cuda")
    result = torch.zeros(NUMEL, device="cuda")
    for _ in range(2):
        dist.all_reduce(static, group=group)
        dist.all_reduce(static, dist.ReduceOp.MAX, group=group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(static)
        work = start_all_reduce(result, group=group)
        work.wait()
        dist.all_reduce(result, dist.ReduceOp.MAX, group=group)
    wrong = []
    for turn in range(6):
        leaves = leaves_of(ranks, turn)
        static.copy_(leaves[rank])
        graph.replay()
        eager = leaves[rank].cuda()
        dist.all_reduce(eager, group=group)
        for found in (result, eager):
            if not have_equal_bits(found, sum_of(leaves)):
                wrong.append(turn)
    torch.cuda.synchronize()
    return wrong


def run_on_gpus(program: Callable[[int], Any], ranks: int) -> list[Any]:
    def start(rank: int) -> Any:
        ready(rank)
        found = program(rank)
        torch.cuda.synchronize()
        meshplan.check()
        return found

    return run_ranks(start, ranks, timeout=300)


# One GPU, two ranks.

GLOO = "cpu:gloo,cuda:gloo"
SHARED = [
    ("through_host", "exchange"),
    (GLOO, "exchange"),
    ("gloo", "one_shot"),
    ("gloo", "two_shot"),
]


@pytest.mark.parametrize(("inner", "path"), SHARED)
def test_reductions_have_the_contracts_bits(inner: str, path: str) -> None:
    found = run_on_gpus(lambda rank: wrong_results(rank, 2, backend_group(inner, path)), 2)
    assert found == [[]] * 2


@pytest.mark.parametrize(("inner", "path"), SHARED)
def test_streams_and_memory_are_ordered(inner: str, path: str) -> None:
    found = run_on_gpus(lambda rank: wrong_orders(rank, 2, backend_group(inner, path)), 2)
    assert found == [[]] * 2


def test_steady_calls_do_not_make_the_host_wait() -> None:
    found = run_on_gpus(
        lambda rank: steady_without_waits(rank, backend_group("gloo", "one_shot")), 2
    )
    assert found == [True] * 2


def test_reductions_overlap_with_the_caller() -> None:
    found = run_on_gpus(lambda rank: overlapped(rank, backend_group("gloo", "one_shot")), 2)
    assert found == [True] * 2


@pytest.mark.parametrize("path", ["one_shot", "two_shot"])
def test_graphs_hold_reductions(path: str) -> None:
    found = run_on_gpus(lambda rank: wrong_replays(rank, 2, backend_group("gloo", path)), 2)
    assert found == [[]] * 2


def late(rank: int) -> list[Any]:
    group = backend_group("gloo", "one_shot")
    x = torch.ones(NUMEL, device="cuda")
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    work = start_all_reduce(x, group=group)
    found: list[Any] = [work.is_completed()]
    try:
        work.wait(timedelta(seconds=0.01))
    except meshplan.MeshplanError as error:
        found.append(error.code)
    work.wait(timedelta(seconds=100))
    return [*found, work.is_completed(), work.is_success()]


def test_completion_and_timeouts_are_those_of_the_device() -> None:
    assert run_on_gpus(late, 2) == [[False, "MP503", True, True]] * 2


# One GPU, jobs of several ranks, gloo inside.


def begin(rank: int, *sizes: int) -> DeviceMesh:
    """A mesh of the job, whose default group is one of the backend."""
    store, ranks = os.environ["MESHPLAN_TEST_STORE"], torch.Size(sizes).numel()
    dist.destroy_process_group()
    dist.init_process_group(
        "meshplan",
        store=dist.FileStore(f"{store}.meshplan", ranks),
        rank=rank,
        world_size=ranks,
        pg_options=meshplan.BackendOptions(inner=GLOO),
    )
    return init_device_mesh("cuda", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])


def redistribute(rank: int) -> list[str]:
    """Which redistributions over two axes have other bits than one reduction over all ranks."""
    mesh = begin(rank, 2, 2)
    meshplan.install()
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        leaves = [leaf.to(dtype) for leaf in leaves_of(4)]
        total = reduce_leaves(leaves, "sum", (2, 2))
        mine = DTensor.from_local(leaves[rank].cuda(), mesh, [Partial(), Partial()])
        for name, placements, expected in (
            ("replicas", [Replicate(), Replicate()], total),
            ("shards", [Shard(0), Shard(0)], total.view(4, -1)[rank]),
            ("both", [Replicate(), Shard(0)], total.view(2, -1)[rank % 2]),
        ):
            if not have_equal_bits(mine.redistribute(mesh, placements).to_local(), expected):
                wrong.append(f"{name} {dtype}")
    return wrong


def test_redistributions_are_one_reduction() -> None:
    assert run_on_gpus(redistribute, 4) == [[]] * 4


def train_hsdp(rank: int) -> tuple[list[int], str]:
    """The bits of this rank's shards, and what is found when one bit of rank 3 was flipped."""
    mesh = begin(rank, 2, 2)
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        torch.manual_seed(4 * step + rank)
        model(torch.randn(8, 256, device="cuda")).square().mean().backward()
        meshplan.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    meshplan.verify_replicas(model)
    shards = [one.to_local().detach().view(-1) for one in model.parameters()]  # type: ignore[attr-defined]
    bits = torch.cat(shards).view(torch.int32).tolist()
    if rank == 3:
        shards[2].view(torch.int32)[77] ^= 1
    try:
        meshplan.verify_replicas(model)
    except meshplan.MeshplanError as error:
        return bits, error.code
    return bits, "nothing"


def test_replicas_agree_and_a_flipped_bit_is_found() -> None:
    found = run_on_gpus(train_hsdp, 4)
    assert [code for _, code in found] == ["MP705"] * 4
    assert found[0][0] == found[2][0] != found[1][0] == found[3][0]


def train_elastic(rank: int, *sizes: int) -> tuple[list[tuple[float, float]], list[Tensor]]:
    """Losses and norms of three steps of the example, with dropout, on 5 micro-batches; the shards
    of parameters and optimizer states.
    """
    mesh = begin(rank, *sizes)
    where = Path(__file__).parents[1] / "examples" / "elastic.py"
    example: Any = load_script(where)
    kind: Any = torch.nn.Transformer
    mask = kind.generate_square_subsequent_mask
    kind.generate_square_subsequent_mask = partial(mask, device="cuda")
    model, optimizer = example.build(mesh, torch.bfloat16)
    accumulator = example.GradientAccumulator(model, 5, mesh, seed=example.SEED)
    sampler = example.MicroBatchSampler(
        accumulator.micro_batches, example.SAMPLES, example.BATCH, seed=example.SEED
    )
    texts = example.read_samples()
    batches = (torch.stack([texts[i] for i in chosen]).cuda() for chosen in sampler)
    log = []
    for _ in range(3):
        log.append(example.elastic_step(model, accumulator, batches))
        optimizer.step()
        optimizer.zero_grad()
    # ``full_tensor`` of DTensor dies over gloo, in plain torch too.
    state = [
        value.to_local().detach().cpu()
        for parameter in model.parameters()
        for value in (parameter, *optimizer.state[parameter].values())
        if isinstance(value, DTensor)
    ]
    return log, state


def test_the_number_of_ranks_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    whole = []
    for sizes in ((1,), (2,), (3,), (2, 2)):
        program = partial(lambda sizes, rank: train_elastic(rank, *sizes), sizes)
        found = run_on_gpus(program, torch.Size(sizes).numel())
        logs, states = zip(*found, strict=True)
        assert logs.count(logs[0]) == len(logs)
        for replica in range(0, len(found), sizes[-1]):
            shards = zip(*states[replica : replica + sizes[-1]], strict=True)
            whole.append((logs[0], [torch.cat(parts) for parts in shards]))
    log, state = whole[0]
    for its_log, its_state in whole[1:]:
        assert its_log == log
        assert all(have_equal_bits(a, b) for a, b in zip(its_state, state, strict=True))


# One GPU, one rank, NCCL inside.


def alone(rank: int) -> list[bool]:
    group = backend_group("cpu:gloo,cuda:nccl")
    x = torch.randn(NUMEL, device="cuda")
    before = x.clone()
    dist.all_reduce(x, group=group)
    work = start_all_reduce(x, group=group)
    work.wait()
    # Calls that move data run by NCCL.
    dist.broadcast(x, 0, group=group)
    whole = torch.empty_like(x)
    dist.all_gather_into_tensor(whole, x, group=group)
    graph = torch.cuda.CUDAGraph()
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y.copy_(x)
        dist.all_reduce(y, dist._make_nccl_premul_sum(2.0), group=group)
    graph.replay()
    return [have_equal_bits(x, before), have_equal_bits(whole, before), bool((y == 2 * x).all())]


def test_one_rank_over_nccl() -> None:
    assert run_on_gpus(alone, 1) == [[True] * 3]


def train(model: torch.nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(8, 256, device="cuda")).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).cuda()


def wrap(rank: int) -> list[bool]:
    group = backend_group("cpu:gloo,cuda:nccl")
    plain = train(layers())
    replicated = train(DistributedDataParallel(layers(), process_group=group, bucket_cap_mb=1))
    right = [have_equal_bits(a, b) for a, b in zip(replicated, plain, strict=True)]
    dist.destroy_process_group()
    dist.init_process_group("meshplan", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = [gradient.full_tensor() for gradient in train(model)]  # type: ignore[attr-defined]
    return right + [have_equal_bits(a, b) for a, b in zip(sharded, plain, strict=True)]


def test_ddp_and_fsdp_over_one_rank() -> None:
    """Their futures, streams and events; the gradients are those without them."""
    assert run_on_gpus(wrap, 1) == [[True] * 16]


# Two GPUs.


@two_gpus
@pytest.mark.parametrize("path", ["exchange", "reference"])
def test_two_ranks_over_nccl(path: str) -> None:
    def program(rank: int) -> list[Any]:
        group = backend_group("cpu:gloo,cuda:nccl", path)
        found: list[Any] = wrong_results(rank, 2, group) + wrong_orders(rank, 2, group)
        found += wrong_replays(rank, 2, group)
        return [*found, steady_without_waits(rank, group), overlapped(rank, group)]

    assert run_on_gpus(program, 2) == [[True, True]] * 2


@two_gpus
def test_tensors_on_another_device_than_the_current_one() -> None:
    def program(rank: int) -> list[bool]:
        group = backend_group("through_host", "exchange")
        right = []
        for place in (1, 0):
            leaves = leaves_of(2)
            x = leaves[rank].to(f"cuda:{place}")
            with torch.cuda.device(1 - place):
                work = start_all_reduce(x, group=group)
                work.wait()
                right.append(torch.cuda.current_device() == 1 - place)
            right.append(have_equal_bits(x, sum_of(leaves)))
        return right

    assert run_on_gpus(program, 2) == [[True] * 4] * 2
