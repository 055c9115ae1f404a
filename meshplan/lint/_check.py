"""All rules on all jobs, clusters and environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshplan.lint._facts import JobFacts
from meshplan.lint._finding import SEVERITIES, Finding
from meshplan.lint._job import Job
from meshplan.lint._nccl_environment import NcclEnvironment, NcclVersion
from meshplan.lint._rules import RULES

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
    """Most severe first, then by file, line and code; equal ones keep their order.

    Args:
        findings: of one job or several.
    """

    def key(finding: Finding) -> tuple[int, str, int, str]:
        source = finding.source
        severity = -SEVERITIES.index(finding.severity)
        return severity, source.file, source.line or 0, finding.code

    return tuple(sorted(findings, key=key))
