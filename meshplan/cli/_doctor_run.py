"""The checks of ``meshplan doctor`` that need torch."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from meshplan import __version__, kernel
from meshplan._installation import installation
from meshplan._torch import TESTED_TORCH
from meshplan.cli._doctor import (
    Diagnosis,
    check_cache,
    check_host,
    check_links,
    check_shared_folder,
)
from meshplan.kernel._device_code import (
    Program,
    compilers,
    prebuilt,
)
from meshplan.topology._locate import locate_rank

_INSTALL_COMPILER = "pip install nvidia-cuda-nvrtc, or install nvcc or hipcc"


def diagnose() -> list[Diagnosis]:
    gpus = torch.cuda.is_available()
    location = locate_rank(os.environ)
    return [
        Diagnosis("meshplan", f"{__version__}, {installation().about}"),
        _check_torch(),
        _check_backends(gpus),
        _check_library(),
        _check_memory(),
        check_host(location, os.environ),
        check_shared_folder(gpus),
        check_links(location),
        *_check_devices(gpus),
        _check_compilers(gpus),
        check_cache(),
    ]


def _check_torch() -> Diagnosis:
    (low_major, low), (high_major, high) = TESTED_TORCH
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    remedy = f"tested with {low_major}.{low} to {high_major}.{high}; install one of these, or "
    remedy += "use meshplan.install(allow_untested_torch=True)"
    tested = TESTED_TORCH[0] <= found <= TESTED_TORCH[1]
    text = f"{torch.__version__} on Python {platform.python_version()}"
    return Diagnosis("torch", text, "" if tested else remedy)


def _check_backends(gpus: bool) -> Diagnosis:
    what = "backends of torch.distributed"
    found = ["gloo"] if dist.is_gloo_available() else []
    if dist.is_nccl_available():
        found.append(f"nccl {_read_nccl_version()}".rstrip())
    text = ", ".join(found) or "none"
    if gpus and not dist.is_nccl_available():
        return Diagnosis(what, text, "none supports GPUs: install a torch with NCCL or RCCL")
    return Diagnosis(what, text, "" if found else "install another build of torch")


def _read_nccl_version() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return ""


def _check_library() -> Diagnosis:
    what = "compiled reductions on CPUs"
    reason = kernel.why_not()
    if reason is None:
        return Diagnosis(what, "as fast as memory")
    has_compiler = shutil.which("g++") or shutil.which("clang++")
    first = "" if has_compiler else "apt-get install g++, and then: "
    # The reason ends with a remedy too.
    return Diagnosis(
        what,
        reason.rpartition("; ")[0] or reason,
        first + installation().remedy,
    )


def _check_memory() -> Diagnosis:
    what = "memory that the processes of this host share"
    if kernel.why_not() is not None:
        return Diagnosis(what, "needs the compiled reductions", "see above")
    try:
        where = kernel.host()
        memory = kernel.SharedMemory.create(1 << 20)
        try:
            kernel.SharedMemory.open(memory.handle).close()
        finally:
            memory.close()
    except OSError as error:
        remedy = "reductions take the path exchange; mount /proc, and allow memfd_create"
        return Diagnosis(what, str(error), remedy)
    return Diagnosis(what, f"host {where.split('-')[0]}, up to {kernel.MAX_PEERS} ranks")


def _check_devices(gpus: bool) -> list[Diagnosis]:
    what = "GPUs"
    if not gpus:
        return [Diagnosis(what, "none that this torch can use")]
    count = torch.cuda.device_count()
    try:
        device = kernel.device_of(0)
    except (kernel.DriverError, kernel.CompileError) as error:
        remedy = f"reductions take the path exchange, over the backend; {_INSTALL_COMPILER}"
        return [Diagnosis(what, f"{count}, without kernels: {error}", remedy)]
    blocks = min(device.processors, kernel.MAX_BLOCKS)
    found = f"{count}, with kernels of {blocks} blocks; path exchange by default"
    return [
        Diagnosis(what, found),
        Diagnosis("driver of GPUs", device.driver.library),
        _check_sharing(device),
    ]


def _check_sharing(device: kernel.Device) -> Diagnosis:
    what = "GPU memory that processes share"
    driver = device.driver
    try:
        with driver.current():
            memory = driver.malloc(1 << 20)
            try:
                driver.share(memory)
            finally:
                driver.free(memory)
    except kernel.DriverError as error:
        remedy = "one_shot and two_shot fall back to exchange on GPUs; run the container with "
        return Diagnosis(what, str(error), f"{remedy}--ipc=host, and outside of MIG")
    return Diagnosis(what, f"by {'HIP' if driver.kind == 'hip' else 'CUDA'} IPC")


def _check_compilers(gpus: bool) -> Diagnosis:
    what = "compilers of kernels for GPUs"
    kind: kernel.DriverKind = "hip" if torch.version.hip else "cuda"
    found = [
        one.path if isinstance(one, Program) else Path(one.name).name for one in compilers(kind)
    ]
    if prebuilt() is not None:
        found.insert(0, "compiled when meshplan was installed")
    text = ", ".join(dict.fromkeys(found)) or "none"
    return Diagnosis(what, text, _INSTALL_COMPILER if gpus and not found else "")
