"""Reductions by processes of one host through memory that they share."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence

from torch import Tensor

from meshplan._aborts import check_aborted
from meshplan.kernel._communicator import CallKey, Communicator, nanoseconds, prepare_call
from meshplan.kernel._library import MAX_PEERS, Outcome, PeerCall, Peers, library
from meshplan.kernel._memory import SharedMemory
from meshplan.record import CALL_WORD

# Messages up to this many bytes go one-shot: (ranks, bytes), for groups of up to so many ranks.
# Measured with benchmarks/allreduce_cpu.py; it cannot change a bit.
ONE_SHOT_BYTES = ((2, 32 << 10), (4, 16 << 10), (MAX_PEERS, 4 << 10))

# All slots of the ranks of a core should fit into its second cache.
_STAGED_BYTES = 256 << 10
# In place of a descriptor.
_UNKNOWN, _ENDED = -1, -2


def region_bytes(ranks: int) -> int:
    """Bytes of one rank's region in a group of ``ranks``; ``RuntimeError`` without the compiled
    library, with the reason.
    """
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
        self, name: str, ranks: Sequence[int], rank: int, memory: SharedMemory, timeout: float
    ) -> None:
        super().__init__(name, ranks, rank, timeout)
        world, size = len(ranks), region_bytes(len(ranks))
        self._peers = Peers(world=world, rank=rank, blocks=1, tile=_tile(world))
        self._peers.region[:world] = [memory.address + place * size for place in range(world)]
        self._outcome = Outcome()
        self._nanoseconds = nanoseconds(timeout)
        processes = [_open_process(memory.read_note(place)) for place in range(world)]
        self._processes = (ctypes.c_int * world)(*processes)
        # Also where the caller never closes it; but not when the interpreter ends: a thread may
        # still be in there, and the system releases all of it.
        self._release = weakref.finalize(self, _release, memory, processes)
        self._release.atexit = False
        self._reduce = library().mp_peer_reduce
        # Of what lives as long as this object: a small reduction takes no longer than to ask again.
        self._addresses = tuple(
            ctypes.addressof(one) for one in (self._peers, self._outcome, self._processes)
        )

    def __str__(self) -> str:
        return f"shared memory of {len(self.ranks)} ranks"

    @property
    def one_shot_bytes(self) -> int:
        return next(size for most, size in ONE_SHOT_BYTES if self.size <= most)

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
            raise self._error(
                self._outcome,
                call.signature,
                "Call meshplan.shutdown on every rank, and these ranks reconnect",
            )


def _release(memory: SharedMemory, processes: list[int]) -> None:
    memory.close()
    for descriptor in processes:
        if descriptor >= 0:
            os.close(descriptor)


def _open_process(number: int) -> int:
    """A descriptor that reports the end of a process, as the library takes it."""
    try:
        return os.pidfd_open(number)
    except ProcessLookupError:
        return _ENDED
    except (OSError, AttributeError):
        # An older kernel, or one that does not allow it: only the timeout is left.
        return _UNKNOWN
