"""The cost of one reduction by each path.

An exchange, in blocks or not, and a gather are collectives of ``predict_collective``. Recursive
halving sends rounds of messages between pairs of ranks. A round is one batch of the backend, whose
messages are under way at once. Between ranks that do the same at the same time it takes

    launch + batch + latency + bytes / bandwidth, of the class of link to the partner.

``predict_turns`` follows one rank of each kind through all rounds. Where tensors are sent in
chunks, the rounds of all chunks under way are one batch, while the blocks exchange other chunks.

A collective pays a latency for each peer, a batch pays one: it has few messages, and an all-to-all
of thousands of ranks is not all under way at once. The costs have no arithmetic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, KeysView, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from meshplan.planner._cost import Cost, predict_collective
from meshplan.planner._halving import (
    HalvingMessage,
    find_representatives,
    halving_schedule,
    share_owners,
    split_axes,
)
from meshplan.planner._pipeline import (
    Collective,
    LinkName,
    Round,
    Stage,
    chunk_unit,
    count_chunks,
    cut_chunks,
    predict_turns,
)
from meshplan.planner._reach import ElementWidth, Reach, split_sizes
from meshplan.topology import Links

MAX_FOLLOWED = 256  # Ranks that are followed each, where no few of them stand for all.

_Messages = tuple[HalvingMessage, ...]
Between = Literal["exchange", "halving"]
"""How the blocks of a hierarchical reduction reduce their partials."""


@dataclass(frozen=True, slots=True)
class ReductionStrategy:
    """One way to reduce: the sharded axes, the ranks per block that reduce first, and what the
    blocks do with their partials; without blocks, what the ranks do with their summands."""

    axes: tuple[int, ...]
    sharded: tuple[int, ...] = ()
    inner: int = 1
    between: Between = "exchange"


@dataclass(frozen=True, slots=True)
class PlannedReduction:
    """One reduction, for the cost of a path."""

    reach: Reach  # its ranks and their links
    elements: int  # elements of the largest summand
    part: int  # elements of the largest shard of the result; ``elements`` if it is not sharded
    width: ElementWidth  # bytes per element
    inner: int = 1  # inner and between are as in ``ReductionStrategy``
    between: Between = "exchange"

    @property
    def ranks(self) -> int:
        """Ranks of one group."""
        return math.prod(self.reach.sizes)


def reference_cost(reduction: PlannedReduction) -> Cost:
    """The cost of ``reduction`` as one all-gather of all summands."""
    reach, width = reduction.reach, reduction.width
    whole = reduction.elements * width.wire
    cost = predict_collective(reach.links, reach.flat, whole)
    return replace(cost, peak=reduction.ranks * whole + reduction.part * width.wire)


def exchange_cost(reduction: PlannedReduction) -> Cost:
    """The cost of ``reduction`` as an all-to-all and an all-gather of the results. A hierarchical
    exchange has both on each level, or rounds of halving between the blocks.
    """
    reach, width = reduction.reach, reduction.width
    elements, inner = reduction.elements, reduction.inner
    if inner > 1:
        return _hierarchical_cost(reduction)
    if reduction.between == "halving":
        return halving_cost(reduction)
    own = -(-elements // reduction.ranks) * width.wire
    stage = predict_collective(reach.links, reach.flat, own)
    # A sharded result stays where it was reduced. Axes that are reduced and not sharded gather it.
    return _total(reduction, [stage] if reach.scatter else [stage, stage])


def halving_cost(reduction: PlannedReduction) -> Cost:
    """The cost of ``reduction`` by recursive halving, and doubling for the results."""
    reach = reduction.reach
    chunk = _list_rounds(reach.sizes, reduction.elements, reduction.width, reach)
    return _total(reduction, [_predict_stages(reach.links, [chunk])])


def _hierarchical_cost(reduction: PlannedReduction) -> Cost:
    reach, width, inner = reduction.reach, reduction.width, reduction.inner
    unit = find_chunk_unit(reach, inner, reduction.between)
    count = count_chunks(reduction.elements * width.wire, unit)
    lengths = cut_chunks(reduction.elements, count, reduction.ranks)
    stages = {length: _list_stages(reduction, length) for length in set(lengths)}
    cost = _predict_stages(reach.links, [stages[length] for length in lengths])
    in_flight = -(-sum(sorted(lengths)[-2:]) // inner)
    return _total(reduction, [cost], 2 * in_flight * width.partial)


def _list_stages(reduction: PlannedReduction, elements: int) -> list[Stage]:
    """The stages of a chunk of so many elements of a hierarchical reduction."""
    reach, width, inner = reduction.reach, reduction.width, reduction.inner
    assert reach.inside is not None
    assert reach.across is not None
    block, own = -(-elements // inner), -(-elements // reduction.ranks)
    inside = Collective("inside", predict_collective(reach.links, reach.inside, block * width.wire))
    stages: list[Stage] = [inside]
    if reduction.between == "halving":
        outer, _ = split_sizes(reach.sizes, inner)
        stages += _list_rounds(outer, block, width, reach, inner)
    else:
        pieces = (own * width.partial, *(() if reach.scatter else (own * width.wire,)))
        across = (predict_collective(reach.links, reach.across, piece) for piece in pieces)
        stages += [Collective("between", one) for one in across]
    return stages if reach.scatter else [*stages, inside]


def _predict_stages(links: Links, chunks: Sequence[Sequence[Stage]]) -> Cost:
    """The cost of all chunks; bytes of the rank that sends the most in rounds."""
    stages = [one for chunk in chunks for one in chunk]
    rounds = [one for one in stages if isinstance(one, Round)]
    once = [one.cost for one in stages if isinstance(one, Collective)]
    sent = [Counter[str]() for _ in (rounds[0].sends if rounds else ())]
    for one in rounds:
        for counts, messages in zip(sent, one.sends, strict=True):
            for link, nbytes in messages:
                counts[link] += nbytes
    most = max(sent, key=Counter.total, default=Counter[str]())
    batches = len(chunks) - 1 + len(rounds) // len(chunks) if rounds else 0
    return Cost(
        nanoseconds=round(predict_turns(links, chunks) * 1e9) if stages else 0,
        # The rounds of chunks that are under way together are one batch.
        collectives=len(once) + batches,
        domain=sum(one.domain for one in once) + most["domain"],
        node=sum(one.node for one in once) + most["node"],
        network=sum(one.network for one in once) + most["network"],
    )


def _total(reduction: PlannedReduction, stages: Sequence[Cost], partial: int = 0) -> Cost:
    """The sum of ``stages``, with the gather of a shard that several ranks have parts of."""
    reach, width = reduction.reach, reduction.width
    last = []
    if reach.rest is not None:
        own = -(-reduction.elements // reduction.ranks) * width.wire
        last.append(predict_collective(reach.links, reach.rest, own))
    # Send and receive buffers, partials in flight, and the result.
    whole = 2 * reduction.elements * width.wire
    peak = Cost(peak=whole + partial + reduction.part * width.wire)
    return Cost.total((*stages, *last, peak))


def _list_rounds(
    sizes: tuple[int, ...], elements: int, width: ElementWidth, reach: Reach, inner: int = 1
) -> list[Round]:
    """The rounds of halving over a tree of ``sizes``, for the ranks that stand for all others.
    Summands are the partials of blocks of ``inner`` ranks. A sharded result is not gathered.
    """
    widths = {"": 0, "leaf": width.wire if inner == 1 else width.partial, "partial": width.partial}
    count, served = math.prod(sizes), share_owners(sizes) if reach.scatter else []
    ranks, represent = find_representatives(sizes)
    links = _list_round_links(sizes, reach, inner)
    hands_out = 0 < len(served) < count
    if count <= MAX_FOLLOWED and (hands_out or not _is_even(sizes, reach, inner)):
        # Ranks of one schedule have partners on different links, or parts of several lengths.
        ranks, represent = [*range(count)], int
        links = [(None, None)] * len(links)
    index = {rank: i for i, rank in enumerate(ranks)}
    plans = [halving_schedule(sizes, rank) for rank in ranks]
    # Each shard is one length, and a part has those of all ranks that it serves.
    cuts = [0, *accumulate(map(len, served))] if served else range(plans[0].parts + 1)

    def make(turn: int, sides: list[tuple[_Messages, _Messages]], *, back: bool) -> Round:
        near, far = links[turn]

        def weigh(rank: int, one: HalvingMessage) -> tuple[LinkName, int]:
            link = far if one.is_tail else near
            link = link or reach.find_link_between(rank * inner, one.peer * inner)
            item = width.wire if back else widths[one.sum] + widths[one.tail]
            start, stop = (elements * cuts[part] // cuts[-1] for part in (one.start, one.stop))
            return link, item * (stop - start)

        def find(rank: int, received: _Messages) -> Iterator[tuple[int, int]]:
            """Where the messages that ``rank`` receives are among those that are sent."""
            for place, one in enumerate(received):
                sender = index[represent(one.peer)]
                same = [i for i, m in enumerate(sides[sender][0]) if m.is_tail == one.is_tail]
                own = [i for i in same if represent(sides[sender][0][i].peer) == rank] or same
                yield sender, own[min(place, len(own) - 1)]

        return Round(
            tuple(
                tuple(weigh(r, m) for m in sent) for r, (sent, _) in zip(ranks, sides, strict=True)
            ),
            tuple(tuple(find(r, came)) for r, (_, came) in zip(ranks, sides, strict=True)),
        )

    up, down = list[Round](), list[Round]()
    for turn in range(plans[0].turns):
        sides: list[tuple[_Messages, _Messages]] = [
            plan.rounds[turn][:2] if turn < len(plan.rounds) else ((), ()) for plan in plans
        ]
        up.append(make(turn, sides, back=False))
        down.append(make(turn, [(came, sent) for sent, came in sides], back=True))
    if not reach.scatter:
        return up + down[::-1]
    # Owners of parts send the shards of ranks that own none.
    shard = reach.find_link(count * inner), -(-elements // count) * width.wire
    sends = (shard,) * (max(map(len, served)) - 1)
    return [*up, Round((sends,) * len(ranks), ((),) * len(ranks))] if hands_out else up


def _is_even(sizes: tuple[int, ...], reach: Reach, inner: int) -> bool:
    """Whether each subtree of the halving is on as many domains and nodes everywhere."""
    blocks, stride = list[int](), inner
    for size in reversed(split_axes(sizes)):
        blocks += [stride << turn for turn in range(1, size.bit_length())]
        stride *= size
        blocks.append(stride)
    return all(run % block == 0 or block % run == 0 for block in blocks for run in reach.runs)


def _list_round_links(
    sizes: tuple[int, ...], reach: Reach, inner: int
) -> list[tuple[LinkName | None, LinkName | None]]:
    """For each round, the slowest link between pairs, and to senders of tails."""
    # On the outermost axis these are always the same: None.
    found, stride = list[tuple[LinkName | None, LinkName | None]](), inner
    axes = split_axes(sizes)
    for axis in reversed(range(len(axes))):
        size = axes[axis]
        far = reach.find_link(size * stride)
        if size == 3:
            found.append((far, far))
        for turn in range(0 if size == 3 else size.bit_length() - 1):
            pair = 2 << turn
            near = reach.find_link(pair * stride) if axis == 0 or size % pair == 0 else "network"
            found.append((near, far if axis else None))
        stride *= size
    return found


def find_chunk_unit(reach: Reach, inner: int, between: Between) -> int:
    """The unit of ``count_chunks``; 0 without blocks."""
    if inner == 1 or reach.inside is None:
        return 0
    links, peers = reach.links, math.prod(reach.sizes) // inner - 1
    messages, batch = (peers, 0.0) if between == "exchange" else (1, links.batch)
    start = links.launch + batch + messages * links.network.latency
    return chunk_unit(links, reach.inside.domain, reach.inside.node, start)


def integer_cost(reduction: PlannedReduction) -> Cost:
    """The cost of ``reduction`` as a maximum of bytes and a sum of int64, by the backend."""
    # Each is modelled as an exchange of its own dtype. Ambiguous elements are not counted.
    reach = reduction.reach
    own = -(-reduction.elements // reduction.ranks)
    words = 8 if reduction.width.partial < 8 else 16
    pieces = 2 * own, words * own if reach.scatter else 2 * words * own
    stages = [predict_collective(reach.links, reach.flat, piece) for piece in pieces]
    # Codes, integers and their sum.
    return _total(reduction, stages, (2 + 2 * words) * reduction.elements)


_path_costs: dict[str, Callable[[PlannedReduction], Cost]] = {
    "exchange": exchange_cost,
    "reference": reference_cost,
}
ContractPath = str
"""One of ``CONTRACT_PATHS``."""
CONTRACT_PATHS: KeysView[ContractPath] = _path_costs.keys()
"""The paths of plans under the contract; a view of the register."""


def register_cost(path: str, cost: Callable[[PlannedReduction], Cost] | None) -> None:
    """Register a path for plans with the cost of its reductions; ``None`` removes it."""
    if cost is None:
        _path_costs.pop(path, None)
    else:
        _path_costs[path] = cost


def predict_cost(path: str, reduction: PlannedReduction) -> Cost:
    """The cost of ``reduction`` by ``path``; ``auto`` has the strategies of an exchange."""
    return _path_costs["exchange" if path == "auto" else path](reduction)
