"""MP101 to MP108: reductions whose replicas may differ, what a mesh and its placement cost, and
flattened meshes that corrupt data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from meshplan._chunks import chunk_sizes, nested_chunk_sizes
from meshplan._message_text import elide, format_first
from meshplan.lint._finding import Finding, Fix, join_names
from meshplan.lint._programs import find_fix, is_reached
from meshplan.lint._rules._rule import Rule, rule

if TYPE_CHECKING:
    from meshplan.layout import Layout
    from meshplan.lint._facts import JaggedReduction, JobFacts
    from meshplan.lint._job import Job
    from meshplan.planner import Hazard
    from meshplan.topology import Topology

_MOST_SIGNATURES = 6
_MOST_LISTED = 1000  # ranks or signatures, in the data for programs
# Racks that NVLink joins have 36, 72 or 144 GPUs. Hosts of other sizes are no finding.
_SMALLEST_RACK = 32
_MOST_ORDERS = 8  # that are checked by all rules


@rule(
    "mesh",
    "MP101",
    "jagged-reduction",
    "error",
    "Groups that must agree are placed on nodes in different ways; replicas may differ.",
    needs="nodes",
)
def _check_jagged(rule: Rule, facts: JobFacts) -> Iterator[Finding]:
    for jagged in facts.harmful:
        yield _report_jagged(rule, facts, jagged)


def _report_jagged(rule: Rule, facts: JobFacts, jagged: JaggedReduction) -> Finding:
    hazard, unit = jagged.hazard, "domain" if jagged.islands else "node"
    placement = facts.find_placement(hazard.axes, islands=jagged.islands)
    details = [
        f"in {jagged.reductions.what}",
        *([facts.job.every_size] if facts.job.every_size else []),
        _describe_signatures(placement.signatures, unit),
    ]
    simulated: dict[str, float] = {}
    if jagged.islands:
        details.append("the same on nodes; the order inside a node of several domains is unknown")
    else:
        channel = f" of channel {hazard.channel}" if hazard.channel else ""
        details += [
            f"{hazard.algorithm}{channel}, ranks {format_first(one.ranks)} "
            f"{_format_signature(one.signature)}: {elide(one.expression)}"
            for one in hazard.examples
        ]
        simulated = {str(name): share for name, share in facts.simulate(hazard).items()}
    what = jagged.reductions.what.partition(":")[0]
    scalar = what in ("the gradient norm", "the loss")
    shares = ", ".join(
        f"{name} {share:.0%} of {'draws' if scalar else 'elements'} differ"
        if share
        else f"{name} none differ"
        for name, share in simulated.items()
    )
    if shares:
        details.append(f"simulated, 1 channel, float32: {shares}")
    details.append(f"order undocumented under {', '.join(hazard.unknown)}")
    if not is_reached(facts.job.program):
        fix = find_fix(facts.job.program)
        remedy = {
            "backend": "they pass torch's process groups, and not DTensor",
            "plugin": "only its plugin reaches them",
        }.get(fix.way, "only another mesh or launch changes how they are placed")
        details.append(f"{fix.name} issues these reductions itself: {remedy}")
    return rule.make_mesh_finding(
        facts,
        f"replicas may differ{f' in {what}' * scalar}: the {hazard.groups} groups of "
        f"{hazard.group_size} ranks over {join_names(hazard.labels)} are placed on "
        f"{unit}s in {placement.ways} different ways, but their results must be "
        f"identical across {join_names(hazard.along)}",
        *details,
        fixes=facts.fixes,
        severity="warning" if facts.job.is_open else rule.severity,
        axes=list(hazard.labels),
        along=list(hazard.along),
        groups=hazard.groups,
        group_size=hazard.group_size,
        siblings=hazard.siblings,
        signatures=_list_signatures(placement.signatures, unit),
        orders=dict(hazard.classes),
        examples=[] if jagged.islands else _list_examples(hazard),
        simulated_share=simulated,
    )


@rule(
    "mesh",
    "MP102",
    "jagged-not-shown-to-differ",
    "info",
    "Groups of an axis are placed on nodes in different ways; replicas are not shown to differ.",
    needs="nodes",
)
def _check_not_shown(rule: Rule, facts: JobFacts) -> Iterator[Finding]:
    for jagged in facts.harmful:
        order = facts.find_safe_order(jagged)
        if order:
            yield rule.make_mesh_finding(
                facts,
                f"replicas are not shown to differ if {order[0]} is reduced first: "
                f"{', then '.join(order)}; they may differ if it is reduced last, or by itself",
                axes=list(jagged.hazard.labels),
                order=list(order),
            )
    harmful = {jagged.hazard.axes for jagged in facts.harmful}
    for axes in dict.fromkeys(step for r in facts.reductions for step in r.steps):
        placement = facts.find_placement(axes)
        if axes in harmful or placement.ways == 1:
            continue
        names = facts.name_axes(axes)
        yield rule.make_mesh_finding(
            facts,
            f"groups over {join_names(names)} are placed on nodes in {placement.ways} different "
            f"ways; replicas are not shown to differ: {_explain_agreement(facts, axes)}",
            _describe_signatures(placement.signatures, "node"),
            axes=list(names),
            signatures=_list_signatures(placement.signatures, "node"),
        )


def _explain_agreement(facts: JobFacts, axes: tuple[int, ...]) -> str:
    if math.prod(facts.layout.sizes[i] for i in axes) == 2:
        return "a sum of two does not depend on its order"
    # Siblings must agree, and no channel of the model has them add in different orders.
    if any(axes in r.steps and axes in facts.find_hazards(r) for r in facts.reductions):
        return "siblings have equal rings and equal trees, of both kinds, in the model"
    if all(facts.job.roles[i] == "model" for i in axes):
        return "no two of the groups add the same activations"
    return "no two groups that add the same values must agree"


def _list_examples(hazard: Hazard) -> list[dict[str, Any]]:
    """For programs: whole, unless that is megabytes."""
    return [
        {
            "ranks": list(one.ranks[:_MOST_LISTED]),
            "signature": list(one.signature[:_MOST_LISTED]),
            "algorithm": hazard.algorithm,
            "channel": hazard.channel,
            "order": one.expression if len(one.ranks) <= _MOST_LISTED else elide(one.expression),
        }
        for one in hazard.examples
    ]


def _list_signatures(
    signatures: Sequence[tuple[tuple[int, ...], int]], unit: str
) -> list[dict[str, list[int] | int]]:
    return [
        {f"ranks_per_{unit}": list(signature[:_MOST_LISTED]), "groups": count}
        for signature, count in signatures[:_MOST_LISTED]
    ]


def _describe_signatures(signatures: Sequence[tuple[tuple[int, ...], int]], unit: str) -> str:
    parts = [
        f"{_format_signature(signature)} in {count} group{'s' if count > 1 else ''}"
        for signature, count in signatures[:_MOST_SIGNATURES]
    ]
    rest = len(signatures) - len(parts)
    more = f"; {rest} more" if rest else ""
    return f"ranks per {unit}, in rank order: {'; '.join(parts)}{more}"


def _format_signature(signature: Sequence[int]) -> str:
    return elide(f"({', '.join(map(str, signature))})")


@rule(
    "mesh",
    "MP103",
    "group-spans-domains",
    "warning",
    "Groups of an axis span NVLink domains; in another order of axes fewer do.",
    needs="domains",
)
def _check_spans(rule: Rule, facts: JobFacts) -> Iterator[Finding]:
    """No advice puts groups of model, expert or shard axes on more domains than now.

    Whether tensor parallel groups, experts or shards talk more depends on the model.
    """
    from meshplan.lint._fixes import make_mesh_fix
    from meshplan.lint._orders import count_domains
    from meshplan.lint._spec import format_axes

    job, topology = facts.job, facts.topology
    now = count_domains(job.layout, topology)
    layout = _find_better_order(rule, facts, now) if max(now.values(), default=1) > 1 else None
    if layout is None:
        return
    spread = count_domains(layout, topology)
    freed = [axis for axis in now if spread[axis] < now[axis]]
    where = "one" if all(spread[axis] == 1 for axis in freed) else "fewer"
    details = ", ".join(f"{a} on {now[a]} now, {spread[a]} then" for a in now)
    farther = [axis for axis in now if spread[axis] > now[axis]]
    cost = f"groups over {' and '.join(farther)} span more domains" if farther else ""
    yield rule.make_mesh_finding(
        facts,
        f"groups over {' and '.join(freed)} span domains; in the order "
        f"{', '.join(layout.axes)} each would be on {where}",
        f"{format_axes(layout)}, domains of the most spread group: {details}",
        fixes=(make_mesh_fix(job, layout, "order the axes as", cost),),
        axes=freed,
        order=list(layout.axes),
        domains=now,
        domains_then=spread,
    )


def _find_better_order(rule: Rule, facts: JobFacts, now: dict[str, int]) -> Layout | None:
    """The order of axes whose busiest groups span the fewest domains."""
    from meshplan.lint._fixes import move_job
    from meshplan.lint._orders import (
        count_domains,
        list_axis_orders,
        weigh_domains,
    )

    job = facts.job
    kept = [
        axis
        for axis, role in job.role_of.items()
        if role in ("model", "experts", "shard") and axis in now
    ]
    weight = weigh_domains(job, now)
    better = []
    for layout in list_axis_orders(job.layout):
        spread = count_domains(layout, facts.topology)
        if all(spread[axis] <= now[axis] for axis in kept) and _can_be_written(job, layout):
            better.append((weigh_domains(job, spread), layout))
    # sorted keeps the sequence of equal ones: orders that move the fewest axes come first.
    better = sorted((one for one in better if one[0] < weight), key=lambda one: one[0])
    others = facts.trial.count_codes(without=rule.code) if better else Counter()
    for _, layout in better[:_MOST_ORDERS]:
        changed = type(facts)(move_job(job, layout), facts.cluster, is_trial=True)
        if changed.count_codes(without=rule.code) <= others:
            return layout
    return None


def _can_be_written(job: Job, layout: Layout) -> bool:
    """Whether the program accepts this order of axes, and no other mesh of the file changes.

    A program that makes its own mesh has one order.
    """
    if job.program not in ("unknown", "torch") and (
        job.rewrite is None or job.rewrite(layout) is None
    ):
        return False
    before = job.reread(job.layout) if job.reread else None
    after = job.reread(layout) if job.reread else None
    if before is None or after is None:
        return True
    return all(a.layout == b.layout for a, b in zip(before[1:], after[1:], strict=True))


@rule(
    "mesh",
    "MP104",
    "power-of-two-on-72",
    "warning",
    "An axis whose size is a power of two does not fit domains of 36, 72 or 144 GPUs.",
    needs="domains",
)
def _check_power_of_two(rule: Rule, facts: JobFacts) -> Iterator[Finding]:
    layout, gpus = facts.layout, facts.cluster.domain_gpus
    if gpus is None or gpus < _SMALLEST_RACK or _is_power(gpus) or layout.world_size <= gpus:
        return
    if _count_ranks_of_domain(facts.topology) != gpus:
        return
    blocks = [math.prod(layout.sizes[i:]) for i in range(len(layout.sizes))]
    uneven = [
        (axis, size, block)
        for axis, size, block in zip(layout.axes, layout.sizes, blocks, strict=True)
        if size > 1
        and block < layout.world_size
        and _is_power(size)
        and gpus % block
        and block % gpus
    ]
    if not uneven:
        return
    axis, size, inner = uneven[-1]
    part = 1 << (gpus.bit_length() - 1)
    racks, now = -(-layout.world_size // part), -(-layout.world_size // gpus)
    slurm = "; Slurm with topology/block: --segment=16, 16 hosts of 4 GPUs" if gpus == 72 else ""
    yield rule.make_mesh_finding(
        facts,
        f"{axis}={size} does not divide evenly into domains of {gpus} GPUs: blocks of "
        f"{inner} ranks cross from one domain into the next; take {part} of {gpus} GPUs of each",
        f"{part} of {gpus}: {racks} domains instead of {now}{slurm}",
        axis=axis,
        domain_gpus=gpus,
        take=part,
        domains=racks,
    )


def _count_ranks_of_domain(topology: Topology) -> int | None:
    """Ranks of each domain, but for the last one."""
    if not isinstance(topology.domain_map, int) or not isinstance(topology.node_map, int):
        return None
    return topology.domain_map if topology.node_map % topology.domain_map == 0 else None


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


@rule(
    "mesh",
    "MP105",
    "sequential-reductions",
    "warning",
    "Axes are reduced sequentially; over one flattened group it would be one all-reduce.",
)
def _check_sequential(rule: Rule, facts: JobFacts) -> Iterator[Finding]:
    """Reductions to `Replicate` of DTensor: torch merges steps towards even shards itself."""
    job = facts.job
    # Only the calls of a program, or the user, show that DTensor reduces.
    if (job.framework, job.program) != (
        "dtensor",
        "torch",
    ) or not facts.reductions:
        return
    reductions = facts.reductions[0]
    if len(reductions.steps) < 2 or not reductions.what.startswith("gradients"):
        return
    steps = [[job.layout.axes[i] for i in step] for step in reductions.steps]
    axes = [axis for step in steps for axis in step]
    yield rule.make_mesh_finding(
        facts,
        f"(P, P) -> (R, R) over {' and '.join(axes)} is {len(steps)} all-reduces: "
        f"{', then '.join(map(' and '.join, steps))}; over one flattened group it would be 1",
        f"{find_fix(job.program, job.framework).action}, or flatten these axes once, on every "
        "rank, before training",
        axes=axes,
        reductions=len(steps),
    )


@rule(
    "mesh",
    "MP106",
    "permuted-flatten",
    "error",
    "A mesh whose ranks do not ascend is flattened; shards may be swapped.",
)
def _check_permuted_flatten(rule: Rule, facts: JobFacts) -> Iterator[Finding]:
    layout = facts.layout
    for indices in facts.flattened:
        if layout.ascends(indices):
            continue
        names = [layout.axes[i] for i in indices]
        groups = layout.siblings(indices)
        wrong = groups[(groups[:, 1:] < groups[:, :-1]).any(axis=1)][0].tolist()
        yield rule.make_mesh_finding(
            facts,
            f"the mesh flattened over {' and '.join(names)} does not have its ranks in "
            f"ascending order ({format_first(wrong)}): torch sorts them, and merged all-gathers "
            "and reduce-scatters put shards in the wrong place",
            "no error is raised: tensors are silently wrong",
            axes=names,
            ranks=wrong,
        )


@rule(
    "mesh",
    "MP107",
    "uneven-flatten",
    "error",
    "A dim is sharded unevenly over flattened axes; gathering it may corrupt data.",
)
def _check_uneven_flatten(rule: Rule, facts: JobFacts) -> Iterator[Finding]:
    for indices in facts.flattened:
        sizes = [facts.layout.sizes[i] for i in indices]
        names = [facts.layout.axes[i] for i in indices]
        parts = math.prod(sizes)
        for length in dict.fromkeys(facts.job.dims):
            flat, nested = (
                chunk_sizes(length, parts),
                nested_chunk_sizes(length, sizes),
            )
            if flat == nested:
                continue
            yield rule.make_mesh_finding(
                facts,
                f"a dim of {length} does not divide evenly over {' and '.join(names)} "
                f"({' x '.join(map(str, sizes))}), which the job flattens: torch's merged "
                "all-gather corrupts it",
                f"shards by axis: {format_first(nested)}; of the flattened mesh: "
                f"{format_first(flat)}",
                f"pad the dim to {-(-length // parts) * parts}",
                axes=names,
                dim=length,
                nested=nested[:1000],
                flat=flat[:1000],
            )


@rule(
    "mesh",
    "MP108",
    "group-crosses-blocks",
    "warning",
    "Groups of an axis cross NVLink blocks of the real hosts, though each would fit into one.",
    needs="domains",
)
def _check_crossing(rule: Rule, facts: JobFacts) -> Iterator[Finding]:
    """Sizes and orders of axes are the subjects of MP103 and MP104; here it is the allocation.

    Kernels that exchange tokens between experts need NVLink between all ranks of a group, so that
    crossing groups of experts are an error.
    """
    from meshplan.lint._orders import count_domains_per_group, number_domains

    layout, cluster = facts.layout, facts.cluster
    hosts = cluster.hosts
    # Without names of hosts, the placement is an assumption.
    if not hosts or layout.ranks != range(layout.world_size):
        return
    domains = number_domains(facts.topology).tolist()
    sizes = Counter(domains)
    capacity = cluster.domain_gpus or max(sizes.values())
    per_host = Counter(hosts)
    if capacity <= max(per_host.values()):
        return  # a group that crosses hosts of their own needs another size
    for i, (axis, role) in enumerate(facts.job.role_of.items()):
        # A group is spread over this many consecutive ranks.
        span = math.prod(layout.sizes[i:])
        if role not in ("model", "experts") or layout.sizes[i] == 1 or span > capacity:
            continue
        counts = count_domains_per_group(layout, facts.topology, axis)
        crossing = int((counts > 1).sum())
        if not crossing:
            continue
        placed = [len([*of]) for _, of in groupby(domains)]
        yield rule.make_mesh_finding(
            facts,
            f"{crossing} of the {len(counts)} groups over {axis} cross from one NVLink block into "
            f"another; {span} consecutive ranks fit into a block of {capacity} GPUs",
            f"ranks per block, in rank order: {format_first(placed, 12)}",
            fixes=() if facts.is_trial else tuple(_fix_crossing(facts, span, capacity)),
            severity="error" if role == "experts" else rule.severity,
            axes=[axis],
            crossing=crossing,
            groups=len(counts),
            span=span,
            block_gpus=capacity,
        )


def _fix_crossing(facts: JobFacts, span: int, capacity: int) -> Iterator[Fix]:
    """Another order of the hosts of this allocation, and another allocation; each is tried."""
    from meshplan.lint._orders import number_domains

    hosts = facts.cluster.hosts
    domains = number_domains(facts.topology).tolist()
    per_host = hosts.count(hosts[0])
    uniform = {*Counter(hosts).values()} == {per_host}
    first = {domain: i for i, domain in enumerate(dict.fromkeys(domains))}
    order = sorted(range(len(domains)), key=lambda rank: first[domains[rank]])
    moved = tuple(domains[rank] for rank in order)
    if moved != tuple(domains) and _adds_nothing(facts, moved):
        names = [*dict.fromkeys(hosts[rank] for rank in order)]
        yield Fix(
            f"list the hosts block by block: {format_first(names, 8)}",
            "the same hosts; with Slurm, SLURM_HOSTFILE and --distribution=arbitrary",
        )
    segment = span // per_host
    blocks = tuple(rank // (capacity // span * span) for rank in range(len(domains)))
    if uniform and span % per_host == 0 and _adds_nothing(facts, blocks):
        yield Fix(
            f"allocate whole segments: sbatch --segment={segment} (Slurm with topology/block)",
            f"each {segment} consecutive hosts are in one block; the job may wait longer for them",
        )


def _adds_nothing(facts: JobFacts, blocks: tuple[int, ...]) -> bool:
    """Whether no group crosses blocks if ranks are in these, and no rule finds more than now."""
    from meshplan.topology import Topology

    cluster = replace(facts.cluster, topology=Topology.of(blocks, blocks))
    codes = type(facts)(facts.job, cluster, is_trial=True).codes
    return "MP108" not in codes and codes <= facts.trial.codes
