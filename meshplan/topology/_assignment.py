"""Assigns the ranks of a job to hosts, from a user's numbers, files and the environment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshplan.errors import TopologyError, TopologyInputError
from meshplan.topology._files import read_content, show_file
from meshplan.topology._reading import Groups, Reading
from meshplan.topology.formats.slurm import expand_hosts
from meshplan.topology.formats.slurm_env import assign_nodes, read_nodes

_ORDERS = re.compile(r"(?:block|cyclic|plane=[1-9]\d{0,8})(?:[:,].*)?", re.IGNORECASE | re.DOTALL)
_SLOTS = re.compile(r"(?:slots=|:)(\d{1,6})", re.ASCII)
_MOST_RANKS = 1 << 24


@dataclass(frozen=True, slots=True)
class Inputs:
    """A user's inputs about the location of ranks, all optional.

    Attributes:
        files: names of files; ``-`` is standard input.
        hosts: number of hosts; or of several files that describe a host, how many there are of
            each; or else the ranks of each host.
        node_size: ranks on each host.
        domain_size: GPUs that NVLink or xGMI joins; of more than a host has: a clique of hosts.
        rank_order: ``block``, ``cyclic``, ``plane=N``, or the name of a file with the host of each
            rank.

    Raises:
        TopologyError: a number below 1.
    """

    files: tuple[str, ...] = ()
    hosts: tuple[int, ...] = ()
    node_size: int | None = None
    domain_size: int | None = None
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
    """One kind of host.

    Attributes:
        gpus: number of its GPUs.
        domains: its joined GPUs, counted from 0 on; ``None`` if unknown.
        source: name of the file that describes it.
    """

    gpus: int
    domains: Groups | None
    source: str

    @classmethod
    def of(cls, source: str, reading: Reading) -> HostKind:
        gpus = sorted(gpu for group in reading.domains or reading.nodes or () for gpu in group)
        number = {gpu: i for i, gpu in enumerate(gpus)}
        domains = reading.domains and tuple(
            tuple(number[gpu] for gpu in group) for group in reading.domains
        )
        return cls(len(gpus), domains, source)

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"
        if self.domains is None:
            return f"{gpus}, domains unknown"
        sizes = " and ".join(str(len(group)) for group in self.domains)
        return f"{gpus} in domains of {sizes}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """The host and the GPU of ranks 0, 1, 2, ...

    Attributes:
        hosts: number of each rank's host.
        gpus: each rank's GPU of its host: 0, 1, 2, ... in the order of the host's ranks, as
            launchers assign them.
        names: of the hosts, by number; empty if they have none.
    """

    hosts: tuple[int, ...]
    gpus: tuple[int, ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The hosts of a job and the source of this knowledge.

    Attributes:
        per_host: ranks of each host.
        kinds: of each host, the position of its kind.
        origin: one line for people.
        order: in which ranks are assigned to the hosts.
        given: an assignment that follows no such order.
    """

    per_host: tuple[int, ...]
    kinds: tuple[int, ...]
    origin: str
    order: str = "block"
    given: Assignment | None = None

    @property
    def assignment(self) -> Assignment:
        return self.given or assign_in_order(self.per_host, self.order)

    @property
    def block(self) -> int | None:
        """Ranks of each host but the last, which may have fewer, if ranks fill host after host."""
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


def assign_in_order(per_host: Sequence[int], order: str) -> Assignment:
    """Assign ranks to hosts of ``per_host[i]`` ranks each: ``block``, ``cyclic``, ``plane=N``."""
    hosts = assign_nodes(len(per_host), per_host, order) if is_rank_order(order) else None
    if hosts is None:
        raise TopologyError(
            f"no rank order {order[:60]!r}; pass block, cyclic, plane=N, or the name of a file "
            "with the host of each rank, one per line"
        )
    return number_gpus(hosts)


def number_gpus(hosts: Sequence[int], names: tuple[str, ...] = ()) -> Assignment:
    taken: Counter[int] = Counter()
    gpus = []
    for host in hosts:
        gpus.append(taken[host])
        taken[host] += 1
    return Assignment(tuple(hosts), tuple(gpus), names)


def read_rank_file(name: str) -> Assignment:
    """Read a file with the host of each rank; ``-`` is standard input. A line is the name of the
    host of the next rank. ``name slots=8`` (as in Open MPI's hostfiles) and ``name:8`` (as in
    MPICH's) are the next eight ranks. ``#`` starts a comment.
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
    return number_gpus(hosts, tuple(numbers))


def plan_hosts(
    inputs: Inputs, world_size: int, environ: Mapping[str, str], kinds: Sequence[HostKind]
) -> HostPlan | None:
    """The hosts of a job; ``None`` if no input describes them. Without hosts from the user the
    environment counts: Slurm's variables of a job step, and torchrun's ``LOCAL_WORLD_SIZE`` if
    there are no files either.
    """
    # The most specific input decides: a file with the host of each rank, files of several kinds of
    # hosts, ranks of each host, Slurm's variables, torchrun's, and last the plain numbers.
    if not is_rank_order(inputs.rank_order):
        return _plan_file(inputs, world_size, kinds)
    if len(kinds) > 1:
        return _plan_kinds(inputs, world_size, kinds)
    if len(inputs.hosts) > 1:
        return _plan_list(inputs, world_size)
    if not inputs.hosts and inputs.node_size is None:
        slurm = read_nodes(environ, inputs.rank_order)
        if slurm is not None:
            names = expand_hosts(environ.get("SLURM_JOB_NODELIST") or environ["SLURM_NODELIST"])
            given = number_gpus(slurm, tuple(names))
            remedy = "unset SLURM_TASKS_PER_NODE"
            order = "" if environ.get("SLURM_DISTRIBUTION") else f", {inputs.rank_order} order"
            return _plan_given(given, world_size, f"Slurm's variables{order}", "", remedy)
        if not kinds and inputs.domain_size is None:
            return _plan_launcher(inputs, world_size, environ)
    return _plan_numbers(inputs, world_size, kinds[0] if kinds else None)


def _plan_given(
    given: Assignment, world_size: int, source: str, prefix: str, remedy: str
) -> HostPlan:
    if len(given.hosts) != world_size:
        raise TopologyError(
            f"{len(given.hosts)} ranks have a host in {source}, and the mesh has {world_size}; "
            f"{remedy}, or pass the mesh of that job"
        )
    counts = Counter(given.hosts)
    per_host = tuple(counts[host] for host in range(max(counts) + 1))
    return HostPlan(per_host, (0,) * len(per_host), prefix + source, given=given)


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
    given, source = read_rank_file(inputs.rank_order), show_file(inputs.rank_order)
    return _plan_given(given, world_size, source, "hosts from ", "list one line for each rank")


def _plan_kinds(inputs: Inputs, world_size: int, kinds: Sequence[HostKind]) -> HostPlan:
    counts = inputs.hosts or (1,) * len(kinds)
    if len(counts) != len(kinds):
        raise TopologyError(
            f"{len(kinds)} files describe a host, and --hosts has {len(counts)} "
            f"number{'s' if len(counts) > 1 else ''}; pass one for each, as in --hosts "
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
    return HostPlan(per_host, kind_of_host, origin, inputs.rank_order)


def _plan_list(inputs: Inputs, world_size: int) -> HostPlan:
    count = len(inputs.hosts)
    if inputs.node_size or sum(inputs.hosts) != world_size:
        raise TopologyError(
            f"--hosts has {sum(inputs.hosts)} ranks on {count} hosts, and the mesh has "
            f"{world_size}; pass the ranks of each host, without --node-size, or the number of "
            "hosts"
        )
    return HostPlan(inputs.hosts, (0,) * count, f"{count} hosts", inputs.rank_order)


def _plan_launcher(inputs: Inputs, world_size: int, environ: Mapping[str, str]) -> HostPlan | None:
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
    return HostPlan((int(local),) * hosts, (0,) * hosts, origin, inputs.rank_order)


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
    origin = f"{needed} host{'s' if needed > 1 else ''} of {min(size, world_size)} ranks"
    if inputs.rank_order != "block":
        origin += f", {inputs.rank_order}"
    return HostPlan(per_host, (0,) * needed, origin, inputs.rank_order)
