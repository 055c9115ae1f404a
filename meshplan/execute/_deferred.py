"""Headers on devices: compared on the device, without making the host wait.

The headers of all ranks are gathered on the stream, in front of the data. Where they differ, the
result is filled with NaN (or with all ones), and the headers go to memory of the host. The next
reduction on a device, ``meshplan.check`` and a ``Work``'s ``wait`` raise what has arrived there.
What torch traces and what a CUDA graph captures is not compared.

Gathering W headers takes W - 1 steps around a ring. More than ``_MOST_GATHERED`` ranks reduce their
largest and smallest words instead, which the backend does in log W steps. The last word is a digest
of the header and the rank, so its extremes are two ranks with different headers.

NCCL checks no sizes. Ranks that pass different sizes can hang in the collective of the data, which
NCCL's watchdog ends. The headers were gathered before, so that ``meshplan.check`` names the ranks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._calls import NO_TICKET
from meshplan._torch import backend_of
from meshplan._torch import functional_operators as _ops
from meshplan._torch.process_group import end_coalescing, start_coalescing
from meshplan.execute._groups import StepGroups
from meshplan.execute._header import (
    Header,
    RankHeader,
    extremes_error,
    mismatch_error,
    ranked_digest,
)
from meshplan.execute._wire import Message, Wire
from meshplan.kernel import register_check
from meshplan.record import CALL_WORD

# Reductions whose headers the host has not read; far more than a host is ahead of its device.
_MOST = 1024
# More rows take longer than two small reductions.
_MOST_GATHERED = 32


@dataclass(frozen=True, slots=True)
class _PendingHeaders:
    """Headers on their way to the host."""

    mine: RankHeader  # of this process
    # In host memory: words and rank of each header, or the largest and the smallest words.
    rows: Tensor
    gathered: bool  # whether ``rows`` are the headers of each rank
    event: Any  # has passed when ``rows`` have arrived; ``None``: they have


_pending: list[_PendingHeaders] = []
_lock = threading.Lock()


def is_deferred(tensor: Tensor, groups: StepGroups) -> bool:
    """Whether headers of reductions of ``tensor`` are compared on its device."""
    if tensor.device.type == "cpu" or any(pg.size() < 2 for pg in groups.levels):
        return False
    return all(dist.get_backend(pg) != "fake" for pg in groups.levels)


def raise_pending() -> None:
    """Raise SignatureMismatchError if ranks had different headers in an earlier reduction. It
    does not wait for a device: a difference that is still on its way is raised by a later call.
    """
    with _lock:
        while _pending and (_pending[0].event is None or _pending[0].event.query()):
            first = _pending.pop(0)
            brought = [(row[-1], Header(tuple(row[:-1]))) for row in first.rows.tolist()]
            if len({header for _, header in brought}) > 1:
                if first.gathered:
                    raise mismatch_error(brought, first.mine[0])
                raise extremes_error(brought, first.mine)


class DeferredWire(Wire):
    """Carries one reduction on a device; see ``Wire``. Creating it raises SignatureMismatchError
    for earlier reductions, as ``raise_pending`` does.
    """

    def __init__(
        self,
        groups: StepGroups,
        mine: RankHeader,
        device: torch.device,
        call: int = NO_TICKET,
    ) -> None:
        super().__init__(call)
        raise_pending()
        self._groups = groups
        self._header = mine[0], mine[1].at(call)
        self._gathered = math.prod(pg.size() for pg in groups.levels) <= _MOST_GATHERED
        self._mine = _row(mine, self._gathered, device, _current_stream(device)).clone()
        # Scalars travel as arguments of a kernel, so the host does not wait.
        self._mine[0, CALL_WORD].fill_(call)
        if not self._gathered:
            digest = ranked_digest(self._header)
            self._mine[0, -1].fill_(digest)
            self._mine[1, CALL_WORD].fill_(~call)
            self._mine[1, -1].fill_(~digest)
        self._rows: Tensor | None = None

    def start_exchange(
        self,
        parts: Tensor | Sequence[Tensor],
        group: ProcessGroup,
        *,
        last: bool = True,
        room: Sequence[Tensor] | None = None,
    ) -> Callable[[], Sequence[Tensor]]:
        self.compare()
        return super().start_exchange(parts, group, last=last, room=room)

    def compare(self) -> None:
        """Gather the headers of all ranks, or reduce them, once."""
        if self._rows is not None:
            return
        rows = self._mine
        for group in self._groups.levels:
            if self._gathered:
                rows = self.all_gather(rows, group)
            else:
                rows = self.issue(_ops.all_reduce, rows, "max", group.group_name)
            rows = _ops.wait_tensor(rows)
        self._rows = rows if self._gathered else torch.stack((rows[0], ~rows[1]))

    def start_round(
        self,
        messages: Sequence[Message],
        group: ProcessGroup,
        device: torch.device,
    ) -> Callable[[], None]:
        """As in ``Wire``; a rank without messages does nothing. The arguments of an all-to-all have
        a number for each rank, so issuing one takes time for all of them. NCCL receives the same:
        one message for each pair and direction.
        """
        if not backend_of(group, device).supports_coalescing:
            return super().start_round(messages, group, device)
        parts: dict[tuple[bool, int], list[Tensor]] = {}
        for sends, tensor, peer in messages:
            if tensor.numel():
                parts.setdefault((sends, peer), []).append(tensor)
        if not parts:
            return lambda: None
        whole = {key: _message(key[0], tensors) for key, tensors in parts.items()}
        start_coalescing(group, device)
        for (sends, peer), message in whole.items():
            self.issue(group.send if sends else group.recv, [message], peer, 0)
        work = end_coalescing(group, device)
        assert work is not None

        def finish() -> None:
            work.wait()
            for (sends, peer), message in whole.items():
                tensors = parts[sends, peer]
                if not sends and len(tensors) > 1:
                    came = torch.split(message, [tensor.numel() for tensor in tensors])
                    for tensor, part in zip(tensors, came, strict=True):
                        tensor.copy_(part)

        return finish

    def checked(self, result: Tensor) -> Tensor:
        """``result``, or what no one takes for one if headers differ; waited for on the stream."""
        rows, result = self._rows, _ops.wait_tensor(result)
        assert rows is not None
        differs = (rows[:, :-1] != self._mine[:1, :-1]).any()
        wrong = float("nan") if result.dtype.is_floating_point else -1
        if result.dtype in (
            torch.bool,
            torch.uint8,
            torch.uint16,
            torch.uint32,
            torch.uint64,
        ):
            wrong = 1 if result.dtype is torch.bool else torch.iinfo(result.dtype).max
        result = result.masked_fill(differs, wrong)
        _note(self._header, rows, self._gathered)
        return result


def _message(sends: bool, tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    if sends:
        return torch.cat(list(tensors))
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))


def _note(mine: RankHeader, rows: Tensor, gathered: bool) -> None:
    event = None
    if rows.device.type != "cpu":
        found = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
        found.copy_(rows, non_blocking=True)
        event = torch.Event(rows.device)
        event.record(_current_stream(rows.device))
        rows = found
    with _lock:
        _pending.append(_PendingHeaders(mine, rows, gathered, event))
        del _pending[:-_MOST]


def _current_stream(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


# By stream: on another one, the copy would not be ordered before its use.
@lru_cache(maxsize=1024)
def _row(mine: RankHeader, gathered: bool, device: torch.device, stream: Any) -> Tensor:
    rank, header = mine
    with torch.inference_mode(False):
        words = [[*header.at(NO_TICKET).words, rank]]
        if not gathered:
            # The largest complement is that of the smallest word.
            words.append([~word for word in words[0]])
        row = torch.tensor(words, dtype=torch.int64, pin_memory=device.type != "cpu")
        # From pinned memory: else the host would wait for the stream.
        return row.to(device, non_blocking=True)


register_check(raise_pending)
