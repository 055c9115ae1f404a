"""The cost of a plan: an alpha-beta model per link class; time, bytes, memory and new groups.

A collective in which each rank sends every other rank a piece of n bytes takes

    launch + sum over the other ranks of (latency + n / bandwidth), of the class of link to each,

for the rank with the fewest peers on its domain and node. The two terms of a message: Hockney, "The
communication challenge for MPP", 1994. All collectives are modelled as such direct exchanges; a
ring moves the same bytes. Local arithmetic is omitted: it is the same in all plans. Times are whole
nanoseconds, so that all ranks compare identical numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshplan.topology import Links


@dataclass(frozen=True, slots=True)
class PeerCounts:
    """The peers in a group by class of link, for the rank with the fewest peers nearby."""

    domain: int
    node: int
    network: int


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a plan or a part of it, on the rank with the highest cost."""

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
        fields = ("nanoseconds", "collectives", "domain", "node", "network")
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in fields},
            peak=max((part.peak for part in parts), default=0),
            creates=tuple(dict.fromkeys(name for part in parts for name in part.creates)),
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; bytes and nanoseconds."""
        return {**asdict(self), "creates": list(self.creates)}

    @property
    def sent(self) -> int:
        """Bytes that leave a rank, over all links."""
        return self.domain + self.node + self.network


def predict_collective(links: Links, peers: PeerCounts, piece: int) -> Cost:
    """A collective that sends each of ``peers`` a piece of so many bytes."""
    seconds = links.launch
    for link, count in (
        (links.domain, peers.domain),
        (links.node, peers.node),
        (links.network, peers.network),
    ):
        seconds += count * (link.latency + piece / link.bandwidth)
    return Cost(
        nanoseconds=round(seconds * 1e9),
        collectives=1,
        domain=peers.domain * piece,
        node=peers.node * piece,
        network=peers.network * piece,
    )
