"""MP201 to MP204, from the notes of cluster descriptions; MP190 and MP191, made by readers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshplan.lint._finding import Finding, Source
from meshplan.lint._rules._rule import Rule, register, rule

if TYPE_CHECKING:
    from meshplan.topology import Cluster

UNUSED_IGNORE = register(
    Rule(
        "input",
        "MP190",
        "unused-ignore",
        "warning",
        "An ignore comment matches no finding.",
    )
)
NOT_JUDGED = register(
    Rule(
        "input",
        "MP191",
        "not-judged",
        "warning",
        "A mesh could not be read from its file; it was not judged, which fails.",
    )
)

CONTRADICTION = register(
    Rule(
        "input",
        "MP192",
        "ranks-contradict",
        "warning",
        "A file and the options specify different numbers of ranks; those of the file are used.",
    )
)


def _report_notes(rule: Rule, cluster: Cluster) -> Iterator[Finding]:
    """The notes that carry the code of the rule."""
    for sourced in cluster.notes:
        if sourced.note.code == rule.code:
            source = Source(file=sourced.source, line=sourced.note.line)
            if not sourced.source:
                source = Source(option=cluster.origin)
            yield rule.make_finding(sourced.note.message, source, subject=sourced.source)


for _code, _name, _summary in (
    (
        "MP201",
        "asymmetric-links",
        "GPUs have different numbers of links, or two ends disagree; a link may be down.",
    ),
    (
        "MP203",
        "tray-only",
        "An input shows one tray of a rack that NVLink may join as a whole.",
    ),
    ("MP204", "hosts-differ", "Hosts of one job are not identical."),
):
    rule("cluster", _code, _name, "warning", _summary)(_report_notes)


@rule(
    "cluster",
    "MP202",
    "partial-topology",
    "warning",
    "An input does not report which GPUs are joined; unknown does not mean separate.",
)
def _check_partial_topology(rule: Rule, cluster: Cluster) -> Iterator[Finding]:
    yield from _report_notes(rule, cluster)
    if not cluster.topology.known:
        yield rule.make_finding(
            "the placement of ranks is unknown, so groups were not judged; pass --hosts, "
            "--node-size or --domain-size too",
            Source(option=cluster.origin),
        )
