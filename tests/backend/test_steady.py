"""Repeated reductions of the backend: the same bits, errors and report, without a decision."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshplan
import meshplan.backend
from meshplan.backend import BackendOptions, _reductions
from meshplan.backend._reductions import is_plain_memory
from meshplan.collectives._options import read_options
from meshplan.execute import BoundReduction
from tests.backend.test_reductions import (
    CONTRACTS,
    OPS,
    RANKS,
    bits,
    cases,
    compute_sums,
    expected,
    is_refused,
    summand,
)
from tests.processes import run_ranks
from tests.traffic import Operators

pytestmark = pytest.mark.processes


def count_decisions() -> Any:
    """A mock around what runs a reduction of one tensor by more than the call of a kernel."""
    start = BoundReduction.start
    return mock.patch.object(BoundReduction, "start", autospec=True, side_effect=start)


def repeat_everything(rank: int) -> list[str]:
    wrong = []
    for contract in CONTRACTS:
        group = dist.new_group(backend="meshplan", pg_options=BackendOptions(contract))
        for dtype, op in cases():
            if is_refused(dtype, op, contract):
                continue
            whole = expected(dtype, op, contract)
            with count_decisions() as decided:
                for number in range(3):
                    x = summand(rank, dtype)
                    work = dist.all_reduce(x, OPS[op], group, async_op=number == 2)
                    if work is not None:
                        work.wait()
                    wrong += [f"{contract.id} {dtype} {op}"] * (bits(x) != bits(whole))
                    x, shard = summand(rank, dtype)[:60].clone(), whole.new_empty(20)
                    work = dist.reduce_scatter_single(
                        shard, x, OPS[op], group, async_op=number == 2
                    )
                    if work is not None:
                        work.wait()
                    mine = whole[:60].chunk(RANKS)[rank]
                    wrong += [f"scatter {contract.id} {dtype} {op}"] * (bits(shard) != bits(mine))
            # Scattered complex numbers are decided each time: torch hands over those themselves.
            count = 4 if dtype.is_complex else 2
            wrong += [f"decided {dtype} {op}"] * (decided.call_count != count)
    return wrong


def test_repeated_reductions_have_the_bits_of_the_contract() -> None:
    compute_sums()
    assert run_ranks(repeat_everything, RANKS, backend="meshplan") == [[]] * RANKS


def report_and_sequence(_: int) -> list[Any]:
    meshplan.clear_report()
    x = torch.ones(10)
    for _ in range(5):
        dist.all_reduce(x)
    (entry,) = meshplan.report().entries
    keys = "count", "elements", "bytes", "ran", "sends"
    world: Any = dist.group.WORLD
    return [*(entry[key] for key in keys), world.issued]


def test_repeated_reductions_are_one_entry_of_the_report() -> None:
    found = run_ranks(report_and_sequence, 2, backend="meshplan")
    assert found == [[5, 50, 200, "one_shot", ("peer_reduce",), 5]] * 2


def differ(rank: int) -> list[Any]:
    """The tensors of one rank are strided in every second call: those run the ordinary way."""
    found = []
    for number in range(4):
        wide = torch.zeros(2 * 7)
        strided = rank == 1 and number in (1, 3)
        x = wide[::2] if strided else wide[:7].clone()
        x.copy_(torch.arange(7.0) + rank)
        dist.all_reduce(x)
        found.append(x.tolist() == [2.0 * n + 1 for n in range(7)])
    return found


def test_ranks_of_both_ways_meet() -> None:
    assert run_ranks(differ, 2, backend="meshplan") == [[True] * 4] * 2


def fail(rank: int) -> list[Any]:
    options = BackendOptions(timeout=timedelta(seconds=20))
    group = dist.new_group(backend="meshplan", pg_options=options)
    for numel in (3, 4):
        for _ in range(2):
            dist.all_reduce(torch.ones(numel), group=group)
    # Both ranks find a steady reduction, and not the same one.
    x = torch.ones(3 + rank)
    with pytest.raises(meshplan.MeshplanError) as caught:
        dist.all_reduce(x, group=group)
    found = [caught.value.code, bool(x.isnan().all())]
    for _ in range(3):
        x = torch.full((3,), 1.0 + rank)
        dist.all_reduce(x, group=group)
        found.append(x.tolist())
    return found


def test_error_of_a_steady_reduction_names_the_difference_and_the_next_call_reconnects() -> None:
    found = run_ranks(fail, 2, backend="meshplan")
    assert found == [["MP703", True, [3.0] * 3, [3.0] * 3, [3.0] * 3]] * 2


def watch(_: int) -> list[Any]:
    x = torch.ones(5)
    for _ in range(2):
        dist.all_reduce(x)
    with Operators() as seen:
        dist.all_reduce(x)
    with torch.profiler.profile(acc_events=True) as profile:
        dist.all_reduce(x)
    names = {event.name for event in profile.events()}
    return [
        any("meshplan::peer_reduce" in name for name in seen.names),
        any(name.startswith("meshplan::all_reduce") for name in names),
        x.tolist() == [16.0] * 5,
    ]


def test_modes_and_the_profiler_see_operators() -> None:
    assert run_ranks(watch, 2, backend="meshplan") == [[True, True, True]] * 2


def check_like_torch(_: int) -> list[Any]:
    x = torch.ones(4)
    for _ in range(2):
        dist.all_reduce(x)
    y = torch.ones(4, requires_grad=True)
    dist.all_reduce(y)
    found: list[Any] = [y.tolist()]
    product = y * 1.0
    squares = product**2
    with torch.no_grad():
        dist.all_reduce(product)
    try:
        squares.sum().backward()
    except RuntimeError as error:
        found.append("modified by an inplace operation" in str(error))
    with torch.inference_mode():
        z = torch.ones(4)
        dist.all_reduce(z)
    dist.all_reduce(z)
    found.append(z.tolist())
    torch.set_flush_denormal(True)
    try:
        dist.all_reduce(x)
    except meshplan.MeshplanError as error:
        found.append(error.code)
    torch.set_flush_denormal(False)
    return found


def test_checks_stay() -> None:
    found = run_ranks(check_like_torch, 2, backend="meshplan")
    assert found == [[[2.0] * 4, True, [4.0] * 4, "MP413"]] * 2


def repeat_over_gloo(rank: int) -> list[Any]:
    """Bits of repeated calls, how often options are read, and the audited calls."""
    wrong, read, contract = [], [], meshplan.Contract()
    for options in (BackendOptions(path="exchange"), BackendOptions(path="halving", audit=2)):
        group = dist.new_group(backend="meshplan", pg_options=options)
        for dtype, op in cases()[:: 4 if options.audit else 1]:
            whole = expected(dtype, op, contract)
            meshplan.clear_report()
            with mock.patch.object(_reductions, "read_options", wraps=read_options) as reads:
                for number in range(3):
                    with torch.inference_mode(number == 1):
                        x, shard = summand(rank, dtype), whole.new_empty(20, 1)
                    dist.all_reduce(x, OPS[op], group)
                    wrong += [f"{dtype} {op}"] * (bits(x) != bits(whole))
                    x = summand(rank, dtype)[:60].clone()
                    dist.reduce_scatter_single(shard, x, OPS[op], group)
                    mine = whole[:60].chunk(RANKS)[rank]
                    wrong += [f"scatter {dtype} {op}"] * (bits(shard) != bits(mine))
            read.append(reads.call_count)
            audited = sum(entry["audited"] for entry in meshplan.report().entries)
            # Of three calls of each kind: the calls of all dtypes count.
            wanted = (2, 4) if options.audit else (0,)
            wrong += [f"{audited} audits of {dtype}"] * (audited not in wanted)
    return [wrong, set(read)]


def test_a_repeated_call_over_gloo_reads_no_options() -> None:
    # In the first call of each kind.
    assert run_ranks(repeat_over_gloo, RANKS, backend="meshplan") == [[[], {2}]] * RANKS


def keep_few(_: int) -> list[Any]:
    group: Any = dist.new_group(backend="meshplan")
    with mock.patch.object(_reductions, "MAX_BOUND", 3):
        for numel in range(1, 9):
            dist.all_reduce(torch.ones(numel), group=group)
            assert len(group._bound._bound) <= 3
    kept = len(group._bound._bound)
    # After a shutdown of meshplan the ranks agree again, and then it is steady again.
    meshplan.shutdown()
    with count_decisions() as decided:
        for _ in range(3):
            x = torch.ones(8)
            dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    after = len(group._bound._bound)
    del group
    gc.collect()
    return [kept, decided.call_count, x[0].item(), after]


def test_the_table_is_bounded_and_ends_with_the_group() -> None:
    assert run_ranks(keep_few, 2, backend="meshplan") == [[2, 1, 2.0, 0]] * 2


def scatter_in_place(rank: int) -> list[list[float]]:
    """The output is a block of the input."""
    found = []
    for _ in range(3):
        x = torch.arange(6.0) + rank
        dist.reduce_scatter_single(x[3 * rank : 3 * rank + 3], x)
        found.append(x[3 * rank : 3 * rank + 3].tolist())
    return found


def test_a_block_of_the_input_can_be_the_output() -> None:
    first, second = run_ranks(scatter_in_place, 2, backend="meshplan")
    assert first == [[1.0, 3.0, 5.0]] * 3
    assert second == [[7.0, 9.0, 11.0]] * 3


def repeat_coalesced_calls_of_one(rank: int) -> list[Any]:
    """As functional collectives issue them."""
    world: Any = dist.group.WORLD
    whole = expected(torch.float32, "sum", meshplan.Contract())
    wrong = []
    with count_decisions() as decided:
        for _ in range(3):
            x, shard = summand(rank, torch.float32), torch.empty(10, 2)
            world.reduce_scatter_tensor_coalesced([shard], [x[:60].view(30, 2)]).wait()
            wrong.append(bits(shard) != bits(whole[:60].chunk(RANKS)[rank]))
            world.allreduce_coalesced([x]).wait()
            wrong.append(bits(x) != bits(whole))
    return [any(wrong), decided.call_count]


def test_coalesced_calls_of_one_tensor_are_decided_once() -> None:
    found = run_ranks(repeat_coalesced_calls_of_one, RANKS, backend="meshplan")
    assert found == [[False, 2]] * RANKS


def zeros(_: int) -> list[bool]:
    """Tensors whose memory is not their elements go the ordinary way."""
    plain = torch.ones(3, 3)
    zero = torch._efficientzerotensor(3, 3)
    negative = torch.ones(3, 3, dtype=torch.complex64).conj().imag
    batched: list[bool] = []

    def note(x: Tensor) -> Tensor:
        batched.append(is_plain_memory(x))
        return x

    torch.func.vmap(note)(plain)
    kinds = (zero, negative, plain.t(), plain.to_sparse(), plain.to("meta"))
    return [is_plain_memory(plain), *batched, *(is_plain_memory(x) for x in kinds)]


def test_only_plain_memory_is_plain_memory() -> None:
    assert zeros(0) == [True, *[False] * 5, False]
