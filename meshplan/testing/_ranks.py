"""Records, tensors and values of subtrees that the ranks of a process group exchange, and how such
values join to the tree over all positions.

A rank that raises on its own would leave its peers waiting. So every rank first sends a record, or
its error, to all others. The next step follows from the records, which are the same on all ranks:
all continue, or all raise.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan._bits import INTEGER_OF_SIZE, bytes_of, flatten, tensor_of
from meshplan._chunks import cover_range
from meshplan._torch import device_types_of
from meshplan.definition import total_order
from meshplan.errors import GroupStateError, MeshplanError, SignatureMismatchError
from meshplan.flatten._create import rest_at_end

_T = TypeVar("_T")
LeafRange = tuple[int, int]
"""Positions ``(start, stop)`` of leaves, with ``stop`` excluded."""


class RankGroup:
    """The members of a process group, of all ranks if ``None``; every member makes the same calls.
    ``ranks`` are global ranks in the order of the group, ``position`` is this rank's place there.
    ``GroupStateError`` without an initialised group, or if this rank is not in ``group``.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise GroupStateError(
                "no process group is initialised; call torch.distributed.init_process_group first"
            )
        self.position = dist.get_rank(group)
        if self.position < 0:
            raise GroupStateError(
                f"rank {dist.get_rank()} is not in the group; call this on the group's members only"
            )
        self.ranks = dist.get_process_group_ranks(group)
        self._group = group
        whole: Any = dist.group.WORLD if group is None else group
        types = [device.type for device in device_types_of(whole)]
        self._device = torch.device("cpu" if "cpu" in types else types[0])
        if "cpu" in types:
            rest_at_end()

    def run(
        self, work: Callable[[], tuple[_T, Any]], error: type[MeshplanError]
    ) -> tuple[_T, list[Any]]:
        failure, record, message = None, None, ""
        try:
            result, record = work()
        except Exception as caught:  # of any type: the others must not wait for this rank
            failure, message = (
                caught,
                f"{type(caught).__name__}: {caught}".rstrip(": "),
            )
        outcomes = self.gather_records([record, message])
        if failure is not None:
            raise failure
        for rank, (_, message) in zip(self.ranks, outcomes, strict=True):
            if message:
                raise error(f"rank {rank} raised {message}; all ranks of the group stopped")
        return result, [record for record, _ in outcomes]

    def gather_records(self, record: Any) -> list[Any]:
        data = json.dumps(record).encode()
        length = torch.tensor([len(data)], device="cpu")
        sizes = [int(one) for one in self.gather_tensors(length)]
        found = self.gather_tensors(tensor_of(data.ljust(max(sizes))))
        return [json.loads(bytes_of(one)) for one in found]

    def check_equal(
        self,
        records: Sequence[Mapping[str, Any]],
        advice: str = "pass the same on all ranks",
    ) -> None:
        for name, first in records[0].items():
            values = [record[name] for record in records]
            differing = [i for i, value in enumerate(values) if value != first]
            if differing:
                at, own = differing[0], values[self.position]
                raise SignatureMismatchError(
                    f"ranks differ in {name}: {first} on rank {self.ranks[0]}, {values[at]} on "
                    f"rank {self.ranks[at]}; {advice}",
                    rank=next(r for r, v in zip(self.ranks, values, strict=True) if v != own),
                )

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, of one dtype and shape.

        A tensor on the CPU moves to the device of the group, and the result back.
        """
        device = self._device if tensor.device.type == "cpu" else tensor.device
        # As bytes, which every backend carries.
        mine = flatten(tensor.to(device)).view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(parts, mine, group=self._group)
        return [one.to(tensor.device).view(tensor.dtype).view(tensor.shape) for one in parts]

    def gather_blocks(
        self,
        blocks: Sequence[tuple[LeafRange, Tensor]],
        ranges: Sequence[LeafRange],
        like: Tensor,
    ) -> list[tuple[LeafRange, Tensor]]:
        of_rank = [cover_range(start, stop) for start, stop in ranges]
        # all_gather needs one shape on all ranks.
        sent = like.new_zeros((max(map(len, of_rank)), *like.shape))
        for row, (_, value) in zip(sent, blocks, strict=False):
            row.copy_(value)
        return [
            (block, row)
            for held, rows in zip(of_rank, self.gather_tensors(sent), strict=True)
            for block, row in zip(held, rows, strict=False)
        ]

    def sum_integers(self, local: Tensor) -> Tensor:
        """The elementwise sum over ranks of int64, which no order of additions changes."""
        result = local.contiguous().clone()
        dist.all_reduce(result, op=dist.ReduceOp.SUM, group=self._group)
        return result

    def max_floats(self, local: Tensor) -> Tensor:
        """The elementwise maximum over ranks; canonical NaN is the largest of all."""
        # As integers, which have no NaN that a backend could overlook.
        integer = INTEGER_OF_SIZE[local.element_size()]
        key = total_order(local.contiguous().view(integer)).to(torch.int64)
        dist.all_reduce(key, op=dist.ReduceOp.MAX, group=self._group)
        return total_order(key.to(integer)).view(local.dtype)


# The contract's tree over absolute positions, split anywhere.
#
# Each subtree of the tree ``T(n)`` of ``meshplan.contract`` covers a block of positions
# ``[i * 2^j, (i + 1) * 2^j)``, truncated at n. So the owner of the leaves ``[start, stop)`` reduces
# the largest such blocks inside its own range, at most ``2 * log2(n)``, whose values are all that
# others need: joined at their positions they have the bits of ``T(n)``, for any ranges.


def sum_blocks(values: Tensor, start: int) -> list[tuple[LeafRange, Tensor]]:
    """Sums along the last dim for each block of the range, one addition of tensors per level.
    ``values``: [..., length]. The blocks are those of ``cover_range(start, start + length)``.
    """
    left: list[tuple[LeafRange, Tensor]] = []
    right: list[tuple[LeafRange, Tensor]] = []
    size, index = 1, start
    # At each level `values` are the sums of the blocks index, index + 1, ... of that size. A block
    # whose sibling is outside the range cannot grow any more.
    while values.shape[-1]:
        if index % 2:
            left.append(((index * size, (index + 1) * size), values[..., 0]))
            values, index = values[..., 1:], index + 1
        if values.shape[-1] % 2:
            last = index + values.shape[-1] - 1
            right.append(((last * size, (last + 1) * size), values[..., -1]))
            values = values[..., :-1]
        values = torch.add(values[..., 0::2], values[..., 1::2])
        size, index = size * 2, index // 2
    return left + right[::-1]


def join_blocks(
    blocks: Iterable[tuple[LeafRange, _T]],
    n: int,
    combine: Callable[[_T, _T], _T],
) -> _T:
    """The value of ``T(n)`` from those of blocks of ``cover_range``, for ranges among the
    positions 0 to n - 1.
    """
    # A generator is read once. Sorted, the blocks of any subtree are neighbours.
    ordered = sorted(blocks, key=lambda item: item[0])
    starts = [start for (start, _), _ in ordered]

    def node(low: int, high: int, start: int, size: int) -> _T:
        """The value of ``[start, start + size)``, which holds ``ordered[low:high]``, not empty."""
        # Descends to the smallest subtree with blocks in both halves: a half without blocks is a
        # gap, or beyond n, and its sibling's value passes up unchanged. So does a single block.
        while high - low > 1:
            size //= 2
            middle = bisect_left(starts, start + size, low, high)
            if low < middle < high:
                left = node(low, middle, start, size)
                return combine(left, node(middle, high, start + size, size))
            if middle == low:
                start += size
        return ordered[low][1]

    return node(0, len(ordered), 0, 1 << (n - 1).bit_length())
