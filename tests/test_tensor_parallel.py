"""Tensor-parallel training code as users write it, unchanged, with meshplan installed.

What meshplan reduces is compared with the contract over the ranks' own summands; what it leaves to
torch, with torch alone.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import meshplan
from meshplan._chunks import chunk_sizes
from meshplan.definition import reduce_leaves
from meshplan.execute import BoundReduction, StepGroups
from meshplan.planner import Step
from meshplan.testing import assert_bitwise_equal, assert_replicas_equal, bits, order_sensitive
from tests.processes import run_ranks

pytestmark = pytest.mark.processes

R, S = Replicate(), Shard
# 3 and 4 ranks divide all but the vocabulary; torch's styles take no uneven sequences.
VOCAB, WIDTH, HEADS, TOKENS = 11, 24, 12, 12


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> None:
    """Ranks are forked, and torch would import this in each of them."""
    importlib.import_module("torch._dynamo")


@dataclass
class Seen:
    """The reductions that ran, with input and result on this rank."""

    calls: list[tuple[Tensor, Step, StepGroups, Tensor]] = field(default_factory=list)

    def check(self) -> int:
        """Compare each with the contract; how many of them another order would have changed."""
        sensitive = 0
        for summand, step, groups, result in self.calls:
            leaves = [torch.empty_like(summand) for _ in range(groups.flat.size())]
            dist.all_gather(leaves, summand, group=groups.flat)
            expected = combined(leaves, step)
            turned = combined(leaves[1:] + leaves[:1], step)
            sensitive += not torch.equal(bits(turned), bits(expected))
            coordinates = [*itertools.product(*map(range, step.sizes))][groups.position]
            for axis, dim in step.scatter:
                i = step.axes.index(axis)
                lengths = chunk_sizes(expected.shape[dim], step.sizes[i])
                start = sum(lengths[: coordinates[i]])
                expected = expected.narrow(dim, start, lengths[coordinates[i]])
            assert_bitwise_equal(result, expected, str(step))
        self.calls.clear()
        return sensitive


def combined(leaves: Sequence[Tensor], step: Step) -> Tensor:
    assert step.op is not None
    assert step.contract is not None
    if step.norm is not None:
        leaves = [leaf**step.norm for leaf in leaves]
    value = reduce_leaves(leaves, step.op, step.sizes, step.contract, divisor=step.divisor)
    return value if step.norm is None else value ** (1 / step.norm)


@contextmanager
def watched(**arguments: Any) -> Iterator[Seen]:
    """meshplan installed, and every reduction of it seen."""
    seen, run = Seen(), BoundReduction.start

    def start(bound: BoundReduction, tensor: Tensor, groups: StepGroups, **more: Any) -> Tensor:
        summand = tensor.detach().clone(memory_format=torch.contiguous_format)
        result = torch.ops._c10d_functional.wait_tensor(run(bound, tensor, groups, **more))
        seen.calls.append((summand, bound.step, groups, result.clone()))
        return result

    meshplan.clear_report()
    with (
        mock.patch.object(BoundReduction, "start", start),
        meshplan.installed(**arguments),
    ):
        yield seen


def list_executed() -> str:
    """What the report says has run, in the order in which it first did; then it is cleared.

    Without the ranks of a part of the mesh, which are those that say it.
    """
    lines = [
        f"{entry['count']} x {entry['asked']} {entry['dtype']}: {entry['ran']}"
        for entry in meshplan.report().entries
    ]
    meshplan.clear_report()
    return re.sub(r"; ranks [^)]*", "", "\n".join(lines))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            layer(x).view(batch, tokens, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention, self.mlp = Attention(), Mlp()
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.out(self.norm3(x))


def parallel(mesh: DeviceMesh) -> nn.Module:
    """As tutorials have it: vocabulary, heads and hidden units in parts, norms over parts of the
    sequence, and one matrix for the embedding and the output."""
    torch.manual_seed(0)
    model = Model()
    whole = PrepareModuleInput(input_layouts=S(1), desired_input_layouts=R)
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=R, output_layouts=S(1)),
            "norm1": SequenceParallel(),
            "attention": whole,
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=S(1)),
            "norm2": SequenceParallel(),
            "mlp": whole,
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=S(1)),
            "norm3": SequenceParallel(),
            "out": ColwiseParallel(
                input_layouts=S(1), output_layouts=S(-1), use_local_output=False
            ),
        },
    )
    model.out.weight = model.embed.weight
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randint(VOCAB, (2, TOKENS)), torch.randint(VOCAB, (2, TOKENS))


def backward(model: nn.Module, step: int) -> Tensor:
    tokens, targets = batch(step)
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
    return loss


def locals_of(tensors: Sequence[Any]) -> list[Tensor]:
    return [t.to_local().detach().clone() if isinstance(t, DTensor) else t for t in tensors]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise_equal(one, other, f"{what}, {i}")


class TestTraining(TestCase):
    def steps(self, world: int, foreach: Sequence[bool]) -> str:
        """Two steps on ``world`` ranks, each reduction compared; returns the report of one."""

        def ranks(rank: int) -> list[str]:
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
            texts = []
            with watched(path="exchange", strict=True) as seen:
                for at_once in foreach:
                    model = parallel(mesh)
                    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=at_once)
                    for step in range(2):
                        loss = backward(model, step)
                        texts.append(list_executed())
                        assert seen.check() == 5
                        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=at_once)
                        texts.append(list_executed())
                        assert seen.check() > 3
                        optimizer.step()
                        texts.append(list_executed())
                        assert seen.check() > 3
                        optimizer.zero_grad()
                        assert_replicas_equal(loss.to_local())  # type: ignore[attr-defined]
                        assert_replicas_equal(norm.to_local())  # type: ignore[attr-defined]
                    for parameter in model.parameters():
                        if parameter.placements == (R,):  # type: ignore[attr-defined]
                            assert_replicas_equal(parameter.to_local())  # type: ignore[attr-defined]
            # With foreach, some versions of torch reduce a gradient once more to clip it.
            assert texts[3:6] == texts[:3]
            return texts[:3]

        first, *others = run_ranks(ranks, world)
        assert others == [first] * (world - 1)
        return "\n\n".join(first)

    @pytest.mark.full
    def test_transformer_steps_on_three_ranks_are_exact(self) -> None:
        self.assertExpectedInline(
            self.steps(3, [False, True]),
            """1 x (MaskP(sum, torch.Size([11, 24]), 0)) -> (S(1)) on (tp=3) : torch
5 x (P(sum)) -> (S(1)) on (tp=3) float32: exchange

6 x (P(sum)) -> (R) on (tp=3) float32: exchange
1 x (_NormP(2.0)) -> (R) on (tp=3) float32: exchange

18 x (P(sum)) -> (R) on (tp=3) float32: exchange""",
        )

    @pytest.mark.full
    def test_transformer_steps_on_four_ranks_are_exact(self) -> None:
        """Where the contract's tree is no longer a left fold."""
        assert "5 x (P(sum)) -> (S(1)) on (tp=4) float32: exchange" in self.steps(4, [True])

    def test_reduction_of_each_layout_is_exact(self) -> None:
        """Module inputs and outputs that are partial, replicated and sharded, also unevenly."""

        class Identity(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x

        def ranks(rank: int) -> str:
            mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
            with watched(path="exchange", strict=True) as seen:
                for rows in (7, 2):
                    x = order_sensitive(rows * 5, rank=rank, world_size=3).view(rows, 5)
                    for target in (R, S(0), S(1)):
                        wants = PrepareModuleInput(
                            input_layouts=Partial(),
                            desired_input_layouts=target,
                            use_local_output=True,
                        )
                        gives = PrepareModuleOutput(
                            output_layouts=Partial(), desired_output_layouts=target
                        )
                        for style in (wants, gives):
                            layer = parallelize_module(Identity(), mesh, style)
                            summand = x.clone().requires_grad_()
                            layer(summand).sum().backward()
                            assert summand.grad is not None
                            assert seen.check() == 1
            return list_executed()

        first, *others = run_ranks(ranks, 3)
        assert others == [first] * 2
        self.assertExpectedInline(
            first,
            """\
4 x (P(sum)) -> (R) on (tp=3) float32: exchange
4 x (P(sum)) -> (S(0)) on (tp=3) float32: exchange
4 x (P(sum)) -> (S(1)) on (tp=3) float32: exchange""",
        )


class TestTorchFeatures(TestCase):
    """What meshplan has no part in has the bits of torch alone."""

    def both(self, function: Callable[[], list[Tensor]]) -> str:
        """The function without and with meshplan, which reduces no floating sum; what it says."""
        expected = function()
        with watched(strict=True) as seen:
            found = function()
            assert seen.check() == 0
            text = list_executed()
        assert_same(found, expected, "with meshplan")
        return text

    def on_three(self, function: Callable[[DeviceMesh], list[Tensor]]) -> str:
        def ranks(rank: int) -> str:
            mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
            return self.both(lambda: function(mesh))

        first, *others = run_ranks(ranks, 3)
        assert others == [first] * 2
        return str(first)

    def test_uneven_embedding_rows_are_exact(self) -> None:
        def embedding(mesh: DeviceMesh) -> list[Tensor]:
            found = []
            for target in (R, S(0), S(1)):
                torch.manual_seed(0)
                rows = nn.Embedding(VOCAB, WIDTH)
                expected = rows(batch(0)[0])
                style = RowwiseParallel(input_layouts=R, output_layouts=target)
                cut = parallelize_module(rows, mesh, style)(batch(0)[0])
                if target is R:
                    assert_bitwise_equal(cut.detach(), expected.detach())
                cut.sum().backward()
                found += locals_of([cut.detach(), rows.weight.grad])
            return found

        self.assertExpectedInline(
            self.on_three(embedding),
            """\
1 x (MaskP(sum, torch.Size([11, 24]), 0)) -> (R) on (tp=3) : torch
1 x (MaskP(sum, torch.Size([11, 24]), 0)) -> (S(0)) on (tp=3) : torch
1 x (MaskP(sum, torch.Size([11, 24]), 0)) -> (S(1)) on (tp=3) : torch""",
        )

    def test_loss_parallel_is_exact(self) -> None:
        """It calls the backend by itself, over which no policy has a hold; the report has nothing."""
        logits = order_sensitive(24 * VOCAB, rank=0, world_size=2).view(24, VOCAB).clamp(-9, 9)

        def loss(mesh: DeviceMesh) -> list[Tensor]:
            cut = distribute_tensor(logits, mesh, [S(1)]).requires_grad_()
            with loss_parallel():
                value = nn.functional.cross_entropy(cut, batch(0)[1].flatten())
                value.backward()
            assert cut.grad is not None
            return locals_of([value, cut.grad])

        self.assertExpectedInline(self.on_three(loss), """""")

    def test_optimizers_keep_replicas_equal(self) -> None:
        values = order_sensitive(55, rank=0, world_size=2).view(11, 5)

        def optimizer(mesh: DeviceMesh) -> list[Tensor]:
            found = []
            for foreach, placement in itertools.product((True, False), (S(0), S(1), R)):
                weights = [
                    nn.Parameter(distribute_tensor(values * k, mesh, [placement])) for k in (1, 2)
                ]
                adamw = torch.optim.AdamW(weights, foreach=foreach)
                for k in range(2):
                    for weight in weights:
                        weight.grad = distribute_tensor(values + k, mesh, [placement])
                    adamw.step()
                found += locals_of(weights)
            return found

        self.assertExpectedInline(self.on_three(optimizer), """""")

    def test_gradient_scaler_keeps_replicas_equal(self) -> None:
        """That one rank has found an infinity is known to all: a maximum, exact in any order."""
        values = order_sensitive(55, rank=0, world_size=2).view(11, 5)

        def scaler(mesh: DeviceMesh) -> list[Tensor]:
            found = []
            for bad in (False, True):
                weight = nn.Parameter(distribute_tensor(values.clone(), mesh, [S(0)]))
                sgd = torch.optim.SGD([weight], lr=0.5)
                scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
                scaler.scale(torch.ones(()))
                gradient = torch.ones(11, 5)
                if bad:
                    gradient[7, 2] = torch.inf
                weight.grad = distribute_tensor(gradient, mesh, [S(0)])
                scaler.unscale_(sgd)
                found += locals_of([weight.grad])
                scaler.step(sgd)
                scaler.update()
                moved = weight.full_tensor().detach()  # type: ignore[attr-defined]
                assert_bitwise_equal(moved, values - (0.0 if bad else 0.125))
                assert scaler.get_scale() == (2.0 if bad else 4.0)
                found += [moved]
            return found

        self.assertExpectedInline(
            self.on_three(scaler), """2 x (P(max)) -> (R) on (tp=3) float32: one_shot"""
        )


class TestTwoAxes(TestCase):
    @pytest.mark.full
    def test_fsdp_with_tensor_parallel_is_exact(self) -> None:
        """The norm of gradients in parts on both axes is one reduction, in the contract's order."""

        def ranks(rank: int) -> list[str]:
            mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
            model = parallel(mesh["tp"])
            fully_shard(model, mesh=mesh["dp"])
            texts = []
            with watched(path="exchange", strict=True) as seen:
                backward(model, 0)
                texts.append(list_executed())
                assert seen.check() > 5
                gradients = [p.grad for p in model.parameters()]
                before = locals_of(gradients)
                for foreach in (True, False):
                    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
                    # The norms of all parameters are one tensor, of which torch takes the norm.
                    ((_, step, _, norms),) = seen.calls
                    assert (step.sizes, step.norm) == ((2, 3), 2.0)
                    total = torch.linalg.vector_norm(norms)
                    assert_bitwise_equal(norm.to_local(), total)  # type: ignore[attr-defined]
                    assert_replicas_equal(total)
                    assert seen.check() == 1
                    scale = (0.1 / (total + 1e-6)).clamp(max=1.0)
                    expected = [gradient * scale for gradient in before]
                    assert_same(locals_of(gradients), expected, "clipped")
                    for gradient, value in zip(gradients, before, strict=True):
                        gradient.to_local().copy_(value)  # type: ignore[union-attr]
                texts.append(list_executed())
                scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
                scaler.scale(torch.ones(()))
                sgd = torch.optim.SGD(model.parameters())
                scaler.unscale_(sgd)
                texts.append(list_executed())
                assert seen.check() == 0
            return texts

        first, *others = run_ranks(ranks, 6, backend="meshplan")
        assert others == [first] * 5
        self.assertExpectedInline(
            "\n\n".join(first),
            """\
1 x (MaskP(sum, torch.Size([11, 24]), 0)) -> (S(1)) on (tp=3) : torch
1 x reduce_scatter sum of backend meshplan float32: one_shot
5 x (P(sum)) -> (S(1)) on (tp=3) float32: exchange
1 x all_reduce max of backend meshplan float32: one_shot
2 x all_reduce sum of backend meshplan float32: one_shot
6 x (P(sum)) -> (R) on (tp=3) float32: exchange
1 x reduce_scatter avg of backend meshplan float32: one_shot

2 x (_NormP(2.0), _NormP(2.0)) -> (R, R) on (dp=2, tp=3) float32: exchange

1 x (P(max), P(max)) -> (R, R) on (dp=2, tp=3) float32: exchange""",
        )

    def test_data_with_tensor_parallel_is_exact(self) -> None:
        """Replicas of a norm, whose gradients are partial on both axes and stay so in a step."""

        def ranks(rank: int) -> str:
            mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
            torch.manual_seed(rank)
            x = torch.randn(3, 5, WIDTH) * 10.0**rank
            inputs = DTensor.from_local(x, mesh, [S(0), S(1)], run_check=False)
            for make in (
                lambda p: torch.optim.SGD(p, lr=0.5, foreach=False),
                lambda p: torch.optim.AdamW(p, lr=0.5, foreach=True),
                lambda p: torch.optim.AdamW(p, lr=0.5, foreach=False),
            ):
                norm, alone = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
                for name, value in list(norm.named_parameters()):
                    setattr(norm, name, nn.Parameter(distribute_tensor(value.data, mesh, [R, R])))
                with watched(path="exchange", strict=True) as seen:
                    (norm(inputs) * inputs).sum().full_tensor().backward()
                    assert seen.check() == 1
                    for replica, parameter in zip(
                        alone.parameters(), norm.parameters(), strict=True
                    ):
                        assert parameter.grad.placements == (Partial(), Partial())  # type: ignore[union-attr]
                        replica.grad = parameter.grad.full_tensor()  # type: ignore[union-attr]
                    assert seen.check() == 2
                    make(norm.parameters()).step()
                    assert seen.check() >= 2
                    text = list_executed()
                # As one process does it that has the reduced gradients.
                make(alone.parameters()).step()
                found = [p.to_local().detach() for p in norm.parameters()]  # type: ignore[attr-defined]
                assert_same(found, [p.detach() for p in alone.parameters()], "after a step")
            return text

        first, *others = run_ranks(ranks, 6)
        assert others == [first] * 5
        self.assertExpectedInline(
            first,
            """\
9 x (P(sum), P(sum)) -> (R, R) on (dp=2, tp=3) float32: exchange
1 x (R, R) -> (S(0), S(1)) on (dp=2, tp=3) : torch
1 x (R, R) -> (S(0), S(1)) on (dp=2, tp=3) : torch""",
        )
