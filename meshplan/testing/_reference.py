"""The contract a second time: exact rationals, rounded by hand, one element at a time.

An oracle is worth something only if it can disagree. This one shares no arithmetic with
``meshplan.contract`` and none with torch: a value is a ``fractions.Fraction``, an operation is
exact, and the rounding to nearest even into a binary format is written out here (IEEE 754-2019:
clause 3.4 for the formats, 4.3.1 for the rounding). Zeros, infinities and NaNs, which have rules of
their own (clause 6), are Python floats. The tree is built level by level, where
``meshplan.contract`` splits from the top. An addition takes about 10 microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshplan.contract import Contract, Op, check_dtype
from meshplan.definition import check_leaves
from meshplan.errors import ContractError

_Number = Fraction | float
"""Finite numbers other than zero are Fractions; zeros, infinities and NaNs are floats."""


class _Format(NamedTuple):
    """A binary interchange format; the last three are bit patterns."""

    fraction_bits: int
    least_exponent: int  # of the smallest normal number
    sign_bit: int
    infinity: int
    quiet_nan: int

    @classmethod
    def of(cls, width: int, fraction_bits: int) -> _Format:
        sign_bit = 1 << (width - 1)
        infinity = sign_bit - (1 << fraction_bits)
        least = 2 - (1 << (width - fraction_bits - 2))
        return cls(
            fraction_bits,
            least,
            sign_bit,
            infinity,
            infinity | 1 << (fraction_bits - 1),
        )


_FORMATS = {
    torch.float16: _Format.of(16, 10),
    torch.bfloat16: _Format.of(16, 7),
    torch.float32: _Format.of(32, 23),
    torch.float64: _Format.of(64, 52),
}


def reference_reduce(
    leaves: Sequence[Sequence[int]],
    dtype: torch.dtype,
    op: Op,
    shape: Sequence[int],
    contract: Contract,
    *,
    divisor: int | None = None,
    factors: Sequence[float] | None = None,
) -> list[int]:
    """Combine raw bit patterns in contract order; returns the bit pattern of each element.

    Args:
        leaves: a list of unsigned bit patterns per coordinate, row-major; all of one length.
        dtype: of the patterns: float16, bfloat16, float32, float64, int8 to int64, uint8.
        op: ``sum``, ``avg``, ``max``, ``min`` or ``product``.
        shape: sizes of the reduced axes, outermost first; their product is ``len(leaves)``.
        contract: order, accumulator and rounding.
        divisor: for ``avg`` only: divide by this instead of by ``len(leaves)``.
        factors: for ``sum`` of floats only: of each leaf, as ``PREMUL_SUM`` has them.

    Raises:
        ContractError: unknown ``op``, leaves that do not fill ``shape`` or differ in length, a
            divisor that is not positive or not for ``avg``, or factors that are not one for each
            leaf of a sum of floats.
        ContractTypeError: a dtype outside the contract, or ``avg`` of integers.
    """
    _check(leaves, dtype, op, shape, divisor)
    if factors is not None and (
        op != "sum" or dtype not in _FORMATS or len(factors) != len(leaves)
    ):
        raise ContractError(
            f"{len(factors)} factors of a {op} of {len(leaves)} leaves of {dtype}; pass one factor "
            "for each leaf, and only for a sum of floats"
        )
    columns = zip(*leaves, strict=True)
    if dtype not in _FORMATS:
        return [_integer_column(column, dtype, op) for column in columns]
    wire = _FORMATS[dtype]
    if op in ("max", "min"):
        return [_extremum_column(column, wire, op) for column in columns]
    accumulator = _accumulator(dtype, contract)
    operation = _product if op == "product" else _sum
    orders: dict[str, Callable[..., _Number]] = {
        "tree": _tree,
        "rank": lambda values, _, node: reduce(node, values),
        "exact": lambda values, _, node: _through(accumulator, reduce(_sum, values)),
    }
    if contract.order not in orders:
        raise ContractError(
            f"the exact reference has no order {contract.order!r}; compare with "
            "meshplan.reduce_leaves"
        )

    def rounded(value: _Number) -> _Number:
        value = _through(accumulator, value)
        return _through(wire, value) if contract.rounding == "node" else value

    def node(left: _Number, right: _Number) -> _Number:
        return rounded(operation(left, right))

    scales = None
    if factors is not None:
        scales = [_through(accumulator, _number(factor)) for factor in factors]
    count = _through(accumulator, Fraction(divisor or len(leaves)))
    results = []
    for column in columns:
        values = [_decode(bits, wire) for bits in column]
        if scales is not None:
            pairs = zip(values, scales, strict=True)
            values = [rounded(_product(value, scale)) for value, scale in pairs]
        total = orders[contract.order](values, shape, node)
        if op == "avg":
            # The reciprocal is exact, so that a product with it is a quotient.
            total = _through(accumulator, _product(total, 1 / count))
        results.append(_round(total, wire))
    return results


def reference_reduce_tensors(
    leaves: Sequence[Tensor],
    op: Op,
    shape: Sequence[int],
    contract: Contract,
    *,
    divisor: int | None = None,
) -> Tensor:
    """``reference_reduce`` on tensors, which are read and written as integers only.

    Slow: for up to some thousand elements.

    Args:
        leaves: one tensor per coordinate, row-major; of one shape and dtype, any strides, any
            device.
        op, shape, contract, divisor: as for ``reference_reduce``.

    Returns:
        A new contiguous tensor of the leaves' shape and dtype on the device of the first leaf.

    Raises:
        ContractError: as ``reference_reduce``, or no leaves.
        ContractTypeError: as ``reference_reduce``, or leaves that differ in shape or dtype.
    """
    found = check_leaves([leaf.cpu() for leaf in leaves], op, shape, divisor)
    first = found[0]
    check_dtype(op, first.dtype)
    width = 8 * first.itemsize
    signed = getattr(torch, f"int{width}")
    flat = [leaf.reshape(-1).view(signed).tolist() for leaf in found]
    patterns = [[bits % (1 << width) for bits in leaf] for leaf in flat]
    result = reference_reduce(patterns, first.dtype, op, shape, contract, divisor=divisor)
    bits = torch.tensor([_to_signed(b, width) for b in result], dtype=signed, device="cpu")
    return bits.view(first.dtype).reshape(first.shape).to(leaves[0].device)


def _check(
    leaves: Sequence[Sequence[int]],
    dtype: torch.dtype,
    op: str,
    shape: Sequence[int],
    divisor: int | None,
) -> None:
    check_dtype(op, dtype)
    if not leaves or min(shape, default=1) < 1 or math.prod(shape) != len(leaves):
        raise ContractError(
            f"axes of sizes {list(shape)} do not hold {len(leaves)} leaves; "
            "pass one leaf per coordinate, row-major"
        )
    if len({len(leaf) for leaf in leaves}) > 1:
        found = [len(leaf) for leaf in leaves]
        raise ContractError(f"leaves of lengths {found}; pass leaves of one length")
    if divisor is not None and (op != "avg" or divisor < 1):
        raise ContractError(
            f"divisor={divisor} with op={op!r}; pass a positive divisor, and only with op='avg'"
        )


def _accumulator(dtype: torch.dtype, contract: Contract) -> _Format:
    wide = torch.float64 if contract.accumulate == "float64" else torch.float32
    raised = {
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.float32: wide,
    }
    return _FORMATS[raised.get(dtype, dtype)]


def _tree(values: Sequence[Any], shape: Sequence[int], node: Callable[[Any, Any], Any]) -> Any:
    """One balanced reduction per axis, the last axis first; nothing is rounded in between. Pairing
    neighbours level by level, with an odd one out carried up, splits after the largest power of two
    below n.
    """
    results = list(values)
    for size in reversed(shape):
        rows = [results[start : start + size] for start in range(0, len(results), size)]
        results = []
        for row in rows:
            level = row
            while len(level) > 1:
                pairs = [node(a, b) for a, b in zip(level[0::2], level[1::2], strict=False)]
                level = pairs + level[2 * len(pairs) :]
            results += level
    (result,) = results
    return result


def _number(value: float) -> _Number:
    return Fraction(value) if value and math.isfinite(value) else value


def _decode(bits: int, form: _Format) -> _Number:
    sign = -1 if bits >= form.sign_bit else 1
    field = bits % form.sign_bit
    if field == 0:
        return sign * 0.0
    if field >= form.infinity:
        return sign * math.inf if field == form.infinity else math.nan
    exponent, significand = divmod(field, 1 << form.fraction_bits)
    if exponent:
        # A normal number: the leading 1 is not stored, and exponent 1 is the first one.
        significand += 1 << form.fraction_bits
        exponent -= 1
    return sign * significand * Fraction(2) ** (exponent + form.least_exponent - form.fraction_bits)


def _round(value: _Number, form: _Format) -> int:
    """The bit pattern of the nearest number of ``form``, ties to the even one."""
    if math.isnan(_stand_in(value)):
        return form.quiet_nan
    sign = form.sign_bit if math.copysign(1.0, _stand_in(value)) < 0 else 0
    if isinstance(value, float):
        return sign | (form.infinity if math.isinf(value) else 0)
    # In integers, so exact: the quotient counts units in the last place, and the rest decides the
    # rounding.
    top, bottom = abs(value).as_integer_ratio()
    exponent = top.bit_length() - bottom.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    # Below it numbers are subnormal, with the last place of the smallest normal ones.
    exponent = max(exponent, form.least_exponent)
    step = exponent - form.fraction_bits
    quotient, rest = divmod(top << max(-step, 0), bottom << max(step, 0))
    half = 2 * rest - (bottom << max(step, 0))
    if half > 0 or (half == 0 and quotient % 2):
        quotient += 1
    # A quotient that is carried over the significand ends up in the exponent field, as it should:
    # subnormal to normal, one binade up, or the largest number to infinity.
    field = ((exponent - form.least_exponent) << form.fraction_bits) + quotient
    return sign | min(field, form.infinity)


def _through(form: _Format, value: _Number) -> _Number:
    return _decode(_round(value, form), form)


def _sum(a: _Number, b: _Number) -> _Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        # An exact zero is +0 when rounding to nearest.
        return a + b or 0.0
    for zero, other in ((a, b), (b, a)):
        if zero == 0 and isinstance(other, Fraction):
            return other
    return _stand_in(a) + _stand_in(b)


def _product(a: _Number, b: _Number) -> _Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    return _stand_in(a) * _stand_in(b)


def _stand_in(value: _Number) -> float:
    """1 or -1 for a Fraction: next to an infinity, a zero or a NaN only the sign matters."""
    if isinstance(value, float):
        return value
    return 1.0 if value > 0 else -1.0


def _extremum_column(column: Sequence[int], form: _Format, op: str) -> int:
    values = [_decode(bits, form) for bits in column]
    if any(math.isnan(_stand_in(value)) for value in values):
        return form.quiet_nan

    # -0.0 is below 0.0, which compare equal as numbers.
    def rank(value: _Number) -> tuple[_Number, float]:
        return value, math.copysign(1.0, _stand_in(value))

    return _round(max(values, key=rank) if op == "max" else min(values, key=rank), form)


def _to_signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) else bits


def _integer_column(column: Sequence[int], dtype: torch.dtype, op: str) -> int:
    # Sums and products wrap modulo 2^width, so that only the last wrap matters; and signed and
    # unsigned patterns agree in it.
    width = torch.iinfo(dtype).bits
    if op == "sum":
        return sum(column) % (1 << width)
    if op == "product":
        return math.prod(column) % (1 << width)
    values = column if dtype is torch.uint8 else [_to_signed(bits, width) for bits in column]
    return (max(values) if op == "max" else min(values)) % (1 << width)
