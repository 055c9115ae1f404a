"""The nccl_model backend over real processes, against a numpy evaluation of the same trees."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import expecttest
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from meshplan.errors import LayoutError
from meshplan.planner import nccl_order as order
from meshplan.testing import nccl_model as model
from tests.processes import run_ranks, start_all_reduce

pytestmark = pytest.mark.processes

NODES = (0, 0, 0, 1, 1)
WORLD = len(NODES)


def run(body: Callable[[int], None], world: int = WORLD) -> None:
    """Run ``body(rank)`` in ``world`` processes whose default group is one of the model."""

    def ranks(rank: int) -> None:
        model.configure(node_of_rank=NODES)
        body(rank)

    model.register()
    model.register()
    run_ranks(ranks, world, backend="nccl_model")


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_config", None)


def data(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Order-sensitive values: magnitudes over ten binades, both signs."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    scale = torch.randint(-5, 6, (numel,), generator=generator)
    values = torch.ldexp(values, scale)
    return (values * 8).to(dtype) if not dtype.is_floating_point else values.to(dtype)


def round_bf16(wide: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even, kept as float32."""
    bits = wide.astype(np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)


def add(dtype: torch.dtype) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    if dtype is torch.bfloat16:
        return lambda left, right: round_bf16(left + right)
    return lambda left, right: left + right


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The values as numpy; bfloat16 as the float32 of equal value."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def expected(
    numel: int,
    dtype: torch.dtype,
    algorithm: str,
    leaf: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> np.ndarray:
    inputs = [leaf(to_numpy(data(rank, numel, dtype))) for rank in range(WORLD)]
    if algorithm == "tree":
        return order.fold(order.tree_tree(NODES), inputs.__getitem__, add(dtype))
    result = np.empty_like(inputs[0])
    ring = order.ring_order(NODES)
    for start, stop, chunk in order.ring_chunks(numel, WORLD, dtype.itemsize):
        tree = order.ring_tree(ring, chunk)
        result[start:stop] = order.fold(tree, lambda r: inputs[r][start:stop], add(dtype))  # noqa: B023 - used at once
    return result


def assert_bits(found: torch.Tensor, wanted: np.ndarray) -> None:
    values = to_numpy(found)
    assert values.dtype == wanted.dtype
    assert values.tobytes() == wanted.tobytes(), (values, wanted)


def check_all_reduce(rank: int) -> None:
    for algorithm in ("ring", "tree"):
        model.configure(node_of_rank=NODES, algorithm=algorithm)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32):
            # 41 elements fill several 16-byte ring chunks and leave a short one.
            for numel in (0, 1, 3, 7, 41, 1000):
                tensor = data(rank, numel, dtype)
                dist.all_reduce(tensor)
                assert_bits(tensor, expected(numel, dtype, algorithm))
    # More than one full loop of 2 MiB chunks.
    model.configure(node_of_rank=NODES)
    numel = WORLD * 262144 + 1003
    tensor = data(rank, numel, torch.float64)
    dist.all_reduce(tensor)
    assert_bits(tensor, expected(numel, torch.float64, "ring"))


def check_operations(rank: int) -> None:
    fifth = np.float32(0.2)
    half_fifth = round_bf16(np.array([0.2], dtype=np.float32))
    for algorithm in ("ring", "tree"):
        model.configure(node_of_rank=NODES, algorithm=algorithm)
        tensor = data(rank, 57, torch.float32)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        assert_bits(tensor, expected(57, torch.float32, algorithm, lambda x: x * fifth))
        divided = expected(57, torch.float32, algorithm) / np.float32(5)
        assert to_numpy(tensor).tobytes() != divided.tobytes()

        tensor = data(rank, 57, torch.bfloat16)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        scaled = expected(57, torch.bfloat16, algorithm, lambda x: round_bf16(x * half_fifth))
        assert_bits(tensor, scaled)

        integers = np.stack([to_numpy(data(r, 57, torch.int64)) for r in range(WORLD)])
        for op, wanted in (
            (dist.ReduceOp.MAX, integers.max(0)),
            (dist.ReduceOp.MIN, integers.min(0)),
            (dist.ReduceOp.PRODUCT, integers.prod(0)),
            (dist.ReduceOp.AVG, np.trunc(integers.sum(0) / 5).astype(np.int64)),
        ):
            tensor = data(rank, 57, torch.int64)
            dist.all_reduce(tensor, op=op)
            assert_bits(tensor, wanted)

    flag = torch.tensor([rank == 2, False])
    dist.all_reduce(flag)
    assert flag.tolist() == [True, False]

    nan = torch.tensor([float("nan") if rank == 0 else float(rank)])
    dist.all_reduce(nan, op=dist.ReduceOp.MAX)
    assert nan.item() == 4.0

    for bad, op in ((torch.ones(2), dist.ReduceOp.BAND), (torch.tensor([True]), dist.ReduceOp.AVG)):
        with pytest.raises(LayoutError, match="use SUM, PRODUCT"):
            dist.all_reduce(bad, op=op)
    with pytest.raises(LayoutError, match="int16"):
        dist.all_reduce(torch.ones(2, dtype=torch.int16))


def check_premultiplied_sums(rank: int) -> None:
    own = dist._make_nccl_premul_sum
    for algorithm in ("ring", "tree"):
        model.configure(node_of_rank=NODES, algorithm=algorithm)
        for dtype in (torch.float32, torch.float64, torch.float16):
            # The factor is rounded to the dtype, and then the product.
            third = np.asarray(1 / 3, dtype=to_numpy(torch.empty(0, dtype=dtype)).dtype)
            wanted = expected(57, dtype, algorithm, lambda x, third=third: x * third)
            for factor in (1 / 3, torch.tensor([1 / 3], dtype=torch.float64).to(dtype)):
                tensor = data(rank, 57, dtype)
                dist.all_reduce(tensor, op=own(factor))
                assert_bits(tensor, wanted)
        third = round_bf16(np.array(1 / 3, dtype=np.float32).reshape(1))[0]
        tensor = data(rank, 57, torch.bfloat16)
        dist.all_reduce(tensor, op=own(1 / 3))
        wanted = expected(57, torch.bfloat16, algorithm, lambda x: round_bf16(x * third))  # noqa: B023 - used at once
        assert_bits(tensor, wanted)
        late = round_bf16(expected(57, torch.bfloat16, algorithm) * third)
        assert wanted.tobytes() != late.tobytes()

    # A rank's factor multiplies what that rank brings, whoever adds it.
    tensor = torch.ones(7)
    dist.all_reduce(tensor, op=own(float(2**rank)))
    assert tensor.tolist() == [31.0] * 7

    ring = order.ring_order(NODES)
    source = data(rank, 10, torch.float32)
    third = np.float32(1 / 3)
    inputs = [to_numpy(data(r, 10, torch.float32)) * third for r in range(WORLD)]
    here = slice(2 * rank, 2 * rank + 2)
    summed = order.fold(order.root_tree(ring, rank), lambda r: inputs[r][here], add(torch.float32))
    output = torch.empty(2)
    single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    single(output, source, op=own(1 / 3))
    assert_bits(output, summed)
    output = torch.empty(2)
    dist.reduce_scatter(output, list(source.split(2)), op=own(torch.tensor(1 / 3)))
    assert_bits(output, summed)
    assert_bits(source, to_numpy(data(rank, 10, torch.float32)))
    tensor = source.clone()
    dist.reduce(tensor, 2, op=own(1 / 3))
    if rank == 2:
        assert_bits(
            tensor, order.fold(order.root_tree(ring, 2), inputs.__getitem__, add(torch.float32))
        )

    group = dist.new_group([0])
    if rank == 0:
        tensor = data(rank, 9, torch.float32)
        dist.all_reduce(tensor, group=group, op=own(0.5))
        assert_bits(tensor, to_numpy(data(rank, 9, torch.float32)) * np.float32(0.5))

    with pytest.raises(LayoutError, match="PREMUL_SUM on floats"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), op=own(2.0))
    with pytest.raises(
        LayoutError, match=r"a PREMUL_SUM of torch.* got a factor of 1 elements of torch.float32"
    ):
        dist.all_reduce(torch.ones(2, dtype=torch.bfloat16), op=own(torch.ones(1)))


def check_fsdp_with_a_factor(rank: int) -> None:
    """Gradients are divided by a given factor, as in torchtitan for its batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    own = nn.Linear(4, 4, bias=False)
    wanted = torch.zeros(4, 4)
    for other in range(4):
        wanted += torch.full((4, 4), float(2**other)) / 8
    sharded = fully_shard(own, mesh=mesh)
    # Not how many ranks there are: FSDP asks for a sum with a factor.
    sharded.set_gradient_divide_factor(8.0)
    sharded(torch.full((1, 4), float(2**rank))).sum().backward()
    (weight,) = sharded.parameters()
    assert isinstance(weight.grad, DTensor)
    assert torch.equal(weight.grad.full_tensor(), wanted)


def test_fsdp_with_a_factor_is_reduced() -> None:
    run(check_fsdp_with_a_factor, world=4)


def check_shapes_and_ways_to_call(rank: int) -> None:
    wanted = expected(60, torch.float32, "ring")
    base = torch.zeros(10, 12)
    view = base.t()[::2, ::1]
    assert view.shape == (6, 10)
    assert not view.is_contiguous()
    view.copy_(data(rank, 60, torch.float32).view(6, 10))
    dist.all_reduce(view)
    assert_bits(view.contiguous().view(-1), wanted)
    assert base[:, 1::2].count_nonzero() == 0

    tensor = data(rank, 60, torch.float32)
    work = start_all_reduce(tensor)
    work.wait()
    assert work.is_completed()
    assert_bits(tensor, wanted)
    assert_bits(work.get_future().wait()[0], wanted)

    tensor = data(rank, 60, torch.float32).requires_grad_()
    dist.all_reduce(tensor)
    assert_bits(tensor.detach(), wanted)

    source = data(rank, 60, torch.float32)
    assert_bits(funcol.wait_tensor(funcol.all_reduce(source, "sum", dist.group.WORLD)), wanted)
    assert_bits(source, to_numpy(data(rank, 60, torch.float32)))
    both = funcol.all_reduce_coalesced([source, source[:7].clone()], "sum", dist.group.WORLD)
    assert_bits(funcol.wait_tensor(both[0]), wanted)
    with dist._coalescing_manager(group=dist.group.WORLD):
        dist.all_reduce(source)
    assert_bits(source, wanted)

    # The node map of a group uses global ranks: (1, 3, 4) are placed on nodes (0, 1, 1).
    group = dist.new_group([1, 3, 4])
    alone = dist.new_group([0])
    if rank in (1, 3, 4):
        tensor = data(rank, 9, torch.float32)
        model.configure(node_of_rank=NODES, algorithm="tree")
        dist.all_reduce(tensor, group=group)
        one, three, four = (to_numpy(data(r, 9, torch.float32)) for r in (1, 3, 4))
        assert_bits(tensor, one + (three + four))
        model.configure(node_of_rank=NODES[:4])
        with pytest.raises(LayoutError, match="4 entries, but rank 4 is in the group"):
            dist.all_reduce(tensor, group=group)
    if rank == 0:
        tensor = data(rank, 9, torch.float32)
        dist.all_reduce(tensor, group=alone, op=dist.ReduceOp.AVG)
        assert_bits(tensor, to_numpy(data(rank, 9, torch.float32)))
    model.configure(domain_size=3)
    tensor = data(rank, 60, torch.float32)
    dist.all_reduce(tensor)
    assert_bits(tensor, wanted)


def check_reduce_scatter(rank: int) -> None:
    ring = order.ring_order(NODES)
    inputs = [to_numpy(data(r, 5 * 11, torch.float32)) for r in range(WORLD)]
    mine = slice(11 * rank, 11 * rank + 11)
    wanted = order.fold(order.root_tree(ring, rank), lambda r: inputs[r][mine], add(torch.float32))
    source = data(rank, 5 * 11, torch.float32)
    blocks = list(source.chunk(5))
    single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    functional = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    for algorithm in ("ring", "tree"):
        model.configure(node_of_rank=NODES, algorithm=algorithm)
        output = torch.empty(11)
        single(output, source)
        assert_bits(output, wanted)
        output = torch.empty(11)
        dist.reduce_scatter(output, blocks)
        assert_bits(output, wanted)
        found = functional(source, "sum", 0, dist.group.WORLD)
        assert_bits(funcol.wait_tensor(found), wanted)

    uneven = [source[: r * 2] for r in range(5)]
    output = torch.empty(rank * 2)
    dist.reduce_scatter(output, uneven)
    start = slice(0, rank * 2)
    tree = order.root_tree(ring, rank)
    assert_bits(output, order.fold(tree, lambda r: inputs[r][start], add(torch.float32)))

    for root in (0, 4):
        tensor = source.clone()
        dist.reduce(tensor, root)
        tree = order.root_tree(ring, root)
        if rank == root:
            assert_bits(tensor, order.fold(tree, inputs.__getitem__, add(torch.float32)))
    with pytest.raises(LayoutError, match="do not fit an input of 3 and an output of 1"):
        single(torch.empty(1), torch.ones(3))


def check_reductions(rank: int) -> None:
    for check in (
        check_all_reduce,
        check_operations,
        check_premultiplied_sums,
        check_shapes_and_ways_to_call,
        check_reduce_scatter,
    ):
        model.configure(node_of_rank=NODES)
        check(rank)


def test_every_operation_and_interface_has_the_bits_of_the_trees() -> None:
    run(check_reductions)


def check_movement(rank: int) -> None:
    ones = torch.full((2,), float(rank))
    everyone = [float(r) for r in range(WORLD) for _ in range(2)]
    gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    functional = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    output = torch.empty(10)
    gather_single(output, ones)
    assert output.tolist() == everyone
    found = funcol.wait_tensor(functional(ones, 0, dist.group.WORLD))
    assert found.tolist() == everyone
    pieces = [torch.empty(2) for _ in range(WORLD)]
    dist.all_gather(pieces, ones)
    assert torch.cat(pieces).tolist() == everyone
    # Gloo's threads drop Python tensors here; a call that held the GIL would deadlock with them.
    for _ in range(100):
        dist.all_gather([piece.clone() for piece in pieces], ones.clone())
        gather_single(torch.empty(10), ones.clone())
        dist.broadcast(ones.clone(), 0)
        outgoing = [ones.clone() for _ in range(WORLD)] if rank == 0 else None
        dist.scatter(torch.empty(2), outgoing)
        dist.gather(ones.clone(), None if outgoing is None else [o.clone() for o in outgoing])
    output = torch.empty(5)
    dist.all_to_all_single(output, torch.arange(5.0) + 10 * rank)
    assert output.tolist() == [10.0 * r + rank for r in range(5)]
    found = funcol.all_to_all_single(torch.ones(5), [1] * 5, [1] * 5, dist.group.WORLD)
    assert funcol.wait_tensor(found).tolist() == [1.0] * 5
    dist.broadcast(ones, 3)
    assert ones.tolist() == [3.0, 3.0]
    objects: list[object] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(WORLD)]
    gathered = [torch.empty(1) for _ in range(WORLD)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), gathered)
    mine = torch.empty(1)
    dist.scatter(mine, gathered)
    assert mine.item() == rank
    if rank == 0:
        dist.send(torch.tensor([7.0]), 4)
    if rank == 4:
        dist.recv(mine, 0)
        assert mine.item() == 7.0
    dist.barrier()

    threads = len(os.listdir("/proc/self/task"))
    extra = dist.new_group(list(range(WORLD)))
    dist.all_reduce(torch.ones(3), group=extra)
    assert len(os.listdir("/proc/self/task")) > threads
    dist.destroy_process_group(extra)
    del extra
    gc.collect()
    deadline = time.monotonic() + 300
    while len(os.listdir("/proc/self/task")) > threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)

    about = "model of NCCL 2.30 association order: 1 channel, NVSwitch hosts, no NVLS; not NCCL"
    group = dist.group.WORLD
    assert isinstance(group, model.NcclModelProcessGroup)
    assert dist.get_backend() == "nccl_model"
    assert about in repr(group)
    assert threading.active_count() == 1


@pytest.mark.full
def test_data_movement_matches_gloo() -> None:
    run(check_movement)


def check_unconfigured(rank: int) -> None:
    model._config = None
    with pytest.raises(LayoutError, match="nccl_model has no nodes; call configure"):
        dist.all_reduce(torch.ones(2))
    assert "not NCCL" in repr(dist.group.WORLD)


def test_unconfigured_model_is_refused() -> None:
    run(check_unconfigured, world=2)


class TestConfigure(expecttest.TestCase):
    def test_configuration_is_printed(self) -> None:
        self.assertExpectedInline(
            str(model.configure(node_of_rank=[0, 1], algorithm="tree")),
            "NcclModelConfig(node_of_rank=(0, 1), domain_size=None, algorithm='tree')",
        )
        assert model.current_config() == model.configure(node_of_rank=(0, 1), algorithm="tree")
        assert [model.configure(domain_size=8).node_of(rank) for rank in (7, 8)] == [0, 1]

    def test_invalid_configurations_are_refused(self) -> None:
        self.assertExpectedRaisesInline(
            LayoutError,
            lambda: model.configure(),
            """MP111: pass exactly one of node_of_rank and domain_size; got neither""",
        )
        self.assertExpectedRaisesInline(
            LayoutError,
            lambda: model.configure(node_of_rank=[0], domain_size=8),
            """MP111: pass exactly one of node_of_rank and domain_size; got both""",
        )
        self.assertExpectedRaisesInline(
            LayoutError,
            lambda: model.configure(domain_size=0),
            """MP111: domain_size is 0; pass the ranks per node, 1 or more""",
        )
        self.assertExpectedRaisesInline(
            LayoutError,
            lambda: model.configure(domain_size=8, algorithm="nvls"),  # type: ignore[arg-type]
            """MP111: algorithm 'nvls' is not modelled; pass 'ring' or 'tree'""",
        )
        self.assertExpectedRaisesInline(
            LayoutError,
            lambda: model.configure(node_of_rank=[0, 0]).node_of(2),
            (
                "MP111: node_of_rank has 2 entries, but rank 2 is in the group; "
                "configure one node number per global rank"
            ),
        )
