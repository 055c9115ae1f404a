"""Halving of CUDA tensors, flat and between blocks, on an emulated GPU: streams, memory and graphs.

The emulated GPU runs everything later, and gives freed memory away at once: who forgets a wait or
lets go of a message too early has other bits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.execute import Purpose, StepGroups, run_reduction
from meshplan.execute._shards import select_shard
from meshplan.planner import Step, count_chunks
from meshplan.testing import bits, order_sensitive
from tests import emulated_cuda as emulated
from tests.processes import run_ranks
from tests.test_collectives import step

pytestmark = pytest.mark.processes

NUMEL = 1003
CUDA = torch.device("cuda:0")
BLOCKS: dict[str, Any] = {"sizes": (3, 2), "inner": 2, "between": "halving"}
STEPS = {
    "flat": step("halving", sizes=(5,)),
    "blocks": step("exchange", **BLOCKS),
    "chunks": step("exchange", chunk=1 << 8, **BLOCKS),
}


def groups_of(wanted: Step) -> StepGroups:
    """Over the emulated backend."""
    ranks = torch.arange(wanted.group_size)

    def mine(rows: Tensor) -> Any:
        return dist.new_subgroups_by_enumeration(rows.tolist(), backend="emulated")[0]

    if wanted.inner == 1:
        return StepGroups(mine(ranks.view(1, -1)))
    blocks = ranks.view(-1, wanted.inner)
    return StepGroups(None, inner=mine(blocks), outer=mine(blocks.t()))


def leaves_of(ranks: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    how: dict[str, Any] = {"world_size": ranks, "seed": seed, "dtype": dtype, "specials": True}
    return [order_sensitive(NUMEL, rank=r, **how) for r in range(ranks)]


def reduce_on_streams(rank: int, wanted: Step, dtype: torch.dtype) -> dict[str, Any]:
    emulated.emulate()
    groups, ranks = groups_of(wanted), wanted.group_size
    right: dict[str, bool] = {}
    x = torch.zeros(NUMEL, dtype=dtype, device=CUDA)

    def reduce() -> Tensor:
        found = run_reduction(x, wanted, groups, purpose=Purpose("a", "p", "g"), strict=True)
        return torch.ops._c10d_functional.wait_tensor(found)  # type: ignore[no-any-return]

    def check(name: str, found: Tensor, seed: int) -> None:
        expected = reduce_leaves(leaves_of(ranks, seed, dtype), "sum", wanted.sizes)
        expected = select_shard(expected, wanted, rank).contiguous()
        right[name] = torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))

    def bring(seed: int) -> None:
        x.copy_(leaves_of(ranks, seed, dtype)[rank])

    # The first one connects the ranks.
    bring(0)
    check("first", reduce(), 0)
    given = [leaf.to(CUDA) for leaf in (leaves_of(ranks, seed, dtype)[rank] for seed in (1, 2))]
    emulated.counters.host_waits.clear()
    gate = emulated.Gate(emulated.current_stream())
    results = []
    # The device has not begun with the first one when the host issues the second.
    for one in given:
        x.copy_(one)
        results.append(reduce())
    x.fill_(7)
    waits = list(emulated.counters.host_waits)
    gate.open()
    for seed, found in enumerate(results, 1):
        check(f"late {seed}", found, seed)
    out = torch.zeros_like(results[0])
    with emulated.capture(emulated.Stream(CUDA)) as graph:
        out.copy_(reduce())
    for seed in (3, 4):
        bring(seed)
        emulated.replay(graph)
        check(f"replay {seed}", out, seed)
    emulated.synchronize()
    return {"wrong": [name for name, one in right.items() if not one], "waits": waits}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype", "scatter"),
    [
        ("flat", "float32", True),
        ("blocks", "float16", False),
        ("chunks", "bfloat16", False),
        ("chunks", "float32", True),
    ],
)
def test_bits_do_not_depend_on_streams_and_graphs(name: str, dtype: str, scatter: bool) -> None:
    wanted = STEPS[name]
    if scatter:
        shards = tuple((axis, 0) for axis in wanted.axes)
        wanted = replace(wanted, kind="reduce_scatter", scatter=shards)
    kind: torch.dtype = getattr(torch, dtype)
    chunks = count_chunks(NUMEL * kind.itemsize, wanted.chunk)
    assert (chunks > 1) == (name == "chunks")
    found = run_ranks(lambda rank: reduce_on_streams(rank, wanted, kind), wanted.group_size)
    assert found == [{"wrong": [], "waits": []}] * wanted.group_size


def test_blocks_reduce_slices_of_one_element_exactly() -> None:
    exact = Contract(order="exact")
    whole = step("exchange", sizes=(2, 2), inner=2, contract=exact)
    shards = replace(whole, kind="reduce_scatter", scatter=((0, 0), (1, 0)))

    def wrong_numels(rank: int) -> list[tuple[str, int]]:
        emulated.emulate()
        groups, wrong = groups_of(whole), []
        for wanted, numel in product((whole, shards), (1, 4, 5)):
            leaves = [order_sensitive(numel, rank=r, world_size=4) for r in range(4)]
            purpose = Purpose("a", "p", "g")
            found = run_reduction(
                leaves[rank].to(CUDA), wanted, groups, purpose=purpose, strict=True
            )
            found = torch.ops._c10d_functional.wait_tensor(found).cpu()
            expected = reduce_leaves(leaves, "sum", wanted.sizes, exact)
            if not torch.equal(bits(found), bits(select_shard(expected, wanted, rank))):
                wrong.append((wanted.kind, numel))
        return wrong

    assert run_ranks(wrong_numels, 4) == [[]] * 4
