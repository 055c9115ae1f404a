"""The cost of one reduction by each path.

An exchange, in blocks or not, and a gather are collectives of ``predict_collective``. Recursive
halving sends rounds of messages between pairs of ranks, each round one batch of the backend.
Between ranks that do the same at the same time it takes, by the class of link to the partner,

    launch + batch + latency + bytes / bandwidth.

``predict_turns`` follows one rank of each kind through all rounds. Where tensors are sent in
chunks, the rounds of all chunks under way are one batch, while the blocks exchange other chunks. A
collective pays a latency for each peer, a batch one: an all-to-all of thousands of ranks is not all
under way at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, KeysView, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import Any, Literal, get_args

from meshplan._dtypes import itemsize
from meshplan.contract import FLOATS, Contract
from meshplan.planner._halving import (
    HalvingMessage,
    find_representatives,
    halving_schedule,
    share_owners,
    split_axes,
)
from meshplan.topology import Link, Links

# The cost of a plan: an alpha-beta model per link class; time, bytes, memory and new groups.
#
# A collective in which each rank sends every other rank a piece of n bytes takes
#
#     launch + sum over the other ranks of (latency + n / bandwidth), of the class of link to each,
#
# for the rank with the fewest peers on its domain and node. The two terms of a message: Hockney,
# "The communication challenge for MPP", 1994. All collectives are modelled as such direct
# exchanges; a ring moves the same bytes. Local arithmetic is omitted: it is the same in all plans.
# Times are whole nanoseconds, so that all ranks compare identical numbers.


LinkName = Literal["domain", "node", "network"]


@dataclass(frozen=True, slots=True)
class PeerCounts:
    """The peers in a group by class of link, for the rank with the fewest peers nearby."""

    domain: int
    node: int
    network: int


@dataclass(frozen=True, slots=True)
class Cost:
    nanoseconds: int = 0  # predicted time, with one use's share of the creation of groups
    collectives: int = 0  # number of collectives
    # Bytes that leave the rank that sends the most in all, by class of link. Others may send more
    # over one of them.
    domain: int = 0
    node: int = 0
    network: int = 0
    peak: int = 0  # bytes of memory at once, in addition to the input
    creates: tuple[str, ...] = ()  # process groups to be created, in words

    @classmethod
    def total(cls, parts: Sequence[Cost]) -> Cost:
        """The cost of steps that run sequentially: the largest peak, and the sum of the rest."""
        fields = ("nanoseconds", "collectives", *get_args(LinkName))
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in fields},
            peak=max((part.peak for part in parts), default=0),
            creates=tuple(dict.fromkeys(name for part in parts for name in part.creates)),
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "creates": list(self.creates)}

    @property
    def sent(self) -> int:
        """Bytes that leave a rank, over all links."""
        return self.domain + self.node + self.network


def predict_collective(links: Links, peers: PeerCounts, piece: int) -> Cost:
    """A collective that sends each of ``peers`` a piece of so many bytes."""
    seconds, sent = links.launch, dict[str, Any]()
    for name in get_args(LinkName):
        link, count = getattr(links, name), getattr(peers, name)
        seconds += count * (link.latency + piece / link.bandwidth)
        sent[name] = count * piece
    return Cost(round(seconds * 1e9), 1, **sent)


# The chunks of a hierarchical reduction, so that its levels overlap.
#
# While one chunk travels between blocks, the next one travels inside them. C chunks hide all but 1
# / C of the time inside blocks, and each adds one start of the messages between them. The sum is
# smallest for C = sqrt(time inside / cost of a start), whatever the time between blocks is. Shorter
# chunks at both ends hide a part of the rest.

# On a CPU a chunk costs process time too, which the links do not show: small tensors have one.
MIN_UNIT = 1 << 20
MAX_CHUNKS = 32
"""Of one reduction. Memory and messages are bounded by it."""
# From so many chunks on, shorter ones at the ends save time by the model.
MIN_RAMP = 12


def count_chunks(nbytes: int, unit: int) -> int:
    """How many chunks a summand of ``nbytes`` is sent in; from facts that all ranks share. ``unit``
    is that of `find_chunk_unit`; 0: one chunk.
    """
    if not unit:
        return 1
    return max(1, min(MAX_CHUNKS, round(math.sqrt(nbytes / unit))))


def weigh_chunks(count: int) -> list[int]:
    """The proportions of so many chunks: the longest in the middle, half of it at the ends."""
    # Until the first chunk has passed through its block, nothing travels between blocks, and then
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
    # For each rank, the class of link and the bytes of its messages.
    sends: tuple[tuple[tuple[LinkName, int], ...], ...]
    # For each rank, from which of them its messages are, and the number of each among those of its
    # sender.
    receives: tuple[tuple[tuple[int, int], ...], ...]


Stage = Collective | Round


def predict_turns(links: Links, chunks: Sequence[Sequence[Stage]]) -> float:
    # In each turn one more chunk starts, the batch of all rounds is sent, and every chunk but the
    # new one waits for its messages, and continues. As in LogGP (Alexandrov et al., 1995), a
    # rank sends the bytes of its messages sequentially through the port of a class of links, and
    # receives them likewise. Each arrives one latency after it was sent.
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
    """When each rank continues, and its groups and ports are free."""

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
        self.now = [*map(max, self.now, ends)]

    def exchange(self, batch: Sequence[Round]) -> None:
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


@dataclass(frozen=True, slots=True)
class ElementWidth:
    """Bytes per element: on the wire, and of an unfinished partial."""

    wire: int
    partial: int

    @classmethod
    def of(cls, dtype: str | None, contract: Contract) -> ElementWidth:
        """The widths of ``dtype``. If it is unknown, those of float32, or in an exact order of the
        dtype whose partials have the most bytes for one of its own: no plan is worse than a flat
        one.
        """
        if dtype is None:
            dtype = "float32"
            if contract.ordering.exact:
                ratios = {d: contract.partial("sum", d).nbytes / itemsize(d) for d in FLOATS}
                dtype = max(ratios, key=ratios.__getitem__)
        return cls(itemsize(dtype), contract.partial("sum", dtype).nbytes)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far apart the ranks of a reduction are. All of them share these facts."""

    links: Links  # links of the cluster
    sizes: tuple[int, ...]  # sizes of the reduced axes, outermost first
    flat: PeerCounts  # peers in the whole group
    # How many consecutive ranks are in one domain, and on one node, wherever they start at a
    # multiple of that.
    runs: tuple[int, int] = (1, 1)
    # Peers in a block, and among the ranks of one position in their blocks.
    inside: PeerCounts | None = None
    across: PeerCounts | None = None
    # Peers over the axes that reduce and do not shard, in a ``scatter``.
    rest: PeerCounts | None = None
    scatter: bool = False  # whether a rank keeps a shard of the result

    @classmethod
    def unknown(cls, sizes: tuple[int, ...], links: Links) -> Reach:
        """Each rank is on a node of its own."""
        return cls(links, sizes, PeerCounts(0, 0, math.prod(sizes) - 1))

    def find_link_between(self, one: int, other: int) -> LinkName:
        domain, node = (one // run == other // run for run in self.runs)
        return "domain" if domain else "node" if node else "network"

    def find_link(self, block: int) -> LinkName:
        """The slowest link inside of blocks of so many consecutive ranks."""
        ranks, (domain, node) = math.prod(self.sizes), self.runs
        if domain % block == 0 or domain >= ranks:
            return "domain"
        return "node" if node % block == 0 or node >= ranks else "network"


def split_sizes(sizes: Sequence[int], inner: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of the trees over blocks of ``inner`` ranks and in a block, outermost first."""
    # Blocks take whole inner axes; one axis may belong to both trees, in two factors.
    block, left = inner, list(sizes)
    found: list[int] = []
    while block > 1:
        size = left.pop()
        part = size if block % size == 0 else block
        if part != size:
            left.append(size // part)
        found.insert(0, part)
        block //= part
    return tuple(left), tuple(found)


MAX_FOLLOWED = 256  # Ranks that are followed each, where no few of them stand for all.

_Messages = tuple[HalvingMessage, ...]
Between = Literal["exchange", "halving"]
"""How the blocks of a hierarchical reduction reduce their partials."""


@dataclass(frozen=True, slots=True)
class ReductionStrategy:
    """One way to reduce: the sharded axes, the ranks per block that reduce first (a subtree of the
    contract's tree; 1: no blocks), and what the blocks do with their partials; without blocks, what
    the ranks are predicted to do with their summands."""

    axes: tuple[int, ...]
    sharded: tuple[int, ...] = ()
    inner: int = 1
    between: Between = "exchange"

    @property
    def rest(self) -> tuple[int, ...]:
        """The axes over which finished shards are gathered."""
        return tuple(i for i in self.axes if i not in self.sharded) if self.sharded else ()


@dataclass(frozen=True, slots=True)
class PlannedReduction:
    reach: Reach  # its ranks and their links
    elements: int  # elements of the largest summand
    part: int  # elements of the largest shard of the result; ``elements`` if it is not sharded
    width: ElementWidth  # bytes per element
    inner: int = 1  # inner and between are as in ``ReductionStrategy``
    between: Between = "exchange"

    @property
    def ranks(self) -> int:
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
        pieces = (
            own * width.partial,
            *(() if reach.scatter else (own * width.wire,)),
        )
        across = (predict_collective(reach.links, reach.across, piece) for piece in pieces)
        stages += [Collective("between", one) for one in across]
    return stages if reach.scatter else [*stages, inside]


def _predict_stages(links: Links, chunks: Sequence[Sequence[Stage]]) -> Cost:
    stages = [one for chunk in chunks for one in chunk]
    rounds = [one for one in stages if isinstance(one, Round)]
    once = [one.cost for one in stages if isinstance(one, Collective)]
    sent = [Counter[str]() for _ in (rounds[0].sends if rounds else ())]
    for one in rounds:
        for counts, messages in zip(sent, one.sends, strict=True):
            for link, nbytes in messages:
                counts[link] += nbytes
    most = max(sent, key=Counter.total, default=Counter[str]())
    total = Cost.total(once)
    batches = len(chunks) - 1 + len(rounds) // len(chunks) if rounds else 0
    return Cost(
        nanoseconds=round(predict_turns(links, chunks) * 1e9) if stages else 0,
        # The rounds of chunks that are under way together are one batch.
        collectives=len(once) + batches,
        **{name: getattr(total, name) + most[name] for name in get_args(LinkName)},
    )


def _total(reduction: PlannedReduction, stages: Sequence[Cost], partial: int = 0) -> Cost:
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
    sizes: tuple[int, ...],
    elements: int,
    width: ElementWidth,
    reach: Reach,
    inner: int = 1,
) -> list[Round]:
    """The rounds of halving over a tree of ``sizes``, for the ranks that stand for all others.
    Summands are the partials of blocks of ``inner`` ranks. A sharded result is not gathered.
    """
    widths = {
        "": 0,
        "leaf": width.wire if inner == 1 else width.partial,
        "partial": width.partial,
    }
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
            """The places of the messages to ``rank`` among all messages."""
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
    """The bytes whose way through a block of ``inner`` ranks takes as long as a rank takes to start
    the messages of one more chunk between blocks: at least ``MIN_UNIT``, for `count_chunks`.
    """
    if inner == 1 or reach.inside is None:
        return 0
    links, near, peers = (
        reach.links,
        reach.inside,
        math.prod(reach.sizes) // inner - 1,
    )
    messages, batch = (peers, 0.0) if between == "exchange" else (1, links.batch)
    start = links.launch + batch + messages * links.network.latency
    # To the owner of each slice and back.
    across = near.domain / links.domain.bandwidth + near.node / links.node.bandwidth
    inside = 2 / (1 + near.domain + near.node) * across
    return max(MIN_UNIT, round(start / inside)) if inside > 0 else 0


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
    "halving": halving_cost,
    "integer": integer_cost,
    "integer_checksum": integer_cost,
}
ContractPath = str
"""One of ``CONTRACT_PATHS``."""
CONTRACT_PATHS: KeysView[ContractPath] = _path_costs.keys()
"""The paths of plans under the contract."""


def predict_cost(path: str, reduction: PlannedReduction) -> Cost:
    """The cost of ``reduction`` by ``path``; ``auto`` has the strategies of an exchange."""
    return _path_costs["exchange" if path == "auto" else path](reduction)


# An all-to-all among fewer ranks is under way at once, and costs less than the model says.
MIN_HALVING_RANKS = 9
MARGIN = 10  # Percent: of flat halving; see ``find_margin``.


def find_margin(strategy: ReductionStrategy) -> int:
    """Percent of its time by which halving must be predicted to cost less than an exchange."""
    # Links are measured to about 10 %, and the exchange has fewer rounds. Of blocks half as much:
    # the times inside them are part of both.
    if strategy.between != "halving":
        return 0
    return MARGIN if strategy.inner == 1 else MARGIN // 2


# Graphs and calls whose sizes vary ask again.
@lru_cache(maxsize=1024)
def find_fastest(
    reach: Reach,
    nbytes: int,
    ratio: int,
    inners: tuple[int, ...],
    halves: bool,
) -> tuple[int, Between, int]:
    """In blocks of how many ranks, one of ``inners``, a summand is reduced fastest (0: by one
    all-gather), what they do with partials, ``ratio`` times as wide, and the unit of their chunks.
    """
    plain = PlannedReduction(reach, nbytes, nbytes, ElementWidth(1, ratio))
    times: dict[tuple[int, Between], float] = {}
    for inner, between in product(inners, get_args(Between)):
        if inner == 0:
            times[0, "exchange"] = reference_cost(plain).nanoseconds
        elif between == "exchange" or (halves and plain.ranks // inner >= MIN_HALVING_RANKS):
            cost = exchange_cost(replace(plain, inner=inner, between=between)).nanoseconds
            margin = find_margin(ReductionStrategy((), (), inner, between))
            # Headers are compared before blocks reduce.
            first = reach.links.launch * 1e9 if inner > 1 else 0
            times[inner, between] = first + cost * (100 + margin) / 100
    inner, between = min(times, key=times.__getitem__)
    return inner, between, find_chunk_unit(reach, inner, between) if inner else 0
