"""Check that words written through a mapping arrive in the memory of the peer.

Drivers report mappings between GPUs that do not work: in virtual machines, or where switches route
such traffic elsewhere. So a kernel of each rank writes a word, random and different for every peer,
to both ends of each peer's region. When all have written, each rank looks for the words in its own
memory and removes them. Plain stores check memory of the host in the same way.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from meshplan.kernel._communicator import LINE_BYTES
from meshplan.kernel._device_code import Device
from meshplan.kernel._device_peers import tile_bytes
from meshplan.kernel._driver import DriverError
from meshplan.kernel._library import DeviceCall, Peers

_WORD_BYTES = 16
_POLL_SECONDS = 0.0005
_KERNEL = "mp_probe"
_LANES = 64
# The default one: torch's current stream has nothing to do with it.
_STREAM = 0


def _word(seed: str, writer: int, reader: int) -> bytes:
    return hashlib.sha256(f"{seed} {writer} {reader}".encode()).digest()[:_WORD_BYTES]


def _places(nbytes: int, writer: int) -> tuple[int, int]:
    """Offsets of a writer's words in a region of ``nbytes``: near its start, and near its end."""
    return LINE_BYTES * writer, nbytes - LINE_BYTES * (writer + 1)


def lost_word(
    found: Sequence[Sequence[bytes]],
    seeds: Sequence[str],
    reader: int,
    ranks: Sequence[int],
) -> str | None:
    """The first word that did not arrive at the rank at ``reader``, as text; ``None`` if all did.
    ``found`` has, for each writer, the words at both places.
    """
    for writer, words in enumerate(found):
        expected = _word(seeds[writer], writer, reader)
        if writer == reader or set(words) == {expected}:
            continue
        wrong = next(one for one in words if one != expected)
        sent = f"what rank {ranks[writer]} wrote through its mapping of rank {ranks[reader]}'s "
        for other in range(len(ranks)):
            if wrong == _word(seeds[writer], writer, other):
                return (
                    f"{sent}memory went elsewhere: what it wrote for rank {ranks[other]} is there"
                )
        return f"{sent}memory did not arrive"
    return None


class HostProbe(NamedTuple):
    """Words between processes that map one memory; the region of place p is at ``addresses[p]``."""

    addresses: Sequence[int]
    rank: int
    nbytes: int

    def write(self, seed: str) -> None:
        for reader, address in enumerate(self.addresses):
            for place in _places(self.nbytes, self.rank):
                if reader != self.rank:
                    word = _word(seed, self.rank, reader)
                    ctypes.memmove(address + place, word, _WORD_BYTES)

    def take(self) -> list[list[bytes]]:
        """The words in this rank's region, by writer; then zeros them."""
        found = []
        for writer in range(len(self.addresses)):
            own = [self.addresses[self.rank] + p for p in _places(self.nbytes, writer)]
            found.append([ctypes.string_at(one, _WORD_BYTES) for one in own])
            for one in own:
                ctypes.memset(one, 0, _WORD_BYTES)
        return found


class DeviceProbe:
    """The same by a kernel of this rank's GPU, as reductions write and read, in regions for
    ``blocks``. ``wait`` is in seconds, with the work queued before the kernel.
    """

    def __init__(
        self,
        device: Device,
        addresses: Sequence[int],
        rank: int,
        blocks: int,
        wait: float,
    ) -> None:
        self._device = device
        self._peers = Peers.of(addresses, rank, blocks, tile_bytes(len(addresses)))
        self._wait = wait

    def write(self, seed: str) -> None:
        size = self._peers.world
        words = b"".join(_word(seed, self._peers.rank, reader) for reader in range(size))
        with self._staging(len(words)) as staging:
            ctypes.memmove(staging, words, len(words))
            self._launch(staging, None)

    def take(self) -> list[list[bytes]]:
        size = self._peers.world
        with self._staging(2 * size * _WORD_BYTES) as staging:
            self._launch(None, staging)
            words = [
                ctypes.string_at(staging + _WORD_BYTES * i, _WORD_BYTES) for i in range(2 * size)
            ]
        return [words[2 * writer : 2 * writer + 2] for writer in range(size)]

    @contextmanager
    def _staging(self, nbytes: int) -> Iterator[int]:
        """Memory of the host that the kernel reaches; kept if it may still be running."""
        # No `finally`: a kernel that timed out may write to it later.
        driver = self._device.driver
        with driver.current():
            staging = driver.host_malloc(nbytes)
            yield staging
            with suppress(DriverError):
                driver.host_free(staging)

    def _launch(self, source: int | None, target: int | None) -> None:
        driver = self._device.driver
        pointers = ctypes.c_void_p(source), ctypes.c_void_p(target), ctypes.c_void_p()
        given = (self._peers, DeviceCall(), *pointers)
        arguments = (ctypes.c_void_p * len(given))(*[ctypes.addressof(one) for one in given])
        event = driver.event()
        try:
            driver.launch(self._device.kernel(_KERNEL), 1, _LANES, _STREAM, arguments)
            driver.record(event, _STREAM)
            deadline = time.monotonic() + self._wait
            while not driver.is_done(event):
                if time.monotonic() > deadline:
                    raise DriverError(f"the kernel that checks a mapping took {self._wait:g} s")
                time.sleep(_POLL_SECONDS)
        finally:
            driver.destroy_event(event)
