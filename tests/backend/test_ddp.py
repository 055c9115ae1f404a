"""DDP over the backend: with the hook, gradients are averages with one rounding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import IntegrationError
from meshplan.integrations import ddp
from meshplan.testing import assert_bitwise_equal, bits, order_sensitive
from tests.backend.native_calls import count_native_reductions
from tests.processes import common_result, run_ranks
from tests.refusals import refusal

pytestmark = pytest.mark.processes

SHAPES = ((7, 11), (5,), (64, 3), (1,), (130,), (9, 9))
MIXED = (torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.float16, torch.bfloat16)
# One bucket for a few parameters, one for each, one for all of a dtype.
CAPS = (0.0005, 0.00001, 25)


class Rows(nn.Module):
    """The gradient of each parameter is the row that it is multiplied with, to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(
            nn.Parameter(torch.ones(shape, dtype=dtype))
            for shape, dtype in zip(SHAPES, MIXED, strict=True)
        )

    def forward(self, rows: Sequence[Tensor]) -> Tensor:
        # Not in the order of the parameters: DDP makes other buckets after the first iteration.
        pairs = sorted(enumerate(rows), key=lambda pair: pair[0] * 5 % 7)
        return torch.stack([(row * self.rows[i]).sum().to(torch.float64) for i, row in pairs]).sum()


@cache
def rows_of(world: int, seed: int) -> list[list[Tensor]]:
    """The rows of each rank, known on all ranks."""
    return [
        [
            order_sensitive(
                torch.Size(shape).numel(), rank=rank, world_size=world, dtype=dtype, seed=seed + i
            ).view(shape)
            for i, (shape, dtype) in enumerate(zip(SHAPES, MIXED, strict=True))
        ]
        for rank in range(world)
    ]


def averages(leaves: Sequence[Sequence[Tensor]], contract: Contract = Contract()) -> list[Tensor]:
    return [reduce_leaves(one, "avg", (len(one),), contract) for one in zip(*leaves, strict=True)]


def hooked(module: nn.Module, **options: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(module, **options)
    ddp.register(model)
    return model


def check(model: nn.Module, expected: Sequence[Tensor], what: str) -> None:
    for i, (parameter, wanted) in enumerate(zip(model.parameters(), expected, strict=True)):
        assert parameter.grad is not None
        assert_bitwise_equal(parameter.grad, wanted, f"parameter {i}, {what}")
        parameter.grad = None


@pytest.mark.parametrize("world", [3, 5])
def test_gradients_are_averages_with_one_rounding(world: int) -> None:
    """Whatever the buckets; without the hook, other bits."""

    def run(rank: int) -> bool:
        with count_native_reductions() as counts:
            for cap in CAPS:
                for view in (False, True):
                    model = hooked(Rows(), bucket_cap_mb=cap, gradient_as_bucket_view=view)
                    for seed in range(3):
                        leaves = rows_of(world, 100 * seed)
                        model(leaves[rank]).backward()
                        check(model, averages(leaves), f"{cap}, {view}, {seed}")
        assert dict(counts) == {}
        leaves = rows_of(world, 0)
        plain = DistributedDataParallel(Rows())
        plain(leaves[rank]).backward()
        found = [parameter.grad for parameter in plain.parameters()]
        assert all(isinstance(one, Tensor) for one in found)
        pairs = zip(found, averages(leaves), strict=True)
        return all(torch.equal(bits(a), bits(b)) for a, b in pairs if a is not None)

    assert run_ranks(run, world, backend="meshplan") == [False] * world


def test_accumulated_and_complex_gradients_are_averaged() -> None:
    def run(rank: int) -> None:
        first, second = rows_of(3, 0), rows_of(3, 100)
        model = hooked(Rows())
        with model.no_sync():
            model(first[rank]).backward()
        model(second[rank]).backward()
        leaves = [[a + b for a, b in zip(first[r], second[r], strict=True)] for r in range(3)]
        check(model, averages(leaves), "accumulated")
        pairs = [torch.view_as_complex(rows_of(3, 0)[r][2].view(-1, 2)[:90]) for r in range(3)]
        numbers = nn.Linear(90, 1, bias=False, dtype=torch.complex64)
        model = hooked(numbers)
        (model(pairs[rank].conj())).real.sum().backward()
        average = reduce_leaves([torch.view_as_real(one) for one in pairs], "avg", (3,))
        gradient = numbers.weight.grad
        assert gradient is not None
        assert_bitwise_equal(torch.view_as_real(gradient[0]), average, "complex")

    run_ranks(run, 3, backend="meshplan")


def test_failure_comes_out_of_the_backward() -> None:
    def run(_: int) -> str:
        model = hooked(nn.Linear(3, 2))
        model(torch.ones(1, 3)).sum().backward()
        group: Any = model.process_group
        group._calls.stop(RuntimeError("an earlier failure"))
        with pytest.raises(
            RuntimeError, match="has stopped, because a reduction failed before: an earlier failure"
        ):
            model(torch.ones(1, 3)).sum().backward()
        return "raised"

    assert run_ranks(run, 2, backend="meshplan") == ["raised"] * 2


class TestErrors(TestCase):
    maxDiff = None

    def test_unsupported_models_are_refused(self) -> None:
        def run(_: int) -> list[str]:
            gloo = dist.new_group(backend="gloo")
            messages = []
            plain = nn.Linear(2, 2)
            for model in (plain, DistributedDataParallel(plain, process_group=gloo)):
                messages.append(refusal(IntegrationError, ddp.register, model))
            model = hooked(nn.Embedding(4, 2, sparse=True))
            messages.append(refusal(IntegrationError, model(torch.tensor([1])).sum().backward))
            with pytest.raises(RuntimeError, match="can only be called once"):
                ddp.register(model)
            return messages

        self.assertExpectedInline(
            "\n".join(common_result(run, 2, backend="meshplan")),
            """\
MP901: model is a Linear; pass the torch.nn.parallel.DistributedDataParallel around it
MP901: the model has a group of the backend 'gloo', which reduces in its own order; call torch.distributed.init_process_group('meshplan'), or pass a group of new_group(backend='meshplan')
MP901: the gradient of a parameter of shape [4, 2] is torch.sparse_coo, and the contract is for dense ones; pass sparse=False to its module""",
        )
