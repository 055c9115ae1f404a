"""The bits of one row do not depend on the batch around it, nor on the call."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshplan
from benchmarks.allreduce_cpu import ways
from meshplan import deterministic_all_reduce, kernel
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.testing import assert_bitwise_equal, bits, order_sensitive
from tests.processes import run_ranks

pytestmark = pytest.mark.processes

RANKS = 4
HIDDEN = 16384
TRIALS = 3
BATCHES = (*range(1, 9), 13, 32, 49)


def row(rank: int, number: int, dtype: torch.dtype) -> Tensor:
    return order_sensitive(HIDDEN, rank=rank, world_size=RANKS, dtype=dtype, seed=number)


def first_rows(rank: int, path: str, dtype: torch.dtype) -> tuple[int, int]:
    """How many different first rows: over calls with one batch, and over batches of all sizes."""
    rows = torch.stack([row(rank, number, dtype) for number in range(4)])
    same, varying = set(), set()
    for _ in range(TRIALS):
        batch = deterministic_all_reduce(rows.clone(), path=path)
        assert isinstance(batch, Tensor)
        same.add(bits(batch).numpy().tobytes())
    for size in BATCHES:
        batch = rows[torch.arange(size) % 4]
        deterministic_all_reduce(batch, path=path)
        varying.add(bits(batch[0]).numpy().tobytes())
        # The same row again, at another place of the message.
        varying.update(bits(again).numpy().tobytes() for again in batch[::4])
    return len(same), len(varying)


def test_row_has_the_same_bits_in_every_batch() -> None:
    """The order depends neither on the rank that owns an element nor on the calling rank."""
    paths = ("reference", "one_shot", "two_shot", "exchange")

    def ranks(rank: int) -> dict[str, list[tuple[int, int]]]:
        dtypes = (torch.bfloat16, torch.float32)
        return {path: [first_rows(rank, path, dtype) for dtype in dtypes] for path in paths}

    assert run_ranks(ranks, RANKS) == [dict.fromkeys(paths, [(1, 1)] * 2)] * RANKS


def test_backend_bits_depend_on_the_batch() -> None:
    """The backend's own all-reduce: an element's bits move with its place in the message."""

    def ranks(rank: int) -> tuple[int, int]:
        return first_rows(rank, "native", torch.float32)

    found = run_ranks(ranks, RANKS)
    assert found == [found[0]] * RANKS
    same, varying = found[0]
    assert same == 1
    assert varying > 1


@pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not()))
def test_benchmarked_paths_are_the_named_ones() -> None:
    """Bits and reports show that the benchmark measures different paths."""

    def ranks(rank: int) -> list[str]:
        leaves = [row(r, 0, torch.float32) for r in range(RANKS)]
        found = {}
        for name, way in ways(RANKS).items():
            found[name] = leaves[rank].clone()
            way(found[name])
        plain = leaves[rank].clone()
        dist.all_reduce(plain)
        assert_bitwise_equal(found["gloo"], plain)
        for name, order in (("ordered", "rank"), ("peer", "tree")):
            wanted = reduce_leaves(leaves, "sum", (RANKS,), Contract(order))  # type: ignore[arg-type]
            assert_bitwise_equal(found[name], wanted, name)
        assert_bitwise_equal(found["exchange"], leaves[rank], "out of place")
        return [entry["ran"] for entry in meshplan.report().entries]

    assert run_ranks(ranks, RANKS) == [["exchange"]] * RANKS
