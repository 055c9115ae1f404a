"""Compilers for the kernels of GPUs: toolkits, and the libraries that come with torch.

No compiler may contract a product and a sum into one rounding, or use fast math. The flags in this
module forbid both.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from meshplan.kernel._driver import DriverKind
from meshplan.kernel._vendor_libraries import LibraryChoiceError, find_library

_FLAGS = ("-std=c++17", "-fmad=false")
_HIP_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off")
_SECONDS = 600
_MAIN = "device.cu"


class CompileError(RuntimeError):
    """A compiler refused the kernels, or did not end. Not raised to users."""


def sources() -> Path:
    """The folder of the kernels' sources: in the installed package, or in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "csrc"
    return inside if inside.is_dir() else package.parent / "csrc"


class Compiler(Protocol):
    """Makes what a driver loads."""

    @property
    def identity(self) -> str:
        """Version and flags: with sources and architecture, all that the result depends on."""

    def compile(self, folder: Path, architecture: str) -> bytes:
        """Compile the kernels in ``folder`` for ``sm_90``, ``gfx942`` or the like; ``CompileError``
        has the output of the compiler.
        """


def compilers(kind: DriverKind) -> Iterator[Compiler]:
    """The compilers of this machine; those that need no toolkit come first."""
    for name in _libraries(kind):
        try:
            yield RuntimeLibrary(kind, name)
        except (OSError, AttributeError):
            continue
    for name in ("nvcc",) if kind == "cuda" else ("hipcc", "amdclang++"):
        path = _program(kind, name)
        if path is not None:
            yield Program(kind, path)


@dataclass(frozen=True, slots=True)
class Program:
    """``nvcc``, or a clang that knows HIP; ``path`` is the executable."""

    kind: DriverKind
    path: str

    @property
    def identity(self) -> str:
        return f"{self._run('--version')} {self._flags('')}"

    def compile(self, folder: Path, architecture: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="meshplan") as out:
            image = Path(out) / "image"
            self._run(*self._flags(architecture), str(folder / _MAIN), "-o", str(image))
            return image.read_bytes()

    def _flags(self, architecture: str) -> tuple[str, ...]:
        if self.kind == "cuda":
            return (*_FLAGS, "-O3", "-cubin", f"-arch={architecture}")
        device = ("--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc")
        return ("-x", "hip", *_HIP_FLAGS, *device, f"--offload-arch={architecture}")

    def _run(self, *arguments: str) -> str:
        command = [self.path, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"{self.path}: {error}") from error
        if done.returncode != 0:
            raise CompileError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        return done.stdout


class RuntimeLibrary:
    """NVRTC or HIPRTC, which torch's own packages contain; ``OSError`` or ``AttributeError`` if the
    library is missing or is another one.
    """

    def __init__(self, kind: DriverKind, name: str) -> None:
        self.kind = kind
        self.name = name
        if "/" in name:
            # NVRTC loads this one by its bare name, and does not look in its own folder.
            for path in Path(name).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(path))
        self._library = ctypes.CDLL(name)
        for function in ("Version", "CreateProgram", "CompileProgram", self._code):
            self._function(function)

    @property
    def identity(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._function("Version")(ctypes.byref(major), ctypes.byref(minor))
        return f"{self._prefix} {major.value}.{minor.value} {self._flags('')}"

    def compile(self, folder: Path, architecture: str) -> bytes:
        texts = {path.name: path.read_bytes() for path in sorted(folder.glob("*.h"))}
        headers = (ctypes.c_char_p * len(texts))(*texts.values())
        names = (ctypes.c_char_p * len(texts))(*[name.encode() for name in texts])
        program = ctypes.c_void_p()
        main = (folder / _MAIN).read_bytes()
        self._check(
            self._function("CreateProgram")(
                ctypes.byref(program), main, _MAIN.encode(), len(texts), headers, names
            ),
            program,
        )
        try:
            flags = [flag.encode() for flag in self._flags(architecture)]
            given = (ctypes.c_char_p * len(flags))(*flags)
            self._check(self._function("CompileProgram")(program, len(flags), given), program)
            return self._text(self._code, program)
        finally:
            self._function("DestroyProgram")(ctypes.byref(program))

    @property
    def _prefix(self) -> str:
        return "nvrtc" if self.kind == "cuda" else "hiprtc"

    @property
    def _code(self) -> str:
        return "CUBIN" if self.kind == "cuda" else "Code"

    def _flags(self, architecture: str) -> tuple[str, ...]:
        if self.kind == "cuda":
            return (*_FLAGS, f"-arch={architecture}")
        return (*_HIP_FLAGS, f"--offload-arch={architecture}")

    def _function(self, name: str) -> Any:
        # Code and log have a function for their size too.
        names = {"CUBIN": "GetCUBIN", "Code": "GetCode", "Log": "GetProgramLog"}
        return getattr(self._library, self._prefix + names.get(name, name))

    def _text(self, name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        sized = getattr(self._library, f"{self._function(name).__name__}Size")
        sized(program, ctypes.byref(size))
        room = ctypes.create_string_buffer(size.value)
        self._function(name)(program, room)
        return room.raw

    def _check(self, code: int, program: ctypes.c_void_p) -> None:
        if code != 0:
            log = self._text("Log", program) if program else b""
            output = log.decode(errors="replace").rstrip("\0\n")[:2000]
            raise CompileError(f"{self.name}: error {code}: {output}")


def _libraries(kind: DriverKind) -> Iterator[str]:
    if kind == "hip":
        # Several copies are loaded: the driver fails for the same reason, and names them.
        with suppress(LibraryChoiceError):
            yield find_library("libhiprtc.so")
        return
    packages = Path(torch.__file__).parents[1] / "nvidia"
    found = [*sorted(map(str, packages.glob("*/lib/libnvrtc.so.*"))), "libnvrtc.so.13"]
    found.append("libnvrtc.so.12")
    # First the compiler of torch's CUDA version: a driver that runs this torch loads its images.
    major = (torch.version.cuda or "13").split(".")[0]
    yield from sorted(found, key=lambda name: not name.endswith(f".so.{major}"))


def _program(kind: DriverKind, name: str) -> str | None:
    homes = ("CUDA_HOME", "CUDA_PATH") if kind == "cuda" else ("ROCM_PATH", "HIP_PATH")
    for home in homes:
        if home in os.environ:
            found = shutil.which(name, path=str(Path(os.environ[home]) / "bin"))
            if found is not None:
                return found
    default = "/usr/local/cuda/bin" if kind == "cuda" else "/opt/rocm/bin"
    return shutil.which(name) or shutil.which(name, path=default)
