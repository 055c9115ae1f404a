"""The distance of a candidate from a reference, in numbers for a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshplan._bits import FLOATS, element_index, max_ulps
from meshplan.testing._bitwise import bits
from meshplan.testing.tp._masked import sharded_masked_sum
from meshplan.testing.tp._vocab import (
    check_pair,
    check_same_shape,
    read_ids,
    read_mask,
    read_ranges,
)

_LEAST_REFERENCE = 1e-12


def summarize_kernel_drift(
    candidate: Tensor, reference: Tensor, mask: Tensor | None = None
) -> dict[str, Any]:
    """Errors of ``candidate`` over the active elements.

    Args:
        candidate, reference: real numbers of one shape on one device; compared in float64.
        mask: of the same shape; without it all elements are active.

    Returns:
        * ``max_abs_error``, ``mean_abs_error``: floats; NaN where only one of the two is a NaN. Two
            NaNs, or two equal infinities, are no error.
        * ``max_ulps``: the largest distance in units in the last place, as an int: 0 for equal
            bits, for two NaNs and between zeros; None if the dtypes differ or are not IEEE formats,
            or if only one of the two is a NaN.
        * ``active_count``: int.

        Without active elements all are 0.

    Raises:
        ShardError: shapes or devices differ, or complex numbers.
        ContractStateError: the CPU flushes subnormal numbers to zero.
    """
    active, error = _errors(candidate, reference, mask)
    return {
        "max_abs_error": _largest(error, active),
        "mean_abs_error": _mean(error, active),
        "max_ulps": _max_ulps(candidate.detach()[active], reference.detach()[active]),
        "active_count": int(active.sum()),
    }


def summarize_tp_logprob_drift(
    candidate: Tensor,
    reference: Tensor,
    token_ids: Tensor,
    shard_ranges: Sequence[tuple[int, int]],
    mask: Tensor | None = None,
    *,
    backend: str = "reference",
    reduction_name: str = "tp_vocab_logsumexp",
    dtype: torch.dtype | str | None = None,
) -> dict[str, Any]:
    """``summarize_kernel_drift``, and the worst token.

    Args:
        candidate, reference: log-probabilities [*tokens].
        token_ids: integers [*tokens].
        shard_ranges: ``(start, stop)`` of the vocabulary on each rank.
        mask: [*tokens]; without it all tokens are active.
        backend, reduction_name: source of the candidate; repeated in the result.
        dtype: in which it was computed; by default that of the candidate.

    Returns:
        The keys of ``summarize_kernel_drift``, and

        * ``max_rel_error``, ``mean_rel_error``: relative to the reference, at least 1e-12;
        * ``backend``, ``reduction_name``, ``dtype`` (a str), ``tp_size``;
        * of the first active token with the largest absolute error (NaN is the largest):
            ``flat_index``, ``multi_index``, ``token_id``, ``owner_rank``, ``owner_vocab_start``,
            ``owner_vocab_end`` (these three: None where no rank holds it), ``candidate_value``,
            ``reference_value``, ``signed_error``. All None without active tokens.

    Raises:
        ShardError, ContractStateError: as ``summarize_kernel_drift``; and ShardError for ranges
            that overlap, and ids that are not integers.
    """
    ranges = read_ranges(shard_ranges)
    summary = summarize_kernel_drift(candidate, reference, mask)
    ids = read_ids(token_ids)
    check_same_shape("candidate", candidate.shape, ids)
    active, error = _errors(candidate, reference, mask)
    relative = error / reference.detach().to(torch.float64).abs().clamp_min(_LEAST_REFERENCE)
    # Two equal infinities are no error, relative to infinity neither.
    relative = relative.masked_fill(error == 0.0, 0.0)
    flat = index = token = owner = start = stop = found = wanted = signed = None
    if summary["active_count"]:
        # Inactive tokens come after all others.
        flat = int(error.masked_fill(~active, -1.0).flatten().argmax())
        index, token = element_index(flat, candidate.shape), int(ids.flatten()[flat])
        found, wanted = (float(x.detach().flatten()[flat]) for x in (candidate, reference))
        signed = found - wanted
        owner = next((r for r, (a, b) in enumerate(ranges) if a <= token < b), None)
        start, stop = (None, None) if owner is None else ranges[owner]
    return summary | {
        "max_rel_error": _largest(relative, active),
        "mean_rel_error": _mean(relative, active),
        "backend": backend,
        "reduction_name": reduction_name,
        "dtype": str(candidate.dtype if dtype is None else dtype),
        "flat_index": flat,
        "multi_index": index,
        "token_id": token,
        "owner_rank": owner,
        "owner_vocab_start": start,
        "owner_vocab_end": stop,
        "candidate_value": found,
        "reference_value": wanted,
        "signed_error": signed,
        "tp_size": len(ranges),
    }


def _errors(candidate: Tensor, reference: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The active elements, and the absolute errors in float64."""
    check_pair(candidate, reference, ("candidate", "reference"))
    active = read_mask(mask, candidate, "candidate")
    found, wanted = (x.detach().to(torch.float64) for x in (candidate, reference))
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return active, (found - wanted).abs().masked_fill(same, 0.0)


def _largest(error: Tensor, active: Tensor) -> float:
    return float(error[active].max()) if bool(active.any()) else 0.0


def _mean(error: Tensor, active: Tensor) -> float:
    chosen = error[active]
    total = sharded_masked_sum([chosen], reduction_dtype=torch.float64)
    return float(total) / max(chosen.numel(), 1)


def _max_ulps(found: Tensor, wanted: Tensor) -> int | None:
    nan = found.isnan()
    if (
        found.dtype is not wanted.dtype
        or found.dtype not in FLOATS
        or not nan.equal(wanted.isnan())
    ):
        return None
    return max_ulps(bits(found[~nan]), bits(wanted[~nan]))
