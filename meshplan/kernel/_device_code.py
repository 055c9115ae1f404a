"""The kernels for GPUs as a driver loads them: installed, or compiled at first use.

Images are kept in ``$MESHPLAN_CACHE``, else ``$XDG_CACHE_HOME/meshplan``, else
``~/.cache/meshplan``: at most ``MAX_IMAGES`` files, each named by a hash of sources, flags,
compiler, torch and architecture. Of processes that start at once one compiles and the others wait.
A driver runs any image, so a folder is refused if another user could replace it or write to it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from meshplan._dtypes import name_of
from meshplan.contract import Contract
from meshplan.kernel._driver import (
    Driver,
    DriverError,
    DriverKind,
    LibraryChoiceError,
    find_library,
)

# Compilers for the kernels of GPUs: toolkits, and the libraries that come with torch.
#
# No compiler may contract a product and a sum into one rounding, or use fast math. The flags in
# this module forbid both.

_FLAGS = ("-std=c++17", "-fmad=false")
_HIP_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off")
_COMPILE_SECONDS = 600
_MAIN = "device.cu"


class CompileError(RuntimeError):
    """A compiler refused the kernels, or did not end. Not raised to users."""


def sources() -> Path:
    package = Path(__file__).parents[1]
    inside = package / "csrc"
    return inside if inside.is_dir() else package.parent / "csrc"


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
        """Version and flags: with sources and architecture, all that the result depends on."""
        return f"{self._run('--version')} {self._flags('')}"

    def compile(self, folder: Path, architecture: str) -> bytes:
        """The kernels in ``folder``, as `device_code`."""
        with tempfile.TemporaryDirectory(prefix="meshplan") as out:
            image = Path(out) / "image"
            self._run(*self._flags(architecture), str(folder / _MAIN), "-o", str(image))
            return image.read_bytes()

    def _flags(self, architecture: str) -> tuple[str, ...]:
        if self.kind == "cuda":
            return (*_FLAGS, "-O3", "-cubin", f"-arch={architecture}")
        device = (
            "--cuda-device-only",
            "--no-gpu-bundle-output",
            "-nogpulib",
            "-nogpuinc",
        )
        return ("-x", "hip", *_HIP_FLAGS, *device, f"--offload-arch={architecture}")

    def _run(self, *arguments: str) -> str:
        command = [self.path, *arguments]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_COMPILE_SECONDS,
                check=False,
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
                ctypes.byref(program),
                main,
                _MAIN.encode(),
                len(texts),
                headers,
                names,
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


Compiler = Program | RuntimeLibrary


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


MAX_IMAGES = 32

_LOG = logging.getLogger("meshplan")
_SECONDS = 900.0
_POLL_SECONDS = 0.05


def prebuilt() -> bytes | None:
    """The kernels that ``pip install`` compiled for CUDA, if it found ``nvcc`` and a GPU."""
    path = Path(__file__).parent / "_device.fatbin"
    return path.read_bytes() if path.exists() else None


def cache_folder() -> Path:
    """The folder of compiled kernels; it need not exist."""
    named = os.environ.get("MESHPLAN_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "meshplan"


def device_code(kind: DriverKind, architecture: str, *, wait: float = _SECONDS) -> bytes:
    """The kernels for ``sm_90``, ``gfx942`` or the like; compiled now if they never were.
    ``CompileError`` if no compiler of this machine can, or if another process does not end within
    ``wait`` seconds.
    """
    failures = []
    for compiler in compilers(kind):
        try:
            return _cached(compiler, architecture, wait)
        except CompileError as error:
            failures.append(str(error))
    found = "; ".join(failures)
    if not failures and kind == "cuda":
        found = "there is neither nvcc nor NVRTC: pip install nvidia-cuda-nvrtc"
    elif not failures:
        found = "there is neither hipcc nor libhiprtc.so: install ROCm's hipcc"
    raise CompileError(f"no compiler for {architecture}: {found}")


def _cached(compiler: Compiler, architecture: str, wait: float) -> bytes:
    folder = sources()
    words = [architecture, compiler.identity, torch.__version__]
    words += [path.name + path.read_text() for path in sorted(folder.iterdir())]
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]
    try:
        cache = cache_folder()
        make_private(cache)
        image = cache / f"{architecture}-{key}.image"
        with _locked(cache / f"{architecture}.lock", wait):
            if not image.exists():
                _write(image, _compile(compiler, folder, architecture))
                images = sorted(cache.glob("*.image"), key=lambda path: path.stat().st_mtime)
                for old in images[:-MAX_IMAGES]:
                    old.unlink(missing_ok=True)
            return image.read_bytes()
    except OSError as error:
        _LOG.warning("compiled kernels cannot be kept (%s); set MESHPLAN_CACHE", error)
        return _compile(compiler, folder, architecture)


def _compile(compiler: Compiler, folder: Path, architecture: str) -> bytes:
    started = time.monotonic()
    image = compiler.compile(folder, architecture)
    seconds = time.monotonic() - started
    _LOG.info("compiled the kernels for %s in %.1f s", architecture, seconds)
    return image


@contextmanager
def _locked(path: Path, wait: float) -> Iterator[None]:
    """Hold the lock of a file, which the system takes back from a process that ends."""
    with path.open("a+") as file:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise CompileError(
                        f"process {file.read() or '(unknown)'} has held {path} for {wait:g} s; "
                        "end it, or set MESHPLAN_CACHE to another folder"
                    ) from None
                time.sleep(_POLL_SECONDS)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _write(path: Path, content: bytes) -> None:
    """Write the whole file or nothing, even if the process or the machine stops."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


class Device:
    """One GPU of this process, which runs at least ``processors`` blocks at once: one on each
    multiprocessor or compute unit. ``image`` has the kernels as the driver loads them
    (``DriverError`` if they are for another GPU), ``stream`` returns the handle of the current
    stream, ``type`` is torch's name for the type of the device.
    """

    def __init__(
        self,
        driver: Driver,
        processors: int,
        image: bytes,
        stream: Callable[[], int],
        type: str = "cuda",
    ) -> None:
        self.driver = driver
        self.processors = processors
        self.stream = stream
        self.type = type
        self._kernels: dict[str, int] = {}
        with driver.current():
            self._module = driver.load(image)

    def kernel(self, name: str) -> int:
        """The kernel of that name; the driver is current."""
        found = self._kernels.get(name)
        if found is None:
            found = self._kernels[name] = self.driver.function(self._module, name)
        return found


@lru_cache(maxsize=64)
def device_of(index: int) -> Device:
    """The GPU that torch calls ``cuda:index``; ``DriverError`` without a driver, ``CompileError``
    without kernels. The first call may compile them.
    """
    properties = torch.cuda.get_device_properties(index)
    kind: DriverKind = "hip" if torch.version.hip else "cuda"
    driver = Driver(kind, index)

    def stream() -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)

    processors = properties.multi_processor_count
    installed = prebuilt() if kind == "cuda" else None
    if installed is not None:
        try:
            return Device(driver, processors, installed, stream)
        except DriverError:
            # Compiled for other architectures than this one.
            pass
    if kind == "hip":
        architecture = properties.gcnArchName.split(":")[0]
    else:
        architecture = f"sm_{properties.major}{properties.minor}"
    return Device(driver, processors, device_code(kind, architecture), stream)


def kernel_name(dtype: torch.dtype, op: str, contract: Contract) -> str:
    """The kernel over peers for leaves of ``dtype``; csrc/device.cu lists them."""
    name = name_of(dtype)
    op = "sum" if op == "avg" else op
    if op in ("max", "min"):
        return f"mp_{name}_{op}"
    wide = contract.accumulate == "float64" and dtype is torch.float32
    if contract.ordering.exact and dtype.is_floating_point:
        op = "exact"
    # Where partial results are as wide as the elements there is nothing to round.
    node = contract.rounding == "node" and (wide or dtype in (torch.bfloat16, torch.float16))
    return f"mp_{name}{'_wide' if wide else ''}_{op}{'_node' if node else ''}"


# A folder whose content no other user can choose: by its own mode, and by all folders above it.
#
# A user who can write to a folder above can rename its entries and put another folder in their
# place. So each folder on the path, symbolic links included, must belong to this user or to root,
# and must not be writable for others. The exception is a sticky bit, as on ``/tmp``: with it, users
# can rename their own entries only.

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Make the folder and what is missing above it, for this user alone, and check it
    (`check_private`); ``OSError`` if it cannot be made.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Check a folder that exists: ``PermissionError`` names the folder that another user can write
    to or replace, ``OSError`` if it cannot be read.
    """
    # The system ends a circle of links here, with an error.
    os.stat(folder)
    # Not only the target: a user who can replace a link can redirect it.
    for path, status in _components(folder.absolute()):
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{path} belongs to another user")
        # Linux ignores the mode of a link.
        shared = stat.S_ISDIR(status.st_mode) and status.st_mode & _OTHERS_WRITE
        if shared and not status.st_mode & stat.S_ISVTX:
            raise PermissionError(f"others may write to {path}; chmod go-w it")
    # In the folder itself a sticky bit is not enough: others could still add files.
    status = os.stat(folder)
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & _OTHERS_WRITE:
        raise PermissionError(f"others may write to {folder}; chmod go-w it")


def _components(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every folder and every link from the root to a path, in the order in which they are used."""
    for one in (*reversed(path.parents), path):
        place = Path(os.path.realpath(one.parent)) / one.name
        status = os.lstat(place)
        yield place, status
        if stat.S_ISLNK(status.st_mode):
            yield from _components(place.parent / os.readlink(place))
