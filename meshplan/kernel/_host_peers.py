"""Reductions by processes of one host through memory that they share."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import struct
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from meshplan._calls import check_aborted
from meshplan.kernel._communicator import (
    CallKey,
    Communicator,
    nanoseconds,
    prepare_call,
)
from meshplan.kernel._library import (
    MAX_PEERS,
    Outcome,
    PeerCall,
    Peers,
    library,
)
from meshplan.record import CALL_WORD

# Memory that the processes of one host share, without a name that could be left behind.
#
# It is an anonymous file of the kernel (``memfd_create``). A peer that knows the number of the
# owner's descriptor opens it through ``/proc``. The kernel frees it when the last process that
# mapped it ends, even by a signal. Its size is sealed: a peer that truncated it would crash the
# others.

# From here on the C library takes fresh memory for every tensor and returns it, so that each page
# is faulted in again at every call: in pages of 4 KB that takes longer than to write it.
LARGE_BYTES = 32 << 20

HEADER_BYTES = 4096
_NONCE_BYTES = 16
# Python has no name for it yet: the file is never a program, and cannot become one (Linux 6.3).
_MFD_NOEXEC_SEAL = 8
# In the header: what each rank has noted, 4 bytes a rank.
_NOTES = 64


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """How another process of the host finds the memory."""

    pid: int  # of the process that made the memory, with its descriptor, until ``unshare``
    descriptor: int
    nonce: str  # random bytes at the start of the header, in hexadecimal: descriptors are reused
    size: int  # bytes, the header included


class SharedMemory:
    """Mapped memory of ``size`` bytes, the header of ``HEADER_BYTES`` included. ``close``
    unmaps it. The file of ``descriptor`` is mapped and not closed here.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(descriptor, size)
        self._bytes: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * size).from_buffer(
            self._map
        )
        # The owner's, until all have opened it.
        self._descriptor: int | None = None

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """New zeroed memory of ``size`` bytes behind the header; ``OSError`` if there is less."""
        size += HEADER_BYTES
        descriptor = _anonymous_file()
        try:
            # Reserve every page now: a write to a page that the host lacks later raises SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            memory = cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        memory._descriptor = descriptor
        memory._map[:_NONCE_BYTES] = secrets.token_bytes(_NONCE_BYTES)
        return memory

    @classmethod
    def open(cls, handle: MemoryHandle) -> SharedMemory:
        """Map another process's memory; ``OSError`` if the handle no longer leads to it."""
        path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size == handle.size:
                memory = cls(descriptor, handle.size)
                if memory._map[:_NONCE_BYTES].hex() == handle.nonce:
                    return memory
                memory.close()
        finally:
            os.close(descriptor)
        raise OSError(f"{path} is not the memory that was shared")

    @property
    def handle(self) -> MemoryHandle:
        """For the others, until ``unshare``."""
        assert self._descriptor is not None
        nonce = self._map[:_NONCE_BYTES].hex()
        return MemoryHandle(os.getpid(), self._descriptor, nonce, self.size)

    def note(self, place: int, number: int) -> None:
        struct.pack_into("<I", self._map, _NOTES + 4 * place, number)

    def read_note(self, place: int) -> int:
        return int(struct.unpack_from("<I", self._map, _NOTES + 4 * place)[0])

    @property
    def address(self) -> int:
        """The address of the first byte behind the header, in this process."""
        assert self._bytes is not None
        return ctypes.addressof(self._bytes) + HEADER_BYTES

    def unshare(self) -> None:
        """Close the descriptor, so that no other process can open the memory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def close(self) -> None:
        """Unmap it in this process. A second call does nothing."""
        self.unshare()
        self._bytes = None
        self._map.close()


def _anonymous_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("meshplan", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("meshplan", flags)


def host() -> str:
    """The same text on processes that can share memory: one kernel, one namespace of processes."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def large_pages(tensor: Tensor) -> Tensor:
    """Ask for large pages for a new, contiguous ``tensor``, if plain; returns ``tensor``."""
    # A hint: a system that ignores it changes nothing but time.
    advise = _madvise() if type(tensor) is Tensor and tensor.is_cpu else None
    if advise is not None and tensor.nbytes >= LARGE_BYTES:
        # Whole pages that are the tensor's alone.
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, stop - start, mmap.MADV_HUGEPAGE)
    return tensor


@lru_cache(maxsize=1)
def _madvise() -> Any:
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    advise.restype = ctypes.c_int
    return advise


# Messages up to this many bytes go one-shot: (ranks, bytes), for groups of up to so many ranks.
# Measured with benchmarks/allreduce_cpu.py; it cannot change a bit.
ONE_SHOT_BYTES = ((2, 32 << 10), (4, 16 << 10), (MAX_PEERS, 4 << 10))

# All slots of the ranks of a core should fit into its second cache.
_STAGED_BYTES = 256 << 10
# In place of a descriptor.
_UNKNOWN, _ENDED = -1, -2


def region_bytes(ranks: int) -> int:
    """Bytes of one rank's region in a group of ``ranks``; errors of `library`."""
    return int(library().mp_peer_bytes(ranks, 1, _tile(ranks), 0))


def _tile(ranks: int) -> int:
    # A large tile has fewer barriers, which matters if ranks outnumber cores. A small one fits into
    # caches. Multiples of 64: no two ranks write to one line.
    return max(_STAGED_BYTES // ranks, 16 << 10) // 64 * 64


class HostCommunicator(Communicator[PeerCall]):
    """Ranks on one host that have mapped the same memory: a region of ``region_bytes`` for each,
    in which it has noted its process. The communicator closes it. A call is done when it returns;
    after an error it is unusable on every rank.
    """

    device_type = "cpu"

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        memory: SharedMemory,
        timeout: float,
    ) -> None:
        super().__init__(name, ranks, rank, timeout)
        world, size = len(ranks), region_bytes(len(ranks))
        self.one_shot_bytes = next(size for most, size in ONE_SHOT_BYTES if world <= most)
        regions = [memory.address + place * size for place in range(world)]
        self._peers = Peers.of(regions, rank, 1, _tile(world))
        self._outcome = Outcome()
        self._nanoseconds = nanoseconds(timeout)
        processes = [_open_process(memory.read_note(place)) for place in range(world)]
        self._processes = (ctypes.c_int * world)(*processes)
        # For callers that never close it. Not when the interpreter ends: a thread may still run in
        # this memory, and the system releases it.
        self._release = weakref.finalize(self, _release, memory, processes)
        self._release.atexit = False
        self._reduce = library().mp_peer_reduce
        # Of memory that this object keeps alive. Reading them takes as long as a small reduction.
        self._addresses = tuple(
            ctypes.addressof(one) for one in (self._peers, self._outcome, self._processes)
        )

    def __str__(self) -> str:
        return f"shared memory of {len(self.ranks)} ranks"

    def set_timeout(self, seconds: float) -> None:
        super().set_timeout(seconds)
        self._nanoseconds = nanoseconds(seconds)

    def abort(self) -> None:
        """End the call under way within some milliseconds, and refuse later ones."""
        self.alive = False
        # It does not wait for processes that have ended.
        self._processes[:] = [_ENDED] * self.size

    def close(self) -> None:
        with self._lock:
            self.alive = False
            self._release()

    def _prepare(self, key: CallKey) -> PeerCall:
        call = prepare_call(key, self.size, self.timeout)
        call.piece = self._peers.tile
        return call

    def _run(self, call: PeerCall, message: Tensor, out: Tensor, ticket: int) -> None:
        call.signature.words[CALL_WORD] = ticket
        peers, outcome, processes = self._addresses
        # A caller may hold a call from before ``set_timeout``.
        call.timeout_ns = self._nanoseconds
        fate = self._reduce(
            peers,
            ctypes.addressof(call),
            message.data_ptr(),
            out.data_ptr(),
            outcome,
            processes,
        )
        if fate != 0:
            self.alive = False
            check_aborted(f"rank {self.ranks[self._outcome.rank]}")
            raise self._error(self._outcome, call.signature)


def _release(memory: SharedMemory, processes: list[int]) -> None:
    memory.close()
    for descriptor in processes:
        if descriptor >= 0:
            os.close(descriptor)


def _open_process(number: int) -> int:
    try:
        return os.pidfd_open(number)
    except ProcessLookupError:
        return _ENDED
    except (OSError, AttributeError):
        # An older kernel, or one that does not allow it: only the timeout is left.
        return _UNKNOWN
