"""Compiled reductions as operators that torch's tools can see.

Tracing records ``meshplan::fold``, of leaves, and fake tensors answer it; it exists for tensors on
CPUs and GPUs. For a GPU without compiled kernels it runs the definition. It checks nothing: the
functions around it make the checks of ``meshplan.definition``.

``meshplan::peer_reduce`` and, in place, ``peer_reduce_`` reduce over peers. They find their
communicator by name and choose between one-shot and two-shot by size.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshplan import definition
from meshplan._calls import NO_TICKET, take_named
from meshplan._dtypes import name_of
from meshplan._observing import OBSERVING, Source, count_contract
from meshplan.contract import Contract, Op, check_dtype
from meshplan.definition import (
    check_leaves,
    partial_dtype,
    partial_shape,
    refuse_flushing_thread,
)
from meshplan.errors import ContractTypeError
from meshplan.kernel._communicator import Arithmetic, CallKey, communicator
from meshplan.kernel._device_peers import fold_device, fold_plan, launch_fold
from meshplan.kernel._host_peers import large_pages
from meshplan.kernel._library import DTYPES, OPS, load
from meshplan.orders import ORDERS

_WHOLE, _COMBINE, _FINISH = range(3)
_SMALLEST_SUBNORMAL = math.ulp(0.0)
_MOST_PASSED = 1024
_passed: set[object] = set()


def reduce_leaves(
    leaves: Sequence[Tensor],
    op: Op,
    shape: Sequence[int],
    contract: Contract = Contract(),
    *,
    divisor: int | None = None,
) -> Tensor:
    """As ``meshplan.definition.reduce_leaves``, bit for bit, with its arguments and errors."""
    if not _serves(leaves):
        return definition.reduce_leaves(leaves, op, shape, contract, divisor=divisor)
    leaves, divisor = _check_whole(leaves, op, shape, contract, divisor)
    return _run(leaves, op, shape, contract, leaves[0].dtype, divisor, _WHOLE)


def reduce_into(
    out: Tensor,
    leaves: Sequence[Tensor],
    op: Op,
    shape: Sequence[int],
    contract: Contract = Contract(),
    *,
    divisor: int | None = None,
) -> None:
    """``reduce_leaves`` into ``out``, for eager use: contiguous, of the leaves' shape, dtype and
    device, one of them or in memory apart from them all; ``ContractTypeError`` for another one.
    """
    # Tracing does not see that ``out`` changes.
    first = leaves[0] if leaves else out
    if out.dtype != first.dtype or out.shape != first.shape or not out.is_contiguous():
        raise ContractTypeError(
            f"out is {out.dtype}{list(out.shape)} with strides {out.stride()}, and the leaves are "
            f"{first.dtype}{list(first.shape)}; pass a contiguous tensor that matches them"
        )
    if not _serves(leaves):
        out.copy_(definition.reduce_leaves(leaves, op, shape, contract, divisor=divisor))
        return
    leaves, divisor = _check_whole(leaves, op, shape, contract, divisor)
    dtype = leaves[0].dtype
    _check_thread(op, dtype, out)
    _write(out, leaves, op, list(shape) or [1], *_words(contract), dtype, divisor, _WHOLE)


def combine_leaves(
    leaves: Sequence[Tensor],
    op: Op,
    shape: Sequence[int],
    contract: Contract = Contract(),
) -> Tensor:
    """As ``meshplan.definition.combine_leaves``; payloads of NaNs aside, bit for bit."""
    if not _serves(leaves):
        return definition.combine_leaves(leaves, op, shape, contract)
    leaves = check_leaves(leaves, op, shape, None)
    dtype = leaves[0].dtype
    check_dtype(op, dtype, contract)
    contract.check_parts(op, dtype)
    return _run(leaves, op, shape, contract, dtype, None, _COMBINE)


def finish_partials(
    partials: Sequence[Tensor],
    op: Op,
    shape: Sequence[int],
    contract: Contract,
    dtype: torch.dtype,
    divisor: int | None = None,
) -> Tensor:
    wanted = partial_dtype(op, dtype, contract)
    missing = op == "avg" and divisor is None
    if not _serves(partials) or partials[0].dtype is not wanted or missing:
        # The definition also raises the errors.
        return definition.finish_partials(partials, op, shape, contract, dtype, divisor)
    partials = check_leaves(partials, op, shape, divisor)
    check_dtype(op, dtype, contract)
    contract.check_parts(op, dtype)
    return _run(partials, op, shape, contract, dtype, divisor, _FINISH)


def _serves(leaves: Sequence[Tensor]) -> bool:
    kind = leaves[0].device.type if leaves else ""
    return kind == "cuda" or (kind == "cpu" and load()[0] is not None)


def _check_whole(
    leaves: Sequence[Tensor],
    op: Op,
    shape: Sequence[int],
    contract: Contract,
    divisor: int | None,
) -> tuple[Sequence[Tensor], int | None]:
    """The checks of ``reduce_leaves``; arguments that passed once for plain leaves pass again."""
    first = leaves[0]
    key = op, tuple(shape), len(leaves), _words(contract), divisor, first.dtype
    # The checks replace leaves with a pending negation or a gradient, so these never skip them.
    plain = key in _passed
    for leaf in leaves:
        plain = plain and leaf.shape == first.shape and leaf.dtype is first.dtype
        plain = plain and leaf.device == first.device and not leaf.requires_grad
        plain = plain and not leaf.is_neg()
    if not plain:
        leaves = check_leaves(leaves, op, shape, divisor)
        check_dtype(op, first.dtype, contract)
        if len(_passed) >= _MOST_PASSED:
            _passed.clear()
        _passed.add(key)
    return leaves, len(leaves) if divisor is None and op == "avg" else divisor


def _check_thread(op: str, dtype: torch.dtype, tensor: Tensor) -> None:
    rounds = tensor.is_cpu and dtype.is_floating_point and op not in ("max", "min")
    # Flushing is a mode of the thread, and the library computes on the calling thread alone. The
    # product, in Python on this thread, is 0 only if it flushes: a cheap test before the exact one.
    if rounds and _SMALLEST_SUBNORMAL * 1.0 == 0.0:
        refuse_flushing_thread()


def _words(contract: Contract) -> tuple[str, str, str]:
    return contract.order, contract.accumulate, contract.rounding


def _run(
    leaves: Sequence[Tensor],
    op: str,
    shape: Sequence[int],
    contract: Contract,
    *rest: Any,
) -> Tensor:
    _check_thread(op, rest[0], leaves[0])
    words = _words(contract)
    result: Tensor = torch.ops.meshplan.fold(list(leaves), op, list(shape) or [1], *words, *rest)
    return result


def _empty(
    leaves: list[Tensor],
    op: str,
    shape: list[int],
    order: str,
    accumulate: str,
    rounding: str,
    dtype: torch.dtype,
    divisor: int | None,
    part: int,
) -> Tensor:
    found = leaves[0].shape
    # A whole fold is on the path of every call.
    if part == _WHOLE:
        return leaves[0].new_empty(found, dtype=dtype)
    contract = Contract(order, accumulate, rounding)  # type: ignore[arg-type]
    if part == _COMBINE:
        found = torch.Size(partial_shape(found, op, dtype, contract))
        dtype = partial_dtype(op, dtype, contract)
    elif contract.sums_exactly(op, name_of(dtype)):
        found = found[1:]
    return leaves[0].new_empty(found, dtype=dtype)


def _fold(leaves: list[Tensor], *call: Any) -> Tensor:
    op, _, *words, dtype, _, part = call
    if part != _WHOLE and Contract(*words).sums_exactly(op, name_of(dtype)):
        # The library has whole sums only.
        return _define(leaves, *call)
    out = large_pages(_empty(leaves, *call))
    _write(out, leaves, *call)
    return out


def _define(leaves: Sequence[Tensor], *call: Any) -> Tensor:
    """By the definition, in plain torch."""
    op, shape, *words, dtype, divisor, part = call
    contract = Contract(*words)
    if part == _COMBINE:
        return definition.combine_leaves(leaves, op, shape, contract)
    if part == _FINISH:
        return definition.finish_partials(leaves, op, shape, contract, dtype, divisor)
    divisor = divisor if op == "avg" else None
    return definition.reduce_leaves(leaves, op, shape, contract, divisor=divisor)


def _write(out: Tensor, leaves: Sequence[Tensor], *call: Any) -> None:
    op, shape, *words, dtype, divisor, part = call
    order, accumulate, rounding = words
    if out.is_cuda:
        device = fold_device(out.device.index)
        planned = fold_plan(order, tuple(shape)) is not None
        if device is None or not planned or out.data_ptr() % out.itemsize:
            out.copy_(_define(leaves, *call))
            return
        launch_fold(device, out, leaves, op, shape, Contract(*words), dtype, divisor, part)
        return
    flat = [*map(Tensor.contiguous, leaves)]
    compiled, reason = load()
    assert compiled is not None, reason
    code = compiled.mp_fold(
        out.data_ptr(),
        (ctypes.c_void_p * len(flat))(*map(Tensor.data_ptr, flat)),
        len(flat),
        out.numel(),
        DTYPES[dtype],
        OPS[op],
        ORDERS[order].code,
        int(accumulate == "float64"),
        int(rounding == "node"),
        (ctypes.c_int * len(shape))(*shape),
        len(shape),
        divisor or 0,
        part,
    )
    assert code == 0, (dtype, op)


OPERATORS = torch.library.Library("meshplan", "DEF")
"""The library of torch in which meshplan registers its operators."""


def _register(
    name: str, signature: str, function: Callable[..., object], fake: Callable[..., object]
) -> None:
    OPERATORS.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"meshplan::{name}", fake, lib=OPERATORS)
    for key in ("CPU", "CUDA"):
        OPERATORS.impl(name, function, key)


_register(
    "fold",
    "(Tensor[] leaves, str op, int[] shape, str order, str accumulate, str rounding, "
    "ScalarType dtype, int? divisor, int part) -> Tensor",
    _fold,
    _empty,
)


# Both operators over peers end with these: the fields of ``Arithmetic``, mode and communicator; and
# the ticket of an eager call, or the name by which a graph takes one when it runs.
_ARGUMENTS = (
    "str op, int[] shape, str order, str accumulate, str rounding, int? divisor, str mode, "
    'str peers, str calls="", int ticket=0'
)


def _empty_of_peers(message: Tensor, parts: list[int], *call: Any) -> Tensor:
    if parts and call[6] != "leaves":
        return message.new_empty(parts[communicator(call[7]).rank])
    return torch.empty_like(message, memory_format=torch.contiguous_format)


def _peer_reduce(message: Tensor, parts: list[int], *call: Any) -> Tensor:
    message = message.contiguous()
    out = large_pages(_empty_of_peers(message, parts, *call))
    _reduce(message, out, tuple(parts), *call)
    return out


def _peer_reduce_(message: Tensor, *call: Any) -> None:
    flat = message.contiguous()
    try:
        _reduce(flat, flat, (), *call)
    finally:
        # Also after a failed call: what is left there must not look like a result.
        if flat is not message:
            message.copy_(flat)


def _reduce(
    message: Tensor,
    out: Tensor,
    parts: tuple[int, ...],
    op: str,
    shape: list[int],
    order: str,
    accumulate: str,
    rounding: str,
    divisor: int | None,
    mode: str,
    peers: str,
    calls: str = "",
    ticket: int = NO_TICKET,
) -> None:
    found = communicator(peers)
    if ticket == NO_TICKET and calls:
        with take_named(calls, found.device_type) as taken:
            call = op, shape, order, accumulate, rounding, divisor, mode, peers
            _reduce(message, out, parts, *call, ticket=taken.word)
        return
    if message.device.type != found.device_type:
        _refuse(message)
    _check_thread(op, message.dtype, message)
    if parts and mode != "leaves":
        mode = "scatter"
    elif mode == "auto":
        mode = found.faster_mode(message.nbytes)
    how = Arithmetic(op, tuple(shape), order, accumulate, rounding, divisor)
    key = CallKey(mode, tuple(message.shape), parts, message.dtype, how)
    started = time.perf_counter()
    found.run(found.prepare(key), message, out, ticket)
    if OBSERVING.observer is not None:
        seconds, dtype = time.perf_counter() - started, name_of(message.dtype)
        # If the caller is not a graph, it is a part of what that counts.
        what = f"{'reduce_scatter' if parts else 'all_reduce'} {op} of a compiled graph"
        source = Source(found.ranks, (), how.contract.id)
        count_contract(what, dtype, math.prod(shape), message.nbytes, seconds, source)


def _refuse(message: Tensor, *_: object) -> Tensor:
    where = message.device.type if message.layout is torch.strided else str(message.layout)
    raise ContractTypeError(
        f"a tensor on {where} cannot be reduced through the memory that these ranks share; pass a "
        "strided tensor on the device of their group, or path='exchange'"
    )


_peer = f"(Tensor message, int[] parts, {_ARGUMENTS}) -> Tensor"
_register("peer_reduce", _peer, _peer_reduce, _empty_of_peers)
_in_place = f"(Tensor(a!) message, {_ARGUMENTS}) -> ()"
_register("peer_reduce_", _in_place, _peer_reduce_, lambda *_: None)
for _operator in ("peer_reduce", "peer_reduce_"):
    for _key in ("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA"):
        OPERATORS.impl(_operator, _refuse, _key)
