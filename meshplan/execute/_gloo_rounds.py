"""Headers that are compared in messages between pairs of ranks over gloo.

In the rounds of ``halving_schedule``, forth and back, headers of W ranks are compared with 2 log2 W
messages of each rank. A rank compares each header with its own, and passes on that it has found a
difference. Every rank contributes to every result, so the owners know after the rounds forth, and
all ranks after the rounds back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from meshplan.execute._header import HEADER_BYTES, HEADER_WORDS, Header
from meshplan.execute._provenance import CollectiveLog
from meshplan.execute._wire import Message, start_messages
from meshplan.planner import HalvingRound, halving_schedule

ROUND_BYTES = 32 << 10
"""Bytes of data that a message with a header has room for."""


class HeaderRounds:
    """Compares the headers of all ranks of a gloo group. ``header`` is this rank's, with
    its call.
    """

    def __init__(self, group: ProcessGroup, header: Header, log: CollectiveLog) -> None:
        self._group, self._header, self._log = group, header, log
        self.equal = True  # no difference has been found yet

    def compare(self, *, forth: bool = True) -> None:
        """Exchange headers without data, ``forth`` and back or only back; sets ``equal``."""
        plan = halving_schedule((self._group.size(),), self._group.rank())
        rounds: Sequence[HalvingRound] = plan.gather()
        if forth:
            rounds = (*plan.rounds, *rounds)
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        for one in rounds:
            sends = [Message(True, empty, message.peer) for message in one.sends]
            self.swap(sends + [Message(False, empty, message.peer) for message in one.receives])

    def swap(self, messages: Sequence[Message]) -> None:
        """Exchange ``messages`` of up to ``ROUND_BYTES``, each behind a header. The data is valid
        only if all headers are equal. In place of the rank, a header has whether its sender has
        found no difference.
        """
        words = torch.zeros(HEADER_WORDS, dtype=torch.int64, device="cpu")
        own = (*self._header.words, self.equal)
        words[: len(own)] = torch.tensor(own, dtype=torch.int64, device="cpu")
        head, sent, received = words.view(torch.uint8), [], []
        for one in messages:
            if one.sends:
                sent.append(one._replace(tensor=torch.cat((head, one.tensor))))
            else:
                # As much room on all ranks: gloo ends a process that gets a longer message.
                room = head.new_empty(HEADER_BYTES + ROUND_BYTES)
                received.append((one.tensor, one._replace(tensor=room)))
        start_messages([*sent, *(one for _, one in received)], self._group, self._log)()
        for memory, (_, row, _) in received:
            memory.copy_(row[HEADER_BYTES:][: memory.numel()])
            self.equal = self.equal and torch.equal(row[:HEADER_BYTES], head)
