"""The contract: the named order of additions and rounding that fixes every bit of a reduction.

This module is the executable definition, in plain torch, on any device. Leaves ``x[c]``, one per
coordinate of a group (row-major), are combined as follows (contract v1):

* ``order="tree"``: for one axis of n leaves, split after the largest power of two smaller than n
  and combine the two halves, each reduced in the same way. For several axes reduce the last axis
  first, then the next axis outward over those results. The tree has the shape of the mesh, so a
  reduction axis by axis, innermost first, gives the same bits as the flat one.
* ``order="rank"``: ``((x0 + x1) + x2) + ...`` in coordinate order.
* float16 and bfloat16 are raised to float32; ``accumulate="float64"`` raises float32 to float64;
  all else keeps its dtype. The fold starts from x0, so that a sum of -0.0 stays -0.0.
* avg: the sum, then one IEEE division in the accumulator's dtype.
* ``rounding="once"``: one rounding to the leaves' dtype, to nearest even. ``rounding="node"``
  rounds to the leaves' dtype at every node.
* max, min: NaN wins, -0.0 < +0.0. product: as sum. Integers wrap.
* every NaN in the result is the canonical quiet NaN of its dtype.

``tree`` is not better than ``rank``: they are two contracts with different bits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from meshplan.errors import ContractError, ContractStateError, ContractTypeError

__all__ = ["CONTRACT_VERSION", "OPS", "Contract", "Op", "check_dtype", "reduce_leaves"]

Op = Literal["sum", "avg", "max", "min", "product"]
OPS: tuple[Op, ...] = get_args(Op)
CONTRACT_VERSION = "v1"

_ORDERS = ("tree", "rank")
_ACCUMULATES = ("wide", "float64")
_ROUNDINGS = ("once", "node")

# Integer dtype with the same bits, and the canonical quiet NaN in it.
_NAN_BITS = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
    torch.float64: (torch.int64, 0x7FF8000000000000),
}
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_SMALLEST_SUBNORMAL = math.ulp(0.0)

# From this many elements on, torch computes on several threads (at::internal::GRAIN_SIZE).
_GRAIN = 32768
_checked = threading.local()


@dataclass(frozen=True)
class Contract:
    """Which of the named orders and roundings holds. Frozen, hashable, printable.

    Attributes:
        order: ``"tree"`` or ``"rank"``.
        accumulate: ``"wide"`` (16-bit floats in float32) or ``"float64"`` (float32 in float64 too).
        rounding: ``"once"`` at the end, or ``"node"``: to the leaves' dtype at every node.

    Raises:
        ContractError: an unknown word, with the words that exist.
    """

    order: Literal["tree", "rank"] = "tree"
    accumulate: Literal["wide", "float64"] = "wide"
    rounding: Literal["once", "node"] = "once"

    def __post_init__(self) -> None:
        for field, value, known in (
            ("order", self.order, _ORDERS),
            ("accumulate", self.accumulate, _ACCUMULATES),
            ("rounding", self.rounding, _ROUNDINGS),
        ):
            if value not in known:
                words = " or ".join(f"'{word}'" for word in known)
                raise ContractError(f"no {field} {value!r} in the contract; write {words}")

    @property
    def id(self) -> str:
        """The stable name, e.g. ``v1/tree/wide/once``: same id and inputs, same bits."""
        return f"{CONTRACT_VERSION}/{self.order}/{self.accumulate}/{self.rounding}"

    def accumulator(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which leaves of ``dtype`` are combined."""
        if dtype in (torch.float16, torch.bfloat16):
            return torch.float32
        if dtype is torch.float32 and self.accumulate == "float64":
            return torch.float64
        return dtype


def check_dtype(op: str, dtype: torch.dtype) -> None:
    """Refuse what the contract does not define, before anything is sent.

    Raises:
        ContractError: unknown ``op``.
        ContractTypeError: ``dtype`` is outside the contract, or ``op="avg"`` on integers.
    """
    if op not in OPS:
        raise ContractError(f"no reduction {op!r} in the contract; write one of {', '.join(OPS)}")
    if dtype in _INTEGERS:
        if op == "avg":
            raise ContractTypeError(
                f"avg of {dtype} has no exact result, the contract defines avg for floats only; "
                "reduce with 'sum' and divide as you need, or convert to a floating dtype first"
            )
    elif dtype not in _NAN_BITS:
        known = ", ".join(str(d).removeprefix("torch.") for d in (*_NAN_BITS, *_INTEGERS))
        raise ContractTypeError(f"{dtype} is outside the contract; convert to one of {known}")


def reduce_leaves(
    leaves: Sequence[Tensor],
    op: Op,
    shape: Sequence[int],
    contract: Contract = Contract(),
    *,
    divisor: int | None = None,
) -> Tensor:
    """Combine ``leaves`` in contract order. Out of place; no communication.

    Args:
        leaves: one tensor per coordinate, row-major over ``shape``; all of one shape, dtype and
            device, any strides. float32, float64, float16, bfloat16, int8 to int64 or uint8.
            Not differentiated through.
        op: ``sum``, ``avg``, ``max``, ``min`` or ``product``.
        shape: sizes of the reduced axes, outermost first; their product is ``len(leaves)``.
        contract: order, accumulator and rounding.
        divisor: for ``avg`` only: divide the sum by this instead of by ``len(leaves)`` (for
            reductions that are a sum along some axes and a mean along others).

    Returns:
        A new contiguous tensor of the leaves' shape and dtype.

    Raises:
        ContractError: unknown ``op``, no leaves, leaves that do not fill ``shape``, or a divisor
            without ``avg``.
        ContractTypeError: a dtype outside the contract, leaves that differ in shape, dtype or
            device, or ``avg`` of integers.
        ContractStateError: this thread, or one of torch's worker threads, flushes subnormal
            numbers to zero.
    """
    _check_leaves(leaves, op, shape, divisor)
    leaves = [leaf.detach().resolve_neg() for leaf in leaves]
    dtype = leaves[0].dtype
    check_dtype(op, dtype)
    if op in ("max", "min"):
        # Exact in any order and any dtype, hence no accumulator.
        return _extremum(leaves, op)
    _refuse_flushed_subnormals(leaves[0])

    accumulator = contract.accumulator(dtype)
    node_dtype = dtype if contract.rounding == "node" else None
    combine = partial(_node, torch.add if op != "product" else torch.mul, node_dtype, accumulator)
    if contract.order == "rank":
        result = leaves[0].to(accumulator)
        for leaf in leaves[1:]:
            result = combine(result, leaf.to(accumulator))
    else:
        result = _mesh_tree(leaves, tuple(shape), accumulator, combine)
    if op == "avg":
        count = len(leaves) if divisor is None else divisor
        # A tensor on the device, not a Python number: CUDA multiplies by the reciprocal of a host
        # scalar, which is not the IEEE division.
        result = torch.div(result, torch.full((), count, dtype=accumulator, device=result.device))
    return _finished(result, leaves[0])


def _check_leaves(
    leaves: Sequence[Tensor], op: str, shape: Sequence[int], divisor: int | None
) -> None:
    if not leaves or math.prod(shape) != len(leaves) or min(shape, default=1) < 1:
        raise ContractError(
            f"axes of sizes {list(shape)} need {math.prod(shape)} leaves, found {len(leaves)}; "
            "give one leaf per coordinate, row-major"
        )
    if divisor is not None and (op != "avg" or not 1 <= divisor < 2**63):
        raise ContractError(
            f"divisor={divisor} with op={op!r}; a divisor is a whole number from 1 to 2**63 - 1 "
            "and needs op='avg'"
        )
    first = leaves[0]
    for i, leaf in enumerate(leaves):
        if (leaf.shape, leaf.dtype, leaf.device) != (first.shape, first.dtype, first.device):
            raise ContractTypeError(
                f"leaf {i} is {leaf.dtype} {tuple(leaf.shape)} on {leaf.device}, leaf 0 is "
                f"{first.dtype} {tuple(first.shape)} on {first.device}; all leaves must be alike"
            )


def _node(
    combine: Callable[[Tensor, Tensor], Tensor],
    node_dtype: torch.dtype | None,
    accumulator: torch.dtype,
    left: Tensor,
    right: Tensor,
) -> Tensor:
    value = combine(left, right)
    return value if node_dtype is None else value.to(node_dtype).to(accumulator)


def _mesh_tree(
    leaves: Sequence[Tensor],
    shape: tuple[int, ...],
    accumulator: torch.dtype,
    combine: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    if len(leaves) == 1:
        return leaves[0].to(accumulator)
    if shape[0] == 1:
        return _mesh_tree(leaves, shape[1:], accumulator, combine)
    # Splitting the outermost axis at the largest power of two below its size, and coming back to
    # the same function with each part, is the tree of the outer axis over the trees of the inner.
    split = 1 << (shape[0] - 1).bit_length() - 1
    stride = len(leaves) // shape[0]
    left = _mesh_tree(leaves[: split * stride], (split, *shape[1:]), accumulator, combine)
    right = _mesh_tree(
        leaves[split * stride :], (shape[0] - split, *shape[1:]), accumulator, combine
    )
    return combine(left, right)


def _extremum(leaves: Sequence[Tensor], op: str) -> Tensor:
    if leaves[0].dtype in _INTEGERS:
        pick = torch.maximum if op == "max" else torch.minimum
        result = leaves[0].clone()
        for leaf in leaves[1:]:
            result = pick(result, leaf)
        return result.contiguous()
    # Integer keys order the floats totally, with -0.0 below +0.0; torch.maximum on floats leaves
    # the choice between equal zeros to the vector unit.
    integer, canonical = _NAN_BITS[leaves[0].dtype]
    pick = torch.maximum if op == "max" else torch.minimum
    key = _ordered_key(leaves[0], integer)
    nan = torch.isnan(leaves[0])
    for leaf in leaves[1:]:
        key = pick(key, _ordered_key(leaf, integer))
        nan = nan | torch.isnan(leaf)
    return _unordered(key).masked_fill_(nan, canonical).view(leaves[0].dtype)


def _ordered_key(leaf: Tensor, integer: torch.dtype) -> Tensor:
    return _unordered(leaf.contiguous().view(integer))


def _unordered(bits: Tensor) -> Tensor:
    """Sign-magnitude bits to two's complement and back: the map is its own inverse."""
    top = torch.iinfo(bits.dtype)
    return torch.where(bits < 0, bits ^ top.max, bits)


def _finished(result: Tensor, leaf: Tensor) -> Tensor:
    out = result.to(leaf.dtype, copy=result is leaf).contiguous()
    if leaf.dtype in _NAN_BITS:
        integer, canonical = _NAN_BITS[leaf.dtype]
        out.view(integer).masked_fill_(torch.isnan(out), canonical)
    return out


def _refuse_flushed_subnormals(leaf: Tensor) -> None:
    if leaf.device.type != "cpu" or not leaf.is_floating_point():
        return
    # torch.set_flush_denormal changes this thread's floating-point mode, for Python's own
    # arithmetic as well; there is no way to ask torch for the mode.
    who = "this thread" if _SMALLEST_SUBNORMAL * 1.0 == 0.0 else ""
    threads = torch.get_num_threads()
    if not who and leaf.numel() >= _GRAIN and threads not in _seen_thread_counts():
        # Worker threads keep the mode in which they were started, so one look is enough.
        with _disable_current_modes():
            probe = torch.ones(threads * _GRAIN, dtype=torch.int32, device="cpu")
            flushed = bool(((probe.view(torch.float32) * 1.0).view(torch.int32) == 0).any())
        if flushed:
            who = "one of torch's worker threads"
        else:
            _seen_thread_counts().add(threads)
    if who:
        raise ContractStateError(
            f"{who} flushes subnormal numbers to zero, the contract keeps them; "
            "call torch.set_flush_denormal(False) on every rank, before any computation"
        )


def _seen_thread_counts() -> set[int]:
    if not hasattr(_checked, "counts"):
        _checked.counts = set()
    counts: set[int] = _checked.counts
    return counts
