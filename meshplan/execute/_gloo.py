"""The wire over gloo: every rank's header travels in front of its data, or before it.

All ranks of a reduction see all headers, so that all of them raise one error or none does. In a
hierarchical reduction the second level carries the headers of the first: ranks of different blocks
are compared too, and a rank whose block differs still takes part in the second level, so that no
other rank waits for it.

The first message of each collective has headers in front (``Channel``). In a group of more than
``MOST_AT_ONCE`` ranks they are compared in rounds, and collected only if they differ, for the
error.

Large pieces are messages between pairs of ranks. Each rank receives them where the caller wants
them, while gloo's all-gather copies everything twice, and its all-to-all copies the own part. New
memory for what is received costs more time than sends between processes of one host.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from meshplan._calls import NO_TICKET
from meshplan._torch import backend_of
from meshplan.execute._groups import Part, StepGroups
from meshplan.execute._header import (
    HEADER_BYTES,
    HEADER_WORDS,
    RANK_WORD,
    Header,
    RankHeader,
    mismatch_error,
)
from meshplan.execute._provenance import CollectiveLog
from meshplan.execute._wire import (
    Message,
    Wire,
    from_wire_dtype,
    start_messages,
    to_wire_dtype,
    wait_for_group,
)
from meshplan.planner import HalvingRound, halving_schedule
from meshplan.record import CALL_WORD

# Process groups over gloo: which ones are, and the end of one whose reduction has failed.

# Of messages that no rank sends.
_TAG = 0x6D706D
_known: WeakKeyDictionary[ProcessGroup, dict[str, bool]] = WeakKeyDictionary()


def is_gloo(device_type: str, groups: StepGroups) -> bool:
    """Whether tensors on such a device travel over gloo in ``groups``: those on GPUs as copies in
    the host's memory, because gloo's all-gather into one tensor dies of an address of a GPU
    (pytorch#152645).
    """
    return all(_over_gloo(group, device_type) for group in groups.levels)


def _over_gloo(group: ProcessGroup, device_type: str) -> bool:
    known = _known.setdefault(group, {})
    found = known.get(device_type)
    if found is None:
        try:
            backend = backend_of(group, torch.device(device_type))
            found = group.size() > 1 and backend.name() == "gloo"
        except (AttributeError, RuntimeError):
            # A group that is written in Python has no backend.
            found = False
        known[device_type] = found
    return found


def break_connections(groups: StepGroups) -> None:
    """Abort the gloo groups of a failed reduction: all their waits fail, on all ranks. A rank that
    has failed sends nothing more. Ranks that wait for it, without a connection to the missing rank,
    would otherwise only fail at the timeout of the group.
    """
    memory = torch.empty(1, dtype=torch.uint8, device="cpu")
    for group in (one for one in groups.all if _over_gloo(one, "cpu")):
        for peer in range(group.size()):
            # A wait that ends early closes the connections to all ranks. It takes one to a rank
            # that is still connected.
            with suppress(RuntimeError):
                if peer != group.rank():
                    group.recv([memory], peer, _TAG).wait(timedelta(milliseconds=1))


# The first messages over a group of gloo: headers, and data that has the room behind them.
#
# Gloo trusts sizes: a message that is longer than the buffer that waits for it aborts the
# process, and one that is shorter leaves the rest of the buffer as it was, without an error. A
# buffer with room to spare is safe. So the first message of every collective is an all-to-all
# whose receive buffers have the same room on all ranks, whatever their tensors, and whose blocks
# start with the headers of the ranks that send them. Data of up to that room travels in the same
# message; more data follows in messages of its own, once all headers are known to be equal.

# Of data, for each rank that sends.
_MOST_BYTES = 128 << 10
_ALL_BYTES = 1 << 20
_LINE = 64
_MAX_LAYOUTS = 64


def inline_bytes(ranks: int) -> int:
    """Bytes of data that the first message of a group of ``ranks`` has room for, for each rank."""
    return min(_MOST_BYTES, _ALL_BYTES // ranks // _LINE * _LINE)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The parts of one kind of message: views of the channel's two buffers."""

    sent: Tensor  # the blocks for all other ranks
    sends: list[int]  # bytes of the block for each rank
    heads: list[Tensor]  # the places of this rank's headers, one in each block
    calls: list[Tensor]  # the places of the call in ``heads``, as few tensors as the blocks allow
    slots: list[Tensor]  # the place of each other rank's part
    # ``slots`` of the ranks below this one as one tensor, where all parts have one length.
    before: Tensor | None
    after: Tensor | None  # the same for the ranks above it
    rows: Tensor  # the headers that came from all other ranks, each with its call and its rank
    found: Tensor  # ``rows`` without the ranks
    leaves: list[Tensor]  # the part that came from each other rank
    expected: Tensor  # ``found`` where nothing differs
    expected_calls: Tensor
    uniform: bool  # whether this rank's own headers are equal


class Channel:
    """The first messages over one process group of gloo, each with the same number of ``headers``
    on every rank. One collective at a time uses it. The returned parts are valid until the next
    one.
    """

    def __init__(self, group: ProcessGroup, headers: int) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))  # global ranks of the group
        self._ranks, self._rank, self._count = group.size(), group.rank(), headers
        self._each = headers * HEADER_BYTES + inline_bytes(self._ranks)
        self._receives = [self._each] * self._ranks
        # Nothing travels to this rank itself.
        self._receives[self._rank] = 0
        # The same on all ranks, whatever their tensors: gloo ends the process that gets a message
        # longer than its buffer, before any header can be compared.
        size = (self._ranks - 1) * self._each
        # Tensors that are created in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._sent = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._received = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._layouts: OrderedDict[object, _Layout] = OrderedDict()
        self._written: _Layout | None = None
        self._options = dist.AllToAllOptions()

    def exchange(
        self,
        group: ProcessGroup,
        headers: tuple[RankHeader, ...],
        parts: Tensor | Sequence[Tensor] | None,
        log: CollectiveLog,
        call: int,
    ) -> tuple[list[Tensor], tuple[RankHeader, ...]]:
        """Send ``parts[r]`` and the headers to rank r; ``None``: headers only. Parts are flat, of
        one dtype, at most ``inline_bytes`` each. Returns the parts for this rank in rank order,
        valid only if all headers are equal, and the headers of all ranks in that order, empty if
        all are equal.
        """
        rank = self._rank
        layout = self._layout(headers, parts)
        # A repeated call finds its headers in the buffer, and copies its data only.
        if self._written is not layout:
            rows = _rows(headers)
            for place in layout.heads:
                place.copy_(rows)
            self._written = layout
        # Headers that differ are those of an earlier level, with its call.
        if layout.uniform:
            for place in layout.calls:
                place.fill_(call)
            layout.expected_calls.fill_(call)
        if isinstance(parts, Tensor):
            # Two copies, however many ranks there are.
            if layout.before is not None:
                layout.before.copy_(parts[:rank])
            if layout.after is not None:
                layout.after.copy_(parts[rank + 1 :])
        elif parts is not None:
            others = (part for r, part in enumerate(parts) if r != rank)
            for slot, part in zip(layout.slots, others, strict=True):
                slot.copy_(part)
        work = log.issue(
            group.alltoall_base,
            self._received,
            layout.sent,
            self._receives,
            layout.sends,
            self._options,
        )
        wait_for_group(work, group)
        leaves: list[Tensor] = []
        if parts is not None:
            leaves = [*layout.leaves[:rank], parts[rank], *layout.leaves[rank:]]
        # All headers at once. Which rank differs is worked out only if one does.
        if layout.uniform and torch.equal(layout.found, layout.expected):
            return leaves, ()
        words = layout.rows.flatten(0, 1).tolist()
        others_found = [(row[RANK_WORD], Header(tuple(row[:RANK_WORD]))) for row in words]
        own = [(who, header.at(call)) for who, header in headers]
        below = rank * self._count
        return leaves, (*others_found[:below], *own, *others_found[below:])

    def _layout(
        self,
        headers: tuple[RankHeader, ...],
        parts: Tensor | Sequence[Tensor] | None,
    ) -> _Layout:
        key: object
        if parts is None:
            key = headers
        elif isinstance(parts, Tensor):
            key = headers, parts.dtype, parts.shape[1]
        else:
            key = headers, parts[0].dtype, tuple(part.numel() for part in parts)
        found = self._layouts.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = self._layouts[key] = self._made(headers, parts)
            if len(self._layouts) > _MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        return found

    def _made(
        self,
        headers: tuple[RankHeader, ...],
        parts: Tensor | Sequence[Tensor] | None,
    ) -> _Layout:
        ranks, rank, count = self._ranks, self._rank, self._count
        dtype = torch.uint8 if parts is None else parts[0].dtype
        lengths = [0] * ranks if parts is None else [part.numel() for part in parts]
        head = count * HEADER_BYTES
        # Headers are read as 64-bit numbers: each block starts on a line.
        sends = [
            head + -(-length * dtype.itemsize // _LINE) * _LINE if r != rank else 0
            for r, length in enumerate(lengths)
        ]
        others = [r for r in range(ranks) if r != rank]
        starts = [sum(sends[:r]) for r in others]
        sent = self._sent[: sum(sends)]
        slots = [
            sent[start + head :][: lengths[r] * dtype.itemsize].view(dtype)
            for start, r in zip(starts, others, strict=True)
        ]
        before = after = None
        if isinstance(parts, Tensor):
            rows = sent.view(dtype).view(ranks - 1, -1)[:, head // dtype.itemsize :]
            rows = rows[:, : lengths[rank]]
            before = rows[:rank] if rank > 0 else None
            after = rows[rank:] if rank < ranks - 1 else None
        received = self._received.view(ranks - 1, self._each)
        bytes_of_own = lengths[rank] * dtype.itemsize
        leaves = [row[head:][:bytes_of_own].view(dtype) for row in received.unbind(0)]
        shape = ranks - 1, count, HEADER_WORDS
        rows_found = received[:, :head].view(torch.int64).view(shape)
        heads = [sent[start:][:head].view(torch.int64).view(shape[1:]) for start in starts]
        calls = [one[:, CALL_WORD] for one in heads]
        if len({sends[r] for r in others}) == 1:
            # Blocks of one size: one write for all of them.
            words = sent.view(torch.int64).view(ranks - 1, -1)[:, : count * HEADER_WORDS]
            calls = [words.view(shape)[..., CALL_WORD]]
        expected = _rows(headers)[:, :RANK_WORD].expand(ranks - 1, -1, -1).contiguous()
        return _Layout(
            sent=sent,
            sends=sends,
            heads=heads,
            calls=calls,
            slots=slots,
            before=before,
            after=after,
            rows=rows_found,
            found=rows_found[..., :RANK_WORD],
            leaves=leaves,
            expected=expected,
            expected_calls=expected[..., CALL_WORD],
            uniform=len({header for _, header in headers}) == 1,
        )


_channels: WeakKeyDictionary[ProcessGroup, dict[int, Channel]] = WeakKeyDictionary()
_lock = threading.Lock()


def channel_of(group: ProcessGroup, headers: int) -> Channel:
    with _lock:
        channels = _channels.setdefault(group, {})
        found = channels.get(headers)
        if found is None:
            found = channels[headers] = Channel(group, headers)
        return found


def _rows(headers: Sequence[RankHeader]) -> Tensor:
    padding = (0,) * (HEADER_WORDS - RANK_WORD - 1)
    rows = [(*header.at(0).words, rank, *padding) for rank, header in headers]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


# Headers that are compared in messages between pairs of ranks over gloo.
#
# In the rounds of ``halving_schedule``, forth and back, headers of W ranks are compared with 2
# log2 W messages of each rank. A rank compares each header with its own, and passes on that it
# has found a difference. Every rank contributes to every result, so the owners know after the
# rounds forth, and all ranks after the rounds back.

ROUND_BYTES = 32 << 10
"""Bytes of data that a message with a header has room for."""


# In larger groups headers are compared in rounds.
MOST_AT_ONCE = 32


class GlooWire(Wire):
    """Carries one reduction over gloo; see ``Wire``. If the headers of any two ranks differ, an
    exchange on the last level, ``gather`` and ``compare`` raise SignatureMismatchError on all ranks
    of the reduction.
    """

    # Of the pieces of all ranks. Below, one call for each message costs more than it saves. In
    # larger groups gloo's own all-gather is faster between hosts, a ring that crosses few links. It
    # changes no bit.
    in_place_bytes = 2 << 20
    in_place_ranks = 8

    def __init__(self, groups: StepGroups, mine: RankHeader, call: int = NO_TICKET) -> None:
        super().__init__(call)
        self._groups = groups
        # Those of this rank's block, once they are known.
        self._headers: tuple[RankHeader, ...] = (mine,)
        self._equal = True
        self._compared = self._inline = False
        self._in_rounds = len(groups.levels) == 1 and groups.flat.size() > MOST_AT_ONCE
        self._works: dict[int, tuple[Work, ProcessGroup]] = {}

    def in_place(self, nbytes: int, group: ProcessGroup) -> bool:
        ranks = group.size()
        large = ranks * nbytes >= self.in_place_bytes and ranks <= self.in_place_ranks
        return large or isinstance(group, Part)

    def start_exchange(
        self,
        parts: Tensor | Sequence[Tensor],
        group: ProcessGroup,
        *,
        last: bool = True,
        room: Sequence[Tensor] | None = None,
    ) -> Callable[[], Sequence[Tensor]]:
        if self._in_rounds:
            self.compare()
        longest = parts.shape[1] if isinstance(parts, Tensor) else max(p.numel() for p in parts)
        nbytes = longest * parts[0].element_size()
        if not self._compared:
            # Ranks with different tensors may choose differently here. Either message has
            # headers in front and fits the same buffers, so the difference is found before data is
            # used.
            fits = nbytes <= inline_bytes(group.size())
            leaves = self._meet(group, parts if fits and self._equal else None, last)
            if fits or not self._equal:
                # Of a block whose headers differ no number is used: the last level raises.
                found = leaves or [parts[group.rank()]] * group.size()
                return lambda: found
        if not self.in_place(nbytes, group):
            return super().start_exchange(parts, group)
        own = parts[group.rank()]
        rows = list(own.new_empty(group.size(), own.numel()) if room is None else room)
        swapped = self._swap(parts, rows, group)
        rows[group.rank()] = own

        def finish() -> Sequence[Tensor]:
            swapped()
            return rows

        return finish

    def start_gather(
        self, tensor: Tensor, group: ProcessGroup, room: Tensor | None = None
    ) -> Callable[[], Tensor]:
        if not self.in_place(tensor.nbytes, group):
            return super().start_gather(tensor, group)
        ranks, (length, *rest) = group.size(), tensor.shape
        whole = tensor.new_empty(ranks * length, *rest) if room is None else room
        rows = whole.view(ranks, -1)
        own = rows[group.rank()]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor.view(-1))
        swapped = self._swap([own] * ranks, rows, group)

        def finish() -> Tensor:
            swapped()
            return whole

        return finish

    def _swap(
        self,
        sent: Tensor | Sequence[Tensor],
        received: Tensor | Sequence[Tensor],
        group: ProcessGroup,
    ) -> Callable[[], None]:
        """Send ``sent[r]`` to each other rank r, and receive ``received[r]`` from it."""
        rank, ranks = group.rank(), group.size()
        messages = []
        # In each turn every rank sends to another one.
        for turn in range(1, ranks):
            to, come = (rank + turn) % ranks, (rank - turn) % ranks
            messages.append(Message(True, sent[to].view(torch.uint8), to))
            messages.append(Message(False, received[come].view(torch.uint8), come))
        return self.start_round(messages, group, sent[rank].device)

    def all_gather(self, tensor: Tensor, group: ProcessGroup) -> Tensor:
        # Gloo's two threads write the names of completed collectives to one string, without a lock
        # (torch 2.13). More than 15 characters are allocated, and may be freed while the other one
        # writes: "ALLGATHER_COALESCED", the functional gather. This one is "ALLGATHER".
        sent, ranks = to_wire_dtype(tensor), group.size()
        # Memory of its own, also for nothing: works are found by it.
        out = sent.new_empty(max(ranks * sent.numel(), 1))[: ranks * sent.numel()]
        places = list(out.view(ranks, *sent.shape).unbind(0))
        work = self.issue(dist.all_gather, places, sent, group=group, async_op=True)
        self._works[_memory(out)] = work, group
        return from_wire_dtype(out.view(ranks * sent.shape[0], *sent.shape[1:]), tensor)

    def all_to_all(
        self,
        message: Tensor,
        into: Sequence[int],
        out: Sequence[int],
        group: ProcessGroup,
    ) -> Tensor:
        found, how = (
            message.new_empty(max(sum(into), 1))[: sum(into)],
            (list(into), list(out)),
        )
        work = self.issue(dist.all_to_all_single, found, message, *how, group, async_op=True)
        self._works[_memory(found)] = work, group
        return found

    def wait(self, tensor: Tensor) -> Tensor:
        if (under_way := self._works.pop(_memory(tensor), None)) is not None:
            wait_for_group(*under_way)
        return tensor

    checked = wait

    def begin_rounds(self, group: ProcessGroup, nbytes: int, *, inline: bool) -> None:
        # The rounds of blocks are not those of all ranks.
        rounds = self._in_rounds and not self._compared
        self._inline = rounds and inline and nbytes <= ROUND_BYTES
        if not self._inline:
            self.compare()

    def start_round(
        self,
        messages: Sequence[Message],
        group: ProcessGroup,
        device: torch.device,
    ) -> Callable[[], None]:
        """As in ``Wire``; a rank without messages does nothing."""
        if self._inline:
            return partial(self._swap_behind_headers, messages)
        if isinstance(group, Part):
            messages = [one._replace(peer=group.places[one.peer]) for one in messages]
            group = group.whole
        # Both sides know which messages are empty.
        return start_messages([one for one in messages if one.tensor.numel()], group, self.log)

    def end_rounds(self, *, gathered: bool) -> None:
        if self._inline:
            self._inline = False
            if not gathered:
                self._compare_in_rounds(forth=False)
            self._refuse_difference()

    def _compare_in_rounds(self, *, forth: bool = True) -> None:
        """Exchange headers without data, ``forth`` and back or only back."""
        group = self._groups.flat
        plan = halving_schedule((group.size(),), group.rank())
        rounds: Sequence[HalvingRound] = plan.gather()
        if forth:
            rounds = (*plan.rounds, *rounds)
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        for one in rounds:
            sends = [Message(True, empty, message.peer) for message in one.sends]
            comes = [Message(False, empty, message.peer) for message in one.receives]
            self._swap_behind_headers(sends + comes)

    def _swap_behind_headers(self, messages: Sequence[Message]) -> None:
        """Exchange ``messages`` of up to ``ROUND_BYTES``, each behind a header. The data is valid
        only if all headers are equal. In place of the rank, a header has whether its sender has
        found no difference.
        """
        words = torch.zeros(HEADER_WORDS, dtype=torch.int64, device="cpu")
        own = (*self._headers[0][1].at(self.call).words, self._equal)
        words[: len(own)] = torch.tensor(own, dtype=torch.int64, device="cpu")
        head, sent, received = words.view(torch.uint8), [], []
        for one in messages:
            if one.sends:
                sent.append(one._replace(tensor=torch.cat((head, one.tensor))))
            else:
                # As much room on all ranks: gloo ends a process that gets a longer message.
                room = head.new_empty(HEADER_BYTES + ROUND_BYTES)
                received.append((one.tensor, one._replace(tensor=room)))
        messages = [*sent, *(one for _, one in received)]
        start_messages(messages, self._groups.flat, self.log)()
        for memory, (_, row, _) in received:
            memory.copy_(row[HEADER_BYTES:][: memory.numel()])
            self._equal = self._equal and torch.equal(row[:HEADER_BYTES], head)

    def _refuse_difference(self) -> None:
        if not self._equal:
            group = self._groups.flat
            _, found = channel_of(group, 1).exchange(
                group, self._headers, None, self.log, self.call
            )
            raise mismatch_error(found, self._groups.rank)
        self._compared = True

    def gather(self, tensor: Tensor, group: ProcessGroup) -> Sequence[Tensor]:
        """As in ``Wire``; in one message where it has the room."""
        ranks = group.size()
        if not self._in_rounds and tensor.nbytes <= inline_bytes(ranks):
            return self.exchange(tensor.expand(ranks, -1), group)
        return super().gather(tensor, group)

    def compare(self) -> None:
        if self._compared:
            return
        if self._in_rounds:
            self._compare_in_rounds()
            self._refuse_difference()
            return
        # Each level passes on what it has seen, so the last one compares all ranks of the step.
        *first, last = self._groups.levels
        for group in first:
            self._meet(group, None, False)
        self._meet(last, None, True)
        self._compared = True

    def _meet(
        self,
        group: ProcessGroup,
        parts: Tensor | Sequence[Tensor] | None,
        last: bool,
    ) -> Sequence[Tensor]:
        mine = self._headers
        over = channel_of(group, len(mine))
        leaves, found = over.exchange(group, mine, parts, self.log, self.call)
        self._equal = self._equal and not found
        if last:
            if not self._equal:
                brought = found or mine
                everyone = [(who, header.at(self.call)) for who, header in brought]
                raise mismatch_error(everyone, self._groups.rank)
        else:
            self._headers = found or tuple((rank, mine[0][1]) for rank in over.ranks)
        return leaves


def _memory(tensor: Tensor) -> int:  # Views are waited for by it.
    return tensor.untyped_storage().data_ptr()
