"""Reductions over peers as operators that torch's tools can see: ``meshplan::peer_reduce`` and, in
place, ``peer_reduce_``.

They find their communicator by name and choose between one-shot and two-shot by size. On CPUs they
are done when they return; on GPUs they are under way on the current stream.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from meshplan._calls import NO_TICKET, take_named
from meshplan._dtypes import name_of
from meshplan._observing import OBSERVING, Source, count_contract
from meshplan.definition import refuse_flushing_thread
from meshplan.errors import ContractTypeError
from meshplan.kernel._communicator import Arithmetic, communicator
from meshplan.kernel._fold_operator import OPERATORS
from meshplan.kernel._host_peers import large_pages

_SMALLEST_SUBNORMAL = math.ulp(0.0)
# Both operators end with these: the fields of ``Arithmetic``, mode and communicator; and the ticket
# of an eager call, or the name by which a graph takes one when it runs.
_ARGUMENTS = (
    "str op, int[] shape, str order, str accumulate, str rounding, int? divisor, str mode, "
    'str peers, str calls="", int ticket=0'
)


def _empty(message: Tensor, parts: list[int], *call: Any) -> Tensor:
    if parts and call[6] != "leaves":
        return message.new_empty(parts[communicator(call[7]).rank])
    return torch.empty_like(message, memory_format=torch.contiguous_format)


def _peer_reduce(message: Tensor, parts: list[int], *call: Any) -> Tensor:
    message = message.contiguous()
    out = large_pages(_empty(message, parts, *call))
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
    rounds = message.dtype.is_floating_point and op not in ("max", "min")
    if rounds and _SMALLEST_SUBNORMAL * 1.0 == 0.0 and message.device.type == "cpu":
        refuse_flushing_thread()
    if parts and mode != "leaves":
        mode = "scatter"
    elif mode == "auto":
        mode = found.faster_mode(message.nbytes)
    how = Arithmetic(op, tuple(shape), order, accumulate, rounding, divisor)
    started = time.perf_counter()
    found.reduce(message, out, mode, parts, how, ticket)
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


for _operator, _signature, _function, _fake in (
    (
        "peer_reduce",
        f"(Tensor message, int[] parts, {_ARGUMENTS}) -> Tensor",
        _peer_reduce,
        _empty,
    ),
    (
        "peer_reduce_",
        f"(Tensor(a!) message, {_ARGUMENTS}) -> ()",
        _peer_reduce_,
        lambda *_: None,
    ),
):
    OPERATORS.define(  # type: ignore[no-untyped-call]
        _operator + _signature, tags=(torch.Tag.pt2_compliant_tag,)
    )
    torch.library.register_fake(f"meshplan::{_operator}", _fake, lib=OPERATORS)
    for _key in ("CPU", "CUDA"):
        OPERATORS.impl(_operator, _function, _key)  # type: ignore[no-untyped-call]
    for _key in ("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA"):
        OPERATORS.impl(_operator, _refuse, _key)  # type: ignore[no-untyped-call]
