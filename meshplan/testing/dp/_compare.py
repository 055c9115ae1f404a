"""The comparison of two sets of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from meshplan._message_text import format_first
from meshplan.errors import ContractError
from meshplan.testing._bitwise import first_difference

_SHOWN = 8


def compare_gradients(
    candidate: Mapping[str, Tensor | None],
    reference: Mapping[str, Tensor | None],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Assert that two sets of gradients agree: in every bit, unless a tolerance is given.

    Args:
        candidate, reference: tensors on any device (or ``None``: no gradient) by parameter name.
        rtol, atol: as for ``torch.testing.assert_close``, which then compares; NaNs are equal
            there. With both 0, -0.0 is not 0.0.

    Raises:
        AssertionError: names the parameters that differ, and how.
        ContractError: the two have different parameters, or a tolerance is negative or not finite.
    """
    if not all(0 <= tolerance < math.inf for tolerance in (rtol, atol)):
        raise ContractError(f"rtol={rtol}, atol={atol}; pass finite tolerances, 0 or more")
    if candidate.keys() != reference.keys():
        lacks = sorted(reference.keys() - candidate.keys())
        extra = sorted(candidate.keys() - reference.keys())
        raise ContractError(
            f"gradients of different parameters: {format_first(lacks, _SHOWN) or 'none'} only in "
            f"the reference, {format_first(extra, _SHOWN) or 'none'} only in the candidate; "
            "compare gradients of one model"
        )
    if rtol or atol:
        pair = dict(candidate), dict(reference)
        torch.testing.assert_close(*pair, rtol=rtol, atol=atol, equal_nan=True, check_device=False)
        return
    lines = []
    for name, wanted in sorted(reference.items()):
        found = candidate[name]
        if found is None or wanted is None:
            if found is not wanted:
                side = "candidate" if found is None else "reference"
                lines.append(f"{name}: no gradient in the {side}")
        elif text := first_difference(found, wanted):
            lines.append(f"{name}: {text}")
    if lines:
        head = f"gradients of {len(lines)} of {len(reference)} parameters differ in their bits"
        raise AssertionError("\n  ".join([head, *lines[:_SHOWN]]))
