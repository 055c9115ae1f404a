"""Find the file of a vendor's library: the one that this process has loaded, if there is one.

Two copies of a runtime in one process do not share streams and memory. torch's packages for ROCm
contain their own copies, under names with a version, and the system's may be on the loader's path.
So a library is looked for among the files that the process has mapped, and then by name.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

_MAPS = Path("/proc/self/maps")
# What ROCm's package for Python calls its libraries.
_RUNTIME = "libamdhip64.so"
_ROCM_NAMES = {_RUNTIME: "amdhip64", "libhiprtc.so": "hiprtc"}


class LibraryChoiceError(OSError):
    """Several copies are loaded, and torch's is unknown. Not raised to users."""


def loaded_files(name: str) -> list[str]:
    """Files of a library such as ``libamdhip64.so`` that the process has mapped, sorted."""
    # A file's name may have a version behind it (.so.7), or a hash in front of .so, as tools for
    # wheels write it.
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    pattern = re.compile(re.escape(name.removesuffix(".so")) + r"(-[0-9a-f]+)?\.so(\.\d+)*")
    found: dict[tuple[str, str], str] = {}
    for line in lines:
        # Address, permissions, offset, device, inode, and the path, which may hold spaces.
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/"):
            continue
        path = fields[5].removesuffix(" (deleted)")
        if pattern.fullmatch(Path(path).name):
            # One file may be mapped under several paths: hard links, and folders bound elsewhere.
            found.setdefault((fields[3], fields[4]), path)
    return sorted(found.values())


def find_library(name: str, otherwise: str | None = None) -> str:
    """The file to load: the loaded one, that of ROCm's package, or a name for the loader.
    ``LibraryChoiceError`` if several copies are loaded, and not exactly one is of torch's packages.
    """
    loaded = loaded_files(name)
    if len(loaded) > 1:
        return _of_torch(name, loaded)
    if loaded:
        return loaded[0]
    return _of_rocm_package(name) or _beside_runtime(name) or otherwise or name


def _of_torch(name: str, loaded: Sequence[str]) -> str:
    """The one copy in the folder of torch's packages, where torch's libraries look first."""
    import torch

    site = Path(os.path.realpath(torch.__file__)).parents[1]
    inside = [path for path in loaded if site in Path(os.path.realpath(path)).parents]
    if len(inside) == 1:
        return inside[0]
    raise LibraryChoiceError(
        f"several copies of {name} are loaded: {', '.join(loaded)}; start the process with one, "
        "without the others in LD_LIBRARY_PATH and LD_PRELOAD"
    )


def _of_rocm_package(name: str) -> str | None:
    short = _ROCM_NAMES.get(name)
    if short is None:
        return None
    try:
        found = importlib.import_module("rocm_sdk").find_libraries(short)
    except ImportError:
        return None
    return str(found[0]) if found else None


def _beside_runtime(name: str) -> str | None:
    """The compiler that belongs to the loaded runtime, and not the one of another ROCm."""
    if name == _RUNTIME or name not in _ROCM_NAMES:
        return None
    for runtime in loaded_files(_RUNTIME)[:1]:
        for path in sorted(Path(runtime).parent.glob(f"{name}*")):
            return str(path)
    return None
