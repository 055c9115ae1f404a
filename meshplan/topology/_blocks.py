"""The block of each rank, from Slurm's topology/block and the hosts of a job.

One NVLink switch system joins the hosts of a block, as in NVL72 racks, and NCCL counts them as one
node. Slurm's blocks may also be parts of a plain network. Hosts of up to 4 GPUs are trays of racks;
of larger hosts, only ``--domain-size`` shows that NVLink joins them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meshplan.errors import TopologyError
from meshplan.topology._assignment import HostPlan
from meshplan.topology._cluster import Cluster, SourcedNote
from meshplan.topology._files import show_file
from meshplan.topology._model import Topology
from meshplan.topology._reading import Note
from meshplan.topology.formats.slurm import expand_hosts

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
    names = plan.given.names if plan.given is not None else ()
    per_host = max(plan.per_host)
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
    assert plan.given is not None
    nodes = [found[host] for host in plan.given.hosts]
    order = {number: i for i, number in enumerate(dict.fromkeys(nodes))}
    numbers = [order[number] for number in nodes]
    return Cluster(
        Topology.of(numbers, numbers),
        notes,
        domain_gpus=sizes.pop() if len(sizes) == 1 else None,
        hosts=tuple(names[host] for host in plan.given.hosts),
        origin=f"{plan.origin}, blocks from {show_file(source)}",
    )


def explain_unused(source: str, plan: HostPlan) -> SourcedNote:
    names = plan.given.names if plan.given is not None else ()
    why = (
        f"hosts have {max(plan.per_host)} ranks, and blocks of such hosts may be parts of a "
        "network; if NVLink joins a block, pass --domain-size"
        if names
        else "the names of the job's hosts are unknown; pass --rank-order FILE with the host of "
        "each rank, or set SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE and SLURM_DISTRIBUTION"
    )
    return SourcedNote(source, Note(f"its blocks are not used: {why}", "MP202"))
