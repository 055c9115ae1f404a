"""MP201 to MP206: what is odd about the inputs that tell where ranks sit."""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.lint._finding import Finding, Source
from meshplan.topology import Cluster

__all__ = ["input_findings"]


def input_findings(cluster: Cluster) -> Iterator[Finding]:
    """Notes that are findings of a rule; and that nodes are unknown, so that nothing is judged."""
    told = False
    for sourced in cluster.notes:
        note = sourced.note
        if note.code:
            told |= note.code == "MP202"
            source = Source(file=sourced.source, line=note.line)
            if not sourced.source:
                source = Source(option=cluster.origin)
            yield Finding(note.code, "warning", note.message, source, subject=sourced.source)
    if not cluster.topology.known:
        yield Finding(
            "MP202",
            "warning",
            "where ranks sit is unknown, so groups were not judged; write --hosts, --node-size or "
            "--domain-size too",
            Source(option=cluster.origin),
        )
    elif cluster.topology.domains is None and not told:
        yield Finding(
            "MP202",
            "info",
            "which GPUs of a node NVLink joins is unknown: MP103 and MP104 were not judged",
            Source(option=cluster.origin),
        )
