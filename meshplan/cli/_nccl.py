"""Variables and versions of NCCL and of the driver for a job on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshplan.errors import PolicyError

_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_DRIVER = Path("/proc/driver/nvidia/version")
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,6}))?(?:[-+.].{0,40})?", re.ASCII)


def read_variables(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``environ``, overridden by ``KEY=VALUE`` texts; ``PolicyError`` for another
    form.
    """
    found = dict(environ)
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise PolicyError(f"--env: use KEY=VALUE, such as NCCL_ALGO=Ring, got {text[:60]!r}")
        found[key.strip()] = value
    return found


def find_nccl_version(given: str | None) -> tuple[int, int, int] | None:
    """The given version (``PolicyError`` if it is not one), else that of the NCCL of pip."""
    if given is not None:
        return _read_version(given, "--nccl-version", "2.30.7")
    from importlib import metadata

    for name in _PACKAGES:
        try:
            return _read_version(metadata.version(name), name, "2.30.7")
        except metadata.PackageNotFoundError:
            continue
    return None


def find_driver_version(given: str | None) -> str | None:
    """The given version (``PolicyError`` if it is not one), else that of the running driver."""
    # The kernel module writes "NVRM version: ... Kernel Module  550.54.15  ..." to its file in
    # /proc.
    if given is not None:
        _read_version(given, "--driver", "550.54.15")
        return given
    try:
        match = re.search(r"Kernel Module.{0,80}?\b(\d{3,4}\.\d+(?:\.\d+)?)", _DRIVER.read_text())
    except OSError:
        return None
    return match[1] if match else None


def _read_version(text: str, what: str, example: str) -> tuple[int, int, int]:
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise PolicyError(f"{what}: use a version such as {example}, got {text[:40]!r}")
    return int(match[1]), int(match[2]), int(match[3] or 0)
