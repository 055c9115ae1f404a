"""Where the ranks of a job sit, and what is known of the machine beyond that."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.topology._model import Topology
from meshplan.topology._reading import Note

__all__ = ["Cluster", "SourcedNote"]


@dataclass(frozen=True, slots=True)
class SourcedNote:
    """A note, and the file, variable or probe it is about (``-`` is standard input)."""

    source: str
    note: Note


@dataclass(frozen=True, slots=True)
class Cluster:
    """A job's place on a machine.

    Attributes:
        topology: node and domain of each rank.
        notes: what was odd in the inputs; a note with a code is a finding of the linter.
        domain_gpus: GPUs that one domain of the machine has, used by the job or not; ``None`` if
            domains differ or are unknown.
        hosts: name of the host of each rank, or empty where hosts have no names.
        gpus: PCI bus id of the GPU of each rank, empty where it is unknown; or empty altogether:
            the n-th rank of a host has its GPU n, or nothing is known.
        links: active NVLink or xGMI links of the GPU of each rank, ``None`` where that is unknown;
            or empty altogether.
        origin: one line: how this is known.
    """

    topology: Topology
    notes: tuple[SourcedNote, ...] = ()
    domain_gpus: int | None = None
    hosts: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    links: tuple[int | None, ...] = ()
    origin: str = ""
