"""Jobs for tests of the linter."""

from __future__ import annotations

from typing import Any

from meshplan.layout import Layout
from meshplan.lint._finding import Finding, Source
from meshplan.lint._job import Job

__all__ = ["job", "layout", "shown"]


def layout(mesh: str) -> Layout:
    """From ``ddp=8,fsdp=5``."""
    pairs = [axis.split("=") for axis in mesh.split(",")]
    return Layout.of(**{axis: int(size) for axis, size in pairs})


def job(mesh: str, **options: Any) -> Job:
    """A job as ``--mesh`` makes it."""
    return Job(layout(mesh), Source(option=f"--mesh {mesh}"), **options)


def shown(findings: Any) -> str:
    """Findings as text for comparisons."""
    lines = []
    finding: Finding
    for finding in findings:
        lines.append(f"{finding.severity} {finding.code} {finding.message}")
        lines += [f"  {line}" for line in finding.details]
        lines += [f"  fix: {fix.title} ({fix.cost})" for fix in finding.fixes]
    return "\n".join(lines)
