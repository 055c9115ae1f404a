"""Every path, group size, length, address and stride gives the bits of the definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from meshplan import kernel
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.execute import Purpose, StepGroups, run_reduction
from meshplan.flatten import registry
from meshplan.layout import Layout
from meshplan.planner import Step
from meshplan.record import Record
from meshplan.testing import bits, order_sensitive
from tests.inputs import at_byte, draw_leaves
from tests.marks import full, longest
from tests.processes import run_ranks

pytestmark = pytest.mark.processes

WORLD_SIZES = [*map(full, (1, 2, 3, 4, 5, 6, 7, 8, 9)), longest(16)]
NUMELS = (0, 1, 3, 7, 8, 15, 16, 17, 4095, 4097, (1 << 20) + 3)
PATHS = ("one_shot", "two_shot", "exchange", "halving", "reference")


@dataclass
class Case:
    """Summands of all ranks and their sum: made once, before the ranks are forked."""

    name: str
    leaves: list[Tensor]
    whole: Tensor


def cases(world_size: int) -> Iterator[Case]:
    for numel in NUMELS:
        for dtype in (torch.float32, torch.bfloat16) if numel < 5000 else (torch.float32,):
            leaves = draw_leaves(world_size, numel, dtype, specials=True)
            yield Case(f"{dtype} {numel}", leaves, reduce_leaves(leaves, "sum", (world_size,)))


def wrong_paths(rank: int, world_size: int, known: list[Case]) -> list[str]:
    """What differs on this rank."""
    mesh = init_device_mesh("cpu", (world_size,))
    layout = Layout.from_mesh(mesh)
    group = registry().get(mesh, layout, (0,), token=Record.of(use="test"), peers="always")
    shares = group.peers is not None
    assert shares == (world_size > 1 and kernel.available()), group.no_peers
    groups = StepGroups(group.pg, peers=group.peers, no_peers=group.no_peers)
    wrong = []

    def compare(mine: Tensor, whole: Tensor, dim: int, what: str) -> None:
        for path in PATHS if shares else PATHS[2:]:
            for scatter in ((), ((0, dim),)):
                step = Step(
                    kind="reduce_scatter" if scatter else "all_reduce",
                    axes=(0,),
                    sizes=(world_size,),
                    move="",
                    why="",
                    op="sum",
                    path="reference" if path == "reference" else "exchange",
                    contract=Contract(),
                    scatter=scatter,
                )
                result = run_reduction(
                    mine, step, groups, purpose=Purpose("", "", ""), path=path, strict=True
                )
                result = torch.ops._c10d_functional.wait_tensor(result)
                expected = whole
                if scatter:
                    parts = list(torch.chunk(whole, world_size, dim))
                    empty = whole.narrow(dim, 0, 0)
                    expected = parts[rank] if rank < len(parts) else empty
                if not torch.equal(bits(result), bits(expected.contiguous())):
                    wrong.append(f"{path} {scatter} {what}")

    for case in known:
        leaf = case.leaves[rank]
        offsets = range(16) if leaf.numel() == 17 else (0, 1, 6)
        if leaf.numel() > 5000 and world_size > 4:
            # Many ranks on few cores, and the offsets of few ranks have been seen.
            offsets = (1,)
        for offset in offsets if leaf.numel() else (0,):
            mine = at_byte(leaf, offset) if leaf.numel() else leaf
            compare(mine, case.whole, 0, f"{case.name} at byte {offset}")
    # Views that are not contiguous: transposed, every second column, expanded.
    grids = [
        order_sensitive(60, rank=r, world_size=world_size).view(6, 10) for r in range(world_size)
    ]
    for name, view in (
        ("transposed", lambda grid: grid.t()),
        ("strided", lambda grid: grid[:, ::2]),
        ("expanded", lambda grid: grid[:1].expand(4, 10)),
        # Contiguous, with the stride of a column.
        ("one of a column", lambda grid: grid[:1, 3]),
    ):
        views = [view(grid) for grid in grids]
        whole = reduce_leaves([one.contiguous() for one in views], "sum", (world_size,))
        for dim in range(whole.dim()):
            compare(views[rank], whole, dim, f"{name} along {dim}")
    dist.barrier()
    return wrong


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_path_has_the_bits_of_the_definition(world_size: int) -> None:
    known = list(cases(world_size))
    found = run_ranks(lambda rank: wrong_paths(rank, world_size, known), world_size)
    assert found == [[]] * world_size
