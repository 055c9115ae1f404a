"""Sums, counts and means over tokens under a mask, from one tensor or from shards.

The leaves are the elements of all shards, each flattened, one shard after the other; a masked
element is the leaf 0.0. They are added by the contract's tree over these positions, so that cuts
between shards, even or not, change no bit. A mean is the global sum over the global count, never
an average of means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshplan.errors import ShardError
from meshplan.testing._segments import Block, joined, tensor_blocks
from meshplan.testing.tp._checks import (
    active_tokens,
    check_dtypes,
    check_eps,
    checked_masks,
    checked_values,
)
from meshplan.testing.tp._math import without_nan_payload

__all__ = [
    "masked_sum",
    "masked_mean",
    "active_token_count",
    "sharded_masked_sum",
    "sharded_active_token_count",
    "sharded_masked_mean",
    "leaves",
    "mean",
    "tree_sum",
]


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
        mask: any shape; what is not zero is active.
        values: of the same shape.

    Returns:
        float32 scalar on the device of the mask, or of the values.

    Raises:
        ShardError: neither is given, or their shapes differ.
    """
    return sharded_active_token_count(
        None if mask is None else [mask], value_shards=None if values is None else [values]
    )


def masked_mean(values: Tensor, mask: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """``masked_sum`` divided by ``active_token_count``, which is taken for at least ``eps``.

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
    """The sum of all active elements; the same bits for any cuts of the flattened values.

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
    values = checked_values(value_shards)
    masks = checked_masks(mask_shards, values)
    parts = [leaves(v, m, reduction_dtype) for v, m in zip(values, masks, strict=True)]
    return tree_sum(torch.cat(parts), _whole)


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
    if mask_shards is None and value_shards is None:
        raise ShardError("nothing to count: no mask and no values; give at least one of them")
    values = None if value_shards is None else checked_values(value_shards)
    if mask_shards is None:
        assert values is not None
        masks = [active_tokens(None, value) for value in values]
    else:
        checked_values(mask_shards, "mask_shards")
        masks = [mask.to(torch.bool) for mask in mask_shards]
        if values is not None:
            checked_masks(mask_shards, values)
    count = torch.stack([mask.sum(dtype=torch.int64) for mask in masks]).sum()
    return count.to(reduction_dtype)


def sharded_masked_mean(
    value_shards: Sequence[Tensor],
    mask_shards: Sequence[Tensor] | None = None,
    *,
    eps: float = 1e-8,
    reduction_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``sharded_masked_sum`` divided by the count of all shards, taken for at least ``eps``.

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
    return mean(total, count, eps)


def leaves(values: Tensor, active: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The leaves of one shard: flat, in ``dtype``, 0.0 where not active; differentiable."""
    flat = values.reshape(-1).to(dtype)
    return flat if active is None else flat.masked_fill(~active.reshape(-1), 0.0)


def mean(total: Tensor, count: Tensor, eps: float) -> Tensor:
    """One division of two scalars."""
    return torch.div(total, count.clamp_min(eps).to(total.device))


def tree_sum(flat: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """``reduce`` of leaves [n], for which the gradient of each leaf is that of the sum."""
    result: Tensor = _TreeSum.apply(flat, reduce)  # type: ignore[no-untyped-call]
    return result


class _TreeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.length = flat.shape[0]
        return without_nan_payload(reduce(flat.detach()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.repeat(ctx.length), None


def _whole(flat: Tensor) -> Tensor:
    blocks: list[tuple[Block, Tensor]] = tensor_blocks(flat, 0)
    return joined(blocks, flat.shape[0], torch.add) if blocks else flat.new_zeros(())
