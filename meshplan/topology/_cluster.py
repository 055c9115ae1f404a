"""The cluster of a job: the location of its ranks, and further facts of the machine."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from typing import Any

from meshplan.errors import TopologyInputError
from meshplan.topology._model import Topology
from meshplan.topology._reading import Note


@dataclass(frozen=True, slots=True)
class SourcedNote:
    source: str
    note: Note


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster of a job."""

    topology: Topology  # node and domain of each rank
    # Oddities of the inputs; a note with a code is a finding of the linter.
    notes: tuple[SourcedNote, ...] = ()
    # GPUs that one domain of the machine has, used by the job or not; ``None`` if domains
    # differ or are unknown.
    domain_gpus: int | None = None
    # Name of the host of each rank, or empty where hosts have no names.
    hosts: tuple[str, ...] = ()
    # PCI bus id of the GPU of each rank, empty where it is unknown; or empty altogether:
    # the n-th rank of a host has its GPU n, or nothing is known.
    gpus: tuple[str, ...] = ()
    # Active NVLink or xGMI links of the GPU of each rank, ``None`` where that is unknown;
    # or empty altogether.
    links: tuple[int | None, ...] = ()
    origin: str = ""  # one line on the source of these facts


def pack_cluster(cluster: Cluster) -> str:
    """Compressed ASCII: some kilobytes for ten thousand ranks. The cost of links is left out."""
    names = list(dict.fromkeys(cluster.hosts))
    number = {name: i for i, name in enumerate(names)}
    topology = cluster.topology
    fields: dict[str, Any] = {
        "world_size": topology.world_size,
        "nodes": topology.node_map,
        "domains": topology.domain_map,
        "notes": [[n.source, n.note.message, n.note.code, n.note.line] for n in cluster.notes],
        "domain_gpus": cluster.domain_gpus,
        "names": names,
        "hosts": [number[name] for name in cluster.hosts],
        "gpus": cluster.gpus,
        "links": cluster.links,
        "origin": cluster.origin,
    }
    return base64.b85encode(zlib.compress(json.dumps(fields).encode(), 6)).decode()


def unpack_cluster(text: str) -> Cluster:
    """The cluster from a text of ``pack_cluster``."""
    try:
        fields = json.loads(zlib.decompress(base64.b85decode(text)))
        nodes, domains = (
            tuple(ids) if isinstance(ids, list) else ids
            for ids in (fields["nodes"], fields["domains"])
        )
        return Cluster(
            topology=Topology(fields["world_size"], nodes, domains),
            notes=tuple(
                SourcedNote(source, Note(message, code, line))
                for source, message, code, line in fields["notes"]
            ),
            domain_gpus=fields["domain_gpus"],
            hosts=tuple(fields["names"][host] for host in fields["hosts"]),
            gpus=tuple(fields["gpus"]),
            links=tuple(fields["links"]),
            origin=fields["origin"],
        )
    except (ValueError, TypeError, KeyError, IndexError, zlib.error) as error:
        raise TopologyInputError(
            f"the published location of the ranks cannot be read ({error}); do all ranks run one "
            "version of meshplan?"
        ) from error
