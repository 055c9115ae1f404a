"""Random redistributions over eight processes, bit for bit against the contract."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import meshplan
from meshplan._chunks import chunk_sizes
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import ShardOrderError
from meshplan.layout import Layout
from meshplan.testing import assert_bitwise_equal, order_sensitive
from meshplan.topology import Topology
from tests.marks import CASES, full, longest
from tests.processes import run_ranks
from tests.strategies import Redistribution, redistributions

pytestmark = pytest.mark.processes

DTYPES = (
    *(torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64),
    # Also those that no backend sends.
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)


def placement(text: str) -> Placement:
    if text[0] == "S":
        return Shard(int(text[2]))
    return Replicate() if text == "R" else Partial(text[2:-1] or "sum")


def drawn(count: int, world_size: int) -> list[Redistribution]:
    """The same cases where the same modules are loaded, whose constants hypothesis draws too."""
    cases: list[Redistribution] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        redistributions(max_world=world_size, all_ranks=world_size, to_partial=False, dtypes=DTYPES)
    )
    def collect(case: Redistribution) -> None:
        axes = zip(case.src, case.dst, case.layout.sizes, strict=True)
        moved = [src for src, dst, size in axes if src != dst and size > 1]
        # Torch gathers shards, over gloo, which sends no int16.
        unsent = case.dtype == torch.int16 and any(src[0] == "S" for src in moved)
        # Where all partial axes are of size 1 there is nothing to reduce, and torch is left alone.
        if not unsent and any(case.layout.sizes[i] > 1 for i in case.partial):
            cases.append(case)

    collect()
    return cases


def refused() -> Redistribution:
    """Whether it gathers shards that follow coordinates."""
    descending = Layout(sizes=(2, 4), names=None, ranks=(3, 2, 1, 0, 7, 6, 5, 4))
    options = {"contract": Contract(), "topology": None, "path": "exchange"}
    src, dst = ("P", "S(0)"), ("R", "R")
    return Redistribution(descending, src, dst, (5, 3), torch.float32, options, 1)


def hierarchical() -> list[Redistribution]:
    """Plans in blocks, of which the drawn ones may have none."""
    layout = Layout(sizes=(2, 4), names=None, ranks=tuple(range(8)))
    nodes = Topology.uniform(8, node_size=4, domain_size=4)
    options = {"contract": Contract(), "topology": nodes, "path": "exchange"}
    targets = ("R", "R"), ("S(0)", "R")
    return [
        Redistribution(layout, ("P", "P"), dst, (4097, 3), torch.float32, options, 2 * i)
        for i, dst in enumerate(targets)
    ]


@cache
def values(numel: int, rank: int, world_size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Drawn before the ranks are forked, and not by each of them again."""
    return order_sensitive(
        numel, rank=rank, world_size=world_size, dtype=dtype, seed=seed, specials=True
    )


class Leaves:
    """The summands of one case, and their sum."""

    def __init__(self, case: Redistribution, where: tuple[int, ...]) -> None:
        self.case, self.where, self.sizes = case, where, case.layout.sizes
        self.pending = [i for i, text in enumerate(case.src) if text[0] == "P"]
        self.count = math.prod(self.sizes[i] for i in self.pending)

    def leaf(self, index: tuple[int, ...]) -> Tensor:
        position = 0
        for i, at in zip(self.pending, index, strict=True):
            position = position * self.sizes[i] + at
        case = self.case
        drawn = values(math.prod(case.shape), position, max(2, self.count), case.dtype, case.seed)
        return drawn.view(case.shape)

    def shard(self, whole: Tensor, texts: tuple[str, ...]) -> Tensor:
        for text, index, size in zip(texts, self.where, self.sizes, strict=True):
            if text[0] == "S":
                lengths = chunk_sizes(whole.shape[int(text[2])], size)
                whole = whole.narrow(int(text[2]), sum(lengths[:index]), lengths[index])
        return whole.contiguous()

    def source(self) -> Tensor:
        return self.shard(self.leaf(tuple(self.where[i] for i in self.pending)), self.case.src)

    def expected(self) -> Tensor:
        case = self.case
        over = [
            range(self.sizes[i]) if i in case.partial else (self.where[i],) for i in self.pending
        ]
        divisor = math.prod(self.sizes[i] for i in case.partial if case.src[i] == "P(avg)")
        op = case.src[self.pending[0]][2:-1] or "sum"
        if op in ("sum", "avg"):
            op = "avg" if divisor > 1 else "sum"
        total = reduce_leaves(
            [self.leaf(index) for index in itertools.product(*over)],
            op,  # type: ignore[arg-type]
            [self.sizes[i] for i in case.partial],
            case.options["contract"],
            divisor=divisor if op == "avg" else None,
        )
        return self.shard(total, case.dst)


def run_cases(
    cases: list[Redistribution], world_size: int, backend: str = "gloo"
) -> list[Counter[str]]:
    """How many cases ran by which path, for each rank."""

    def ranks(rank: int) -> Counter[str]:
        meshes: dict[Layout, DeviceMesh] = {}
        done: Counter[str] = Counter()
        for number, case in enumerate(cases):
            if case.layout not in meshes:
                meshes[case.layout] = DeviceMesh("cpu", case.layout.grid)
            # A process may have 64 groups that meshplan made.
            if number % 15 == 14:
                meshplan.shutdown()
            mesh = meshes[case.layout]
            where = mesh.get_coordinate()
            if where is not None:
                done[run_one(case, mesh, tuple(where))] += 1
        return done

    for case in cases:
        for where in itertools.product(*map(range, case.layout.sizes)):
            Leaves(case, where).source()
    return run_ranks(ranks, world_size, backend=backend)


@pytest.mark.parametrize("backend", ["gloo", full("meshplan")])
def test_random_redistributions_that_start_from_partial(backend: str) -> None:
    """Uneven and empty shards, 0-dim and zero-size tensors, meshes of some ranks in any order."""
    cases = [*drawn(CASES, 8), *hierarchical(), refused()]
    found = run_cases(cases, 8, backend)
    total = sum(found, Counter())
    assert len(cases) > CASES // 2
    assert total["right"] > CASES
    assert total["halving"] > CASES // 4
    assert total["refused"] >= 8
    assert total["hierarchical"] >= 16
    assert sum(counter.total() for counter in found) == sum(c.layout.world_size for c in cases)


@pytest.mark.parametrize("world_size", [*map(longest, range(2, 13)), full(13)])
def test_random_redistributions_by_halving(world_size: int) -> None:
    cases = [
        replace(case, seed=case.seed | 1, options=case.options | {"path": "exchange"})
        for case in drawn(CASES // 2, world_size)
    ]
    found = sum(run_cases(cases, world_size), Counter())
    assert found.total() == sum(case.layout.world_size for case in cases)
    assert found["halving"] > found.total() // 6


def run_one(case: Redistribution, mesh: DeviceMesh, where: tuple[int, ...]) -> str:
    leaves = Leaves(case, where)
    src, dst = ([placement(text) for text in texts] for texts in (case.src, case.dst))
    d = DTensor.from_local(
        leaves.source(),
        mesh,
        src,
        run_check=False,
        shape=torch.Size(case.shape),
        stride=torch.empty(case.shape).stride(),
    )
    meshplan.clear_report()
    options = dict(case.options)
    if options["path"] == "exchange" and case.seed % 2:
        # An exchange is used where the plan has blocks, or an order that cannot be halved.
        options["path"] = "halving"
    strict = options["path"] != "halving"
    with meshplan.installed(strict=strict, timeout=60.0, **options):
        try:
            result = d.redistribute(mesh, dst).to_local()
        except ShardOrderError:
            return "refused"
    assert_bitwise_equal(result, leaves.expected(), f"{case} on rank {dist.get_rank()}")
    if any(e["ran"] == "halving" for e in meshplan.report().entries):
        return "halving"
    planned = [e["planned"] for e in meshplan.report().entries if e["ran"] == "exchange"]
    return "hierarchical" if any("in blocks of" in text for text in planned) else "right"
