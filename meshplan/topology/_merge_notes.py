"""What is odd about the places of a job's ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from meshplan.topology._place import Gpu, Place
from meshplan.topology._reading import Note

__all__ = ["notes_on", "shown_ranks", "uneven_ranks"]

# Names that a note lists; a job may have thousands of ranks.
_SHOWN = 8


def notes_on(
    places: Sequence[Place], hosts: Sequence[int], nodes: Sequence[int], names: Sequence[str]
) -> list[Note]:
    """Notes in a fixed order: links (MP201), hosts (MP204), ranks per node (MP205), the rest.

    Args:
        places: of rank 0, 1, 2, ...
        hosts, nodes: of each rank, numbered from 0 on.
        names: of each host.
    """
    return [
        *_unequal_links(places),
        *_silent_links(places),
        *_faults(places),
        *_unread(places),
        *_unlike_hosts(places, hosts, names),
        *uneven_ranks(nodes, hosts, names),
        *_unknown_gpus(places),
        *_shared_gpus(places, hosts, names),
        *_contradictions(places, hosts, names),
    ]


def uneven_ranks(nodes: Sequence[int], hosts: Sequence[int], names: Sequence[str]) -> list[Note]:
    """MP205 where nodes hold different numbers of ranks; arguments as for ``notes_on``."""
    sizes = Counter(nodes)
    by_size: dict[int, list[int]] = defaultdict(list)
    for node, size in sizes.items():
        by_size[size].append(node)
    if len(by_size) < 2:
        return []
    first_host = dict(reversed(list(zip(nodes, hosts, strict=True))))
    usual = max(by_size, key=lambda size: (len(by_size[size]), size))
    others = [
        f"{size} on {_named([first_host[node] for node in by_size[size]], names)}"
        for size in sorted(by_size)
        if size != usual
    ]
    few = "; ".join(others[:_SHOWN])
    most = _many(len(by_size[usual]), "node")
    return [Note(f"ranks per node differ: {usual} on {most}; {few}", "MP205")]


def shown_ranks(ranks: Iterable[int]) -> str:
    """``ranks 0-3, 7``; a bounded text for any number of ranks."""
    found = sorted(set(ranks))
    starts = [found[0], *(later for one, later in pairwise(found) if later != one + 1)]
    stops = [*(one for one, later in pairwise(found) if later != one + 1), found[-1]]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True)]
    more = f", ... ({len(found)} ranks)" if len(parts) > _SHOWN else ""
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(parts[:_SHOWN])}{more}"


def _by_gpu(places: Sequence[Place]) -> list[tuple[int, Gpu]]:
    return [(rank, place.gpu) for rank, place in enumerate(places) if place.gpu is not None]


def _unequal_links(places: Sequence[Place]) -> list[Note]:
    counts: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, gpu in _by_gpu(places):
        if gpu.links is not None and not gpu.unread and not _is_silent(gpu):
            counts[gpu.model][gpu.links].append(rank)
    notes = []
    for model, ranks_of in counts.items():
        if len(ranks_of) < 2:
            continue
        usual = max(ranks_of, key=lambda links: (len(ranks_of[links]), links))
        others = [
            f"{links} on {shown_ranks(ranks_of[links])}"
            for links in sorted(ranks_of)
            if links != usual
        ]
        few = "; ".join(others[:_SHOWN])
        most = _many(len(ranks_of[usual]), "rank")
        notes.append(
            Note(
                f"{model or 'GPUs'}: {usual} links on {most}; {few}: "
                "links may be down, and NCCL goes by the weakest of a group",
                "MP201",
            )
        )
    return notes[:_SHOWN]


def _silent_links(places: Sequence[Place]) -> list[Note]:
    silent = [rank for rank, gpu in _by_gpu(places) if _is_silent(gpu)]
    if not silent:
        return []
    return [
        Note(
            f"no link is up on {shown_ranks(silent)}, though the GPU is registered with a clique "
            "of multi-node NVLink: its traffic takes the network; take the host out of the job",
            "MP201",
        )
    ]


def _is_silent(gpu: Gpu) -> bool:
    """Without links, though its fabric says that it has some."""
    return gpu.links == 0 and not gpu.unread and gpu.fabric is not None and gpu.fabric.usable


def _faults(places: Sequence[Place]) -> list[Note]:
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, gpu in _by_gpu(places):
        for words in gpu.fabric.faults if gpu.fabric else ():
            ranks_of[words].append(rank)
    return [
        Note(f"fabric of multi-node NVLink, {shown_ranks(ranks_of[words])}: {words}", "MP201")
        for words in sorted(ranks_of)[:_SHOWN]
    ]


def _unread(places: Sequence[Place]) -> list[Note]:
    ranks_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, gpu in _by_gpu(places):
        if gpu.unread:
            ranks_of[gpu.unread].append(rank)
    notes = []
    for links in sorted(ranks_of)[:_SHOWN]:
        which = ", ".join(map(str, links[:_SHOWN])) + (", ..." if len(links) > _SHOWN else "")
        plural = "s" if len(links) > 1 else ""
        where = shown_ranks(ranks_of[links])
        notes.append(Note(f"link{plural} {which} could not be asked on {where}", "MP201"))
    return notes


def _unlike_hosts(
    places: Sequence[Place], hosts: Sequence[int], names: Sequence[str]
) -> list[Note]:
    looks: dict[int, set[str]] = defaultdict(set)
    for rank, gpu in _by_gpu(places):
        looks[hosts[rank]].add(_look(gpu))
    alike: dict[str, list[int]] = defaultdict(list)
    for host in sorted(looks):
        alike[" and ".join(sorted(looks[host]))].append(host)
    if len(alike) < 2:
        return []
    kinds = [f"{_named(found, names)}: {look}" for look, found in list(alike.items())[:_SHOWN]]
    return [Note(f"hosts are not identical: {'; '.join(kinds)}", "MP204")]


def _look(gpu: Gpu) -> str:
    """What must be the same on all hosts. Not the number of links: that may be a fault."""
    if gpu.links is None:
        links = "links unknown"
    elif gpu.switch:
        links = "links to a switch"
    else:
        links = "links between GPUs" if gpu.peers else "no links"
    count = "" if gpu.on_host is None else f"{gpu.on_host} x "
    return f"{count}{gpu.model or gpu.vendor}, {links}"


def _unknown_gpus(places: Sequence[Place]) -> list[Note]:
    if not any(place.gpu for place in places):
        return []
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        if place.gpu is None:
            ranks_of[place.reason].append(rank)
    return [
        Note(f"the GPU is unknown on {shown_ranks(ranks_of[reason])}: {reason}")
        for reason in sorted(ranks_of)[:_SHOWN]
    ]


def _shared_gpus(places: Sequence[Place], hosts: Sequence[int], names: Sequence[str]) -> list[Note]:
    ranks_of: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, gpu in _by_gpu(places):
        ranks_of[hosts[rank], gpu.id].append(rank)
    shared = [(key, ranks) for key, ranks in ranks_of.items() if len(ranks) > 1]
    notes = [
        Note(f"{shown_ranks(ranks)} use one GPU, {gpu} on {names[host]}: NCCL refuses that")
        for (host, gpu), ranks in shared[:_SHOWN]
    ]
    if len(shared) > _SHOWN:
        notes.append(Note(f"{len(shared) - _SHOWN} more GPUs are used by several ranks"))
    return notes


def _contradictions(
    places: Sequence[Place], hosts: Sequence[int], names: Sequence[str]
) -> list[Note]:
    """One agent of torchrun on several hosts, or one machine that is several hosts."""
    of_agent: dict[int, set[int]] = defaultdict(set)
    of_machine: dict[str, set[int]] = defaultdict(set)
    for place, host in zip(places, hosts, strict=True):
        if place.agent is not None:
            of_agent[place.agent].add(host)
        if place.machine:
            of_machine[place.machine].add(host)
    agents = [agent for agent, found in of_agent.items() if len(found) > 1]
    machines = [found for found in of_machine.values() if len(found) > 1]
    notes = []
    if agents:
        notes.append(
            Note(
                f"one agent of torchrun (GROUP_RANK {agents[0]}) has ranks on "
                f"{_named(sorted(of_agent[agents[0]]), names)}; hosts are taken as they are named"
            )
        )
    if machines:
        notes.append(
            Note(
                f"{_named(sorted(machines[0]), names)} are containers of one machine, which NCCL "
                "takes for several hosts; where that is wrong give NCCL_HOSTID the same value in "
                "them"
            )
        )
    return notes


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _named(hosts: Sequence[int], names: Sequence[str]) -> str:
    shown = ", ".join(names[host] for host in hosts[:4])
    return shown + (f", ... ({len(hosts)} hosts)" if len(hosts) > 4 else "")
