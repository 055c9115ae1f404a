"""Ratio of policies and divergence from a reference policy, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from meshplan.testing.tp._checks import active_tokens, check_pair
from meshplan.testing.tp._math import differentiable_exp, differentiable_k3

__all__ = ["compute_policy_ratio", "compute_reference_kl"]


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
    return differentiable_exp(difference).masked_fill(~active, 0.0)


def compute_reference_kl(
    current_logps: Tensor, ref_logps: Tensor, mask: Tensor | None = None
) -> Tensor:
    """The k3 estimate of KL(current, reference): ``exp(d) - d - 1`` with d = reference - current.

    An unbiased estimate for tokens drawn from the current policy that is never negative (J.
    Schulman, "Approximating KL Divergence", 2020). d is in float32; what follows is rounded to
    float32 once, so that nothing cancels where the policies are close. 0, without a gradient,
    where the mask is off.

    Args:
        current_logps, ref_logps: log-probabilities of one shape.
        mask: of the same shape; without it all tokens are active.

    Raises:
        ShardError: shapes differ, devices differ, or complex values.
        ContractStateError: the CPU flushes subnormal numbers to zero.
    """
    active, difference = _difference(ref_logps, current_logps, mask, ("ref_logps", "current_logps"))
    return differentiable_k3(difference).masked_fill(~active, 0.0)


def _difference(
    left: Tensor, right: Tensor, mask: Tensor | None, names: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """Where tokens are active, and ``left - right`` in float32 there, 0 elsewhere."""
    check_pair(left, right, names)
    active = active_tokens(mask, left, names[0])
    # Masked before the exponential: behind it, an infinity there would become a NaN gradient.
    return active, torch.sub(left.to(torch.float32), right.to(torch.float32)).masked_fill(
        ~active, 0.0
    )
