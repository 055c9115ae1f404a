"""How far apart the ranks of a reduction are, and how wide its elements: facts for its costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshplan._dtypes import itemsize
from meshplan.contract import FLOATS, Contract
from meshplan.planner._cost import PeerCounts
from meshplan.planner._pipeline import LinkName
from meshplan.topology import Links


@dataclass(frozen=True, slots=True)
class ElementWidth:
    """Bytes per element: on the wire, and of an unfinished partial."""

    wire: int
    partial: int

    @classmethod
    def of(cls, dtype: str | None, contract: Contract) -> ElementWidth:
        """Of ``dtype``. If it is unknown, of float32, or in an exact order of the dtype whose
        partials have the most bytes for one of its own: no plan is worse than a flat one."""
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
        """The link between the ranks at two positions."""
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
