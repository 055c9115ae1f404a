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

_Shards = Tensor | Sequence[Tensor]
"""One tensor, or its shards in order."""


def masked_sum(
    values: _Shards,
    mask: _Shards | None = None,
    *,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The sum of all active elements; the same bits for any shards of the flattened values.

    Args:
        values: real numbers of any shape, or a list of shards: of any shapes, empty ones too, of
            one dtype on one device.
        mask: of the same shape, or one per shard; without it all elements are active.
        reduction_dtype: of all additions and of the result.

    Returns:
        Scalar of ``reduction_dtype`` on the device of the values; 0 if nothing is active. Masked
        values, NaN too, add nothing and have no gradient.

    Raises:
        ShardError: no shards, or lengths, shapes, dtypes or devices do not fit, or complex values.
        ContractStateError: the CPU flushes subnormal numbers to zero.
    """
    check_dtypes(reduction_dtype)
    shards, active = _read_shards(values, mask)
    leaves = [_leaves(*one, reduction_dtype) for one in zip(shards, active, strict=True)]
    flat = torch.cat(leaves)
    return _tree_sum(flat, None, [len(flat)])


def active_token_count(
    mask: _Shards | None = None,
    values: _Shards | None = None,
    *,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """How many elements are active: of ``mask``, or without it all of ``values``.

    Counted in integers and rounded to ``reduction_dtype`` once.

    Args:
        mask: any shape, or a list of shards; elements other than zero are active.
        values: of the shapes of the masks.
        reduction_dtype: of the result.

    Returns:
        Scalar of ``reduction_dtype`` on the device of the values, or of the mask.

    Raises:
        ShardError: neither is given, no shards, shards on several devices, or masks that do not fit
            the values.
    """
    check_dtypes(reduction_dtype)
    if values is not None:
        _, active = _read_shards(values, mask)
    elif mask is not None:
        masks = _as_shards(mask, "mask")
        check_shards(masks, "mask")
        active = [one.to(torch.bool) for one in masks]
    else:
        raise ShardError("no mask and no values to count; pass at least one of them")
    return torch.stack([one.sum(dtype=torch.int64) for one in active]).sum().to(reduction_dtype)


def masked_mean(
    values: _Shards,
    mask: _Shards | None = None,
    eps: float = 1e-8,
    *,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``masked_sum`` divided by ``active_token_count``, which counts as at least ``eps``.

    Args:
        values, mask, reduction_dtype: as for ``masked_sum``.
        eps: least denominator, so that the mean of nothing is 0; with 0 it is NaN.

    Raises:
        ShardError: as ``masked_sum``, or ``eps`` is negative or not finite.
        ContractStateError: as ``masked_sum``.
    """
    check_eps(eps)
    count = active_token_count(mask, values, reduction_dtype=reduction_dtype)
    return _mean(masked_sum(values, mask, reduction_dtype=reduction_dtype), count, eps)


def distributed_masked_sum(
    local_values: Tensor,
    local_mask: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``masked_sum`` where each rank of ``group`` holds one shard, in the group's order.

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


def _as_shards(tensors: _Shards, name: str) -> Sequence[Tensor]:
    """One tensor is one shard."""
    if not isinstance(tensors, Tensor | list | tuple):
        raise ShardError(
            f"{name} is a {type(tensors).__name__}; pass a torch.Tensor, or a list of shards"
        )
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _read_shards(
    values: _Shards, mask: _Shards | None
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Shards of values, and where each is active, on the device of the values."""
    shards = _as_shards(values, "values")
    check_shards(shards, "values")
    masks = [None] * len(shards) if mask is None else _as_shards(mask, "mask")
    if len(masks) != len(shards):
        raise ShardError(
            f"{len(masks)} masks for {len(shards)} shards of values; pass one mask per shard"
        )
    names = ["values"] if len(shards) == 1 else [f"values[{i}]" for i in range(len(shards))]
    return shards, [read_mask(*one) for one in zip(masks, shards, names, strict=True)]


def _leaves(values: Tensor, active: Tensor, dtype: torch.dtype) -> Tensor:
    """The leaves of one shard: flat, in ``dtype``, 0.0 where masked; differentiable."""
    return values.reshape(-1).to(dtype).masked_fill(~active.reshape(-1), 0.0)


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
