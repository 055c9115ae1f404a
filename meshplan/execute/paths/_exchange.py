"""Path ``exchange``: all-to-all of slices, reduction of the own slice, gather of the results.

2 (W - 1) / W of the tensor's bytes leave each rank, in the tensor's own dtype.

Large messages over gloo use the memory of their result. Torch's functional collectives allocate a
tensor for each result, and gloo's all-gather one more, which it then copies. To touch that much new
memory costs more time than all sends over loopback. So the leaves arrive in the result's memory,
the own slice is reduced in place, and each slice is broadcast into its place. Gloo aborts a process
whose buffer is too short, so headers are compared before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan.execute._groups import StepGroups
from meshplan.execute._shards import gather_shard, select_shard, split_parts
from meshplan.execute._wire import (
    Wire,
    fold,
    split_equally,
    to_wire_dtype,
    wait_for_all,
    wait_for_group,
)
from meshplan.execute.paths._path import Outcome, Path
from meshplan.kernel import large_pages, reduce_into
from meshplan.planner import Cost, PlannedReduction, Step, exchange_cost

__all__ = ["PATH", "MIN_SLICE_BYTES"]

# Below, and in larger groups, one collective more for each rank costs more than it saves. Measured
# with benchmarks/allreduce_cpu.py; it cannot change a bit.
MIN_SLICE_BYTES = 128 << 10
MAX_RANKS = 8


class ExchangePath(Path):
    """See the module."""

    name = "exchange"

    def all_reduce(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        """As in ``Path``: equal slices, the last ones padded."""
        group = groups.flat
        if wire.in_place and _is_in_place(tensor, group):
            wire.compare()
            return Outcome(_exchange_in_place(tensor, step, group, wire), wire.log)
        own = fold(wire.exchange(split_equally(tensor, group.size()), group), step)
        gathered = wire.all_gather(own, group)
        return Outcome(gathered[: tensor.numel()].view(tensor.shape), wire.log, pending=True)

    def reduce_scatter(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        """As in ``Path``: ranks of one shard reduce a part each and gather the parts."""
        group = groups.flat
        leaves = wire.exchange(list(split_parts(tensor, step, group.size())), group)
        shard = select_shard(tensor, step, group.rank())
        found, pending = gather_shard(fold(leaves, step), shard.shape, groups, wire)
        return Outcome(found, wire.log, pending)

    def cost(self, reduction: PlannedReduction) -> Cost:
        return exchange_cost(reduction)


def _is_in_place(tensor: Tensor, group: ProcessGroup) -> bool:
    """Whether ``tensor``, of which all ranks of ``group`` bring as much, goes in place."""
    ranks = group.size()
    return ranks <= MAX_RANKS and tensor.nbytes >= ranks * MIN_SLICE_BYTES


def _exchange_in_place(tensor: Tensor, step: Step, group: ProcessGroup, wire: Wire) -> Tensor:
    """All-to-all of slices, reduction of the own slice in contract order, a broadcast of each."""
    assert step.op is not None
    assert step.contract is not None
    ranks, rank = group.size(), group.rank()
    flat = tensor.detach().contiguous().view(-1)
    width, lengths = _slices(flat.numel(), ranks)
    result = large_pages(flat.new_empty(ranks * width))
    mine = result[rank * width :][: lengths[rank]]
    leaves = _leaves(flat, result, lengths, group, wire)
    reduce_into(mine, leaves, step.op, step.sizes, step.contract, divisor=step.divisor)
    works = []
    try:
        for r, length in enumerate(lengths):
            if length > 0:
                part = to_wire_dtype(result[r * width :][:length])
                sent = wire.issue(dist.broadcast, part, group=group, group_src=r, async_op=True)
                works.append(sent)
    finally:
        wait_for_all(works, group)
    return result[: flat.numel()].view(tensor.shape)


def _leaves(
    flat: Tensor, result: Tensor, lengths: Sequence[int], group: ProcessGroup, wire: Wire
) -> Sequence[Tensor]:
    """Every rank's part of the own slice, in memory of ``result`` where there is room for it.

    The one of this rank is in the own slice of ``result``, or nowhere in it.
    """
    ranks, rank = group.size(), group.rank()
    width, own = result.numel() // ranks, lengths[rank]

    def swap(into: Tensor, message: Tensor, *splits: list[int]) -> None:
        how = to_wire_dtype(into), to_wire_dtype(message), *splits
        work = wire.issue(dist.all_to_all_single, *how, group=group, async_op=True)
        wait_for_group(work, group)

    if ranks == 2:
        # Each sends only the slice of the other; an all-to-all would copy the own slice too.
        other = 1 - rank
        place = result[other * width :][:own]
        sent = flat[other * width :][: lengths[other]]
        come, go = [0, 0], [0, 0]
        come[other], go[other] = own, sent.numel()
        swap(place, sent, come, go)
        mine = flat[rank * width :][:own]
        return [mine, place] if rank == 0 else [place, mine]
    if lengths[-1] == width:
        swap(result, flat)
        return result.view(ranks, width).unbind(0)
    # This rank's slice may be shorter than the others: parts of it do not fill the result's rows.
    leaves = result if own == width else flat.new_empty(ranks * own)
    swap(leaves, flat, [own] * ranks, list(lengths))
    return leaves.view(ranks, own).unbind(0)


def _slices(numel: int, ranks: int) -> tuple[int, list[int]]:
    """How wide slices are, and how much of each is there: the last ones may be shorter or empty."""
    width = -(-numel // ranks)
    return width, [max(0, min(width, numel - r * width)) for r in range(ranks)]


PATH = ExchangePath()
