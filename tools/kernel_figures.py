"""What compilers make of the kernels for GPUs: registers, spills and memory of each lane.

    python tools/kernel_figures.py [--json FILE]

nvcc for CUDA and a clang that knows HIP, whichever are there; nothing is run.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Figures", "clang", "cuda", "hip", "nvdisasm", "ptx", "sass"]

SOURCE = Path(__file__).parents[1] / "csrc" / "device.cu"
CUDA = ("sm_80", "sm_90", "sm_100")
HIP = ("gfx90a", "gfx942")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one kernel on one architecture.

    Attributes:
        registers: of a lane.
        spilled: bytes (CUDA) or registers (HIP) that did not fit.
        stack: bytes of a lane's own memory, spills included.
    """

    architecture: str
    kernel: str
    registers: int
    spilled: int
    stack: int


def clang() -> str | None:
    """A clang that knows today's HIP."""
    names = ("clang++-19", "clang++-20", "clang++-21")
    return next((path for path in map(shutil.which, names) if path), None)


def ptx() -> str:
    """All kernels in the assembly that every architecture of ``CUDA`` takes.

    Raises:
        RuntimeError: what nvcc said: an error, or a warning.
    """
    least = CUDA[0].replace("sm", "compute")
    command = ["nvcc", "-std=c++17", "-O3", "-fmad=false", f"-arch={least}", "-ptx", str(SOURCE)]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "image.ptx"
        _said([*command, "-o", str(target)])
        return target.read_text()


def cuda(architecture: str, assembly: str) -> list[Figures]:
    """All kernels of ``assembly`` for ``sm_90`` or the like.

    Raises:
        RuntimeError: what ptxas said: an error, or a warning.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "image.ptx"
        source.write_text(assembly)
        flags = ["-O3", "-v", f"-arch={architecture}", "-o", f"{folder}/image"]
        text = _said(["ptxas", *flags, str(source)])
    pattern = r"entry function '(\w+)' for .*\n(?:.*\n)*?" + (
        r" *(\d+) bytes stack frame, (\d+) bytes spill stores.*\n.*Used (\d+) registers"
    )
    return [
        Figures(architecture, kernel, int(registers), int(spilled), int(stack))
        for kernel, stack, spilled, registers in re.findall(pattern, text)
    ]


def nvdisasm() -> str | None:
    """NVIDIA's disassembler: a toolkit's, or that of the package nvidia-cuda-nvdisasm."""
    packages = Path(sysconfig.get_path("platlib")) / "nvidia"
    found = map(str, packages.glob("*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or next(found, None)


def sass(architecture: str, assembly: str) -> dict[str, str]:
    """The instructions of each kernel of ``assembly`` for ``sm_90`` or the like.

    Raises:
        RuntimeError: what ptxas or nvdisasm said.
    """
    program = nvdisasm()
    assert program is not None
    with tempfile.TemporaryDirectory() as folder:
        source, image = Path(folder) / "image.ptx", f"{folder}/image"
        source.write_text(assembly)
        _said(["ptxas", "-O3", f"-arch={architecture}", "-o", image, str(source)])
        sections = re.split(r"\n\s*\.section\s+\.text\.", _said([program, "-c", image]))[1:]
    return {section.split(",")[0]: section for section in sections}


def hip(architecture: str, program: str, source: Path = SOURCE) -> tuple[list[Figures], str]:
    """All kernels of ``source`` for ``gfx942`` or the like, and their instructions.

    Raises:
        RuntimeError: what clang said: an error, or a warning.
    """
    flags = ["-x", "hip", "-std=c++17", "-O3", "-ffp-contract=off", "--cuda-device-only"]
    flags += [f"--offload-arch={architecture}", "-nogpulib", "-nogpuinc", "-S"]
    flags += [f"-I{SOURCE.parent}"]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "image.s"
        _said([program, *flags, str(source), "-o", str(target)])
        text = target.read_text()
    # The metadata of each kernel: fields in the order of the alphabet.
    pattern = r"\.name: +(mp_\w+)\n +\.private_segment_fixed_size: (\d+)\n(?:.*\n)*?" + (
        r" +\.vgpr_count: +(\d+)\n +\.vgpr_spill_count: (\d+)"
    )
    return [
        Figures(architecture, kernel, int(registers), int(spilled), int(stack))
        for kernel, stack, registers, spilled in re.findall(pattern, text)
    ], text


def _said(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    text = done.stdout + done.stderr
    if done.returncode != 0 or "warning" in text:
        raise RuntimeError(f"{' '.join(command)}: {text[-4000:]}")
    return text


def main() -> None:
    """Print the worst of each architecture, and write all if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    program = clang()
    with ThreadPoolExecutor(2) as pool:
        assembly = ptx() if shutil.which("nvcc") else ""
        found = list(pool.map(lambda a: cuda(a, assembly), CUDA if assembly else ()))
        if program is not None:
            found += [figures for figures, _ in pool.map(lambda a: hip(a, program), HIP)]
    print(f"{'':<8}{'kernels':>8}{'registers':>10}{'spilled':>8}{'stack':>6}")
    for every in found:
        registers, spilled = max(f.registers for f in every), max(f.spilled for f in every)
        print(
            f"{every[0].architecture:<8}{len(every):>8}{registers:>10}{spilled:>8}"
            f"{max(f.stack for f in every):>6}"
        )
    if arguments.json:
        rows = [asdict(figures) for every in found for figures in every]
        text = ",\n ".join(map(json.dumps, rows))
        head = json.dumps({"date": time.strftime("%Y-%m-%d")})[:-1]
        arguments.json.write_text(f'{head}, "kernels": [\n {text}\n]}}\n')


if __name__ == "__main__":
    main()
