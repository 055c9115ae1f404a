"""Reports for people: every finding with details and fixes, or one line for each."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TextIO

from meshplan.lint._finding import Finding, Fix, LintReport
from meshplan.lint._reporters._words import (
    escape_line,
    escape_lines,
    format_checked,
    format_counts,
    format_fix,
    format_name,
    format_reason,
    format_source,
    has_files_without_mesh,
)

# A line is made of pieces: a text, and a style of rich's, which may be empty.
_Line = list[tuple[str, str]]
_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}


def wants_color(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether a report should have colours: on a terminal, if ``rich`` is installed, and unless
    ``NO_COLOR`` is set to something (https://no-color.org).
    """
    return stream.isatty() and not environment.get("NO_COLOR") and find_spec("rich") is not None


def render_concise(report: LintReport) -> str:
    """One line for each finding, most severe first: ``where: severity code message``.

    Then one for each input that was not judged, ``where: not judged: why``, and one for all
    without a mesh. Nothing if all was judged and nothing found.
    """
    lines = [
        f"{format_source(found.source)}: {found.severity} "
        + escape_line(f"{found.code} {found.message}")
        for found in report.findings
    ]
    lines += [
        f"{format_name(one)}: not judged: {format_reason(one)}"
        for one in report.list_inputs("not judged")
    ]
    if has_files_without_mesh(report):
        lines.append(format_checked(report))
    return "".join(f"{line}\n" for line in lines)


def render_text(report: LintReport, *, color: bool = False) -> str:
    """The report; ``color`` has no effect unless ``rich`` is installed."""
    lines = list(_write_lines(report))
    if not color or find_spec("rich") is None:
        return "".join("".join(text for text, _ in line) + "\n" for line in lines)
    # By name: the type checker must not need a package that is optional.
    console = import_module("rich.console").Console
    text = import_module("rich.text").Text
    out = io.StringIO()
    terminal = console(
        file=out,
        force_terminal=True,
        color_system="standard",
        no_color=False,
        highlight=False,
    )
    for line in lines:
        terminal.print(text.assemble(*line), soft_wrap=True)
    return out.getvalue()


def _write_lines(report: LintReport) -> Iterator[_Line]:
    shown: dict[tuple[Fix, ...], str] = {}
    for finding in report.findings:
        yield from _write_finding(finding)
        fixes = finding.fixes
        if fixes in shown:
            yield [("  fixes: ", "bold green"), (f"those of {shown[fixes]}", "")]
        elif fixes:
            # Two rules often report one mesh, and one change fixes both findings.
            shown[fixes] = (
                f"the first {escape_line(finding.code)} of {format_source(finding.source)}"
            )
            for rank, fix in enumerate(fixes, 1):
                head = f"fix {rank}" if len(fixes) > 1 else "fix"
                yield [(f"  {head}: ", "bold green"), (format_fix(fix), "")]
                if fix.mesh and fix.mesh not in fix.title:
                    yield [(f"    mesh {escape_line(fix.mesh)}", "")]
        yield []
    for judged in report.judged:
        yield [("judged ", "dim"), (escape_line(judged), "")]
    for one in report.list_inputs("not judged"):
        yield [
            ("not judged ", "bold red"),
            (f"{format_name(one)}: {format_reason(one)}", ""),
        ]
    if checked := format_checked(report):
        yield [(checked, "")]
    summary: _Line = [(format_counts(report), "bold")]
    if codes := sorted({escape_line(finding.code) for finding in report.findings}):
        summary.append((f"; meshplan rule {' '.join(codes)} explains", ""))
    if any(fix.diff for finding in report.findings for fix in finding.fixes):
        summary.append((", --fix prints a diff", ""))
    yield summary


def _write_finding(finding: Finding) -> Iterator[_Line]:
    head = f"{finding.severity} {escape_line(finding.code)}"
    yield [
        (head, _STYLES[finding.severity]),
        (f": {escape_line(finding.message)}", "bold"),
    ]
    subject = f": {escape_line(finding.subject)}" if finding.subject else ""
    yield [("  at ", ""), (format_source(finding.source), "cyan"), (subject, "")]
    for detail in finding.details:
        for line in escape_lines(detail):
            yield [(f"    {line}", "")] if line else []
