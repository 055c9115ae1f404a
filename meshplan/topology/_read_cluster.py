"""Builds one cluster from files, numbers on the command line and a scheduler's variables.

A fact that no input has stays unknown. Contradicting inputs are refused: the wrong one cannot be
identified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from meshplan.errors import TopologyError
from meshplan.topology._assignment import HostKind, HostPlan, Inputs, plan_hosts
from meshplan.topology._blocks import explain_unused, join_blocks
from meshplan.topology._cluster import Cluster, SourcedNote
from meshplan.topology._files import read_file, show_file
from meshplan.topology._model import Topology
from meshplan.topology._reading import Groups, Note, Reading

# More GPUs than any host has: a domain of more than these is one of several hosts.
_LARGEST_HOST = 16


def read_cluster(
    inputs: Inputs,
    world_size: int,
    environ: Mapping[str, str],
    *,
    read: Callable[[str], Reading] = read_file,
) -> Cluster | None:
    readings = [(name, read(name)) for name in inputs.files]
    notes = tuple(SourcedNote(name, note) for name, reading in readings for note in reading.notes)
    kinds = [HostKind.of(name, reading) for name, reading in readings if reading.scope == "host"]
    kinds = [kind for kind in kinds if kind.gpus]
    whole = [(name, r) for name, r in readings if r.scope != "host" and r.nodes is not None]
    if whole:
        return _build_from_nodes(inputs, world_size, whole, notes)
    plan = plan_hosts(inputs, world_size, environ, kinds)
    blocks = [(name, reading.blocks) for name, reading in readings if reading.blocks]
    if plan is not None and blocks:
        joined = join_blocks(blocks, plan, inputs.domain_size, notes)
        if joined is not None:
            return joined
        if inputs.domain_size is None:
            notes += (explain_unused(blocks[0][0], plan),)
    if plan is not None:
        return _build_from_plan(inputs.domain_size, plan, kinds, notes)
    if not readings:
        return None
    return Cluster(Topology.unknown(world_size), notes, origin="nodes unknown")


def _build_from_nodes(
    inputs: Inputs,
    world_size: int,
    whole: Sequence[tuple[str, Reading]],
    notes: tuple[SourcedNote, ...],
) -> Cluster:
    if len(whole) > 1:
        names = " and ".join(show_file(name) for name, _ in whole)
        raise TopologyError(f"{names} each specify the nodes of all ranks; pass one of them")
    name, reading = whole[0]
    unit = "rank" if reading.scope == "ranks" else "GPU"
    if inputs.hosts or inputs.node_size or inputs.domain_size or inputs.rank_order != "block":
        raise TopologyError(
            f"{show_file(name)} specifies the node of every {unit}; leave out --hosts, "
            "--node-size, --domain-size and --rank-order"
        )
    node_of = {rank: i for i, node in enumerate(reading.nodes or ()) for rank in node}
    fits = len(node_of) == world_size if reading.scope == "ranks" else len(node_of) >= world_size
    if not fits or any(rank not in node_of for rank in range(world_size)):
        raise TopologyError(
            f"{show_file(name)} specifies the nodes of {len(node_of)} {unit}s, and the mesh has "
            f"{world_size} ranks; pass the input or the mesh of the other"
        )
    nodes = [node_of[rank] for rank in range(world_size)]
    counts = Counter(nodes)
    uneven = _note_uneven([counts[node] for node in sorted(counts)], show_file(name))
    return Cluster(Topology.of(nodes), notes + uneven, origin=f"nodes from {show_file(name)}")


def _build_from_plan(
    size: int | None, plan: HostPlan, kinds: Sequence[HostKind], notes: tuple[SourcedNote, ...]
) -> Cluster:
    for host, ranks in enumerate(plan.per_host) if kinds else ():
        kind = kinds[plan.kinds[host]]
        if ranks > kind.gpus:
            raise TopologyError(
                f"host {host} has {ranks} ranks, and {show_file(kind.source)} shows {kind.gpus} "
                "GPUs; pass the description of that host"
            )
    if len({(kind.gpus, kind.domains) for kind in kinds}) > 1:
        text = "; ".join(f"{show_file(kind.source)}: {kind}" for kind in kinds)
        note = Note(f"hosts are not identical: {text}", code="MP204")
        notes += (SourcedNote(kinds[-1].source, note),)
    notes += _note_uneven(plan.per_host, kinds[0].source if kinds else "")
    gpus = max((kind.gpus for kind in kinds), default=max(plan.per_host))
    hosts: tuple[str, ...] = ()
    if plan.given is not None and plan.given.names:
        hosts = tuple(plan.given.names[host] for host in plan.given.hosts)
    if size is not None and size > gpus and (kinds or (gpus <= _LARGEST_HOST < size)):
        # The domain size shows that a description of one tray is not the whole domain.
        notes = tuple(n for n in notes if n.note.code != "MP203")
        origin = f"{plan.origin}, {size // gpus} hosts a clique"
        return Cluster(_join_cliques(size, plan, kinds, gpus), notes, size, hosts, origin=origin)
    topology, domain_gpus = _build_topology(size, plan, kinds)
    return Cluster(topology, notes, domain_gpus, hosts, origin=plan.origin)


def _join_cliques(size: int, plan: HostPlan, kinds: Sequence[HostKind], gpus: int) -> Topology:
    if size % gpus or any(kind.gpus != gpus for kind in kinds):
        raise TopologyError(
            f"--domain-size {size} is not a number of whole hosts of {gpus} GPUs; pass "
            "--rank-order FILE with the rack of each rank"
        )
    # If only some GPUs of a host are in the domain of the clique, these GPUs are unknown.
    whole = all(kind.domains is None or len(kind.domains) == 1 for kind in kinds)
    nodes = [host // (size // gpus) for host in plan.assignment.hosts]
    return Topology.of(nodes, nodes if whole else None)


def _build_topology(
    size: int | None, plan: HostPlan, kinds: Sequence[HostKind]
) -> tuple[Topology, int | None]:
    of_kind = [_find_domains(kind, size) for kind in kinds]
    of_kind = of_kind or [_split(max(plan.per_host), size)]
    sizes = {len(group) for domains in of_kind for group in domains or ()}
    domain_gpus = size or (sizes.pop() if len(sizes) == 1 else None)
    block, first = plan.block, of_kind[0]
    # Full hosts of one kind with domains of consecutive GPUs need no arrays.
    if block is not None and first == _split(sum(map(len, first or ())), domain_gpus):
        # A million ranks are two numbers then.
        domain = None if first is None or domain_gpus is None else min(domain_gpus, block)
        world_size = sum(plan.per_host)
        return Topology.uniform(world_size, node_size=block, domain_size=domain), domain_gpus
    assignment = plan.assignment
    known = [domains for domains in of_kind if domains is not None]
    if len(known) < len(of_kind):
        return Topology.of(assignment.hosts), domain_gpus
    # Number the domains over all hosts: the first number of each host, plus the number inside it.
    number = [{gpu: i for i, group in enumerate(domains) for gpu in group} for domains in known]
    starts = list(accumulate((len(known[kind]) for kind in plan.kinds), initial=0))
    # Numbered by appearance, so that clusters are equal whatever GPUs the job leaves out.
    seen: dict[int, int] = {}
    domain_of = [
        seen.setdefault(starts[host] + number[plan.kinds[host]][gpu], len(seen))
        for host, gpu in zip(assignment.hosts, assignment.gpus, strict=True)
    ]
    return Topology.of(assignment.hosts, domain_of), domain_gpus


def _find_domains(kind: HostKind, size: int | None) -> Groups | None:
    if kind.domains is None:
        return _split(kind.gpus, size)
    found = sorted({len(group) for group in kind.domains})
    if size is not None and found != [size]:
        raise TopologyError(
            f"{show_file(kind.source)} shows domains of {' and '.join(map(str, found))} GPUs, and "
            f"--domain-size is {size}; leave out the wrong one"
        )
    return kind.domains


def _split(gpus: int, size: int | None) -> Groups | None:
    """Domains of consecutive GPUs; ``None`` without ``size``."""
    if size is None:
        return None
    return tuple(tuple(range(at, min(at + size, gpus))) for at in range(0, gpus, size))


def _note_uneven(counts: Sequence[int], source: str) -> tuple[SourcedNote, ...]:
    low, high = min(counts), max(counts)
    if low == high:
        return ()
    few, many = (sum(count == end for count in counts) for end in (low, high))
    message = f"{few} of {len(counts)} nodes {'has' if few == 1 else 'have'} {low} ranks"
    message += f", {many} {'has' if many == 1 else 'have'} {high}"
    return (SourcedNote(source, Note(message)),)
