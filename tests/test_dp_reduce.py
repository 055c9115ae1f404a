"""Gradients over any number of ranks have the same bits: those of the contract."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import ContractStateError, MeshplanError
from meshplan.testing import assert_bitwise_equal, bits, reference_reduce_tensors
from meshplan.testing.dp import (
    compare_gradients,
    deterministic_controls,
    dp_gradients,
    sample_gradients,
)
from meshplan.testing.dp._reduce import Reduction, reduce_range
from tests.gradients import Dot, batch_of, dot_loss, mlp, mlp_batch, squared_error
from tests.refusals import refusal

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WORLDS = (1, 2, 3, 4, 5, 7, 8)
ROUNDINGS = [
    Contract(accumulate=wide, rounding=when)  # type: ignore[arg-type]
    for wide in ("wide", "float64")
    for when in ("once", "node")
]


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[int]]:
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any))
    return sum(counts), counts


@given(
    partition=partitions(),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["sum", "avg"]),
    contract=st.sampled_from(ROUNDINGS),
    seed=st.integers(0, 99),
    specials=st.booleans(),
)
def test_any_partition_gives_the_bits_of_the_contract(
    partition: tuple[int, list[int]],
    dtype: torch.dtype,
    op: Any,
    contract: Contract,
    seed: int,
    specials: bool,
) -> None:
    samples, counts = partition
    x, uses = batch_of(samples, 3, dtype, seed=seed, specials=specials)
    found = dp_gradients(
        Dot(3, dtype), dot_loss, (x, uses), None, world=counts, op=op, contract=contract
    )
    absent = torch.full_like(x[0], -0.0)
    extra = [row if used else absent for row, used in zip(x, uses, strict=True)]
    assert_bitwise_equal(
        found["weight"], reference_reduce_tensors(list(x), op, (samples,), contract)
    )
    if samples > 1:
        assert_bitwise_equal(
            found["extra"], reference_reduce_tensors(extra, op, (samples,), contract)
        )
    else:
        assert found["extra"] is None
    assert found["never"] is None


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_the_number_of_ranks(dtype: torch.dtype, op: Any) -> None:
    model, (x, y) = mlp(dtype), mlp_batch(23, dtype)
    with deterministic_controls():
        one = dp_gradients(model, squared_error, x, y, op=op)
        leaves = list(sample_gradients(model, squared_error, x, y))
        for world in (*WORLDS, 31):
            many = dp_gradients(model, squared_error, x, y, world=world, op=op)
            compare_gradients(many, one)
    for name, gradient in one.items():
        assert gradient is not None
        rows = [leaf[name] for leaf in leaves]
        wanted = reduce_leaves(rows, op, (23,))  # type: ignore[arg-type]
        assert_bitwise_equal(gradient, wanted)
        assert gradient.dtype is dtype


def test_avg_is_the_gradient_of_the_mean_loss() -> None:
    model, (x, y) = mlp(torch.float64), mlp_batch(24, torch.float64)
    names = [name for name, _ in model.named_parameters()]
    full = torch.autograd.grad(squared_error(model(x), y), list(model.parameters()))
    wanted = dict(zip(names, full, strict=True))
    for leaf in (1, 4, 24):
        found = dp_gradients(model, squared_error, x, y, world=3, samples_per_leaf=leaf)
        compare_gradients(found, wanted, rtol=1e-10, atol=1e-14)


def test_mean_divides_by_the_divisor() -> None:
    x, uses = batch_of(7, 5, torch.float32)
    found = dp_gradients(Dot(5), dot_loss, (x, uses), None, world=3, divisor=1000)
    assert_bitwise_equal(found["weight"], reduce_leaves(list(x), "avg", (7,), divisor=1000))


def test_gradients_are_new_memory() -> None:
    x, uses = batch_of(1, 4, torch.float32)
    kept = x.clone()
    found = dp_gradients(Dot(4), dot_loss, (x, uses), None, op="sum")
    assert found["weight"] is not None
    found["weight"].fill_(3.0)
    assert_bitwise_equal(x, kept)


class Counted(Reduction):
    """Counts the values that exist at once."""

    alive = most = 0

    def leaf(self, gradient: Tensor) -> Tensor:
        return self.counted(super().leaf(gradient))

    def combine(self, left: Tensor, right: Tensor) -> Tensor:
        return self.counted(super().combine(left, right))

    def counted(self, value: Tensor) -> Tensor:
        def count_deleted() -> None:
            Counted.alive -= 1

        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)
        weakref.finalize(value, count_deleted)
        return value


def test_few_gradients_exist_at_once() -> None:
    blocks = reduce_range(
        lambda i: {"w": torch.tensor([float(i)])}, range(256), Counted("sum", None, Contract())
    )
    assert [(block, float(partial["w"])) for block, partial in blocks] == [((0, 256), 32640.0)]
    # One value on each of the 8 levels, the leaf, and the sum that is just being made.
    assert 8 <= Counted.most <= 10


def test_op_and_contract_are_those_of_the_collectives() -> None:
    model, (x, y) = mlp(), mlp_batch(6)
    wanted = dp_gradients(model, squared_error, x, y, op="sum", contract=Contract())
    found = dp_gradients(model, squared_error, x, y, op=dist.ReduceOp.SUM, contract=None)
    compare_gradients(found, wanted)


def test_invalid_arguments_are_errors() -> None:
    model, (x, y) = mlp(), mlp_batch(6)
    calls: list[dict[str, Any]] = [
        {"op": "max"},
        {"op": "mean"},
        {"op": "sum", "divisor": 3},
        {"divisor": 0},
        {"world": 0},
        {"world": [2, 3]},
        {"world": [-1, 7]},
        {"world": []},
        {"world": [3, 3], "samples_per_leaf": 2},
        {"contract": Contract(order="rank")},
    ]
    messages = [
        refusal(MeshplanError, dp_gradients, model, squared_error, x, y, **options)
        for options in calls
    ]
    nothing = model, squared_error, x[:0], y[:0]
    messages.append(refusal(MeshplanError, dp_gradients, *nothing, world=2))
    assert_expected_inline(
        "\n".join(messages),
        """\
MP411: op='max' of gradients; pass 'sum' or 'avg'
MP411: unsupported op: 'mean'; use one of 'sum', 'avg', 'max', 'min', 'product', or the torch.distributed.ReduceOp of that name
MP411: divisor=3 with op='sum'; a divisor is a whole number from 1 to 2**63 - 1 and needs op='avg'
MP411: divisor=0 with op='avg'; a divisor is a whole number from 1 to 2**63 - 1 and needs op='avg'
MP411: world=0; pass the number of ranks, at least 1
MP411: world=[2, 3] does not place the 6 samples of the batch; pass the number of samples of each rank, 0 or more, 6 together
MP411: world=[-1, 7] does not place the 6 samples of the batch; pass the number of samples of each rank, 0 or more, 6 together
MP411: world=[] does not place the 6 samples of the batch; pass the number of samples of each rank, 0 or more, 6 together
MP411: 3 samples are not a multiple of samples_per_leaf=2, and a leaf of another size has other bits; pass a multiple on every rank
MP411: leaves of a batch are combined in order='tree', got order='rank'; pass a contract of that order, or all leaves to reduce_leaves
MP411: the global batch has no samples; pass at least one""",
    )


def test_flushed_subnormals_are_an_error() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        with pytest.raises(ContractStateError):
            dp_gradients(mlp(), squared_error, *mlp_batch(2))
    finally:
        torch.set_flush_denormal(False)


def test_nan_is_canonical() -> None:
    x, uses = batch_of(3, 1, torch.float32)
    x.view(torch.int32)[1, 0] = 0x7FC12345
    found = dp_gradients(Dot(1), dot_loss, (x, uses), None, world=2)
    assert found["weight"] is not None
    assert bits(found["weight"]).tolist() == [0x7FC00000]
