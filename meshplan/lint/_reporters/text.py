"""Reports for people, and texts that several formats share, without characters that break them."""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TextIO

from meshplan._message_text import format_first
from meshplan.lint._finding import (
    SEVERITIES,
    Edit,
    Finding,
    Fix,
    LintInput,
    LintReport,
    Source,
)

# Control characters, but for tab and newline; line separators that only some programs know;
# marks that turn the direction of writing; halves of surrogate pairs, which stand for the bytes
# of a file name that is not UTF-8 and cannot be written as UTF-8; two that XML forbids.
_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff\ufffe\uffff]"
)


def escape_text(text: str) -> str:
    """``text`` with odd characters written as escapes, e.g. ``\\x1b``; newlines stay."""
    return _ODD.sub(lambda found: ascii(found[0])[1:-1], text)


def escape_line(text: str) -> str:
    """`escape_text`, with newlines and tabs written as escapes too."""
    return escape_text(text).replace("\n", "\\n").replace("\t", "\\t")


def escape_lines(text: str) -> list[str]:
    """The lines of `escape_text`; a carriage return before a newline is dropped."""
    return escape_text(text.replace("\r\n", "\n")).split("\n")


def format_source(source: Source) -> str:
    """The source of a finding, in one line that is not empty."""
    return escape_line(str(source)) or "meshplan"


def format_fix(fix: Fix) -> str:
    """Title and cost."""
    return escape_line(f"{fix.title} ({fix.cost})" if fix.cost else fix.title)


def format_details(finding: Finding) -> Iterator[str]:
    """The lines after the message: subject, details, fixes."""
    if finding.subject:
        yield escape_line(finding.subject)
    for detail in finding.details:
        yield from escape_lines(detail)
    for fix in finding.fixes:
        yield f"Fix: {format_fix(fix)}"


def format_counts(report: LintReport) -> str:
    """``1 error, 2 warnings; 1 ignored by comments``."""
    found = Counter(finding.severity for finding in report.findings)
    parts = [
        f"{found[severity]} {severity}{'s' if found[severity] > 1 and severity != 'info' else ''}"
        for severity in reversed(SEVERITIES)
        if found[severity]
    ]
    text = ", ".join(parts) or "no findings"
    text += f"; {report.ignored} ignored by comments" if report.ignored else ""
    if unjudged := len(report.list_inputs("not judged")):
        allowed = "allowed" if report.allow_unjudged else "fails without --allow-unjudged"
        text += f"; {unjudged} input{'s' * (unjudged > 1)} not judged ({allowed})"
    return text


def format_name(one: LintInput) -> str:
    """The name of an input, in one line."""
    return format_source(Source(file=one.name))


def format_reason(one: LintInput) -> str:
    """Why an input was not judged, in one line."""
    more = f" (and {len(one.why) - 1} more)" if len(one.why) > 1 else ""
    return escape_line("".join(one.why[:1])) + more


def format_checked(report: LintReport) -> str:
    """``checked 3 files, 1 mesh; no mesh in a.py, b.py``, with a few names; empty without files."""
    if not report.files:
        return ""
    names = [format_name(one) for one in report.list_inputs("no mesh") if one.kind == "file"]
    text = f"checked {report.files} file{'s' * (report.files != 1)}, "
    text += f"{report.meshes} mesh{'es' * (report.meshes != 1)}"
    text += f"; {report.unlisted}" if report.unlisted else ""
    return f"{text}; no mesh in {format_first(names, 3)}" if names else text


def has_files_without_mesh(report: LintReport) -> bool:
    """Whether a file that was read has no mesh, or no file was named."""
    states = [one.state for one in report.inputs if one.kind == "file"]
    return report.is_quiet or report.files > len(states) or "no mesh" in states


def make_relative(file: str) -> str:
    """``file`` without ``./`` and the like; relative to the working directory if it is in it."""
    path = PurePath(os.path.normpath(file))
    try:
        here = PurePath(os.getcwd())
    except OSError:  # it has been removed
        return path.as_posix()
    return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()


_LINE = re.compile(r"[^\n]*\n|[^\n]+")


def make_diff(edit: Edit) -> str:
    """The unified diff of a file whose name is relative to the working directory or absolute, as
    ``git apply`` and ``patch -p1`` read it.
    """
    # After a tab is a date, and without one git ends a name at a blank.
    import difflib  # most runs need no diff, and this takes 3 ms

    path = make_relative(edit.file).lstrip("/")
    path += "\t" * (" " in path)
    old, new = (_LINE.findall(text) for text in (edit.before, edit.after))
    lines = difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


# A line is made of pieces: a text, and a style of rich's, which may be empty.
_Line = list[tuple[str, str]]
_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}


def wants_color(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether a report should have colours: on a terminal, unless ``NO_COLOR`` is set to something
    (https://no-color.org).
    """
    return stream.isatty() and not environment.get("NO_COLOR")


def render_concise(report: LintReport) -> str:
    """One line for each finding, most severe first: ``where: severity code message``.

    Then one for each mesh on nodes of unknown size, one for each input that was not judged, and one
    for all without a mesh. Nothing if all was judged and nothing found.
    """
    lines = [
        f"{format_source(found.source)}: {found.severity} "
        + escape_line(f"{found.code} {found.message}")
        for found in report.findings
    ]
    lines += [
        f"{format_source(source)}: judged {escape_line(text)}" for source, text in report.notes
    ]
    lines += [
        f"{format_name(one)}: not judged: {format_reason(one)}" for one in report.list_unjudged()
    ]
    if has_files_without_mesh(report):
        lines.append(format_checked(report))
    return "".join(f"{line}\n" for line in lines)


def render_text(report: LintReport, *, color: bool = False) -> str:
    lines = list(_write_lines(report))
    if not color:
        return "".join("".join(text for text, _ in line) + "\n" for line in lines)
    from rich.console import Console  # loaded only for colours
    from rich.text import Text

    out = io.StringIO()
    terminal = Console(
        file=out,
        force_terminal=True,
        color_system="standard",
        no_color=False,
        highlight=False,
    )
    for line in lines:
        terminal.print(Text.assemble(*line), soft_wrap=True)
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
    for one in report.list_unjudged():
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
