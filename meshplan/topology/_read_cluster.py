"""Builds one cluster from files, numbers on the command line and a scheduler's variables.

A fact that no input has stays unknown. Contradicting inputs are refused: the wrong one cannot be
identified.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshplan.errors import TopologyError, TopologyInputError
from meshplan.topology._files import read_content, read_file, show_file
from meshplan.topology._model import Cluster, SourcedNote, Topology
from meshplan.topology._reading import (
    Groups,
    Note,
    Reading,
    format_count,
    number_names,
)
from meshplan.topology.formats.slurm import (
    assign_nodes,
    expand_hosts,
    read_nodes,
)

_ORDERS = re.compile(
    r"(?:block|cyclic|plane=[1-9]\d{0,8})(?:[:,].*)?",
    re.IGNORECASE | re.DOTALL,
)
_SLOTS = re.compile(r"(?:slots=|:)(\d{1,6})", re.ASCII)
_MOST_RANKS = 1 << 24


@dataclass(frozen=True, slots=True)
class Inputs:
    """A user's inputs about the location of ranks, all optional; ``TopologyError`` below 1."""

    files: tuple[str, ...] = ()  # names of files; ``-`` is standard input
    # Number of hosts; or of several files that describe a host, how many there are of
    # each; or else the ranks of each host.
    hosts: tuple[int, ...] = ()
    node_size: int | None = None  # ranks on each host
    # GPUs that NVLink or xGMI joins; of more than a host has: a clique of hosts.
    domain_size: int | None = None
    # ``block``, ``cyclic``, ``plane=N``, or the name of a file with the host of each
    # rank.
    rank_order: str = "block"

    def __post_init__(self) -> None:
        for option, value in (
            *(("--hosts", count) for count in self.hosts),
            ("--node-size", self.node_size),
            ("--domain-size", self.domain_size),
        ):
            if value is not None and value < 1:
                raise TopologyError(f"{option} is {value}; pass a number from 1 up")


@dataclass(frozen=True, slots=True)
class HostKind:
    gpus: int  # number of its GPUs
    # Its joined GPUs, counted from 0 on; ``None`` if unknown.
    domains: Groups | None
    source: str  # name of the file that describes it

    @classmethod
    def of(cls, source: str, reading: Reading) -> HostKind:
        gpus = sorted(gpu for group in reading.domains or reading.nodes or () for gpu in group)
        number = {gpu: i for i, gpu in enumerate(gpus)}
        domains = reading.domains and tuple(
            tuple(number[gpu] for gpu in group) for group in reading.domains
        )
        return cls(len(gpus), domains, source)

    def __str__(self) -> str:
        sizes = " and ".join(str(len(group)) for group in self.domains or ())
        domains = f" in domains of {sizes}" if sizes else ", domains unknown"
        return format_count(self.gpus, "GPU") + domains


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The hosts of a job and the source of this knowledge."""

    per_host: tuple[int, ...]  # ranks of each host
    origin: str  # one line for people
    order: str = "block"  # in which ranks are assigned to the hosts
    # Of each host, the position of its kind; empty: all are of the first.
    kinds: tuple[int, ...] = ()
    # The host of each rank, if they follow no such order.
    given: tuple[int, ...] | None = None
    names: tuple[str, ...] = ()  # of the hosts, by number; empty if they have none

    @property
    def hosts(self) -> tuple[int, ...]:
        return self.given or assign_in_order(self.per_host, self.order)

    @property
    def host_names(self) -> tuple[str, ...]:
        return tuple(self.names[host] for host in self.hosts) if self.names else ()

    @property
    def block(self) -> int | None:
        """Ranks per host, if ranks fill the hosts in sequence. The last may have fewer."""
        size = self.per_host[0]
        even = all(count == size for count in self.per_host[:-1]) and self.per_host[-1] <= size
        plain = self.given is None and self.order == "block" and not any(self.kinds)
        return size if even and plain else None


def is_rank_order(text: str) -> bool:
    """True for ``block``, ``cyclic`` and ``plane=N``, False for the name of a file."""
    found = _ORDERS.fullmatch(text) is not None
    if not found and text.lower().startswith("plane="):
        raise TopologyError(
            f"rank order {text[:60]!r}: a plane is a whole number of ranks from 1 up; pass for "
            "example plane=4"
        )
    return found


def assign_in_order(per_host: Sequence[int], order: str) -> tuple[int, ...]:
    hosts = assign_nodes(per_host, order) if is_rank_order(order) else None
    if hosts is None:
        raise TopologyError(
            f"no rank order {order[:60]!r}; pass block, cyclic, plane=N, or the name of a file "
            "with the host of each rank, one per line"
        )
    return hosts


def read_rank_file(name: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The host of each rank, and names of hosts, from a file; ``-`` is standard input. A line is
    the name of the host of the next rank. ``name slots=8`` (as in Open MPI's hostfiles) and
    ``name:8`` (as in MPICH's) are the next eight ranks. ``#`` starts a comment.
    """
    numbers: dict[str, int] = {}
    hosts: list[int] = []
    for line, content in enumerate(read_content(name).splitlines(), start=1):
        words = content.partition("#")[0].replace(":", " :").split()
        if not words:
            continue
        match = _SLOTS.fullmatch(words[1]) if len(words) == 2 else None
        if words[0].startswith(":") or len(words) > 2 or (len(words) == 2 and match is None):
            raise TopologyInputError(
                f"{show_file(name)}:{line}: expected the host of a rank, or host slots=8, got "
                f"{content.strip()[:60]!r}"
            )
        times = 1 if match is None else int(match[1])
        if len(hosts) + times > _MOST_RANKS:
            raise TopologyInputError(f"{show_file(name)}:{line}: more than {_MOST_RANKS:,} ranks")
        hosts += [numbers.setdefault(words[0], len(numbers))] * times
    if not hosts:
        raise TopologyInputError(
            f"{show_file(name)}: no host in it; list the host of each rank, one per line"
        )
    return tuple(hosts), tuple(numbers)


def plan_hosts(
    inputs: Inputs,
    world_size: int,
    environ: Mapping[str, str],
    kinds: Sequence[HostKind],
) -> HostPlan | None:
    # The most specific input decides: a file with the host of each rank, files of several kinds of
    # hosts, ranks of each host, Slurm's variables, torchrun's, and last the plain numbers.
    if not is_rank_order(inputs.rank_order):
        return _plan_file(inputs, world_size, kinds)
    if len(kinds) > 1:
        return _plan_kinds(inputs, world_size, kinds)
    if len(inputs.hosts) > 1:
        return _plan_list(inputs, world_size)
    if not inputs.hosts and inputs.node_size is None:
        hosts = read_nodes(environ, inputs.rank_order)
        if hosts is not None:
            names = expand_hosts(environ.get("SLURM_JOB_NODELIST") or environ["SLURM_NODELIST"])
            order = "" if environ.get("SLURM_DISTRIBUTION") else f", {inputs.rank_order} order"
            remedy = "unset SLURM_TASKS_PER_NODE"
            return _plan_given(
                hosts,
                names,
                world_size,
                f"Slurm's variables{order}",
                "",
                remedy,
            )
        if not kinds and inputs.domain_size is None:
            return _plan_launcher(inputs, world_size, environ)
    return _plan_numbers(inputs, world_size, kinds[0] if kinds else None)


def _plan_given(
    hosts: tuple[int, ...],
    names: Iterable[str],
    world_size: int,
    source: str,
    prefix: str,
    remedy: str,
) -> HostPlan:
    if len(hosts) != world_size:
        raise TopologyError(
            f"{len(hosts)} ranks have a host in {source}, and the mesh has {world_size}; "
            f"{remedy}, or pass the mesh of that job"
        )
    counts = Counter(hosts)
    per_host = tuple(counts[host] for host in range(max(counts) + 1))
    return HostPlan(per_host, prefix + source, given=hosts, names=tuple(names))


def _plan_file(inputs: Inputs, world_size: int, kinds: Sequence[HostKind]) -> HostPlan:
    if inputs.hosts or inputs.node_size:
        raise TopologyError(
            "a file with the host of each rank is complete; leave out --hosts and --node-size"
        )
    if len(kinds) > 1:
        raise TopologyError(
            f"{len(kinds)} files describe a host, and the kind of each host is unknown; pass one "
            "of them, or --hosts with block, cyclic or plane=N"
        )
    hosts, names = read_rank_file(inputs.rank_order)
    source, remedy = (
        show_file(inputs.rank_order),
        "list one line for each rank",
    )
    return _plan_given(hosts, names, world_size, source, "hosts from ", remedy)


def _plan_kinds(inputs: Inputs, world_size: int, kinds: Sequence[HostKind]) -> HostPlan:
    counts = inputs.hosts or (1,) * len(kinds)
    if len(counts) != len(kinds):
        raise TopologyError(
            f"{len(kinds)} files describe a host, and --hosts has "
            f"{format_count(len(counts), 'number')}; pass one for each, as in --hosts "
            f"{','.join(str(2 + i % 2) for i in range(len(kinds)))}"
        )
    kind_of_host = tuple(i for i, count in enumerate(counts) for _ in range(count))
    per_host = tuple(inputs.node_size or kinds[i].gpus for i in kind_of_host)
    if sum(per_host) != world_size:
        raise TopologyError(
            f"{len(per_host)} hosts have {sum(per_host)} ranks, and the mesh has {world_size}; "
            "pass --hosts with the number of hosts of each file"
        )
    origin = f"{len(per_host)} hosts of {len(kinds)} kinds"
    return HostPlan(per_host, origin, inputs.rank_order, kind_of_host)


def _plan_list(inputs: Inputs, world_size: int) -> HostPlan:
    count = len(inputs.hosts)
    if inputs.node_size or sum(inputs.hosts) != world_size:
        raise TopologyError(
            f"--hosts has {sum(inputs.hosts)} ranks on {count} hosts, and the mesh has "
            f"{world_size}; pass the ranks of each host, without --node-size, or the number of "
            "hosts"
        )
    return HostPlan(inputs.hosts, f"{count} hosts", inputs.rank_order)


def _plan_launcher(
    inputs: Inputs,
    world_size: int,
    environ: Mapping[str, str],
) -> HostPlan | None:
    local = environ.get("LOCAL_WORLD_SIZE", "")
    if not (local.isascii() and local.isdigit() and len(local) < 8 and int(local)):
        return None
    hosts, left = divmod(world_size, int(local))
    if left:
        raise TopologyError(
            f"LOCAL_WORLD_SIZE={local} does not divide the {world_size} ranks of the mesh; pass "
            "--node-size, or --rank-order FILE with the host of each rank"
        )
    origin = f"{hosts} hosts of LOCAL_WORLD_SIZE={local}"
    return HostPlan((int(local),) * hosts, origin, inputs.rank_order)


def _plan_numbers(inputs: Inputs, world_size: int, kind: HostKind | None) -> HostPlan:
    hosts = inputs.hosts[0] if inputs.hosts else None
    room = kind.gpus if kind else None
    size = inputs.node_size or room or inputs.domain_size
    if hosts is not None and inputs.node_size is None and world_size % hosts == 0:
        # Launchers give each host as many ranks as the others.
        share = world_size // hosts
        size = share if room is None else min(share, room)
    if size is None:
        raise TopologyError(
            f"{world_size} ranks cannot be the same number on each of {hosts} hosts; pass "
            "--node-size, or --rank-order FILE with the host of each rank"
        )
    if kind is not None and size > kind.gpus:
        raise TopologyError(
            f"--node-size is {size}, and {show_file(kind.source)} shows {kind.gpus} GPUs; pass a "
            "number up to that"
        )
    needed = -(-world_size // size)
    if hosts is not None and needed > hosts:
        raise TopologyError(
            f"{hosts} hosts of {size} GPUs have {hosts * size} ranks, and the mesh has "
            f"{world_size}; pass --hosts {needed}, or a mesh of {hosts * size} ranks"
        )
    per_host = (size,) * (needed - 1) + (world_size - size * (needed - 1),)
    origin = f"{format_count(needed, 'host')} of {min(size, world_size)} ranks"
    if inputs.rank_order != "block":
        origin += f", {inputs.rank_order}"
    return HostPlan(per_host, origin, inputs.rank_order)


# The block of each rank, from Slurm's topology/block and the hosts of a job.
#
# One NVLink switch system joins the hosts of a block, as in NVL72 racks, and NCCL counts them as
# one node. Slurm's blocks may also be parts of a plain network. Hosts of up to 4 GPUs are trays of
# racks; of larger hosts, only ``--domain-size`` shows that NVLink joins them.

_TRAY = 4  # GPUs
_SHOWN = 4


def join_blocks(
    files: Sequence[tuple[str, tuple[tuple[str, str], ...]]],
    plan: HostPlan,
    domain_size: int | None,
    notes: tuple[SourcedNote, ...],
) -> Cluster | None:
    """The cluster whose nodes and domains are blocks; ``None`` if NVLink does not join them."""
    if len(files) > 1:
        shown = " and ".join(show_file(name) for name, _ in files)
        raise TopologyError(f"{shown} each specify blocks of hosts; pass one of them")
    source, blocks = files[0]
    names, per_host = plan.names, max(plan.per_host)
    if not names or (per_host > _TRAY and (domain_size is None or domain_size <= per_host)):
        return None
    block_of: dict[str, int] = {}
    hosts_of: Counter[int] = Counter()
    for number, (block, text) in enumerate(blocks):
        for host in expand_hosts(text):
            if block_of.setdefault(host, number) != number:
                raise TopologyError(
                    f"{show_file(source)}: host {host} is in blocks {blocks[block_of[host]][0]} "
                    f"and {block}; list each host once"
                )
            hosts_of[number] += 1
    # A node list may have full names of hosts where topology.conf has short ones.
    found = [block_of.get(name, block_of.get(name.partition(".")[0])) for name in names]
    missing = [name for name, number in zip(names, found, strict=True) if number is None]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise TopologyError(
            f"{show_file(source)}: no block has host {', '.join(missing[:_SHOWN])}{more}; pass the "
            "file of this cluster"
        )
    sizes = {hosts_of[number] * per_host for number in found if number is not None}
    if domain_size is not None and sizes != {domain_size}:
        raise TopologyError(
            f"{show_file(source)} has blocks of {' and '.join(map(str, sorted(sizes)))} GPUs, and "
            f"--domain-size is {domain_size}; leave out --domain-size"
        )
    nodes = number_names(found[host] for host in plan.hosts)
    return Cluster(
        Topology.of(nodes, nodes),
        notes,
        domain_gpus=sizes.pop() if len(sizes) == 1 else None,
        hosts=plan.host_names,
        origin=f"{plan.origin}, blocks from {show_file(source)}",
    )


def explain_unused(source: str, plan: HostPlan) -> SourcedNote:
    why = (
        f"hosts have {max(plan.per_host)} ranks, and blocks of such hosts may be parts of a "
        "network; if NVLink joins a block, pass --domain-size"
        if plan.names
        else "the names of the job's hosts are unknown; pass --rank-order FILE with the host of "
        "each rank, or set SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE and SLURM_DISTRIBUTION"
    )
    return SourcedNote(source, Note(f"its blocks are not used: {why}", "MP202"))


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
    return Cluster(
        Topology.of(nodes),
        notes + uneven,
        origin=f"nodes from {show_file(name)}",
    )


def _build_from_plan(
    size: int | None,
    plan: HostPlan,
    kinds: Sequence[HostKind],
    notes: tuple[SourcedNote, ...],
) -> Cluster:
    for host, ranks in enumerate(plan.per_host) if kinds else ():
        kind = kinds[plan.kinds[host] if plan.kinds else 0]
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
    if size is not None and size > gpus and (kinds or (gpus <= _LARGEST_HOST < size)):
        # The domain size shows that a description of one tray is not the whole domain.
        notes = tuple(n for n in notes if n.note.code != "MP203")
        origin = f"{plan.origin}, {size // gpus} hosts a clique"
        topology = _join_cliques(size, plan, kinds, gpus)
        return Cluster(topology, notes, size, plan.host_names, origin=origin)
    topology, domain_gpus = _build_topology(size, plan, kinds)
    return Cluster(topology, notes, domain_gpus, plan.host_names, origin=plan.origin)


def _join_cliques(
    size: int,
    plan: HostPlan,
    kinds: Sequence[HostKind],
    gpus: int,
) -> Topology:
    if size % gpus or any(kind.gpus != gpus for kind in kinds):
        raise TopologyError(
            f"--domain-size {size} is not a number of whole hosts of {gpus} GPUs; pass "
            "--rank-order FILE with the rack of each rank"
        )
    # If only some GPUs of a host are in the domain of the clique, these GPUs are unknown.
    whole = all(kind.domains is None or len(kind.domains) == 1 for kind in kinds)
    nodes = [host // (size // gpus) for host in plan.hosts]
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
        part = None if first is None or domain_gpus is None else min(domain_gpus, block)
        world_size = sum(plan.per_host)
        return Topology.uniform(world_size, node_size=block, domain_size=part), domain_gpus
    if None in of_kind:
        return Topology.of(plan.hosts), domain_gpus
    # The domain of each GPU of a kind.
    domain = [{gpu: i for i, group in enumerate(one or ()) for gpu in group} for one in of_kind]
    taken: Counter[int] = Counter()
    domains = []
    for host in plan.hosts:
        # Launchers assign the GPUs of a host in the order of its ranks.
        domains.append((host, domain[plan.kinds[host] if plan.kinds else 0][taken[host]]))
        taken[host] += 1
    # Numbered by appearance, so that clusters are equal whatever GPUs the job leaves out.
    return Topology.of(plan.hosts, number_names(domains)), domain_gpus


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
