"""The wire over gloo: every rank's header travels in front of its data, or before it.

All ranks of a reduction see all headers, so that all of them raise one error or none does. In a
hierarchical reduction the second level carries the headers of the first: ranks of different blocks
are compared too, and a rank whose block differs still takes part in the second level, so that no
other rank waits for it.

The first message of each collective has headers in front (``_gloo_channel``). In a group of more
than ``_MOST_AT_ONCE`` ranks they are compared in rounds (``_gloo_rounds``), and collected only if
they differ, for the error.

Large pieces are messages between pairs of ranks. Each rank receives them where the caller wants
them, while gloo's all-gather copies everything twice, and its all-to-all copies the own part. New
memory for what is received costs more time than sends between processes of one host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from meshplan._calls import NO_TICKET
from meshplan.execute._gloo_channel import channel_of, inline_bytes
from meshplan.execute._gloo_rounds import ROUND_BYTES, HeaderRounds
from meshplan.execute._groups import StepGroups
from meshplan.execute._header import RankHeader, mismatch_error
from meshplan.execute._wire import (
    Message,
    Wire,
    from_wire_dtype,
    start_messages,
    to_wire_dtype,
    wait_for_group,
)

# In larger groups headers are compared in rounds.
_MOST_AT_ONCE = 32


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
        large = len(groups.levels) == 1 and groups.flat.size() > _MOST_AT_ONCE
        self._rounds = HeaderRounds(groups.flat, mine[1].at(call), self.log) if large else None
        self._works: dict[int, tuple[Work, ProcessGroup]] = {}

    def in_place(self, nbytes: int, group: ProcessGroup) -> bool:
        ranks = group.size()
        return ranks * nbytes >= self.in_place_bytes and ranks <= self.in_place_ranks

    def start_exchange(
        self,
        parts: Tensor | Sequence[Tensor],
        group: ProcessGroup,
        *,
        last: bool = True,
        room: Sequence[Tensor] | None = None,
    ) -> Callable[[], Sequence[Tensor]]:
        if self._rounds is not None:
            self.compare()
        longest = parts.shape[1] if isinstance(parts, Tensor) else max(p.numel() for p in parts)
        nbytes = longest * parts[0].element_size()
        if not self._compared:
            # Ranks that bring different tensors may choose differently here. Either message has
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
            _, found = channel_of(group, 1).exchange(
                group, self._headers, None, self.log, self.call
            )
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
