"""The reductions of a group, under its contract: what runs on the group's thread."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from meshplan._calls import Ticket
from meshplan._dtypes import name_of
from meshplan._observing import Extent, within
from meshplan._torch import version_of
from meshplan._torch.process_group import factor_of
from meshplan.backend._options import NAME, BackendOptions
from meshplan.backend._work import Reduce, in_caller_mode, writable
from meshplan.collectives._options import ReductionOptions, read_options
from meshplan.collectives._reduction import (
    Kind,
    Shards,
    bind,
    check_distinct,
    describe_group,
    reduce_tensor,
    run_list,
)
from meshplan.contract import FLOATS, INTEGERS, OPS, Contract, Op, check_dtype
from meshplan.definition import canonicalize_nans, partial_dtype
from meshplan.errors import ContractError, ContractTypeError, FallbackRefusedError
from meshplan.execute import BoundReduction, Purpose
from meshplan.execute._provenance import record_call
from meshplan.execute._run import is_plain_memory, is_watched
from meshplan.flatten import registry
from meshplan.kernel import finish_partials
from meshplan.orders import PartialResult
from meshplan.record import Record


@dataclass(frozen=True)
class Operation:
    name: str  # of the ``ReduceOp``, in lower case
    op: Op | None  # ``None`` where the contract does not define it for the dtype
    why: str = ""
    # Whether the inner backend's result depends on the order, which no caller has requested.
    fallback: bool = True
    factor: float | Tensor | None = None  # of ``PREMUL_SUM``, this rank's

    def scale(self, tensor: Tensor, contract: Contract) -> Tensor:
        """The summand of this rank; ``tensor`` itself without a factor. A ``PREMUL_SUM`` multiplies
        each leaf by the factor in the accumulator's dtype and adds the products in that dtype. With
        ``rounding="node"`` a product is a node, and is rounded.
        """
        if self.factor is None:
            return tensor
        parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        wide = getattr(torch, contract.accumulator(name_of(parts.dtype)))
        factor = self.factor
        if not isinstance(factor, Tensor):
            # Filled on the device: a copy from the host would make the host wait.
            factor = torch.full((), factor, dtype=torch.float64, device=tensor.device)
        scaled = parts.to(wide) * factor.reshape(()).to(wide)
        if contract.rounding == "node":
            scaled = scaled.to(parts.dtype)
        return torch.view_as_complex(scaled) if tensor.is_complex() else scaled


def read_operation(
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    tensor: Tensor,
    contract: Contract,
    policy: str = "deterministic",
) -> Operation:
    """What ``op`` is on tensors like this one, in a group of this contract and policy. Raises
    ContractTypeError for a product of floats in an exact order.
    """
    kind: Any = getattr(op, "op", op)
    name = str(kind.name).lower()
    if policy == "fast":
        return Operation(name, None, "policy 'fast'", fallback=False)
    dtype, factor = tensor.dtype, None
    if name == "premul_sum":
        assert isinstance(op, dist.ReduceOp)
        factor = factor_of(op)
    if tensor.layout is not torch.strided:
        return Operation(name, None, f"the tensor is {tensor.layout}")
    real = dtype.to_real() if dtype.is_complex and name in ("sum", "avg", "premul_sum") else dtype
    word: Any = "sum" if factor is not None else name
    if not (real.is_floating_point or dtype.is_complex):
        # Integers and bits: every order has the same result, and division is of the sum.
        defined = factor is None and word in OPS and word != "avg" and name_of(dtype) in INTEGERS
        why = "" if defined else "its result does not depend on the order"
        return Operation(name, word if defined else None, why, fallback=False)
    if word not in OPS:
        return Operation(name, None, f"the contract does not define {name}")
    try:
        check_dtype(word, real, contract)
    except ContractTypeError as error:
        if word == "product" and name_of(real) in FLOATS:
            # Only an exact order refuses it, and the inner backend has no exact product either.
            raise
        return Operation(name, None, str(error))
    return Operation(name, word, factor=factor)


def options_of(operation: Operation, options: BackendOptions) -> ReductionOptions:
    assert operation.op is not None
    found = read_options(operation.op, options.path, options.contract, options.strict)
    return found if options.audit is None else replace(found, audit=options.audit)


def rounded(result: Tensor, dtype: torch.dtype) -> Tensor:
    """The result in another dtype; torch makes NaNs of its own where it rounds to bfloat16."""
    return result if result.dtype is dtype else canonicalize_nans(result.to(dtype))


def _request(kind: str, operation: Operation) -> str:
    return f"{kind} {operation.name} of backend {NAME}"


Exchange = Literal["exchange of leaves"]
EXCHANGE: Exchange = "exchange of leaves"
MAX_BOUND = 256
"""Reductions that a group keeps; where there are more, all are bound again."""


class BoundTable:
    """The reductions of a group of the backend. It keeps those of one tensor, by kind, operation,
    dtype and shape. What is kept changes no bit, no message and no order: a reduction that is not
    found runs the ordinary way, and pairs with those that are. ``options`` are the group's.
    """

    def __init__(self, options: BackendOptions) -> None:
        self._options = options
        self._bound: dict[Hashable, BoundReduction] = {}

    def find(self, kind: Kind | Exchange, message: Tensor, out: Tensor, op: Any) -> Reduce | None:
        """The reduction of ``message`` into ``out``, or of equal blocks of it, by a ``ReduceOp``,
        to be run once in its turn. ``None`` if none like it was run before, or if operators or
        spans are watched.
        """
        # Integers compare faster than operations.
        found = self._bound.get((kind, int(op.op), message.dtype, out.shape))
        if found is None or not _can_repeat(message, out) or is_watched():
            return None
        return partial(self._repeat, found, kind, message, out, op)

    def clear(self) -> None:
        self._bound.clear()

    def reduce(
        self,
        kind: Kind,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        lengths: Sequence[Sequence[int]],
        operation: Operation,
        group: ProcessGroup,
        ticket: Ticket,
    ) -> None:
        """Reduce each input over the inner ``group`` for reductions, and write the whole to its
        output, which is the input; or of an input with the blocks of all ranks in order, the block
        of this rank, to an output of any shape. ``lengths`` are those of the blocks, for each
        input. All are detached, of any dtypes for which ``operation`` is the same, which the
        contract defines.
        """
        options, ranks = self._options, group.size()
        how, request = options_of(operation, options), _request(kind, operation)
        shards: Sequence[Shards] = [(0, tuple(sizes)) for sizes in lengths]
        if shards:
            # In the turn of the call: a reduction before it may write to them.
            inputs = [one.reshape(-1) for one in inputs]
        # An audit compares one reduction at a time.
        in_one = operation.factor is None and options.audit is None
        if in_one and len(outputs) > 1 and ranks > 1:
            if not shards:
                check_distinct(outputs)
            run_list(kind, inputs, shards, outputs if shards else None, how, group, ticket)
            return
        cuts: Sequence[Shards | None] = shards or [None] * len(outputs)
        for output, tensor, cut in zip(outputs, inputs, cuts, strict=True):
            value = operation.scale(tensor, options.contract)
            written = [output] * (kind == "all_reduce")
            if ranks > 1:
                bound, groups = bind(value, how, group, request, ticket, shards=cut)
                value = bound.run(value, groups, ticket.word, written=written)
                equal = cut is None or {*cut[1]} == {output.numel()}
                if equal and operation.factor is None and _can_repeat(tensor, output):
                    self._keep(kind, operation.name, tensor, output, bound)
            if value is not output and output.numel():
                output.copy_(rounded(value, output.dtype).view(output.shape))

    def exchange(self, flat: Tensor, group: ProcessGroup, ticket: Ticket) -> None:
        """Exchange the blocks of ``flat``: in place, this rank's block of each rank, in order."""
        options, ranks = self._options, group.size()
        # The kernel for GPUs has no exchange.
        path = "auto" if flat.is_cpu and options.path == "auto" else "exchange"
        how = ReductionOptions("sum", path, options.contract, strict=False, leaves=True)
        shards = 0, (flat.numel() // ranks,) * ranks
        bound, groups = bind(flat, how, group, EXCHANGE, ticket, shards=shards)
        flat.copy_(bound.run(flat, groups, ticket.word))
        self._keep(EXCHANGE, "sum", flat, flat, bound)

    def _keep(
        self,
        kind: Kind | Exchange,
        op: str,
        message: Tensor,
        out: Tensor,
        bound: BoundReduction,
    ) -> None:
        if len(self._bound) >= MAX_BOUND:
            self._bound.clear()
        number = int(getattr(dist.ReduceOp, op.upper()))
        self._bound[kind, number, message.dtype, out.shape] = bound

    def _repeat(
        self,
        found: BoundReduction,
        kind: Kind | Exchange,
        message: Tensor,
        out: Tensor,
        op: Any,
        group: ProcessGroup,
        ticket: Ticket,
    ) -> None:
        flat = message if kind == "all_reduce" else message.view(-1)
        if not found.run_into(flat, out, ticket.word):
            operation = read_operation(op, message, self._options.contract)
            written = writable(out)
            flat = written if message is out else writable(flat)
            lengths = [] if kind == "all_reduce" else [[out.numel()] * group.size()]
            run: Reduce = partial(self.exchange, flat)
            if kind != EXCHANGE:
                run = partial(self.reduce, kind, [written], [flat], lengths, operation)
            in_caller_mode(run, [out])(group, ticket)


def _can_repeat(message: Tensor, out: Tensor) -> bool:
    if message is out:
        return is_plain_memory(message)
    if not (is_plain_memory(message) and is_plain_memory(out)) or message.dtype is not out.dtype:
        return False
    # The message is read while the result is written.
    return message.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()


def agree_on_policy(group: ProcessGroup, policy: str) -> None:
    """Agree with the other members of the inner ``group``, before it reduces for the first time.
    Raises GroupAgreementError on every rank if their policies differ.
    """
    if group.size() > 1:
        registry().of(group, "cpu", token=Record.of(policy=policy))


def check_equal_blocks(output: Tensor, tensor: Tensor, ranks: int) -> None:
    if tensor.numel() != output.numel() * ranks:
        raise ContractError(
            f"a reduce-scatter over {ranks} ranks got an input of {tensor.numel()} and an output "
            f"of {output.numel()} elements; pass an input of {ranks} times the output's elements"
        )


def check_blocks(output: Tensor, lengths: Sequence[int], rank: int, ranks: int) -> None:
    if len(lengths) != ranks or output.numel() != lengths[rank]:
        raise ContractError(
            f"a reduce-scatter over {ranks} ranks got blocks of {list(lengths)} elements and an "
            f"output of {output.numel()} elements on rank {rank} of the group; pass one block for "
            "each rank, and an output of the size of this rank's block"
        )


def reduce_inside(
    operation: Operation,
    tensors: Sequence[Tensor],
    method: str,
    options: BackendOptions,
    group: Any,
    *given: Any,
) -> Work:
    """Let the inner backend of ``group`` reduce by a method with these arguments, and record it.
    Raises FallbackRefusedError if ``strict`` and the order matters.
    """
    started, dtype, first = time.perf_counter(), tensors[0].dtype, tensors[0]
    if operation.fallback and options.strict:
        raise FallbackRefusedError(
            f"strict=True refuses {method} {operation.name} of {name_of(dtype)}, which the inner "
            f"backend would reduce in its own order: {operation.why}; convert the tensor, or pass "
            "strict=False"
        )
    planned = f"{method} {operation.name} over {group.size()} ranks by the inner backend"
    record_call(
        Purpose(_request(method, operation), planned, describe_group(group)),
        tensors,
        started,
        "native",
        (method,),
        group.size(),
        why=operation.why,
        fallback=operation.fallback,
        path=options.path,
    )
    extent: Extent = "fallback" if operation.fallback else "native"
    opts, pass_on = given[-1], group.pass_on
    integral = not (dtype.is_floating_point or dtype.is_complex)
    if integral and operation.name in _BITWISE and first.is_cpu and first.layout is torch.strided:
        pass_on = group.pass_bytes_on
    former = opts.reduceOp
    if dtype is torch.bool and operation.name in _OF_BOOLEANS:
        # Gloo adds the bytes: the sum of two would be neither 0 nor 1.
        opts.reduceOp = _OF_BOOLEANS[operation.name]
    try:
        work: Work = within(extent, partial(pass_on, method, *given))
    finally:
        opts.reduceOp = former
    return work


_BITWISE = ("band", "bor", "bxor")
_OF_BOOLEANS = {"sum": dist.ReduceOp.MAX, "product": dist.ReduceOp.MIN}


# A reduce-scatter and an all-reduce of its result, as one reduction with one rounding.
#
# FSDP2 reduces gradients over shards, and their result over replicas. The reduce-scatter here keeps
# the sum that it divides and rounds. If the next all-reduce on this thread is of the very tensor,
# and the tensor is unchanged, it adds these sums instead, and divides and rounds once. So the bits
# are those of one reduction over (replicas, shards).


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
    """Keep the sum from which ``tensor`` was rounded, for the next all-reduce on this thread, until
    the tensor goes or the next one comes.
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


def keeps_partial_sum(operation: Operation, tensor: Tensor, contract: Contract) -> bool:
    """Whether a reduce-scatter to ``tensor`` has a partial sum that differs from its result."""
    if operation.op not in ("sum", "avg") or not tensor.dtype.is_floating_point:
        return False
    if tensor.is_inference() or not has_partial_sums(contract, name_of(tensor.dtype)):
        return False
    wide = partial_dtype("sum", tensor.dtype, contract)
    return operation.op == "avg" or wide is not tensor.dtype


def continues_partial_sum(
    partial_sum: PartialSum, operation: Operation, options: BackendOptions
) -> bool:
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
