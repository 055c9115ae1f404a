"""What one rank knows of its own place: its host, its GPU, and the links of that GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from meshplan.errors import TopologyInputError

__all__ = ["Fabric", "Gpu", "Place", "Vendor"]

Vendor = Literal["nvidia", "amd"]

_COMPLETED = 3
# Fields of two bits in NVML's health mask, 1 for "true" (nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*).
_FAULTS = (
    (0, "bandwidth is degraded"),
    (2, "routes are recovering"),
    (4, "routes are unhealthy"),
    (6, "recovery from access timeouts"),
)
# A field of four bits: 0 is not supported, 1 is none.
_MISCONFIGURED_SHIFT, _NOT_MISCONFIGURED = 8, 1


@dataclass(frozen=True, slots=True)
class Fabric:
    """How a GPU is registered with the fabric manager of multi-node NVLink.

    Attributes:
        cluster: UUID of the cluster, 32 hexadecimal digits; zeros where there is no such fabric.
        clique: its part of the cluster. GPUs with equal cluster and clique reach each other.
        state: of the registration as in NVML; 3 is completed.
        status: how a completed registration ended, as in NVML; 0 is well.
        health: NVML's health mask; ``None`` with a driver that does not tell it.
    """

    cluster: str
    clique: int
    state: int
    status: int = 0
    health: int | None = None

    @property
    def usable(self) -> bool:
        """Whether NCCL takes it for a part of a clique: completed, in a cluster with a UUID."""
        return self.state == _COMPLETED and self.cluster.strip("0") != ""

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with it, in words; empty if nothing is said to be."""
        mask = self.health or 0
        found = [words for shift, words in _FAULTS if mask >> shift & 3 == 1]
        if mask >> _MISCONFIGURED_SHIFT & 0xF > _NOT_MISCONFIGURED:
            found.append(f"misconfigured ({mask >> _MISCONFIGURED_SHIFT & 0xF})")
        if self.state == _COMPLETED and self.status:
            found.append(f"registered with status {self.status}")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, and what its links reach.

    Attributes:
        id: of the device, or of the part of one that the rank uses: equal ids are one GPU.
        bus: PCI bus id, lower case, e.g. ``0000:1b:00.0``.
        vendor: ``nvidia`` or ``amd``.
        model: name of the product; empty if not told.
        links: active NVLink links, or GPUs that xGMI reaches; ``None`` if it could not be asked.
        unread: numbers of the links that could not be asked.
        peers: bus ids of GPUs at the other end of a link.
        switch: whether a link leads to a switch.
        fabric: of multi-node NVLink; ``None`` if there is none.
        on_host: GPUs that this host shows; ``None`` if not told.
        domain: GPUs of this host that are joined with this one, itself included, whether the job
            uses them or not; ``None`` if not told.
    """

    id: str
    bus: str
    vendor: Vendor
    model: str = ""
    links: int | None = None
    unread: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    switch: bool = False
    fabric: Fabric | None = None
    on_host: int | None = None
    domain: int | None = None

    @property
    def told(self) -> bool:
        """Whether all GPUs are known that its links join it with."""
        if self.links is None:
            return False
        return self.switch or not self.unread


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place.

    Attributes:
        host: what tells hosts apart, as NCCL does: equal texts are one host.
        name: of the host, for people.
        machine: what tells machines apart, containers of one machine alike; empty if unknown.
        local_rank, local_size: rank and number of ranks with one agent of ``torchrun``.
        agent: number of that agent (``GROUP_RANK``).
        gpu: the GPU of the rank; ``None`` if unknown, and then ``reason`` says why.
        reason: why nothing is known of a GPU.
        multi_node: whether NCCL's variables allow multi-node NVLink.
        imex: whether the process has a channel through which memory is shared between hosts.
    """

    host: str
    name: str
    machine: str = ""
    local_rank: int | None = None
    local_size: int | None = None
    agent: int | None = None
    gpu: Gpu | None = None
    reason: str = ""
    multi_node: bool = True
    imex: bool = False

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; what has its default is left out."""
        return _sparse(asdict(self), self)

    @classmethod
    def from_json(cls, found: Any) -> Place:
        """The place that ``to_json`` gave.

        Raises:
            TopologyInputError: it is not of that form.
        """
        values = _checked(cls, found)
        if values.get("gpu") is not None:
            gpu = _checked(Gpu, values["gpu"])
            if gpu.get("fabric") is not None:
                gpu["fabric"] = Fabric(**_checked(Fabric, gpu["fabric"]))
            values["gpu"] = Gpu(**gpu)
        return cls(**values)


_KINDS: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "int | None": (int, type(None)),
    "Vendor": str,
    "tuple[int, ...]": int,
    "tuple[str, ...]": str,
    "Gpu | None": (dict, type(None)),
    "Fabric | None": (dict, type(None)),
}


def _sparse(values: dict[str, Any], of: Any) -> dict[str, Any]:
    kept = {f.name: values[f.name] for f in fields(of) if values[f.name] != f.default}
    for name in ("gpu", "fabric"):
        if kept.get(name) is not None:
            kept[name] = _sparse(kept[name], getattr(of, name))
    return {name: list(v) if isinstance(v, tuple) else v for name, v in kept.items()}


def _checked(kind: Any, found: Any) -> dict[str, Any]:
    known = {field.name: _KINDS[str(field.type)] for field in fields(kind)}
    lists = {f.name for f in fields(kind) if str(f.type).startswith("tuple")}
    if not isinstance(found, dict) or not found.keys() <= known.keys():
        raise _malformed(kind, found)
    values = {}
    for name, value in found.items():
        members = value if name in lists and isinstance(value, list | tuple) else [value]
        if not all(isinstance(member, known[name]) for member in members):
            raise _malformed(kind, {name: value})
        values[name] = tuple(members) if name in lists else value
    needed = {"Fabric": ("cluster", "clique", "state"), "Gpu": ("id", "bus", "vendor")}
    if not values.keys() >= set(needed.get(kind.__name__, ("host", "name"))):
        raise _malformed(kind, found)
    return values


def _malformed(kind: Any, found: Any) -> TopologyInputError:
    return TopologyInputError(
        f"no {kind.__name__} of a rank: {str(found)[:80]!r}; do all ranks run one version of "
        "meshplan?"
    )
