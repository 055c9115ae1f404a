"""Masked sums, counts and means over tokens, from one tensor or from shards; ratios of policies.

The leaves of a sum are the elements of all shards, each flattened, in the order of the shards; a
masked element is the leaf 0.0. They are added by the contract's tree over these positions, so the
bits are the same for any sizes of shards. A mean is the global sum over the global count, never an
average of means.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.errors import ShardError
from meshplan.testing._ranks import RankGroup, join_blocks, sum_blocks
from meshplan.testing.tp._math import exp, expm1, k3, without_nan_payload
from meshplan.testing.tp._vocab import (
    check_dtypes,
    check_eps,
    check_pair,
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
    return _Tokens.read(values, mask, reduction_dtype).sum()


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
    counted, name = (mask, "mask") if values is None else (values, "values")
    return _Tokens.read(counted, mask, reduction_dtype, name).count()


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
    return _Tokens.read(values, mask, reduction_dtype, eps=eps).mean(eps)


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
        GroupStateError, ContractStateError: as ``selected_logprobs_distributed_tp_reference``.
        ShardError: on every rank: the arguments of one are invalid.
        SignatureMismatchError: on every rank: dtypes differ.
    """
    return _Tokens.exchange(local_values, local_mask, reduction_dtype, group).sum()


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
    return _Tokens.exchange(counted, local_mask, reduction_dtype, group, summed=False).count()


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
    return _Tokens.exchange(local_values, local_mask, reduction_dtype, group, eps=eps).mean(eps)


@dataclass(frozen=True)
class _Tokens:
    """The elements of this process, and where they are active, on the device of the values."""

    shards: Sequence[Tensor]
    active: Sequence[Tensor]
    dtype: torch.dtype
    ranks: RankGroup | None = None
    # On each of the ranks.
    sizes: Sequence[int] = ()

    @staticmethod
    def read(
        values: Any,
        mask: _Shards | None,
        dtype: torch.dtype,
        name: str = "values",
        eps: float = 0.0,
    ) -> _Tokens:
        """Check the arguments. A mask without values is counted as values of its own."""
        check_dtypes(dtype)
        check_eps(eps)
        shards = _as_shards(values, name)
        check_shards(shards, name)
        masks = [None] * len(shards) if mask is None else _as_shards(mask, "mask")
        if len(masks) != len(shards):
            raise ShardError(
                f"{len(masks)} masks for {len(shards)} shards of values; pass one mask per shard"
            )
        names = [name] if len(shards) == 1 else [f"{name}[{i}]" for i in range(len(shards))]
        active = [read_mask(*one) for one in zip(masks, shards, names, strict=True)]
        return _Tokens(shards, active, dtype)

    @staticmethod
    def exchange(
        values: Any,
        mask: Tensor | None,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        *,
        summed: bool = True,
        eps: float = 0.0,
    ) -> _Tokens:
        """Check the arguments of all ranks. The dtype of values may differ unless ``summed``."""
        ranks = RankGroup(group)

        def read() -> tuple[_Tokens, dict[str, Any]]:
            masks = None if mask is None else [mask]
            tokens = _Tokens.read([values], masks, dtype, "local_values", eps)
            (shard,) = tokens.shards
            equal = {"reduction_dtype": str(dtype), "eps": float(eps)}
            if summed:
                equal["the dtype of values"] = str(shard.dtype)
            return tokens, {"equal": equal, "size": shard.numel()}

        tokens, records = ranks.run(read, ShardError)
        ranks.check_equal([record["equal"] for record in records])
        return replace(tokens, ranks=ranks, sizes=[record["size"] for record in records])

    def sum(self) -> Tensor:
        """Over all elements of all ranks; differentiable."""
        leaves = [
            shard.reshape(-1).to(self.dtype).masked_fill(~active.reshape(-1), 0.0)
            for shard, active in zip(self.shards, self.active, strict=True)
        ]
        flat = torch.cat(leaves)
        sizes = self.sizes or [len(flat)]
        return _tree_sum(flat, self.ranks, sizes)

    def count(self) -> Tensor:
        count = torch.stack([one.sum(dtype=torch.int64) for one in self.active]).sum()
        return (count if self.ranks is None else self.ranks.sum_integers(count)).to(self.dtype)

    def mean(self, eps: float) -> Tensor:
        return torch.div(self.sum(), self.count().clamp_min(float(eps)))


def _as_shards(tensors: Any, name: str) -> Sequence[Tensor]:
    """One tensor is one shard."""
    if not isinstance(tensors, Tensor | list | tuple):
        raise ShardError(
            f"{name} is a {type(tensors).__name__}; pass a torch.Tensor, or a list of shards"
        )
    return [tensors] if isinstance(tensors, Tensor) else tensors


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


_tree_sum: Callable[..., Tensor] = _TreeSum.apply


# Ratio of policies and divergence from a reference policy, token by token.

_Function = Callable[[Tensor], Tensor]


def compute_policy_ratio(
    current_logps: Tensor,
    old_logps: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """``exp(current - old)`` in float32; 0, without a gradient, where the mask is off.

    Args:
        current_logps, old_logps: log-probabilities of one shape.
        mask: of the same shape; without it all tokens are active.

    Raises:
        ShardError: shapes differ, devices differ, or complex values.
        ContractStateError: the CPU flushes subnormal numbers to zero.
    """
    active, difference = _difference(current_logps, old_logps, mask, ("current_logps", "old_logps"))
    return _exp(difference).masked_fill(~active, 0.0)


def compute_reference_kl(
    current_logps: Tensor,
    ref_logps: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """The k3 estimate of KL(current, reference): ``exp(d) - d - 1`` with d = reference - current.

    An unbiased estimate for tokens drawn from the current policy that is never negative (J.
    Schulman, "Approximating KL Divergence", 2020). d is in float32; the result is rounded to
    float32 once, so that nothing cancels where the policies are close. 0, without a gradient,
    where the mask is off.

    Args:
        current_logps, ref_logps, mask: as for ``compute_policy_ratio``.

    Raises:
        ShardError, ContractStateError: as there.
    """
    active, difference = _difference(ref_logps, current_logps, mask, ("ref_logps", "current_logps"))
    return _k3(difference).masked_fill(~active, 0.0)


def _difference(
    left: Tensor,
    right: Tensor,
    mask: Tensor | None,
    names: tuple[str, str],
) -> tuple[Tensor, Tensor]:
    """Where tokens are active, and ``left - right`` in float32 there, 0 elsewhere."""
    check_pair(left, right, names)
    active = read_mask(mask, left, names[0])
    difference = torch.sub(left.to(torch.float32), right.to(torch.float32))
    # Masked before the exponential: after it, an infinity there would become a NaN gradient.
    return active, difference.masked_fill(~active, 0.0)


class _Elementwise(torch.autograd.Function):
    """``function`` of each element; ``derivative`` is differentiable, as the result is."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, function: _Function, derivative: _Function) -> Tensor:
        ctx.save_for_backward(values)
        ctx.derivative = derivative
        return function(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (values,) = ctx.saved_tensors
        return torch.mul(gradient, ctx.derivative(values)), None, None


_map: Callable[..., Tensor] = _Elementwise.apply


def _exp(values: Tensor) -> Tensor:
    return _map(values, exp, _exp)


def _expm1(values: Tensor) -> Tensor:
    return _map(values, expm1, _exp)


def _k3(values: Tensor) -> Tensor:
    return _map(values, k3, _expm1)
