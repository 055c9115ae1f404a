"""Gradients over gloo processes: the bits of one process, uneven parts, and other models."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor

from meshplan.contract import Contract
from meshplan.errors import GroupStateError, MeshplanError
from meshplan.testing import assert_replicas_equal
from meshplan.testing.dp import _reduce as module
from meshplan.testing.dp import (
    compare_gradients,
    distributed_dp_gradients,
    dp_gradients,
    split_batch,
)
from tests.gradients import Dot, batch_of, dot_loss, mlp, mlp_batch, squared_error
from tests.processes import run_ranks
from tests.refusals import refusal

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def part(batch: Any, counts: list[int], rank: int) -> Any:
    start = sum(counts[:rank])
    return tuple(tensor[start : start + counts[rank]] for tensor in batch)


def check_same(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    compare_gradients(found, wanted)
    for name, gradient in found.items():
        if gradient is not None:
            assert_replicas_equal(gradient, what=name)


def check_uneven_parts(rank: int) -> None:
    partitions = ([5, 1, 7], [0, 3, 0], [4, 4, 4], [1, 0, 0], [2, 11, 3])
    for i, counts in enumerate(partitions):
        dtype = DTYPES[i % len(DTYPES)]
        batch = batch_of(sum(counts), 5, dtype, specials=True)
        local = part(batch, counts, rank)
        for op in ("sum", "avg"):
            for contract in (Contract(), Contract(accumulate="float64", rounding="node")):
                options: Any = {"op": op, "contract": contract}
                found = distributed_dp_gradients(Dot(5, dtype), dot_loss, local, None, **options)
                check_same(found, dp_gradients(Dot(5, dtype), dot_loss, batch, None, **options))
                assert found["never"] is None


def check_any_group(rank: int) -> None:
    model, (x, y) = mlp(), mlp_batch(20)
    one = dp_gradients(model, squared_error, x, y)
    local_x, local_y = split_batch((x, y), 8, uneven=True)[rank]
    check_same(distributed_dp_gradients(model, squared_error, local_x, local_y), one)
    by_two = dp_gradients(model, squared_error, x, y, samples_per_leaf=2)
    local_x, local_y = split_batch((x, y), 8, uneven=True, samples_per_leaf=2)[rank]
    found = distributed_dp_gradients(model, squared_error, local_x, local_y, samples_per_leaf=2)
    check_same(found, by_two)


def check_order_of_the_group(rank: int) -> None:
    # Older releases of torch always sort.
    can_turn = "sort_ranks" in inspect.signature(dist.new_group).parameters
    ranks, options = ([2, 0], {"sort_ranks": False}) if can_turn else ([0, 2], {})
    turned = dist.new_group(ranks, **options)
    batch = batch_of(7, 5, torch.float32)
    if rank == 1:
        with pytest.raises(GroupStateError, match="rank 1 is not in the group"):
            distributed_dp_gradients(Dot(5), dot_loss, batch, None, group=turned)
        return
    local = part(batch, [3, 4], ranks.index(rank))
    found = distributed_dp_gradients(Dot(5), dot_loss, local, None, group=turned, op="sum")
    compare_gradients(found, dp_gradients(Dot(5), dot_loss, batch, None, op="sum"))


def check_pieces(rank: int) -> None:
    """A parameter that does not fit into one exchange."""
    batch = batch_of(9, 23, torch.float32, specials=True)
    wanted = dp_gradients(Dot(23), dot_loss, batch, None)
    for size in (1, 13, 40):
        module._CHUNK = size
        local = part(batch, [4, 0, 5], rank)
        check_same(distributed_dp_gradients(Dot(23), dot_loss, local, None), wanted)


def failures(rank: int) -> list[str]:
    model, (x, y) = mlp(), mlp_batch(6)
    local = split_batch((x, y), 3)[rank]
    odd = rank == 1

    def failing(output: Tensor, target: Tensor) -> Tensor:
        if odd:
            raise ArithmeticError("the third expert is missing")
        return squared_error(output, target)

    other = mlp()
    with torch.no_grad():
        other[0].bias[3].copy_(torch.nextafter(other[0].bias[3], torch.tensor(9.0)))
    frozen = mlp()
    frozen[2].bias.requires_grad_(False)
    calls: list[tuple[Any, Any, Any, dict[str, Any]]] = [
        (model, failing, local, {}),
        (model, squared_error, local, {"op": "max" if odd else "avg"}),
        (model, squared_error, local, {"op": "sum" if odd else "avg"}),
        (model, squared_error, local, {"samples_per_leaf": 2 if odd else 1}),
        (model, squared_error, local, {"seed": rank}),
        (model, squared_error, (x[:0], y[:0]), {}),
        (model, squared_error, (x, y[: 5 if odd else 6]), {}),
        (other if odd else model, squared_error, local, {}),
        (frozen if odd else model, squared_error, local, {}),
        (mlp().eval() if odd else model, squared_error, local, {}),
    ]
    messages = []
    for one, loss, batch, options in calls:
        with pytest.raises((MeshplanError, ArithmeticError)) as caught:
            distributed_dp_gradients(one, loss, *batch, **options)
        messages.append(f"{type(caught.value).__name__} {caught.value}")
        if hasattr(caught.value, "rank"):
            assert caught.value.rank != rank
    torch.set_num_threads(2 if odd else 1)
    with pytest.raises(MeshplanError) as caught:
        distributed_dp_gradients(model, squared_error, *local)
    messages.append(f"{type(caught.value).__name__} {caught.value}")
    torch.set_num_threads(1)
    assert distributed_dp_gradients(model, squared_error, *local)["0.weight"] is not None
    return messages


@pytest.mark.processes
def test_ranks_have_the_bits_of_one_process() -> None:
    def check_on_three(rank: int) -> None:
        for check in (check_uneven_parts, check_order_of_the_group, check_pieces):
            check(rank)

    run_ranks(check_on_three, 3)
    run_ranks(check_any_group, 8)


@pytest.mark.processes
def test_error_of_one_rank_is_raised_on_all() -> None:
    zero, one, two = run_ranks(failures, 3)
    assert zero == two
    own = [mine for mine, theirs in zip(one, zero, strict=True) if mine != theirs]
    messages = re.sub(
        r"(\(sha256\)): \w+ on rank 0, \w+", r"\1: ... on rank 0, ...", "\n".join([*zero, "", *own])
    )
    assert_expected_inline(
        messages,
        """\
GroupError MP500: rank 1 raised ArithmeticError: the third expert is missing; all ranks of the group stopped
GroupError MP500: rank 1 raised ContractError: MP411: op='max' of gradients; pass 'sum' or 'avg'; all ranks of the group stopped
SignatureMismatchError MP703: ranks differ in the reduction: avg/leaves/v1/tree/wide/once on rank 0, sum/leaves/v1/tree/wide/once on rank 1; no sample was run: pass the same model and arguments, and enter deterministic_controls(), on every rank
SignatureMismatchError MP703: ranks differ in samples_per_leaf: 1 on rank 0, 2 on rank 1; no sample was run: pass the same model and arguments, and enter deterministic_controls(), on every rank
SignatureMismatchError MP703: ranks differ in seed: 0 on rank 0, 1 on rank 1; no sample was run: pass the same model and arguments, and enter deterministic_controls(), on every rank
ContractError MP411: the global batch has no samples; pass at least one
GroupError MP500: rank 1 raised ContractError: MP411: the first dim of every tensor of a batch counts the samples, got shapes (6, 7), (5, 3); pass e.g. inputs of (8, 3) and targets of (8,); all ranks of the group stopped
SignatureMismatchError MP703: ranks differ in the model (sha256): ... on rank 0, ... on rank 1; no sample was run: pass the same model and arguments, and enter deterministic_controls(), on every rank
SignatureMismatchError MP703: ranks differ in the model (sha256): ... on rank 0, ... on rank 1; no sample was run: pass the same model and arguments, and enter deterministic_controls(), on every rank
SignatureMismatchError MP703: ranks differ in the model (sha256): ... on rank 0, ... on rank 1; no sample was run: pass the same model and arguments, and enter deterministic_controls(), on every rank
SignatureMismatchError MP703: ranks differ in the number of threads: 1 on rank 0, 2 on rank 1; no sample was run: pass the same model and arguments, and enter deterministic_controls(), on every rank

ArithmeticError the third expert is missing
ContractError MP411: op='max' of gradients; pass 'sum' or 'avg'
ContractError MP411: the first dim of every tensor of a batch counts the samples, got shapes (6, 7), (5, 3); pass e.g. inputs of (8, 3) and targets of (8,)""",
    )


def test_missing_process_group_is_an_error() -> None:
    assert_expected_inline(
        refusal(GroupStateError, distributed_dp_gradients, mlp(), squared_error, *mlp_batch(2)),
        """MP503: no process group is initialised; call torch.distributed.init_process_group first""",
    )
