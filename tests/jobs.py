"""Jobs for tests of the linter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshplan.layout import Layout
from meshplan.lint._facts import JobFacts
from meshplan.lint._finding import Finding, Source
from meshplan.lint._job import Job
from meshplan.lint._rules._rule import RULES
from meshplan.topology import Cluster, Topology


def layout(mesh: str) -> Layout:
    """From ``ddp=8,fsdp=5``."""
    pairs = [axis.split("=") for axis in mesh.split(",")]
    return Layout.of(**{axis: int(size) for axis, size in pairs})


def job(mesh: str, **options: Any) -> Job:
    """A job as ``--mesh`` makes it."""
    return Job(layout(mesh), Source(option=f"--mesh {mesh}"), **options)


def run_rules(codes: str, one: Job, where: Topology | Cluster | None = None) -> list[Finding]:
    """What rules, such as ``MP101 MP102``, find of a job, without its fixes.

    Without a cluster, on one of which nothing is known.
    """
    if where is None:
        where = Topology.unknown(one.layout.highest_rank + 1)
    facts = JobFacts(one, where if isinstance(where, Cluster) else Cluster(where))
    found = []
    for rule in (RULES[code] for code in codes.split()):
        assert rule.subject == "mesh"
        found += rule.run(facts) if facts.allows(rule) else ()
    return [replace(finding, fixes=()) for finding in found]


def format_findings(findings: Any) -> str:
    """Findings as text for comparisons."""
    lines = []
    finding: Finding
    for finding in findings:
        lines.append(f"{finding.severity} {finding.code} {finding.message}")
        lines += [f"  {line}" for line in finding.details]
        lines += [f"  fix: {fix.title} ({fix.cost})" for fix in finding.fixes]
    return "\n".join(lines)
