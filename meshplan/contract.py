"""The contract: the named order of additions and rounding that fixes every bit of a reduction.

Leaves ``x[c]``, one per coordinate of a group (row-major), are combined as follows (contract v1):

* ``order="tree"``: for one axis of n leaves, split after the largest power of two smaller than n
  and combine the two halves, each reduced in the same way. For several axes reduce the last axis
  first, then the next axis outward over those results. The tree has the shape of the mesh, so a
  reduction axis by axis, innermost first, has the same bits as the flat one.
* ``order="rank"``: ``((x0 + x1) + x2) + ...`` in coordinate order.
* ``order="exact"``: the infinitely precise sum, rounded once to the accumulator's dtype, to nearest
  even. Infinite only if that rounding overflows. A zero sum is +0 unless every leaf is -0; inf with
  -inf is NaN. No order of the leaves and no shape changes it. Products of floats and
  ``rounding="node"`` are refused.
* float16 and bfloat16 are raised to float32; ``accumulate="float64"`` raises float32 to float64;
  all else keeps its dtype. The fold starts from x0, so that a sum of -0.0 stays -0.0.
* avg: the sum, then one IEEE division in the accumulator's dtype.
* ``rounding="once"``: one rounding to the leaves' dtype, to nearest even. ``rounding="node"``
  rounds to the leaves' dtype at every node.
* max, min: NaN wins, -0.0 < +0.0. product: as sum. Integers wrap.
* every NaN in the result is the canonical quiet NaN of its dtype.

These are three contracts with different bits. Only ``exact`` is the nearest number to the sum.

These are the rules, without torch. ``meshplan.orders`` has the orders, ``meshplan.definition``
executes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from meshplan._dtypes import name_of
from meshplan.errors import ContractError, ContractTypeError
from meshplan.orders import ORDERS, Order, PartialResult, order_named

if TYPE_CHECKING:
    import torch

Accumulate = Literal["wide", "float64"]
"""The accumulators of the contract."""
Rounding = Literal["once", "node"]
"""Where the contract rounds."""
Op = Literal["sum", "avg", "max", "min", "product"]
"""The reductions of the contract."""
OPS: tuple[Op, ...] = get_args(Op)
"""All of ``Op``."""
CONTRACT_VERSION = "v1"
"""First part of every ``Contract.id``; other bits are another version."""

FLOATS = ("float32", "bfloat16", "float16", "float64")
"""Names of the floating-point dtypes of the contract."""
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
"""Names of the integer dtypes of the contract."""

_ACCUMULATES = get_args(Accumulate)
_ROUNDINGS = get_args(Rounding)


@dataclass(frozen=True)
class Contract:
    """Which of the named orders and roundings holds. Frozen, hashable, printable.

    Attributes:
        order: ``"tree"``, ``"rank"``, ``"exact"``, or another name in ``meshplan.orders``.
        accumulate: ``"wide"`` (16-bit floats in float32) or ``"float64"`` (float32 in float64 too).
        rounding: ``"once"`` at the end, or ``"node"``: to the leaves' dtype at every node.

    Raises:
        ContractError: an unknown word, with the words that exist; ``rounding="node"`` in an order
            that rounds once.
    """

    order: str = "tree"
    accumulate: Accumulate = "wide"
    rounding: Rounding = "once"

    def __post_init__(self) -> None:
        order_named(self.order)
        for field, value, known in (
            ("accumulate", self.accumulate, _ACCUMULATES),
            ("rounding", self.rounding, _ROUNDINGS),
        ):
            if value not in known:
                words = " or ".join(f"'{word}'" for word in known)
                raise ContractError(f"no {field} {value!r} in the contract; use {words}")
        if self.ordering.exact and self.rounding == "node":
            raise ContractError(
                f"order='{self.order}' rounds a sum once and has no nodes; use rounding='once'"
            )

    @property
    def id(self) -> str:
        """The stable name, e.g. ``v1/tree/wide/once``: same id and inputs, same bits."""
        return f"{CONTRACT_VERSION}/{self.order}/{self.accumulate}/{self.rounding}"

    @classmethod
    def of_id(cls, name: str) -> Contract:
        """The contract whose ``id`` is ``name``.

        Args:
            name: as ``id`` returns it.

        Raises:
            ContractError: there is none, or it is of another version.
        """
        version, *words = name.split("/")
        if version != CONTRACT_VERSION or len(words) != 3:
            raise ContractError(
                f"no contract {name!r}; use an id of this version, e.g. '{cls().id}'"
            )
        return cls(*words)  # type: ignore[arg-type]

    @property
    def ordering(self) -> Order:
        """The record of ``order``."""
        return ORDERS[self.order]

    def accumulator(self, dtype: str) -> str:
        """The name of the dtype that combines leaves of the dtype named ``dtype``."""
        if dtype in ("float16", "bfloat16"):
            return "float32"
        return "float64" if dtype == "float32" and self.accumulate == "float64" else dtype

    def partial(self, op: str, dtype: str) -> PartialResult:
        """How results of some of the leaves are kept until the others are there.

        Args:
            op: the reduction.
            dtype: the name of the leaves' dtype.
        """
        if is_exact(op, dtype) or self.rounding == "node":
            return PartialResult.number(dtype)
        return self.ordering.partial(self.accumulator(dtype))

    def check_parts(self, op: str, dtype: torch.dtype | str) -> None:
        """Raise ContractError if the order has no parts, and it matters to ``op`` on ``dtype``, or
        its name.
        """
        if self.has_parts(op, name_of(dtype)):
            return
        words = " or ".join(
            f"order='{order.name}'" for order in ORDERS.values() if not order.undivided
        )
        raise ContractError(
            f"{op} of {dtype} in order='{self.order}' {self.ordering.undivided} and has no parts; "
            f"use {words}, or pass all leaves to reduce_leaves"
        )

    def sums_exactly(self, op: str, dtype: str) -> bool:
        """Whether numbers that rounding could change are added without any, in an exact order.

        Args:
            op: the reduction.
            dtype: the name of the leaves' dtype.
        """
        return self.ordering.exact and not is_exact(op, dtype)

    def has_parts(self, op: str, dtype: str) -> bool:
        """Whether a reduction in parts, axis by axis from the innermost one, has the same bits.

        Args:
            op: the reduction.
            dtype: the name of the leaves' dtype.
        """
        return is_exact(op, dtype) or not self.ordering.undivided


def is_exact(op: str, dtype: str) -> bool:
    """Whether every order of combining has the same bits."""
    return op in ("max", "min") or dtype in INTEGERS


def check_dtype(
    op: str,
    dtype: torch.dtype | str,
    contract: Contract | None = None,
) -> None:
    """Refuse what the contract does not define, before anything is sent."""
    if op not in OPS:
        raise ContractError(f"no reduction {op!r} in the contract; use one of {', '.join(OPS)}")
    name = name_of(dtype)
    if name in INTEGERS:
        if op == "avg":
            raise ContractTypeError(
                f"avg of {dtype} has no exact result, the contract defines avg for floats only; "
                "reduce with 'sum' and divide as you need, or convert to a floating dtype first"
            )
    elif name not in FLOATS:
        known = ", ".join((*FLOATS, *INTEGERS))
        raise ContractTypeError(f"{dtype} is outside the contract; convert to one of {known}")
    elif op == "product" and contract is not None and contract.ordering.exact:
        raise ContractTypeError(
            f"order='{contract.order}' defines no product of {dtype}; use order='tree' or "
            "order='rank'"
        )
