"""Exponential and logarithm: right values, and bits that depend on the number alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from meshplan.testing import assert_bitwise_equal
from meshplan.testing.tp import _math
from meshplan.testing.tp._masked import _exp, _k3
from meshplan.testing.tp._math import exp, expm1, k3, log

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECIAL = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1e3, -1e3, 88.8, -104.0, 709.8, -745.2]


def arguments(dtype: torch.dtype, count: int = 3000, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator, dtype=torch.float64) * 20
    return torch.cat([values, torch.tensor(SPECIAL, dtype=torch.float64)]).to(dtype)


def positive(values: Tensor) -> Tensor:
    return values.abs()


def exact(name: str, argument: float) -> Decimal:
    with localcontext() as context:
        context.prec = 40
        number = Decimal(argument)
        if name == "exp":
            return number.exp()
        if name == "log":
            return number.ln()
        return number.exp() - number - 1 if name == "k3" else number.exp() - 1


def ulps_off(found: float, wanted: Decimal) -> float:
    with localcontext() as context:
        context.prec = 40
        return float(abs(Decimal(found) - wanted) / Decimal(math.ulp(float(wanted))))


@pytest.mark.parametrize(
    ("name", "function", "low", "high", "limit"),
    [
        ("exp", exp, -708.0, 709.0, 1.0),
        ("exp", exp, -1.0, 1.0, 1.0),
        ("log", log, 0.5, 2.0, 2.0),
        ("log", log, 1.0, 1e6, 1.0),
        ("log", log, 1e-310, 1e-300, 1.0),
        ("k3", k3, -0.34, 0.34, 4.0),
        ("k3", k3, -1e-7, 1e-7, 4.0),
        ("k3", k3, -30.0, 30.0, 16.0),
        ("expm1", expm1, -2.0, 2.0, 8.0),
    ],
)
def test_float64_values_are_within_ulps_of_exact_ones(
    name: str, function: Callable[[Tensor], Tensor], low: float, high: float, limit: float
) -> None:
    generator = random.Random(1)
    values = [generator.uniform(low, high) for _ in range(400)]
    found = function(torch.tensor(values, dtype=torch.float64)).tolist()
    worst = max(ulps_off(f, exact(name, v)) for f, v in zip(found, values, strict=True))
    assert worst <= limit


@pytest.mark.parametrize("function", [exp, log])
def test_float32_values_are_the_nearest(function: Callable[[Tensor], Tensor]) -> None:
    values = positive(arguments(torch.float32)[:3000])
    name = "exp" if function is exp else "log"
    for value, found in zip(values[:300].tolist(), function(values[:300]).tolist(), strict=True):
        wanted = float(torch.tensor(float(exact(name, value)), dtype=torch.float64).float())
        assert found == wanted


def test_special_values_match_ieee_754() -> None:
    for dtype in (torch.float32, torch.float64):
        values = arguments(dtype, 0)
        assert_bitwise_equal(exp(values), torch.exp(values))
    values = torch.tensor([math.inf, math.nan, 0.0, -0.0, -1.0, -math.inf, 1.0])
    found = log(values.double()).tolist()
    assert found[0] == math.inf
    assert all(math.isnan(found[i]) for i in (1, 4, 5))
    assert found[2:4] == [-math.inf, -math.inf]
    assert found[6] == 0.0
    least = torch.tensor([5e-324], dtype=torch.float64)
    assert log(least).item() == math.log(5e-324)
    assert exp(torch.tensor([-745.0], dtype=torch.float64)).item() == 5e-324
    assert exp(torch.tensor([-100.0])).item() > 0.0  # subnormal in float32


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", [exp, log, k3])
def test_bits_do_not_depend_on_position_length_or_strides(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = positive(arguments(dtype, 1200)) if function is log else arguments(dtype, 1200)
    whole = function(values)
    for length in (1, 2, 3, 7, 8, 9, 15, 17, 31, 33, 64, 67):
        for start in (0, 1, 5, 640):
            part = values[start : start + length]
            assert_bitwise_equal(function(part), whole[start : start + length])
            assert_bitwise_equal(function(part.clone()), whole[start : start + length])
    assert_bitwise_equal(torch.stack([function(x) for x in values[:200]]), whole[:200])
    wide = torch.empty(len(values), 3, dtype=dtype)
    wide[:, 1] = values
    assert_bitwise_equal(function(wide[:, 1]), whole)
    assert_bitwise_equal(function(values.flip(0)), whole.flip(0))
    assert_bitwise_equal(function(values[:1200].reshape(30, 40).t()).t(), whole[:1200].view(30, 40))
    monkeypatch.setattr(_math, "_CPU_PIECE", 7)
    assert_bitwise_equal(function(values), whole)


def test_shapes_are_kept_and_default_dtype_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exp(torch.zeros(())).shape == ()
    assert exp(torch.zeros(2, 0, 3)).shape == (2, 0, 3)
    values = arguments(torch.float32, 50)
    expected = exp(values), log(positive(values))
    torch.set_default_dtype(torch.float64)
    try:
        found = exp(values), log(positive(values))
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert_bitwise_equal(one, other)


def test_derivatives_match_the_functions() -> None:
    values = torch.tensor([-3.0, -0.3, -1e-6, 0.0, 1e-6, 0.3, 3.0], dtype=torch.float64)
    for function, derivative in (
        (_exp, lambda d: d.exp()),
        (_k3, lambda d: d.expm1()),
    ):
        leaf = values.clone().requires_grad_()
        function(leaf).backward(torch.full_like(leaf, 3.0))
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, 3.0 * derivative(values), rtol=1e-15, atol=0.0)
        assert torch.autograd.gradgradcheck(function, (values.clone().requires_grad_(),))


def test_k3_is_never_negative() -> None:
    values = torch.cat([torch.linspace(-1, 1, 4001), torch.logspace(-30, 0, 500)])
    found = k3(torch.cat([values, -values]))
    assert not found.signbit().any()
    assert found.isfinite().all()
