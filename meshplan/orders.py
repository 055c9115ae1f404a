"""The orders of additions: one record each, and the expression over the leaves that defines it.

An order is added here: its function, and its record in ``ORDERS``. Everything else reads that.
``csrc/order.h`` has the same orders, under the same codes, for the compiled library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

from meshplan._dtypes import itemsize
from meshplan.errors import ContractError

_T = TypeVar("_T")


class Expression(Protocol):
    """An order as an expression: which partial results become one, over leaves by their index."""

    def __call__(
        self, shape: Sequence[int], leaf: Callable[[int], _T], node: Callable[[_T, _T], _T]
    ) -> _T:
        """The value over ``shape``: axis sizes, outermost first; leaves are counted row-major."""


class PartialResult(NamedTuple):
    """How a result of some of the leaves is kept until the other leaves are there.

    Attributes:
        dtype: the name of the dtype of its tensor.
        nbytes: for each element of the leaves.
    """

    dtype: str
    nbytes: int

    @classmethod
    def number(cls, dtype: str) -> PartialResult:
        return cls(dtype, itemsize(dtype))


@dataclass(frozen=True)
class Order:
    """One order of additions.

    Attributes:
        name: the word in ``Contract.id``.
        code: stands for it in the compiled library and in what ranks compare: 0 to 255, never
            used for another order.
        expression: what defines it; of an ``exact`` order, of what has the same bits in any order.
        undivided: why a reduction cannot be done in parts with the same bits; empty if it can.
            Parts are blocks of whole inner axes, and of the next axis outward as many as a power of
            two that divides its size; they are combined first, and then their results.
        partial: how partial results are kept, by the name of the accumulator's dtype.
        exact: sums of floats are exact and rounded once to the accumulator's dtype, so that no
            order of the leaves changes them. Products of floats are refused, and rounding at nodes.
    """

    name: str
    code: int
    expression: Expression
    undivided: str = ""
    partial: Callable[[str], PartialResult] = PartialResult.number
    exact: bool = False


def order_named(name: str) -> Order:
    """The order of that name. Raises ContractError if there is none."""
    found = ORDERS.get(name)
    if found is None:
        words = " or ".join(f"'{word}'" for word in ORDERS)
        raise ContractError(f"no order {name!r} in the contract; use {words}")
    return found


def order_of_code(code: int) -> Order | None:
    return next((order for order in ORDERS.values() if order.code == code), None)


def _tree(
    shape: Sequence[int],
    leaf: Callable[[int], _T],
    node: Callable[[_T, _T], _T],
    first: int = 0,
) -> _T:
    leaves = math.prod(shape)
    if leaves == 1:
        return leaf(first)
    size, *inner = shape
    if size == 1:
        return _tree(inner, leaf, node, first)
    # Splitting the outermost axis at the largest power of two below its size, and coming back to
    # the same function with each part, is the tree of the outer axis over the trees of the inner.
    split = 1 << (size - 1).bit_length() - 1
    left = _tree((split, *inner), leaf, node, first)
    stride = leaves // size
    return node(left, _tree((size - split, *inner), leaf, node, first + split * stride))


def _rank(shape: Sequence[int], leaf: Callable[[int], _T], node: Callable[[_T, _T], _T]) -> _T:
    result = leaf(0)
    for i in range(1, math.prod(shape)):
        result = node(result, leaf(i))
    return result


EXACT_WORDS = {"float32": 11, "float64": 68}
"""Words of 32 bits in an exact sum of some of the leaves, by the accumulator's dtype.

They hold every sum of less than 2^31 leaves. ``meshplan/definition.py`` has their meaning."""


def _exact_partial(dtype: str) -> PartialResult:
    reals = {"complex64": ("float32", 2), "complex128": ("float64", 2)}
    real, count = reals.get(dtype, (dtype, 1))
    if real not in EXACT_WORDS:
        return PartialResult.number(dtype)
    return PartialResult("int32", 4 * EXACT_WORDS[real] * count)


_all = (
    Order("tree", 0, _tree),
    Order("rank", 1, _rank, undivided="is one fold from the first leaf to the last"),
    Order("exact", 2, _tree, partial=_exact_partial, exact=True),
)
ORDERS: Mapping[str, Order] = MappingProxyType({order.name: order for order in _all})
"""The orders, by name."""
