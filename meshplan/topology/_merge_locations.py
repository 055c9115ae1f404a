"""Merges the locations of all ranks of a job into one cluster.

A node is what NCCL counts as one: a host, or a clique of multi-node NVLink if every rank of the job
is in one and NCCL may use it (NCCL 2.30.7, src/mnnvl.cc and src/init.cc). A domain is a set of GPUs
that links join inside a node, through a switch or from GPU to GPU. If the links of one rank are
unknown, no rank is given a domain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from meshplan._message_text import format_runs
from meshplan.topology._locate import Gpu, RankLocation
from meshplan.topology._model import Cluster, SourcedNote, Topology
from meshplan.topology._reading import (
    Note,
    find_components,
    format_count,
    group_values,
    number_names,
)

LIVE = "live"
# Names that a note lists; a job may have thousands of ranks.
_SHOWN = 8


def merge_locations(locations: Sequence[RankLocation]) -> Cluster:
    """Merge the locations of ranks 0, 1, 2, ..., one or more; equal ones make equal clusters."""
    job = _Job(locations)
    cliques, note = job.find_cliques()
    job.nodes = job.hosts if cliques is None else cliques
    domains = job.find_domains()
    notes = [*filter(None, [note]), *job.list_notes()]
    return Cluster(
        topology=Topology.of(job.nodes, domains),
        notes=tuple(SourcedNote(LIVE, one) for one in notes),
        domain_gpus=job.count_domain_gpus(domains) if cliques is None else None,
        hosts=tuple(job.names[host] for host in job.hosts),
        gpus=tuple(location.gpu.bus if location.gpu else "" for location in locations),
        links=tuple(location.gpu.links if location.gpu else None for location in locations),
        origin=job.describe(cliques is not None, domains is not None),
    )


class _Job:
    """The ranks of a job, each with the number of its host and of its node."""

    def __init__(self, locations: Sequence[RankLocation]) -> None:
        self.locations = locations
        self.gpus = [(rank, one.gpu) for rank, one in enumerate(locations) if one.gpu is not None]
        self.hosts = number_names(location.host for location in locations)
        self.nodes = self.hosts
        # By the first rank of each host.
        firsts = dict(zip(reversed(self.hosts), reversed(locations), strict=True))
        given = [firsts[host].name or "host" for host in sorted(firsts)]
        shared, seen = Counter(given), Counter[str]()
        self.names: list[str] = []
        for name in given:
            self.names.append(name if shared[name] == 1 else f"{name}#{seen[name]}")
            seen[name] += 1

    def find_cliques(self) -> tuple[list[int] | None, Note | None]:
        """The clique of each rank if NCCL uses cliques, else an unexpected reason why not."""
        fabrics = [one.gpu.fabric if one.gpu else None for one in self.locations]
        usable = [fabric for fabric in fabrics if fabric and fabric.usable]
        # NCCL uses cliques of multi-node NVLink only if every condition below holds on every rank.
        # One failing rank makes all nodes hosts, so each failure is a note. On one host NCCL does
        # not look.
        if len(set(self.hosts)) < 2 or not usable:
            return None, None
        without = [rank for rank, one in enumerate(fabrics) if not (one and one.usable)]
        if without:
            return None, Note(
                f"{_show_ranks(without)} are not registered with a fabric of multi-node NVLink and "
                "the others are: NCCL uses it for all ranks or for none, so nodes are hosts"
            )
        off = [rank for rank, location in enumerate(self.locations) if not location.multi_node]
        if off:
            return None, Note(
                f"multi-node NVLink is turned off on {_show_ranks(off)} (NCCL_MNNVL_ENABLE, "
                "NCCL_CUMEM_ENABLE or NCCL_P2P_DISABLE), so nodes are hosts"
            )
        channels = [rank for rank, location in enumerate(self.locations) if not location.imex]
        cliques = number_names((fabric.cluster, fabric.clique) for fabric in usable)
        spans = len(set(zip(cliques, self.hosts, strict=True))) > len(set(cliques))
        if channels and spans:
            return None, Note(
                "GPUs of several hosts are registered with one fabric, and "
                f"{_show_ranks(channels)} have no IMEX channel (/dev/nvidia-caps-imex-channels), "
                "without which NCCL cannot use it: nodes are hosts"
            )
        return (None if channels else cliques), None

    def find_domains(self) -> list[int] | None:
        if len(self.gpus) < len(self.locations) or not all(gpu.links_known for _, gpu in self.gpus):
            return None
        # Nodes as in `find_components`: devices, not parts of them, which may belong to several
        # ranks, and switches, which join all GPUs of their node and vendor.
        own: list[tuple[Hashable, ...]] = []
        edges: list[tuple[tuple[Hashable, ...], tuple[Hashable, ...]]] = []
        for rank, gpu in self.gpus:
            node, host = self.nodes[rank], self.hosts[rank]
            own.append(("gpu", node, host, gpu.bus))
            edges += [(own[-1], ("gpu", node, host, peer)) for peer in gpu.peers]
            if gpu.switch:
                edges.append((own[-1], ("switch", node, gpu.vendor)))
        # GPUs that no rank uses count too: two ranks may be joined through the GPU of a third.
        found = find_components({*own, *(end for _, end in edges)}, edges)
        domain = {member: number for number, group in enumerate(found) for member in group}
        return number_names(domain[me] for me in own)

    def count_domain_gpus(self, domains: Sequence[int] | None) -> int | None:
        """GPUs of each domain, where that number is known and the same for all."""
        if domains is None:
            return None
        used = {(self.hosts[rank], gpu.bus) for rank, gpu in self.gpus}
        members: dict[int, set[tuple[int, str]]] = defaultdict(set)
        sizes = {gpu.domain for _, gpu in self.gpus if gpu.domain is not None}
        for rank, gpu in self.gpus:
            host = self.hosts[rank]
            members[domains[rank]].add((host, gpu.bus))
            if gpu.domain is None and not used.issuperset((host, peer) for peer in gpu.peers):
                # The links of a GPU that no rank uses are not known.
                return None
        if any(gpu.domain is None for _, gpu in self.gpus):
            sizes |= {len(found) for found in members.values()}
        return sizes.pop() if len(sizes) == 1 else None

    def describe(self, has_cliques: bool, has_domains: bool) -> str:
        ranks, hosts = (
            format_count(len(self.locations), "rank"),
            format_count(len(self.names), "host"),
        )
        text = f"live: {ranks} on {hosts}"
        if has_cliques:
            text += ", nodes are cliques of multi-node NVLink"
        if has_domains:
            amd = all(gpu.vendor == "amd" for _, gpu in self.gpus)
            return f"{text}, domains by {'xGMI' if amd else 'NVLink'}"
        reasons = [one.reason for one in self.locations if one.reason] or ["not all could be read"]
        return f"{text}, links between GPUs unknown: {max(reasons, key=reasons.count)}"

    def list_notes(self) -> Iterator[Note]:
        """In a fixed order: links (MP201), hosts (MP204), the rest."""
        yield from self._check_links()
        kinds: dict[int, set[str]] = defaultdict(set)
        for rank, gpu in self.gpus:
            kinds[self.hosts[rank]].add(_describe_gpu(gpu))
        hosts_of = group_values((" and ".join(sorted(kinds[host])), host) for host in sorted(kinds))
        if len(hosts_of) > 1:
            shown = [f"{self._show_hosts(found)}: {kind}" for kind, found in hosts_of.items()]
            yield Note(
                f"hosts are not identical: {'; '.join(shown[:_SHOWN])}",
                "MP204",
            )
        nodes_of = group_values((size, node) for node, size in Counter(self.nodes).items())
        if len(nodes_of) > 1:
            first = dict(reversed(list(zip(self.nodes, self.hosts, strict=True))))
            usual, others = _split_usual(
                nodes_of,
                lambda nodes: self._show_hosts([first[node] for node in nodes]),
            )
            most = format_count(len(nodes_of[usual]), "node")
            yield Note(f"ranks per node differ: {usual} on {most}; {others}")
        yield from self._check_gpus()
        yield from self._check_hosts()

    def _check_links(self) -> Iterator[Note]:
        counts: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, gpu in self.gpus:
            if gpu.links is not None and not gpu.unread and not _is_silent(gpu):
                counts[gpu.model][gpu.links].append(rank)
        differing = [item for item in counts.items() if len(item[1]) > 1]
        for model, ranks_of in differing[:_SHOWN]:
            usual, others = _split_usual(ranks_of, _show_ranks)
            yield Note(
                f"{model or 'GPUs'}: {usual} links on "
                f"{format_count(len(ranks_of[usual]), 'rank')}; {others}: links may be down, and "
                "NCCL goes by the weakest of a group",
                "MP201",
            )
        silent = [rank for rank, gpu in self.gpus if _is_silent(gpu)]
        if silent:
            yield Note(
                f"no link is up on {_show_ranks(silent)}, though the GPU is registered with a "
                "clique of multi-node NVLink: its traffic takes the network; take the host out of "
                "the job",
                "MP201",
            )
        faults = group_values(
            (words, rank)
            for rank, gpu in self.gpus
            for words in (gpu.fabric.faults if gpu.fabric else ())
        )
        for words in sorted(faults)[:_SHOWN]:
            where = _show_ranks(faults[words])
            yield Note(f"fabric of multi-node NVLink, {where}: {words}", "MP201")
        unread = group_values((gpu.unread, rank) for rank, gpu in self.gpus if gpu.unread)
        for links in sorted(unread)[:_SHOWN]:
            which = ", ".join(map(str, links[:_SHOWN])) + (", ..." if len(links) > _SHOWN else "")
            plural = "s" if len(links) > 1 else ""
            where = _show_ranks(unread[links])
            yield Note(f"link{plural} {which} could not be read on {where}", "MP201")

    def _check_gpus(self) -> Iterator[Note]:
        unknown = group_values(
            (one.reason, rank) for rank, one in enumerate(self.locations) if not one.gpu
        )
        for reason in sorted(unknown)[:_SHOWN] if self.gpus else ():
            yield Note(f"the GPU is unknown on {_show_ranks(unknown[reason])}: {reason}")
        ranks_of = group_values(((self.hosts[rank], gpu.id), rank) for rank, gpu in self.gpus)
        shared = [(key, ranks) for key, ranks in ranks_of.items() if len(ranks) > 1]
        for (host, id), ranks in shared[:_SHOWN]:
            yield Note(
                f"{_show_ranks(ranks)} use one GPU, {id} on {self.names[host]}: NCCL refuses that"
            )
        if len(shared) > _SHOWN:
            yield Note(f"{len(shared) - _SHOWN} more GPUs are used by several ranks")

    def _check_hosts(self) -> Iterator[Note]:
        located = list(zip(self.locations, self.hosts, strict=True))
        of_agent = group_values((one.agent, host) for one, host in located if one.agent is not None)
        of_machine = group_values((one.machine, host) for one, host in located if one.machine)
        agents = [(agent, set(found)) for agent, found in of_agent.items() if len(set(found)) > 1]
        for agent, found in agents[:1]:
            yield Note(
                f"one agent of torchrun (GROUP_RANK {agent}) has ranks on "
                f"{self._show_hosts(sorted(found))}; hosts are taken as they are named"
            )
        machines = [set(found) for found in of_machine.values() if len(set(found)) > 1]
        for found in machines[:1]:
            yield Note(
                f"{self._show_hosts(sorted(found))} are containers of one machine, which NCCL "
                "takes for several hosts; where that is wrong give NCCL_HOSTID the same value in "
                "them"
            )

    def _show_hosts(self, hosts: Sequence[int]) -> str:
        shown = ", ".join(self.names[host] for host in hosts[:4])
        return shown + (f", ... ({len(hosts)} hosts)" if len(hosts) > 4 else "")


def _is_silent(gpu: Gpu) -> bool:
    """Without links, though registered with a fabric."""
    return gpu.links == 0 and not gpu.unread and gpu.fabric is not None and gpu.fabric.usable


def _describe_gpu(gpu: Gpu) -> str:
    """Facts that must match on all hosts. Not the number of links: that may be a fault."""
    if gpu.links is None:
        links = "links unknown"
    elif gpu.switch:
        links = "links to a switch"
    else:
        links = "links between GPUs" if gpu.peers else "no links"
    count = "" if gpu.on_host is None else f"{gpu.on_host} x "
    return f"{count}{gpu.model or gpu.vendor}, {links}"


def _split_usual(
    members: dict[int, list[int]], show: Callable[[list[int]], str]
) -> tuple[int, str]:
    """The number that most members have, and a text of the others."""
    usual = max(members, key=lambda number: (len(members[number]), number))
    others = [f"{n} on {show(members[n])}" for n in sorted(members) if n != usual]
    return usual, "; ".join(others[:_SHOWN])


def _show_ranks(ranks: Iterable[int]) -> str:
    """``ranks 0-3, 7``; a bounded text for any number of ranks."""
    found = set(ranks)
    parts = format_runs(found)
    more = f", ... ({len(found)} ranks)" if len(parts) > _SHOWN else ""
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(parts[:_SHOWN])}{more}"
