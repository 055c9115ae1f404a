"""Path halving: the bits of the contract, in one process and in real ones, and what is sent."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from meshplan.collectives import deterministic_all_reduce
from meshplan.contract import FLOATS, INTEGERS, OPS, Contract, Op
from meshplan.definition import combine_leaves, partial_dtype, reduce_leaves
from meshplan.errors import FallbackRefusedError, SignatureMismatchError
from meshplan.execute import Purpose, StepGroups, _gloo, run_reduction
from meshplan.execute._header import HEADER_BYTES
from meshplan.execute._shards import select_shard
from meshplan.execute._wire import Wire
from meshplan.execute.paths._halving import PATH, HalvedReduction
from meshplan.planner import Step, halving_schedule, merge_axes
from meshplan.testing import assert_bitwise_equal
from tests import steps
from tests.inputs import draw_leaves
from tests.marks import full
from tests.processes import common_result, run_ranks
from tests.test_halving_schedule import SHAPES
from tests.traffic import count_halving, count_sent

CONTRACTS = (Contract(), Contract(rounding="node"), Contract(accumulate="float64"))
OPERATIONS: list[tuple[Any, str]] = [
    (op, dtype) for op in OPS for dtype in FLOATS + INTEGERS * (op != "avg")
]
PURPOSE = Purpose("asked", "planned", "world")


class Silent(Wire):
    """There are no headers in one process."""

    def begin_rounds(self, *_: Any, **__: Any) -> None:
        pass


def one_rank(
    rank: int, leaf: Tensor, mail: Any, how: tuple[Any, ...], shape: tuple[int, ...], **more: Any
) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """Run one rank; messages wait in ``mail``. Returns its part and the whole."""
    group: Any = SimpleNamespace(rank=lambda: rank)
    one = HalvedReduction(*how, shape, group, Silent(), numel=leaf.numel(), **more)

    def run(rounds: Any) -> Generator[None, None, Any]:
        while True:
            try:
                messages = next(rounds)
            except StopIteration as end:
                return end.value
            for sends, tensor, peer in messages:
                if sends:
                    mail[rank, peer].append(tensor.clone())
            for sends, tensor, peer in messages:
                while not sends and not mail[peer, rank]:
                    yield
                if not sends:
                    tensor.copy_(mail[peer, rank].popleft())

    part = one.finish((yield from run(one.reduce(leaf))))
    whole = yield from run(one.gather(part))
    return whole[one.owned], whole


def run_all(
    leaves: Sequence[Tensor], shape: tuple[int, ...], *how: Any, **more: Any
) -> list[tuple[Tensor, Tensor]]:
    mail: Any = defaultdict(deque)
    running = {r: one_rank(r, leaf, mail, how, shape, **more) for r, leaf in enumerate(leaves)}
    found: dict[int, tuple[Tensor, Tensor]] = {}
    while running:
        for rank, one in [*running.items()]:
            try:
                next(one)
            except StopIteration as end:
                found[rank] = end.value
                del running[rank]
    assert not any(mail.values()), "a message that no rank expects"
    return [found[rank] for rank in range(len(leaves))]


@cache
def leaves_of(ranks: int, numel: int, dtype: str) -> list[Tensor]:
    kind = getattr(torch, dtype)
    return draw_leaves(ranks, numel, kind, specials=True)


def check_bits(shape: tuple[int, ...], op: Op, dtype: str, contract: Contract, numel: int) -> None:
    ranks = math.prod(shape)
    leaves = leaves_of(ranks, numel, dtype)
    divisor = ranks if op == "avg" else None
    expected = reduce_leaves(leaves, op, shape, contract)
    for _, whole in run_all(leaves, shape, op, contract, divisor, leaves[0].dtype):
        assert_bitwise_equal(whole, expected)


@settings(max_examples=15)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 24),
    st.sampled_from(OPERATIONS),
    st.sampled_from(CONTRACTS),
    st.integers(1, 40),
)
def test_bits_are_those_of_the_contract(
    shape: list[int], what: tuple[Op, str], contract: Contract, numel: int
) -> None:
    check_bits(tuple(shape), *what, contract, numel)


@pytest.mark.full
def test_bits_are_those_of_the_contract_in_every_group() -> None:
    """Operations, dtypes and contracts in turn: none of them changes a schedule."""
    assert len(SHAPES) >= 40
    for i, shape in enumerate([*((ranks,) for ranks in range(1, 73)), *SHAPES]):
        check_bits(shape, "sum", "bfloat16", Contract(), 47)
        check_bits(shape, *OPERATIONS[i % len(OPERATIONS)], CONTRACTS[i % 3], 70)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_partials_of_blocks_are_combined_further(dtype: str) -> None:
    """As between nodes: each rank brings the sum of its block, at uneven cuts."""
    blocks, inner, numel = 5, 3, 40
    leaves = leaves_of(blocks * inner, numel, dtype)
    expected = reduce_leaves(leaves, "avg", (blocks, inner))
    partials = [combine_leaves(leaves[i * inner :][:inner], "avg", (inner,)) for i in range(blocks)]
    how: Any = ("avg", Contract(), blocks * inner, leaves[0].dtype)
    cuts = [0, 0, 7, 39, 40]
    found = run_all(partials, (blocks,), *how, raised=True, cuts=cuts)
    for _, whole in found:
        assert_bitwise_equal(whole, expected)
    assert [part.numel() for part, _ in found] == [0, 32, 7, 1, 0]


def make_step(shape: tuple[int, ...], op: Op = "sum", **more: Any) -> Step:
    ranks = math.prod(shape)
    return steps.make_step(shape, op=op, divisor=ranks if op == "avg" else None, **more)


def reduce(tensor: Tensor, step: Step, **options: Any) -> Tensor:
    return run_reduction(
        tensor,
        step,
        StepGroups(dist.group.WORLD),
        purpose=PURPOSE,
        path="halving",
        strict=True,
        **options,
    )


# Headers in an all-to-all before; in rounds, in front of small data and before large data.
CALLS: tuple[tuple[int, int, Any, str, Contract], ...] = (
    (32, 100, "sum", "float32", Contract()),
    (1, 100, "avg", "bfloat16", Contract()),
    (1, 1, "max", "int16", Contract()),
    (1, 0, "sum", "float32", Contract()),
    (1, 40_000, "sum", "float32", Contract(rounding="node")),
    (32, 40_000, "product", "float64", Contract()),
)


def compare_all_ranks(shape: tuple[int, ...]) -> None:
    ranks = math.prod(shape)
    for _, numel, _, dtype, _ in CALLS:
        # Drawn before the ranks are forked, and not by each of them again.
        leaves_of(ranks, numel, dtype)
    run_ranks(lambda rank: compare_on_rank(rank, shape), ranks)


def compare_on_rank(rank: int, shape: tuple[int, ...]) -> None:
    """All-reduces and reduce-scatters; the messages are those of the schedule."""
    ranks = math.prod(shape)
    plan = halving_schedule(shape, rank)
    for at_once, numel, op, dtype, contract in CALLS:
        _gloo.MOST_AT_ONCE = at_once
        leaves = leaves_of(ranks, numel, dtype)
        step = make_step(shape, op, contract=contract)  # type: ignore[arg-type]
        expected = reduce_leaves(leaves, op, shape, contract)  # type: ignore[arg-type]
        found, sends = count_sent(partial(reduce, leaves[rank], step))
        assert_bitwise_equal(found, expected)
        inline = ranks > at_once and len(merge_axes(shape)) == 1 and 0 < numel <= 100
        if ranks > at_once:
            # Headers travel in front of data, or in rounds before it.
            before = (
                0 if inline else count_halving(halving_schedule((ranks,), rank), 1, 1, 1).messages
            )
            assert sends[:before] == [HEADER_BYTES] * before
            sends = [nbytes - HEADER_BYTES * inline for nbytes in sends[before:]]
        wide = partial_dtype(op, expected.dtype, contract).itemsize
        scheduled = count_halving(plan, numel, expected.itemsize, wide)
        assert sum(sends) == scheduled.bytes
        # Messages without elements are not sent, except behind headers.
        whole = inline or numel > 100
        assert len(sends) == scheduled.messages if whole else len(sends) <= scheduled.messages
        is_power = ranks & ranks - 1 == 0
        assert scheduled.messages <= (2 if is_power else 4) * (ranks - 1).bit_length()
        if numel > 100 and wide == expected.itemsize:
            times = sum(sends) / expected.nbytes
            assert times < 2.0 if is_power else times <= 2.5
        for dim in (0, 1) if numel == 100 else ():
            rows = [leaf.view(10, 10) for leaf in leaves]
            scatter = make_step(
                shape, op, kind="reduce_scatter", scatter=tuple((a, dim) for a in range(len(shape)))
            )  # type: ignore[arg-type]
            whole = expected.view(10, 10)
            shard = select_shard(whole, scatter, rank).contiguous()
            assert_bitwise_equal(reduce(rows[rank], scatter), shard)


def graph_on_rank(rank: int, shape: tuple[int, ...]) -> None:
    """The wire of GPUs and of graphs: one all-to-all in each round, at any size."""
    groups = StepGroups(dist.group.WORLD)
    step = make_step(shape)
    scatter = make_step(
        shape, kind="reduce_scatter", scatter=tuple((a, 0) for a in range(len(shape)))
    )

    def run(tensor: Tensor) -> Tensor:
        return PATH.all_reduce(tensor, step, groups, Wire()).tensor

    graph = make_fx(run, tracing_mode="symbolic")(torch.ones(37))
    rounds = 2 * (halving_schedule(shape, 0).parts.bit_length() - 1)
    calls = [node for node in graph.graph.nodes if "all_to_all_single" in str(node.target)]
    assert len(calls) == rounds
    for numel in (37, 5000):
        leaves = leaves_of(math.prod(shape), numel, "bfloat16" if numel == 5000 else "float32")
        expected = reduce_leaves(leaves, "sum", shape)
        assert_bitwise_equal(run(leaves[rank]), expected)
        if numel == 37:
            assert_bitwise_equal(graph(leaves[rank]), expected)
        shard = PATH.reduce_scatter(leaves[rank], scatter, groups, Wire()).tensor
        assert_bitwise_equal(shard, select_shard(expected, scatter, rank).contiguous())


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("shape", [(3,), (3, 2), (7,)], ids=str)
def test_graphs_hold_one_collective_for_each_round(shape: tuple[int, ...]) -> None:
    run_ranks(lambda rank: graph_on_rank(rank, shape), math.prod(shape))


@pytest.mark.processes
@pytest.mark.parametrize(
    "shape",
    [(3,), *map(full, [*((n,) for n in (2, 5, 6, 13)), (3, 2), (2, 2, 3)])],
    ids=str,
)
def test_real_ranks_send_the_messages_of_the_schedule(shape: tuple[int, ...]) -> None:
    compare_all_ranks(shape)


@pytest.mark.processes
@pytest.mark.dist
def test_64_ranks() -> None:
    compare_all_ranks((64,))


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [5, full(8)])
def test_different_inputs_are_one_error_on_all_ranks(ranks: int) -> None:
    """By the last rank, whose leaf is a tail, or a middle one; small, and longer than the room."""

    def mismatch(rank: int) -> list[str]:
        _gloo.MOST_AT_ONCE = 1
        found = []
        step = make_step((ranks,))
        for odd in {ranks - 1, ranks // 2}:
            for numel in (6, 50_000):
                for other in (
                    torch.ones(numel + 1),
                    torch.ones(60_000),
                    torch.ones(numel, dtype=torch.int64),
                ):
                    mine = other if rank == odd else torch.ones(numel)
                    with pytest.raises(SignatureMismatchError) as caught:
                        reduce(mine, step)
                    found.append(str(caught.value))
                    # The next call of all ranks works.
                    assert reduce(torch.ones(9), step).tolist() == [ranks] * 9
        return found

    found = run_ranks(mismatch, ranks)
    assert all(one == found[0] for one in found)
    assert len(found[0]) >= 6


class TestMessages(TestCase):
    @pytest.mark.processes
    def test_sums_in_another_order_are_refused(self) -> None:
        """Maxima and integers have the same bits in any order."""

        def messages(rank: int) -> list[str]:
            found = []
            for order in ("exact", "rank"):
                contract = Contract(order)  # type: ignore[arg-type]
                with pytest.raises(FallbackRefusedError) as caught:
                    deterministic_all_reduce(
                        torch.ones(3), path="halving", contract=contract, strict=True
                    )
                found.append(str(caught.value))
                for op, dtype in (("max", torch.float32), ("sum", torch.int64)):
                    mine = torch.ones(3, dtype=dtype)
                    deterministic_all_reduce(
                        mine, op=op, path="halving", contract=contract, strict=True
                    )
            return found

        self.assertExpectedInline(
            "\n".join(common_result(messages, 3)),
            """\
MP701: deterministic_all_reduce sum: path halving was requested and exchange would run: path halving; path halving adds in order 'tree', and not 'exact'; pass another path, or strict=False
MP701: deterministic_all_reduce sum: path halving was requested and exchange would run: path halving; order 'rank' is one fold from the first leaf to the last; pass another path, or strict=False""",
        )
