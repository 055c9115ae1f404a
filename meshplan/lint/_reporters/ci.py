"""Reports for CI and other programs: workflow commands of GitHub, JUnit XML, JSON, SARIF 2.1.0."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

import meshplan
from meshplan.errors import PolicyError
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
from meshplan.lint._rules._rule import RULES, format_rule_page

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_FAMILIES = {"MP1": "mesh", "MP2": "cluster", "MP3": "environment"}
_MARKUP = re.compile(r"^#+ |^```.*\n|`", re.MULTILINE)
_LINK = re.compile(r"<(https://[^>]+)>")


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
        commands.append(f"::{command} {place}title=not judged::{_escape_data(_describe(one))}")
    if has_files_without_mesh(report):
        commands.append(f"::notice title=checked::{_escape_data(format_checked(report))}")
    return "".join(f"{command}\n" for command in commands)


def _describe(one: LintInput) -> str:
    return "\n".join([f"{one.state}: {format_name(one)}", *map(escape_line, one.why)])


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
        text = _escape_xml("\n".join(map(escape_text, one.why)))
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
    text = _escape_xml("\n".join([escape_text(finding.message), *format_details(finding)]))
    inner = f"<system-out>{text}</system-out>"
    if finding.severity != "info":
        attributes = _write_attributes(type=finding.severity, message=finding.message)
        inner = f"<failure {attributes}>{text}</failure>"
    return f"    <testcase {head}>\n      {inner}\n    </testcase>"


def _escape_xml(text: str) -> str:
    # It loads 36 modules, which the other formats do not need.
    from xml.sax.saxutils import escape

    return escape(text)


def _write_attributes(**values: object) -> str:
    from xml.sax.saxutils import quoteattr

    return " ".join(f"{key}={quoteattr(escape_line(str(value)))}" for key, value in values.items())


def render_json(report: LintReport) -> str:
    """``findings``, ``judged``, ``ignored``, ``inputs``, ``files``, ``version`` and others."""
    found = {
        "findings": [_make_entry(finding) for finding in report.findings],
        "judged": list(report.judged),
        "ignored": report.ignored,
        "inputs": [asdict(given) for given in report.inputs],
        "allow_unjudged": report.allow_unjudged,
        "files": report.files,
        "meshes": report.meshes,
        "version": meshplan.__version__,
    }
    return json.dumps(_make_plain(found), indent=2, allow_nan=False) + "\n"


def _make_entry(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity,
        "message": finding.message,
        **asdict(finding.source),
        "subject": finding.subject,
        "details": finding.details,
        "fixes": [fix.to_json() for fix in finding.fixes],
        "data": finding.data,
    }


def _make_plain(value: Any) -> Any:
    """``value`` for strict JSON: infinities, NaNs and other objects become their ``str``."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {_escape_surrogates(str(key)): _make_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((_make_plain(one) for one in value), key=str)
    return _escape_surrogates(str(value))


def _escape_surrogates(text: str) -> str:
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def render_sarif(report: LintReport) -> str:
    """SARIF 2.1.0: one run; its rules are those of the findings.

    The format: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html. GitHub's use of
    it: https://docs.github.com/code-security/reference/code-scanning/sarif-files/sarif-support. A
    finding about the command line or the environment has a logical location and no file.
    """
    codes = sorted({finding.code for finding in report.findings})
    seen: Counter[str] = Counter()
    run: dict[str, Any] = {
        "tool": {
            "driver": {
                "name": "meshplan",
                "version": meshplan.__version__,
                "rules": [_make_rule(code) for code in codes],
            }
        },
        "results": [_make_result(finding, codes, seen) for finding in report.findings],
    }
    if report.inputs:
        run |= {
            "invocations": [_make_invocation(report)],
            "properties": {"inputs": [asdict(given) for given in report.inputs]},
        }
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(_make_plain(log), indent=2, allow_nan=False) + "\n"


def _make_invocation(report: LintReport) -> dict[str, Any]:
    """The run, with a notification for each input that was not judged or has no mesh, and for each
    mesh on nodes of unknown size.
    """
    level = "warning" if report.allow_unjudged else "error"
    notes = [
        _make_notification(source, "note", "judged", escape_line(text))
        for source, text in report.notes
    ]
    for one in (*report.list_inputs("no mesh"), *report.list_unjudged()):
        source = Source(file=one.name) if one.is_file else Source(option=one.name)
        kind = level if one.state == "not judged" else "note"
        notes.append(_make_notification(source, kind, one.state.replace(" ", "-"), _describe(one)))
    return {"executionSuccessful": True, "toolExecutionNotifications": notes}


def _make_notification(
    source: Source,
    level: str,
    name: str,
    text: str,
) -> dict[str, Any]:
    return {
        "level": level,
        "message": {"text": _escape_message(text)},
        "locations": [_make_location(source)],
        "descriptor": {"id": name},
    }


def _make_rule(code: str) -> dict[str, Any]:
    try:
        page = format_rule_page(code)
    except PolicyError:
        return {"id": code}
    found: dict[str, Any] = {"id": code}
    if rule := RULES.get(code):
        found |= {
            "name": "".join(word.capitalize() for word in rule.name.split("-")),
            "shortDescription": {"text": rule.summary},
            "defaultConfiguration": {"level": rule.severity.replace("info", "note")},
            "properties": {
                "tags": [_FAMILIES[code[:3]]],
                "problem.severity": rule.severity.replace("info", "recommendation"),
            },
        }
    found["help"] = {"text": _MARKUP.sub("", page), "markdown": page}
    if link := _LINK.search(page):
        found["helpUri"] = link[1]
    return found


def _make_result(
    finding: Finding,
    codes: list[str],
    seen: Counter[str],
) -> dict[str, Any]:
    # Without the line: the same finding further down in the file is the same finding.
    place = finding.source.option or _format_uri(finding.source.file)
    known = "\0".join((finding.code, place, finding.subject, finding.message))
    digest = hashlib.sha256(known.encode("utf-8", errors="surrogatepass")).hexdigest()[:32]
    seen[digest] += 1
    message = "\n".join([escape_line(finding.message), *format_details(finding)])
    return {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": finding.severity.replace("info", "note"),
        "message": {"text": _escape_message(message)},
        "locations": [_make_location(finding.source)],
        "partialFingerprints": {"meshplan/v1": f"{digest}:{seen[digest]}"},
        "properties": {
            "subject": finding.subject,
            "fixes": [fix.to_json() for fix in finding.fixes],
            "data": finding.data,
        },
    }


def _escape_message(text: str) -> str:
    # Single braces are places for arguments, and brackets before parentheses are links.
    return text.replace("{", "{{").replace("}", "}}").replace("](", "] (")


def _make_location(source: Source) -> dict[str, Any]:
    if source.file and source.file != "-":
        physical: dict[str, Any] = {"artifactLocation": {"uri": _format_uri(source.file)}}
        if source.line is not None and source.line > 0:
            physical["region"] = {"startLine": source.line}
        return {"physicalLocation": physical}
    name = format_source(source)
    kind = "parameter" if name.startswith("-") else "variable" if source.option else "resource"
    if source.option:
        # `--mesh ddp=8,fsdp=5` is one of the things that are called `--mesh`.
        short = re.split("[ =]", name, maxsplit=1)[0]
        return {"logicalLocations": [{"name": short, "fullyQualifiedName": name, "kind": kind}]}
    return {"logicalLocations": [{"name": name, "kind": kind}]}


def _format_uri(file: str) -> str:
    """A URI reference for ``file``: relative, or with ``file://`` if it is elsewhere.

    Bytes that are not UTF-8 are kept; a colon in the first part does not start a scheme.
    """
    # These halves of surrogate pairs stand for no byte, so they come from no file system.
    path = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", make_relative(file))
    quoted = quote(path.encode("utf-8", errors="surrogateescape"), safe="/")
    return f"file://{quoted}" if path.startswith("/") else quoted
