"""The first messages over a group of gloo: headers, and data that has the room behind them.

Gloo trusts sizes: a message that is longer than the buffer that waits for it aborts the process,
and one that is shorter leaves the rest of the buffer as it was, without an error. A buffer with
room to spare is safe. So the first message of every collective is an all-to-all whose receive
buffers have the same room on all ranks, whatever their tensors, and whose blocks start with the
headers of the ranks that send them. Data of up to that room travels in the same message; more data
follows in messages of its own, once all headers are known to be equal.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan.execute._header import (
    HEADER_BYTES,
    HEADER_WORDS,
    RANK_WORD,
    Header,
    RankHeader,
)
from meshplan.execute._provenance import CollectiveLog
from meshplan.execute._wire import wait_for_group
from meshplan.record import CALL_WORD

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
    """Where the parts of one kind of message are placed: views of the channel's two buffers."""

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
    expected_calls: Tensor  # its calls
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
    """The channel of ``group`` for so many headers of each rank; made once."""
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
