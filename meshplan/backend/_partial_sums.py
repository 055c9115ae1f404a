"""A reduce-scatter and an all-reduce of its result, as one reduction with one rounding.

FSDP2 reduces gradients over shards, and their result over replicas. The reduce-scatter here keeps
the sum that it divides and rounds. If the next all-reduce on this thread is of the very tensor, and
the tensor is unchanged, it adds these sums instead, and divides and rounds once. So the bits are
those of one reduction over (replicas, shards).
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._calls import Ticket
from meshplan._dtypes import name_of
from meshplan._torch import version_of
from meshplan.backend._options import NAME, BackendOptions
from meshplan.backend._reductions import Operation, options_of, rounded
from meshplan.collectives._options import ReductionOptions
from meshplan.collectives._reduction import reduce_tensor
from meshplan.contract import Contract, Op
from meshplan.definition import partial_dtype
from meshplan.kernel import finish_partials
from meshplan.orders import PartialResult


@dataclass(frozen=True, slots=True, eq=False)
class PartialSum:
    """A sum over shards, neither divided nor rounded."""

    value: Tensor  # this rank's block, of ``partial_dtype``
    divisor: int  # of the sum over shards; 1 if it is not divided
    contract: Contract


class _Kept(threading.local):
    """The last partial sum of a thread, and the tensor to which it belongs."""

    found: tuple[weakref.ref[Tensor], int, PartialSum] | None = None


_kept = _Kept()
# An attribute of tensors whose next all-reduce does nothing: their owner reduces over these
# ranks itself, and FSDP2 has no switch for that.
LEFT_OUT = "_meshplan_left_out"


def keep_partial_sum(tensor: Tensor, partial_sum: PartialSum) -> None:
    """Keep the sum from which ``tensor`` was rounded, for the next all-reduce on this thread.

    It is let go with the tensor, and replaced by the next one: there is one for each thread.
    """
    kept = _kept

    def forget(dead: weakref.ref[Tensor]) -> None:
        if kept.found is not None and kept.found[0] is dead:
            kept.found = None

    kept.found = weakref.ref(tensor, forget), version_of(tensor), partial_sum


def take_partial_sum(tensor: Tensor) -> PartialSum | None:
    """The partial sum of ``tensor``, if the tensor is as the reduce-scatter has written it."""
    if _kept.found is None:
        return None
    (reference, version, partial_sum), _kept.found = _kept.found, None
    same = reference() is tensor and version_of(tensor) == version
    return partial_sum if same else None


def has_partial_sums(contract: Contract, dtype: str) -> bool:
    """Whether sums of leaves of ``dtype`` can be kept, as one number for each element."""
    kept = contract.partial("sum", dtype)
    return contract.has_parts("sum", dtype) and kept == PartialResult.number(kept.dtype)


def keeps(operation: Operation, tensor: Tensor, contract: Contract) -> bool:
    """Whether a reduce-scatter to ``tensor`` has a partial sum that differs from its result."""
    if operation.op not in ("sum", "avg") or not tensor.dtype.is_floating_point:
        return False
    if tensor.is_inference() or not has_partial_sums(contract, name_of(tensor.dtype)):
        return False
    wide = partial_dtype("sum", tensor.dtype, contract)
    return operation.op == "avg" or wide is not tensor.dtype


def continues(partial_sum: PartialSum, operation: Operation, options: BackendOptions) -> bool:
    """Whether an all-reduce can go on with ``partial_sum``: facts that all ranks have."""
    plain = operation.op in ("sum", "avg") and operation.factor is None
    return plain and partial_sum.contract == options.contract


def scatter_partial_sum(
    output: Tensor,
    message: Tensor,
    operation: Operation,
    options: BackendOptions,
    found: list[PartialSum],
    group: ProcessGroup,
    ticket: Ticket,
) -> None:
    """Reduce equal blocks of the flat ``message`` to ``output``, and append the partial sum to
    ``found``. The summands travel in the accumulator's dtype: twice the bytes for 16 bits.
    """
    contract, dtype = options.contract, output.dtype
    wide = partial_dtype("sum", dtype, contract)
    summand = operation.scale(message, contract).to(wide)
    how = _options(operation, options)
    request = f"reduce_scatter {operation.name} with unrounded sums of backend {NAME}"
    shards = 0, (output.numel(),) * group.size()
    value = reduce_tensor(summand, how, group, ticket, request=request, shards=shards)
    divisor = group.size() if operation.op == "avg" else 1
    op: Op = "avg" if divisor > 1 else "sum"
    result = finish_partials([value], op, (1,), contract, dtype, divisor if divisor > 1 else None)
    output.copy_(result.view(output.shape))
    found.append(PartialSum(value, divisor, contract))


def reduce_partial_sums(
    tensor: Tensor,
    partial_sum: PartialSum,
    operation: Operation,
    options: BackendOptions,
    group: ProcessGroup,
    ticket: Ticket,
) -> None:
    """Write the reduction of all ranks' partial sums to ``tensor``, divided and rounded once. A
    rank without a partial sum passes another dtype or divisor: an error on all ranks.
    """
    value = partial_sum.value
    if value.is_cuda:
        # Its memory belongs to the stream of the other group.
        value.record_stream(torch.cuda.current_stream(value.device))
    divisor = partial_sum.divisor * (group.size() if operation.op == "avg" else 1)
    how = _options(operation, options)
    if divisor > 1:
        how = replace(how, op="avg", divisor=divisor)
    request = f"all_reduce {operation.name} of unrounded sums of backend {NAME}"
    result = reduce_tensor(value, how, group, ticket, request=request)
    tensor.copy_(rounded(result, tensor.dtype).view(tensor.shape))


def _options(operation: Operation, options: BackendOptions) -> ReductionOptions:
    """How partial sums are added: they are of the accumulator's dtype already."""
    how, contract = options_of(operation, options), options.contract
    if contract.rounding == "once":
        contract = replace(contract, accumulate="wide")
    return replace(how, op="sum", contract=contract)
