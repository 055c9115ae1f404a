"""The kernels as a driver loads them: real compilers, and a cache that many processes share."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from expecttest import TestCase

from meshplan.kernel import _device_code
from meshplan.kernel._device_code import (
    MAX_IMAGES,
    CompileError,
    Compiler,
    Program,
    RuntimeLibrary,
    cache_folder,
    compilers,
    device_code,
    prebuilt,
    sources,
)
from tests.marks import full, longest
from tests.refusals import refusal

CUDA = list(compilers("cuda"))
BUILD = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[1] / "tools/build_in_place.py"))
)
CLANG = shutil.which("clang++-19")
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Slow:
    """Counts in a file how often it compiled."""

    log: Path
    seconds: float = 0.3
    identity: str = "slow 1"

    def compile(self, folder: Path, architecture: str) -> bytes:
        with self.log.open("a") as file:
            file.write(f"{architecture}\n")
        time.sleep(self.seconds)
        return f"{architecture} by {self.identity} of {len(list(folder.iterdir()))} files".encode()


@dataclass(frozen=True)
class Broken:
    identity: str = "broken 1"

    def compile(self, folder: Path, architecture: str) -> bytes:
        raise CompileError(f"broken: no {architecture}")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHPLAN_CACHE", str(tmp_path / "cache"))


def use(monkeypatch: pytest.MonkeyPatch, *found: Compiler) -> None:
    monkeypatch.setattr(_device_code, "compilers", lambda kind: iter(found))


def few_kernels(to: Path) -> Path:
    """The sources with kernels of three arithmetics: all of them would take minutes to compile."""
    main = shutil.copytree(sources(), to) / "device.cu"
    families = r"^MP_(LINEAR|ROUNDED|EXTREMA|SUMS|FOLD_PARTS)\(.*\n"
    text, cut = re.subn(families, "", main.read_text(), flags=re.M)
    assert cut > 20
    text += "MP_ONE(mp_float32_sum, float, float, float, Sum)\nMP_EXTREMA(uint8, u8)\n"
    main.write_text(f"{text}MP_ONE(mp_bfloat16_product_node, Bfloat, float, Bfloat, Product)\n")
    return to


@pytest.mark.skipif(not CUDA, reason="neither nvcc nor NVRTC: CUDA is not compiled")
@pytest.mark.parametrize("compiler", CUDA[:1] + [c for c in CUDA if isinstance(c, Program)])
@pytest.mark.parametrize("are_few", [full(True), longest(False)], ids=["few", "all"])
def test_cuda_compilers_are_found(compiler: Compiler, are_few: bool, tmp_path: Path) -> None:
    folder = few_kernels(tmp_path / "csrc") if are_few else sources()
    image = compiler.compile(folder, "sm_90")
    assert image.startswith(b"\x7fELF")
    for kernel in (b"mp_float32_sum", b"mp_bfloat16_product_node", b"mp_uint8_min"):
        assert kernel in image
    assert re.search(r"\d+\.\d+", compiler.identity)
    assert "-fmad=false" in compiler.identity
    with pytest.raises(CompileError, match=r"sm_1|gpu-architecture"):
        compiler.compile(folder, "sm_1")


@pytest.mark.skipif(
    CLANG is None or shutil.which("ld.lld-19") is None, reason="no clang-19 and lld-19 for HIP"
)
@pytest.mark.dist
def test_hip_compiler_is_found() -> None:
    assert CLANG is not None
    image = Program("hip", CLANG).compile(sources(), "gfx942")
    assert image.startswith(b"\x7fELF")
    assert b"mp_float32_sum" in image


@pytest.mark.skipif(not CUDA, reason="neither nvcc nor NVRTC: CUDA is not compiled")
def test_compiler_output_is_in_the_error(tmp_path: Path) -> None:
    """A source that no compiler takes: its own words, and no crash of the library."""
    shutil.copytree(sources(), tmp_path / "csrc")
    (tmp_path / "csrc" / "device.cu").write_text("int broken = ;\n")
    for compiler in CUDA:
        with pytest.raises(CompileError, match="expected an expression"):
            compiler.compile(tmp_path / "csrc", "sm_90")


def test_one_of_many_processes_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    use(monkeypatch, Slow(log))
    with _FORK.Pool(8) as pool:
        found = pool.starmap(device_code, [("cuda", "sm_90")] * 16)
    assert len(set(found)) == 1
    assert log.read_text() == "sm_90\n"
    assert device_code("cuda", "sm_80") != found[0]
    assert log.read_text() == "sm_90\nsm_80\n"


def test_compiler_and_source_are_in_the_cache_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    use(monkeypatch, Slow(log, 0.0))
    device_code("cuda", "sm_90")
    device_code("cuda", "sm_90")
    use(monkeypatch, Slow(log, 0.0, "slow 2"))
    device_code("cuda", "sm_90")
    assert log.read_text() == "sm_90\n" * 2
    shutil.copytree(sources(), tmp_path / "csrc")
    with (tmp_path / "csrc" / "op.h").open("a") as file:
        file.write("// changed\n")
    monkeypatch.setattr(_device_code, "sources", lambda: tmp_path / "csrc")
    device_code("cuda", "sm_90")
    assert log.read_text() == "sm_90\n" * 3


def test_killed_process_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    use(monkeypatch, Slow(log, 60.0))
    killed = _FORK.Process(target=device_code, args=("cuda", "sm_90"))
    killed.start()
    while not log.exists():
        time.sleep(0.01)
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    use(monkeypatch, Slow(log, 0.0))
    assert device_code("cuda", "sm_90").startswith(b"sm_90 by slow")


def test_old_images_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(MAX_IMAGES + 3):
        use(monkeypatch, Slow(tmp_path / "log", 0.0, f"slow {number}"))
        device_code("cuda", "sm_90")
    kept = list(cache_folder().glob("*.image"))
    assert len(kept) == MAX_IMAGES
    device_code("cuda", "sm_90")
    assert len((tmp_path / "log").read_text().splitlines()) == MAX_IMAGES + 3
    assert not list(cache_folder().glob(".new-*"))


def test_unwritable_cache_warns_and_still_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHPLAN_CACHE", str(tmp_path / "file"))
    use(monkeypatch, Slow(tmp_path / "log", 0.0))
    with caplog.at_level(logging.WARNING, logger="meshplan"):
        assert device_code("cuda", "sm_90") == device_code("cuda", "sm_90")
    assert "set MESHPLAN_CACHE" in caplog.text


@pytest.mark.parametrize("bits", [0o770, 0o707, None])
def test_images_in_shared_folders_are_not_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    bits: int | None,
) -> None:
    use(monkeypatch, Slow(tmp_path / "log", 0.0))
    monkeypatch.setenv("MESHPLAN_CACHE", str(tmp_path / "new"))
    expected = device_code("cuda", "sm_90")
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    (image,) = cache_folder().glob("*.image")
    image.write_bytes(b"of somebody else")
    assert device_code("cuda", "sm_90") == b"of somebody else"
    if bits is None:
        monkeypatch.setattr(os, "geteuid", lambda: cache_folder().stat().st_uid + 1)
    else:
        cache_folder().chmod(bits)
    with caplog.at_level(logging.WARNING, logger="meshplan"):
        assert device_code("cuda", "sm_90") == expected
    why = "belongs to another user" if bits is None else "chmod go-w"
    assert why in caplog.text


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHPLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/meshplan")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/meshplan")


class TestNoCompiler(TestCase):
    @pytest.fixture(autouse=True)
    def _patch(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.monkeypatch, self.log = monkeypatch, tmp_path / "log"

    def said(self, found: Sequence[Compiler], kind: str = "cuda") -> str:
        use(self.monkeypatch, *found)
        return refusal(CompileError, device_code, kind, "sm_90")

    def test_missing_compilers_are_listed(self) -> None:
        self.assertExpectedInline(
            "\n".join((self.said(()), self.said((), "hip"), self.said((Broken(), Broken())))),
            """\
no compiler for sm_90: there is neither nvcc nor NVRTC: pip install nvidia-cuda-nvrtc
no compiler for sm_90: there is neither hipcc nor libhiprtc.so: install ROCm's hipcc
no compiler for sm_90: broken: no sm_90; broken: no sm_90""",
        )

    def test_the_next_compiler_is_tried(self) -> None:
        use(self.monkeypatch, Broken(), Slow(self.log, 0.0))
        assert device_code("cuda", "sm_90").startswith(b"sm_90 by slow")

    def test_held_lock_names_its_holder(self) -> None:
        use(self.monkeypatch, Slow(self.log, 60.0))
        holder = _FORK.Process(target=device_code, args=("cuda", "sm_90"))
        holder.start()
        try:
            while not self.log.exists():
                time.sleep(0.01)
            with pytest.raises(CompileError) as caught:
                device_code("cuda", "sm_90", wait=0.2)
        finally:
            holder.kill()
            holder.join()
        text = str(caught.value).replace(str(holder.pid), "PID")
        self.assertExpectedInline(
            text.replace(str(cache_folder()), "CACHE"),
            """no compiler for sm_90: process PID has held CACHE/sm_90.lock for 0.2 s; end it, or set MESHPLAN_CACHE to another folder""",
        )


@pytest.mark.timeout(2 * BUILD.SECONDS)
@pytest.mark.skipif(BUILD.NVCC is None, reason="no nvcc: pip install compiles no kernels")
@pytest.mark.full
def test_pip_install_compiles_a_fatbin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``make setup`` compiles none on a machine without a GPU, where it would take minutes."""
    monkeypatch.setitem(BUILD.fatbin.__globals__, "ARCHITECTURES", ["90"])
    image = tmp_path / "_device.fatbin"
    subprocess.run(
        [*BUILD.fatbin(), "-o", str(image)], cwd=BUILD.ROOT, check=True, timeout=BUILD.SECONDS
    )
    assert image.read_bytes().startswith(b"\x50\xed\x55\xba")  # a fatbin
    monkeypatch.setattr(_device_code, "__file__", str(tmp_path / "_device_code.py"))
    assert prebuilt() == image.read_bytes()


def test_unknown_runtime_library_raises() -> None:
    with pytest.raises(OSError, match="libnothing"):
        RuntimeLibrary("cuda", "libnothing.so")
    with pytest.raises(AttributeError):
        RuntimeLibrary("cuda", "libc.so.6")
