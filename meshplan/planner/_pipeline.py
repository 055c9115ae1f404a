"""The chunks of a hierarchical reduction, so that its levels overlap.

While one chunk travels between blocks, the next one travels inside them. C chunks hide all but
1 / C of the time inside blocks, and each adds one start of the messages between them. The sum is
smallest for C = sqrt(time inside / cost of a start), whatever the time between blocks is. Shorter
chunks at both ends hide a part of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from meshplan.planner._cost import Cost
from meshplan.topology import Link, Links

LinkName = Literal["domain", "node", "network"]

# On a CPU a chunk costs process time too, which the links do not show: small tensors have one.
MIN_UNIT = 1 << 20
MAX_CHUNKS = 32
"""Of one reduction. Memory and messages are bounded by it."""
# From so many chunks on, shorter ones at the ends save time by the model.
MIN_RAMP = 12


def chunk_unit(links: Links, domain: int, node: int, start: float) -> int:
    """The bytes whose way through a block of ``domain`` and ``node`` peers takes as long as
    ``start``, the seconds for which a rank starts the messages of one more chunk between blocks: at
    least ``MIN_UNIT``, for `count_chunks`.
    """
    ranks = 1 + domain + node
    # To the owner of each slice and back.
    inside = 2 / ranks * (domain / links.domain.bandwidth + node / links.node.bandwidth)
    return max(MIN_UNIT, round(start / inside)) if inside > 0 else 0


def count_chunks(nbytes: int, unit: int) -> int:
    """How many chunks a summand of ``nbytes`` is sent in; from facts that all ranks share. ``unit``
    is that of `chunk_unit`; 0: one chunk.
    """
    if not unit:
        return 1
    return max(1, min(MAX_CHUNKS, round(math.sqrt(nbytes / unit))))


def weigh_chunks(count: int) -> list[int]:
    """The proportions of so many chunks: the longest in the middle, half of it at the ends."""
    # Until the first chunk has come through its block, nothing travels between blocks, and then
    # only the first rounds of few chunks do; at the end it is the same. Few chunks are equal: of
    # them, a longer one in the middle costs more.
    if count < MIN_RAMP:
        return [1] * count
    return [count // 2 + min(place, count - 1 - place) for place in range(count)]


def cut_chunks(elements: int, count: int, ranks: int) -> list[int]:
    """The lengths of at most ``count`` chunks, of whole slices for each of ``ranks`` except for the
    last.
    """
    if count == 1:
        return [elements]
    slices, weights = -(-elements // ranks), weigh_chunks(count)
    total = sum(weights)
    ends = [min(-(-slices * end // total) * ranks, elements) for end in accumulate(weights)]
    return [end - start for start, end in pairwise((0, *ends)) if end > start] or [0]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a chunk, of the ranks of a block or between blocks."""

    group: Literal["inside", "between"]
    cost: Cost


@dataclass(frozen=True, slots=True)
class Round:
    """A round of halving of a chunk, for each of the ranks that stand for all."""

    # For each rank, the class of link and the bytes of its messages.
    sends: tuple[tuple[tuple[LinkName, int], ...], ...]
    # For each rank, from which of them its messages are, and the number of each among those of its
    # sender.
    receives: tuple[tuple[tuple[int, int], ...], ...]


Stage = Collective | Round


def predict_turns(links: Links, chunks: Sequence[Sequence[Stage]]) -> float:
    """Seconds of chunks, each of which goes through as many stages."""
    # In each turn one more chunk starts, the batch of all rounds is sent, and every chunk but the
    # new one waits for what it has under way, and goes on. As in LogGP (Alexandrov et al., 1995), a
    # rank sends the bytes of one message after the other through the port of a class of links, and
    # receives them so; each arrives a latency after it has left.
    first = chunks[0]
    clocks = _Clocks(links, max(len(one.sends) if isinstance(one, Round) else 1 for one in first))
    waiting = iter(chunks)
    live = list[tuple[Sequence[Stage], int, list[float]]]()  # its stages, the one it is in, its end
    while True:
        stages = next(waiting, None)
        fresh = [] if stages is None else [(stages, 0, clocks.issue(stages[0]))]
        batch = [one for one in (stages[at] for stages, at, _ in live) if isinstance(one, Round)]
        if batch:
            clocks.exchange(batch)
        older = []
        for following, at, ends in live:
            clocks.wait(ends)
            if at + 1 < len(following):
                older.append((following, at + 1, clocks.issue(following[at + 1])))
        live = fresh + older
        if not live and stages is None:
            break
    return max(clocks.now)


class _Clocks:
    """When each rank goes on, and its groups and ports are free."""

    def __init__(self, links: Links, ranks: int) -> None:
        self._links = links
        self.now = [0.0] * ranks
        self._free = {"inside": [0.0] * ranks, "between": [0.0] * ranks}
        self._out: list[dict[LinkName, float]] = [{} for _ in range(ranks)]
        self._in: list[dict[LinkName, float]] = [{} for _ in range(ranks)]

    def issue(self, stage: Stage) -> list[float]:
        """Start a stage, and return when it ends; a round starts in the next batch."""
        if isinstance(stage, Round):
            return self.now
        starts = map(max, self._free[stage.group], self.now)
        ends = [start + stage.cost.nanoseconds / 1e9 for start in starts]
        self._free[stage.group] = ends
        return ends

    def wait(self, ends: Sequence[float]) -> None:
        """Let each rank wait until ``ends``."""
        self.now = [*map(max, self.now, ends)]

    def exchange(self, batch: Sequence[Round]) -> None:
        """Send all messages of a batch, and wait for them."""
        sent: list[list[list[tuple[float, LinkName, float]]]] = []
        self.wait(self._free["between"])
        for rank, before in enumerate(self.now):
            free = self._out[rank]
            start = before + self._links.launch + self._links.batch
            self.now[rank] = start
            mine = []
            for one in batch:
                messages = []
                for name, nbytes in one.sends[rank]:
                    link: Link = getattr(self._links, name)
                    taken = nbytes / link.bandwidth
                    free[name] = max(start, free.get(name, 0.0)) + taken
                    messages.append((free[name] + link.latency, name, taken))
                    self.now[rank] = max(self.now[rank], messages[-1][0])
                mine.append(messages)
            sent.append(mine)
        for rank, free in enumerate(self._in):
            came = [
                sent[sender][number][message]
                for number, one in enumerate(batch)
                for sender, message in one.receives[rank]
            ]
            for arrival, name, taken in sorted(came):
                free[name] = max(arrival, free.get(name, 0.0) + taken)
                self.now[rank] = max(self.now[rank], free[name])
        self._free["between"] = self.now
