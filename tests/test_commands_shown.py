"""Commands that the action, the hook and the pages of rules show print what these show."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest

from meshplan.lint._rules._rule import RULES, format_rule_page
from tests.cli import meshplan
from tests.pages import ROOT, blocks
from tests.test_read_cluster import matrix

COMMAND = re.compile(
    r"^\$ (?P<settings>(?:\w+=\S+ )*)meshplan (?P<words>lint [^\n]*)\n(?P<printed>.*?)```",
    re.M | re.S,
)


FILE = re.compile(r"`(?P<name>[\w.]+)`:\n\n```\w+\n(?P<text>.*?)```", re.M | re.S)


def printed(command: re.Match[str]) -> str:
    """What a command of a page prints, in the working directory."""
    environment = dict(word.split("=", 1) for word in shlex.split(command["settings"]))
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME")}
    with mock.patch.dict(os.environ, {**kept, **environment}, clear=True):
        status, out, err = meshplan(*shlex.split(command["words"]))
    assert (err, status < 2) == ("", True)
    return out


def steps(node: Any) -> list[dict[str, Any]]:
    """All steps of workflows and all hooks that a YAML block has, at any depth."""
    if isinstance(node, list):
        return [step for one in node for step in steps(one)]
    if not isinstance(node, dict):
        return []
    mine = [node] if {"uses", "run", "script", "hooks"} & set(node) else []
    return mine + [step for one in node.values() for step in steps(one)]


def lint_lines(block: Any, inputs: set[str], hook: dict[str, Any]) -> list[str]:
    """The lint commands that a YAML block comes to, by the action or the hook as well."""
    found = []
    for step in steps(block):
        if str(step.get("uses", "")).startswith("OWNER/meshplan@"):
            given = {"output-format": "github"} | step["with"]
            assert set(given) <= inputs
            extra = [f"--{key} {given[key]}" for key in given if key.startswith("output-")]
            found.append(" ".join(["meshplan lint", given["args"], *extra]))
        for line in [step.get("run", ""), *step.get("script", ())]:
            if line.startswith("meshplan "):
                found.append(line)
        for used in step.get("hooks", ()):
            assert used["id"] == hook["id"]
            assert re.search(used["files"], "meshplan.toml")
            found.append(" ".join([hook["entry"], *used["args"], "meshplan.toml"]))
    return found


def test_ci_files_run_lint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = pytest.importorskip("yaml").safe_load
    monkeypatch.chdir(tmp_path)
    inputs = set(load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"])
    (hook,) = load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "howto" / "lint-in-ci.md").read_text(encoding="utf-8")
    jagged, accepted = blocks(text, "toml")
    lines = [lint_lines(load(block.text), inputs, hook) for block in blocks(text, "yaml")]
    assert [len(one) for one in lines] == [1] * 4
    for (line,) in lines:
        for config, status in ((jagged, 1), (accepted, 0)):
            Path("meshplan.toml").write_text(config.text)
            found, out, err = meshplan(*shlex.split(line)[1:])
            assert (found, err) == (status, ""), line
            written = re.search(r"--output-file (\S+)", line)
            report = Path(written[1]).read_text() if written else out
            if "sarif" in line:
                assert json.loads(report)["version"] == "2.1.0"
            elif "junit" in line:
                assert ElementTree.fromstring(report).tag == "testsuites"
            else:
                assert ("MP101" in report) == (status == 1)
        if written:
            assert f": {written[1]}\n" in text  # the next step reads what this one has written


# What other verbs print is shown by the tests of the formats.
@pytest.mark.parametrize("code", [code for code in RULES if code not in ("MP201", "MP202")])
def test_lint_examples_print_the_shown_report(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, per_domain in (("host0.txt", 8), ("host1.txt", 4), ("host2.txt", 8)):
        Path(name).write_text(matrix(8, per_domain))
    page = format_rule_page(code)
    # A file is written where the page shows it: another text of it is the file after the fix.
    steps = sorted([*FILE.finditer(page), *COMMAND.finditer(page)], key=re.Match.start)
    reports = []
    for step in steps:
        if step.re is FILE:
            Path(step["name"]).write_text(step["text"])
        else:
            assert printed(step) == step["printed"]
            reports.append(code in step["printed"])
    assert reports == ([False] if code == "MP203" else [True, False])
