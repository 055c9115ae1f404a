"""The kernels for GPUs compile from the same sources. Nothing here runs on a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "csrc" / "device.cu"
KERNELS = 44
CLANG = shutil.which("clang++-19") or shutil.which("clang++-20") or shutil.which("clang++-21")

pytestmark = pytest.mark.timeout(600)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: CUDA is not compiled")
def test_cuda(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """For sm_80, sm_90 and sm_100; few spills, at most a list of pending results on the stack."""
    architectures = ("80", "90", "100")
    command = ["nvcc", "-std=c++17", "-O3", "-fmad=false", "-Xptxas", "-v", "--threads", "2"]
    for one in architectures:
        command += ["-gencode", f"arch=compute_{one},code=sm_{one}"]
    printed = run([*command, "-c", str(SOURCE), "-o", str(tmp_path / "device.o")])
    assert "warning" not in printed
    assert printed.count("Compiling entry function") == KERNELS * len(architectures)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", printed)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", printed)]
    record_property("registers", max(registers))
    record_property("spilled bytes", max(spills))
    assert max(registers) <= 128
    assert max(spills) <= 64


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: CUDA is not compiled")
def test_cuda_flags_have_system_scope_and_nothing_is_contracted(tmp_path: Path) -> None:
    target = tmp_path / "device.ptx"
    run(["nvcc", "-std=c++17", "-O3", "-fmad=false", "-arch=sm_90", "-ptx", str(SOURCE), "-o", str(target)])  # fmt: skip
    text = target.read_text()
    assert "st.release.sys.global.u32" in text
    assert "ld.acquire.sys.global.u32" in text
    assert "fma." not in text


@pytest.mark.skipif(CLANG is None, reason="no clang 19 or newer: HIP is not compiled")
@pytest.mark.parametrize("architecture", ["gfx90a", "gfx942"])
def test_hip(
    tmp_path: Path, architecture: str, record_property: Callable[[str, object], None]
) -> None:
    """Without ROCm's headers. Flags are released and acquired beyond the device's own cache."""
    target = tmp_path / "device.s"
    assert CLANG is not None
    flags = ["-x", "hip", "-std=c++17", "-O2", "-ffp-contract=off", "--cuda-device-only"]
    flags += [f"--offload-arch={architecture}", "-nogpulib", "-nogpuinc", "-S"]
    printed = run([CLANG, *flags, str(SOURCE), "-o", str(target)])
    assert "warning" not in printed
    text = target.read_text()
    assert text.count(".amdhsa_kernel ") == KERNELS
    spills = [int(n) for n in re.findall(r"\.vgpr_spill_count: *(\d+)", text)]
    record_property("spilled registers", max(spills))
    assert max(spills) <= 32
    assert spills.count(0) >= KERNELS - 2
    assert "buffer_wbl2" in text
    assert ("buffer_inv sc0 sc1" if architecture == "gfx942" else "buffer_invl2") in text


@pytest.mark.skipif(CLANG is None, reason="no clang 19 or newer: HIP is not compiled")
def test_hip_contracts_nothing(tmp_path: Path) -> None:
    """Seen before divisions are made of fused operations, which are exact there."""
    target = tmp_path / "device.ll"
    assert CLANG is not None
    flags = ["-x", "hip", "-std=c++17", "-O1", "-ffp-contract=off", "--cuda-device-only"]
    flags += ["--offload-arch=gfx90a", "-nogpulib", "-nogpuinc", "-S", "-emit-llvm"]
    run([CLANG, *flags, str(SOURCE), "-o", str(target)])
    text = target.read_text()
    assert "fadd float" in text
    assert not re.search(r"llvm\.fma|fmuladd|fadd \w*contract|fmul \w*contract", text)
