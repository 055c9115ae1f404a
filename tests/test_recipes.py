"""The recipes of CONTRIBUTING for a rule and for a format: one module and one registration each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from meshplan.cli import main
from meshplan.lint import _rules
from meshplan.lint._facts import JobFacts, check_facts
from meshplan.lint._read_jobs import read_jobs
from meshplan.lint._rules import RULES, Rule, register
from meshplan.lint._rules._rule import _registered
from meshplan.topology import Cluster, Topology, _files, formats

RULE = '''\
"""MP109: an axis of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshplan.lint._finding import Finding
from meshplan.lint._rules._rule import Rule, rule

if TYPE_CHECKING:
    from meshplan.lint._facts import JobFacts

PAGE = """\\
## What

An axis of size 1 groups nothing.

## Why

It costs a process group.

## Example

    $ meshplan lint --mesh dp=8,tp=1

## Fix

Leave the axis out.

## Source

* the mesh
"""


@rule("mesh", "MP109", "axis-of-one", "warning", "An axis has one rank.", page=PAGE)
def check_axes(rule: Rule, facts: JobFacts) -> Iterator[Finding]:
    for axis, size in zip(facts.layout.axes, facts.layout.sizes, strict=True):
        if size == 1:
            message = f"{axis} has one rank; leave it out"
            yield rule.make_mesh_finding(facts, message, axis=axis)
'''
FORMAT = '''\
"""The list of racks that a lab prints."""

from __future__ import annotations

import re

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Reading


def recognises(text: str) -> bool:
    """Whether the text begins as such a list does."""
    return text.startswith("# racks of the lab")


def read(text: str) -> Reading:
    """Each line a rack, with the GPUs that it joins."""
    found = []
    for number, line in enumerate(text.splitlines()[1:], 2):
        if not re.fullmatch(r"rack( \\d{1,4})+", line):
            raise TopologyInputError("write rack and its GPUs", line=number)
        found.append(tuple(int(one) for one in line.split()[1:]))
    return Reading("racks of the lab", tuple(found), tuple(found), complete=True, scope="cluster")
'''
MESH = ["--no-env", "--mesh", "dp=8,tp=1", "--domain-size", "8"]


@pytest.fixture
def rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rule]:
    """A rule by the recipe: one function, which registers itself."""
    (tmp_path / "axis_of_one.py").write_text(RULE)
    monkeypatch.setattr(_rules, "__path__", [*_rules.__path__, str(tmp_path)])
    found: Rule = import_module("meshplan.lint._rules.axis_of_one").check_axes
    yield found
    del _registered["MP109"], sys.modules["meshplan.lint._rules.axis_of_one"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(words)
    said = capsys.readouterr()
    assert said.err == ""
    return status, said.out


def lint(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    _, text = run(capsys, "lint", *MESH, *words, "--output-format", "json")
    found: dict[str, Any] = json.loads(text)
    return found


def test_new_rule_is_found_selected_and_ignored(
    rule: Rule, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (finding,) = lint(capsys, "--select", "MP109")["findings"]
    assert (finding["code"], finding["severity"]) == ("MP109", "warning")
    assert finding["message"] == "tp has one rank; leave it out"
    assert "MP109" in {one["code"] for one in lint(capsys)["findings"]}
    assert not lint(capsys, "--ignore", "MP109")["findings"]
    assert run(capsys, "lint", *MESH, "--select", "MP109", "--fail-level", "warning")[0] == 1
    file = tmp_path / "meshplan.toml"
    file.write_text('mesh = "dp=8,tp=1"  # meshplan: ignore[MP109] kept for later\n')
    status, text = run(capsys, "lint", "--no-env", "--domain-size", "8", str(file))
    assert (status, "MP109" in text, "1 ignored by comments" in text) == (0, False, True)


def test_new_rule_is_explained_and_reported(rule: Rule, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "rule", "axis-of-one") == (
        0,
        f"# axis-of-one (MP109)\n\nSeverity: warning. An axis has one rank.\n\n{rule.page}",
    )
    listed = run(capsys, "rule", "--all")[1].splitlines()
    at = listed.index("  MP109  warning  axis-of-one              An axis has one rank.")
    assert listed[at - 1].startswith("  MP108  ")
    _, text = run(capsys, "lint", *MESH, "--output-format", "sarif")
    rules = json.loads(text)["runs"][0]["tool"]["driver"]["rules"]
    (mine,) = [one for one in rules if one["id"] == "MP109"]
    assert mine["name"] == "AxisOfOne"
    assert mine["defaultConfiguration"] == {"level": "warning"}
    assert "MP109" in run(capsys, "completion", "bash")[1]


def test_rule_with_needs_waits_for_domains(rule: Rule) -> None:
    (job,) = read_jobs("meshplan.toml", 'mesh = "dp=8,tp=1"\n').jobs
    del _registered["MP109"]
    register(replace(rule, needs="domains", severity="error"))
    for domain_size, codes in ((None, set()), (8, {"MP109"})):
        cluster = Cluster(Topology.uniform(8, node_size=8, domain_size=domain_size))
        assert {one.code for one in check_facts([JobFacts(job, cluster)])} == codes


def test_duplicate_code_or_name_is_refused(rule: Rule) -> None:
    before = dict(RULES)
    for code, name in (("MP109", "another"), ("MP109", "axis-of-one"), ("MP101", "another")):
        with pytest.raises(ValueError, match=f"there is a rule {code} or {name} already"):
            register(replace(rule, code=code, name=name))
    assert dict(RULES) == before
    assert [*RULES] == sorted(RULES)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format by the recipe: one module, and its name in FORMATS."""
    (tmp_path / "lab.py").write_text(FORMAT)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    monkeypatch.setattr(_files, "FORMATS", ("lab", *formats.FORMATS))


@pytest.mark.usefixtures("lab")
def test_new_format_is_read_by_every_verb(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "racks.txt"
    file.write_text("# racks of the lab\nrack 0 1 2 3\nrack 4 5 6 7\n")
    status, text = run(capsys, "topo", str(file))
    assert (status, text.splitlines()[1:]) == (
        0,
        ["  domains: {0-3} {4-7}", "  nodes:   {0-3} {4-7}"],
    )
    where = ["--mesh", "ddp=2,fsdp=4", "--topology", str(file)]
    assert run(capsys, "lint", "--no-env", *where)[0] == 0
    assert "2 nodes of 4" in run(capsys, "simulate", *where)[1]
    file.write_text("# racks of the lab\nrack 0 1\nshelf 2 3\n")
    assert main(["topo", str(file)]) == 2
    assert capsys.readouterr().err == (f"meshplan: MP212: {file}:3: write rack and its GPUs\n")
