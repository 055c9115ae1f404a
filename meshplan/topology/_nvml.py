"""Reads one NVIDIA GPU through the driver's management library (NVML).

The binding is ``pynvml`` of the package nvidia-ml-py, which is optional. CUDA is not initialised.
A query that fails makes its answer unknown and is never an error: a link that fails does not hide
the others, and an older driver still answers the queries that it supports.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from meshplan.topology._location import Fabric, Gpu, select_devices

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
    return Gpu(id, bus, "nvidia", model, on_host=len(all_of_host), domain=domain, **links)


def _find_handle(nvml: Any, number: int) -> Any:
    """``None`` for a GPU that the driver has lost, so that the others keep their numbers."""
    try:
        return nvml.nvmlDeviceGetHandleByIndex(number)
    except nvml.NVMLError:
        return None


def _find_index(
    nvml: Any, environ: Mapping[str, str], index: int, all_of_host: Sequence[Any]
) -> tuple[Any, str, bool]:
    """The handle, the id, and whether it is a part of a GPU."""
    ids = [str(nvml.nvmlDeviceGetUUID(handle)) if handle else "" for handle in all_of_host]
    text = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = select_devices(text, ids)
    # Launchers that give each process one GPU count their processes all the same.
    index = 0 if len(chosen) == 1 else index
    if not 0 <= index < len(chosen):
        shown = "" if text is None else f", with CUDA_VISIBLE_DEVICES={text[:60]}"
        count = f"{len(chosen)} GPU{'' if len(chosen) == 1 else 's'}"
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
        # CUDA's own order then is by speed.
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
        if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
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
    forced = _read_number(environ, "NCCL_MNNVL_UUID")
    if forced != -1:
        cluster = (forced % 2**64).to_bytes(8, "little") * 2
    part = _read_number(environ, "NCCL_MNNVL_CLIQUE_ID")
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


def _read_number(environ: Mapping[str, str], name: str) -> int:
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
