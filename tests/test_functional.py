"""Differentiable collectives, and the operators that implement them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from meshplan import (
    deterministic_all_gather,
    deterministic_all_reduce,
    deterministic_all_reduce_coalesced,
    deterministic_reduce_scatter,
    verify_replicas,
)
from meshplan.collectives import functional
from meshplan.definition import reduce_leaves
from meshplan.errors import ContractStateError
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.processes import run_ranks, warm_compiler

pytestmark = pytest.mark.processes

RANKS = 3
PATHS = ("native", "reference", "auto", "exchange")
SIZES = [0, 3, 2]


def leaf(rank: int, seed: int = 0) -> Tensor:
    return order_sensitive(35, rank=rank, world_size=RANKS, seed=seed).view(7, 5)


def reduced(seed: int, op: str = "sum") -> Tensor:
    return reduce_leaves([leaf(r, seed) for r in range(RANKS)], op, (RANKS,))  # type: ignore[arg-type]


def test_gradients_are_under_the_contract() -> None:
    """Reduced under the contract themselves: every bit is that of its definition."""

    def ranks(rank: int) -> bool:
        for op in ("sum", "avg"):
            given = leaf(rank).requires_grad_()
            found = functional.all_reduce(given, op=op)  # type: ignore[arg-type]
            found.backward(leaf(rank, 1))
            assert_bitwise_equal(given.grad, reduced(1, op))

            given = leaf(rank).requires_grad_()
            shard = functional.reduce_scatter(given, op=op, dim=1, sizes=SIZES)  # type: ignore[arg-type]
            start = sum(SIZES[:rank])
            back = [leaf(r, 1)[:, sum(SIZES[:r]) :][:, : SIZES[r]] for r in range(RANKS)]
            assert_bitwise_equal(
                shard.detach(),
                reduced(0, op)[:, start:][:, : SIZES[rank]].contiguous(),
            )
            shard.backward(back[rank])
            whole = torch.cat(back, 1)
            assert_bitwise_equal(given.grad, whole / RANKS if op == "avg" else whole)

        shard = leaf(0)[:, : SIZES[rank]].clone().requires_grad_()
        whole = functional.all_gather(shard, dim=1, sizes=SIZES)
        whole.backward(leaf(rank, 2))
        start = sum(SIZES[:rank])
        assert_bitwise_equal(shard.grad, reduced(2)[:, start:][:, : SIZES[rank]].contiguous())
        return True

    assert all(run_ranks(ranks, RANKS))


def test_second_derivative_is_under_the_contract() -> None:
    """A gradient of the gradient reduces once more."""

    def ranks(rank: int) -> float:
        given = torch.tensor([float(rank + 1)], requires_grad=True)
        total = functional.all_reduce(given, path="exchange")
        (first,) = torch.autograd.grad((total**3).sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), given)
        return float(second)

    # Every rank's loss is s ** 3 with s = 6: the first is 3 * 3 s**2, its sum's derivative again
    # 3 * (3 * 6 s).
    assert run_ranks(ranks, RANKS) == [3 * 3 * 6 * 6.0] * RANKS


def test_operation_without_derivative_is_an_error() -> None:
    def ranks(rank: int) -> bool:
        for op in ("max", "min", "product"):
            leaves = torch.ones(3, requires_grad=True)
            with pytest.raises(ContractStateError, match="has no derivative"):
                functional.all_reduce(leaves, path="auto", op=op)  # type: ignore[arg-type]
            with pytest.raises(ContractStateError, match="has no derivative"):
                functional.reduce_scatter(leaves, op=op)  # type: ignore[arg-type]
            operator = torch.ops.meshplan.all_reduce
            found = operator(leaves, "exchange", op, "v1/tree/wide/once", False, "0")
            with pytest.raises(ContractStateError, match="has no derivative"):
                found.sum().backward()
            with torch.no_grad():
                functional.all_reduce(leaves, path="auto", op=op)  # type: ignore[arg-type]
        return True

    assert all(run_ranks(ranks, 2))


def test_one_rank_gets_a_copy_with_a_gradient() -> None:
    def alone(rank: int) -> None:
        for run in (functional.all_reduce, functional.reduce_scatter, functional.all_gather):
            given = leaf(0).t().requires_grad_()
            found = run(given)
            assert found.is_contiguous()
            assert found.data_ptr() != given.data_ptr()
            assert_bitwise_equal(found.detach(), given.detach().contiguous())
            found.backward(leaf(1).t())
            assert_bitwise_equal(given.grad, leaf(1).t().contiguous())

    run_ranks(alone, 1, init=False)


def test_operators_are_well_formed() -> None:
    """Schemas, fakes and derivatives, as torch itself checks them."""

    def ranks(rank: int) -> bool:
        how = ("exchange", "sum", "v1/tree/wide/once", False, "0")
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        ops = torch.ops.meshplan
        some = leaf(rank).requires_grad_()
        for operator, arguments in (
            (ops.all_reduce, (some, *how)),
            (ops.all_reduce, (some, "native", *how[1:])),
            (ops.reduce_scatter, (some, 1, SIZES, *how)),
            (ops.all_gather, (some[:, : SIZES[rank]], 1, SIZES, "0")),
            (ops.all_reduce_, (leaf(rank), *how)),
        ):
            torch.library.opcheck(operator.default, arguments, test_utils=tests)
        return True

    warm_compiler()
    assert all(run_ranks(ranks, RANKS))


@pytest.mark.full
def test_compiled_calls_are_one_operator_with_the_same_bits() -> None:
    """One operator in the graph, no break, the same bits; forward and backward."""

    def ranks(rank: int) -> list[int]:
        seen: list[str] = []

        def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
            seen.extend(str(node.target) for node in graph.graph.nodes)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)  # type: ignore[no-any-return]

        def in_place(x: Tensor) -> Tensor:
            y = x * 2
            deterministic_all_reduce(y, path="exchange", op="avg")
            return y + 1

        def new(x: Tensor) -> Tensor:
            y = functional.all_reduce(x * 2, path="auto")
            shard = functional.reduce_scatter(y, dim=1, sizes=SIZES)
            return functional.all_gather(shard * 3, dim=1, sizes=SIZES) + 1

        counts = []
        for function in (in_place, new):
            seen.clear()
            found = torch.compile(function, fullgraph=True, backend=backend)(leaf(rank))
            assert_bitwise_equal(found, function(leaf(rank)))
            counts.append(sum("meshplan" in name for name in seen))
        gradients = []
        for function in (new, torch.compile(new, fullgraph=True, backend="aot_eager")):
            given = leaf(rank).requires_grad_()
            function(given).backward(leaf(rank, 1))
            gradients.append(given.grad)
        assert_bitwise_equal(gradients[0], gradients[1])
        return counts

    warm_compiler()
    assert run_ranks(ranks, RANKS) == [[1, 3]] * RANKS


@pytest.mark.full
def test_untraceable_call_breaks_the_graph() -> None:
    """As in eager code, whatever the shape; in the middle of a graph it is an error in words."""

    def ranks(rank: int) -> None:
        def coalesced(x: Tensor) -> Tensor:
            y = x * 2
            deterministic_all_reduce_coalesced([y, x], path="exchange")
            return y + x

        def gathered(x: Tensor) -> Tensor:
            return deterministic_all_gather(x * 2) + 1

        def scattered(x: Tensor) -> Tensor:
            return deterministic_reduce_scatter(x * 2, path="exchange") + 1

        def verified(x: Tensor) -> Tensor:
            y = x.abs() * 0
            verify_replicas(y)
            return y + x

        for function in (coalesced, gathered, scattered, verified):
            torch._dynamo.reset()
            compiled = torch.compile(function, backend="aot_eager")
            for rows in (6, 9, 12):
                drawn = order_sensitive(rows * 5, rank=rank, world_size=RANKS).view(rows, 5)
                assert_bitwise_equal(compiled(drawn.clone()), function(drawn.clone()))
            torch._dynamo.reset()
            with pytest.raises(Exception, match="cannot be in a graph"):
                torch.compile(function, backend="aot_eager", fullgraph=True)(leaf(rank))
        # Strides of a graph may be symbols.
        torch._dynamo.reset()
        for rows in (6, 9):
            drawn = order_sensitive(rows, rank=rank, world_size=RANKS)
            compiled = torch.compile(in_place, backend="aot_eager", fullgraph=True, dynamic=True)
            assert_bitwise_equal(compiled(drawn), in_place(drawn))

    def in_place(x: Tensor) -> Tensor:
        y = x * 2
        deterministic_all_reduce(y, path="exchange")
        return y + 1

    warm_compiler()
    run_ranks(ranks, RANKS)
