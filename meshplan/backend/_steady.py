"""The reductions of one tensor that a group of the backend has run before.

The table belongs to the group and ends with it. What is in it changes no bit, no message and no
order: a reduction that is not found runs the ordinary way, and meets those that are.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._calls import Ticket
from meshplan._torch import dispatch_modes, profiler_enabled
from meshplan.backend._operations import Operation, read_operation
from meshplan.backend._options import BackendOptions
from meshplan.backend._reductions import SCATTER, Kind, find_one, reduce_one
from meshplan.backend._work import Reduce, in_caller_mode, writable
from meshplan.execute import BoundReduction

MAX_STEADY = 256
"""Reductions that a group keeps; where there are more, all are found again."""

_PLAIN = (Tensor, torch.nn.Parameter)


class SteadyTable:
    """Reductions of one group that were run before, by kind, operation, dtype and shape.

    Args:
        options: of the group.
    """

    def __init__(self, options: BackendOptions) -> None:
        self._options = options
        self._known: dict[Hashable, BoundReduction] = {}

    def find(self, kind: Kind, message: Tensor, out: Tensor, op: Any) -> Reduce | None:
        """The reduction of ``message`` into ``out`` by a ``ReduceOp``, to be run once in its turn.

        Returns:
            ``None`` if none like it was run before, or if operators or spans are watched.
        """
        found = self._known.get((kind, op.op, message.dtype, message.shape))
        if found is None or not _are_steady(message, out) or _is_watched():
            return None
        return partial(self._repeat, found, kind, message, out, op)

    def first(self, kind: Kind, message: Tensor, out: Tensor, operation: Operation) -> Reduce:
        """The reduction the ordinary way, whose decisions are kept; to be run once in its turn."""
        return in_caller_mode(partial(self._run, kind, message, out, operation), [out])

    def clear(self) -> None:
        """Forget all reductions."""
        self._known.clear()

    def _run(
        self,
        kind: Kind,
        message: Tensor,
        out: Tensor,
        operation: Operation,
        lane: ProcessGroup,
        ticket: Ticket,
    ) -> None:
        reduce_one(kind, message.detach(), writable(out), operation, self._options, lane, ticket)
        if operation.factor is not None or lane.size() == 1 or not _are_steady(message, out):
            return
        found = find_one(kind, message.detach(), operation, self._options, lane)
        if found is None:
            return
        if len(self._known) >= MAX_STEADY:
            self._known.clear()
        op = getattr(dist.ReduceOp, operation.name.upper())
        self._known[kind, op, message.dtype, message.shape] = found

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


def _is_watched() -> bool:
    """Whether operators and spans are seen: by modes, by torch's profiler, or by Nsight."""
    on_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(dispatch_modes()) or profiler_enabled() or on_cuda


def _are_steady(message: Tensor, out: Tensor) -> bool:
    if message is out:
        return is_steady(message)
    if not (is_steady(message) and is_steady(out)) or message.dtype is not out.dtype:
        return False
    # The message is read while the result is written.
    return message.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()


def is_steady(tensor: Tensor) -> bool:
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
