"""The reductions of a group, under its contract: what runs on the group's thread."""

from __future__ import annotations

import time
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
from meshplan._torch import dispatch_modes, profiler_enabled
from meshplan._torch.process_group import factor_of
from meshplan.backend._options import NAME, BackendOptions
from meshplan.backend._work import Reduce, in_caller_mode, writable
from meshplan.collectives._options import ReductionOptions, read_options
from meshplan.collectives._reduction import (
    all_reduce_list,
    bind,
    check_distinct,
    compare_lists,
    describe_group,
    reduce_tensor,
    scatter_list,
)
from meshplan.contract import FLOATS, INTEGERS, OPS, Contract, Op, check_dtype
from meshplan.definition import canonicalize_nans
from meshplan.errors import ContractError, ContractTypeError, FallbackRefusedError
from meshplan.execute import BoundReduction, Event, record
from meshplan.flatten import registry
from meshplan.record import Record


@dataclass(frozen=True)
class Operation:
    """A reduction that a caller requests."""

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


Kind = Literal["all_reduce", "reduce_scatter"]


def options_of(operation: Operation, options: BackendOptions) -> ReductionOptions:
    """How the collectives run an operation that the contract defines."""
    assert operation.op is not None
    found = read_options(operation.op, options.path, options.contract, options.strict)
    return found if options.audit is None else replace(found, audit=options.audit)


def reduce_all(
    tensors: Sequence[Tensor],
    operation: Operation,
    options: BackendOptions,
    group: ProcessGroup,
    ticket: Ticket,
) -> None:
    """All-reduce each tensor in place, over the inner group for reductions. They are detached, of
    any dtypes for which ``operation`` is the same, which the contract defines.
    """
    how = options_of(operation, options)
    if _in_one(tensors, operation, options, group):
        check_distinct(tensors)
        compare_lists("all_reduce", tensors, (), how, group, False, ticket)
        all_reduce_list(tensors, None, how, group, False, ticket)
        return
    for tensor in tensors:
        summand = operation.scale(tensor, options.contract)
        if group.size() > 1:
            own = operation.factor is None
            request = _request("all_reduce", operation)
            summand = reduce_tensor(summand, how, group, request, ticket, in_place=own)
        if summand is not tensor:
            tensor.copy_(rounded(summand, tensor.dtype))


def _in_one(
    tensors: Sequence[Tensor],
    operation: Operation,
    options: BackendOptions,
    group: ProcessGroup,
) -> bool:
    """Whether several tensors travel in one message. An audit compares one reduction at a time."""
    several = len(tensors) > 1 and group.size() > 1
    return several and operation.factor is None and options.audit is None


def reduce_blocks(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    lengths: Sequence[Sequence[int]],
    operation: Operation,
    options: BackendOptions,
    group: ProcessGroup,
    ticket: Ticket,
) -> None:
    """Reduce each flat input, with the blocks of all ranks in order, and write the block of this
    rank to the output of any shape. ``lengths`` are those of the blocks, for each input.
    """
    how = options_of(operation, options)
    if _in_one(outputs, operation, options, group):
        shards = [(0, tuple(sizes)) for sizes in lengths]
        compare_lists("reduce_scatter", inputs, shards, how, group, False, ticket)
        found = scatter_list(inputs, shards, None, how, group, False, ticket)
        for output, block in zip(outputs, found, strict=True):
            output.copy_(block.view(output.shape))
        return
    for output, tensor, sizes in zip(outputs, inputs, lengths, strict=True):
        block = operation.scale(tensor, options.contract)
        if group.size() > 1:
            request = _request("reduce_scatter", operation)
            cut: dict[str, Any] = {"dim": 0, "lengths": tuple(sizes)}
            block = reduce_tensor(block, how, group, request, ticket, **cut)
        if output.numel():
            output.copy_(rounded(block, output.dtype).view(output.shape))


def rounded(result: Tensor, dtype: torch.dtype) -> Tensor:
    """The result in another dtype; torch makes NaNs of its own where it rounds to bfloat16."""
    return result if result.dtype is dtype else canonicalize_nans(result.to(dtype))


def _request(kind: str, operation: Operation) -> str:
    return f"{kind} {operation.name} of backend {NAME}"


ALL_REDUCE: Kind = "all_reduce"
"""In place: the output is the message."""
SCATTER: Kind = "reduce_scatter"
"""Equal blocks of the message, one for each rank."""


MAX_BOUND = 256
"""Reductions that a group keeps; where there are more, all are bound again."""

_PLAIN = (Tensor, torch.nn.Parameter)


class BoundTable:
    """The reductions of one tensor that a group of the backend has run before, by kind, operation,
    dtype and shape. What is in it changes no bit, no message and no order: a reduction that is not
    found runs the ordinary way, and meets those that are. ``options`` are the group's.
    """

    def __init__(self, options: BackendOptions) -> None:
        self._options = options
        self._bound: dict[Hashable, BoundReduction] = {}

    def find(self, kind: Kind, message: Tensor, out: Tensor, op: Any) -> Reduce | None:
        """The reduction of ``message`` into ``out`` by a ``ReduceOp``, to be run once in its turn.
        ``None`` if none like it was run before, or if operators or spans are watched.
        """
        found = self._bound.get((kind, op.op, message.dtype, message.shape))
        if found is None or not _can_repeat(message, out) or is_watched():
            return None
        return partial(self._repeat, found, kind, message, out, op)

    def first(self, kind: Kind, message: Tensor, out: Tensor, operation: Operation) -> Reduce:
        """The reduction the ordinary way, which is then kept; to be run once in its turn."""
        return in_caller_mode(partial(self._run, kind, message, out, operation), [out])

    def clear(self) -> None:
        """Forget all reductions."""
        self._bound.clear()

    def _run(
        self,
        kind: Kind,
        message: Tensor,
        out: Tensor,
        operation: Operation,
        lane: ProcessGroup,
        ticket: Ticket,
    ) -> None:
        """Reduce ``message``, flat where blocks of it are scattered, and keep the reduction."""
        options, summand, written = self._options, message.detach(), writable(out)
        cut: dict[str, Any] = {}
        if kind == SCATTER:
            summand = summand.reshape(-1)
            cut = {"dim": 0, "lengths": (out.numel(),) * lane.size()}
        if operation.factor is None and lane.size() > 1 and _can_repeat(message, out):
            how = options_of(operation, options)
            request = _request(kind, operation)
            found, groups = bind(summand, how, lane, request, ticket, **cut)
            if len(self._bound) >= MAX_BOUND:
                self._bound.clear()
            op = getattr(dist.ReduceOp, operation.name.upper())
            self._bound[kind, op, message.dtype, message.shape] = found
            written.copy_(found.run(summand, groups, ticket.word).view(out.shape))
        elif kind == SCATTER:
            lengths = [[out.numel()] * lane.size()]
            reduce_blocks([written], [summand], lengths, operation, options, lane, ticket)
        else:
            reduce_all([written], operation, options, lane, ticket)

    def _repeat(
        self,
        found: BoundReduction,
        kind: Kind,
        message: Tensor,
        out: Tensor,
        op: Any,
        lane: ProcessGroup,
        ticket: Ticket,
    ) -> None:
        flat = message.view(-1) if kind == SCATTER else message
        if not found.run_into(flat, out, ticket.word):
            operation = read_operation(op, message, self._options.contract)
            self.first(kind, message, out, operation)(lane, ticket)


def is_watched() -> bool:
    """Whether operators and spans are observed: by modes, by torch's profiler, or by Nsight."""
    on_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(dispatch_modes()) or profiler_enabled() or on_cuda


def _can_repeat(message: Tensor, out: Tensor) -> bool:
    if message is out:
        return is_plain_memory(message)
    if not (is_plain_memory(message) and is_plain_memory(out)) or message.dtype is not out.dtype:
        return False
    # The message is read while the result is written.
    return message.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()


def is_plain_memory(tensor: Tensor) -> bool:
    """Whether the kernel can read and write the memory of ``tensor`` as its elements."""
    if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    if tensor.is_neg() or tensor.is_conj() or not tensor.is_contiguous():
        return False
    try:
        # None of torch's zeros without memory, and no wrapper of a transformation.
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


def agree_on_policy(group: ProcessGroup, policy: str) -> None:
    """Agree with the other members of the inner ``group``, before it reduces for the first time.
    Raises GroupAgreementError on every rank if their policies differ.
    """
    if group.size() > 1:
        registry().of(group, "cpu", token=Record.of(policy=policy))


def check_equal_blocks(output: Tensor, tensor: Tensor, ranks: int) -> None:
    """Raise ContractError for a tensor that is not one block of the output's size per rank."""
    if tensor.numel() != output.numel() * ranks:
        raise ContractError(
            f"a reduce-scatter over {ranks} ranks got an input of {tensor.numel()} and an output "
            f"of {output.numel()} elements; pass an input of {ranks} times the output's elements"
        )


def check_blocks(output: Tensor, lengths: Sequence[int], rank: int, ranks: int) -> None:
    """Raise ContractError unless each rank has a block, and the output this rank's size."""
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
    """Let the inner backend of ``group`` reduce by a method with these arguments, and record it."""
    _record_inner(operation, tensors, method, options, group)
    extent: Extent = "fallback" if operation.fallback else "native"
    first, opts, pass_on = tensors[0], given[-1], group.pass_on
    dtype = first.dtype
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


def _record_inner(
    operation: Operation,
    tensors: Sequence[Tensor],
    kind: str,
    options: BackendOptions,
    group: ProcessGroup,
) -> None:
    """Record that the inner backend reduces. Raises FallbackRefusedError if ``strict`` and the
    order matters.
    """
    started = time.perf_counter()
    dtype = name_of(tensors[0].dtype)
    if operation.fallback and options.strict:
        raise FallbackRefusedError(
            f"strict=True refuses {kind} {operation.name} of {dtype}, which the inner backend "
            f"would reduce in its own order: {operation.why}; convert the tensor, or pass "
            "strict=False"
        )
    event = Event(
        asked=f"{kind} {operation.name} of backend {NAME}",
        planned=f"{kind} {operation.name} over {group.size()} ranks by the inner backend",
        ran="native",
        sends=(kind,),
        group=describe_group(group),
        dtype=dtype,
        why=operation.why,
        fallback=operation.fallback,
        kind="collective",
        path=options.path,
        ranks=group.size(),
    )
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    record(
        event,
        elements=sum(t.numel() for t in strided),
        nbytes=sum(t.nbytes for t in strided),
        seconds=time.perf_counter() - started,
    )
