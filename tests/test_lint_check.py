"""All rules together, and findings about the inputs themselves."""

from __future__ import annotations

from dataclasses import replace

from expecttest import TestCase

from meshplan.lint._facts import JobFacts, check_facts, sort_findings
from meshplan.lint._finding import Finding, Source
from meshplan.lint._rules._rule import RULES
from meshplan.topology import Cluster, Inputs, Note, Topology, read_cluster
from meshplan.topology._model import SourcedNote
from tests.jobs import format_findings, job, layout


def placed(mesh: str, **inputs: object) -> Cluster:
    found = read_cluster(Inputs(**inputs), layout(mesh).world_size, {})  # type: ignore[arg-type]
    assert found is not None
    return found


def input_findings(cluster: Cluster) -> list[Finding]:
    """Findings about the inputs, without a job."""
    rules = [rule for rule in RULES.values() if rule.subject == "cluster"]
    return [finding for rule in rules for finding in rule.run(cluster)]


class TestInputs(TestCase):
    def test_notes_become_findings(self) -> None:
        notes = (
            SourcedNote("host.txt", Note("a link is down", "MP201", 3)),
            SourcedNote("host.txt", Note("no header")),
            SourcedNote("", Note("hosts are not identical", "MP204")),
        )
        cluster = Cluster(Topology.uniform(12, node_size=8, domain_size=8), notes, origin="2 hosts")
        found = list(input_findings(cluster))
        self.assertExpectedInline(
            format_findings(found),
            """\
warning MP201 a link is down
warning MP204 hosts are not identical""",
        )
        assert [str(f.source) for f in found] == ["host.txt:3", "2 hosts"]

    def test_unknown_placement_is_reported(self) -> None:
        note = SourcedNote("p4d.xml", Note("no <gpu>", "MP202", 1))
        unknown = Cluster(Topology.unknown(8), (note,), origin="nodes unknown")
        self.assertExpectedInline(
            format_findings(input_findings(unknown)),
            """\
warning MP202 no <gpu>
warning MP202 the placement of ranks is unknown, so groups were not judged; pass --hosts, --node-size or --domain-size too""",
        )
        told = Cluster(Topology.uniform(8, node_size=8), (note,), origin="1 host of 8 ranks")
        self.assertExpectedInline(
            format_findings(input_findings(told)),
            """warning MP202 no <gpu>""",
        )


def test_jobs_on_different_clusters_are_checked() -> None:
    first, second = "ddp=8,fsdp=5", "ddp=5,fsdp=8"
    jobs = [(job(mesh, program="torch"), placed(mesh, domain_size=8)) for mesh in (first, second)]
    found = list(check_facts([JobFacts(*one) for one in jobs]))
    assert [(f.code, f.source.option) for f in found] == [
        ("MP101", f"--mesh {first}"),
        ("MP101", f"--mesh {first}"),
        ("MP105", f"--mesh {first}"),
        ("MP105", f"--mesh {second}"),
    ]
    assert all(bool(f.fixes) == (f.code == "MP101") for f in found)


def test_input_findings_are_reported_once() -> None:
    note = SourcedNote("host1.txt", Note("hosts are not identical", "MP204"))
    cluster = replace(placed("dp=4,tp=3", hosts=(4, 8)), notes=(note,))
    found = list(check_facts([JobFacts(job(m), cluster) for m in ("dp=4,tp=3", "dp=3,tp=4")]))
    assert [f.code for f in found].count("MP204") == 1


def test_unknown_placement_is_not_judged() -> None:
    cluster = Cluster(Topology.unknown(40), origin="nodes unknown")
    found = list(check_facts([JobFacts(job("ddp=8,fsdp=5", program="torch"), cluster)]))
    assert [f.code for f in found] == ["MP105", "MP202"]


def test_findings_are_sorted_by_severity_and_place() -> None:
    def one(code: str, severity: str, file: str = "", line: int | None = None) -> Finding:
        return Finding(code, severity, "", Source(file, line))  # type: ignore[arg-type]

    findings = [
        one("MP102", "info"),
        one("MP105", "warning", "b", 1),
        one("MP103", "warning", "a", 9),
        one("MP103", "warning", "a", 2),
        one("MP107", "error"),
        one("MP101", "error"),
    ]
    assert [(f.code, f.source.line) for f in sort_findings(findings)] == [
        ("MP101", None),
        ("MP107", None),
        ("MP103", 2),
        ("MP103", 9),
        ("MP105", 1),
        ("MP102", None),
    ]
