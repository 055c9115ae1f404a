"""The kernels for GPUs as a driver loads them: installed, or compiled at first use.

Images are kept in ``$MESHPLAN_CACHE``, else ``$XDG_CACHE_HOME/meshplan``, else
``~/.cache/meshplan``: at most ``MAX_IMAGES`` files, each named by a hash of sources, flags,
compiler, torch and architecture. Of processes that start at once one compiles and the others wait.
A driver runs any image, so a folder is refused if another user could replace it or write to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from meshplan._dtypes import name_of
from meshplan.contract import Contract
from meshplan.kernel._compilers import CompileError, Compiler, compilers, sources
from meshplan.kernel._driver import Driver, DriverError, DriverKind
from meshplan.kernel._private_folder import make_private

MAX_IMAGES = 32

_LOG = logging.getLogger("meshplan")
_SECONDS = 900.0
_POLL_SECONDS = 0.05


def prebuilt() -> bytes | None:
    """The kernels that ``pip install`` compiled for CUDA, if it found ``nvcc`` and a GPU."""
    path = Path(__file__).parent / "_device.fatbin"
    return path.read_bytes() if path.exists() else None


def cache_folder() -> Path:
    """Where compiled kernels are kept; it need not exist."""
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
                _prune(cache)
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
    """All of it or nothing, though processes and machines may stop at any time."""
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


def _prune(cache: Path) -> None:
    images = sorted(cache.glob("*.image"), key=lambda path: path.stat().st_mtime)
    for path in images[:-MAX_IMAGES]:
        path.unlink(missing_ok=True)


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
