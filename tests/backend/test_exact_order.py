"""``order="exact"`` in a job: whichever rank has which summand, no bit moves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshplan import Contract, reduce_leaves
from meshplan.integrations import ddp
from meshplan.testing import order_sensitive
from tests.backend.test_reductions import bits
from tests.processes import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.full]
RANKS, NUMEL = 3, 60
ORDERS = (0, 1, 2), (2, 0, 1), (1, 0, 2)
LEAVES = [order_sensitive(NUMEL, rank=r, world_size=RANKS) for r in range(RANKS)]


def gradient(model: nn.Module, leaf: Tensor) -> Tensor:
    """Of a weight, which is this rank's leaf before it is reduced."""
    for parameter in model.parameters():
        parameter.grad = None
    model(leaf[None]).sum().backward()
    (parameter,) = model.parameters()
    found = parameter.grad
    assert found is not None
    return found.full_tensor() if isinstance(found, DTensor) else found


def reduce_in_many_ways(leaf: Tensor) -> dict[str, Tensor]:
    found = {"async": leaf.clone()}
    work = dist.all_reduce(found["async"], async_op=True)
    assert work is not None
    work.wait()
    coalesced = [leaf.clone()[:20], leaf.clone()[20:]]
    with _coalescing_manager():
        for one in coalesced:
            dist.all_reduce(one)
    found["coalesced"] = torch.cat(coalesced)
    group = dist.group.WORLD
    assert group is not None

    def double(x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", group) * 1.0

    found["compiled"] = torch.compile(double, backend="aot_eager", fullgraph=True)(leaf)
    shard = leaf.new_empty(NUMEL // RANKS)
    dist.reduce_scatter(shard, list(leaf.clone().chunk(RANKS)))
    parts = [torch.empty_like(shard) for _ in range(RANKS)]
    dist.all_gather(parts, shard)
    found["reduce-scatter"] = torch.cat(parts)
    found["ddp"] = gradient(DistributedDataParallel(nn.Linear(NUMEL, 1, bias=False)), leaf)
    hooked = DistributedDataParallel(nn.Linear(NUMEL, 1, bias=False))
    ddp.register(hooked)
    found["ddp hook"] = gradient(hooked, leaf)
    sharded = nn.Linear(NUMEL, 1, bias=False)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (RANKS,)))
    found["fsdp2"] = gradient(sharded, leaf)
    return found


def reduce_in_orders(rank: int) -> list[dict[str, bytes]]:
    torch.manual_seed(0)
    rows = [reduce_in_many_ways(LEAVES[order[rank]]) for order in ORDERS]
    return [{name: bits(tensor) for name, tensor in row.items()} for row in rows]


def test_no_bit_depends_on_which_rank_has_which_summand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHPLAN_CONTRACT", "v1/exact/wide/once")
    found = run_ranks(reduce_in_orders, RANKS, backend="meshplan")
    first = found[0][0]
    for rows in found:
        for row in rows:
            assert [name for name in row if row[name] != first[name]] == []
    total = reduce_leaves(LEAVES, "sum", (RANKS,), Contract("exact"))
    average = reduce_leaves(LEAVES, "avg", (RANKS,), Contract("exact"))
    for name in ("async", "coalesced", "compiled", "reduce-scatter"):
        assert first[name] == bits(total), name
    # DDP without the hook divides each summand, and rounds it, before it is added.
    for name in ("ddp hook", "fsdp2"):
        assert first[name] == bits(average), name
    trees = {bits(reduce_leaves([LEAVES[i] for i in order], "sum", (RANKS,))) for order in ORDERS}
    assert len(trees) > 1
