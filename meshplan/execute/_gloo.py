"""The wire over gloo: every rank's header travels in front of its data, or before it.

All ranks of a reduction see all headers, so that all of them raise one error or none does. In a
hierarchical reduction the second level carries the headers of the first: ranks of different blocks
are compared too, and a rank whose block differs still takes part in the second level, so that no
other rank waits for it.

Gloo trusts sizes: a message that is longer than the buffer that waits for it aborts the process,
and one that is shorter leaves the rest of the buffer as it was, without an error. A buffer with
room to spare is safe. So the first message of every collective is an all-to-all whose receive
buffers have the same room on all ranks, whatever their tensors, and whose blocks start with the
headers of the ranks that send them. Data of up to that room travels in the same message; more data
follows in messages of its own, once all headers are known to be equal.

In a group of more than ``_MOST_AT_ONCE`` ranks headers are compared in rounds (``_gloo_rounds``).
The all-to-all then collects the headers only if they differ, for the error.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from meshplan.execute._gloo_rounds import ROUND_BYTES, HeaderRounds, start_messages
from meshplan.execute._groups import StepGroups
from meshplan.execute._header import HEADER_BYTES, Header, RankHeader, mismatch_error
from meshplan.execute._provenance import CollectiveLog
from meshplan.execute._wire import Message, Wire, from_wire_dtype, to_wire_dtype, wait_for_group

__all__ = ["Channel", "GlooWire", "inline_bytes"]

# Of data, for each rank that sends. A slice of 128 KiB or more goes in place anyway.
_MOST_BYTES = 128 << 10
_ALL_BYTES = 1 << 20
_LINE = 64
# In larger groups headers are compared in rounds.
_MOST_AT_ONCE = 32
_MAX_LAYOUTS = 64


def inline_bytes(ranks: int) -> int:
    """Bytes of data that the first message of a group of ``ranks`` has room for, for each rank."""
    return min(_MOST_BYTES, _ALL_BYTES // ranks // _LINE * _LINE)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where everything of one kind of message is; views of the channel's two buffers.

    Attributes:
        sent: the blocks for all other ranks.
        sends: bytes of the block for each rank.
        heads: the places of this rank's headers, one in each block.
        slots: the place of each other rank's part.
        before, after: the same, as one tensor for the ranks below this one and those above it,
            where all parts have one length.
        rows: the headers that came from all other ranks; whose each is, is its last word.
        found: the same without the last words.
        leaves: the part that came from each other rank.
        expected: ``found`` where nothing differs.
        uniform: whether this rank's own headers are equal.
    """

    sent: Tensor
    sends: list[int]
    heads: list[Tensor]
    slots: list[Tensor]
    before: Tensor | None
    after: Tensor | None
    rows: Tensor
    found: Tensor
    leaves: list[Tensor]
    expected: Tensor
    uniform: bool


class Channel:
    """The first messages over one process group of gloo.

    One collective at a time uses it. The returned parts are valid until the next one.

    Args:
        group: of several ranks, this one among them.
        headers: that each rank sends; the same number on every rank.

    Attributes:
        ranks: global ranks of the group.
    """

    def __init__(self, group: ProcessGroup, headers: int) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._ranks, self._rank, self._count = group.size(), group.rank(), headers
        self._each = headers * HEADER_BYTES + inline_bytes(self._ranks)
        self._receives = [self._each] * self._ranks
        # Nothing travels to this rank itself.
        self._receives[self._rank] = 0
        # The same on all ranks, whatever they bring: gloo ends the process that gets a message
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
    ) -> tuple[list[Tensor], tuple[RankHeader, ...]]:
        """Send ``parts[r]`` and the headers to rank r; receive the part of this rank from each.

        Args:
            group: the channel's.
            headers: this rank's own, or those that it passes on; so many as the channel is for.
            parts: one for each rank, flat, without gradients, of one dtype, none above
                ``inline_bytes``; the rows of a tensor, or a list. ``None``: only headers are sent.
            log: issues the collective.

        Returns:
            The parts for this rank from all ranks, in the order of the ranks; they are valid only
            if all headers are equal. And the headers of all ranks in that order; empty if all are
            equal.
        """
        rank = self._rank
        layout = self._layout(headers, parts)
        # A repeated call finds its headers in the buffer, and copies its data only.
        if self._written is not layout:
            rows = _rows(headers)
            for place in layout.heads:
                place.copy_(rows)
            self._written = layout
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
        others_found = [(row[-1], Header(tuple(row[:-1]))) for row in words]
        below = rank * self._count
        return leaves, (*others_found[:below], *headers, *others_found[below:])

    def _layout(
        self, headers: tuple[RankHeader, ...], parts: Tensor | Sequence[Tensor] | None
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
        self, headers: tuple[RankHeader, ...], parts: Tensor | Sequence[Tensor] | None
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
        shape = ranks - 1, count, HEADER_BYTES // 8
        rows_found = received[:, :head].view(torch.int64).view(shape)
        return _Layout(
            sent=sent,
            sends=sends,
            heads=[sent[start:][:head].view(torch.int64).view(shape[1:]) for start in starts],
            slots=slots,
            before=before,
            after=after,
            rows=rows_found,
            found=rows_found[..., :-1],
            leaves=leaves,
            expected=_rows(headers)[:, :-1].expand(ranks - 1, -1, -1).contiguous(),
            uniform=len({header for _, header in headers}) == 1,
        )


class GlooWire(Wire):
    """Carries one reduction; see ``Wire``.

    Args:
        groups: of the step, over gloo.
        mine: this rank and its header.

    Raises:
        SignatureMismatchError: by an exchange on the last level, ``gather`` and ``compare``, on
            all ranks of the reduction, if the headers of any two of them differ.
    """

    in_place = True

    def __init__(self, groups: StepGroups, mine: RankHeader) -> None:
        super().__init__()
        self._groups = groups
        # Those of this rank's block, once they are known.
        self._headers: tuple[RankHeader, ...] = (mine,)
        self._equal = True
        self._compared = self._inline = False
        large = len(groups.levels) == 1 and groups.flat.size() > _MOST_AT_ONCE
        self._rounds = HeaderRounds(groups.flat, mine[1], self.log) if large else None
        self._works: dict[int, tuple[Work, ProcessGroup]] = {}

    def start_exchange(
        self, parts: Tensor | Sequence[Tensor], group: ProcessGroup, *, last: bool = True
    ) -> Callable[[], Sequence[Tensor]]:
        if self._rounds is not None:
            self.compare()
        if self._compared:
            return super().start_exchange(parts, group)
        longest = parts.shape[1] if isinstance(parts, Tensor) else max(p.numel() for p in parts)
        # Ranks that bring different tensors may choose differently here. Either message has headers
        # in front and fits the same buffers, so the difference is found before data is used.
        fits = longest * parts[0].element_size() <= inline_bytes(group.size())
        leaves = self._meet(group, parts if fits and self._equal else None, last)
        if not fits and self._equal:
            return super().start_exchange(parts, group)
        # Of a block whose headers differ no number is used: the last level raises.
        found = leaves or [parts[group.rank()]] * group.size()
        return lambda: found

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
        self, message: Tensor, into: Sequence[int], out: Sequence[int], group: ProcessGroup
    ) -> Tensor:
        found, how = message.new_empty(max(sum(into), 1))[: sum(into)], (list(into), list(out))
        work = self.issue(dist.all_to_all_single, found, message, *how, group, async_op=True)
        self._works[_memory(found)] = work, group
        return found

    def wait(self, tensor: Tensor) -> Tensor:
        if (under_way := self._works.pop(_memory(tensor), None)) is not None:
            wait_for_group(*under_way)
        return tensor

    def checked(self, result: Tensor) -> Tensor:
        return self.wait(result)

    def begin_rounds(self, group: ProcessGroup, nbytes: int, *, inline: bool) -> None:
        self._inline = self._rounds is not None and inline and nbytes <= ROUND_BYTES
        if not self._inline:
            self.compare()

    def start_round(
        self, messages: Sequence[Message], group: ProcessGroup, device: torch.device
    ) -> Callable[[], None]:
        """As in ``Wire``; a rank without messages does nothing."""
        if self._inline:
            assert self._rounds is not None
            return partial(self._rounds.swap, messages)
        # Both sides know which messages are empty.
        return start_messages([one for one in messages if one.tensor.numel()], group, self.log)

    def end_rounds(self, *, gathered: bool) -> None:
        if self._inline:
            assert self._rounds is not None
            self._inline = False
            if not gathered:
                self._rounds.compare(forth=False)
            self._refuse_difference()

    def _refuse_difference(self) -> None:
        assert self._rounds is not None
        if not self._rounds.equal:
            group = self._groups.flat
            _, found = _channel(group, 1).exchange(group, self._headers, None, self.log)
            raise mismatch_error(found, self._groups.rank)
        self._compared = True

    def gather(self, tensor: Tensor, group: ProcessGroup) -> Sequence[Tensor]:
        """As in ``Wire``; in one message where it has the room."""
        ranks = group.size()
        if self._rounds is None and tensor.nbytes <= inline_bytes(ranks):
            return self.exchange(tensor.expand(ranks, -1), group)
        return super().gather(tensor, group)

    def compare(self) -> None:
        if self._compared:
            return
        if self._rounds is not None:
            self._rounds.compare()
            self._refuse_difference()
            return
        # Each level passes on what it has seen, so the last one compares all ranks of the step.
        *first, last = self._groups.levels
        for group in first:
            self._meet(group, None, False)
        self._meet(last, None, True)
        self._compared = True

    def _meet(
        self, group: ProcessGroup, parts: Tensor | Sequence[Tensor] | None, last: bool
    ) -> Sequence[Tensor]:
        mine = self._headers
        over = _channel(group, len(mine))
        leaves, found = over.exchange(group, mine, parts, self.log)
        self._equal = self._equal and not found
        if last:
            if not self._equal:
                raise mismatch_error(found or mine, self._groups.rank)
        else:
            self._headers = found or tuple((rank, mine[0][1]) for rank in over.ranks)
        return leaves


_channels: WeakKeyDictionary[ProcessGroup, dict[int, Channel]] = WeakKeyDictionary()
_lock = threading.Lock()


def _channel(group: ProcessGroup, headers: int) -> Channel:
    """The channel of ``group`` for so many headers of each rank; made once."""
    with _lock:
        channels = _channels.setdefault(group, {})
        found = channels.get(headers)
        if found is None:
            found = channels[headers] = Channel(group, headers)
        return found


def _rows(headers: Sequence[RankHeader]) -> Tensor:
    rows = [(*header.words, rank) for rank, header in headers]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _memory(tensor: Tensor) -> int:  # Views are waited for by it.
    return tensor.untyped_storage().data_ptr()
