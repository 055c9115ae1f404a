"""Hazards of the reductions that ran: the linter's rules on what was observed.

Its jobs have the meshes that the job made, on the hosts and NVLink domains where its ranks are. The
role of an axis is what the job does with it: a DTensor is sharded or replicated along it, FSDP
reduce-scatters over it. Only reductions that ran outside the contract are judged, over backends
that add in the order of NCCL or in an unknown one. gloo's order does not depend on hosts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from meshplan.layout import Layout
from meshplan.lint._facts import JobFacts, check_environment, check_facts, sort_findings
from meshplan.lint._finding import Finding, Source
from meshplan.lint._job import Job
from meshplan.lint._reductions import Reductions, list_reductions
from meshplan.lint._reporters.text import format_fix
from meshplan.lint._roles import Role
from meshplan.lint._run_script import find_axes
from meshplan.run._ledger import format_ranks
from meshplan.topology import Cluster
from meshplan.topology._locate import RankLocation
from meshplan.topology._merge_locations import merge_locations

Ranks = tuple[int, ...]
_EVEN = ("gloo", "mpi", None)
_PARTS = ("FSDP2", "FSDP1", "DDP", "DTensor", "clip_grad_norm_")


class Ran(NamedTuple):
    """A reduction outside the contract: over which ranks, and which parts of torch called it."""

    ranks: Ranks
    call: str
    parts: tuple[str, ...]


class Observed(NamedTuple):
    """The facts of a job; hashable, because a report is built more often than they change."""

    layouts: tuple[Layout, ...]
    # Whether parameters are replicated, sharded or both along the groups of rank 0.
    uses: frozenset[tuple[Ranks, frozenset[bool]]]
    ran: frozenset[Ran]
    locations: tuple[str, ...]  # of ranks 0, 1, ..., as JSON


class Judged(NamedTuple):
    """The facts of each mesh, and the findings, most severe first."""

    facts: tuple[JobFacts, ...] = ()
    findings: tuple[Finding, ...] = ()


class ObservedFacts(JobFacts):
    """Those of the linter, with only the reductions that ran; a trial of another mesh has all."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        ran: Collection[Ran] = (),
        *,
        is_trial: bool = False,
    ) -> None:
        super().__init__(job, cluster, is_trial=is_trial)
        self._ran = ran

    @cached_property
    def reductions(self) -> tuple[Reductions, ...]:
        """Those of which each step was seen; such a step is no "reduction over one axis alone"."""
        listed = list_reductions(self.job)
        if not self._ran:
            return listed
        found = [one for one in listed if all(self._has_run(one, s) for s in one.steps)]
        taken = {step for one in found if len(one.steps) > 1 for step in one.steps}
        alone = [one for one in found if one.what.startswith("a reduction over")]
        return tuple(one for one in found if one not in alone or one.steps[0] not in taken)

    def _has_run(self, reductions: Reductions, step: tuple[int, ...]) -> bool:
        parts: set[str] = set()
        if reductions.what.startswith("the gradient norm"):
            # Another sum over the same ranks, such as that of a metric, scales no gradient.
            parts = {"clip_grad_norm_", "DTensor"}
        scatters = reductions.what.startswith("gradients") and step != reductions.steps[-1]
        calls = {"all_reduce"} | ({"reduce_scatter"} if scatters or not parts else set())
        return any(
            find_axes(self.layout, one.ranks) == step
            and one.call in calls
            and (not parts or parts.intersection(one.parts))
            for one in self._ran
        )


def read_reduction(row: Mapping[str, Any], ranks_of: Mapping[str, Ranks]) -> Ran | str | None:
    """From a row of the report; the reason if its group is in no mesh, ``None`` if it is safe."""
    if row["kind"] == "contract" or row["backend"] in _EVEN:
        return None
    if row["group"] not in ranks_of:
        # A sum of two does not depend on its order.
        return str(row["group"]) if row["group_size"] > 2 else None
    parts = tuple(one for one in _PARTS if one in row["site"])
    return Ran(ranks_of[row["group"]], row["call"], parts)


@lru_cache(maxsize=4)
def find_hazards(seen: Observed) -> Judged:
    """Judge them."""
    locations = [RankLocation.from_json(json.loads(one)) for one in seen.locations]
    cluster = merge_locations(locations)
    whole = [one for one in seen.layouts if not _is_part(one, seen.layouts)]
    jobs = [_read_job(one, seen) for one in whole if one.highest_rank < len(locations)]
    facts = tuple(ObservedFacts(job, cluster, seen.ran) for job in jobs)
    if not seen.ran:
        return Judged(facts)
    cuda: Any = torch.cuda
    version = cuda.nccl.version() if cuda.is_initialized() else None
    found = [*check_facts(facts)]
    found += check_environment(os.environ, nccl_version=version, driver=None, jobs=jobs)
    return Judged(facts, sort_findings(found))


def _is_part(layout: Layout, layouts: Sequence[Layout]) -> bool:
    """Whether the axes of a mesh, such as a slice, are axes of a larger one."""
    groups = [layout.group_of(layout.ranks[0], axis) or () for axis in range(len(layout.sizes))]
    return any(
        len(other.sizes) > len(layout.sizes)
        and set(layout.ranks) <= set(other.ranks)
        and None not in [find_axes(other, ranks) for ranks in groups]
        for other in layouts
    )


def _read_job(layout: Layout, seen: Observed) -> Job:
    """A mesh, and the use of its axes."""
    flags: list[set[bool]] = [set() for _ in layout.sizes]
    for ranks, replicated in seen.uses:
        for axis in find_axes(layout, ranks) or ():
            flags[axis] |= replicated
    roles: list[Role] = ["unknown" if not one else "model" for one in flags]
    roles = ["replicate" if one == {True} else role for one, role in zip(flags, roles, strict=True)]
    flattened: dict[tuple[str, ...], None] = {}
    parts: set[str] = set()
    for one in seen.ran:
        axes = find_axes(layout, one.ranks) or ()
        parts |= set(one.parts) if axes else set()
        if one.call == "reduce_scatter" and {"FSDP2", "FSDP1"} & set(one.parts):
            for axis in axes:
                roles[axis] = "shard"
        if len(axes) > 1 and "DTensor" in one.parts:
            flattened[tuple(layout.axes[axis] for axis in axes)] = None
    fsdp = "FSDP2" in parts or "FSDP1" in parts
    return Job(
        layout,
        Source(option="device mesh"),
        roles=tuple(roles),
        framework="fsdp2" if fsdp else "ddp" if "DDP" in parts else "dtensor",
        flattened=tuple(flattened),
        program="fsdp1" if "FSDP1" in parts else "torch",
    )


def describe_hazards(
    rows: Sequence[Mapping[str, Any]],
    ranks_of: Mapping[str, Ranks],
    uses: Mapping[Ranks, set[bool]],
    layouts: Sequence[Layout],
    locations: Mapping[int, Any],
    world_size: int,
) -> tuple[list[dict[str, Any]], list[str], Judged]:
    """``hazards`` of the report, what could not be judged, and what both are made of."""
    read = [read_reduction(row, ranks_of) for row in rows]
    ran = frozenset(one for one in read if isinstance(one, Ran))
    outside = sorted({one for one in read if isinstance(one, str)})
    # Who reduces over all ranks has no other group to agree with.
    notes = [
        f"hazards of reductions over {one}: in no device mesh of rank 0"
        for one in outside
        if one != format_ranks(range(world_size))
    ]
    if missing := set(range(world_size)) - locations.keys():
        notes += [f"hazards: the hosts of {format_ranks(sorted(missing))}"] * bool(ran)
        return [], notes, Judged()
    places = tuple(json.dumps(locations[rank], sort_keys=True) for rank in range(world_size))
    used = frozenset((ranks, frozenset(found)) for ranks, found in uses.items())
    try:
        judged = find_hazards(Observed(tuple(layouts), used, ran, places))
    except Exception as error:  # locations that contradict each other; none costs the verdict
        return [], [*notes, f"hazards: {type(error).__name__}: {error}"], Judged()
    for one in judged.facts if ran else ():
        if axes := one.job.find_unknown_axes():
            notes.append(f"hazards over {one.layout}: the use of {', '.join(axes)}")
        if one.topology.domains is None:
            notes.append("NVLink domains of hosts")
    return list(map(_describe, judged.findings)), list(dict.fromkeys(notes)), judged


def _describe(one: Finding) -> dict[str, Any]:
    return {
        "code": one.code,
        "severity": one.severity,
        "mesh": one.subject,
        "text": one.message,
        "details": list(one.details),
        # Another layout: what leaves it as it is, is the same for all findings.
        "fix": next((format_fix(fix) for fix in one.fixes if fix.mesh), None),
        "axes": one.data.get("axes", []),
    }
