"""HSDP over the backend: after ``fsdp.apply``, one rounding of each gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import meshplan
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import IntegrationError, SignatureMismatchError
from meshplan.integrations import fsdp
from meshplan.testing import assert_bitwise_equal, bits, order_sensitive
from tests.backend.native_calls import count_native_reductions
from tests.processes import run_ranks
from tests.refusals import refusal

pytestmark = pytest.mark.processes

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
WORLD = 6
MESHES = ((2, 3), (3, 2))
# The first two are sharded unevenly; one of them has fewer rows than there are shards.
SHAPES = ((7, 11), (1, 5), (64, 3))


@cache
def row(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    numel = torch.Size(shape).numel()
    return order_sensitive(numel, rank=rank, world_size=WORLD, dtype=dtype, seed=seed).view(shape)


@pytest.fixture(scope="module", autouse=True)
def _drawn_once() -> None:
    """Ranks are forked, and each of them would draw these."""
    for seed, shape in itertools.product((0, 1, 2, 10, 11, 12), SHAPES):
        leaves_of(shape, BF16, seed)
    for dtype in (F32, BF16, F16, F64):
        leaves_of((6 * 41,), dtype)


def leaves_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [row(rank, shape, dtype, seed) for rank in range(WORLD)]


def hsdp_mesh(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp"))


def reduce_twice(mesh: DeviceMesh, summand: Tensor, ops: Sequence[Any]) -> tuple[Tensor, Any]:
    """What FSDP does: the result of the reduce-scatter, and the group of the replicas."""
    shards, replicas = mesh.get_group("fsdp"), mesh.get_group("ddp")
    out = summand.new_empty(summand.numel() // shards.size())
    shards.scatter_partial_sum(out, summand, ops[0])
    return out, partial(dist.all_reduce, out, ops[1], replicas)


AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
CONTRACTS = (
    Contract(),
    Contract(accumulate="float64"),
    Contract(rounding="node"),
)


@pytest.mark.parametrize("shape", MESHES)
def test_two_reductions_have_the_bits_of_one(shape: tuple[int, int]) -> None:
    def run(rank: int) -> int:
        checked, rounded_twice = 0, 0
        for contract in CONTRACTS:
            options = meshplan.BackendOptions(contract=contract)
            mesh = init_device_mesh(
                "cpu",
                shape,
                mesh_dim_names=("ddp", "fsdp"),
                backend_override={0: ("meshplan", options), 1: ("meshplan", options)},
            )
            at = mesh.get_local_rank("fsdp")
            for dtype in (F32, BF16, F16, F64):
                leaves = leaves_of((6 * 41,), dtype)
                for ops, divisor in (
                    ((AVG, AVG), WORLD),
                    ((AVG, SUM), shape[1]),
                    ((SUM, AVG), shape[0]),
                    ((SUM, SUM), None),
                ):
                    op: Any = "sum" if divisor is None else "avg"
                    wanted = reduce_leaves(leaves, op, shape, contract, divisor=divisor)
                    mine = wanted.chunk(shape[1])[at]
                    name = f"{contract.id}, {dtype}, {ops}"
                    out, finish = reduce_twice(mesh, leaves[rank], ops)
                    first = leaves[rank // shape[1] * shape[1] :][: shape[1]]
                    first_op: Any = "avg" if ops[0] == AVG else "sum"
                    scattered = reduce_leaves(first, first_op, shape[1:], contract)
                    assert_bitwise_equal(out, scattered.chunk(shape[1])[at], name)
                    finish()
                    assert_bitwise_equal(out, mine, name)
                    checked += 1
                    # Changed in between, and unchanged in value: an ordinary all-reduce.
                    out, finish = reduce_twice(mesh, leaves[rank], ops)
                    out.add_(0)
                    finish()
                    rounded_twice += not torch.equal(bits(out), bits(mine))
        assert rounded_twice > 0
        return checked

    found = run_ranks(run, WORLD, backend="meshplan")
    assert found == [4 * 4 * len(CONTRACTS)] * WORLD


def test_factor_multiplies_each_summand() -> None:
    def run(rank: int) -> None:
        mesh = hsdp_mesh((3, 2))
        for dtype in (F32, BF16):
            leaves = leaves_of((82,), dtype)
            scaled = [leaf.to(F32) * torch.tensor(1 / 5, dtype=F32) for leaf in leaves]
            wanted = reduce_leaves(scaled, "sum", (3, 2)).to(dtype)
            out, finish = reduce_twice(mesh, leaves[rank], (dist._make_nccl_premul_sum(1 / 5), SUM))
            finish()
            assert_bitwise_equal(out, wanted.chunk(2)[mesh.get_local_rank("fsdp")], str(dtype))

    run_ranks(run, WORLD, backend="meshplan")


def test_partial_sum_of_some_ranks_is_an_error() -> None:
    """And the group goes on."""

    def run(rank: int) -> list[str]:
        mesh, texts = hsdp_mesh((3, 2)), []
        for dtype in (F32, BF16):
            leaves = leaves_of((82,), dtype)
            out, finish = reduce_twice(mesh, leaves[rank], (AVG, AVG))
            if rank == 3:
                out.add_(0)
            in_group = mesh.get_local_rank("fsdp") == 1
            if in_group:
                texts.append(
                    refusal(SignatureMismatchError, finish)
                    .partition("Different: ")[2]
                    .partition(". ")[0]
                )
            else:
                finish()
            out, finish = reduce_twice(mesh, leaves[rank], (AVG, AVG))
            finish()
            wanted = reduce_leaves(leaves, "avg", (3, 2))
            assert_bitwise_equal(out, wanted.chunk(2)[mesh.get_local_rank("fsdp")], str(dtype))
        return texts

    found = run_ranks(run, WORLD, backend="meshplan")
    for ours, bf16 in (found[1], found[3], found[5]):
        assert "divisor" in ours
        assert "dtype" in bf16


def test_partial_sum_ends_with_its_tensor_or_another_reduction() -> None:
    from meshplan.backend import _reductions

    def run(rank: int) -> None:
        mesh, leaf = hsdp_mesh((3, 2)), row(rank, (82,), BF16)
        out, _ = reduce_twice(mesh, leaf, (AVG, AVG))
        assert _reductions._kept.found is not None
        dist.all_reduce(torch.ones(3))
        assert _reductions._kept.found is None
        del out, _
        out, _ = reduce_twice(mesh, leaf, (AVG, AVG))
        del out, _
        assert _reductions._kept.found is None

    run_ranks(run, WORLD, backend="meshplan")


class Rows(nn.Module):
    """The gradient of each parameter is the row that it is multiplied with, to the bit."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.ones(s, dtype=dtype)) for s in SHAPES)

    def forward(self, rows: Sequence[Tensor]) -> Tensor:
        pairs = zip(rows, self.rows, strict=True)
        return torch.stack([(row * one).sum().to(F64) for row, one in pairs]).sum()


class Model(nn.Module):
    """Three modules of FSDP: two inside, and the root with rows of its own."""

    def __init__(self, mesh: DeviceMesh, dtype: torch.dtype, **options: Any) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Rows(dtype), Rows(dtype)])
        self.own = Rows(dtype)
        for one in self.inner:
            fully_shard(one, mesh=mesh, **options)
        fully_shard(self, mesh=mesh, **options)

    def forward(self, rank: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        parts = (*self.inner, self.own)
        given = [[row(rank, s, dtype, seed + i) for s in SHAPES] for i in range(3)]
        return torch.stack([part(rows) for part, rows in zip(parts, given, strict=True)]).sum()

    def check(self, expected: Callable[[tuple[int, ...], int], Tensor], name: str) -> None:
        for i, part in enumerate((*self.inner, self.own)):
            for parameter, shape in zip(part.parameters(), SHAPES, strict=True):
                assert isinstance(parameter.grad, DTensor)
                found = parameter.grad.full_tensor()
                assert_bitwise_equal(found, expected(shape, i), f"{name}, {i}, {shape}")
                parameter.grad = None


def average(mesh: tuple[int, int], dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    return reduce_leaves(leaves_of(shape, dtype, seed), "avg", mesh)


@pytest.mark.parametrize("shape", MESHES)
def test_hsdp_gradients_have_one_rounding(shape: tuple[int, int]) -> None:
    def run(rank: int) -> None:
        mesh = hsdp_mesh(shape)
        with count_native_reductions() as counts:
            for dtype in (F32, BF16):
                model = Model(mesh, dtype)
                assert fsdp.apply(model) == ("", "inner.0", "inner.1")
                for _ in range(2):
                    model(rank, dtype).backward()
                    model.check(partial(average, shape, dtype), str(dtype))
        assert dict(counts) == {}
        # Without it, other bits.
        plain = Model(mesh, BF16)
        plain(rank, BF16).backward()
        with pytest.raises(AssertionError):
            plain.check(partial(average, shape, BF16), "plain")

    run_ranks(run, WORLD, backend="meshplan")


def test_every_division_of_fsdp_is_kept() -> None:
    def run(rank: int) -> None:
        mesh = hsdp_mesh((3, 2))

        def check(dtype: torch.dtype, expected: Any, name: str, **how: Any) -> None:
            model = Model(mesh, dtype)
            for one in (model, *model.inner):
                for method, value in how.items():
                    getattr(one, method)(value)
            fsdp.apply(model)
            model(rank, dtype).backward()
            model.check(lambda s, i: expected(leaves_of(s, dtype, i)), name)

        def factor(leaves: list[Tensor]) -> Tensor:
            scaled = [leaf.to(F32) * torch.tensor(1 / 5, dtype=F32) for leaf in leaves]
            return reduce_leaves(scaled, "sum", (3, 2)).to(leaves[0].dtype)

        def sums(leaves: list[Tensor]) -> Tensor:
            return reduce_leaves(leaves, "sum", (3, 2)).div_(6.0)

        def halves(leaves: list[Tensor]) -> Tensor:
            return reduce_leaves([leaf / 4 for leaf in leaves], "sum", (3, 2)).div_(1.5)

        check(BF16, factor, "factor", set_gradient_divide_factor=5.0)
        check(
            BF16,
            lambda leaves: reduce_leaves(leaves, "avg", (3, 2), divisor=2),
            "shards",
            set_gradient_divide_factor=2.0,
        )
        check(BF16, sums, "sums", set_force_sum_reduction_for_comms=True)
        check(F16, halves, "float16")

    run_ranks(run, WORLD, backend="meshplan")


def test_accumulated_gradients_keep_their_sum() -> None:
    """Without communication one rounding; in the reduced gradients two, and the same everywhere."""

    def run(rank: int) -> None:
        mesh = hsdp_mesh((3, 2))
        model = Model(mesh, BF16)
        fsdp.apply(model)
        model.set_requires_gradient_sync(False)
        model(rank, BF16).backward()
        model.set_requires_gradient_sync(True)
        model(rank, BF16, 10).backward()

        def together(shape: tuple[int, ...], i: int) -> Tensor:
            pairs = zip(leaves_of(shape, BF16, i), leaves_of(shape, BF16, i + 10), strict=True)
            return reduce_leaves([a + b for a, b in pairs], "avg", (3, 2))

        model.check(together, "unsharded")
        model.set_requires_all_reduce(False)
        model(rank, BF16).backward()
        model.set_requires_all_reduce(True)
        model(rank, BF16, 10).backward()

        def apart(shape: tuple[int, ...], i: int) -> Tensor:
            replicas = []
            for at in range(0, WORLD, 2):
                first, second = (
                    reduce_leaves(leaves_of(shape, BF16, i + seed)[at : at + 2], "avg", (2,))
                    for seed in (0, 10)
                )
                replicas.append(second + first)
            return reduce_leaves(replicas, "avg", (3,))

        model.check(apart, "sharded")
        # And the next step has one rounding again.
        model(rank, BF16).backward()
        model.check(partial(average, (3, 2), BF16), "after")

    run_ranks(run, WORLD, backend="meshplan")


def test_mixed_precision_reduces_in_its_own_dtype() -> None:
    def run(rank: int) -> None:
        mesh = hsdp_mesh((2, 3))
        for reduce_dtype in (F32, BF16):
            policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
            model = Model(mesh, F32, mp_policy=policy)
            fsdp.apply(model)
            model(rank, BF16).backward()

            def expected(
                shape: tuple[int, ...], i: int, dtype: torch.dtype = reduce_dtype
            ) -> Tensor:
                leaves = [leaf.to(dtype) for leaf in leaves_of(shape, BF16, i)]
                return reduce_leaves(leaves, "avg", (2, 3)).to(F32)

            model.check(expected, str(reduce_dtype))

    run_ranks(run, WORLD, backend="meshplan")


def test_modules_without_replicas_are_left_as_they_are() -> None:
    def run(rank: int) -> None:
        model = Model(init_device_mesh("cpu", (WORLD,)), BF16)
        assert fsdp.apply(model) == ()
        model(rank, BF16).backward()
        model.check(partial(average, (1, WORLD), BF16), "one axis")

    run_ranks(run, WORLD, backend="meshplan")


class Block(nn.Module):
    """A norm and a tensor-parallel pair around it, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12, bias=False)
        self.down = nn.Linear(12, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def test_tensor_parallel_gradients_keep_the_reduce_dtype() -> None:
    """If it is passed to ``apply``; without it they are rounded over the tensor-parallel axis."""

    def run(rank: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("fsdp", "tp"))
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
        torch.manual_seed(3)
        model = parallelize_module(Block(), mesh["tp"], PLAN)
        fully_shard(model, mesh=mesh["fsdp"], mp_policy=policy)
        x = row(rank, (2, 2, 6), F32) / 100
        partials: dict[str, Tensor] = {}

        def note(module: nn.Module, _: Any) -> None:
            for name, parameter in module.named_parameters():
                parameter.register_hook(lambda one, name=name: partials.update({name: one}))

        found = []
        for dtype in (None, F32):
            assert fsdp.apply(model, reduce_dtype=dtype) == ()
            handle = model.register_forward_pre_hook(note)
            model(x).float().square().sum().backward()
            handle.remove()
            exact = []
            for name in ("norm.weight", "norm.bias"):
                partial_gradient: Any = partials[name]
                mine = partial_gradient.to_local()
                every: list[Any] = [None] * 6
                dist.all_gather_object(every, mine.float().tolist())
                leaves = [torch.tensor(leaf, dtype=F32) for leaf in every]
                over_tp = [reduce_leaves(leaves[i : i + 3], "sum", (3,)) for i in (0, 3)]
                gradient: Any = model.get_parameter(name).grad
                wanted = reduce_leaves(over_tp, "avg", (2,))
                exact.append(torch.equal(bits(gradient.full_tensor()), bits(wanted)))
            found.append(all(exact))
            model.zero_grad()
        return found

    # Torch 2.15 keeps them by itself.
    by_torch = hasattr(FSDPParam, "may_reduce_grad_outside_dp")
    assert run_ranks(run, WORLD, backend="meshplan") == [[by_torch, True]] * WORLD


class TestErrors(TestCase):
    maxDiff = None

    def test_unsupported_models_are_refused(self) -> None:
        ordered = meshplan.BackendOptions(contract=Contract(order="rank"))
        axes: list[Any] = [("gloo", "gloo"), (ordered, None), (ordered, ordered)]

        def run(rank: int, at: int) -> str:
            pairs = zip(("ddp", "fsdp"), axes[at], strict=True)
            override: Any = {
                name: one if isinstance(one, str) else ("meshplan", one) for name, one in pairs
            }
            mesh = init_device_mesh(
                "cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"), backend_override=override
            )
            model = nn.Sequential(nn.Linear(4, 4))
            with pytest.raises(IntegrationError, match="no module of the model is sharded"):
                fsdp.apply(model)
            fully_shard(model[0], mesh=mesh)
            return refusal(IntegrationError, fsdp.apply, model)

        messages = []
        for at in range(len(axes)):
            found = run_ranks(partial(run, at=at), 4, backend="meshplan")
            assert found == [found[0]] * 4
            messages.append(found[0])
        self.assertExpectedInline(
            "\n".join(messages),
            """\
MP901: module '0' has a group of the backend 'gloo', which reduces in its own order; call torch.distributed.init_process_group('meshplan'), or pass a group of new_group(backend='meshplan')
MP901: module '0' is reduced over groups of the contracts v1/rank/wide/once and v1/tree/wide/once; pass the same BackendOptions to all groups of the mesh
MP901: module '0' is reduced under v1/rank/wide/once, which has no partial sums: one reduction over shards and replicas cannot be made of two; pass BackendOptions(contract=Contract(order='tree')), or leave apply out""",
        )

    def test_parameters_on_several_meshes(self) -> None:
        common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
        if not hasattr(common, "ShardPlacementResult"):
            pytest.skip("this torch has one mesh for each module")

        def run(rank: int) -> str:
            mesh = hsdp_mesh((2, 2))
            infos = [common.HSDPMeshInfo(hsdp_mesh((2, 2)), 1, 0), common.HSDPMeshInfo(mesh, 1, 0)]
            model = nn.Sequential(nn.Linear(4, 4))
            fully_shard(
                model[0],
                mesh=mesh,
                shard_placement_fn=lambda one: common.ShardPlacementResult(
                    Shard(0), infos[one.ndim - 1]
                ),
            )
            return refusal(IntegrationError, fsdp.apply, model)

        messages = run_ranks(run, 4, backend="meshplan")
        self.assertExpectedInline(
            "\n".join(sorted(set(messages))),
            """MP901: module '0' has parameters on several meshes, for which FSDP2 accepts no custom reduce-scatter; call apply on the other modules""",
        )
