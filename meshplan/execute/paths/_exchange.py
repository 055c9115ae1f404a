"""Path ``exchange``: all-to-all of slices, reduction of the own slice, gather of the results.

2 (W - 1) / W of the tensor's bytes leave each rank, in the tensor's own dtype.

Large messages over gloo use the memory of their result: the leaves arrive there, the own slice is
reduced there, and each result arrives in its place. Gloo aborts a process whose buffer is too
short, so headers are compared before.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan.execute._groups import StepGroups
from meshplan.execute._shards import gather_shard, select_shard, split_parts
from meshplan.execute._wire import Wire, fold, split_equally
from meshplan.execute.paths._path import Outcome, Path
from meshplan.kernel import large_pages, reduce_into
from meshplan.planner import Step


class ExchangePath(Path):
    def __init__(self, name: str = "exchange") -> None:
        self.name = name

    def all_reduce(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        group = groups.flat
        width = -(-tensor.numel() // group.size())
        if wire.in_place(width * tensor.element_size(), group):
            wire.compare()
            return Outcome(_exchange_in_place(tensor, step, group, wire), wire.log)
        own = fold(wire.exchange(split_equally(tensor, group.size()), group), step)
        gathered = wire.all_gather(own, group)
        return Outcome(gathered[: tensor.numel()].view(tensor.shape), wire.log, pending=True)

    def reduce_scatter(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        group = groups.flat
        leaves = wire.exchange(list(split_parts(tensor, step, group.size())), group)
        if step.leaves:
            return Outcome(torch.cat(list(leaves)), wire.log)
        shard = select_shard(tensor, step, group.rank())
        found, pending = gather_shard(fold(leaves, step), shard.shape, groups, wire)
        return Outcome(found, wire.log, pending)


def _exchange_in_place(tensor: Tensor, step: Step, group: ProcessGroup, wire: Wire) -> Tensor:
    """``all_reduce`` in the memory of its result."""
    assert step.op is not None
    assert step.contract is not None
    ranks, rank = group.size(), group.rank()
    flat = tensor.detach().contiguous().view(-1)
    width = -(-flat.numel() // ranks)
    result = large_pages(flat.new_empty(ranks * width))
    rows = result.view(ranks, width)
    parts = [flat[start : start + width] for start in range(0, ranks * width, width)]
    own = parts[rank].numel()
    leaves = wire.start_exchange(parts, group, room=[row[:own] for row in rows])()
    reduce_into(
        rows[rank][:own],
        leaves,
        step.op,
        step.sizes,
        step.contract,
        divisor=step.divisor,
    )
    whole = wire.start_gather(rows[rank], group, result)()
    return whole[: flat.numel()].view(tensor.shape)


PATH = ExchangePath()
