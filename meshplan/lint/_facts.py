"""The facts that rules about a mesh check, each computed once, and all rules on all of them.

The model of NCCL's order can show that siblings may disagree, never that they agree. It has no
order inside a node of several domains: there, siblings with different domain placements may
disagree.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshplan.lint._finding import (
    SEVERITIES,
    Finding,
    Fix,
    join_names,
)
from meshplan.lint._job import Job
from meshplan.lint._programs import is_reached
from meshplan.lint._reductions import (
    Reductions,
    find_gradient_axes,
    find_islands,
    list_reductions,
)
from meshplan.lint._rules._rule import RULES, Rule
from meshplan.lint._rules.environment import NcclEnvironment, NcclVersion
from meshplan.planner import (
    Algorithm,
    Hazard,
    Siblings,
    cache_siblings,
    hazards,
)
from meshplan.topology import Cluster, Topology


@dataclass(frozen=True, slots=True)
class JaggedReduction:
    """A reduction that may make replicas differ."""

    reductions: Reductions  # the redistribution that it is a step of
    hazard: Hazard
    # Whether siblings have the same node placement and different domain placements
    islands: bool = False


class GroupPlacement:
    """The placement of the groups over some axes on nodes, or on the domains inside nodes. A
    pattern, of which there are ``ways``, is the sets of members that share a node; ``signatures``
    are ranks per node, and how many groups have each, by first appearance.
    """

    def __init__(self, siblings: Siblings) -> None:
        self.siblings = siblings
        numbers = np.bincount(siblings.pattern, minlength=len(siblings.signatures)).tolist()
        self.ways = int(siblings.pattern.max()) + 1
        counts: dict[tuple[int, ...], int] = {}
        for signature, count in zip(siblings.signatures, numbers, strict=True):
            counts[signature] = counts.get(signature, 0) + count
        self.signatures = list(counts.items())


class JobFacts:
    """One job on one cluster. Facts about groups need a topology whose nodes are known. In a trial
    only the codes of findings matter: they have no fixes and no simulated shares.
    """

    def __init__(self, job: Job, cluster: Cluster, *, is_trial: bool = False) -> None:
        self.is_trial = is_trial
        self.job = job
        self.cluster = cluster
        self.layout = job.layout
        self.topology: Topology = cluster.topology
        self._siblings_over = cache_siblings(self.layout, self.topology)
        self._placements: dict[tuple[tuple[int, ...], bool], GroupPlacement] = {}
        self._hazards: dict[Reductions, dict[tuple[int, ...], Hazard]] = {}

    def allows(self, rule: Rule) -> bool:
        """Whether the cluster has the facts that a rule needs to check this job."""
        if rule.needs == "nothing":
            return True
        return self.topology.known and (rule.needs == "nodes" or self.topology.domains is not None)

    @cached_property
    def reductions(self) -> tuple[Reductions, ...]:
        """The reductions that the job runs."""
        return list_reductions(self.job)

    @cached_property
    def flattened(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the axes of each mesh that the job flattens, of several wide axes."""
        sizes = self.layout.sizes
        found = (self.layout.axis_indices(axes) for axes in self.job.flattened)
        return tuple(one for one in found if sum(sizes[i] > 1 for i in one) > 1)

    @cached_property
    def fixes(self) -> tuple[Fix, ...]:
        """The changes that make replicas agree."""
        if self.is_trial or self.job.is_open:
            return ()
        from meshplan.lint._fixes import find_fixes

        return find_fixes(self)

    @cached_property
    def trial(self) -> JobFacts:
        """The same facts, to compare with those after a change."""
        same = copy.copy(self)
        same.is_trial = True
        same._hazards = dict(self._hazards)  # its own have no examples
        return same

    def count_codes(self, *, without: str = "") -> Counter[str]:
        """How often each rule about meshes, ``without`` one, finds more than an ``info``."""
        found = (
            rule.run(self)
            for rule in RULES.values()
            if rule.subject == "mesh" and rule.severity != "info" and self.allows(rule)
            if rule.code != without
        )
        return Counter(finding.code for findings in found for finding in findings)

    @cached_property
    def codes(self) -> Counter[str]:
        """`count_codes` of all rules."""
        return self.count_codes()

    def find_hazards(self, reductions: Reductions) -> Mapping[tuple[int, ...], Hazard]:
        """The hazards of the reductions, by axes."""
        if reductions not in self._hazards:
            found = hazards(
                reductions.problem,
                self.topology,
                steps=reductions.steps,
                siblings_over=self._siblings_over,
                with_examples=not self.is_trial,
            )
            self._hazards[reductions] = {hazard.axes: hazard for hazard in found}
        return self._hazards[reductions]

    @cached_property
    def harmful(self) -> tuple[JaggedReduction, ...]:
        """Reductions that may make replicas differ: the first case of each set of axes."""
        found: dict[tuple[int, ...], JaggedReduction] = {}
        for reductions in self.reductions:
            for axes, hazard in self.find_hazards(reductions).items():
                islands = hazard.verdict == "none" and self._islands_differ(hazard)
                if hazard.verdict == "may differ" or islands:
                    found.setdefault(axes, JaggedReduction(reductions, hazard, islands))
        return tuple(found.values())

    def find_placement(self, axes: tuple[int, ...], *, islands: bool = False) -> GroupPlacement:
        """The placement of groups on nodes; with ``islands``, on the domains inside nodes."""
        topology = self._islands if islands else self.topology
        assert topology is not None
        if (axes, islands) not in self._placements:
            over = cache_siblings(self.layout, topology) if islands else self._siblings_over
            self._placements[axes, islands] = GroupPlacement(over(axes))
        return self._placements[axes, islands]

    @cached_property
    def _islands(self) -> Topology | None:
        return find_islands(self.topology)

    def _islands_differ(self, hazard: Hazard) -> bool:
        if self._islands is None:
            return False
        siblings = self.find_placement(hazard.axes, islands=True).siblings
        along = [self.layout.axis_index(axis) for axis in hazard.along]
        patterns = siblings.pattern[siblings.sets(along)]
        return bool((patterns != patterns[:, :1]).any())

    def simulate(self, hazard: Hazard) -> dict[Algorithm, float]:
        """The share of elements in which siblings differ; empty for groups that are too large."""
        if self.is_trial:
            return {}
        from meshplan.planner import (
            predict_divergence,
        )  # with all of the planner

        return predict_divergence(
            self.layout,
            hazard.axes,
            hazard.along,
            self.topology,
        )

    def find_safe_order(self, jagged: JaggedReduction) -> tuple[str, ...]:
        """An order of the gradients' axes, this one first, in which nothing may differ."""
        if self.job.framework != "dtensor" or self.job.reduce_order:
            return ()
        axes, mine = find_gradient_axes(self.job), jagged.hazard.axes
        if len(axes) < 2 or not set(mine) <= set(axes) or not is_reached(self.job.program):
            return ()
        gradients = self.reductions[0]
        if mine not in gradients.steps:
            return ()
        rest = [step for step in gradients.steps if step != mine]
        for order in (rest, rest[::-1]):
            steps = (mine, *order)
            found = self.find_hazards(Reductions(gradients.what, gradients.problem, steps)).values()
            if all(h.verdict == "none" and not self._islands_differ(h) for h in found):
                return tuple(join_names(self.name_axes(step)) for step in steps)
        return ()

    def name_axes(self, axes: Sequence[int]) -> tuple[str, ...]:
        """Names of axes, from their positions."""
        return tuple(self.layout.axes[i] for i in axes)


# Reported once, with the first finding.
NO_AGREEMENT = (
    "no NCCL variable makes groups with different node placements agree: each fixes the "
    "order of one group only"
)


def check_facts(jobs: Sequence[JobFacts]) -> Iterator[Finding]:
    """The findings on each job, and on the descriptions of their clusters, each once. Raises
    TopologyError for a cluster that lacks a rank of its job.
    """
    for facts in jobs:
        for rule in RULES.values():
            if rule.subject == "mesh" and facts.allows(rule):
                yield from rule.run(facts)
    seen = set()
    for facts in jobs:
        for rule in RULES.values():
            for finding in rule.run(facts.cluster) if rule.subject == "cluster" else ():
                key = (finding.code, finding.message, finding.source)
                if key not in seen:
                    seen.add(key)
                    yield finding


def check_environment(
    environ: Mapping[str, str],
    *,
    nccl_version: NcclVersion | None,
    driver: str | None,
    jobs: Sequence[Job],
) -> tuple[Finding, ...]:
    """The findings on the environment of jobs, in the order of codes. Without ``nccl_version``,
    such as (2, 30, 7), they name the versions that they apply to. ``driver`` is NVIDIA's, such as
    550.90.07.
    """
    values = {
        name: value for name, value in sorted(environ.items()) if name.startswith("NCCL_") and value
    }
    nccl = NcclEnvironment(values, nccl_version, driver, jobs)
    rules = [rule for rule in RULES.values() if rule.subject == "environment"]
    found = [finding for rule in rules for finding in rule.run(nccl)]
    if found:
        found[0] = replace(found[0], details=(*found[0].details, NO_AGREEMENT))
    return tuple(found)


def sort_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Most severe first, then by file, line and code; equal ones keep their order."""

    def key(finding: Finding) -> tuple[int, str, int, str]:
        source = finding.source
        severity = -SEVERITIES.index(finding.severity)
        return severity, source.file, source.line or 0, finding.code

    return tuple(sorted(findings, key=key))
