"""The location of one rank: its host, its GPU and the links of that GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal

from meshplan.errors import TopologyInputError

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
_NUMBER = re.compile(r"\s*\+?(\d{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Fabric:
    """The registration of a GPU with the fabric manager of multi-node NVLink.

    Attributes:
        cluster: UUID of the cluster, 32 hexadecimal digits; zeros where there is no such fabric.
        clique: its part of the cluster. GPUs with equal cluster and clique reach each other.
        state: of the registration as in NVML; 3 is completed.
        status: result of a completed registration, as in NVML; 0 is success.
        health: NVML's health mask; ``None`` with a driver that does not report it.
    """

    cluster: str
    clique: int
    state: int
    status: int = 0
    health: int | None = None

    @property
    def usable(self) -> bool:
        """True if NCCL counts it as a part of a clique: completed, in a cluster with a UUID."""
        return self.state == _COMPLETED and self.cluster.strip("0") != ""

    @property
    def faults(self) -> tuple[str, ...]:
        mask = self.health or 0
        found = [words for shift, words in _FAULTS if mask >> shift & 3 == 1]
        if mask >> _MISCONFIGURED_SHIFT & 0xF > _NOT_MISCONFIGURED:
            found.append(f"misconfigured ({mask >> _MISCONFIGURED_SHIFT & 0xF})")
        if self.state == _COMPLETED and self.status:
            found.append(f"registered with status {self.status}")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU and the devices at the other ends of its links.

    Attributes:
        id: of the device, or of the part of one that the rank uses: equal ids are one GPU.
        bus: PCI bus id, lower case, e.g. ``0000:1b:00.0``.
        vendor: ``nvidia`` or ``amd``.
        model: name of the product; empty if unknown.
        links: active NVLink links, or GPUs that xGMI reaches; ``None`` if unknown.
        unread: numbers of the links that could not be read.
        peers: bus ids of GPUs at the other end of a link.
        switch: whether a link leads to a switch.
        fabric: of multi-node NVLink; ``None`` if there is none.
        on_host: GPUs visible on this host; ``None`` if unknown.
        domain: GPUs of this host that are joined with this one, itself included, whether the job
            uses them or not; ``None`` if unknown.
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
    def links_known(self) -> bool:
        return self.links is not None and (self.switch or not self.unread)


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The location of one rank.

    Attributes:
        host: identifies the host as NCCL does: equal texts are one host.
        name: of the host, for people.
        machine: identifies the machine; containers of one machine share it. Empty if unknown.
        agent: number of the agent of ``torchrun`` that started it (``GROUP_RANK``).
        gpu: the GPU of the rank; ``None`` if unknown, and ``reason`` then has the cause.
        reason: why the GPU is unknown.
        multi_node: whether NCCL's variables allow multi-node NVLink.
        imex: whether the process has a channel through which memory is shared between hosts.
    """

    host: str
    name: str
    machine: str = ""
    agent: int | None = None
    gpu: Gpu | None = None
    reason: str = ""
    multi_node: bool = True
    imex: bool = False

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, without the fields that have their default."""
        return _encode(self)

    @classmethod
    def from_json(cls, found: Any) -> RankLocation:
        """The location from the value that ``to_json`` returns."""
        location: RankLocation = _decode(cls, found)
        return location


def select_devices(text: str | None, ids: Sequence[str]) -> list[int | str]:
    """The devices that ``CUDA_VISIBLE_DEVICES`` or a similar variable selects, in order. As in the
    CUDA Programming Guide: numbers, or ids that may be abbreviated while they stay unambiguous.
    Entries after one that is not a device are invisible. Returns positions in ``ids``, or the ids
    of parts of devices (``MIG-...``).
    """
    if text is None:
        return list(range(len(ids)))
    found: list[int | str] = []
    for entry in map(str.strip, text.split(",")):
        number = _NUMBER.match(entry)
        if number is not None and int(number[1]) < len(ids):
            one: int | str = int(number[1])
        elif entry.startswith("MIG-") and len(entry) > 4:
            one = entry
        else:
            named = entry[:4].upper() == "GPU-"
            same = [i for i, name in enumerate(ids) if name.lower().startswith(entry.lower())]
            if not named or len(same) != 1:
                break
            one = same[0]
        if one in found:
            # The driver then shows no device at all.
            return []
        found.append(one)
    return found


_RECORDS = {"Gpu": Gpu, "Fabric": Fabric}
_TYPES = {
    **{"str": str, "Vendor": str, "tuple[str, ...]": str},
    **{"int": int, "bool": bool, "tuple[int, ...]": int},
}


def _encode(record: Any) -> dict[str, Any]:
    kept = {f.name: getattr(record, f.name) for f in fields(record)}
    kept = {f.name: kept[f.name] for f in fields(record) if kept[f.name] != f.default}
    return {
        name: _encode(v) if is_dataclass(v) else list(v) if isinstance(v, tuple) else v
        for name, v in kept.items()
    }


def _decode(kind: Any, found: Any) -> Any:
    types = {f.name: str(f.type) for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING}
    if not isinstance(found, dict) or not required <= found.keys() <= types.keys():
        raise _make_error(kind, found)
    values: dict[str, Any] = {}
    for name, value in found.items():
        wanted = types[name].removesuffix(" | None")
        if value is None and wanted != types[name]:
            values[name] = None
        elif wanted in _RECORDS:
            values[name] = _decode(_RECORDS[wanted], value)
        else:
            listed = wanted.startswith("tuple")
            members = value if listed and isinstance(value, list) else [value]
            if not all(isinstance(member, _TYPES[wanted]) for member in members):
                raise _make_error(kind, {name: value})
            values[name] = tuple(members) if listed else value
    return kind(**values)


def _make_error(kind: Any, found: Any) -> TopologyInputError:
    return TopologyInputError(
        f"not a valid {kind.__name__} of a rank: {str(found)[:80]!r}; do all ranks run one version "
        "of meshplan?"
    )
