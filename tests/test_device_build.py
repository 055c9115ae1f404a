"""The kernels for GPUs compile from the same sources. Nothing here runs on a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.marks import full, longest
from tools.kernel_figures import SOURCE, Figures, clang, cuda, hip, ptx

# For each arithmetic one over peers and one that folds leaves; twelve for partial results, one that
# checks mappings, and one that writes tables of leaves.
KERNELS = 112
CLANG = clang()


@pytest.fixture(scope="module")
def assembly() -> str:
    return ptx()


def check(figures: Sequence[Figures]) -> None:
    """Next to nothing is spilled; the list of pending results, 12 of 8 bytes, is on the stack."""
    assert len({f.kernel for f in figures}) == KERNELS
    # All that 512 lanes can have.
    most = 128 if figures[0].architecture.startswith("sm") else 256
    assert max(f.registers for f in figures) <= most
    assert max(f.spilled for f in figures) <= 16
    assert max(f.stack for f in figures) <= 256


# Each compiles for minutes.
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: CUDA is not compiled")
@pytest.mark.parametrize("architecture", [longest("sm_80"), full("sm_90"), longest("sm_100")])
def test_cuda_kernels_compile_within_register_limits(architecture: str, assembly: str) -> None:
    check(cuda(architecture, assembly))


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: CUDA is not compiled")
def test_cuda_flags_have_system_scope_and_no_fma(assembly: str) -> None:
    assert "st.release.sys.u32" in assembly
    assert "ld.acquire.sys.u32" in assembly
    assert "fma." not in assembly


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: CUDA is not compiled")
@pytest.mark.parametrize("kernel", ["mp_float32_sum", "mp_bfloat16_sum", "mp_float64_product"])
def test_cuda_copies_in_words_of_every_width(assembly: str, kernel: str) -> None:
    body = assembly[assembly.index(f".entry {kernel}(") :].split("\n}\n")[0]
    for width in ("v2.u64", "u64", "u32", "u16", "u8"):
        # Of both places that copy.
        for access in (f"ld.global.{width}", f"st.global.{width}"):
            assert body.count(f"{access} ") + body.count(f"{access}\t") >= 2, access


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: CUDA is not compiled")
def test_fused_ranks_program_compiles(tmp_path: Path) -> None:
    """The program of the tests and benchmarks for GPUs."""
    program = Path(__file__).parent / "native" / "fused_ranks.cu"
    flags = ["-std=c++17", "-fmad=false", "-arch=sm_90", f"-I{SOURCE.parent}", "-c"]
    subprocess.run(
        ["nvcc", *flags, str(program), "-o", str(tmp_path / "fused.o")], check=True, timeout=500
    )


@pytest.mark.skipif(CLANG is None, reason="no clang 19 or newer: HIP is not compiled")
@pytest.mark.parametrize("architecture", [longest("gfx90a"), full("gfx942")])
def test_hip_kernels_compile_within_register_limits(architecture: str) -> None:
    """Without ROCm's headers. Flags are released and acquired beyond the device's own cache."""
    assert CLANG is not None
    figures, text = hip(architecture, CLANG)
    check(figures)
    assert "buffer_wbl2" in text
    assert ("buffer_inv sc0 sc1" if architecture == "gfx942" else "buffer_invl2") in text


@pytest.mark.full
@pytest.mark.skipif(CLANG is None, reason="no clang 19 or newer: HIP is not compiled")
def test_hip_code_has_no_fma(tmp_path: Path) -> None:
    """Seen before divisions are made of fused operations, which are exact there, and before passes:
    later ones fuse only what carries a flag here."""
    target = tmp_path / "device.ll"
    assert CLANG is not None
    flags = ["-x", "hip", "-std=c++17", "-O1", "-ffp-contract=off", "--cuda-device-only"]
    flags += ["--offload-arch=gfx90a", "-nogpulib", "-nogpuinc", "-S", "-emit-llvm"]
    flags += ["-Xclang", "-disable-llvm-passes"]
    subprocess.run([CLANG, *flags, str(SOURCE), "-o", str(target)], check=True, timeout=500)
    text = target.read_text()
    assert "fadd float" in text
    assert not re.search(r"llvm\.fma|fmuladd|fadd \w*contract|fmul \w*contract", text)


# The kernels over peers that training uses, without the others.
PEERS = """
#define MP_PEER(name, D, Acc, Round, Op)
#define MP_FOLD(name, In, Acc, Round, Out, Op)
#include "device.cu"
#define MP_SUM(name, D)                                                                          \\
  MP_KERNEL name(MP_PARAMETER meshplan::Peers peers, MP_PARAMETER meshplan::DeviceCall call,     \\
                 const unsigned char* in, unsigned char* out, meshplan::Failures* failures) {    \\
    using namespace meshplan;                                                                    \\
    peer_reduce<D, float, float, Sum>(peers, call, in, out, failures, gpu::block(), gpu::blocks()); \\
  }
MP_SUM(mp_float32_sum, float)
MP_SUM(mp_bfloat16_sum, meshplan::Bfloat)
MP_SUM(mp_float16_sum, meshplan::Half)
"""
SUMS = ("float32", "bfloat16", "float16")
# Of groups of 2 to 8 ranks; the own leaf is read at its own width, or skipped in the tiles.
LOADS = [ranks + 1 for ranks in range(2, 9)]
# One for all barriers; the others report a failure.
RELEASES = 1 + 4


def loops(body: str) -> list[str]:
    """The parts of assembly that end with a branch back to their start, the shortest first."""
    lines = body.splitlines()
    label = r"(?:\$L|\.LBB)\w+"
    starts = {
        start[1]: n for n, line in enumerate(lines) if (start := re.match(rf"({label}):", line))
    }
    found = []
    for n, line in enumerate(lines):
        target = re.search(rf"bra(?:nch\w*)?(?:\.uni)?\s+({label})", line)
        first = starts.get(target[1], n) if target else n
        if first < n:
            found.append("\n".join(lines[first : n + 1]))
    return sorted(found, key=len)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: CUDA is not compiled")
def test_sums_over_peers_have_wide_loops_and_one_release(tmp_path: Path) -> None:
    """Each loop over words has all leaves in flight, in registers, and adds without contraction."""
    source, target = tmp_path / "peers.cu", tmp_path / "peers.ptx"
    source.write_text(PEERS)
    flags = ["-std=c++17", "-O3", "-fmad=false", "-arch=compute_80", f"-I{SOURCE.parent}", "-ptx"]
    subprocess.run(["nvcc", *flags, str(source), "-o", str(target)], check=True, timeout=500)
    text = target.read_text()
    for name in SUMS:
        body = text[text.index(f".entry mp_{name}_sum(") :].split("\n}\n")[0]
        assert body.count("st.release.sys") == RELEASES, name
        assert "fma." not in body, name
        assert not re.search(r"(add|sub|mul)\.f32", body), f"{name} adds what ptxas may contract"
        wide: list[str] = []
        for loop in loops(body):
            loads = len(re.findall(r"ld\.global\.v2\.[bu]64", loop))
            # A loop around another one is no loop over words.
            if loads and "add.rn.f32" in loop and not any(inner in loop for inner in wide):
                wide.append(loop)
        counts = [len(re.findall(r"ld\.global\.v2\.[bu]64", loop)) for loop in wide]
        assert sorted(counts) == LOADS, name
        assert not any(".local." in loop for loop in wide), name
    for figures in cuda("sm_90", text):
        # The list of pending results: 12 of 4 bytes.
        assert figures.spilled == 0, figures
        assert figures.stack in (0, 48), figures
        assert figures.registers <= 128, figures


@pytest.mark.skipif(CLANG is None, reason="no clang 19 or newer: HIP is not compiled")
@pytest.mark.full
def test_hip_sums_over_peers_release_and_acquire_once(tmp_path: Path) -> None:
    source = tmp_path / "peers.cu"
    source.write_text(PEERS)
    _, text = hip("gfx942", str(CLANG), source)
    for name in SUMS:
        body = text[text.index(f"\nmp_{name}_sum:") :].split(".Lfunc_end")[0]
        assert body.count("buffer_wbl2 sc0 sc1") == RELEASES, name
        assert body.count("buffer_inv sc0 sc1") == 1, name
        # All that a round does between its barriers.
        inner = [
            loop for loop in loops(body) if "load_dwordx4" in loop and "buffer_wbl2" not in loop
        ]
        assert max(loop.count("load_dwordx4") for loop in inner) >= max(LOADS), name
        assert not any("scratch_" in loop for loop in inner), name


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: CUDA is not compiled")
def test_folds_of_training_read_16_bytes_and_use_no_memory_of_lanes(tmp_path: Path) -> None:
    source, target = tmp_path / "folds.cu", tmp_path / "folds.ptx"
    sums = {"float32": "float", "bfloat16": "meshplan::Bfloat", "float16": "meshplan::Half"}
    kernels = [f"MP_FOLD(mp_{name}, {d}, float, float, {d}, Sum)" for name, d in sums.items()]
    source.write_text("\n".join(['#include "gpu.h"', '#include "fold.h"', *kernels, ""]))
    flags = ["-std=c++17", "-O3", "-fmad=false", "-arch=compute_80", f"-I{SOURCE.parent}", "-ptx"]
    subprocess.run(["nvcc", *flags, str(source), "-o", str(target)], check=True, timeout=500)
    text = target.read_text()
    assert "fma." not in text
    for name in sums:
        body = text[text.index(f".entry mp_{name}(") :].split("\n}\n")[0]
        # Batches of a tree have 8, 4, 2 or 1 leaves, those of a left fold 8.
        assert len(re.findall(r"ld\.global\.v\d\.", body)) >= 8 + 4 + 2 + 1 + 8, name
    for figures in cuda("sm_90", text):
        assert (figures.spilled, figures.stack) == (0, 0), figures
        assert figures.registers <= 128, figures
