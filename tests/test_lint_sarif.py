"""SARIF 2.1.0: valid, stable, and with a place for every finding."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from expecttest import TestCase
from hypothesis import given

from meshplan.lint._finding import Finding, LintReport, Source
from meshplan.lint._reporters import render
from meshplan.lint._rules._rule import RULES
from tests.cli import meshplan
from tests.reports import EMPTY, HOSTILE, PLAIN, REPORTS

SUBSET = json.loads((Path(__file__).parent / "schemas" / "sarif_subset.json").read_text())
ALL_RULES = LintReport(
    tuple(Finding(r.code, r.severity, r.summary, Source("mesh.toml", 1)) for r in RULES.values())
)


def read_run(report: LintReport) -> Any:
    return json.loads(render(report, "sarif"))["runs"][0]


def prints(report: LintReport) -> list[str]:
    return [result["partialFingerprints"]["meshplan/v1"] for result in read_run(report)["results"]]


def at(file: str = "", line: int | None = None, option: str = "") -> Any:
    finding = Finding("MP101", "error", "m", Source(file, line, option))
    return read_run(LintReport((finding,)))["results"][0]["locations"][0]


class TestSarif(TestCase):
    def test_results_are_written(self) -> None:
        results = read_run(PLAIN)["results"]
        entries = json.loads(render(PLAIN, "json"))["findings"]
        for result, entry in zip(results, entries, strict=True):
            same = {key: entry[key] for key in ("subject", "fixes", "data")}
            assert result.pop("properties") == same
        self.assertExpectedInline(
            "\n".join(json.dumps(one) for one in results),
            """\
{"ruleId": "MP101", "ruleIndex": 0, "level": "error", "message": {"text": "5 groups of ddp must agree and lie on nodes in 2 ways; replicas may differ\\n(ddp=8, fsdp=5, tp=1)\\nranks per node: {{0-7}} {{8-15}}\\n  (2, 2, 1)\\ntree: ((0+5)+35)\\nFix: write ddp=5,fsdp=8 (no GPU is left out)\\nFix: call meshplan.install() (one line)"}, "locations": [{"physicalLocation": {"artifactLocation": {"uri": "configs/mesh.toml"}, "region": {"startLine": 3}}}], "partialFingerprints": {"meshplan/v1": "76c95623ad2583a79637ebcdd269db6d:1"}}
{"ruleId": "MP203", "ruleIndex": 2, "level": "warning", "message": {"text": "4 GPUs as in one tray of a rack"}, "locations": [{"logicalLocations": [{"name": "standard input:1", "kind": "resource"}]}], "partialFingerprints": {"meshplan/v1": "9b2f7a3f66f775980505cda3ad8196e5:1"}}
{"ruleId": "MP102", "ruleIndex": 1, "level": "note", "message": {"text": "groups of fsdp lie on nodes in 2 ways\\nFix: leave it"}, "locations": [{"logicalLocations": [{"name": "--mesh", "fullyQualifiedName": "--mesh ddp=4,fsdp=12", "kind": "parameter"}]}], "partialFingerprints": {"meshplan/v1": "281496c484bc6c8dfe2af1dea9ec7244:1"}}""",
        )

    def test_states_of_inputs_are_notifications(self) -> None:
        run = read_run(PLAIN)
        (invocation,) = run["invocations"]
        assert invocation.pop("executionSuccessful")
        self.assertExpectedInline(
            "\n".join(json.dumps(one) for one in invocation.pop("toolExecutionNotifications")),
            """\
{"level": "note", "message": {"text": "no mesh: a.py"}, "locations": [{"physicalLocation": {"artifactLocation": {"uri": "a.py"}}}], "descriptor": {"id": "no-mesh"}}
{"level": "note", "message": {"text": "no mesh: b.py"}, "locations": [{"physicalLocation": {"artifactLocation": {"uri": "b.py"}}}], "descriptor": {"id": "no-mesh"}}
{"level": "error", "message": {"text": "not judged: open.py\\nline 3: n is not a constant\\nline 4: m"}, "locations": [{"physicalLocation": {"artifactLocation": {"uri": "open.py"}}}], "descriptor": {"id": "not-judged"}}
{"level": "error", "message": {"text": "not judged: --mesh dp=8\\nthe node of each rank is unknown"}, "locations": [{"logicalLocations": [{"name": "--mesh", "fullyQualifiedName": "--mesh dp=8", "kind": "parameter"}]}], "descriptor": {"id": "not-judged"}}""",
        )
        assert not invocation
        assert [one["state"] for one in run["properties"]["inputs"]] == [
            *("judged", "no mesh", "not judged", "no mesh", "not judged")
        ]

    def test_rule_has_help_and_level(self) -> None:
        rule = read_run(PLAIN)["tool"]["driver"]["rules"][0]
        shown = {**rule, "help": {key: text[:80] for key, text in rule["help"].items()}}
        self.assertExpectedInline(
            json.dumps(shown),
            """{"id": "MP101", "name": "JaggedReduction", "shortDescription": {"text": "Groups that must agree are placed on nodes in different ways; replicas may differ."}, "defaultConfiguration": {"level": "error"}, "properties": {"tags": ["mesh"], "problem.severity": "error"}, "help": {"text": "jagged-reduction (MP101)\\n\\nSeverity: error. Groups that must agree are placed on ", "markdown": "# jagged-reduction (MP101)\\n\\nSeverity: error. Groups that must agree are placed o"}, "helpUri": "https://github.com/pytorch/pytorch/issues/171916"}""",
        )

    def test_locations_of_files_and_options(self) -> None:
        found = [
            at("configs/mesh.toml", 3),
            at("/etc/a b.toml"),
            at("a:b/\udcff\u00e9?#.toml", 0),
            at("-", 7),
            at(option="--mesh ddp=8,fsdp=5"),
            at(option="NCCL_ALGO=Tree"),
            at(),
        ]
        self.assertExpectedInline(
            "\n".join(json.dumps(one) for one in found),
            """\
{"physicalLocation": {"artifactLocation": {"uri": "configs/mesh.toml"}, "region": {"startLine": 3}}}
{"physicalLocation": {"artifactLocation": {"uri": "file:///etc/a%20b.toml"}}}
{"physicalLocation": {"artifactLocation": {"uri": "a%3Ab/%FF%C3%A9%3F%23.toml"}}}
{"logicalLocations": [{"name": "standard input:7", "kind": "resource"}]}
{"logicalLocations": [{"name": "--mesh", "fullyQualifiedName": "--mesh ddp=8,fsdp=5", "kind": "parameter"}]}
{"logicalLocations": [{"name": "NCCL_ALGO", "fullyQualifiedName": "NCCL_ALGO=Tree", "kind": "variable"}]}
{"logicalLocations": [{"name": "meshplan", "kind": "resource"}]}""",
        )

    def test_help_text_has_no_markup(self) -> None:
        rules = read_run(ALL_RULES)["tool"]["driver"]["rules"]
        assert len(rules) == len(RULES)
        for rule in rules:
            assert "`" not in rule["help"]["text"]
            assert "\n# " not in rule["help"]["text"]
            assert rule["help"]["markdown"].startswith("# ")

    def test_braces_and_brackets_are_escaped(self) -> None:
        finding = Finding("MP101", "error", "{0} of {1-3} [a](b)", Source("f"))
        text = read_run(LintReport((finding,)))["results"][0]["message"]["text"]
        self.assertExpectedInline(text, """{{0}} of {{1-3}} [a] (b)""")


@pytest.mark.parametrize("report", [PLAIN, EMPTY, HOSTILE, ALL_RULES])
def test_output_is_in_the_supported_subset(report: LintReport) -> None:
    jsonschema.Draft202012Validator.check_schema(SUBSET)
    jsonschema.Draft202012Validator(SUBSET).validate(json.loads(render(report, "sarif")))


@given(REPORTS)
def test_any_report_is_in_the_subset(report: LintReport) -> None:
    # An empty message is no message; the linter writes none.
    report = LintReport(tuple(replace(f, message=f.message or "m") for f in report.findings))
    jsonschema.Draft202012Validator(SUBSET).validate(json.loads(render(report, "sarif")))


@pytest.mark.skipif(
    "MESHPLAN_SARIF_SCHEMA" not in os.environ,
    reason="set MESHPLAN_SARIF_SCHEMA to a copy of OASIS's sarif-schema-2.1.0.json",
)
@pytest.mark.parametrize("report", [PLAIN, EMPTY, HOSTILE, ALL_RULES])
def test_output_validates_against_the_oasis_schema(report: LintReport) -> None:
    schema = json.loads(Path(os.environ["MESHPLAN_SARIF_SCHEMA"]).read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(render(report, "sarif")), schema)


MESHES = {
    "a.py": """\
def make():
    return init_device_mesh(
        "cuda",
        (8, 5),
        mesh_dim_names=("ddp", "fsdp"),
    )
""",
    "job.toml": """\
[parallelism]
data_parallel_replicate_degree = 8
data_parallel_shard_degree = 5""",
    "verl.yaml": "parallelism_config:\n  dp_replicate_size: 8\n  dp_shard_size: 5\nnum_processes: 40\n",
    "accelerate.json": '{"parallelism_config":\n  {"dp_replicate_size": 8, "dp_shard_size": 5}}\n',
    "run.sh": "set -e\n  torchrun --nnodes 5 --nproc-per-node 8 train.py --dp 8 --fsdp 5\n",
}


@pytest.mark.parametrize(
    ("name", "line"),
    [("a.py", 2), ("job.toml", 1), ("verl.yaml", 2), ("accelerate.json", 2), ("run.sh", 2)],
)
@pytest.mark.parametrize("is_file", [True, False])
def test_places_are_those_of_the_file(
    name: str,
    line: int,
    is_file: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = MESHES[name]
    words = (name,) if is_file else ("-", "--stdin-filename", name)
    if is_file:
        Path(name).write_text(text)
    options = ("--isolated", "--no-env", "--domain-size", "8", "--output-format")
    status, out, err = meshplan("lint", *words, *options, "sarif", given=text)
    assert (status, err) == (1, "")
    log = json.loads(out)
    jsonschema.Draft202012Validator(SUBSET).validate(log)
    if schema := os.environ.get("MESHPLAN_SARIF_SCHEMA"):
        jsonschema.validate(log, json.loads(Path(schema).read_text()))
    results = [one for one in log["runs"][0]["results"] if one["ruleId"] == "MP101"]
    assert results
    for result in results:
        (location,) = result["locations"]
        physical = {"artifactLocation": {"uri": name}, "region": {"startLine": line}}
        assert location == {"physicalLocation": physical}
        assert result["properties"]["fixes"]
    status, out, _ = meshplan("lint", *words, *options, "github", given=text)
    assert f"::error file={name},line={line},title=MP101::" in out


def test_meshes_on_nodes_of_unknown_size_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("vllm serve Qwen/Qwen3-32B --tensor-parallel-size 8\n")
    words = ("lint", "run.sh", "--isolated", "--no-env", "--output-format")
    note = "(tp=8) on 1 node of 8; no hazard on nodes of 8, of 4 or in racks of 72; their size was not read"
    assert f"judged run.sh:1: {note}\n" in meshplan(*words, "text")[1]
    assert meshplan(*words, "concise")[1] == f"run.sh:1: judged {note}\n"
    assert meshplan(*words, "github")[1] == f"::notice file=run.sh,line=1,title=judged::{note}\n"
    log = json.loads(meshplan(*words, "sarif")[1])
    jsonschema.Draft202012Validator(SUBSET).validate(log)
    (found,) = log["runs"][0]["invocations"][0]["toolExecutionNotifications"]
    assert (found["level"], found["message"]["text"]) == ("note", note)
    placed = meshplan(*words, "concise", "--node-size", "8")
    assert placed == (0, "", "")


@given(REPORTS)
def test_only_rules_of_findings_are_listed(report: LintReport) -> None:
    run = read_run(report)
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(set(ids)) == len(ids)
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
    assert set(ids) == {result["ruleId"] for result in run["results"]}


def test_fingerprints_do_not_depend_on_lines_or_on_other_findings() -> None:
    first, second = (Finding("MP101", "error", word, Source("f", 1)) for word in ("a", "b"))
    moved = replace(first, source=Source("f", 40))
    elsewhere = replace(first, source=Source("g", 1))
    assert prints(LintReport((first, second))) == prints(LintReport((moved, second)))
    assert prints(LintReport((second, first))) == prints(LintReport((first, second)))[::-1]
    assert prints(LintReport((first,))) != prints(LintReport((elsewhere,)))
    one, other = prints(LintReport((first, moved)))
    assert (one[:-2], one[-2:], other[-2:]) == (other[:-2], ":1", ":2")


def test_fingerprints_do_not_change() -> None:
    """Another value would close and reopen every alert of every user."""
    finding = Finding("MP101", "error", "m", Source("configs/mesh.toml", 3), "(dp=8)")
    assert prints(LintReport((finding,))) == ["4ae91a0be84eb11dcd28184d8811d58a:1"]
