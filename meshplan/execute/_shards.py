"""The shards of a reduce-scatter: which part of the tensor each rank holds and reduces.

The shard of a rank is what DTensor's placements make of its mesh coordinate: one split per sharded
axis, outermost first, parts as ``torch.chunk`` makes them, empty ones at the end; or, on one axis,
those of the step. Ranks that differ only along axes that are not sharded hold the same shard; each
of them reduces a part of it, and they gather the finished parts. An element is always one fold over
the same leaves, so that its bits are those of the all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from meshplan._bits import element_index, flatten
from meshplan.execute._groups import StepGroups
from meshplan.execute._wire import Wire
from meshplan.planner import Step


def select_shard(tensor: Tensor, step: Step, group_rank: int) -> Tensor:
    """The view of ``tensor`` that the rank at ``group_rank`` holds."""
    where = dict(zip(step.axes, element_index(group_rank, step.sizes), strict=True))
    sizes = dict(zip(step.axes, step.sizes, strict=True))
    for axis, dim in step.scatter:
        at = where[axis]
        if step.lengths:
            tensor = tensor.narrow(dim, sum(step.lengths[:at]), step.lengths[at])
            continue
        length = tensor.shape[dim]
        width = -(-length // sizes[axis])
        start = min(at * width, length)
        tensor = tensor.narrow(dim, start, min(width, length - start))
    return tensor


def gather_shard(
    finished: Tensor, shape: torch.Size, groups: StepGroups, wire: Wire
) -> tuple[Tensor, bool]:
    """The contiguous shard, from the flat parts that this rank and its sharers have finished
    (``split_parts`` defines them), and whether it must still be waited for.
    """
    numel = math.prod(shape)
    if groups.gather is None or numel == 0:
        return finished.view(shape), False
    ranks = groups.gather.size()
    width = -(-numel // ranks)
    part = finished
    if finished.numel() < width:
        part = finished.new_zeros(width)
        part[: finished.numel()] = finished
    return wire.all_gather(part, groups.gather)[:numel].view(shape), True


def split_parts(tensor: Tensor, step: Step, ranks: int) -> Iterator[Tensor]:
    """The message to each rank: its part of its shard, flat."""
    gather_axes = step.gather_axes
    sizes = [size for axis, size in zip(step.axes, step.sizes, strict=True) if axis in gather_axes]
    sharers = math.prod(sizes)
    for rank in range(ranks):
        shard = flatten(select_shard(tensor, step, rank))
        width = -(-shard.numel() // sharers)
        where = zip(step.axes, element_index(rank, step.sizes), strict=True)
        position = 0
        for size, index in zip(sizes, [i for axis, i in where if axis in gather_axes], strict=True):
            position = position * size + index
        start = min(position * width, shard.numel())
        yield shard[start : start + width]
