"""The driver of CUDA or of HIP, through ctypes: modules, launches, memory that processes share.

No header, no toolkit and no private part of torch is needed. Both drivers have the same functions
under two sets of names; structs and flags that are used here are equal. Sources: the CUDA driver
API reference and the HIP runtime API reference.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

# Two copies of a runtime in one process do not share streams and memory. torch's packages for ROCm
# contain their own copies, under names with a version, and the system's may be on the loader's
# path.

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


DriverKind = Literal["cuda", "hip"]
"""Whose driver a GPU is reached through."""
IPC_HANDLE_BYTES = 64

# The library, and the name for the loader if the process has not loaded it yet.
_LIBRARIES: dict[DriverKind, tuple[str, str]] = {
    "cuda": ("libcuda.so", "libcuda.so.1"),
    "hip": ("libamdhip64.so", "libamdhip64.so"),
}
_POINTER, _TEXT, _UINT, _SIZE = (
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_uint,
    ctypes.c_size_t,
)


class _IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * IPC_HANDLE_BYTES),)


# By purpose: the names, and the types of the arguments.
_FUNCTIONS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "load": ("cuModuleLoadData", "hipModuleLoadData", (_POINTER, _TEXT)),
    "function": (
        "cuModuleGetFunction",
        "hipModuleGetFunction",
        (_POINTER, _POINTER, _TEXT),
    ),
    "launch": (
        "cuLaunchKernel",
        "hipModuleLaunchKernel",
        (_POINTER, *[_UINT] * 7, *[_POINTER] * 3),
    ),
    "malloc": ("cuMemAlloc_v2", "hipExtMallocWithFlags", (_POINTER, _SIZE)),
    "free": ("cuMemFree_v2", "hipFree", (_POINTER,)),
    "fill": ("cuMemsetD8_v2", "hipMemset", (_POINTER, ctypes.c_int, _SIZE)),
    "host_malloc": ("cuMemHostAlloc", "hipHostMalloc", (_POINTER, _SIZE, _UINT)),
    "host_free": ("cuMemFreeHost", "hipHostFree", (_POINTER,)),
    "share": ("cuIpcGetMemHandle", "hipIpcGetMemHandle", (_POINTER, _POINTER)),
    "map": ("cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle", (_POINTER, _IpcHandle, _UINT)),
    "unmap": ("cuIpcCloseMemHandle", "hipIpcCloseMemHandle", (_POINTER,)),
    "create_event": ("cuEventCreate", "hipEventCreateWithFlags", (_POINTER, _UINT)),
    "destroy_event": ("cuEventDestroy_v2", "hipEventDestroy", (_POINTER,)),
    "record": ("cuEventRecord", "hipEventRecord", (_POINTER, _POINTER)),
    "query": ("cuEventQuery", "hipEventQuery", (_POINTER,)),
    "wait": ("cuStreamWaitEvent", "hipStreamWaitEvent", (_POINTER, _POINTER, _UINT)),
    "capture_mode": (
        "cuThreadExchangeStreamCaptureMode",
        "hipThreadExchangeStreamCaptureMode",
        (_POINTER,),
    ),
    "capture_info": (
        "cuStreamGetCaptureInfo_v2",
        "hipStreamGetCaptureInfo_v2",
        (_POINTER,) * 6,
    ),
    "synchronize": ("cuCtxSynchronize", "hipDeviceSynchronize", ()),
    "error": (
        "cuGetErrorString",
        "hipDrvGetErrorString",
        (ctypes.c_int, ctypes.POINTER(_TEXT)),
    ),
}
# Older runtimes of HIP have none.
_RECORD_EXTERNAL = ("cuEventRecordWithFlags", "hipEventRecordWithFlags")
# Of records and of waits.
_EXTERNAL = 1
# Portable and mapped: all contexts and the device itself see it.
_HOST_FLAGS = 1 | 2
# Of captures: this thread may make calls that no graph records.
_RELAXED = 2
# Other devices see writes while kernels run; ROCm keeps its own flags in such memory.
_UNCACHED = 3
_LAZY_PEER_ACCESS = 1
_NO_TIMING = 2
_NOT_READY = 600


class DriverError(RuntimeError):
    """A call of the driver failed, or there is no driver. Not raised to users."""


class Driver:
    """The driver, for the device of ``index`` as this process counts them. ``library`` is a file to
    load in place of the one that this process uses. ``DriverError`` if there is no driver, if it
    lacks a function, or if several are loaded and it is unknown which of them torch uses.
    """

    def __init__(self, kind: DriverKind, index: int, library: str | None = None) -> None:
        self.kind = kind
        self.index = index
        name, by_name = _LIBRARIES[kind]
        try:
            # The file that was loaded, or the name under which the loader found it.
            name = self.library = library or find_library(name, by_name)
            self._library = ctypes.CDLL(name)
            self._functions: dict[str, Any] = {}
            for purpose, (cuda, hip, arguments) in _FUNCTIONS.items():
                function = getattr(self._library, cuda if kind == "cuda" else hip)
                function.restype = ctypes.c_int
                function.argtypes = arguments
                self._functions[purpose] = function
            self._record_flags: Any = getattr(self._library, _RECORD_EXTERNAL[kind == "hip"], None)
        except (OSError, AttributeError) as error:
            raise DriverError(f"{name}: {error}") from error
        if self._record_flags is not None:
            self._record_flags.argtypes = (_POINTER, _POINTER, _UINT)
        if kind == "hip":
            self._functions["malloc"].argtypes = (_POINTER, _SIZE, _UINT)
        self._context = self._primary_context() if kind == "cuda" else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device the current one of this thread; every call below needs it."""
        if self.kind == "hip":
            before = ctypes.c_int()
            self._check(self._library.hipGetDevice(ctypes.byref(before)))
            self._check(self._library.hipSetDevice(self.index))
            try:
                yield
            finally:
                self._check(self._library.hipSetDevice(before))
            return
        self._check(self._library.cuCtxPushCurrent_v2(self._context))
        try:
            yield
        finally:
            self._check(self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))

    def load(self, image: bytes) -> int:
        """A module out of a cubin, a fatbin or a code object; also while a stream is captured."""
        mode = ctypes.c_int(_RELAXED)
        self._run("capture_mode", ctypes.byref(mode))
        try:
            return self._create("load", image)
        finally:
            self._run("capture_mode", ctypes.byref(mode))

    def function(self, module: int, name: str) -> int:
        return self._create("function", module, name.encode())

    def launch(
        self,
        function: int,
        blocks: int,
        lanes: int,
        stream: int,
        arguments: ctypes.Array[Any],
    ) -> None:
        self._run("launch", function, blocks, 1, 1, lanes, 1, 1, 0, stream, arguments, None)

    def malloc(self, nbytes: int) -> int:
        """Zeroed memory that can be shared: no allocator caches it. On HIP it is uncached."""
        flags = () if self.kind == "cuda" else (_UNCACHED,)
        address = self._create("malloc", nbytes, *flags)
        self._run("fill", address, 0, nbytes)
        self.synchronize()
        return address

    def free(self, address: int) -> None:
        self._run("free", address)

    def host_malloc(self, nbytes: int) -> int:
        """Zeroed memory of the host that the device writes to under the same address."""
        address = self._create("host_malloc", nbytes, _HOST_FLAGS)
        ctypes.memset(address, 0, nbytes)
        return address

    def host_free(self, address: int) -> None:
        self._run("host_free", address)

    def share(self, address: int) -> bytes:
        handle = _IpcHandle()
        self._run("share", ctypes.byref(handle), address)
        return bytes(handle)

    def map(self, handle: bytes) -> int:
        """The memory that another process shares. It has to outlive this mapping."""
        return self._create("map", _IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def unmap(self, address: int) -> None:
        self._run("unmap", address)

    def event(self) -> int:
        return self._create("create_event", _NO_TIMING)

    def destroy_event(self, event: int) -> None:
        self._run("destroy_event", event)

    def record(self, event: int, stream: int) -> None:
        """Let the event stand for all work on the stream so far."""
        self._run("record", event, stream)

    def is_done(self, event: int) -> bool:
        code = self._functions["query"](event)
        if code == _NOT_READY:
            return False
        self._check(code)
        return True

    def wait(self, event: int, stream: int) -> None:
        self._run("wait", stream, event, 0)

    def capture(self, stream: int) -> int | None:
        """The number of the capture that the stream is part of, or ``None``."""
        status, number = ctypes.c_int(), ctypes.c_ulonglong()
        results = ctypes.byref(status), ctypes.byref(number), None, None, None
        self._run("capture_info", stream, *results)
        return None if status.value == 0 else number.value

    @property
    def has_external_events(self) -> bool:
        """Whether a graph can record events and wait for events of others."""
        return self._record_flags is not None

    def record_external(self, event: int, stream: int) -> None:
        """In a capture: each replay of the graph records the event, here in the stream's order."""
        self._check(self._record_flags(event, stream, _EXTERNAL))

    def wait_external(self, event: int, stream: int) -> None:
        """In a capture: each replay of the graph waits for the event as it then is."""
        self._run("wait", stream, event, _EXTERNAL)

    def synchronize(self) -> None:
        self._run("synchronize")

    def _create(self, purpose: str, *arguments: Any) -> int:
        result = ctypes.c_void_p()
        self._run(purpose, ctypes.byref(result), *arguments)
        return result.value or 0

    def _run(self, purpose: str, *arguments: Any) -> None:
        self._check(self._functions[purpose](*arguments))

    def _check(self, code: int) -> None:
        if code != 0:
            text = ctypes.c_char_p()
            self._functions["error"](code, ctypes.byref(text))
            raise DriverError(f"{(text.value or b'unknown error').decode()} ({code})")

    def _primary_context(self) -> ctypes.c_void_p:
        """The context of the device that torch uses too."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._library.cuInit(0))
        self._check(self._library.cuDeviceGet(ctypes.byref(device), self.index))
        self._check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        return context
