"""How many ranks each host takes, from what a user, files and the environment say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshplan.errors import TopologyError
from meshplan.topology._hosts import Placed, hand_out, is_rank_order, of_hosts, ranks_from_file
from meshplan.topology._reading import Groups, Reading
from meshplan.topology.formats._hostlist import hostlist
from meshplan.topology.formats.slurm_env import placement

__all__ = ["Host", "Inputs", "Placing", "placing_of", "shown"]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a user says of where ranks sit. All of it may be left out.

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
                raise TopologyError(f"{option} is {value}; write a number from 1 on")


@dataclass(frozen=True, slots=True)
class Host:
    """One kind of host.

    Attributes:
        gpus: how many it has.
        domains: which of its GPUs, counted from 0 on, are joined; ``None`` if unknown.
        source: name of the file that says so.
    """

    gpus: int
    domains: Groups | None
    source: str

    @classmethod
    def of(cls, source: str, reading: Reading) -> Host:
        """Of a reading about one host; without GPUs if it does not list them."""
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
class Placing:
    """Where ranks are, and how this is known.

    Attributes:
        per_host: ranks of each host.
        kinds: of each host, the position of its kind.
        origin: one line for people.
        order: in which ranks are handed out to the hosts.
        given: where ranks are, if it is not by such an order.
    """

    per_host: tuple[int, ...]
    kinds: tuple[int, ...]
    origin: str
    order: str = "block"
    given: Placed | None = None

    @classmethod
    def at(cls, placed: Placed, origin: str) -> Placing:
        """Ranks that have been placed already, on hosts that are alike."""
        counts = Counter(placed.hosts)
        per_host = tuple(counts[host] for host in range(max(counts) + 1))
        return cls(per_host, (0,) * len(per_host), origin, given=placed)

    def placed(self) -> Placed:
        """Host and GPU of each rank."""
        return self.given or hand_out(self.per_host, self.order)

    def block(self) -> int | None:
        """Ranks of each host but the last, which may have fewer, if ranks fill host after host."""
        size = self.per_host[0]
        even = all(count == size for count in self.per_host[:-1]) and self.per_host[-1] <= size
        plain = self.given is None and self.order == "block" and not any(self.kinds)
        return size if even and plain else None


def placing_of(
    inputs: Inputs, world_size: int, environ: Mapping[str, str], kinds: Sequence[Host]
) -> Placing | None:
    """Where ranks are; ``None`` if nothing says it.

    The environment is asked where a user tells no hosts: Slurm's variables of a job step, and
    torchrun's ``LOCAL_WORLD_SIZE`` where there are no files either.

    Raises:
        TopologyError: numbers that do not fit each other, the files or the job.
        TopologyInputError: a file of ranks, or variables, that cannot be understood.
    """
    if not is_rank_order(inputs.rank_order):
        return _from_file(inputs, world_size, kinds)
    if len(kinds) > 1:
        return _of_kinds(inputs, world_size, kinds)
    if len(inputs.hosts) > 1:
        return _of_list(inputs, world_size)
    if not inputs.hosts and inputs.node_size is None:
        slurm = placement(environ)
        if slurm is not None:
            _check(len(slurm), "Slurm's variables", world_size, "unset SLURM_TASKS_PER_NODE")
            names = hostlist(environ.get("SLURM_JOB_NODELIST") or environ["SLURM_NODELIST"])
            return Placing.at(of_hosts(slurm, tuple(names)), "Slurm's variables")
        if not kinds and inputs.domain_size is None:
            return _from_launcher(inputs, world_size, environ)
    return _of_numbers(inputs, world_size, kinds[0] if kinds else None)


def shown(name: str) -> str:
    """A file's name as messages show it."""
    return "standard input" if name == "-" else name


def _from_file(inputs: Inputs, world_size: int, kinds: Sequence[Host]) -> Placing:
    if inputs.hosts or inputs.node_size:
        raise TopologyError(
            "a file with the host of each rank tells it all; leave out --hosts and --node-size"
        )
    if len(kinds) > 1:
        raise TopologyError(
            f"{len(kinds)} files describe a host, and nothing says which hosts are of which kind; "
            "give one of them, or --hosts with block, cyclic or plane=N"
        )
    placed = ranks_from_file(inputs.rank_order)
    _check(len(placed.hosts), shown(inputs.rank_order), world_size, "write one line for each rank")
    return Placing.at(placed, f"hosts from {shown(inputs.rank_order)}")


def _of_kinds(inputs: Inputs, world_size: int, kinds: Sequence[Host]) -> Placing:
    counts = inputs.hosts or (1,) * len(kinds)
    if len(counts) != len(kinds):
        raise TopologyError(
            f"{len(kinds)} files describe a host, and --hosts has {len(counts)} "
            f"number{'s' if len(counts) > 1 else ''}; write one for each, as in --hosts "
            f"{','.join(str(2 + i % 2) for i in range(len(kinds)))}"
        )
    kind_of_host = tuple(i for i, count in enumerate(counts) for _ in range(count))
    per_host = [inputs.node_size or kinds[i].gpus for i in kind_of_host]
    if sum(per_host) != world_size:
        raise TopologyError(
            f"{len(per_host)} hosts take {sum(per_host)} ranks, and the mesh has {world_size}; "
            "write --hosts with how many hosts there are of each file"
        )
    origin = f"{len(per_host)} hosts of {len(kinds)} kinds"
    return Placing(tuple(per_host), kind_of_host, origin, inputs.rank_order)


def _of_list(inputs: Inputs, world_size: int) -> Placing:
    if inputs.node_size or sum(inputs.hosts) != world_size:
        raise TopologyError(
            f"--hosts has {sum(inputs.hosts)} ranks on {len(inputs.hosts)} hosts, and the mesh has "
            f"{world_size}; write the ranks of each host, without --node-size, or the number of "
            "hosts"
        )
    count = len(inputs.hosts)
    return Placing(inputs.hosts, (0,) * count, f"{count} hosts", inputs.rank_order)


def _from_launcher(inputs: Inputs, world_size: int, environ: Mapping[str, str]) -> Placing | None:
    local = environ.get("LOCAL_WORLD_SIZE", "")
    if not (local.isascii() and local.isdigit() and len(local) < 8 and int(local)):
        return None
    hosts, left = divmod(world_size, int(local))
    if left:
        raise TopologyError(
            f"LOCAL_WORLD_SIZE={local} does not divide the {world_size} ranks of the mesh; write "
            "--node-size, or --rank-order FILE with the host of each rank"
        )
    origin = f"{hosts} hosts of LOCAL_WORLD_SIZE={local}"
    return Placing((int(local),) * hosts, (0,) * hosts, origin, inputs.rank_order)


def _of_numbers(inputs: Inputs, world_size: int, kind: Host | None) -> Placing:
    """Hosts that are all alike."""
    hosts = inputs.hosts[0] if inputs.hosts else None
    room = kind.gpus if kind else None
    size = inputs.node_size or room or inputs.domain_size
    if hosts is not None and inputs.node_size is None and world_size % hosts == 0:
        # Launchers give each host as many ranks as the others.
        share = world_size // hosts
        size = share if room is None else min(share, room)
    if size is None:
        raise TopologyError(
            f"{world_size} ranks cannot be the same number on each of {hosts} hosts; write "
            "--node-size, or --rank-order FILE with the host of each rank"
        )
    if kind is not None and size > kind.gpus:
        raise TopologyError(
            f"--node-size is {size}, and {shown(kind.source)} shows {kind.gpus} GPUs; write a "
            "number up to that"
        )
    needed = -(-world_size // size)
    if hosts is not None and needed > hosts:
        raise TopologyError(
            f"{hosts} hosts of {size} GPUs take {hosts * size} ranks, and the mesh has "
            f"{world_size}; write --hosts {needed}, or a mesh of {hosts * size} ranks"
        )
    per_host = (size,) * (needed - 1) + (world_size - size * (needed - 1),)
    origin = f"{needed} host{'s' if needed > 1 else ''} of {min(size, world_size)} ranks"
    if inputs.rank_order != "block":
        origin += f", {inputs.rank_order}"
    return Placing(per_host, (0,) * needed, origin, inputs.rank_order)


def _check(found: int, what: str, world_size: int, remedy: str) -> None:
    if found != world_size:
        raise TopologyError(
            f"{what} tell the hosts of {found} ranks, and the mesh has {world_size}; {remedy}, or "
            "give the mesh of that job"
        )
