"""Ratio of policies and divergence from a reference policy, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshplan.testing.tp._math import exp, expm1, k3
from meshplan.testing.tp._vocab import check_pair, read_mask

_Function = Callable[[Tensor], Tensor]


def compute_policy_ratio(
    current_logps: Tensor, old_logps: Tensor, mask: Tensor | None = None
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
    current_logps: Tensor, ref_logps: Tensor, mask: Tensor | None = None
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
    left: Tensor, right: Tensor, mask: Tensor | None, names: tuple[str, str]
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
