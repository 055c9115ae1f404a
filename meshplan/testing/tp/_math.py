"""Exponential and logarithm whose bits depend on the number alone.

Torch's own differ in the last bit between vector units, libraries and devices, and between the body
and the tail of a vector. Here both are plain IEEE additions, multiplications and divisions in
float64, one torch operation each (none of them fused, if torch runs eagerly), rounded to the dtype
of the argument at the end. The arguments are reduced as in Sun's fdlibm (e_exp.c, e_log.c); the
polynomials are plain Taylor and atanh series. Float64 results are within 2 ulps; float32 results
are the nearest number, except that once in some millions of arguments it is the neighbour.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

# ln 2 in two parts; the first has 21 trailing zeros, so that its product with an exponent is exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_INVERSE_LN2 = 1.44269504088896338700e00
_SQRT_HALF = 0.7071067811865476
# Beyond these every float64 result is infinity or zero.
_LARGEST = 800.0
# 1/2!, 1/3!, ..., 1/15!: for |r| <= ln(2)/2 the rest is below 2^-64 of the first.
_TAYLOR = [1.0 / math.factorial(i) for i in range(2, 16)]
# 1/3, 1/5, ..., 1/25: for |f| <= 0.172 the rest is below 2^-60.
_ATANH = [1.0 / (2 * i + 1) for i in range(1, 13)]
# Pieces that stay in the cache of a CPU core; on other devices a few big ones.
_CPU_PIECE, _PIECE = 1 << 15, 1 << 24


def without_nan_payload(values: Tensor) -> Tensor:
    return values.masked_fill(values.isnan(), torch.nan)


def _in_pieces(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``function`` of float64 over all elements, rounded to their dtype: a new contiguous tensor of
    the same shape and dtype.
    """

    @functools.wraps(function)
    def whole(values: Tensor) -> Tensor:
        flat = values.detach().resolve_neg().reshape(-1)
        result = torch.empty_like(flat, memory_format=torch.contiguous_format)
        size = _CPU_PIECE if flat.device.type == "cpu" else _PIECE
        for start in range(0, flat.numel(), size):
            piece = flat[start : start + size].to(torch.float64)
            result[start : start + size] = function(piece).to(values.dtype)
        return without_nan_payload(result).view(values.shape)

    return whole


@_in_pieces
def exp(x: Tensor) -> Tensor:
    """e to the power of each element."""
    x = x.clamp(-_LARGEST, _LARGEST)
    power = torch.round(x * _INVERSE_LN2)
    r = (x - power * _LN2_HIGH).sub_(power * _LN2_LOW)
    result = _tail(r).mul_(r).mul_(r).add_(r).add_(1.0)
    # In two steps, because 2^power alone may be out of range where the result is not.
    whole = power.nan_to_num_(0.0).to(torch.int64)
    half = whole >> 1
    return result.mul_(_power_of_two(half)).mul_(_power_of_two(whole - half))


@_in_pieces
def log(x: Tensor) -> Tensor:
    """The natural logarithm of each element; -inf of zero, NaN of negative numbers."""
    significand, exponent = torch.frexp(x)
    below = significand < _SQRT_HALF
    m = torch.where(below, significand * 2.0, significand)
    power = exponent.to(torch.float64).sub_(below.to(torch.float64))
    f = (m - 1.0).div_(m + 1.0)
    square = f * f
    series = _polynomial(square, _ATANH).mul_(square).mul_(f)
    small = (series + f).mul_(2.0).add_(power * _LN2_LOW)
    result = (power * _LN2_HIGH).add_(small)
    result = torch.where(x == 0.0, -torch.inf, result)
    result = torch.where(x == torch.inf, torch.inf, result)
    return torch.where(x < 0.0, torch.nan, result)


@_in_pieces
def k3(d: Tensor) -> Tensor:
    """``exp(d) - d - 1`` of each element d, rounded once.

    Never negative, and exact to the last bits for small d too, where the terms would cancel.
    """
    near = d.abs() <= 0.34
    small = torch.where(near, d, 0.0)
    result = torch.where(near, _tail(small).mul_(small).mul_(small), (exp(d) - 1.0).sub_(d))
    return torch.where(d == torch.inf, torch.inf, result)


@_in_pieces
def expm1(d: Tensor) -> Tensor:
    """``exp(d) - 1`` of each element d, without cancellation."""
    near = d.abs() <= 0.34
    small = torch.where(near, d, 0.0)
    return torch.where(near, _tail(small).mul_(small).mul_(small).add_(small), exp(d) - 1.0)


def _tail(r: Tensor) -> Tensor:
    """``(exp(r) - 1 - r) / r^2`` near zero."""
    return _polynomial(r, _TAYLOR)


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """By Horner's rule, the first coefficient for power 0; a new tensor."""
    result = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result.mul_(x).add_(coefficient)
    return result


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)
