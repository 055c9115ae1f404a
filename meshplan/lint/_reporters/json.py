"""Reports for programs: JSON, and SARIF 2.1.0 for code scanning services."""

from __future__ import annotations

import difflib
import hashlib
import itertools
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
from meshplan.lint._finding import (
    Finding,
    Fix,
    LintInput,
    LintReport,
    Source,
)
from meshplan.lint._reporters.text import (
    escape_line,
    find_columns,
    format_details,
    format_fix,
    format_name,
    format_source,
    make_relative,
)
from meshplan.lint._rules import RULES, format_rule_page

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_FAMILIES = {"MP1": "mesh", "MP2": "cluster", "MP3": "environment"}
_MARKUP = re.compile(r"^#+ |^```.*\n|`", re.MULTILINE)
_LINK = re.compile(r"<(https://[^>]+)>")


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
        "columnKind": "unicodeCodePoints",
        "results": [
            _make_result(finding, codes, seen, report.texts) for finding in report.findings
        ],
    }
    if report.inputs:
        run |= {
            "invocations": [_make_invocation(report)],
            "properties": {"inputs": [asdict(given) for given in report.inputs]},
        }
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(_make_plain(log), indent=2, allow_nan=False) + "\n"


def _make_invocation(report: LintReport) -> dict[str, Any]:
    """The run, with a notification for each input that was not judged or has no mesh."""
    level = "warning" if report.allow_unjudged else "error"
    return {
        "executionSuccessful": True,
        "toolExecutionNotifications": [
            _make_notification(given, level if given.state == "not judged" else "note")
            for given in (*report.list_inputs("no mesh"), *report.list_unjudged())
        ],
    }


def _make_notification(given: LintInput, level: str) -> dict[str, Any]:
    source = Source(file=given.name) if given.is_file else Source(option=given.name)
    text = "\n".join([f"{given.state}: {format_name(given)}", *map(escape_line, given.why)])
    return {
        "level": level,
        "message": {"text": _escape_message(text)},
        "locations": [_make_location(source)],
        "descriptor": {"id": given.state.replace(" ", "-")},
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
    finding: Finding, codes: list[str], seen: Counter[str], texts: Mapping[str, str]
) -> dict[str, Any]:
    # Without the line: the same finding further down in the file is the same finding.
    place = finding.source.option or _format_uri(finding.source.file)
    known = "\0".join((finding.code, place, finding.subject, finding.message))
    digest = hashlib.sha256(known.encode("utf-8", errors="surrogatepass")).hexdigest()[:32]
    seen[digest] += 1
    message = "\n".join([escape_line(finding.message), *format_details(finding)])
    edits = [fix for fix in finding.fixes if fix.edit is not None and fix.edit.file != "-"]
    result = {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": finding.severity.replace("info", "note"),
        "message": {"text": _escape_message(message)},
        "locations": [_make_location(finding.source, texts)],
        "partialFingerprints": {"meshplan/v1": f"{digest}:{seen[digest]}"},
        "properties": {
            "subject": finding.subject,
            "fixes": [fix.to_json() for fix in finding.fixes],
            "data": finding.data,
        },
    }
    return result | ({"fixes": [_make_fix(fix) for fix in edits]} if edits else {})


def _make_fix(fix: Fix) -> dict[str, Any]:
    """The change of a file: text to insert for each changed part, by lines and columns."""
    edit = fix.edit
    assert edit is not None
    # By lines: characters take the square of the length.
    lines, newer = (text.splitlines(keepends=True) for text in (edit.before, edit.after))
    starts = [0, *itertools.accumulate(map(len, lines))]
    replacements = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, lines, newer, False).get_opcodes():
        if kind != "equal":
            start, end = (_find_position(edit.before, starts[n]) for n in (i, j))
            region = {"startLine": start[0], "startColumn": start[1]}
            region |= {"endLine": end[0], "endColumn": end[1]}
            inserted = {"text": "".join(newer[k:m])}
            replacements.append({"deletedRegion": region, "insertedContent": inserted})
    change = {
        "artifactLocation": {"uri": _format_uri(edit.file)},
        "replacements": replacements,
    }
    text = _escape_message(format_fix(fix))
    return {"description": {"text": text}, "artifactChanges": [change]}


def _find_position(text: str, at: int) -> tuple[int, int]:
    """Line and column of a character, from 1 on."""
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


def _escape_message(text: str) -> str:
    # Single braces are places for arguments, and brackets before parentheses are links.
    return text.replace("{", "{{").replace("}", "}}").replace("](", "] (")


def _make_location(source: Source, texts: Mapping[str, str] | None = None) -> dict[str, Any]:
    if source.file and source.file != "-":
        physical: dict[str, Any] = {"artifactLocation": {"uri": _format_uri(source.file)}}
        if source.line is not None and source.line > 0:
            physical["region"] = {"startLine": source.line}
            if columns := find_columns(source, texts or {}):
                physical["region"] |= {
                    "startColumn": columns[0],
                    "endColumn": columns[1],
                }
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
