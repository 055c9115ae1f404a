"""``meshplan doctor``: the paths that this machine supports, and how to get the others."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshplan import __version__
from meshplan._installation import installation
from meshplan._needs_torch import INSTALL_TORCH, import_with_torch
from meshplan.cli._options import add_verb, say
from meshplan.errors import TorchMissingError
from meshplan.topology._locate import (
    Fabric,
    Gpu,
    RankLocation,
    locate_rank,
)
from meshplan.topology._reading import format_count

_SHM = "/dev/shm"
# What NCCL needs for the ranks of a full host; containers often get 64 MB.
_SHM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Diagnosis:
    what: str  # e.g. ``GPUs``
    found: str  # the state, in words
    remedy: str = ""  # what to do; empty if nothing is missing

    def __str__(self) -> str:
        line = f"{'missing' if self.remedy else 'ok':<8}{self.what}: {self.found}"
        return f"{line}\n{'':<8}{self.remedy}" if self.remedy else line


def add_doctor(verbs: Any) -> None:
    what = "list the paths that this machine supports, and how to get the others"
    add_verb(verbs, "doctor", _run, what, description=f"{what.capitalize()}.")


def _run(_: argparse.Namespace) -> int:
    try:
        doctor_run = import_with_torch("meshplan.cli._doctor_run", "meshplan doctor")
        found = doctor_run.diagnose()
    except TorchMissingError:
        found = _diagnose_without_torch()
    say("".join(f"{one}\n" for one in found))
    return 1 if any(one.remedy for one in found) else 0


def _diagnose_without_torch() -> list[Diagnosis]:
    location = locate_rank(os.environ)
    found = "not installed: the linter and the planner work, reductions do not"
    return [
        Diagnosis("meshplan", f"{__version__}, {installation().about}"),
        Diagnosis("torch", found, INSTALL_TORCH),
        check_host(location, os.environ),
        check_shared_folder(False),
        check_links(location),
    ]


def check_host(location: RankLocation, environ: Mapping[str, str]) -> Diagnosis:
    what = "host, as ranks identify it"
    for name in ("MESHPLAN_HOST", "NCCL_HOSTID"):
        if environ.get(name):
            return Diagnosis(what, f"{location.host}, by {name}")
    return Diagnosis(what, f"{location.name}, boot id {location.machine or 'unknown'}")


def check_links(location: RankLocation) -> Diagnosis:
    """The GPU of this process, its links, and why they cannot be read."""
    what, gpu = "links between GPUs", location.gpu
    if gpu is None:
        return Diagnosis(what, location.reason, _find_remedy(location.reason))
    found = f"{gpu.model or gpu.vendor} {gpu.bus}: {_describe_reach(gpu)}"
    if gpu.on_host is not None:
        found += f", {format_count(gpu.on_host, 'GPU')} on this host"
    if gpu.unread:
        numbers = ", ".join(map(str, gpu.unread))
        ask = "nvidia-smi nvlink -s" if gpu.vendor == "nvidia" else "rocm-smi --showtopo"
        remedy = f"links {numbers} did not answer: check {ask}, the GPU may need a reset"
        return Diagnosis(what, found, remedy)
    fabric, remedy = gpu.fabric, ""
    if fabric is not None:
        found += f"; {_describe_fabric(fabric, location.imex)}"
        if fabric.faults:
            remedy = f"the fabric manager reports: {', '.join(fabric.faults)}"
        elif fabric.usable and gpu.links == 0:
            remedy = "the fabric is up and no link is: remove this host from the job"
    return Diagnosis(what, found, remedy)


def _describe_reach(gpu: Gpu) -> str:
    if gpu.links is None:
        return "links unknown"
    if gpu.links == 0:
        return "no links"
    end = "a switch" if gpu.switch else format_count(len(gpu.peers), "GPU")
    return f"{format_count(gpu.links, 'link')} to {end}"


def _describe_fabric(fabric: Fabric, imex: bool) -> str:
    if not fabric.usable:
        return "no multi-node NVLink"
    channel = "" if imex else ", no IMEX channel, so not between hosts"
    return f"multi-node NVLink, clique {fabric.clique} of {fabric.cluster}{channel}"


def _find_remedy(reason: str) -> str:
    if "not installed" in reason:
        return "pip install 'nvidia-ml-py>=13'"
    if "mismatch" in reason:
        return "library and kernel module of the driver have different versions: reboot"
    return "" if reason == "this host shows no GPU" else "check the output of nvidia-smi"


def check_shared_folder(gpus: bool) -> Diagnosis:
    """The shared memory of NCCL's ranks on one host; meshplan needs none."""
    what = f"{_SHM}, for NCCL"
    try:
        size = shutil.disk_usage(_SHM).total
    except OSError as error:
        return Diagnosis(what, error.strerror or str(error), "mount it" if gpus else "")
    small = gpus and size < _SHM_BYTES
    remedy = "docker run --shm-size=16g, or --ipc=host" if small else ""
    return Diagnosis(what, f"{size / 2**30:.1f} GiB", remedy)


def check_cache() -> Diagnosis:
    from meshplan.kernel._device_code import cache_folder

    what = "cache of compiled kernels"
    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return Diagnosis(what, str(folder))
    return Diagnosis(
        what,
        f"{folder} cannot be written",
        "set MESHPLAN_CACHE to a directory that you can write",
    )
