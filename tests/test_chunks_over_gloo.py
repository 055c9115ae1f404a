"""Hierarchical reductions in chunks, over gloo: bits, overlap, memory and failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan.collectives import deterministic_all_gather
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.execute._gloo import GlooWire
from meshplan.execute._wire import Wire
from meshplan.execute.paths import _hierarchical
from meshplan.flatten import _missing
from meshplan.planner import Step, count_chunks
from meshplan.testing import assert_bitwise_equal
from meshplan.topology import Topology
from tests.clock import clock
from tests.faults.jobs import attempt, die, run_job
from tests.inputs import draw_leaves
from tests.marks import full
from tests.processes import patience, run_ranks, shorten
from tests.test_collectives import groups_of, run, shard, step
from tests.traffic import Operators, count_sent

pytestmark = pytest.mark.processes

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int16)
CONTRACTS = (Contract(), Contract(rounding="node"), Contract(accumulate="float64"))


def leaves_of(numel: int, ranks: int, dtype: torch.dtype) -> list[Tensor]:
    return draw_leaves(ranks, numel, dtype, specials=True)


@pytest.mark.parametrize(
    ("sizes", "inner", "every"),
    [
        ((2, 2), 2, 3),
        full((2, 2), 2, 1),
        full((2, 3), 3, 1),
        full((8,), 2, 1),
        full((5, 2), 2, 1),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_levels_and_chunks(
    sizes: tuple[int, ...], inner: int, every: int
) -> None:
    """Nor on how pieces travel: in collectives, or as messages to where the results will be.

    ``every``: one of so many cases is run, which has every size, dtype, operation and way.
    """
    ranks = math.prod(sizes)
    cases = []
    # Drawn and reduced once, for all ranks and ways.
    for numel, unit in ((5, 0), (5, 1), (999, 0), (1000, 4), (20_001, 4096)):
        for dtype, contract, op in zip(
            (*DTYPES, torch.bfloat16),
            (*CONTRACTS, Contract(), Contract()),
            ("sum", "avg", "max", "sum", "sum"),
            strict=True,
        ):
            divisor = 3 if op == "avg" else None
            leaves = leaves_of(numel, ranks, dtype)
            assert (count_chunks(leaves[0].nbytes, unit) > 1) == (unit > 0)
            expected = reduce_leaves(leaves, op, sizes, contract, divisor=divisor)
            more = {"contract": contract, "divisor": divisor, "chunk": unit}
            cases.append((leaves, step("exchange", op, sizes, inner=inner, **more), expected))

    def one(rank: int) -> None:
        whole = step("exchange", sizes=sizes, inner=inner)
        groups = groups_of(whole)
        cut = groups_of(replace(whole, scatter=((0, 0),)))
        ways = product(("exchange", "halving"), (GlooWire.in_place_bytes, 1), cases)
        for between, nbytes, (leaves, case, expected) in list(ways)[::every]:
            GlooWire.in_place_bytes = nbytes
            wanted = replace(case, between=between)
            assert_bitwise_equal(run(leaves[rank], wanted, groups), expected)
            scattered = replace(wanted, kind="reduce_scatter", scatter=((0, 0),))
            found = run(leaves[rank], scattered, cut)
            assert_bitwise_equal(found, shard(expected, scattered, rank))

    run_ranks(one, ranks)


def test_pieces_arrive_in_the_memory_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves, partials and results of chunks of whole slices, where both are of one dtype."""
    monkeypatch.setattr(GlooWire, "in_place_bytes", 1)
    numel = 1 << 17
    wanted = step("exchange", sizes=(2, 2), inner=2, chunk=numel // 16)
    assert count_chunks(4 * numel, wanted.chunk) == 8
    leaves = leaves_of(numel, 4, torch.float32)

    expected = reduce_leaves(leaves, "sum", (2, 2))

    def ranks(rank: int) -> tuple[int, int]:
        groups = groups_of(wanted)
        received, call = list[Tensor](), ProcessGroup.recv

        def noted(group: ProcessGroup, tensors: list[Tensor], *more: Any) -> Any:
            received.extend(tensors)
            return call(group, tensors, *more)

        noted.__name__ = "recv"
        monkeypatch.setattr(ProcessGroup, "recv", noted)
        result = run(leaves[rank], wanted, groups)
        assert_bitwise_equal(result, expected)
        start, size = result.data_ptr(), result.nbytes
        apart = [one for one in received if not start <= one.data_ptr() < start + size]
        return len(received), len(apart)

    # In each chunk a leaf and a partial, and a result on each level.
    assert run_ranks(ranks, 4) == [(4 * 8, 0)] * 4


def test_gathers_over_gloo_have_short_names() -> None:
    """Gloo knows a functional gather by a name that corrupts the heap beside other collectives."""

    def ranks(rank: int) -> list[str]:
        flat, blocks = step("exchange", sizes=(4,)), in_chunks()
        cut = replace(blocks, kind="reduce_scatter", scatter=((0, 0),))
        with Operators() as seen:
            for wanted in (flat, blocks, cut):
                run(torch.ones(4000), wanted, groups_of(wanted))
            deterministic_all_gather(torch.ones(4))
        return seen.names

    for names in run_ranks(ranks, 4):
        # One in one piece, two levels in chunks, the parts of a shard.
        assert names.count("c10d::allgather_") == 1 + 2 * count_chunks(16_000, 1 << 12) + 1
        assert names.count("_c10d_functional::all_gather_into_tensor_out") == 1
        assert not [name for name in names if "coalesced" in name]
        assert "_c10d_functional::all_gather_into_tensor" not in names


@pytest.mark.full
def test_many_gathers_beside_exchanges_leave_the_heap_whole() -> None:
    def ranks(rank: int) -> None:
        wanted = in_chunks(4)
        groups = groups_of(wanted)
        for _ in range(250):
            run(torch.ones(1000), wanted, groups)

    run_ranks(ranks, 4)


@pytest.mark.full
def test_messages_between_nodes_of_eight_match_the_clock() -> None:
    """Sixteen ranks: at most 2.15 times the summand in bfloat16."""
    numel, how = 120_000, {"sizes": (2, 8), "inner": 8, "between": "halving", "chunk": 1 << 14}
    wanted = step("exchange", **how)  # type: ignore[arg-type]
    leaves = leaves_of(numel, 16, torch.bfloat16)
    expected = reduce_leaves(leaves, "sum", (2, 8))
    assert count_chunks(leaves[0].nbytes, wanted.chunk) > 1

    def ranks(rank: int) -> list[int]:
        groups = groups_of(wanted)
        found, sent = count_sent(lambda: run(leaves[rank], wanted, groups))
        assert_bitwise_equal(found, expected)
        return sent

    found = run_ranks(ranks, 16)
    nodes = Topology.uniform(16, node_size=8, domain_size=8)
    shown = clock(wanted, nodes, numel, torch.bfloat16)
    assert max(map(sum, found)) == shown.bytes <= 2.15 * leaves[0].nbytes
    assert max(map(len, found)) == shown.messages


def in_chunks(unit: int = 1 << 12) -> Step:
    return step("exchange", sizes=(2, 2), inner=2, chunk=unit)


def test_next_chunk_is_inside_while_another_is_between() -> None:
    """By the order of calls: no clock, so that a busy machine changes nothing."""
    leaves = leaves_of(100_000, 4, torch.float32)
    expected = reduce_leaves(leaves, "sum", (2, 2))

    def ranks(rank: int) -> list[str]:
        groups, lines = groups_of(in_chunks()), []
        inner, outer = groups.nested
        names = {inner.group_name: "inside", outer.group_name: "between"}
        start, numbers = Wire.start_exchange, {"inside": 0, "between": 0}

        def logged(wire: Wire, parts: Any, group: Any, **options: Any) -> Callable[[], Any]:
            level = names[group.group_name]
            name, finish = f"{level} {numbers[level]}", start(wire, parts, group, **options)
            numbers[level] += 1
            lines.append(f"start {name}")

            def wait() -> Sequence[Tensor]:
                lines.append(f"wait {name}")
                return finish()

            return wait

        Wire.start_exchange = logged  # type: ignore[method-assign, assignment]
        assert_bitwise_equal(run(leaves[rank], in_chunks(), groups), expected)
        return lines

    first, *others = run_ranks(ranks, 4)
    assert others == [first] * 3
    chunks = count_chunks(400_000, 1 << 12)
    assert chunks == 10
    where = {line: place for place, line in enumerate(first)}
    for number in range(chunks - 1):
        # Under way inside the nodes before, and waited for after, the messages between them start.
        assert where[f"start inside {number + 1}"] < where[f"start between {number}"]
        assert where[f"start between {number}"] < where[f"wait inside {number + 1}"]
        assert where[f"wait between {number}"] > where[f"start inside {number + 1}"]


def test_death_in_a_later_chunk_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_missing, "_SECONDS", 2.0)

    def ranks(rank: int) -> tuple[str, str]:
        wanted, calls = in_chunks(), 0
        groups = groups_of(wanted)
        groups.ranks = lambda: (0, 1, 2, 3)
        run(torch.ones(100_000), wanted, groups)
        finish = _hierarchical.finish_partials

        def third(*arguments: Any, **options: Any) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 3:
                die()
            return finish(*arguments, **options)

        if rank == 1:
            _hierarchical.finish_partials = third  # type: ignore[assignment]
        shorten(6.0)
        with patience(3):
            return attempt(lambda: run(torch.ones(100_000), wanted, groups))

    outcomes = run_job(ranks, 4)
    assert outcomes[1].exit_code == -9
    for outcome in (outcomes[0], *outcomes[2:]):
        assert not outcome.failure, outcome.failure
        name, message = outcome.value
        assert name == "CollectiveError"
        # Also rank 2, which shares no group with rank 1.
        assert "rank 1 did not report it too within" in message, message
