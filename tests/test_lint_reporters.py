"""Reports as text, concise lines, JSON, workflow commands and JUnit."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import pytest
from expecttest import TestCase
from hypothesis import given

import meshplan
from meshplan.errors import PolicyError
from meshplan.lint._finding import Finding, LintReport, Source
from meshplan.lint._reporters import FORMATS, render, wants_color
from tests.refusals import refusal
from tests.reports import EMPTY, HOSTILE, PLAIN, REPORTS


class TestReporters(TestCase):
    def test_text_report_is_printed(self) -> None:
        self.assertExpectedInline(
            render(PLAIN, "text"),
            """\
error MP101: 5 groups of ddp must agree and lie on nodes in 2 ways; replicas may differ
  at configs/mesh.toml:3: (ddp=8, fsdp=5, tp=1)
    ranks per node: {0-7} {8-15}
      (2, 2, 1)
    tree: ((0+5)+35)
  fix 1: write ddp=5,fsdp=8 (no GPU is left out)
  fix 2: call meshplan.install() (one line)
    mesh ddp=8,fsdp=5,tp=1

warning MP203: 4 GPUs as in one tray of a rack
  at standard input:1

info MP102: groups of fsdp lie on nodes in 2 ways
  at --mesh ddp=4,fsdp=12
  fix: leave it

judged (ddp=8, fsdp=5, tp=1): 5 nodes of 8, domains of 8
not judged open.py: line 3: n is not a constant (and 1 more)
not judged --mesh dp=8: the node of each rank is unknown
checked 4 files, 2 meshes; no mesh in a.py, b.py
1 error, 1 warning, 1 info; 2 ignored by comments; 2 inputs not judged (fails without --allow-unjudged); meshplan rule MP101 MP102 MP203 explains, --fix prints a diff
""",
        )

    def test_text_without_findings(self) -> None:
        self.assertExpectedInline(
            render(EMPTY, "text"),
            """\
judged (dp=8): 1 node of 8
no findings
""",
        )

    def test_text_escapes_hostile_input(self) -> None:
        self.assertExpectedInline(
            render(HOSTILE, "text"),
            """\
error MP101: a\\r\\n::error::b %0A <b>&"' ]]> {0} [x](http://y) \\x1b[31m\\x00\\u202e\\udcff\\ufffe
  at ./d,r:/e\\udcffg \\n<&>.toml:1: \\x9b\\u2028
    a	::stop-commands::x\\r

  fix: a\\nb (\\x07)

warning MP\\n1: m
  at meshplan

judged \\x1b]0;title\\x07\\nnext
1 error, 1 warning; meshplan rule MP101 MP\\n1 explains, --fix prints a diff
""",
        )

    def test_concise_report_is_printed(self) -> None:
        self.assertExpectedInline(
            render(PLAIN, "concise"),
            """\
configs/mesh.toml:3: error MP101 5 groups of ddp must agree and lie on nodes in 2 ways; replicas may differ
standard input:1: warning MP203 4 GPUs as in one tray of a rack
--mesh ddp=4,fsdp=12: info MP102 groups of fsdp lie on nodes in 2 ways
open.py: not judged: line 3: n is not a constant (and 1 more)
--mesh dp=8: not judged: the node of each rank is unknown
checked 4 files, 2 meshes; no mesh in a.py, b.py
""",
        )
        self.assertExpectedInline(
            render(HOSTILE, "concise"),
            """\
./d,r:/e\\udcffg \\n<&>.toml:1: error MP101 a\\r\\n::error::b %0A <b>&"' ]]> {0} [x](http://y) \\x1b[31m\\x00\\u202e\\udcff\\ufffe
meshplan: warning MP\\n1 m
""",
        )

    def test_json_report_is_printed(self) -> None:
        text = render(PLAIN, "json")
        written = json.loads(text)
        assert text == f"{json.dumps(written, indent=2)}\n"
        findings = written.pop("findings")
        self.assertExpectedInline(
            "\n".join(json.dumps(one) for one in (*findings, written)),
            """\
{"code": "MP101", "severity": "error", "message": "5 groups of ddp must agree and lie on nodes in 2 ways; replicas may differ", "file": "configs/mesh.toml", "line": 3, "option": "", "subject": "(ddp=8, fsdp=5, tp=1)", "details": ["ranks per node: {0-7} {8-15}\\n  (2, 2, 1)", "tree: ((0+5)+35)"], "fixes": [{"title": "write ddp=5,fsdp=8", "cost": "no GPU is left out", "mesh": "ddp=5,fsdp=8", "diff": "--- configs/mesh.toml\\n+++ configs/mesh.toml\\n-ddp = 8\\n+ddp = 5\\n"}, {"title": "call meshplan.install()", "cost": "one line", "mesh": "ddp=8,fsdp=5,tp=1", "diff": ""}], "data": {"axis": "ddp", "signatures": [[2, 2, 1], [2, 1, 2]], "share": 0.25}}
{"code": "MP203", "severity": "warning", "message": "4 GPUs as in one tray of a rack", "file": "-", "line": 1, "option": "", "subject": "", "details": [], "fixes": [], "data": {}}
{"code": "MP102", "severity": "info", "message": "groups of fsdp lie on nodes in 2 ways", "file": "", "line": null, "option": "--mesh ddp=4,fsdp=12", "subject": "", "details": [], "fixes": [{"title": "leave it", "cost": "", "mesh": "", "diff": ""}], "data": {}}
{"judged": ["(ddp=8, fsdp=5, tp=1): 5 nodes of 8, domains of 8"], "ignored": 2, "inputs": [{"name": "configs/mesh.toml", "kind": "file", "state": "judged", "why": []}, {"name": "a.py", "kind": "file", "state": "no mesh", "why": []}, {"name": "open.py", "kind": "file", "state": "not judged", "why": ["line 3: n is not a constant", "line 4: m"]}, {"name": "b.py", "kind": "file", "state": "no mesh", "why": []}, {"name": "--mesh dp=8", "kind": "mesh", "state": "not judged", "why": ["the node of each rank is unknown"]}], "allow_unjudged": false, "files": 4, "meshes": 2, "version": "0.1.0"}""",
        )

    def test_github_commands_are_printed(self) -> None:
        self.assertExpectedInline(
            render(PLAIN, "github"),
            """\
::error file=configs/mesh.toml,line=3,title=MP101::5 groups of ddp must agree and lie on nodes in 2 ways; replicas may differ%0A(ddp=8, fsdp=5, tp=1)%0Aranks per node: {0-7} {8-15}%0A  (2, 2, 1)%0Atree: ((0+5)+35)%0AFix: write ddp=5,fsdp=8 (no GPU is left out)%0AFix: call meshplan.install() (one line)
::warning title=MP203::standard input:1: 4 GPUs as in one tray of a rack
::notice title=MP102::--mesh ddp=4,fsdp=12: groups of fsdp lie on nodes in 2 ways%0AFix: leave it
::error file=open.py,title=not judged::not judged: open.py%0Aline 3: n is not a constant%0Aline 4: m
::error title=not judged::not judged: --mesh dp=8%0Athe node of each rank is unknown
::notice title=checked::checked 4 files, 2 meshes; no mesh in a.py, b.py
""",
        )
        self.assertExpectedInline(
            render(HOSTILE, "github"),
            """\
::error file=d%2Cr%3A/e\\udcffg \\n<&>.toml,line=1,title=MP101::a\\r\\n::error::b %250A <b>&"' ]]> {0} [x](http://y) \\x1b[31m\\x00\\u202e\\udcff\\ufffe%0A\\x9b\\u2028%0Aa	::stop-commands::x\\r%0A%0AFix: a\\nb (\\x07)
::warning title=MP\\n1::meshplan: m
""",
        )

    def test_junit_report_is_printed(self) -> None:
        self.assertExpectedInline(
            render(PLAIN, "junit"),
            """\
<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="meshplan" tests="7" failures="4" errors="0">
  <testsuite name="meshplan" tests="7" failures="4" errors="0" skipped="2">
    <testcase name="MP101 (ddp=8, fsdp=5, tp=1)" classname="configs/mesh.toml:3" file="configs/mesh.toml" line="3">
      <failure type="error" message="5 groups of ddp must agree and lie on nodes in 2 ways; replicas may differ">5 groups of ddp must agree and lie on nodes in 2 ways; replicas may differ
(ddp=8, fsdp=5, tp=1)
ranks per node: {0-7} {8-15}
  (2, 2, 1)
tree: ((0+5)+35)
Fix: write ddp=5,fsdp=8 (no GPU is left out)
Fix: call meshplan.install() (one line)</failure>
    </testcase>
    <testcase name="MP203" classname="standard input:1">
      <failure type="warning" message="4 GPUs as in one tray of a rack">4 GPUs as in one tray of a rack</failure>
    </testcase>
    <testcase name="MP102" classname="--mesh ddp=4,fsdp=12">
      <system-out>groups of fsdp lie on nodes in 2 ways
Fix: leave it</system-out>
    </testcase>
    <testcase name="no mesh" classname="a.py" file="a.py">
      <skipped message="no mesh"/>
    </testcase>
    <testcase name="no mesh" classname="b.py" file="b.py">
      <skipped message="no mesh"/>
    </testcase>
    <testcase name="not judged" classname="open.py" file="open.py">
      <failure type="not judged" message="line 3: n is not a constant (and 1 more)">line 3: n is not a constant
line 4: m</failure>
    </testcase>
    <testcase name="not judged" classname="--mesh dp=8">
      <failure type="not judged" message="the node of each rank is unknown">the node of each rank is unknown</failure>
    </testcase>
  </testsuite>
</testsuites>
""",
        )

    def test_junit_without_findings(self) -> None:
        self.assertExpectedInline(
            render(EMPTY, "junit"),
            """\
<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="meshplan" tests="1" failures="0" errors="0">
  <testsuite name="meshplan" tests="1" failures="0" errors="0">
    <testcase name="(dp=8): 1 node of 8" classname="meshplan"/>
  </testsuite>
</testsuites>
""",
        )

    def test_unknown_format_is_refused(self) -> None:
        self.assertExpectedInline(
            refusal(PolicyError, render, EMPTY, "xml\n"),
            """MP402: unknown output format 'xml\\n'; use one of text, concise, json, sarif, github, junit""",
        )


def test_formats_are_listed_in_order() -> None:
    assert FORMATS == ("text", "concise", "json", "sarif", "github", "junit")


@pytest.mark.parametrize("output_format", FORMATS)
@given(report=REPORTS)
def test_any_report_is_rendered(report: LintReport, output_format: str) -> None:
    """Can be written as UTF-8, has no character that a terminal obeys, and ends its last line."""
    found = render(report, output_format)
    found.encode("utf-8")
    assert not found or found.endswith("\n")
    assert {c for c in found if unicodedata.category(c) in ("Cc", "Zl", "Zp")} <= {"\n", "\t"}
    assert not set(found) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    assert found == render(report, output_format)


@given(REPORTS)
def test_concise_is_one_line_for_each_finding(report: LintReport) -> None:
    lines = render(report, "concise").split("\n")[:-1]
    assert len(lines) == len(report.findings)
    for line, finding in zip(lines, report.findings, strict=True):
        assert f": {finding.severity} " in line


@given(REPORTS)
def test_json_has_every_field(report: LintReport) -> None:
    def refuse(number: str) -> None:
        raise AssertionError(number)

    found = json.loads(render(report, "json"), parse_constant=refuse)
    keys = ["findings", "judged", "ignored", "inputs", "allow_unjudged"]
    assert list(found) == [*keys, "files", "meshes", "version"]
    assert found["version"] == meshplan.__version__
    assert (found["ignored"], len(found["judged"])) == (report.ignored, len(report.judged))
    for entry, finding in zip(found["findings"], report.findings, strict=True):
        assert (entry["severity"], entry["line"]) == (finding.severity, finding.source.line)
        assert len(entry["fixes"]) == len(finding.fixes)
        if not re.search("[\ud800-\udfff]", finding.message):
            assert entry["message"] == finding.message


@given(REPORTS)
def test_github_is_one_command_for_each_finding(report: LintReport) -> None:
    lines = render(report, "github").split("\n")[:-1]
    assert len(lines) == len(report.findings)
    for line in lines:
        command = re.fullmatch(r"::(error|warning|notice) ([^:]*)::(.*)", line)
        assert command is not None, line
        keys = [part.partition("=")[0] for part in command[2].split(",")]
        assert keys in (["title"], ["file", "title"], ["file", "line", "title"])
        assert re.sub(r"%(25|0A|3A|2C)", "", command[2] + command[3]).count("%") == 0


@given(REPORTS)
def test_junit_counts_match_the_findings(report: LintReport) -> None:
    root = ElementTree.fromstring(render(report, "junit").encode("utf-8"))
    suite = root[0]
    assert (root.tag, suite.tag) == ("testsuites", "testsuite")
    assert root.attrib == suite.attrib
    cases = suite.findall("testcase")
    assert suite.get("tests") == str(len(cases))
    assert len(cases) == (len(report.findings) or len(report.judged) or 1)
    failed = suite.findall("testcase/failure")
    assert suite.get("failures") == str(len(failed))
    assert len(failed) == sum(finding.severity != "info" for finding in report.findings)
    assert all(case.get("classname") for case in cases)


def test_files_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [str(tmp_path / "a" / "b.toml"), "./a/../b.toml", "../b.toml", "/b.toml"]
    report = LintReport(tuple(Finding("MP101", "error", "m", Source(name)) for name in names))
    files = [line.split(",")[0] for line in render(report, "github").splitlines()]
    assert files == [
        "::error file=a/b.toml",
        "::error file=b.toml",
        "::error file=../b.toml",
        "::error file=/b.toml",
    ]


def test_missing_working_directory_keeps_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for output_format in FORMATS:
        assert "configs/mesh.toml" in render(PLAIN, output_format)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("report", [PLAIN, EMPTY, HOSTILE])
def test_colors_change_no_text(report: LintReport) -> None:
    colored = render(report, "text", color=True)
    assert "\x1b[1m" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == render(report, "text").expandtabs()
    assert render(report, "concise", color=True) == render(report, "concise")


def test_colors_need_a_terminal_and_no_no_color() -> None:
    assert wants_color(Terminal(), {})
    assert wants_color(Terminal(), {"NO_COLOR": ""})
    assert not wants_color(Terminal(), {"NO_COLOR": "1"})
    assert not wants_color(io.StringIO(), {})
