"""Locates the rank of this process, without waiting for other ranks."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread

from meshplan.topology._kfd import find_amd_gpu
from meshplan.topology._location import Gpu, RankLocation
from meshplan.topology._nvml import find_nvidia_gpu

# A driver with a broken GPU may take minutes to answer, or never answer.
_DRIVER_SECONDS = 10.0
_NO_GPU = "this host shows no GPU"


def locate_rank(environ: Mapping[str, str], root: Path = Path("/")) -> RankLocation:
    """The location of this process. Never raises, and takes a bounded time. The GPU is the current
    one if CUDA is initialised, else by convention number ``LOCAL_RANK`` (``SLURM_LOCALID``) of the
    visible ones, or the only one. Ranks with one ``MESHPLAN_HOST`` share a host. Without it hosts
    are identified as in NCCL: by ``NCCL_HOSTID``, else by host name and boot id.
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
    """Identity, name and machine."""
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
    if "0" in (environ.get("NCCL_MNNVL_ENABLE"), environ.get("NCCL_CUMEM_ENABLE")):
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
    for name in names:
        text = environ.get(name, "")
        if text.isascii() and text.isdecimal() and len(text) < 10:
            return int(text)
    return None
