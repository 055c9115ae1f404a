"""JUnit XML, as servers that show test results read it: a failed test for each finding.

What is only for information is a test that passed. Without findings, each mesh that was judged
is one.
"""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from meshplan.lint._finding import Finding, LintReport
from meshplan.lint._reporters._words import body, one_line, where, whole

__all__ = ["render"]


def render(report: LintReport) -> str:
    """One suite; its counts are those of its tests."""
    cases = [_case(finding) for finding in report.findings] or [
        f"    <testcase {_attributes(name=judged, classname='meshplan')}/>"
        for judged in report.judged or ("lint",)
    ]
    failures = sum(finding.severity != "info" for finding in report.findings)
    numbers = _attributes(name="meshplan", tests=len(cases), failures=failures, errors=0)
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f"<testsuites {numbers}>",
        f"  <testsuite {numbers}>",
        *cases,
        "  </testsuite>",
        "</testsuites>",
    ]
    return "\n".join(lines) + "\n"


def _case(finding: Finding) -> str:
    source = finding.source
    subject = f" {finding.subject}" if finding.subject else ""
    place: dict[str, object] = {}
    if source.file and source.file != "-":
        place["file"] = source.file
        if source.line is not None:
            place["line"] = source.line
    head = _attributes(name=f"{finding.code}{subject}", classname=where(source), **place)
    text = escape("\n".join([whole(finding.message), *body(finding)]))
    if finding.severity == "info":
        inner = f"      <system-out>{text}</system-out>"
    else:
        told = _attributes(type=finding.severity, message=finding.message)
        inner = f"      <failure {told}>{text}</failure>"
    return f"    <testcase {head}>\n{inner}\n    </testcase>"


def _attributes(**values: object) -> str:
    return " ".join(f"{key}={quoteattr(one_line(str(value)))}" for key, value in values.items())
