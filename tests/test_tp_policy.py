"""Ratio of policies and k3, with masks that keep NaNs out of gradients."""

from __future__ import annotations

import math

import torch
from expecttest import assert_expected_inline

from meshplan.errors import ShardError
from meshplan.testing import assert_bitwise_equal
from meshplan.testing.tp import compute_policy_ratio, compute_reference_kl
from tests.refusals import refusals


def logps(seed: int) -> torch.Tensor:
    return -torch.rand(4, 9, generator=torch.Generator().manual_seed(seed)) * 4


def test_ratio_and_kl_match_the_formulas() -> None:
    current, other = logps(0), logps(1)
    mask = torch.rand(4, 9, generator=torch.Generator().manual_seed(2)) > 0.4
    ratio = compute_policy_ratio(current, other, mask)
    kl = compute_reference_kl(current, other, mask)
    wide = (current.double() - other.double(), other.double() - current.double())
    wanted = torch.exp(wide[0]), torch.expm1(wide[1]) - wide[1]
    for found, right in zip((ratio, kl), wanted, strict=True):
        assert found.dtype is torch.float32
        expected = right.masked_fill(~mask, 0.0)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=3e-7)
        assert_bitwise_equal(found[~mask], torch.zeros_like(found[~mask]))
    assert_bitwise_equal(compute_policy_ratio(current, current), torch.ones(4, 9))
    assert_bitwise_equal(compute_reference_kl(current, current), torch.zeros(4, 9))


def test_close_policies_do_not_cancel() -> None:
    current = torch.tensor([-1.0, -2.0, -3.0])
    reference = current + torch.tensor([1e-4, -1e-4, 3e-4])
    difference = (reference - current).double()
    wanted = torch.expm1(difference) - difference
    found = compute_reference_kl(current, reference)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0.0)
    assert (found > 0).all()


def test_gradients_stop_at_the_mask() -> None:
    current = torch.tensor([-1.0, math.inf, -2.0, -math.inf, math.nan], requires_grad=True)
    other = torch.tensor([-1.5, -1.0, -1.0, math.inf, 0.0])
    mask = torch.tensor([True, False, True, False, False])
    compute_policy_ratio(current, other, mask).sum().backward()
    wanted = torch.tensor([math.exp(0.5), 0.0, math.exp(-1.0), 0.0, 0.0])
    torch.testing.assert_close(current.grad, wanted)
    current.grad = None
    compute_reference_kl(current, other, mask).sum().backward()
    wanted = torch.tensor([1 - math.exp(-0.5), 0.0, 1 - math.exp(1.0), 0.0, 0.0])
    torch.testing.assert_close(current.grad, wanted)


def test_invalid_arguments_are_errors() -> None:
    a = torch.ones(2)
    calls = [
        lambda: compute_policy_ratio(a, torch.ones(3)),
        lambda: compute_policy_ratio(a, a.to("meta")),
        lambda: compute_reference_kl(a, torch.ones(1, 2)),
        lambda: compute_reference_kl(a, a, torch.ones(1)),
        lambda: compute_policy_ratio(a * 1j, a),
    ]
    assert_expected_inline(
        refusals(ShardError, calls),
        """\
MP801: current_logps has shape (2,), old_logps has shape (3,); pass both in one shape
MP801: current_logps is on cpu, old_logps is on meta; pass both on one device
MP801: ref_logps has shape (1, 2), current_logps has shape (2,); pass both in one shape
MP801: mask has shape (1,), ref_logps has shape (2,); pass both in one shape
MP801: current_logps is torch.complex64; pass real numbers""",
    )
