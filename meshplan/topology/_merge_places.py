"""Where all ranks of a job sit, from what each knows of its own place.

A node is what NCCL takes for one: a host, or a clique of multi-node NVLink if every rank of the job
is in one and NCCL may use it (NCCL 2.30.7, src/mnnvl.cc and src/init.cc). A domain is what links
join inside a node, through a switch or from GPU to GPU. If that is not known of one rank, no rank
is given a domain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

from meshplan.errors import TopologyError
from meshplan.topology._cluster import Cluster, SourcedNote
from meshplan.topology._merge_notes import notes_on, shown_ranks
from meshplan.topology._model import Topology
from meshplan.topology._place import Gpu, Place
from meshplan.topology._reading import Note, components

__all__ = ["LIVE", "cluster_of"]

LIVE = "live"


def cluster_of(places: Sequence[Place]) -> Cluster:
    """Merge the places of ranks 0, 1, 2, ...; the same on every rank that has the same places.

    Raises:
        TopologyError: no place.
    """
    if not places:
        raise TopologyError("no rank has said where it sits; write the place of every rank")
    hosts = _numbered(place.host for place in places)
    cliques, note = _cliques(places, hosts)
    nodes = hosts if cliques is None else cliques
    domains = _domains(places, hosts, nodes)
    names = _host_names(places, hosts)
    notes = notes_on(places, hosts, nodes, names)
    return Cluster(
        topology=Topology.of(nodes, domains),
        notes=tuple(SourcedNote(LIVE, one) for one in ([note] if note else []) + notes),
        domain_gpus=_domain_gpus(places, hosts, domains) if cliques is None else None,
        hosts=tuple(names[host] for host in hosts),
        gpus=tuple(place.gpu.bus if place.gpu else "" for place in places),
        links=tuple(place.gpu.links if place.gpu else None for place in places),
        origin=_origin(places, len(names), cliques is not None, domains is not None),
    )


def _cliques(places: Sequence[Place], hosts: Sequence[int]) -> tuple[list[int] | None, Note | None]:
    """The clique of each rank, if NCCL goes by cliques; and what keeps it from that, if odd."""
    fabrics = [place.gpu.fabric if place.gpu else None for place in places]
    usable = [fabric for fabric in fabrics if fabric is not None and fabric.usable]
    # On one host NCCL does not look for cliques.
    if len(set(hosts)) < 2 or not usable:
        return None, None
    without = [rank for rank, fabric in enumerate(fabrics) if fabric is None or not fabric.usable]
    if without:
        return None, Note(
            f"{shown_ranks(without)} are not registered with a fabric of multi-node NVLink and "
            "the others are: NCCL uses it for all ranks or for none, so nodes are hosts"
        )
    off = [rank for rank, place in enumerate(places) if not place.multi_node]
    if off:
        return None, Note(
            f"multi-node NVLink is turned off on {shown_ranks(off)} (NCCL_MNNVL_ENABLE, "
            "NCCL_CUMEM_ENABLE or NCCL_P2P_DISABLE), so nodes are hosts"
        )
    channels = [rank for rank, place in enumerate(places) if not place.imex]
    cliques = _numbered((fabric.cluster, fabric.clique) for fabric in usable)
    spans = len(set(zip(cliques, hosts, strict=True))) > len(set(cliques))
    if channels and spans:
        return None, Note(
            f"GPUs of several hosts are registered with one fabric, and {shown_ranks(channels)} "
            "have no IMEX channel (/dev/nvidia-caps-imex-channels), without which NCCL cannot use "
            "it: nodes are hosts"
        )
    return (None if channels else cliques), None


def _domains(
    places: Sequence[Place], hosts: Sequence[int], nodes: Sequence[int]
) -> list[int] | None:
    gpus = [place.gpu for place in places]
    if any(gpu is None or not gpu.told for gpu in gpus):
        return None
    numbers: dict[Hashable, int] = {}

    def vertex(*name: Hashable) -> int:
        return numbers.setdefault(name, len(numbers))

    edges, own = [], []
    for gpu, host, node in zip(gpus, hosts, nodes, strict=True):
        assert gpu is not None
        # A device, not a part of it; it may belong to several ranks.
        me = vertex("gpu", node, host, gpu.bus)
        own.append(me)
        edges += [(me, vertex("gpu", node, host, peer)) for peer in gpu.peers]
        if gpu.switch:
            edges.append((me, vertex("switch", node, gpu.vendor)))
    found = components(range(len(numbers)), edges)
    of_vertex = {member: number for number, group in enumerate(found) for member in group}
    return _numbered(of_vertex[me] for me in own)


def _domain_gpus(
    places: Sequence[Place], hosts: Sequence[int], domains: Sequence[int] | None
) -> int | None:
    """GPUs that each domain has, where that is the same for all and known."""
    if domains is None:
        return None
    used = {(host, place.gpu.bus) for place, host in zip(places, hosts, strict=True) if place.gpu}
    members: dict[int, set[tuple[int, str]]] = defaultdict(set)
    sizes: set[int | None] = set()
    for place, host, domain in zip(places, hosts, domains, strict=True):
        gpu = place.gpu
        assert gpu is not None
        members[domain].add((host, gpu.bus))
        if gpu.domain is not None:
            sizes.add(gpu.domain)
        elif not used.issuperset((host, peer) for peer in gpu.peers):
            # The links of a GPU that no rank uses are not known.
            return None
    if any(place.gpu and place.gpu.domain is None for place in places):
        sizes |= {len(found) for found in members.values()}
    return sizes.pop() if len(sizes) == 1 else None


def _host_names(places: Sequence[Place], hosts: Sequence[int]) -> list[str]:
    """A name for each host; where several are called alike, with a number."""
    firsts: dict[int, str] = {}
    for place, host in zip(places, hosts, strict=True):
        firsts.setdefault(host, place.name or "host")
    alike = Counter(firsts.values())
    seen: Counter[str] = Counter()
    names = []
    for name in firsts.values():
        names.append(name if alike[name] == 1 else f"{name}#{seen[name]}")
        seen[name] += 1
    return names


def _origin(places: Sequence[Place], hosts: int, cliques: bool, domains: bool) -> str:
    ranks = f"{len(places)} rank{'s' if len(places) > 1 else ''}"
    text = f"live: {ranks} on {hosts} host{'s' if hosts > 1 else ''}"
    if cliques:
        text += ", nodes are cliques of multi-node NVLink"
    gpus: list[Gpu] = [place.gpu for place in places if place.gpu]
    if domains:
        amd = all(gpu.vendor == "amd" for gpu in gpus)
        return f"{text}, domains by {'xGMI' if amd else 'NVLink'}"
    reasons = [place.reason for place in places if place.reason] or ["not all could be read"]
    return f"{text}, links between GPUs unknown: {max(reasons, key=reasons.count)}"


def _numbered(names: Iterable[Hashable]) -> list[int]:
    """Each name as a number, in order of its first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]
