"""Collectives run the contract unless the caller requests the backend's order; strict refuses that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor

import meshplan
from meshplan import (
    Contract,
    deterministic_all_gather,
    deterministic_all_gather_coalesced,
    deterministic_all_reduce,
    deterministic_all_reduce_coalesced,
    deterministic_reduce_scatter,
    deterministic_reduce_scatter_coalesced,
)
from meshplan.collectives import functional
from meshplan.definition import reduce_leaves
from meshplan.errors import (
    ContractError,
    ContractTypeError,
    FallbackRefusedError,
    PolicyError,
)
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.processes import run_ranks, warm_compiler
from tests.refusals import refusal

pytestmark = pytest.mark.processes

RANKS = 5
NUMEL = 1000
NATIVE = "native"


def leaf(rank: int, seed: int = 0) -> Tensor:
    return order_sensitive(NUMEL, rank=rank, world_size=RANKS, seed=seed)


def wanted(seed: int = 0, contract: Contract | None = None) -> Tensor:
    leaves = [leaf(rank, seed) for rank in range(RANKS)]
    return reduce_leaves(leaves, "sum", (RANKS,), contract=contract or Contract())


def test_call_without_arguments_runs_the_contract() -> None:
    """In one message, in many small ones, in place and out of place, now and later."""

    def ranks(rank: int) -> list[Any]:
        native = leaf(rank)
        dist.all_reduce(native)
        total = wanted()
        # Otherwise no test here could distinguish the two orders.
        assert not torch.equal(native, total)

        given = leaf(rank)
        assert deterministic_all_reduce(given) is given
        assert_bitwise_equal(given, total)
        pieces = [leaf(rank)[i : i + 7].clone() for i in range(0, NUMEL, 7)]
        for piece in pieces:
            deterministic_all_reduce(piece)
        assert_bitwise_equal(torch.cat(pieces), total)
        pieces = [leaf(rank)[i : i + 300].clone() for i in range(0, NUMEL, 300)]
        deterministic_all_reduce_coalesced(pieces)
        assert_bitwise_equal(torch.cat(pieces), total)

        assert_bitwise_equal(functional.all_reduce(leaf(rank)), total)
        shard = total.tensor_split(RANKS)[rank]
        assert_bitwise_equal(functional.reduce_scatter(leaf(rank)), shard)
        assert_bitwise_equal(deterministic_reduce_scatter(leaf(rank)), shard)  # type: ignore[arg-type]
        entries = meshplan.report().entries
        assert {entry["path"] for entry in entries} == {"auto"}
        return sorted({entry["contract"] for entry in entries})

    assert run_ranks(ranks, RANKS) == [[Contract().id]] * RANKS


def test_compiled_calls_without_arguments_are_under_the_contract() -> None:
    def ranks(rank: int) -> None:
        def doubled(x: Tensor) -> Tensor:
            y = x * 2
            deterministic_all_reduce(y)
            return functional.all_reduce(y / 2)

        compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
        assert_bitwise_equal(compiled(leaf(rank)), doubled(leaf(rank)))
        assert {entry["contract"] for entry in meshplan.report().entries} == {Contract().id}

    warm_compiler()
    run_ranks(ranks, RANKS)


def test_native_path_has_the_bits_of_the_backend() -> None:
    """The gradient is reduced in the same order as the sum."""

    def ranks(rank: int) -> None:
        native = leaf(rank)
        dist.all_reduce(native)
        shard = native.tensor_split(RANKS)[rank].contiguous()
        assert_bitwise_equal(deterministic_reduce_scatter(leaf(rank), path="native"), shard)  # type: ignore[arg-type]
        weights = leaf(rank, 1).requires_grad_()
        functional.all_reduce(weights, path="native").backward(leaf(rank))
        assert_bitwise_equal(weights.grad, native)
        weights = leaf(rank, 1)[:200].clone().requires_grad_()
        functional.all_gather(weights, path="native").backward(leaf(rank))
        assert_bitwise_equal(weights.grad, shard)

    run_ranks(ranks, RANKS)


class TestStrict(TestCase):
    def test_every_entry_point_refuses_the_native_path(self) -> None:
        """Refused on every rank, and nothing is sent; also by one rank, which has nothing to reduce."""

        def ranks(rank: int) -> list[str]:
            given = leaf(rank)
            ops = torch.ops.meshplan
            group: Any = dist.group.WORLD
            how = (NATIVE, "sum", Contract().id, True, group.group_name)
            words: dict[str, Any] = {"path": "native", "strict": True}
            pair = [given, leaf(0)]
            eager: list[Callable[[], object]] = [
                lambda: deterministic_all_reduce(given, **words),
                lambda: deterministic_all_reduce(given, op="max", **words),
                lambda: deterministic_all_reduce(given, async_op=True, **words),
                lambda: deterministic_reduce_scatter(given, **words),
                lambda: deterministic_all_gather(given, **words),
                lambda: deterministic_all_reduce_coalesced(pair, **words),
                lambda: deterministic_reduce_scatter_coalesced(pair, **words),
                lambda: deterministic_all_gather_coalesced(pair, **words),
                lambda: functional.all_reduce(given, **words),
                lambda: functional.reduce_scatter(given, **words),
                lambda: functional.all_gather(given, **words),
                lambda: ops.all_reduce(given, *how),
                lambda: ops.all_reduce_(given, *how),
                lambda: ops.all_reduce_(given.to(torch.bool), *how),
                lambda: ops.reduce_scatter(given, 0, [500, 500], *how),
            ]
            said = {refusal(FallbackRefusedError, run) for run in eager}

            def compiled(x: Tensor) -> Tensor:
                return functional.all_reduce(x * 2, path="native", strict=True)

            with pytest.raises(Exception, match="strict=True refuses path"):
                torch.compile(compiled, backend="aot_eager", fullgraph=True)(given)
            assert_bitwise_equal(given, leaf(rank))
            assert not meshplan.report().entries
            return sorted(said)

        warm_compiler()
        native: dict[str, Any] = {"path": "native", "strict": True}
        alone = refusal(FallbackRefusedError, deterministic_all_reduce, torch.ones(1), **native)
        assert run_ranks(ranks, 2) == [[alone]] * 2
        self.assertExpectedInline(
            alone,
            """MP701: strict=True refuses path='native', which reduces in the backend's own order; pass path='auto', or strict=False""",
        )

    def test_operators_check_what_functions_check(self) -> None:
        """A graph may name any mode: none of them reaches the backend's order by accident."""

        def ranks(rank: int) -> list[str]:
            ops, group = torch.ops.meshplan, dist.group.WORLD
            assert group is not None
            name, once = group.group_name, Contract().id
            one = torch.ones(2)
            said = []
            for kind, tensor, path, op in (
                (PolicyError, one, "ring", "sum"),
                (ContractTypeError, one.bool(), "auto", "max"),
                (ContractTypeError, one.int(), "auto", "avg"),
                (ContractError, one, "auto", "mean"),
            ):
                how = (path, op, once, False, name)
                said.append(refusal(kind, ops.all_reduce, tensor, *how))
                assert refusal(kind, ops.all_reduce_, tensor, *how) == said[-1]
                refusal(kind, ops.reduce_scatter, tensor, 0, [1, 1], *how)
            assert not meshplan.report().entries
            return said

        self.assertExpectedInline(
            "\n".join(run_ranks(ranks, 2)[0]),
            """\
MP402: no path 'ring'; use one of 'auto', 'one_shot', 'two_shot', 'exchange', 'halving', 'integer', 'integer_checksum', 'reference', 'native'
MP412: torch.bool is outside the contract; convert to one of float32, bfloat16, float16, float64, int8, int16, int32, int64, uint8
MP412: op='avg' requires a floating-point or complex tensor, got torch.int32; pass op='sum' and divide as you need, or convert the tensor
MP411: unsupported op: 'mean'; use one of 'sum', 'avg', 'max', 'min', 'product', or the torch.distributed.ReduceOp of that name""",
        )


def test_gather_gradient_is_under_the_contract() -> None:
    """So has the second derivative of a reduce-scatter, and it is the reduce-scatter's."""

    def ranks(rank: int) -> None:
        ordered = Contract(order="rank")
        part = slice(rank * 200, rank * 200 + 200)
        assert not torch.equal(wanted(1), wanted(1, ordered))
        for how, contract in (
            ({}, Contract()),
            ({"contract": ordered}, ordered),
            ({"path": "reference", "contract": ordered}, ordered),
            ({"path": "exchange", "contract": ordered, "strict": True}, ordered),
        ):
            weights = leaf(rank)[:200].clone().requires_grad_()
            functional.all_gather(weights, **how).backward(leaf(rank, 1))  # type: ignore[arg-type]
            assert_bitwise_equal(weights.grad, wanted(1, contract)[part])

            weights = leaf(rank).requires_grad_()
            cotangent = leaf(0)[:200].clone().requires_grad_()
            shard = functional.reduce_scatter(weights, **how)  # type: ignore[arg-type]
            (first,) = torch.autograd.grad(shard, weights, cotangent, create_graph=True)
            (second,) = torch.autograd.grad(first, cotangent, leaf(rank, 1))
            assert_bitwise_equal(second, wanted(1, contract)[part])

    run_ranks(ranks, RANKS)


class TestGather(TestCase):
    def test_gradient_dtype_outside_the_contract_is_refused(self) -> None:
        """No dtype is reduced in the backend's order because a gradient asks for it."""

        def ranks(rank: int) -> str:
            weights = torch.ones(2, dtype=torch.float8_e5m2).requires_grad_()
            whole = functional.all_gather(weights)
            return refusal(
                ContractTypeError, lambda: whole.backward(torch.ones(4, dtype=whole.dtype))
            )

        self.assertExpectedInline(
            run_ranks(ranks, 2)[0],
            """MP412: torch.float8_e5m2 is outside the contract; convert to one of float32, bfloat16, float16, float64, int8, int16, int32, int64, uint8""",
        )
