"""A cluster as one short text, for all ranks to read."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from meshplan.errors import TopologyInputError
from meshplan.topology._cluster import Cluster, SourcedNote
from meshplan.topology._model import Topology
from meshplan.topology._reading import Note

__all__ = ["packed", "unpacked"]


def packed(cluster: Cluster) -> str:
    """ASCII, compressed: some kilobytes for ten thousand ranks. Without the cost of links."""
    names = list(dict.fromkeys(cluster.hosts))
    place = {name: i for i, name in enumerate(names)}
    topology = cluster.topology
    fields: dict[str, Any] = {
        "world_size": topology.world_size,
        "nodes": topology.node_map,
        "domains": topology.domain_map,
        "notes": [[n.source, n.note.message, n.note.code, n.note.line] for n in cluster.notes],
        "domain_gpus": cluster.domain_gpus,
        "names": names,
        "hosts": [place[name] for name in cluster.hosts],
        "gpus": cluster.gpus,
        "links": cluster.links,
        "origin": cluster.origin,
    }
    return base64.b85encode(zlib.compress(json.dumps(fields).encode(), 6)).decode()


def unpacked(text: str) -> Cluster:
    """The cluster that ``packed`` made the text of.

    Raises:
        TopologyInputError: it is not such a text.
    """
    try:
        fields = json.loads(zlib.decompress(base64.b85decode(text)))
        return Cluster(
            topology=Topology(fields["world_size"], _map(fields["nodes"]), _map(fields["domains"])),
            notes=tuple(
                SourcedNote(source, Note(message, code, line))
                for source, message, code, line in fields["notes"]
            ),
            domain_gpus=fields["domain_gpus"],
            hosts=tuple(fields["names"][place] for place in fields["hosts"]),
            gpus=tuple(fields["gpus"]),
            links=tuple(fields["links"]),
            origin=fields["origin"],
        )
    except (ValueError, TypeError, KeyError, IndexError, zlib.error) as error:
        raise TopologyInputError(
            f"where the ranks sit was published in a form that cannot be read ({error}); do all "
            "ranks run one version of meshplan?"
        ) from error


def _map(found: int | list[int] | None) -> int | tuple[int, ...] | None:
    return tuple(found) if isinstance(found, list) else found
