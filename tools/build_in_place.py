"""Compile the library for CPUs and the kernels for CUDA into the source tree.

    python tools/build_in_place.py

It needs the compilers and nothing else: machines with GPUs often reach no package index, and their
setuptools may be too old for this project. ``setup.py`` takes sources and flags from here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from glob import glob
from pathlib import Path

__all__ = [
    "ARCHITECTURES",
    "CPU_FLAGS",
    "CPU_SOURCES",
    "DEVICE_SOURCES",
    "HEADERS",
    "NVCC",
    "describe_kernels",
    "fatbin",
]

ROOT = Path(__file__).parents[1]
SECONDS = 1800

CPU_SOURCES = [f"csrc/{name}.cpp" for name in ("cpu", "digest", "entry", "integers", "squares")]
DEVICE_SOURCES = ["csrc/device.cu"]
HEADERS = sorted(glob("csrc/*.h", root_dir=ROOT))
# Contraction of a product and a sum into one rounding would change bits. That no addition traps
# changes none, and lets conversions of float16, which choose between two results, be vectorised.
CPU_FLAGS = [
    *("-std=c++17", "-O3", "-g0"),
    *("-ffp-contract=off", "-fno-fast-math", "-fno-trapping-math"),
]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def find_architectures() -> list[str]:
    """Those that are requested, else those of the GPUs here.

    Where there is no GPU, as for people who only lint, kernels would be compiled for nothing.
    """
    requested = os.environ.get("MESHPLAN_CUDA_ARCHITECTURES")
    if requested is None:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            done = None
        # Such as 9.0, a line for each GPU.
        found = {"".join(line.split(".")) for line in (done.stdout if done else "").split()}
        numbers = {one for one in found if one.isdecimal()}
        return sorted(numbers, key=int)
    return [one for one in requested.split(",") if one]


ARCHITECTURES = find_architectures() if NVCC is not None else []


def describe_kernels() -> str:
    """For which GPUs kernels are compiled now, or why for none."""
    if ARCHITECTURES:
        named = ", ".join(f"sm_{one}" for one in ARCHITECTURES)
        return f"nvcc compiles GPU kernels for {named}, which takes minutes"
    missing = "nvcc" if NVCC is None else "GPU"
    return (
        f"GPU kernels will be compiled at first use: found no {missing}. With nvcc, "
        "MESHPLAN_CUDA_ARCHITECTURES=90 compiles those of H100 now"
    )


def fatbin() -> list[str]:
    """The command, but for its target, that compiles the kernels for CUDA's driver to load."""
    assert NVCC is not None
    codes = [f"arch=compute_{one},code=sm_{one}" for one in ARCHITECTURES]
    # For GPUs that come after these.
    codes.append(f"arch=compute_{ARCHITECTURES[-1]},code=compute_{ARCHITECTURES[-1]}")
    command = [NVCC, "-fatbin", "-std=c++17", "-O3", "-fmad=false", "--threads", "0"]
    for code in codes:
        command += ["-gencode", code]
    return [*command, *DEVICE_SOURCES]


def main() -> None:
    """Compile what this machine has compilers for; remove everything that an earlier build left."""
    folder = ROOT / "meshplan" / "kernel"
    named = os.environ.get("CXX", "").split()
    found = [path for path in map(shutil.which, ("c++", "g++", "clang++")) if path]
    compiler = named or found[:1]
    cpu = [*compiler, *CPU_FLAGS, "-shared", "-fPIC", *CPU_SOURCES]
    if not compiler:
        sys.stderr.write("_cpu.so is not built: there is no C++ compiler\n")
    built = {_compiled(cpu if compiler else None, folder / "_cpu.so")}
    sys.stderr.write(f"{describe_kernels()}\n")
    device = fatbin() if ARCHITECTURES else None
    built.add(_compiled(device, folder / "_device.fatbin"))
    for old in {*folder.glob("_cpu*.so"), *folder.glob("_device*.fatbin")} - built:
        old.unlink()


def _compiled(command: Sequence[str] | None, target: Path) -> Path | None:
    """The file; or ``None`` if it cannot be compiled here, which is reported."""
    if command is None:
        return None
    # Under its name when it is complete: another process may load it at any time.
    new = target.with_name(f".new-{os.getpid()}{target.suffix}")
    try:
        subprocess.run([*command, "-o", str(new)], check=True, cwd=ROOT, timeout=SECONDS)
        new.replace(target)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{target.name} is not built: {error}\n")
        return None
    finally:
        new.unlink(missing_ok=True)
    return target


if __name__ == "__main__":
    main()
