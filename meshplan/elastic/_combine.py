"""Sums of rounds in the contract's tree over all micro-batches of a step, by a binary counter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from meshplan._torch import foreach_add_
from meshplan.contract import Contract, check_dtype
from meshplan.definition import partial_dtype, refuse_flushed_subnormals
from meshplan.elastic._micro_batches import list_numbers, working_ranks
from meshplan.errors import ContractError, ContractTypeError, ElasticError
from meshplan.kernel import combine_leaves, finish_partials


class TreeSum:
    """The sums of equal subtrees of the contract's tree, which come in order, of several tensors.

    At most ``log2(n) + 1`` of n subtrees are kept, the new one included: a subtree waits until a
    neighbour of its size is there, like the digits of a binary counter. ``None`` is a tensor of
    zeros.
    """

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._kept: list[list[Tensor | None]] = []
        self.parts = 0

    def add(self, parts: Sequence[Tensor | None], *, copy: bool) -> None:
        """Add the next subtree.

        Args:
            parts: one for each sum, of the dtype of partial sums. Kept, and written to, unless
                ``copy``.
            copy: another object may write to ``parts`` later.
        """
        present = [part for part in parts if part is not None]
        # The threads that compute on the largest part on a CPU include those of the others.
        refuse_flushed_subnormals(max(present, key=lambda part: part.is_cpu * part.numel()))
        self.parts += 1
        for _ in range((self.parts & -self.parts).bit_length() - 1):
            parts, copy = self._node(self._kept.pop(), parts), False
        self._kept.append([part.clone() if copy and part is not None else part for part in parts])

    def take(self) -> list[Tensor | None]:
        """The sums of all subtrees, neither divided nor rounded; none are left then."""
        total = self._kept.pop()
        # The tree of n leaves splits after the largest power of two, so the last ones come first.
        while self._kept:
            total = self._node(self._kept.pop(), total)
        self.parts = 0
        return total

    def _node(
        self, left: Sequence[Tensor | None], right: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        pairs = list(zip(left, right, strict=True))
        if self._contract.rounding == "node":
            return [self._rounded_node(one, other) for one, other in pairs]
        both = [(one, other) for one, other in pairs if one is not None and other is not None]
        if both:
            foreach_add_([one for one, _ in both], [other for _, other in both])
        # Zeros are added as well: -0.0 + 0.0 is 0.0. The right subtree may not be written to.
        return [
            (None if other is None else other + 0.0)
            if one is None
            else (one.add_(0.0) if other is None else one)
            for one, other in pairs
        ]

    def _rounded_node(self, left: Tensor | None, right: Tensor | None) -> Tensor | None:
        present = left if left is not None else right
        if present is None:
            return None
        pair = [torch.zeros_like(present) if one is None else one for one in (left, right)]
        return combine_leaves(pair, "sum", (2,), self._contract)


def combine(
    rounds: Iterable[Tensor],
    micro_batches: int,
    op: Literal["sum", "avg"] = "avg",
    contract: Contract = Contract(),
    *,
    dtype: torch.dtype | None = None,
    divisor: int | None = None,
) -> Tensor:
    """Combine the sums of rounds, as ``reduce_leaves`` combines all micro-batches of the step.

    If W ranks compute M micro-batches, there are M / W rounds, and round r is the sum of the
    micro-batches from r W to (r + 1) W - 1 in the contract's order, such as an all-reduce over the
    W ranks returns it. It is not divided. No communication.

    Args:
        rounds: tensors of one shape, dtype and device, in order; unchanged. If they come from a
            generator, at most ``log2(M / W) + 1`` of them are kept.
        micro_batches: M, of the whole step.
        op: ``"sum"``, or ``"avg"``: one division after the last addition.
        contract: of the rounds, of ``order="tree"``.
        dtype: of the gradients of micro-batches, and of the result; ``None``: of ``rounds``.
            16-bit gradients are summed in float32: pass float32 rounds and their 16-bit dtype.
        divisor: for ``"avg"``: divide by it instead of M, such as by the number of tokens.

    Returns:
        A new tensor, whose bits are the same for every number of ranks.

    Raises:
        ElasticError: there are not M / W rounds for a power of two W that divides M.
        ContractError: unknown ``op``, an invalid ``divisor``, or another order.
        ContractTypeError: rounds that differ, that were rounded to 16 bits, or of a dtype outside
            the contract.
        ContractStateError: as ``reduce_leaves``.
    """
    if op not in ("sum", "avg"):
        raise ContractError(f"no sum over rounds with op={op!r}; use 'sum' or 'avg'")
    tree, first, narrow = TreeSum(contract), None, False
    for part in rounds:
        part = part.detach().resolve_neg()
        found = part.dtype, part.shape, part.device
        if first is None:
            first = found
            dtype = dtype or part.dtype
            check_dtype(op, dtype, contract)
            check_contract(contract)
            wanted = partial_dtype("sum", dtype, contract)
            narrow = part.dtype is not wanted
            if part.dtype not in (wanted, dtype):
                raise ContractTypeError(
                    f"rounds are {part.dtype}, and sums of {dtype} are {wanted} under "
                    f"{contract.id}; pass rounds of {wanted}"
                )
        elif found != first:
            raise ContractTypeError(
                f"round {tree.parts} is {found[0]} {tuple(found[1])} on {found[2]}, round 0 is "
                f"{first[0]} {tuple(first[1])} on {first[2]}; all rounds must match"
            )
        wide = combine_leaves([part], "sum", (1,), contract) if narrow else part
        tree.add([wide], copy=not narrow)
    count = tree.parts
    counts = [micro_batches // ranks for ranks in working_ranks(micro_batches)]
    if first is None or dtype is None or count not in counts:
        raise ElasticError(
            f"got {count} rounds of {micro_batches} micro-batches; pass one sum for each round, "
            f"{list_numbers(counts)} of them"
        )
    if narrow and count != micro_batches:
        raise ContractTypeError(
            f"rounds of {micro_batches // count} micro-batches are {first[0]}, which rounds each "
            f"of them; pass rounds of {partial_dtype('sum', dtype, contract)} and dtype={dtype}"
        )
    if op == "avg":
        divisor = micro_batches if divisor is None else divisor
    total = [part for part in tree.take() if part is not None]
    return finish_partials(total, op, (1,), contract, dtype, divisor)


def check_contract(contract: Contract) -> None:
    """Refuse a contract in which the sums of rounds are not subtrees.

    Raises:
        ContractError: such a contract.
    """
    if contract.order != "tree":
        raise ContractError(
            f"sums under {contract.id} cannot be made of rounds; use Contract(order='tree')"
        )


def exact_sum(numbers: Sequence[float]) -> float:
    """The sum of numbers, rounded once; infinite if it exceeds float64."""
    others = [one for one in numbers if not math.isfinite(one)]
    if others:
        return sum(others)
    total = sum(map(Fraction, numbers), Fraction())
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf
