"""The place of this process, as it can find out by itself, without waiting for anybody."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread

from meshplan.topology._kfd import amd_gpu
from meshplan.topology._nvml import nvidia_gpu
from meshplan.topology._place import Gpu, Place

__all__ = ["place_here"]

# A driver with a broken GPU may take minutes to answer, or never answer.
_DRIVER_SECONDS = 10.0
_NO_GPU = "this host shows no GPU"


def place_here(environ: Mapping[str, str], root: Path = Path("/")) -> Place:
    """What this process knows of its place. Never raises, and takes a bounded time.

    The GPU is the current one if CUDA is initialised, else by convention number ``LOCAL_RANK``
    (``SLURM_LOCALID``) of those that are visible, or the only one.

    Args:
        environ: ``MESHPLAN_HOST`` names the host: ranks with equal values are on one. Without it
            hosts are told apart as NCCL does: by ``NCCL_HOSTID``, else by host name and boot id.
            Further ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` and ``GROUP_RANK`` of torchrun, and the
            variables that choose GPUs and that steer multi-node NVLink in NCCL.
        root: of the file system, another one for tests.
    """
    host, name, machine = _host(environ, root)
    local_rank = _number(environ, "LOCAL_RANK", "SLURM_LOCALID")
    gpu = _gpu(environ, local_rank or 0, root)
    return Place(
        host=host,
        name=name,
        machine=machine,
        local_rank=local_rank,
        local_size=_number(environ, "LOCAL_WORLD_SIZE"),
        agent=_number(environ, "GROUP_RANK"),
        gpu=gpu if isinstance(gpu, Gpu) else None,
        reason="" if isinstance(gpu, Gpu) else gpu,
        multi_node=_allows_multi_node(environ),
        imex=_has_channel(root),
    )


def _host(environ: Mapping[str, str], root: Path) -> tuple[str, str, str]:
    """What tells it from others, its name, and the machine."""
    given = environ.get("MESHPLAN_HOST", "")[:255]
    if given:
        return given, given, ""
    name = socket.gethostname()
    shared = environ.get("NCCL_HOSTID", "")[:255]
    if shared:
        return shared, name, ""
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        boot = ""
    return f"{name} {boot}".strip(), name, boot


def _gpu(environ: Mapping[str, str], local_rank: int, root: Path) -> Gpu | str:
    index, uuid = _current_device()
    number = local_rank if index is None else index
    nvidia = _bounded(lambda: nvidia_gpu(environ, number, uuid))
    if isinstance(nvidia, Gpu):
        return nvidia
    kfd = root / "sys/class/kfd/kfd/topology"
    if kfd.is_dir():
        return _bounded(lambda: amd_gpu(environ, number, kfd))
    # The second is NVIDIA's driver under Windows.
    here = any((root / "dev" / name).exists() for name in ("nvidiactl", "dxg"))
    return nvidia if here else _NO_GPU


def _bounded(ask: Callable[[], Gpu | str]) -> Gpu | str:
    answer: list[Gpu | str] = []
    # Not to be waited for when the process ends.
    thread = Thread(target=lambda: answer.append(ask()), daemon=True)
    thread.start()
    thread.join(_DRIVER_SECONDS)
    return answer[0] if answer else f"the driver did not answer within {_DRIVER_SECONDS:g} s"


def _current_device() -> tuple[int | None, str]:
    """The current CUDA or HIP device and its UUID, if that is initialised."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, ""
    index: int = torch.cuda.current_device()
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    return index, uuid


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


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        text = environ.get(name, "")
        if text.isascii() and text.isdecimal() and len(text) < 10:
            return int(text)
    return None
