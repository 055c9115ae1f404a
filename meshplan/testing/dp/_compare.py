"""The difference of two sets of gradients: by bits, and in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshplan._bits import FLOATS, max_ulps
from meshplan._message_text import format_first
from meshplan.errors import ContractError
from meshplan.testing._bitwise import bits, first_difference

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ParameterDifference:
    """One parameter's gradient compared with its reference.

    Attributes:
        numel: number of elements; 0 where neither has a gradient.
        bitwise_equal: dtype, shape and all bits agree, or neither has a gradient.
        mismatch_count: elements outside the tolerance; without one, elements whose bits differ.
        max_abs_diff: the largest ``|candidate - reference|``, in float64.
        max_rel_diff: the largest ``|candidate - reference| / |reference|``.
        max_ulps: the largest distance in units in the last place; 0 between -0.0 and 0.0. ``None``
            where one of the two is NaN or has no gradient.

    The distance of numbers that cannot be subtracted (one NaN, infinities that differ), and of a
    gradient from a missing one, is infinite; that of NaNs with different bits is 0.
    """

    numel: int
    bitwise_equal: bool
    mismatch_count: int
    max_abs_diff: float
    max_rel_diff: float
    max_ulps: int | None


@dataclass(frozen=True, slots=True)
class GradientSummary(ParameterDifference):
    """The difference of two sets of gradients: in total, and by parameter.

    Attributes:
        numel, mismatch_count: sums over all parameters.
        bitwise_equal: all bits of all parameters agree.
        max_abs_diff, max_rel_diff: the largest of the parameters; 0.0 without parameters.
        max_ulps: the largest of the parameters; ``None`` if that of some parameter is unknown.
        parameters: by name, in sorted order.
    """

    parameters: dict[str, ParameterDifference]


def gradient_summary(
    candidate: Mapping[str, Tensor | None],
    reference: Mapping[str, Tensor | None],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> GradientSummary:
    """The difference of two sets of gradients.

    Args:
        candidate, reference: floating-point tensors on any device (or ``None``: no gradient) by
            parameter name.
        rtol, atol: an element matches if its bits agree or ``|candidate - reference| <= atol +
            rtol * |reference|``. With both 0 its bits must agree: -0.0 is not 0.0.

    Raises:
        ContractError: (a ValueError) other names, shapes or dtypes, dtypes that are not floats, or
            a tolerance that is negative or not finite.
    """
    if not all(0 <= tolerance < math.inf for tolerance in (rtol, atol)):
        raise ContractError(f"rtol={rtol}, atol={atol}; pass finite tolerances, 0 or more")
    _check_names(candidate, reference)
    parameters = {
        name: _difference(name, candidate[name], reference[name], rtol, atol)
        for name in sorted(reference)
    }
    parts = parameters.values()
    ulps = [one.max_ulps for one in parts]
    known = [one for one in ulps if one is not None]
    return GradientSummary(
        numel=sum(one.numel for one in parts),
        bitwise_equal=all(one.bitwise_equal for one in parts),
        mismatch_count=sum(one.mismatch_count for one in parts),
        max_abs_diff=max((one.max_abs_diff for one in parts), default=0.0),
        max_rel_diff=max((one.max_rel_diff for one in parts), default=0.0),
        max_ulps=max(known, default=0) if len(known) == len(ulps) else None,
        parameters=parameters,
    )


def compare_gradients(
    candidate: Mapping[str, Tensor | None],
    reference: Mapping[str, Tensor | None],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> GradientSummary:
    """Assert that two sets of gradients agree: in every bit, unless a tolerance is given.

    Args:
        candidate, reference, rtol, atol: as for ``gradient_summary``.

    Returns:
        As ``gradient_summary``.

    Raises:
        AssertionError: elements that do not match, with the numbers of each parameter.
        ContractError: as ``gradient_summary``.
    """
    summary = gradient_summary(candidate, reference, rtol=rtol, atol=atol)
    wrong = {name: one for name, one in summary.parameters.items() if one.mismatch_count}
    if not wrong:
        return summary
    limits = f" (rtol={rtol:g}, atol={atol:g})" if rtol or atol else " in their bits"
    lines = [f"gradients of {len(wrong)} of {len(summary.parameters)} parameters differ{limits}:"]
    for name, one in list(wrong.items())[:_SHOWN]:
        found, wanted = candidate[name], reference[name]
        lines.append(
            f"  {name}: {one.mismatch_count} of {one.numel} elements, max_abs_diff "
            f"{one.max_abs_diff:.6g}, max_rel_diff {one.max_rel_diff:.6g}, max_ulps {one.max_ulps}"
        )
        if found is None or wanted is None:
            lines[-1] += f"; no gradient in the {'candidate' if found is None else 'reference'}"
        elif not (rtol or atol):
            lines.append(f"    {first_difference(found, wanted)}")
    if len(wrong) > _SHOWN:
        lines.append(f"  and {len(wrong) - _SHOWN} more")
    raise AssertionError("\n".join(lines))


def _check_names(
    candidate: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]
) -> None:
    only = {
        "reference": sorted(reference.keys() - candidate.keys()),
        "candidate": sorted(candidate.keys() - reference.keys()),
    }
    if any(only.values()):
        words = [
            f"{len(names)} only in the {side} ({format_first(names, _SHOWN)})"
            for side, names in only.items()
            if names
        ]
        raise ContractError(
            f"gradients of different parameters: {' and '.join(words)}; compare gradients of one "
            "model"
        )


def _difference(
    name: str,
    candidate: Tensor | None,
    reference: Tensor | None,
    rtol: float,
    atol: float,
) -> ParameterDifference:
    if candidate is None or reference is None:
        if candidate is reference:
            return ParameterDifference(0, True, 0, 0.0, 0.0, 0)
        numel = sum(one.numel() for one in (candidate, reference) if one is not None)
        # An empty gradient compared with a missing one is a difference too.
        return ParameterDifference(numel, False, max(numel, 1), math.inf, math.inf, None)
    if (candidate.shape, candidate.dtype) != (reference.shape, reference.dtype):
        raise ContractError(
            f"gradient of '{name}' is {candidate.dtype} {tuple(candidate.shape)}, in the reference "
            f"{reference.dtype} {tuple(reference.shape)}; compare gradients of one model"
        )
    if reference.dtype not in FLOATS:
        raise ContractError(
            f"gradient of '{name}' is {reference.dtype}; compare float16, bfloat16, float32 or "
            "float64"
        )
    found, wanted = (
        candidate.detach().cpu().flatten(),
        reference.detach().cpu().flatten(),
    )
    found_bits, wanted_bits = bits(found), bits(wanted)
    where = (found_bits != wanted_bits).nonzero().flatten()
    if where.numel() == 0:
        return ParameterDifference(found.numel(), True, 0, 0.0, 0.0, 0)
    x, y = found[where].double(), wanted[where].double()
    distance = (x - y).abs()
    both_nan = x.isnan() & y.isnan()
    distance = torch.where(both_nan, 0.0, distance).nan_to_num(nan=math.inf, posinf=math.inf)
    # 0 / 0: zeros of different signs, or two NaNs. inf / inf: an infinity and another number.
    relative = distance / torch.where(both_nan, 0.0, y).abs()
    relative = torch.where(distance == 0, 0.0, relative.nan_to_num(nan=math.inf, posinf=math.inf))
    matches = torch.zeros_like(both_nan)
    if rtol or atol:
        matches = (distance <= atol + rtol * y.abs()) & distance.isfinite() | both_nan
    one_nan = bool((x.isnan() | y.isnan()).any())
    return ParameterDifference(
        numel=found.numel(),
        bitwise_equal=False,
        mismatch_count=int((~matches).sum()),
        max_abs_diff=float(distance.max()),
        max_rel_diff=float(relative.max()),
        max_ulps=None if one_nan else max_ulps(found_bits[where], wanted_bits[where]),
    )
