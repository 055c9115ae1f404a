"""The parts of a path: messages of summands, partials and results, and their reduction.

A message is never computed with, so a dtype that no backend sends travels as another of its size.
Every collective is issued through the wire's ``CollectiveLog``, which the report reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from meshplan._calls import NO_TICKET, THIS_THREAD, check_aborted
from meshplan._torch import AsyncCollectiveTensor, TracingContext, get_proxy_mode
from meshplan._torch import functional_operators as _ops
from meshplan.errors import ContractTypeError
from meshplan.execute._provenance import CollectiveLog
from meshplan.flatten import default_timeout
from meshplan.kernel import reduce_leaves
from meshplan.planner import Step

# Other subclasses stand for what a tracer or a simulation sees; one is a collective under way.
_PLAIN = (Tensor, torch.nn.Parameter, AsyncCollectiveTensor)


WAIT_SLICE = timedelta(milliseconds=200)
"""Seconds after which a wait for a missing rank finds that its group was aborted."""
# Messages of the program over the same group have other tags.
_TAG = 0x6D706C


class Message(NamedTuple):
    """One message of a round between two ranks."""

    sends: bool  # this rank sends it; else it receives it
    tensor: Tensor  # bytes to send, or the memory for them: flat and contiguous
    peer: int  # the other rank's position in the group of the round


class Wire:
    """Carries one reduction, level by level, by functional collectives and without headers, so that
    torch's tools see and count the messages. This class is for graphs and simulated ranks; its
    subclasses compare headers.
    """

    def __init__(self, call: int = NO_TICKET, calls: str = "") -> None:
        self.log = CollectiveLog()
        self.issue = self.log.issue
        # The word of the reduction's ticket, which ranks compare, and the name by which a traced
        # operator takes one when it runs.
        self.call, self.calls = call, calls

    def compare(self) -> None:
        """Compare the headers of all ranks, for data that travels without them."""

    def in_place(self, nbytes: int, group: ProcessGroup) -> bool:
        """Whether pieces of ``nbytes`` of an exchange or a gather arrive in the caller's memory."""
        return False

    def exchange(self, parts: Tensor | Sequence[Tensor], group: ProcessGroup) -> Sequence[Tensor]:
        """Send ``parts[r]`` (rows of a contiguous tensor, or a list, of one dtype) to rank r.
        Returns the flat parts for this rank in rank order, waited for, and valid until the next
        exchange over ``group``.
        """
        return self.start_exchange(parts, group)()

    def start_exchange(
        self,
        parts: Tensor | Sequence[Tensor],
        group: ProcessGroup,
        *,
        last: bool = True,
        room: Sequence[Tensor] | None = None,
    ) -> Callable[[], Sequence[Tensor]]:
        """``exchange``, which returns while its messages are under way; the returned function waits
        for the parts. After ``compare`` it sends no headers, and several exchanges may be under
        way. A backend may write the parts of others to ``room``: one place for each rank, apart
        from ``parts``. ``last``: no other exchange follows in this reduction.
        """
        ranks = group.size()
        if isinstance(parts, Tensor):
            own = parts.shape[1]
            message, split = parts.view(-1), [own] * ranks
        else:
            own = parts[group.rank()].numel()
            message, split = torch.cat(list(parts)), [part.numel() for part in parts]
        received = self.all_to_all(to_wire_dtype(message), [own] * ranks, split, group)

        def finish() -> Sequence[Tensor]:
            found = from_wire_dtype(self.wait(received), message)
            return found.view(ranks, own).unbind(0)

        return finish

    def gather(self, tensor: Tensor, group: ProcessGroup) -> Sequence[Tensor]:
        """The summands of all ranks of ``group``, in their order, from this rank's flat and
        contiguous ``tensor``. They are flat, waited for, and valid until the next exchange over
        ``group``.
        """
        self.compare()
        gathered = self.start_gather(tensor, group)()
        return gathered.view(group.size(), tensor.numel()).unbind(0)

    def all_to_all(
        self,
        message: Tensor,
        into: Sequence[int],
        out: Sequence[int],
        group: ProcessGroup,
    ) -> Tensor:
        """Send ``out[r]`` elements of the flat, contiguous ``message`` to each rank r, and receive
        ``into[r]`` from it. Returns what is received in rank order, not waited for. Headers are not
        compared.
        """
        found: Tensor = self.issue(
            _ops.all_to_all_single, message, list(into), list(out), group.group_name
        )
        return found

    def all_gather(self, tensor: Tensor, group: ProcessGroup) -> Tensor:
        """The tensors of all ranks of ``group``, contiguous and of one shape, concatenated along
        the first dim. Not waited for; headers are not compared.
        """
        found: Tensor = self.issue(
            _ops.all_gather_into_tensor,
            to_wire_dtype(tensor),
            group.size(),
            group.group_name,
        )
        return from_wire_dtype(found, tensor)

    def start_gather(
        self, tensor: Tensor, group: ProcessGroup, room: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """``all_gather`` that may run concurrently with other collectives; the returned function
        waits for the tensors. A backend may write them to ``room``, of which ``tensor`` may be its
        own part.
        """
        return partial(self.wait, self.all_gather(tensor, group))

    def wait(self, tensor: Tensor) -> Tensor:
        """``tensor``, of ``all_to_all`` or ``all_gather`` or a view of it, once it has arrived."""
        found: Tensor = _ops.wait_tensor(tensor)
        return found

    def begin_rounds(self, group: ProcessGroup, nbytes: int, *, inline: bool) -> None:
        """Compare headers before the first ``start_round``, or in the rounds. ``nbytes`` bounds
        every message, and is equal on ranks with equal headers. ``inline``: the rounds are those of
        ``halving_schedule`` over one axis.
        """
        self.compare()

    def start_round(
        self, messages: Sequence[Message], group: ProcessGroup, device: torch.device
    ) -> Callable[[], None]:
        """Exchange messages with some ranks of ``group``, in one order for each pair. All ranks
        take part in each round, which is one all-to-all. NCCL sends only what is not empty, as one
        group. The returned function waits, and writes each message to its memory.
        """
        splits = [[0] * group.size(), [0] * group.size()]
        ordered = sorted(messages, key=lambda one: one.peer)
        for sends, tensor, peer in ordered:
            splits[sends][peer] += tensor.numel()
        into, out = splits
        parts = [tensor for sends, tensor, _ in ordered if sends]
        message = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
        issued = self.all_to_all(message, into, out, group)

        def finish() -> None:
            received, start = self.wait(issued), 0
            for sends, tensor, _ in ordered:
                if not sends:
                    tensor.copy_(received[start : start + tensor.numel()])
                    start += tensor.numel()

        return finish

    def end_rounds(self, *, gathered: bool) -> None:
        """Complete a comparison that ``begin_rounds`` has left to the rounds. ``gathered``: the
        rounds back have been done.
        """

    def checked(self, tensor: Tensor) -> Tensor:
        """The result ``tensor``; filled with invalid numbers where headers are compared later."""
        return tensor


def to_wire_dtype(tensor: Tensor) -> Tensor:
    """A view of ``tensor`` in a dtype that backends send: gloo and NCCL have no int16."""
    return tensor.view(torch.float16) if tensor.dtype is torch.int16 else tensor


def from_wire_dtype(received: Tensor, tensor: Tensor) -> Tensor:
    return received if received.dtype is tensor.dtype else received.view(tensor.dtype)


def split_equally(tensor: Tensor, count: int) -> Tensor:
    """``tensor`` as ``count`` rows of one width: flat, contiguous, padded with zeros."""
    flat = tensor.contiguous().view(-1)
    width = -(-flat.numel() // count)
    if width * count == flat.numel():
        return flat.view(count, width)
    padded = flat.new_zeros(width * count)
    padded[: flat.numel()] = flat
    return padded.view(count, width)


def fold(leaves: Sequence[Tensor], step: Step) -> Tensor:
    """The contract of ``step`` over the summands of all ranks, or over one part of each."""
    assert step.op is not None
    assert step.contract is not None
    return reduce_leaves(leaves, step.op, step.sizes, step.contract, divisor=step.divisor)


def check_data(tensor: Tensor, name: str = "the tensor") -> None:
    """Refuse a tensor without elements of its own, before its ranks exchange anything."""
    # A fake tensor, which torch traces, has the device of the real one.
    if tensor.device.type == "meta":
        raise ContractTypeError(
            f"{name} is on the meta device, so it has no elements to send; call "
            "to_empty(device=...) and set its values first"
        )


def is_traced(tensor: Tensor) -> bool:
    """Whether nothing is sent now: torch traces, a CUDA graph captures, or ranks are simulated."""
    return type(tensor) not in _PLAIN or is_compiled() or is_captured(tensor)


def is_compiled() -> bool:
    """Whether this thread traces. Torch's flag is the process's: a reduction may run on another
    thread while the caller's compiles what comes next.
    """
    if torch.compiler.is_compiling():
        here = torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is not None
        return here or get_proxy_mode() is not None
    return get_proxy_mode() is not None


def is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def wait_for_group(work: Work, group: ProcessGroup) -> None:
    """Wait for all ranks of ``group``; as long as they allow, or until it is aborted."""
    # The end of a slice is an error like that of the collective, which may end just then: only a
    # wait for a completed collective shows its result.
    while THIS_THREAD.abort is not None and not work.is_completed():
        try:
            work.wait(WAIT_SLICE)
        except RuntimeError:
            check_aborted(f"ranks of group {group.group_name}")
    work.wait()


def start_messages(
    messages: Iterable[Message], group: ProcessGroup, log: CollectiveLog
) -> Callable[[], None]:
    """Send and receive ``messages`` over gloo, at once; the receiver may have more room than is
    sent. The returned function waits for them until the group's timeout, or until the group is
    aborted.
    """
    works = []
    for sends, tensor, peer in sorted(messages, key=lambda one: one.sends):
        call = group.send if sends else group.recv
        works.append(log.issue(call, [tensor], peer, _TAG))
    return lambda: _wait_for_peers(works, group)


def _wait_for_peers(works: Sequence[Work], group: ProcessGroup) -> None:
    # A wait that ends early breaks gloo's connections. So another thread waits where this one may
    # have to give up.
    if THIS_THREAD.abort is None:
        failure = _failure(works, group)
        if failure is not None:
            raise failure
        return
    ended: list[RuntimeError | None] = []
    waiter = threading.Thread(target=lambda: ended.append(_failure(works, group)), daemon=True)
    waiter.start()
    while not ended:
        waiter.join(WAIT_SLICE.total_seconds())
        if not ended:
            check_aborted(f"ranks of group {group.group_name}")
    if ended[0] is not None:
        raise ended[0]


def _failure(works: Sequence[Work], group: ProcessGroup) -> RuntimeError | None:
    """Wait for all, also if one has failed: the others still use their memory."""
    # Gloo knows no later timeout than the one with which the group was created.
    limit, found = timedelta(seconds=default_timeout("cpu", group)), None
    for work in works:
        try:
            work.wait(limit)
        except RuntimeError as error:
            found = found or error
    return found
