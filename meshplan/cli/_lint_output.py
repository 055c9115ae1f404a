"""The run of ``meshplan lint``: findings, their page and fixes, and where they are written."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from meshplan.cli._lint_input import (
    FileReader,
    LintRequest,
    read_ranks,
    read_request,
)
from meshplan.cli._lint_placement import list_states, place_jobs
from meshplan.cli._nccl import (
    find_driver_version,
    find_nccl_version,
    read_variables,
)
from meshplan.cli._output import complain, refuse, save, say
from meshplan.errors import MeshplanError, PolicyError
from meshplan.lint._diffs import make_diff, write_edit
from meshplan.lint._facts import (
    JobFacts,
    check_environment,
    check_facts,
    sort_findings,
)
from meshplan.lint._finding import (
    SEVERITIES,
    Edit,
    Fix,
    LintInput,
    LintReport,
    Source,
)
from meshplan.lint._reporters import render, wants_color
from meshplan.lint._reporters.text import format_fix, format_source
from meshplan.lint._rules import RULES
from meshplan.lint._rules.cluster import CONTRADICTION, NOT_JUDGED
from meshplan.lint._select import Selection, remove_ignored
from meshplan.lint._settings import Settings


@dataclass(frozen=True, slots=True)
class _Run:
    """The result of one pass over the inputs."""

    report: LintReport
    facts: Sequence[JobFacts]
    settings: Settings
    level: int  # index of the lowest severity that fails
    errors: tuple[MeshplanError, ...]  # why inputs that the user named cannot be read or placed

    def find_status(self, *, exit_zero: bool) -> int:
        """The exit status."""
        if self.errors:
            return 2
        worst = self.report.find_worst()
        fails = worst is not None and SEVERITIES.index(worst) >= self.level
        fails |= bool(self.report.list_inputs("not judged")) and not self.report.allow_unjudged
        return 1 if fails and not exit_zero else 0


def run_lint(given: argparse.Namespace) -> int:
    """Lint the inputs of the command, write the report; the exit status. Raises MeshplanError: the
    command or its input is invalid.
    """
    if given.write and not given.fix:
        raise PolicyError("--write needs --fix; add it, or leave out --write")
    if given.write and "-" in given.files:
        raise PolicyError("--write changes files, and - is standard input; leave out --write")
    if given.stdin_filename is not None and "-" not in given.files:
        raise PolicyError("--stdin-filename needs the file -, which is standard input; add -")
    reader = FileReader(read_ranks(given))
    run = _lint(given, reader)
    short = "concise" if run.report.is_quiet else "text"
    output_format = given.output_format or run.settings.output_format or short
    if given.fix and not given.write and output_format not in ("text", "concise"):
        raise PolicyError(
            f"--fix prints a diff, so --output-format {output_format} cannot apply; leave out one "
            "of them, or add --write"
        )
    # All ranks of a live job have the same findings, and rank 0 reports them.
    is_first = not given.live or os.environ.get("RANK") == "0"
    if given.write and is_first:
        run, edits, titles = _fix(given, reader, run)
        for edit in edits:
            write_edit(edit)
            complain(f"meshplan: {Source(edit.file)}: changed; {'; '.join(titles[edit.file])}\n")
    if is_first:
        for error in {str(error): error for error in run.errors}.values():
            refuse(error)
        if given.html is not None:
            # Imported here: few commands draw.
            from meshplan.lint._drawing import write_report

            save(given.html, write_report(run.report, run.facts))
        if given.fix and not given.write:
            _write_diffs(given, reader, run)
        else:
            text = render(run.report, output_format, color=_wants_color(given))
            _write(given, text, fits=output_format == "text")
    return run.find_status(exit_zero=given.exit_zero)


def _lint(given: argparse.Namespace, reader: FileReader) -> _Run:
    reader.errors.clear()
    request = read_request(given, reader)
    place_jobs(request, given)
    settings = request.settings
    # Options override the settings: --select replaces them, the others add to them.
    kept = Settings() if given.select else settings
    selection = Selection.of(
        given.select or settings.select,
        (*kept.extend_select, *given.extend_select),
        (*kept.ignore, *given.ignore),
    )
    level = SEVERITIES.index(given.fail_level or settings.fail_level or "error")
    fatal = {rule.code for rule in RULES.values() if SEVERITIES.index(rule.severity) >= level}
    inputs = list_states(request, {code for code in fatal if selection.wants(code)})
    facts = [JobFacts(job, cluster) for job, cluster in request.jobs]
    report = _report(given, request, facts, selection, inputs)
    errors = tuple(reader.errors.values())
    return _Run(report, facts, settings, level, errors)


def _fix(
    given: argparse.Namespace, reader: FileReader, run: _Run
) -> tuple[_Run, list[Edit], dict[str, list[str]]]:
    """Change the texts of the reader until no finding has a fix that is a change of a file. A fix
    is tried with the other meshes of its file as they are, so each round makes one change of each
    file and lints again. Returns the last run, the changes in the order of findings, and titles of
    fixes by file.
    """
    edits: dict[str, Edit] = {}
    titles: dict[str, list[str]] = {}
    seen: set[tuple[str, str]] = set()
    while True:
        chosen: dict[str, tuple[str, Edit]] = {}
        for finding in run.report.findings:
            fix = next(filter(_changes_file, finding.fixes), None)
            if fix and fix.edit and (fix.edit.file, fix.edit.after) not in seen:
                chosen.setdefault(fix.edit.file, (fix.title, fix.edit))
        if not chosen:
            return run, list(edits.values()), titles
        for file, (title, edit) in chosen.items():
            seen.add((file, edit.after))
            edits[file] = replace(edits.get(file, edit), after=edit.after)
            titles.setdefault(file, []).append(title)
            reader.replace(file, edit.after)
        run = _lint(given, reader)


def _changes_file(fix: Fix) -> bool:
    """Whether a fix changes a file, and not standard input without a name."""
    return fix.edit is not None and fix.edit.file != "-"


def _report(
    given: argparse.Namespace,
    request: LintRequest,
    facts: Sequence[JobFacts],
    selection: Selection,
    inputs: tuple[LintInput, ...],
) -> LintReport:
    found = list(check_facts(facts))
    environ = read_variables(given.env, {} if given.no_env else os.environ)
    version = None if given.nccl_version is None else find_nccl_version(given.nccl_version)
    driver = find_driver_version(given.driver)
    # Finding the installed NCCL takes a while, and often there is nothing to check.
    if version is None and (driver or any(name.startswith("NCCL_") for name in environ)):
        version = find_nccl_version(None)
    found += check_environment(
        environ,
        nccl_version=version,
        driver=driver,
        jobs=[one.job for one in facts],
    )
    found += [
        NOT_JUDGED.make_finding(f"not judged: {skipped.why}", skipped.source)
        for skipped in request.skipped
    ]
    found += [
        CONTRADICTION.make_finding(one.contradiction, Source(one.name))
        for one in request.inputs
        if one.contradiction and not one.is_found
    ]
    kept, ignored, unused = remove_ignored(found, request.reader.comments)
    wanted = [
        finding
        for finding in (*kept, *unused)
        if selection.wants(finding.code) and not (finding.severity == "info" and request.is_quiet)
    ]
    about = [
        f"{one.job.source}: {one.layout} on {one.topology}"
        + (f"; {one.job.every_size}" if one.job.every_size else "")
        for one in facts
        if one.topology.known and not one.job.find_unknown_axes()
    ]
    single = [source for one in request.inputs for source in one.file.one_axis]
    about += [
        f"{source}: one axis; no hazard for any number of ranks: no other group must agree"
        for source in single
    ]
    return LintReport(
        sort_findings(wanted),
        tuple(dict.fromkeys(about)),
        ignored,
        inputs,
        given.allow_unjudged,
        files=sum(one.kind == "file" for one in request.inputs),
        meshes=len(facts) + len(single),
        texts=request.reader.texts,
        is_quiet=request.is_quiet,
        unlisted=_describe_unlisted(request),
    )


def _describe_unlisted(request: LintRequest) -> str:
    """The number of files that were not named and not judged."""
    count = sum(one.is_found and bool(one.file.skipped) for one in request.inputs)
    remedy = "--strict lists them"
    remedy += ", --node-size 8 places the ranks" * request.is_unplaced
    return f"{count} file{'s' * (count > 1)} not judged ({remedy})" if count else ""


def _wants_color(given: argparse.Namespace) -> bool:
    stream: TextIO | None = sys.stdout  # None if it is closed
    return given.output_file is None and stream is not None and wants_color(stream, os.environ)


def _write(given: argparse.Namespace, text: str, *, fits: bool = False) -> None:
    if given.output_file is not None:
        save(given.output_file, text)
    else:
        say(text, fits=fits)


def _write_diffs(given: argparse.Namespace, reader: FileReader, run: _Run) -> None:
    """The findings on standard error; one diff of all files for ``git apply``."""
    complain(render(run.report, "concise"))
    _, edits, _ = _fix(given, reader, run)
    seen = set()
    for finding in run.report.findings:
        # Two findings are often about one mesh, and one change fixes both.
        if finding.fixes and (finding.source, finding.subject) not in seen:
            seen.add((finding.source, finding.subject))
            if not any(map(_changes_file, finding.fixes)):
                where = format_source(finding.source)
                fix = next((fix for fix in finding.fixes if fix.mesh), finding.fixes[0])
                complain(f"meshplan: {where}: no change of a file; {format_fix(fix)}\n")
    _write(
        given,
        "".join(make_diff(one.file, one.before, one.after) for one in edits),
    )
