"""Reports for CI: GitHub's workflow commands, and JUnit XML."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from meshplan.lint._finding import Finding, LintInput, LintReport, Source
from meshplan.lint._reporters.text import (
    escape_line,
    escape_text,
    format_checked,
    format_details,
    format_name,
    format_reason,
    format_source,
    has_files_without_mesh,
    make_relative,
)


def render_github(report: LintReport) -> str:
    """Workflow commands, which GitHub Actions shows as annotations of files.

    One for each finding, each mesh on nodes of unknown size and each input that was not judged, one
    for all inputs without a mesh.
    https://docs.github.com/actions/reference/workflow-commands-for-github-actions has the format.
    """
    commands = [_write_command(finding) for finding in report.findings]
    commands += [
        f"::notice {_write_place(source)}title=judged::{_escape_data(escape_line(text))}"
        for source, text in report.notes
    ]
    command = "warning" if report.allow_unjudged else "error"
    for one in report.list_unjudged():
        place = _write_place(Source(one.name)) if one.is_file else ""
        text = "\n".join([f"not judged: {format_name(one)}", *map(escape_line, one.why)])
        commands.append(f"::{command} {place}title=not judged::{_escape_data(text)}")
    if has_files_without_mesh(report):
        commands.append(f"::notice title=checked::{_escape_data(format_checked(report))}")
    return "".join(f"{command}\n" for command in commands)


def _write_command(finding: Finding) -> str:
    message = escape_line(finding.message)
    place = _write_place(finding.source)
    if not place:
        message = f"{format_source(finding.source)}: {message}"
    text = _escape_data("\n".join([message, *format_details(finding)]))
    command = finding.severity.replace("info", "notice")
    return f"::{command} {place}title={_escape_property(finding.code)}::{text}"


def _write_place(source: Source) -> str:
    if not source.file or source.file == "-":
        return ""
    line = "" if source.line is None else f"line={source.line},"
    return f"file={_escape_property(make_relative(source.file))},{line}"


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(escape_line(text)).replace(":", "%3A").replace(",", "%2C")


def render_junit(report: LintReport) -> str:
    """JUnit XML: one suite, with a failed test for each finding, a passed one for an "info".

    Without findings, each judged mesh is a passed test. An input that was not judged is a failed
    test, or a skipped one if that is allowed. An input without a mesh is a skipped test.
    """
    inputs = [*report.list_inputs("no mesh"), *report.list_unjudged()]
    failed = [one for one in inputs if one.state == "not judged" and not report.allow_unjudged]
    names = report.judged or (() if inputs else ("lint",))
    cases = [_write_finding(finding) for finding in report.findings] or [
        f"    <testcase {_write_attributes(name=name, classname='meshplan')}/>" for name in names
    ]
    cases += [_write_input(one, one in failed) for one in inputs]
    failures = sum(finding.severity != "info" for finding in report.findings) + len(failed)
    counts = _write_attributes(
        name="meshplan",
        tests=len(cases),
        failures=failures,
        errors=0,
    )
    skipped = len(inputs) - len(failed)
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f"<testsuites {counts}>",
        f"  <testsuite {counts}{f' {_write_attributes(skipped=skipped)}' if skipped else ''}>",
        *cases,
        "  </testsuite>",
        "</testsuites>",
    ]
    return "\n".join(lines) + "\n"


def _write_input(one: LintInput, failed: bool) -> str:
    place = {"file": one.name} if one.is_file else {}
    head = _write_attributes(name=one.state, classname=format_name(one), **place)
    message = format_reason(one)
    inner = f"<skipped {_write_attributes(message=message or one.state)}/>"
    if failed:
        text = escape("\n".join(map(escape_text, one.why)))
        inner = f"<failure {_write_attributes(type='not judged', message=message)}>{text}</failure>"
    return f"    <testcase {head}>\n      {inner}\n    </testcase>"


def _write_finding(finding: Finding) -> str:
    source = finding.source
    subject = f" {finding.subject}" if finding.subject else ""
    place: dict[str, object] = {}
    if source.file and source.file != "-":
        place = {"file": source.file} | ({} if source.line is None else {"line": source.line})
    head = _write_attributes(
        name=f"{finding.code}{subject}",
        classname=format_source(source),
        **place,
    )
    text = escape("\n".join([escape_text(finding.message), *format_details(finding)]))
    inner = f"<system-out>{text}</system-out>"
    if finding.severity != "info":
        attributes = _write_attributes(type=finding.severity, message=finding.message)
        inner = f"<failure {attributes}>{text}</failure>"
    return f"    <testcase {head}>\n      {inner}\n    </testcase>"


def _write_attributes(**values: object) -> str:
    return " ".join(f"{key}={quoteattr(escape_line(str(value)))}" for key, value in values.items())
