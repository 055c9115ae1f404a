"""Gradients over rounds are those of all micro-batches, over FSDP2, HSDP, TP and DDP."""

from __future__ import annotations

import gc
import math
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import meshplan
from meshplan import Contract, kernel, reduce_leaves
from meshplan.elastic import GradientAccumulator
from meshplan.elastic._gradients import exact_sum
from meshplan.errors import ContractError, ElasticError, IntegrationError
from meshplan.integrations.fsdp import ReduceScatter
from meshplan.testing import assert_bitwise_equal, bits, order_sensitive
from tests.backend.test_hsdp import PLAN, Block
from tests.marks import full
from tests.processes import common_result, run_ranks
from tests.refusals import refusal

pytestmark = pytest.mark.processes

F32, BF16 = torch.float32, torch.bfloat16
M = 8
refuse = partial(refusal, ElasticError)
# Sharded unevenly; one has fewer rows than there are shards.
SHAPES = ((7, 11), (1, 5), (64, 3))


@cache
def row(g: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    numel = math.prod(shape)
    return order_sensitive(numel, rank=g, world_size=M, dtype=dtype, seed=seed).view(shape)


class Model(nn.Module):
    """The gradients of micro-batch ``g`` are its rows."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(shape, dtype=dtype) for shape in SHAPES)

    def forward(self, g: int) -> Tensor:
        products = [
            (one * row(g, shape, i, one.dtype)).float().sum()
            for i, (shape, one) in enumerate(zip(SHAPES, self.weights, strict=True))
        ]
        return torch.stack(products).sum()


def shard(mesh: DeviceMesh, compute: torch.dtype = F32, reduce: torch.dtype = F32) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    return fully_shard(Model(), mesh=mesh, mp_policy=policy)


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("ddp", "fsdp")[-len(sizes) :])


def whole_gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        found.append(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    return found


def accumulate(accumulator: GradientAccumulator, model: nn.Module, **options: Any) -> None:
    for round in range(accumulator.micro_batches.rounds):
        with accumulator.round():
            model(accumulator.micro_batches.index(round)).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        # A round keeps partial sums only.
        assert bool(accumulator._gradients) is (round + 1 == accumulator.micro_batches.rounds)
    accumulator.finish(**options)


KINDS = (
    ("fsdp", (2,)),
    ("ddp", (2,)),
    ("fsdp", (3,)),
    *(full(*one) for one in (("fsdp", (1,)), ("fsdp", (1, 5)), ("fsdp", (7, 1)), ("fsdp", (2, 3)))),
    *(full("bf16", sizes) for sizes in ((2,), (2, 4))),
    *(full(*one) for one in (("ddp", (1,)), ("ddp", (7,)), ("views", (3,)))),
)


@pytest.mark.parametrize(("kind", "sizes"), KINDS)
def test_gradients_are_those_of_all_micro_batches(kind: str, sizes: tuple[int, ...]) -> None:
    compute = BF16 if kind == "bf16" else F32

    def run(rank: int) -> list[float]:
        if kind in ("ddp", "views"):
            model: nn.Module = DistributedDataParallel(
                Model(), gradient_as_bucket_view=kind == "views"
            )
            accumulator = GradientAccumulator(model, M)
        else:
            mesh = mesh_of(sizes)
            model = shard(mesh, compute)
            accumulator = GradientAccumulator(model, M, mesh)
        assert accumulator.micro_batches.rank == rank
        for divisor in (None, 77):
            accumulate(accumulator, model, divisor=divisor)
            for i, found in enumerate(whole_gradients(model)):
                leaves = [row(g, SHAPES[i], i, compute).float() for g in range(M)]
                wanted = reduce_leaves(leaves, "avg", (M,), divisor=divisor)
                assert_bitwise_equal(found, wanted, f"{SHAPES[i]}")
            model.zero_grad()
        assert accumulator.micro_batches.step == 2
        ran = {entry["ran"] for entry in meshplan.report().entries}
        assert ran <= {"one_shot", "two_shot"} or not kernel.available()
        values = [1e16 * (-1) ** g + g for g in range(M)]
        dealt = accumulator.micro_batches
        mine = [values[dealt.index(round)] for round in range(dealt.rounds)]
        return [accumulator.sum_scalars(mine)]

    assert run_ranks(run, math.prod(sizes), backend="meshplan") == [[28.0]] * math.prod(sizes)


class Experts(nn.Module):
    """Micro-batch ``g`` uses expert g mod 4; the fifth is used by none, and the sixth by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(torch.ones(5, 3) for _ in range(6))

    def forward(self, g: int) -> Tensor:
        used = self.experts[g % 4], self.experts[5 if g == M - 1 else g % 4]
        return torch.stack([(one * expert_row(g)).sum() for one in used]).sum()


def expert_row(g: int) -> Tensor:
    found = row(g, (5, 3), 7, F32).clone()
    found[0, 0] = -0.0
    return found


def expert_gradients(kind: str, ranks: int) -> list[list[Any] | None]:
    """Of two steps, and the weights after them: a weight without a gradient does not decay."""
    if kind == "ddp":
        model: nn.Module = DistributedDataParallel(Experts(), find_unused_parameters=True)
        accumulator = GradientAccumulator(model, M)
    else:
        mesh = mesh_of((2, ranks // 2) if kind == "hsdp" else (ranks,))
        model = fully_shard(Experts(), mesh=mesh)
        accumulator = GradientAccumulator(model, M, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    found: list[list[Any] | None] = []
    for _ in range(2):
        accumulate(accumulator, model)
        for one in model.parameters():
            whole = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
            found.append(None if whole is None else bits(whole).tolist())
        optimizer.step()
        optimizer.zero_grad()
    last = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [*found, *(bits(one.detach()).tolist() for one in last)]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("ddp", (2,)),
        ("fsdp", (2,)),
        full("ddp", (1, 3, 4, 8)),
        full("fsdp", (1, 3, 4, 8)),
        full("hsdp", (4, 6)),
    ],
)
def test_missing_gradient_is_a_leaf_of_zeros(kind: str, sizes: tuple[int, ...]) -> None:
    if kind != "ddp" and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("FSDP2 of this torch adds no zeros, and unused parameters are refused")
    zeros = torch.zeros(5, 3)
    wanted: list[list[Any] | None] = []
    for expert in range(6):
        leaves = [
            # The fourth expert is used twice by its micro-batches, but for the last one.
            expert_row(g) * (1 if g == M - 1 else 2) if g % 4 == expert else zeros
            for g in range(M)
        ]
        if expert == 5:
            leaves[M - 1] = expert_row(M - 1)
        used = expert != 4
        wanted.append(bits(reduce_leaves(leaves, "avg", (M,))).tolist() if used else None)
    for ranks in sizes:
        every = run_ranks(lambda _, w=ranks: expert_gradients(kind, w), ranks, backend="meshplan")  # type: ignore[misc]
        for found in every:
            assert found[:6] == found[6:12] == wanted
            assert found[16] == bits(torch.ones(5, 3)).tolist()
            assert found == every[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("ddp", (2,)), ("fsdp", (3,)), ("fsdp", (2, 2))],
)
def test_few_copies_of_a_slice_are_kept(kind: str, sizes: tuple[int, ...]) -> None:
    """Between rounds, beside the model: log2(M) + 1 partial sums of a rank's slice at most."""
    ranks, count, width = math.prod(sizes), 16, 96

    def living() -> int:
        # The group's thread lets go of a call a moment after its end.
        return min(held_after(pause) for pause in (0, 0.01, 0.1))

    def held_after(pause: float) -> int:
        time.sleep(pause)
        gc.collect()
        tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
        whole = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
        # A view keeps all of its memory.
        storages = [one.untyped_storage() for one in whole]
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values())

    def run(rank: int) -> int:
        linear = nn.Linear(width, width, bias=False)
        if kind == "ddp":
            model: nn.Module = DistributedDataParallel(linear)
            accumulator = GradientAccumulator(model, count)
        else:
            mesh = mesh_of(sizes)
            model = fully_shard(linear, mesh=mesh)
            accumulator = GradientAccumulator(model, count, mesh)
        found = []
        for step in range(2):
            for _ in range(accumulator.micro_batches.rounds - 1):
                with accumulator.round():
                    model(torch.ones(1, width)).sum().backward()
                found.append(living())
            with accumulator.round():
                model(torch.ones(1, width)).sum().backward()
            accumulator.finish()
            model.zero_grad()
            if step == 0:  # What torch keeps is there after the first step.
                found, before = [], living()
        return max(found) - before

    slice = -(-width // ranks) * width * 4
    for most in run_ranks(run, ranks, backend="meshplan"):
        assert slice <= most <= (math.log2(count) + 1) * slice + 2**13


def test_plain_accumulation_has_other_bits() -> None:
    """What FSDP2 does with the same micro-batches."""

    def run(rank: int) -> float:
        model = shard(mesh_of((2,)))
        for round in range(M // 2):
            (model(round * 2 + rank) * (2 / M)).backward()
        found = torch.cat([one.flatten() for one in whole_gradients(model)])
        leaves = [
            torch.cat([row(g, shape, i, F32).flatten() for i, shape in enumerate(SHAPES)])
            for g in range(M)
        ]
        return (bits(found) != bits(reduce_leaves(leaves, "avg", (M,)))).float().mean().item()

    assert min(run_ranks(run, 2, backend="meshplan")) > 0.3


def tensor_parallel_step(
    folder: Path, shards: int, steps: int, load: str = "", save: str = ""
) -> list[Any]:
    """Bits of gradients, parameters and optimizer states, from a checkpoint and to another."""
    mesh = init_device_mesh("cpu", (shards, 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    model = fully_shard(parallelize_module(Block(), mesh["tp"], PLAN), mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    accumulator = GradientAccumulator(model, M, mesh["fsdp"])
    micro_batches = accumulator.micro_batches

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, **micro_batches.state_dict()}

    if load:
        saved = state()
        checkpoint.load(saved, checkpoint_id=folder / load)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        micro_batches.load_state_dict(saved)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        for round in range(micro_batches.rounds):
            with accumulator.round():
                at = micro_batches.step * M + micro_batches.index(round)
                seed = 2 * at + mesh.get_local_rank("tp")
                x = torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(seed))
                (model(x) * 10.0 ** (seed % 5)).square().sum().backward()
        accumulator.finish()
        norm = meshplan.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        parts = [norm, *whole_gradients(model)]
        for one in model.parameters():
            parts += [one, *(value for _, value in sorted(optimizer.state[one].items()))]
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in parts]
        found.append([bits(one.detach()).tolist() for one in whole])
    if save:
        checkpoint.save(state(), checkpoint_id=folder / save)
    return found


@pytest.mark.full
def test_tensor_parallel_steps_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """With two tensor-parallel ranks, of 1, 3 or 4 data-parallel ranks, through checkpoints."""

    def run(shards: int, *options: Any) -> list[Any]:
        def call(_: int) -> list[Any]:
            return tensor_parallel_step(tmp_path, shards, *options)

        every = run_ranks(call, 2 * shards, backend="meshplan")
        assert every == [every[0]] * (2 * shards)
        return every[0]  # type: ignore[no-any-return]

    wanted = run(1, 3)
    assert run(3, 1, "", "first") == wanted[:1]
    assert run(4, 1, "first", "second") == wanted[1:2]
    assert run(1, 1, "second") == wanted[2:]


def test_repeated_micro_batch_leaves_random_numbers_and_buffers_as_they_were() -> None:
    """Of 3 micro-batches on 2 ranks, the second rank repeats its one in the last round."""

    def run(rank: int) -> list[float]:
        mesh = mesh_of((2,))
        model = shard(mesh)
        for name in ("written", "replaced"):
            model.register_buffer(name, torch.zeros(1))
        accumulator = GradientAccumulator(model, 3, mesh)
        torch.manual_seed(rank)
        for round in range(2):
            with accumulator.round():
                model(accumulator.micro_batches.index(round)).backward()
                torch.rand(1)
                model.written += 1
                model.replaced = model.replaced + 1
        accumulator.finish()
        assert model.written.item() == model.replaced.item() == 2 - rank
        return torch.rand(1).tolist()  # type: ignore[no-any-return]

    for rank, found in enumerate(run_ranks(run, 2, backend="meshplan")):
        torch.manual_seed(rank)
        assert found == torch.rand(3 - rank)[-1:].tolist()


def test_scalar_sums_do_not_depend_on_order() -> None:
    inf = math.inf
    for numbers, wanted in (
        ([1e308, 1e308, -1e308], 1e308),
        ([1e308, 1e308], inf),
        ([-1e308, -1e308], -inf),
        ([inf, 1.0], inf),
        ([0.1] * 10, 1.0),
        ([1.0, 1e100, 1.0, -1e100], 2.0),
    ):
        assert exact_sum(numbers) == exact_sum(numbers[::-1]) == wanted
    assert math.isnan(exact_sum([inf, 1.0, -inf]))
    assert math.isnan(exact_sum([math.nan, inf]))


class TestErrors(TestCase):
    maxDiff = None

    @pytest.mark.full
    def test_unsupported_models_are_refused(self) -> None:
        def run(rank: int) -> list[str]:
            gloo = dist.new_group(backend="gloo")
            mesh, pair = mesh_of((2,)), mesh_of((2, 1))
            texts = [
                refuse(GradientAccumulator, *arguments)
                for arguments in (
                    (shard(mesh), 1, mesh),
                    (Model(), M, mesh),
                    (shard(mesh), M),
                    (shard(pair), M, pair["ddp"]),
                    (fully_shard(Model(BF16), mesh=mesh), M, mesh),
                    (DistributedDataParallel(Model(BF16)), M),
                    (DistributedDataParallel(Model()), M, mesh),
                )
            ]
            plain = DistributedDataParallel(Model(), process_group=gloo)
            texts.append(refusal(IntegrationError, GradientAccumulator, plain, M))
            for error, options in (
                (ContractError, {"contract": Contract(order="rank")}),
                (ContractError, {"contract": Contract(accumulate="float64")}),
                (ElasticError, {"policy": "fast"}),
            ):
                pg_options = meshplan.BackendOptions(**options)  # type: ignore[arg-type]
                group = dist.new_group(backend="meshplan", pg_options=pg_options)
                model = DistributedDataParallel(Model(torch.float64), process_group=group)
                texts.append(refusal(error, GradientAccumulator, model, M))
            return texts

        self.assertExpectedInline(
            "\n".join(common_result(run, 2, backend="meshplan")),
            """\
MP902: ranks=2 of data parallelism for 1 micro-batches in a step; pass at least 1 and at most 1, so that each rank has a micro-batch
MP902: model is a Model; pass a DistributedDataParallel, or a model after fully_shard and its mesh
MP902: model is a FSDPModel; pass a DistributedDataParallel, or a model after fully_shard and its mesh
MP902: parameter 'weights.0' is not sharded over DeviceMesh((ddp=2), 'cpu', stride=(1,)); pass the mesh that fully_shard got, and shard all parameters over it
MP902: parameter 'weights.0' is torch.bfloat16, to which each round would be rounded; keep parameters in float32, and compute in 16 bits by MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32) or autocast
MP902: parameter 'module.weights.0' is torch.bfloat16, to which each round would be rounded; keep parameters in float32, and compute in 16 bits by MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32) or autocast
MP902: mesh is for FSDP2, and DDP has a process group; omit mesh
MP901: the model has a group of the backend 'gloo', which reduces in its own order; call torch.distributed.init_process_group('meshplan'), or pass a group of new_group(backend='meshplan')
MP411: gradients under v1/rank/wide/once cannot be added in rounds; use Contract(order='tree', accumulate='wide')
MP411: gradients under v1/tree/float64/once cannot be added in rounds; use Contract(order='tree', accumulate='wide')
MP902: a group reduces under v1/tree/wide/once with policy='fast', another under v1/tree/wide/once; pass the same BackendOptions of policy='deterministic' to all groups""",
        )

    def test_wrong_calls_are_refused(self) -> None:
        def run(rank: int) -> list[str]:
            mesh = mesh_of((2,))
            model = shard(mesh)
            accumulator = GradientAccumulator(model, 4, mesh)

            def backward(g: int) -> None:
                with accumulator.round():
                    for _ in range(2 if g == 9 else g >= 0):
                        model(g % 9).backward()

            texts = [refuse(accumulator.finish), refuse(lambda: backward(9))]
            texts.append(refuse(lambda: backward(rank)))
            texts.append(refuse(lambda: model(rank).backward()))
            model = shard(mesh)
            texts.append(refuse(lambda: GradientAccumulator(model, 4 << rank, mesh)))
            texts.append(refuse(lambda: GradientAccumulator(model, 4, mesh, seed=rank or None)))
            accumulator = GradientAccumulator(model, 4, mesh)
            backward(rank)
            backward(rank)
            texts.append(refuse(lambda: backward(rank)))
            texts.append(refuse(lambda: accumulator.finish(divisor=0)))
            texts.append(refuse(lambda: accumulator.finish(divisor=8 + rank)))
            texts.append(refuse(lambda: accumulator.sum_scalars([1.0])))
            accumulator.finish()
            texts.append(refuse(lambda: backward(rank)))
            model.zero_grad()
            texts.append(refuse(lambda: model.set_gradient_divide_factor(2.0)))
            model.set_force_sum_reduction_for_comms(False)
            texts.append(refuse(lambda: backward(rank)))
            narrow = shard(mesh, BF16, BF16)
            other = GradientAccumulator(narrow, 4, mesh)

            def backward_in_16_bits() -> None:
                with other.round():
                    narrow(rank).backward()

            texts.append(refuse(backward_in_16_bits))
            model = shard(mesh)
            accumulator = GradientAccumulator(model, 4, mesh)
            texts.append(refuse(lambda: model.set_all_reduce_hook(print)))
            texts.append(refuse(lambda: model(rank).backward()))
            texts += [refuse(lambda: backward(rank)), refuse(accumulator.finish)]
            model = shard(mesh)
            accumulator = GradientAccumulator(model, 4, mesh)
            backward(rank)
            model.weights[1].requires_grad_(False)
            texts.append(refuse(lambda: backward(rank)))
            model = shard(mesh)
            accumulator = GradientAccumulator(model, 4, mesh)
            model.set_custom_reduce_scatter(ReduceScatter())
            texts.append(refuse(lambda: backward(rank)))
            model = shard(mesh)
            accumulator = GradientAccumulator(model, 4, mesh)
            texts += [refuse(lambda: backward(-1)), refuse(accumulator.reset)]
            return texts

        self.assertExpectedInline(
            "\n".join(common_result(run, 2, backend="meshplan")),
            """\
MP902: 0 of 2 rounds are done; compute 2 micro-batches on each rank before finish
MP902: parameter 'weights.0' got several gradients in round 0, whose sum depends on the number of ranks; call backward once in it, and shard a module that forward calls several times with its parent
MP902: an exception ended round 0, or backward was called outside of it; call reset on every rank, and begin the step again
MP902: backward was called outside of GradientAccumulator.round; call it inside
MP902: data-parallel rank 1 has (micro_batches, seed) = (8, None), rank 0 (4, None); pass the same on all ranks
MP902: data-parallel rank 1 has (micro_batches, seed) = (4, 1), rank 0 (4, None); pass the same on all ranks
MP902: all 2 rounds of this step are done; call finish, and then the optimizer, or reset to begin the step again
MP902: divisor=0; pass an integer from 1 to 2**63 - 1
MP902: data-parallel rank 1 has (divisor, finished steps) = (9, 0), rank 0 (8, 0); pass the same divisor and load the same checkpoint on all ranks
MP902: got 1 values for 2 rounds; pass one for each round of this rank
MP902: parameter 'weights.0' has a gradient before the round; call optimizer.zero_grad() after each step, and backward inside of round only
MP902: GradientAccumulator sets FSDP2's divide factor and all-reduce hook; pass a divisor to GradientAccumulator.finish, and set no hook
MP902: FSDP2 does not sum a round; leave set_force_sum_reduction_for_comms as GradientAccumulator sets it
MP902: gradients are reduced in torch.bfloat16, which rounds the sum of each round; pass MixedPrecisionPolicy(reduce_dtype=torch.float32)
MP902: GradientAccumulator sets FSDP2's divide factor and all-reduce hook; pass a divisor to GradientAccumulator.finish, and set no hook
MP902: backward was called outside of GradientAccumulator.round; call it inside
MP902: an exception ended round 0, or backward was called outside of it; call reset on every rank, and begin the step again
MP902: an exception ended round 0, or backward was called outside of it; call reset on every rank, and begin the step again
MP902: parameter 'weights.1' was frozen, or trained again, within the step; set requires_grad between steps
MP902: FSDP2 reduced the shards of module 'root' by another reduce-scatter; call integrations.fsdp.apply before GradientAccumulator, and set none after it
MP902: no gradient was reduced in round 0; call backward once in it, without no_sync, and with set_requires_gradient_sync(True); replace no parameter
MP902: a round ended without a reduction, and FSDP2 adds its gradients to the next ones; make the model again from the last checkpoint""",
        )

    @pytest.mark.full
    def test_gradients_that_ddp_does_not_reduce_are_refused(self) -> None:
        def run(rank: int) -> str:
            model = DistributedDataParallel(Model())
            accumulator = GradientAccumulator(model, M)

            def backward() -> None:
                with accumulator.round(), model.no_sync():
                    model(rank).backward()

            texts = [refuse(backward)]
            model = DistributedDataParallel(Model())
            GradientAccumulator(model, M)
            texts.append(refuse(lambda: model(rank).backward()))
            model = DistributedDataParallel(Model())
            accumulator = GradientAccumulator(model, M)

            def backward_on_one_rank() -> None:
                with accumulator.round():
                    if rank == 0:
                        model(rank).backward()

            return "\n".join([*texts, refuse(backward_on_one_rank)])

        found = run_ranks(run, 2, backend="meshplan")
        self.assertExpectedInline(
            "\n".join([*found[:1], found[1].splitlines()[-1]]),
            """\
MP902: no gradient was reduced in round 0; call backward once in it, without no_sync, and with set_requires_gradient_sync(True); replace no parameter
MP902: backward was called outside of GradientAccumulator.round; call it inside
MP902: data-parallel rank 1 raised an error in round 0, as its log states; call reset on every rank, and begin the step again
MP902: no gradient was reduced in round 0; call backward once in it, without no_sync, and with set_requires_gradient_sync(True); replace no parameter""",
        )
