"""``meshplan doctor``: which paths this machine has, and what to do for those that it lacks."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass

import torch

from meshplan import kernel

__all__ = ["doctor"]


@dataclass(frozen=True, slots=True)
class _Finding:
    """One line. ``remedy`` is empty where nothing is missing."""

    what: str
    found: str
    remedy: str = ""


def doctor() -> tuple[str, bool]:
    """The text, and whether nothing is missing that this machine could have."""
    findings = [_versions(), _library(), _memory(), _device()]
    lines = []
    for finding in findings:
        lines.append(f"{'missing' if finding.remedy else 'ok':<8}{finding.what}: {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<8}{finding.remedy}")
    return "\n".join(lines), not any(finding.remedy for finding in findings)


def _versions() -> _Finding:
    return _Finding("torch", f"{torch.__version__} on Python {platform.python_version()}")


def _library() -> _Finding:
    what = "compiled reductions on CPUs"
    reason = kernel.why_not()
    if reason is None:
        return _Finding(what, "as fast as memory")
    if shutil.which("g++") or shutil.which("clang++"):
        remedy = "a compiler is here: pip install --force-reinstall --no-deps meshplan"
    else:
        remedy = "apt-get install g++, and then: pip install --force-reinstall --no-deps meshplan"
    return _Finding(what, reason, remedy)


def _memory() -> _Finding:
    what = "memory that the processes of this host share"
    if kernel.why_not() is not None:
        return _Finding(what, "needs the compiled reductions", "see above")
    try:
        where = kernel.host()
        memory = kernel.SharedMemory.create(1 << 20)
        try:
            kernel.SharedMemory.open(memory.handle).close()
        finally:
            memory.close()
    except OSError as error:
        remedy = "reductions take the path exchange; mount /proc, and allow memfd_create"
        return _Finding(what, str(error), remedy)
    return _Finding(what, f"host {where.split('-')[0]}, up to {kernel.MAX_PEERS} ranks")


def _device() -> _Finding:
    what = "GPUs"
    if not torch.cuda.is_available():
        return _Finding(what, "none that this torch can use")
    count = torch.cuda.device_count()
    try:
        device = kernel.device_of(0)
    except (kernel.DriverError, kernel.CompileError) as error:
        remedy = "reductions take the path exchange, over the backend; pip install "
        remedy += "nvidia-cuda-nvrtc, or install nvcc or hipcc"
        return _Finding(what, f"{count}, without kernels: {error}", remedy)
    blocks = min(device.processors, kernel.MAX_BLOCKS)
    return _Finding(what, f"{count}, with kernels of {blocks} blocks; path exchange unless asked")
