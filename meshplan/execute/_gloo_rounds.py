"""Messages between pairs of ranks over gloo, and headers that are compared in such messages.

In the rounds of ``halving_schedule``, forth and back, headers of W ranks are compared with 2 log2 W
messages of each rank. A rank compares each header with its own, and passes on that it has found a
difference. Every rank contributes to every result, so the owners know after the rounds forth, and
all ranks after the rounds back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, Work

from meshplan._aborts import THIS_THREAD, check_aborted
from meshplan.execute._header import HEADER_BYTES, Header
from meshplan.execute._provenance import CollectiveLog
from meshplan.execute._wire import WAIT_SLICE, Message
from meshplan.flatten import default_timeout
from meshplan.planner import HalvingRound, halving_schedule

__all__ = ["ROUND_BYTES", "HeaderRounds", "start_messages"]

ROUND_BYTES = 32 << 10
"""Bytes of data that a message with a header has room for."""
# Messages of the program over the same group have other tags.
_TAG = 0x6D706C


class HeaderRounds:
    """Compares the headers of all ranks of a group.

    Args:
        group: over gloo.
        header: this rank's.
        log: issues the messages.

    Attributes:
        equal: whether no difference has been found yet.
    """

    def __init__(self, group: ProcessGroup, header: Header, log: CollectiveLog) -> None:
        self._group, self._header, self._log = group, header, log
        self.equal = True

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
        """Exchange ``messages`` of up to ``ROUND_BYTES``, each behind a header.

        The data is valid only if all headers are equal. The last word of a header is whether its
        sender has found no difference.
        """
        words = torch.tensor([*self._header.words, self.equal], dtype=torch.int64, device="cpu")
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


def start_messages(
    messages: Iterable[Message], group: ProcessGroup, log: CollectiveLog
) -> Callable[[], None]:
    """Send and receive ``messages``, at once.

    Args:
        messages: with as many bytes on both sides, or with more room where they are received.
        group: over gloo.
        log: issues them.

    Returns:
        Waits for them, as long as the group allows, or until it is aborted.
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
