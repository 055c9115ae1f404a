"""The kernels for GPUs compile from the same sources. Nothing here runs on a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.marks import full, longest
from tools.kernel_figures import SOURCE, Figures, clang, cuda, hip, nvdisasm, ptx, sass

# For each arithmetic one over peers and one that folds leaves; twelve for partial results, one that
# checks mappings, and one that writes tables of leaves.
KERNELS = 112
CLANG = clang()


@pytest.fixture(scope="module")
def assembly() -> str:
    return ptx()


def check(figures: Sequence[Figures]) -> None:
    """Nothing is spilled. Of a GPU of AMD the report of a failure is on the stack, and nothing else."""
    assert len({f.kernel for f in figures}) == KERNELS
    # All that 512 lanes can have.
    is_cuda = figures[0].architecture.startswith("sm")
    assert max(f.registers for f in figures) <= (128 if is_cuda else 256)
    assert max(f.spilled for f in figures) == 0
    assert max(f.stack for f in figures) <= (0 if is_cuda else 160)


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


# Of each kind of kernel over peers one, and those that training uses. How many loops over batches it
# has, each with a word of the rank's own leaf and of 8 others: one for trees and one for left folds, or
# one for all orders. None depends on the number of ranks or the axes of the mesh.
PEERS = {
    "mp_float32_sum": ("float, float, float, Sum", 2),
    "mp_bfloat16_sum": ("Bfloat, float, float, Sum", 2),
    "mp_float16_sum": ("Half, float, float, Sum", 2),
    "mp_bfloat16_product": ("Bfloat, float, float, Product", 2),
    "mp_bfloat16_sum_node": ("Bfloat, float, Bfloat, Sum", 2),
    "mp_float32_wide_sum": ("float, double, double, Sum", 2),
    "mp_float64_product": ("double, double, double, Product", 2),
    "mp_bfloat16_exact": ("Bfloat, float, float, ExactSum", 1),
    "mp_float64_exact": ("double, double, double, ExactSum", 1),
    "mp_float16_max": ("Half, Half, Half, Extremum<true>", 1),
    "mp_int32_sum": ("i32, i32, i32, Sum", 1),
    "mp_uint8_min": ("u8, u8, u8, Extremum<false>", 1),
}
SUMS = ("mp_float32_sum", "mp_bfloat16_sum", "mp_float16_sum")
LOADS = 9
# One for all barriers; the others report a failure.
RELEASES = 1 + 4


def peers(to: Path) -> Path:
    """The source of these kernels without the others, which would take minutes to compile."""
    families = r"^MP_(LINEAR|ROUNDED|EXTREMA|SUMS|FOLD_PARTS)\(.*\n"
    text, cut = re.subn(families, "", SOURCE.read_text(), flags=re.M)
    assert cut > 20
    kernels = [f"MP_PEER({name}, {types})" for name, (types, _) in PEERS.items()]
    source = to / "peers.cu"
    source.write_text(
        "\n".join(["#define MP_FOLD(name, In, Acc, Round, Out, Op)", text, *kernels, ""])
    )
    return source


def loops(body: str) -> list[str]:
    """The parts of assembly that end with a branch back to their start, the shortest first."""
    lines = body.splitlines()
    label = r"(?:\$L|\.LBB|\.L_x)\w+"
    starts = {
        start[1]: n for n, line in enumerate(lines) if (start := re.match(rf"({label}):", line))
    }
    found = []
    for n, line in enumerate(lines):
        target = re.search(rf"(?:bra|BRA)[\w.]*\s+(?:\w+, )?(?:`\()?({label})", line)
        first = starts.get(target[1], n) if target else n
        if first < n:
            found.append("\n".join(lines[first : n + 1]))
    return sorted(found, key=len)


def innermost(found: Sequence[str], load: str) -> list[str]:
    """The loops with at least a batch of such loads, without the loops around them."""
    kept: list[str] = []
    for loop in found:
        if loop.count(load) >= LOADS - 1 and not any(inner in loop for inner in kept):
            kept.append(loop)
    return kept


@pytest.fixture(scope="module")
def peer_assembly(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("peers")
    flags = ["-std=c++17", "-O3", "-fmad=false", "-arch=compute_80", f"-I{SOURCE.parent}", "-ptx"]
    command = ["nvcc", *flags, str(peers(folder)), "-o", str(folder / "peers.ptx")]
    subprocess.run(command, check=True, timeout=500)
    return (folder / "peers.ptx").read_text()


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: CUDA is not compiled")
def test_kernels_over_peers_have_one_release_and_no_fma(peer_assembly: str) -> None:
    for name in PEERS:
        body = peer_assembly[peer_assembly.index(f".entry {name}(") :].split("\n}\n")[0]
        assert body.count("st.release.sys") == RELEASES, name
        assert "fma." not in body, name
        assert not re.search(r"(add|sub|mul)\.f(32|64)", body), f"{name}: ptxas may contract"


@pytest.mark.full
@pytest.mark.skipif(
    shutil.which("nvcc") is None or nvdisasm() is None, reason="no nvcc or nvdisasm"
)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_kernels_over_peers_read_16_bytes_of_a_batch_at_once(
    architecture: str, peer_assembly: str
) -> None:
    """In each loop over batches all leaves are in flight, in registers."""
    for name, body in sass(architecture, peer_assembly).items():
        if name not in PEERS:
            continue
        assert not re.search(r"\b(LDL|STL)\b", body), name
        lines = [line.strip() for line in body.splitlines()]
        batches = [
            loop for loop in innermost(loops("\n".join(lines)), "LDG.E.128") if "STG" not in loop
        ]
        assert [loop.count("LDG.E.128") for loop in batches] == [LOADS] * PEERS[name][1], name
        for loop in batches:
            assert not re.search(r"\b[FD]FMA\b", loop), name
            # Of the own leaf there may be one load before and one behind; all in between are tiles.
            in_flight = "".join(loop.split("LDG.E.128")[2:-2])
            assert not re.search(r"\b(FADD|FMUL|DADD|DMUL)\b", in_flight), name
    for figures in cuda(architecture, peer_assembly):
        assert (figures.spilled, figures.stack) == (0, 0), figures
        assert figures.registers <= 128, figures


@pytest.mark.skipif(CLANG is None, reason="no clang 19 or newer: HIP is not compiled")
@pytest.mark.full
def test_hip_kernels_over_peers_read_16_bytes_of_a_batch_at_once(tmp_path: Path) -> None:
    """One release and one acquire, and no wait between the loads of a batch."""
    _, text = hip("gfx942", str(CLANG), peers(tmp_path))
    for name, (_, count) in PEERS.items():
        body = text[text.index(f"\n{name}:") :].split(".Lfunc_end")[0]
        assert body.count("buffer_wbl2 sc0 sc1") == RELEASES, name
        assert body.count("buffer_inv sc0 sc1") == 1, name
        # All that a round does between its barriers.
        inner = [
            loop for loop in loops(body) if "load_dwordx4" in loop and "buffer_wbl2" not in loop
        ]
        assert not any("scratch_" in loop for loop in inner), name
        # One loop compares signatures; those over batches may have several ends.
        batches = innermost(inner, "load_dwordx4")
        assert len(batches) >= 1 + count, name
        between = r"(?:.*\n(?!.*(?:vmcnt|branch|load_dwordx4)))*.*\n.*load_dwordx4"
        for loop in batches:
            # For bytes one address comes late, behind six loads.
            assert re.search(rf"load_dwordx4(?:{between}){{5}}", loop), name


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
        # A batch of a tree and one of a left fold.
        assert len(re.findall(r"ld\.global\.v\d\.", body)) >= 8 + 8, name
    for figures in cuda("sm_90", text):
        assert (figures.spilled, figures.stack) == (0, 0), figures
        assert figures.registers <= 128, figures
