"""The messages of recursive halving: a reduction in log2 of the ranks, in the order of the tree.

The tree of an axis of n ranks is a chain: n is a sum of powers of two, the tree is the first block
of 2^a ranks, plus (the second block, plus (the third ...)). Inside a block, round t pairs ranks
whose positions differ in bit t - 1. Both hold the sum of 2^(t-1) ranks over one interval. Each
keeps a half, sends the other, and adds what it received: exactly the nodes of the tree. After a
rounds each rank of the block holds its sum over one interval in 2^a. An outer axis continues with
these intervals, in groups of ranks with equal inner positions.

A later block is smaller, and has its sum b < a rounds after the start. In round b + 1 it sends the
sum, as a *tail*, to the first ranks of the block before it, which pass their part on inside the
messages of later rounds. After round a all ranks of the block hold their interval of the tail, and
add it. So no rank has all others as peers, and a tail costs no round.

Three ranks, or three blocks of 2^a, have one round instead, with as many messages: each rank sends
each other one a third, and adds what both sent. Then all three continue with a third.

The gather of the results is the same messages in reverse. Only ranks of first blocks on all axes
own an interval; all other ranks send early and receive late.

A rank sends at most ``2 * ceil(log2(ranks))`` messages in groups of a power of two, and at most
``4 * ceil(log2(ranks))`` otherwise. Of a summand of S bytes in float32 it sends below 2 S in groups
of a power of two, at most 2.13 S in others, and 2.25 S on meshes of up to 72 ranks. The mean over
the ranks is 2.01 S at most, and 2.03 S on meshes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

Summand = Literal["", "leaf", "partial"]
"""None, the summand of one rank, or the sum of several."""

# A tail reaches so many ranks at once that each gets a sixteenth of the message or less: each of
# these ranks passes its part on, and returns it. Fewer messages would cost more bytes.
_TAIL_BITS = 4


class HalvingMessage(NamedTuple):
    peer: int  # position of the other rank in the group
    start: int  # start and stop of the interval, in parts of the summand
    stop: int
    sum: Summand  # the kind of the sender's sum over the interval, which the message starts with
    tail: Summand = ""  # the kind of the sender's tail over the interval, behind the sum
    # Whether the sum becomes the receiver's tail, and no operand of an addition yet.
    is_tail: bool = False


class HalvingRound(NamedTuple):
    """The messages of one rank in one round; all are under way at once."""

    sends: tuple[HalvingMessage, ...]  # halves or thirds of sums, and tails
    receives: tuple[HalvingMessage, ...]
    start: int  # start and stop of the parts that this rank keeps of its sum
    stop: int
    place: int = 0  # place of its sum among the operands, in the order of their ranks
    closes: bool = False  # whether it adds the tail, as the right operand, after this round

    def placed(self, base: int, stride: int) -> HalvingRound:
        """The round of one axis, in positions of the group: ``base + peer * stride``."""
        sends, receives = (
            tuple(one._replace(peer=base + one.peer * stride) for one in messages)
            for messages in (self.sends, self.receives)
        )
        return self._replace(sends=sends, receives=receives)


class Halving(NamedTuple):
    # Rounds of the reduction, in order. Rounds that follow do not concern this rank.
    rounds: tuple[HalvingRound, ...]
    turns: int  # rounds of all ranks
    parts: int  # intervals in which the owners hold the result
    # The part whose result this rank holds after the rounds; ``None`` if it holds none.
    owned: int | None

    def gather(self) -> tuple[HalvingRound, ...]:
        """The rounds in which every rank gets all parts of the result: the same in reverse."""
        return tuple(
            HalvingRound(one.receives, one.sends, one.start, one.stop)
            for one in reversed(self.rounds)
        )


@lru_cache(maxsize=4096)
def halving_schedule(shape: tuple[int, ...], position: int) -> Halving:
    """The schedule of the rank at ``position`` in a group, row-major over the sizes of the reduced
    axes.
    """
    shape = split_axes(shape)
    turns = sum(1 if size == 3 else size.bit_length() - 1 for size in shape)
    parts = math.prod(len(_list_owners(size)) for size in shape)
    rounds: list[HalvingRound] = []
    owned, stride = (0, parts), 1
    leaf: Summand = "leaf"
    for size in reversed(shape):
        index = position // stride % size
        found, interval = _axis_rounds(size, index, leaf, owned)
        base = position - index * stride
        rounds += [one.placed(base, stride) for one in found]
        if interval is None:
            return Halving(tuple(rounds), turns, parts, None)
        owned, stride = interval, stride * size
        leaf = "partial"
    return Halving(tuple(rounds), turns, parts, owned[0])


def merge_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Fewer axes with the same tree: one of a power of two becomes part of the next one outward."""
    merged = [1]
    for size in reversed(shape):
        if merged[0] & merged[0] - 1:
            merged.insert(0, size)
        else:
            merged[0] *= size
    return tuple(merged)


def find_representatives(
    shape: tuple[int, ...],
) -> tuple[list[int], Callable[[int], int]]:
    """The positions of ranks that stand for all others, in bytes and in time, and the one that
    stands for a position.
    """
    # Ranks of a block do the same at the same time until they get a tail. From then on, those that
    # got the same part of their senders' tails do.
    axes = split_axes(shape)

    def represent(position: int) -> int:
        found, stride, is_first = 0, 1, True
        for size in reversed(axes):
            # A rank outside of first blocks waits for the results of outer axes, up to the last.
            index = position // stride % size if is_first else size - 1
            found += stride * _represent_index(size, index)
            is_first = is_first and index in _first_block(size)
            stride *= size
        return found

    found, stride = [(0, True)], 1
    for size in reversed(axes):
        found = [
            (one + index * stride, is_first and index in _first_block(size))
            for one, is_first in found
            for index in (
                _list_represented(size) if is_first else (_represent_index(size, size - 1),)
            )
        ]
        stride *= size
    return [one for one, _ in found], represent


def share_owners(shape: tuple[int, ...]) -> list[list[int]]:
    """For each part its owner, and the ranks that own no part and whose shards it holds."""
    # Ranks without a part are spread evenly, so that both halves of a message have about one size.
    owners, stride = [0], 1
    for size in reversed(split_axes(shape)):
        owners = [owner + stride * index for owner in owners for index in _list_owners(size)]
        stride *= size
    others = sorted({*range(stride)} - {*owners})
    ends = [len(others) * part // len(owners) for part in range(len(owners) + 1)]
    return [[owners[i], *others[start:end]] for i, (start, end) in enumerate(pairwise(ends))]


def split_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Merged axes, of which one of three blocks of a power of two is two."""
    found: list[int] = []
    for size in merge_axes(shape):
        block = size & -size
        found += [3, block] if size == 3 * block > 3 else [size]
    return tuple(found)


def _list_owners(size: int) -> list[int]:
    if size == 3:
        return [0, 1, 2]
    owners = [0]
    for t in range(size.bit_length() - 1):
        owners = [index for low in owners for index in (low, low | 1 << t)]
    return owners


def _axis_rounds(
    size: int, index: int, leaf: Summand, whole: tuple[int, int]
) -> tuple[list[HalvingRound], tuple[int, int] | None]:
    """The rounds of the rank at ``index`` along one axis, where all ranks have summands of kind
    ``leaf`` over the interval ``whole``, and the interval that this rank owns then. Peers are
    indices too.
    """
    if size == 3:
        return _exchange_thirds(index, leaf, whole)
    powers = [bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
    firsts = [size >> bit + 1 << bit + 1 for bit in powers]
    block = sum(index >= first for first in firsts) - 1
    first, bits = firsts[block], powers[block]
    at, rounds, (start, stop) = index - first, [], whole
    tail: Summand = ""
    tail_bits = tail_reach = bits
    if block + 1 < len(powers):
        tail_bits = powers[block + 1]
        tail_reach = _reach(tail_bits, bits)
        tail = leaf if tail_bits == 0 else "partial"
    for t in range(bits):
        bit = 1 << t
        peer, middle = first + (at ^ bit), (start + stop) // 2
        kept, sent = ((start, middle), (middle, stop))[:: -1 if at & bit else 1]
        own = leaf if t == 0 else "partial"
        # The ranks below ``bit`` have the tail by then, and pass half of it on.
        relays = tail if t >= tail_reach else ""
        sends = HalvingMessage(peer, *sent, own, relays if at < bit else "")
        receives = [HalvingMessage(peer, *kept, own, relays if bit <= at < 2 * bit else "")]
        if tail and t == tail_bits and at < 1 << tail_reach:
            source = firsts[block + 1] + at % (1 << tail_bits)
            receives.append(
                HalvingMessage(source, *_interval(whole, at, tail_reach), tail, is_tail=True)
            )
        start, stop = kept
        closes = bool(tail) and t == bits - 1
        rounds.append(HalvingRound((sends,), tuple(receives), start, stop, at >> t & 1, closes))
    if block == 0:
        return rounds, (start, stop)
    reach, mine = _reach(bits, powers[block - 1]), leaf if bits == 0 else "partial"
    tails = tuple(
        HalvingMessage(firsts[block - 1] + to, *_interval(whole, to, reach), mine, is_tail=True)
        for to in range(at, 1 << reach, 1 << bits)
    )
    rounds.append(HalvingRound(tails, (), start, start))
    return rounds, None


def _first_block(size: int) -> range:
    """The indices of the ranks that go on with an interval on outer axes."""
    return range(size if size == 3 else 1 << size.bit_length() - 1)


def _list_classes(size: int) -> list[tuple[int, int, int]]:
    """For each block, the last one first: its first index, the bits in which its ranks differ, and
    those that its representatives have set."""
    found: list[tuple[int, int, int]] = []
    after, mask = None, 0
    for bits in (bit for bit in range(size.bit_length()) if size >> bit & 1):
        reach = bits
        if after is not None:
            # By the part of the tail that they get, and by when its sender has got its own.
            reach = _reach(after, bits)
            mask |= (1 << reach) - (1 << after)
        found.append((size >> bits + 1 << bits + 1, mask, (1 << reach) - 1 & ~mask))
        after = bits
    return found


def _represent_index(size: int, index: int) -> int:
    if size == 3:
        return 0
    first, mask, rest = next(one for one in _list_classes(size) if one[0] <= index)
    return first + (index - first & mask | rest)


def _list_represented(size: int) -> list[int]:
    if size == 3:
        return [0]
    found = []
    for first, mask, rest in _list_classes(size):
        at = [first + rest]
        for t in range(mask.bit_length()):
            at += [one | 1 << t for one in at if mask >> t & 1]
        found += at
    return found


def _exchange_thirds(
    index: int, leaf: Summand, whole: tuple[int, int]
) -> tuple[list[HalvingRound], tuple[int, int]]:
    start, third = whole[0], (whole[1] - whole[0]) // 3

    def message(peer: int, owner: int) -> HalvingMessage:
        return HalvingMessage(peer, start + owner * third, start + (owner + 1) * third, leaf)

    others = (index + 1) % 3, (index + 2) % 3
    kept = start + index * third, start + (index + 1) * third
    sends = tuple(message(peer, peer) for peer in others)
    receives = tuple(message(peer, index) for peer in reversed(others))
    return [HalvingRound(sends, receives, *kept, place=index)], kept


def _reach(bits: int, before: int) -> int:
    """The first 2**this ranks of a block of 2**before get the tail of a block of 2**bits."""
    return min(max(bits + 1, _TAIL_BITS), before)


def _interval(whole: tuple[int, int], index: int, bits: int) -> tuple[int, int]:
    """What the rank at ``index`` of its block keeps of ``whole`` after so many rounds."""
    start, stop = whole
    for t in range(bits):
        middle = (start + stop) // 2
        start, stop = (middle, stop) if index >> t & 1 else (start, middle)
    return start, stop
