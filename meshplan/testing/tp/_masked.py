"""Masked sums, counts and means over tokens, from one tensor or from shards.

The leaves of a sum are the elements of all shards, each flattened, in the order of the shards; a
masked element is the leaf 0.0. They are added by the contract's tree over these positions, so the
bits are the same for any sizes of shards. A mean is the global sum over the global count, never an
average of means.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.errors import ShardError
from meshplan.testing._ranks import RankGroup
from meshplan.testing._segments import join_blocks, sum_blocks
from meshplan.testing.tp._math import without_nan_payload
from meshplan.testing.tp._vocab import (
    check_dtypes,
    check_eps,
    check_shards,
    read_mask,
)


def masked_sum(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """The sum of the active elements of one tensor: ``sharded_masked_sum`` of one shard.

    Args:
        values: real numbers of any shape.
        mask: of the same shape; without it all elements are active.

    Returns:
        float32 scalar on the device of ``values``; 0 if nothing is active.

    Raises:
        ShardError: shapes differ, or complex values.
        ContractStateError: the CPU flushes subnormal numbers to zero.
    """
    return sharded_masked_sum([values], None if mask is None else [mask])


def active_token_count(mask: Tensor | None, values: Tensor | None = None) -> Tensor:
    """How many elements are active: of ``mask``, or without it all of ``values``.

    Args:
        mask: any shape; elements other than zero are active.
        values: of the same shape.

    Returns:
        float32 scalar on the device of the mask, or of the values.

    Raises:
        ShardError: neither is given, or their shapes differ.
    """
    return sharded_active_token_count(
        None if mask is None else [mask],
        value_shards=None if values is None else [values],
    )


def masked_mean(values: Tensor, mask: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """``masked_sum`` divided by ``active_token_count``, which counts as at least ``eps``.

    Args:
        values, mask: as for ``masked_sum``.
        eps: least denominator, so that the mean of nothing is 0; with 0 it is NaN.

    Returns:
        float32 scalar on the device of ``values``.

    Raises:
        ShardError: as ``masked_sum``, or ``eps`` is negative or not finite.
        ContractStateError: as ``masked_sum``.
    """
    return sharded_masked_mean([values], None if mask is None else [mask], eps=eps)


def sharded_masked_sum(
    value_shards: Sequence[Tensor],
    mask_shards: Sequence[Tensor] | None = None,
    *,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The sum of all active elements; the same bits for any shards of the flattened values.

    Args:
        value_shards: real numbers, of any shapes, empty ones too; of one dtype on one device.
        mask_shards: one per shard and of its shape; without them all elements are active.
        reduction_dtype: of all additions and of the result.

    Returns:
        Scalar of ``reduction_dtype``; 0 if nothing is active. Masked values, NaN too, add nothing
        and have no gradient.

    Raises:
        ShardError: no shards, or lengths, shapes, dtypes or devices do not fit.
        ContractStateError: the CPU flushes subnormal numbers to zero.
    """
    check_dtypes(reduction_dtype)
    check_shards(value_shards, "value_shards")
    masks = [None] * len(value_shards) if mask_shards is None else mask_shards
    _check_masks(mask_shards, value_shards)
    leaves = [_leaves(v, m, reduction_dtype) for v, m in zip(value_shards, masks, strict=True)]
    flat = torch.cat(leaves)
    return _tree_sum(flat, None, [len(flat)])


def sharded_active_token_count(
    mask_shards: Sequence[Tensor] | None = None,
    *,
    value_shards: Sequence[Tensor] | None = None,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """How many elements are active in all shards: of the masks, or without them of the values.

    Counted in integers and rounded to ``reduction_dtype`` once.

    Args:
        mask_shards: one per shard, any shapes.
        value_shards: of the shapes of the masks.
        reduction_dtype: of the result.

    Returns:
        Scalar of ``reduction_dtype`` on the device of the shards.

    Raises:
        ShardError: neither masks nor values, no shards, shards on several devices, or masks that
            do not fit the values.
    """
    check_dtypes(reduction_dtype)
    counted = value_shards if mask_shards is None else mask_shards
    if counted is None:
        raise ShardError("no mask and no values to count; pass at least one of them")
    if value_shards is not None:
        check_shards(value_shards, "value_shards")
        _check_masks(mask_shards, value_shards)
    if mask_shards is not None:
        check_shards(mask_shards, "mask_shards")
    active = [
        torch.ones_like(one, dtype=torch.bool) if mask_shards is None else one.to(torch.bool)
        for one in counted
    ]
    return torch.stack([mask.sum(dtype=torch.int64) for mask in active]).sum().to(reduction_dtype)


def sharded_masked_mean(
    value_shards: Sequence[Tensor],
    mask_shards: Sequence[Tensor] | None = None,
    *,
    eps: float = 1e-8,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``sharded_masked_sum`` divided by the count of all shards, at least ``eps``.

    Args:
        value_shards, mask_shards, reduction_dtype: as for ``sharded_masked_sum``.
        eps: least denominator, so that the mean of nothing is 0; with 0 it is NaN.

    Raises:
        ShardError: as ``sharded_masked_sum``, or ``eps`` is negative or not finite.
        ContractStateError: as ``sharded_masked_sum``.
    """
    check_eps(eps)
    count = sharded_active_token_count(
        mask_shards, value_shards=value_shards, reduction_dtype=reduction_dtype
    )
    total = sharded_masked_sum(value_shards, mask_shards, reduction_dtype=reduction_dtype)
    return _mean(total, count, eps)


def distributed_masked_sum(
    local_values: Tensor,
    local_mask: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``sharded_masked_sum`` where each rank of ``group`` holds one shard, in the group's order.

    Every rank of the group must call it; shapes may differ and may be empty. The result has the
    same bits on all ranks, those of ``masked_sum`` over the concatenated flat shards. Its gradient
    with respect to ``local_values`` is that of a loss which all ranks compute from the result in
    the same way; it needs no communication.

    Args:
        local_values: real numbers of any shape.
        local_mask: of the same shape; without it all elements of this rank are active.
        group: of any backend that supports the values' device; by default all ranks.
        reduction_dtype: of all additions and of the result.

    Returns:
        Scalar of ``reduction_dtype`` on the device of ``local_values``.

    Raises:
        GroupStateError: torch.distributed is not initialised, or this rank is not in the group.
        ShardError: on every rank: the arguments of one are invalid.
        SignatureMismatchError: on every rank: dtypes differ.
        ContractStateError: the CPU of this rank flushes subnormal numbers to zero; ShardError on
            the others.
    """
    return _RankShard.exchange(local_values, local_mask, reduction_dtype, group).sum()


def distributed_active_token_count(
    local_mask: Tensor | None = None,
    *,
    local_values: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """How many elements are active on all ranks of ``group``: of the masks, or of the values.

    Every rank of the group must call it. Counted in integers, rounded to ``reduction_dtype`` once.

    Args:
        local_mask: any shape; elements other than zero are active.
        local_values: of the same shape.
        group: as for ``distributed_masked_sum``.
        reduction_dtype: of the result.

    Returns:
        Scalar of ``reduction_dtype`` on the device of the mask, or of the values.

    Raises:
        GroupStateError, ShardError, SignatureMismatchError, ContractStateError: as
            ``distributed_masked_sum``; and ShardError for neither mask nor values on a rank.
    """
    counted = local_mask if local_values is None else local_values
    shard = _RankShard.exchange(counted, local_mask, reduction_dtype, group, summed=False)
    return shard.count()


def distributed_masked_mean(
    local_values: Tensor,
    local_mask: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    eps: float = 1e-8,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``distributed_masked_sum`` divided by the count of all ranks, at least ``eps``.

    Args:
        local_values, local_mask, group, reduction_dtype: as for ``distributed_masked_sum``.
        eps: least denominator, so that the mean of nothing is 0; with 0 it is NaN.

    Raises:
        GroupStateError, ShardError, SignatureMismatchError, ContractStateError: as
            ``distributed_masked_sum``; and ShardError for an ``eps`` that is negative or not
            finite, SignatureMismatchError for one that differs.
    """
    shard = _RankShard.exchange(local_values, local_mask, reduction_dtype, group, eps=eps)
    return _mean(shard.sum(), shard.count(), float(eps))


@dataclass(frozen=True)
class _RankShard:
    values: Tensor
    active: Tensor
    dtype: torch.dtype
    ranks: RankGroup
    sizes: Sequence[int]

    @staticmethod
    def exchange(
        values: Tensor | None,
        mask: Tensor | None,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        *,
        summed: bool = True,
        eps: float = 0.0,
    ) -> _RankShard:
        """Check the arguments of all ranks. The dtype of values may differ unless ``summed``."""
        ranks = RankGroup(group)

        def read() -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
            check_dtypes(dtype)
            check_eps(eps)
            if values is None:
                raise ShardError("no mask and no values; pass at least one of them")
            check_shards([values], "local_values")
            equal = {"reduction_dtype": str(dtype), "eps": float(eps)}
            if summed:
                equal["the dtype of values"] = str(values.dtype)
            active = read_mask(mask, values, "local_values")
            return (values, active), {"equal": equal, "size": values.numel()}

        (values, active), records = ranks.run(read, ShardError)
        ranks.check_equal([record["equal"] for record in records])
        return _RankShard(values, active, dtype, ranks, [record["size"] for record in records])

    def sum(self) -> Tensor:
        return _tree_sum(
            _leaves(self.values, self.active, self.dtype),
            self.ranks,
            self.sizes,
        )

    def count(self) -> Tensor:
        return self.ranks.sum_integers(self.active.sum(dtype=torch.int64)).to(self.dtype)


def _check_masks(masks: Sequence[Tensor] | None, values: Sequence[Tensor]) -> None:
    if masks is None:
        return
    if len(masks) != len(values):
        raise ShardError(
            f"{len(masks)} mask_shards for {len(values)} value_shards; pass one mask per shard"
        )
    for i, (mask, value) in enumerate(zip(masks, values, strict=True)):
        read_mask(mask, value, "values" if len(values) == 1 else f"value_shards[{i}]")


def _leaves(values: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The leaves of one shard: flat, in ``dtype``, 0.0 where masked; differentiable."""
    flat = values.reshape(-1).to(dtype)
    if mask is None:
        return flat
    active = mask.to(device=values.device, dtype=torch.bool)
    return flat.masked_fill(~active.reshape(-1), 0.0)


def _mean(total: Tensor, count: Tensor, eps: float) -> Tensor:
    return torch.div(total, count.clamp_min(eps).to(total.device))


def _tree_sum(flat: Tensor, ranks: RankGroup | None, sizes: Sequence[int]) -> Tensor:
    """The sum of leaves [n], here or over ranks with ``sizes`` of them; differentiable."""
    result: Tensor = _TreeSum.apply(flat, ranks, sizes)  # type: ignore[no-untyped-call]
    return result


class _TreeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, ranks: RankGroup | None, sizes: Sequence[int]) -> Tensor:
        ctx.length = flat.shape[0]
        ends = list(itertools.accumulate(sizes, initial=0))
        zero = flat.new_zeros(())
        if ends[-1] == 0:
            return zero
        blocks = sum_blocks(flat.detach(), ends[0 if ranks is None else ranks.position])
        if ranks is not None:
            blocks = ranks.gather_blocks(blocks, list(itertools.pairwise(ends)), zero)
        return without_nan_payload(join_blocks(blocks, ends[-1], torch.add))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.repeat(ctx.length), None, None
