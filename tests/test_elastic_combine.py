"""The leaves of micro-batches are added as in one tree, on any mesh of any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshplan import Contract, reduce_leaves
from meshplan._chunks import cover_range
from meshplan.collectives import Work
from meshplan.elastic import MicroBatches
from meshplan.elastic._hooks import LeafSums, TreeSum
from meshplan.testing import assert_bitwise_equal, bits, order_sensitive

F32, F64 = torch.float32, torch.float64
CONTRACTS = (Contract(), Contract(rounding="node"))


def leaves_of(count: int, numel: int, dtype: torch.dtype = F32) -> list[Tensor]:
    leaves = [order_sensitive(numel, rank=g, world_size=count, dtype=dtype) for g in range(count)]
    specials = torch.tensor([-0.0, float("inf"), float("nan")], dtype=dtype)
    for g, leaf in enumerate(leaves):
        leaf[: len(specials)] = specials[:numel]
        leaf[2:3] = float("nan") if g == 0 else 1.0
    return leaves


@dataclass
class Board:
    """Where the threads of one group put the rows of a collective."""

    size: int
    rows: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)


@dataclass
class ThreadGroup:
    """The collectives of a process group, with a thread for each rank."""

    board: Board
    position: int
    contract: Contract

    def size(self) -> int:
        return self.board.size

    def rank(self) -> int:
        return self.position

    def exchange_rows(self, rows: Tensor) -> Tensor:
        self.board.rows[self.position] = rows.clone()
        self.board.barrier.wait(3600)
        found = torch.stack([self.board.rows[r][self.position] for r in range(self.size())])
        self.board.barrier.wait(3600)
        return found

    def reduce_scatter_single(self, output: Tensor, input: Tensor, _: object) -> Work:
        leaves = list(self.exchange_rows(input.view(self.size(), -1)))
        output.copy_(reduce_leaves(leaves, "sum", (self.size(),), self.contract))
        return Work([output])


def on_threads(
    replicas: int, shards: int, call: Callable[..., Any], contract: Contract
) -> list[Any]:
    """``call(rank, groups)`` of each rank of a mesh."""
    across = [Board(replicas) for _ in range(shards)]
    inside = [Board(shards) for _ in range(replicas)]

    def run(rank: int) -> Any:
        r, s = divmod(rank, shards)
        boards = [(across[s], r), (inside[r], s)]
        return call(rank, [ThreadGroup(board, at, contract) for board, at in boards])

    with ThreadPoolExecutor(replicas * shards) as pool:
        return list(pool.map(run, range(replicas * shards)))


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int]:
    """Replicas, shards, and at least as many micro-batches."""
    replicas, shards = draw(
        st.sampled_from([(w, r) for w in range(1, 13) for r in range(1, 13) if w * r < 13])
    )
    return replicas, shards, draw(st.integers(replicas * shards, 30))


def sum_step(
    rank: int,
    groups: list[Any],
    count: int,
    leaves: list[list[Tensor]],
    contract: Contract,
    ddp: bool,
) -> list[Tensor]:
    """What a rank has of the sums after a step: its shard of the first one, or all of DDP's."""
    ranks = groups[0].size() * groups[1].size()
    dealt = MicroBatches(count, ranks=ranks, rank=rank)
    sums = LeafSums(contract, groups[:1] if ddp else groups, ddp)
    shards = groups[1].size()
    for round in range(dealt.rounds):
        repeated, last = dealt.is_repeated(round), round + 1 == dealt.rounds
        for tree in sums._trees.values() if round else ():
            assert len(tree._kept) == (round * ranks).bit_count()
        sums.begin(round * ranks, repeated=repeated, last=last)
        found = [leaf.clone() for leaf in leaves[dealt.index(round)]]
        if ddp:
            sums.add_buckets(found)
            continue
        output = found[0].new_empty(len(found[0]) // shards)
        if shards == 1:
            output.copy_(found[0])
        else:
            sums.scatter(output, found[0])
        sums.add("module", output)
        found = [output]
    return found


@pytest.mark.soak
@given(runs(), st.integers(0, 9), st.sampled_from((F32, F64)), st.sampled_from(CONTRACTS))
def test_sums_on_any_mesh_are_those_of_all_micro_batches(
    run: tuple[int, int, int], width: int, dtype: torch.dtype, contract: Contract
) -> None:
    replicas, shards, count = run
    leaves = leaves_of(count, width * shards, dtype)
    wanted = reduce_leaves(leaves, "sum", (count,), contract)
    flat = [[leaf] for leaf in leaves]
    found = on_threads(
        replicas, shards, lambda *at: sum_step(*at, count, flat, contract, False), contract
    )
    for rank, (shard,) in enumerate(found):
        mine = wanted.view(shards, -1)[rank % shards]
        assert_same_sums(shard, mine, f"rank {rank} of {replicas} x {shards}, {count}")


@pytest.mark.soak
@given(st.integers(1, 9), st.integers(0, 12), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_slices_of_ddp_are_those_of_all_micro_batches(
    ranks: int, more: int, sizes: list[int]
) -> None:
    count, contract = ranks + more, Contract()
    by_size = [leaves_of(count, size, F64 if at % 3 == 2 else F32) for at, size in enumerate(sizes)]
    leaves = [[row[g] for row in by_size] for g in range(count)]
    every = on_threads(ranks, 1, lambda *at: sum_step(*at, count, leaves, contract, True), contract)
    for found in every:
        for total, row in zip(found, by_size, strict=True):
            assert_same_sums(total, reduce_leaves(row, "sum", (count,)), f"{ranks} ranks, {count}")


def assert_same_sums(found: Tensor, wanted: Tensor, name: str) -> None:
    """``GradientAccumulator.finish`` makes NaNs canonical."""
    assert_bitwise_equal(reduce_leaves([found], "sum", (1,)), wanted, name)


def test_few_sums_are_kept() -> None:
    """At most log2(n) + 1 of n leaves, the new one included, from any leaf on."""
    for start in range(9):
        tree = TreeSum(Contract(), start)
        for count in range(1, 65):
            tree.add(torch.ones(1))
            sizes = [size for _, size, _ in tree._kept]
            cover = cover_range(start, start + count)
            assert sizes == [stop - first for first, stop in cover]
            assert start or len(sizes) == count.bit_count()
        blocks = tree.take_blocks()
        assert sum(total.item() for _, total in blocks) == 64


def test_leaves_are_not_written_to() -> None:
    leaves = leaves_of(7, 20)
    before = [bits(leaf).clone() for leaf in leaves]
    tree = TreeSum(Contract())
    for leaf in leaves:
        tree.add(leaf)
    tree.take()
    assert all(torch.equal(bits(leaf), old) for leaf, old in zip(leaves, before, strict=True))
