"""Locates the rank of this process, without waiting for other ranks."""

from __future__ import annotations

import ctypes
import hashlib
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import find_components, format_count, freeze, parse_number

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
    """The registration of a GPU with the fabric manager of multi-node NVLink."""

    # UUID of the cluster, 32 hexadecimal digits; zeros where there is no such fabric.
    cluster: str
    # Its part of the cluster. GPUs with equal cluster and clique reach each other.
    clique: int
    state: int  # of the registration as in NVML; 3 is completed
    # Result of a completed registration, as in NVML; 0 is success.
    status: int = 0
    # NVML's health mask; ``None`` with a driver that does not report it.
    health: int | None = None

    @property
    def usable(self) -> bool:
        """True if NCCL counts it as a part of a clique: completed, in a cluster with a UUID."""
        return self.state == _COMPLETED and self.cluster.strip("0") != ""

    @property
    def faults(self) -> tuple[str, ...]:
        mask = self.health or 0
        found = [words for shift, words in _FAULTS if mask >> shift & 3 == 1]
        if (kind := mask >> _MISCONFIGURED_SHIFT & 0xF) > _NOT_MISCONFIGURED:
            found.append(f"misconfigured ({kind})")
        if self.state == _COMPLETED and self.status:
            found.append(f"registered with status {self.status}")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Gpu:
    # Of the device, or of the part of one that the rank uses: equal ids are one GPU.
    id: str
    bus: str  # PCI bus id, lower case, e.g. ``0000:1b:00.0``
    vendor: Vendor  # ``nvidia`` or ``amd``
    model: str = ""  # name of the product; empty if unknown
    # Active NVLink links, or GPUs that xGMI reaches; ``None`` if unknown.
    links: int | None = None
    unread: tuple[int, ...] = ()  # numbers of the links that could not be read
    peers: tuple[str, ...] = ()  # bus ids of GPUs at the other end of a link
    switch: bool = False  # whether a link leads to a switch
    # Of multi-node NVLink; ``None`` if there is none.
    fabric: Fabric | None = None
    on_host: int | None = None  # GPUs visible on this host; ``None`` if unknown
    # GPUs of this host that are joined with this one, itself included, whether the job
    # uses them or not; ``None`` if unknown.
    domain: int | None = None

    @property
    def links_known(self) -> bool:
        return self.links is not None and (self.switch or not self.unread)


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The location of one rank."""

    host: str  # identifies the host as NCCL does: equal texts are one host
    name: str  # of the host, for people
    # Identifies the machine; containers of one machine share it. Empty if unknown.
    machine: str = ""
    # Number of the agent of ``torchrun`` that started it (``GROUP_RANK``).
    agent: int | None = None
    # The GPU of the rank; ``None`` if unknown, and ``reason`` then has the cause.
    gpu: Gpu | None = None
    reason: str = ""  # why the GPU is unknown
    multi_node: bool = True  # whether NCCL's variables allow multi-node NVLink
    # Whether the process has a channel through which memory is shared between hosts.
    imex: bool = False

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, without the fields that have their default."""
        return _encode(self)

    @classmethod
    def from_json(cls, found: Any) -> RankLocation:
        try:
            known = freeze(found)
            if (gpu := known.get("gpu")) is not None:
                fabric = gpu.get("fabric")
                fabric = None if fabric is None else Fabric(**fabric)
                known["gpu"] = Gpu(**{**gpu, "fabric": fabric})
            return cls(**known)
        except (TypeError, AttributeError) as error:
            raise TopologyInputError(
                f"not a valid RankLocation of a rank: {str(found)[:80]!r}; do all ranks run one "
                "version of meshplan?"
            ) from error


def select_devices(text: str | None, ids: Sequence[str]) -> list[int | str]:
    """Positions in ``ids``, or the ids of parts of devices (``MIG-...``), that
    ``CUDA_VISIBLE_DEVICES`` or a similar variable selects. As in the CUDA Programming Guide: ids
    may be abbreviated, and entries after one that is not a device are invisible.
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


def _encode(record: Any) -> dict[str, Any]:
    kept = {f.name: getattr(record, f.name) for f in fields(record)}
    kept = {f.name: kept[f.name] for f in fields(record) if kept[f.name] != f.default}
    return {
        name: _encode(v) if is_dataclass(v) else list(v) if isinstance(v, tuple) else v
        for name, v in kept.items()
    }


# Reads one AMD GPU from the files of the kernel's driver in /sys.
#
# Source: drivers/gpu/drm/amd/amdkfd/kfd_topology.c of Linux. libhsakmt of ROCm defines which nodes
# a process may use, and their order. Files are small lists of ``name value``. ROCm is not needed.

_DIGITS = re.compile(r"\d{1,20}", re.ASCII)
_XGMI = 11  # HSA_IOLINK_TYPE_XGMI
_MAX_NODES, _MAX_LINKS, _MAX_BYTES = 4096, 4096, 1 << 16


@dataclass(frozen=True, slots=True)
class _Node:
    """A GPU that this process may use. ``id`` is its name in ``ROCR_VISIBLE_DEVICES``."""

    number: int
    id: str
    bus: str
    links: tuple[int, ...]
    unread: tuple[int, ...]


def find_amd_gpu(
    environ: Mapping[str, str],
    index: int,
    root: Path,
) -> Gpu | str:
    """The GPU that this process calls number ``index``; or why it is unknown."""
    try:
        nodes, hidden = _read_nodes(root)
    except OSError as error:
        return f"{root}: {error.strerror or error}"
    if not nodes:
        return f"{root} shows no GPU"
    # First ROCm's runtime selects, then HIP among those.
    chosen = nodes
    for text in (
        environ.get("ROCR_VISIBLE_DEVICES"),
        environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")),
    ):
        selected = select_devices(text, [node.id for node in chosen])
        chosen = [chosen[one] for one in selected if isinstance(one, int)]
    # Launchers that give each process one GPU count their processes all the same.
    index = 0 if len(chosen) == 1 else index
    if not 0 <= index < len(chosen):
        return f"no GPU {index} among {format_count(len(chosen), 'GPU')} that are visible here"
    node = chosen[index]
    buses = {one.number: one.bus for one in nodes}
    gpus = {*buses, *hidden}
    peers = [number for number in node.links if number in gpus]
    unique = sum(one.id == node.id for one in nodes) == 1
    return Gpu(
        # Parts of one device may have one id.
        id=node.id if node.id and unique else f"{node.bus} node {node.number}",
        bus=node.bus,
        vendor="amd",
        links=None if node.unread and not peers else len(peers),
        unread=node.unread,
        peers=tuple(sorted(buses.get(number, f"node {number}") for number in peers)),
        on_host=len(nodes),
        domain=_count_domain(nodes, gpus, node.number),
    )


def _count_domain(nodes: list[_Node], gpus: set[int], number: int) -> int | None:
    pairs = [(node.number, to) for node in nodes for to in node.links if to in gpus]
    domain = next(found for found in find_components(gpus, pairs) if number in found)
    # The links of an unreadable GPU are unknown, and so is the extent of its domain.
    readable = {node.number for node in nodes if not node.unread}
    return len(domain) if readable.issuperset(domain) else None


def _read_nodes(root: Path) -> tuple[list[_Node], set[int]]:
    """GPUs that this process may use, by number; and numbers of nodes that it may not read."""
    numbers = [int(entry.name) for entry in (root / "nodes").iterdir() if entry.name.isdecimal()]
    nodes, hidden = [], set()
    for number in sorted(numbers)[:_MAX_NODES]:
        folder = root / "nodes" / str(number)
        try:
            gpu_id = folder.joinpath("gpu_id").read_text(encoding="ascii", errors="replace")
            properties = _read_properties(folder)
        except OSError:
            hidden.add(number)
            continue
        # A CPU has 0.
        if gpu_id.strip() not in ("", "0"):
            links, unread = _read_xgmi_links(folder)
            unique = properties.get("unique_id", 0)
            at = properties.get("location_id", 0)
            bus = f"{properties.get('domain', 0):04x}:{at >> 8 & 0xFF:02x}:{at >> 3 & 0x1F:02x}"
            name = f"GPU-{unique:016x}" if unique else ""
            nodes.append(_Node(number, name, f"{bus}.{at & 7}", links, unread))
    return nodes, hidden


def _read_xgmi_links(folder: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        entries = [e for e in (folder / "io_links").iterdir() if e.name.isdecimal()]
    except OSError:
        return (), (0,)
    found, unread = set(), []
    for entry in sorted(entries, key=lambda e: int(e.name))[:_MAX_LINKS]:
        try:
            link = _read_properties(entry)
        except OSError:
            unread.append(int(entry.name))
            continue
        if link.get("type") == _XGMI and "node_to" in link:
            found.add(link["node_to"])
    return tuple(sorted(found - {int(folder.name)})), tuple(unread)


def _read_properties(folder: Path) -> dict[str, int]:
    with (folder / "properties").open(encoding="ascii", errors="replace") as file:
        words = [line.split() for line in file.read(_MAX_BYTES).splitlines()]
    # No number is longer than 64 bits.
    return {w[0]: int(w[1]) for w in words if len(w) == 2 and _DIGITS.fullmatch(w[1])}


# Reads one NVIDIA GPU through the driver's management library (NVML).
#
# The binding is ``pynvml`` of the package nvidia-ml-py, which is optional. CUDA is not initialised.
# A query that fails makes its answer unknown and is never an error: a link that fails does not hide
# the others, and an older driver still answers the queries that it supports.

_NOT_INSTALLED = "nvidia-ml-py is not installed: pip install 'nvidia-ml-py>=13'"
# Remote types of links in nvml.h.
_GPU, _CPU, _SWITCH, _UNKNOWN = 0, 1, 2, 255
_NOT_SUPPORTED_STATE = 0


class _UnknownGpuError(Exception):
    """The reason why the GPU is unknown."""


def find_nvidia_gpu(environ: Mapping[str, str], index: int, uuid: str = "") -> Gpu | str:
    """The GPU that this process calls ``cuda:<index>``; or why it is unknown."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return _NOT_INSTALLED
    try:
        nvml.nvmlInit()
        try:
            return _read_gpu(nvml, environ, index, uuid)
        finally:
            nvml.nvmlShutdown()
    except _UnknownGpuError as error:
        return str(error)
    except Exception as error:
        # Any failure of a binding, a driver or a fake of one: a topology is a convenience.
        return f"NVML: {error or type(error).__name__}"


def _read_gpu(nvml: Any, environ: Mapping[str, str], index: int, uuid: str) -> Gpu:
    all_of_host = [_find_handle(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]
    if not all_of_host:
        raise _UnknownGpuError("NVML shows no GPU")
    handle, id, is_part = (
        _find_uuid(nvml, uuid) if uuid else _find_index(nvml, environ, index, all_of_host)
    )
    buses = {_format_bus(nvml.nvmlDeviceGetPciInfo(one)) for one in all_of_host if one}
    bus = _format_bus(nvml.nvmlDeviceGetPciInfo(handle))
    links: dict[str, Any] = {"links": 0}
    if not is_part:  # parts of a GPU cannot reach other GPUs
        links = _read_links(nvml, handle, bus, buses)
        links["fabric"] = _read_fabric(nvml, handle, environ)
    domain = None
    if links.get("switch"):
        domain = len(all_of_host)
    elif links["links"] == 0:
        domain = 1
    model = str(nvml.nvmlDeviceGetName(handle))
    return Gpu(
        id,
        bus,
        "nvidia",
        model,
        on_host=len(all_of_host),
        domain=domain,
        **links,
    )


def _find_handle(nvml: Any, number: int) -> Any:
    """``None`` for a GPU that the driver has lost, so that the others keep their numbers."""
    try:
        return nvml.nvmlDeviceGetHandleByIndex(number)
    except nvml.NVMLError:
        return None


def _find_index(
    nvml: Any,
    environ: Mapping[str, str],
    index: int,
    all_of_host: Sequence[Any],
) -> tuple[Any, str, bool]:
    """The handle, the id, and whether it is a part of a GPU."""
    ids = [str(nvml.nvmlDeviceGetUUID(handle)) if handle else "" for handle in all_of_host]
    text = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = select_devices(text, ids)
    # Launchers that give each process one GPU count their processes all the same.
    index = 0 if len(chosen) == 1 else index
    if not 0 <= index < len(chosen):
        shown = "" if text is None else f", with CUDA_VISIBLE_DEVICES={text[:60]}"
        count = format_count(len(chosen), "GPU")
        raise _UnknownGpuError(f"no GPU {index} among {count} that are visible here{shown}")
    one = chosen[index]
    if isinstance(one, str):
        return _find_uuid(nvml, one)
    handle = all_of_host[one]
    if handle is None:
        raise _UnknownGpuError(f"the driver has lost GPU {one}")
    models = {str(nvml.nvmlDeviceGetName(handle)) for handle in all_of_host if handle}
    by_number = text is None or not text.strip().upper().startswith("GPU-")
    if by_number and len(models) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        # CUDA then orders the GPUs by speed.
        raise _UnknownGpuError(
            "GPUs of this host differ, so that their order is not known without CUDA: set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    try:
        split = int(nvml.nvmlDeviceGetMigMode(handle)[0]) == 1
    except nvml.NVMLError:
        split = False
    if split:
        raise _UnknownGpuError(
            f"GPU {one} is split into parts (MIG): name the part in CUDA_VISIBLE_DEVICES=MIG-..."
        )
    return handle, ids[one], False


def _find_uuid(nvml: Any, uuid: str) -> tuple[Any, str, bool]:
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names:
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            continue
        is_part = name.startswith("MIG-")
        if is_part:
            handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return handle, name, is_part
    raise _UnknownGpuError(f"NVML has no device {names[0][:60]}")


def _read_links(nvml: Any, handle: Any, bus: str, buses: set[str]) -> dict[str, Any]:
    # Errors for the number of a link that this GPU does not have.
    absent = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT)
    active, unread, ends = 0, [], set()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                continue
        except nvml.NVMLError as error:
            if error.value not in absent:
                unread.append(link)
            continue
        active += 1
        try:
            ends.add(_read_remote(nvml, handle, link, buses))
        except nvml.NVMLError:
            unread.append(link)
    return {
        "links": None if unread and not active else active,
        "unread": tuple(unread),
        "peers": tuple(sorted(ends - {"switch", "cpu", bus})),
        "switch": "switch" in ends,
    }


def _read_remote(nvml: Any, handle: Any, link: int, buses: set[str]) -> str:
    """``switch``, ``cpu``, or the bus id of a GPU."""
    try:
        kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
    except nvml.NVMLError as error:
        if error.value not in (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        ):
            raise
        kind = _UNKNOWN
    if kind in (_SWITCH, _CPU):
        return "switch" if kind == _SWITCH else "cpu"
    remote = _format_bus(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
    # In a virtual machine the other end may be hidden. NCCL then takes it for a switch.
    return remote if kind == _GPU or remote in buses else "switch"


def _read_fabric(nvml: Any, handle: Any, environ: Mapping[str, str]) -> Fabric | None:
    health: int | None = None
    try:
        info = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        health = int(info.healthMask)
    except (nvml.NVMLError, AttributeError):
        try:
            info = nvml.c_nvmlGpuFabricInfo_t()
            nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
        except (nvml.NVMLError, AttributeError):
            return None
    if info.state == _NOT_SUPPORTED_STATE:
        return None
    cluster, clique = bytes(info.clusterUuid), int(info.cliqueId)
    # As NCCL 2.30.7 reads them, src/init.cc.
    forced = _read_integer(environ, "NCCL_MNNVL_UUID")
    if forced != -1:
        cluster = (forced % 2**64).to_bytes(8, "little") * 2
    part = _read_integer(environ, "NCCL_MNNVL_CLIQUE_ID")
    if part == -2:
        clique = _read_rack(nvml, handle, clique)
    elif part != -1:
        clique = part % 2**32
    return Fabric(cluster.hex(), clique, int(info.state), int(info.status), health)


def _read_rack(nvml: Any, handle: Any, otherwise: int) -> int:
    """A number for the rack of the GPU: equal serial numbers, equal numbers."""
    try:
        info = nvml.c_nvmlPlatformInfo_v2_t()
        nvml.nvmlDeviceGetPlatformInfo(handle, ctypes.byref(info))
    except (nvml.NVMLError, AttributeError):
        return otherwise
    digest = hashlib.sha1(str(info.chassisSerialNumber).encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _read_integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ.get(name, "-1"), 0)
    except ValueError:
        return -1


def _format_bus(info: Any) -> str:
    """As in /sys: ``0000:1b:00.0``, lower case."""
    text = info.busId
    text = (text.decode("ascii", "replace") if isinstance(text, bytes) else str(text)).lower()
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}" if domain.startswith("0000") and len(domain) == 8 else text


# A driver with a broken GPU may take minutes to answer, or never answer.
_DRIVER_SECONDS = 10.0
_NO_GPU = "this host shows no GPU"


def locate_rank(environ: Mapping[str, str], root: Path = Path("/")) -> RankLocation:
    """The location of this process. Never raises, and takes a bounded time. The GPU is the current
    one if CUDA is initialised, else by convention number ``LOCAL_RANK`` of the visible ones. Ranks
    with one ``MESHPLAN_HOST`` share a host; without it hosts are identified as in NCCL.
    """
    host, name, machine = _find_host(environ, root)
    number = _read_number(environ, "LOCAL_RANK", "SLURM_LOCALID") or 0
    gpu = _find_gpu(environ, number, root)
    return RankLocation(
        host=host,
        name=name,
        machine=machine,
        agent=_read_number(environ, "GROUP_RANK"),
        gpu=gpu if isinstance(gpu, Gpu) else None,
        reason="" if isinstance(gpu, Gpu) else gpu,
        multi_node=_allows_multi_node(environ),
        imex=_has_channel(root),
    )


def _find_host(environ: Mapping[str, str], root: Path) -> tuple[str, str, str]:
    if given := environ.get("MESHPLAN_HOST", "")[:255]:
        return given, given, ""
    name = socket.gethostname()
    if shared := environ.get("NCCL_HOSTID", "")[:255]:
        return shared, name, ""
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        boot = ""
    return f"{name} {boot}".strip(), name, boot


def _find_gpu(environ: Mapping[str, str], number: int, root: Path) -> Gpu | str:
    uuid = ""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        number = torch.cuda.current_device()
        uuid = str(getattr(torch.cuda.get_device_properties(number), "uuid", ""))
    nvidia = _call_driver(lambda: find_nvidia_gpu(environ, number, uuid))
    if isinstance(nvidia, Gpu):
        return nvidia
    kfd = root / "sys/class/kfd/kfd/topology"
    if kfd.is_dir():
        return _call_driver(lambda: find_amd_gpu(environ, number, kfd))
    # The second is NVIDIA's driver under Windows.
    here = any((root / "dev" / name).exists() for name in ("nvidiactl", "dxg"))
    return nvidia if here else _NO_GPU


def _call_driver(call: Callable[[], Gpu | str]) -> Gpu | str:
    answer: list[Gpu | str] = []
    # A daemon, so that a driver that never answers does not keep the process from ending.
    thread = Thread(target=lambda: answer.append(call()), daemon=True)
    thread.start()
    thread.join(_DRIVER_SECONDS)
    return answer[0] if answer else f"the driver did not answer within {_DRIVER_SECONDS:g} s"


def _allows_multi_node(environ: Mapping[str, str]) -> bool:
    """As NCCL 2.30.7 asks, src/init.cc and src/graph/paths.cc."""
    if "0" in (
        environ.get("NCCL_MNNVL_ENABLE"),
        environ.get("NCCL_CUMEM_ENABLE"),
    ):
        return False
    level = environ.get("NCCL_P2P_LEVEL", "").upper()
    return environ.get("NCCL_P2P_DISABLE") != "1" and level not in ("0", "LOC")


def _has_channel(root: Path) -> bool:
    try:
        found = (root / "dev/nvidia-caps-imex-channels").iterdir()
        return any(entry.name.startswith("channel") for entry in found)
    except OSError:
        return False


def _read_number(environ: Mapping[str, str], *names: str) -> int | None:
    numbers = (parse_number(environ.get(name)) for name in names)
    return next((one for one in numbers if one is not None), None)
