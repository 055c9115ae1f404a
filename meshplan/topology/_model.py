"""The cluster of a job: the node and the NVLink domain of every global rank, if known, and more.

A *node* is what NCCL counts as one: a host, or a clique of hosts joined by multi-node NVLink. A
*domain* is a set of GPUs inside a node that NVLink or xGMI joins. Unknown facts are ``None``: a
rank of unknown node is not a node of its own, and a node of unknown domains is not one domain.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from meshplan.errors import TopologyError, TopologyInputError
from meshplan.layout import Integers
from meshplan.topology._links import Links
from meshplan.topology._reading import Note, format_count, freeze


@dataclass(frozen=True)
class Topology:
    """The node and domain of each global rank. Frozen, hashable, compared by value.

    Made by `uniform`, `of` or `unknown`. Numbers of nodes and domains are only names; those of
    domains are compared only between ranks of one node.

    Attributes:
        world_size: ranks 0 to ``world_size - 1`` are described.
        node_map: how many consecutive ranks share a node (so that a million ranks cost nothing),
            or the node of each rank; ``None`` if unknown.
        domain_map: how many consecutive ranks of a node share a domain, or the domain of each
            rank; ``None`` if unknown.
        links: the cost of the links between ranks.

    Raises:
        TopologyError: no rank, a size below 1, a domain larger than its node, a map of the wrong
            length or with a negative number, or domains without nodes.
    """

    world_size: int
    node_map: int | tuple[int, ...] | None
    domain_map: int | tuple[int, ...] | None
    links: Links = Links()

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise TopologyError(
                f"a topology needs at least 1 rank, got world_size={self.world_size}; "
                "pass for example Topology.uniform(40, node_size=8)"
            )
        for what, found in (
            ("node", self.node_map),
            ("domain", self.domain_map),
        ):
            if isinstance(found, tuple):
                _check_ids(what, found, self.world_size)
            elif found is not None and found < 1:
                raise TopologyError(
                    f"a {what} holds at least 1 rank, got {what}_size={found}; "
                    f"pass the number of consecutive ranks of a {what}"
                )
        if isinstance(self.domain_map, int) and (
            not isinstance(self.node_map, int) or self.domain_map > self.node_map
        ):
            raise TopologyError(
                f"a domain is a part of a node, got domain_size={self.domain_map} with "
                f"node_size={self.node_map}; pass a domain_size up to node_size, or use "
                "Topology.of for other nodes"
            )
        if self.node_map is None and self.domain_map is not None:
            raise TopologyError(
                "a domain is a part of a node, got domains and no nodes; "
                "pass the nodes too, or Topology.unknown(world_size)"
            )

    @classmethod
    def uniform(
        cls,
        world_size: int,
        *,
        node_size: int,
        domain_size: int | None = None,
        links: Links = Links(),
    ) -> Topology:
        """Consecutive ranks share a node; the last node may hold fewer.

        Args:
            world_size: ranks.
            node_size: consecutive ranks of one node.
            domain_size: consecutive ranks of one domain, counted again in each node; the last
                domain of a node may hold fewer. ``None`` if domains are unknown.
            links: the cost of links.

        Raises:
            TopologyError: as for the class.
        """
        given = cls(world_size, node_size, domain_size, links)
        if node_size <= world_size:
            return given
        # A single node that is not full has the size of the job.
        return cls(
            world_size,
            world_size,
            domain_size and min(domain_size, world_size),
            links,
        )

    @classmethod
    def of(
        cls,
        node_of_rank: Sequence[int],
        domain_of_rank: Sequence[int] | None = None,
        links: Links = Links(),
    ) -> Topology:
        """From the node, and the domain if known, of rank 0, 1, 2, ...

        Maps that `uniform` could have made have a topology equal to that of `uniform`.

        Args:
            node_of_rank: a number of each rank; equal: on one node.
            domain_of_rank: the same for domains; compared only between ranks of one node.
            links: the cost of links.

        Raises:
            TopologyError: as for the class.
        """
        nodes = tuple(node_of_rank)
        domains = None if domain_of_rank is None else tuple(domain_of_rank)
        found = cls(len(nodes), nodes, domains, links)
        node_size = _count_leading(nodes)
        domain_size = None if domains is None else min(_count_leading(domains), node_size)
        even = cls(len(nodes), node_size, domain_size, links)
        both: list[tuple[Any, Any]] = [(even.nodes, found.nodes), (even.domains, found.domains)]
        same_nodes, same_domains = (np.array_equal(*pair) for pair in both)
        if not same_nodes:
            return found
        return even if same_domains else cls(len(nodes), node_size, domains, links)

    @classmethod
    def unknown(cls, world_size: int, links: Links = Links()) -> Topology:
        """Ranks of unknown location.

        Args:
            world_size: ranks.
            links: the cost of links.

        Raises:
            TopologyError: as for the class.
        """
        return cls(world_size, None, None, links)

    @property
    def known(self) -> bool:
        """True if the node of every rank is known; the domains may still be unknown."""
        return self.node_map is not None

    @cached_property
    def id(self) -> str:
        """A short digest: equal topologies have equal ids on every rank."""
        return hashlib.sha1(repr(self).encode()).hexdigest()[:12]

    @cached_property
    def nodes(self) -> Integers | None:
        """Node of each rank, an int64 array [world_size]; ``None`` if unknown."""
        if isinstance(self.node_map, int):
            return np.arange(self.world_size) // self.node_map
        return None if self.node_map is None else np.array(self.node_map, dtype=np.int64)

    @cached_property
    def domains(self) -> Integers | None:
        """Domain of each rank, an int64 array [world_size]; ``None`` if unknown."""
        if not isinstance(self.domain_map, int):
            known = self.domain_map is not None
            return np.array(self.domain_map, dtype=np.int64) if known else None
        assert isinstance(self.node_map, int)
        ranks = np.arange(self.world_size)
        per_node = -(-self.node_map // self.domain_map)
        return ranks // self.node_map * per_node + ranks % self.node_map // self.domain_map

    def node_of(self, rank: int) -> int | None:
        """The node of a global rank; ``None`` if unknown.

        Raises:
            TopologyError: no such rank.
        """
        nodes = self.nodes_of(np.array([rank]))
        return None if nodes is None else int(nodes[0])

    def nodes_of(self, ranks: Integers) -> Integers | None:
        """The node of each rank, in the shape of ``ranks``; ``None`` if unknown.

        Args:
            ranks: int64, any shape.

        Raises:
            TopologyError: a rank that does not exist.
        """
        low, high = (int(ranks.min()), int(ranks.max())) if ranks.size else (0, 0)
        if low < 0 or high >= self.world_size:
            raise TopologyError(
                f"no rank {low if low < 0 else high} in a topology of {self.world_size} ranks; "
                f"pass ranks from 0 to {self.world_size - 1}"
            )
        if isinstance(self.node_map, int):
            return ranks // self.node_map
        nodes = self.nodes
        return None if nodes is None else nodes[ranks]

    def __str__(self) -> str:
        if self.node_map is None:
            return "nodes unknown"
        if isinstance(self.node_map, int):
            # Consecutive, and only the last node can be smaller.
            nodes, size = -(-self.world_size // self.node_map), self.node_map
            low = self.world_size - (nodes - 1) * size
            sizes = f"{size}, the last of {low}" if low < size else f"{size}"
        else:
            counts = np.unique(self.node_map, return_counts=True)[1]
            nodes, low, high = (
                len(counts),
                int(counts.min()),
                int(counts.max()),
            )
            sizes = f"{low if low == high else f'{low} to {high}'}, ranks not consecutive"
        text = f"{format_count(nodes, 'node')} of {sizes}"
        if self.domain_map is None:
            return text
        fine = f"of {self.domain_map}" if isinstance(self.domain_map, int) else "given by rank"
        return f"{text}, domains {fine}"


def _check_ids(what: str, ids: tuple[int, ...], world_size: int) -> None:
    bad = [i for i in ids if not isinstance(i, int) or i < 0]
    if bad:
        raise TopologyError(
            f"a {what} is a whole number from 0 up, got {bad[0]!r}; number the {what}s, or pass "
            + ("Topology.unknown(world_size)" if what == "node" else "domain_of_rank=None")
            + " if they are unknown"
        )
    if len(ids) != world_size:
        raise TopologyError(
            f"{world_size} ranks need {world_size} {what} numbers, got {len(ids)}; "
            f"pass the {what} of rank 0, 1, 2, ..."
        )


def _count_leading(ids: tuple[int, ...]) -> int:
    return next((i for i, found in enumerate(ids) if found != ids[0]), len(ids))


@dataclass(frozen=True, slots=True)
class SourcedNote:
    source: str
    note: Note


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster of a job."""

    topology: Topology  # node and domain of each rank
    # Oddities of the inputs; a note with a code is a finding of the linter.
    notes: tuple[SourcedNote, ...] = ()
    # GPUs that one domain of the machine has, used by the job or not; ``None`` if domains
    # differ or are unknown.
    domain_gpus: int | None = None
    # Name of the host of each rank, or empty where hosts have no names.
    hosts: tuple[str, ...] = ()
    # PCI bus id of the GPU of each rank, empty where it is unknown; or empty altogether:
    # the n-th rank of a host has its GPU n, or nothing is known.
    gpus: tuple[str, ...] = ()
    # Active NVLink or xGMI links of the GPU of each rank, ``None`` where that is unknown;
    # or empty altogether.
    links: tuple[int | None, ...] = ()
    origin: str = ""  # one line on the source of these facts


def pack_cluster(cluster: Cluster) -> str:
    """Compressed ASCII: some kilobytes for ten thousand ranks. The cost of links is left out."""
    topology = cluster.topology
    known = {field.name: getattr(cluster, field.name) for field in fields(cluster)}
    known["topology"] = (
        topology.world_size,
        topology.node_map,
        topology.domain_map,
    )
    known["notes"] = [astuple(note) for note in cluster.notes]
    return base64.b85encode(zlib.compress(json.dumps(known).encode(), 6)).decode()


def unpack_cluster(text: str) -> Cluster:
    """The cluster from a text of ``pack_cluster``."""
    try:
        known = freeze(json.loads(zlib.decompress(base64.b85decode(text))))
        placed = Topology(*known.pop("topology"))
        notes = tuple(SourcedNote(source, Note(*note)) for source, note in known.pop("notes"))
        return Cluster(placed, notes, **known)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        zlib.error,
    ) as error:
        raise TopologyInputError(
            f"the published location of the ranks cannot be read ({error}); do all ranks run one "
            "version of meshplan?"
        ) from error
