"""A mapping that does not lead to its peer's memory is found before any reduction relies on it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest

from meshplan import kernel
from meshplan.definition import reduce_leaves
from meshplan.flatten._connect import connect
from meshplan.flatten._join import members_of
from meshplan.kernel import (
    Device,
    DeviceCommunicator,
    HostCommunicator,
    Ipc,
    Regions,
    _device_peers,
)
from meshplan.kernel._host_peers import HEADER_BYTES
from meshplan.kernel._mapping_check import HostProbe, _word, lost_word
from tests.devices import (
    EMULATED,
    STAGED_BYTES,
    Emulated,
    Swapped,
    connect_ranks,
    have_equal_bits,
    reduce_peers,
)
from tests.inputs import draw_leaves
from tests.processes import run_ranks

pytestmark = EMULATED


def reduces(rank: int, size: int) -> bool:
    leaves = draw_leaves(size, 5_003)
    expected = reduce_leaves(leaves, "sum", (size,))
    return all(
        have_equal_bits(reduce_peers(leaves[rank], (size,), mode), expected)
        for mode in ("one_shot", "two_shot")
    )


@pytest.mark.parametrize("kind", ["cuda", "hip"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_lost_writes_are_found_and_the_next_transport_is_taken(
    size: int, kind: kernel.DriverKind
) -> None:
    """One rank's mappings keep what it writes. Every rank rejects them, for the same reason."""

    @dataclass(frozen=True)
    class Lossy(Ipc):
        name: str = "lossy"

        def open(
            self, device: Device, nbytes: int, rank: int, *more: Callable[..., object]
        ) -> Regions:
            if rank == size - 1:
                os.environ["EMULATED_LOST_WRITES"] = "1"
            try:
                return super().open(device, nbytes, rank, *more)  # type: ignore[arg-type]
            finally:
                os.environ.pop("EMULATED_LOST_WRITES", None)

    def ranks(rank: int) -> tuple[str, bool]:
        said = connect_ranks(
            Emulated(kind), range(size), transports=(Lossy(),), timeout=5.0, lanes=2
        )
        found = connect_ranks(
            Emulated(kind), range(size), transports=(Lossy(), Ipc()), timeout=20.0, lanes=2
        )
        assert isinstance(found, DeviceCommunicator), found
        return str(said), reduces(rank, size)

    found = run_ranks(ranks, size)
    assert [right for _, right in found] == [True] * size
    (said,) = {said for said, _ in found}
    # Whichever rank is the first to miss its word says so.
    assert said in {
        f"lossy: rank {reader}: what rank {size - 1} wrote through its mapping of rank {reader}'s "
        "memory did not arrive"
        for reader in range(size - 1)
    }


@pytest.mark.parametrize("writer", [0, 1, 2])
def test_swapped_mappings_are_found(writer: int) -> None:
    first, second = (r for r in range(3) if r != writer)

    def ranks(rank: int) -> str:
        transport = Swapped(rank=writer, peers=(first, second))
        return str(
            connect_ranks(Emulated(), range(3), transports=(transport,), timeout=5.0, lanes=2)
        )

    (said,) = set(run_ranks(ranks, 3))
    assert said in {
        f"swapped: rank {reader}: what rank {writer} wrote through its mapping of rank {reader}'s "
        f"memory went elsewhere: what it wrote for rank {other} is there"
        for reader, other in ((first, second), (second, first))
    }


def test_a_kernel_that_fails_is_the_reason_on_every_rank() -> None:
    def ranks(rank: int) -> str:
        device = Emulated()
        if rank == 1:
            device.kernel = lambda name: 0 if name == "mp_probe" else 1  # type: ignore[method-assign]
            device.driver.launch = refuse  # type: ignore[method-assign]
        return str(connect_ranks(device, range(3), transports=(Ipc(),), timeout=5.0))

    def refuse(*_: object) -> None:
        raise kernel.DriverError("no launch")

    assert run_ranks(ranks, 3) == ["IPC: rank 1: no launch"] * 3


def test_checked_memory_is_all_zero() -> None:
    """What the check has written could be taken for flags."""

    def ranks(rank: int) -> bool:
        found = connect_ranks(Emulated(), range(3), lanes=2)
        assert isinstance(found, DeviceCommunicator)
        own = found._regions.addresses[rank]
        with patch.object(_device_peers, "_STAGED_BYTES", STAGED_BYTES):
            size = kernel.device_region_bytes(3, 5)
        return ctypes.string_at(own, size) == bytes(size)

    assert run_ranks(ranks, 3) == [True] * 3


@pytest.mark.parametrize("size", [2, 3, 5])
def test_shared_memory_of_the_host_is_checked(size: int) -> None:
    """The last rank has mapped other memory than the rest."""

    def ranks(rank: int) -> list[str]:
        opened = kernel.SharedMemory.open
        if rank == size - 1:
            kernel.SharedMemory.open = other  # type: ignore[assignment, method-assign]
        members = members_of(None, tuple(range(size)), 20.0)
        said = []
        for name in ("one", "two"):
            found = connect(members, name, timeout=20.0)
            said.append("shared" if isinstance(found, HostCommunicator) else str(found))
            kernel.SharedMemory.open = opened  # type: ignore[method-assign]
        return said

    def other(handle: kernel.MemoryHandle) -> kernel.SharedMemory:
        return kernel.SharedMemory.create(handle.size - HEADER_BYTES)

    found = run_ranks(ranks, size)
    (first,) = {one for one, _ in found}
    assert "did not arrive" in first, first
    assert [two for _, two in found] == ["shared"] * size


def test_the_pair_of_ranks_is_named() -> None:
    ranks = (4, 9, 7)
    seeds: Sequence[str] = ("a", "b", "c")

    def found(reader: int) -> list[list[bytes]]:
        return [[_word(seeds[writer], writer, reader)] * 2 for writer in range(3)]

    assert lost_word(found(1), seeds, 1, ranks) is None
    half = found(1)
    half[2][1] = bytes(16)
    assert lost_word(half, seeds, 1, ranks) == (
        "what rank 7 wrote through its mapping of rank 9's memory did not arrive"
    )
    # An earlier attempt's words do not count.
    assert lost_word(found(1), ("a", "b", "d"), 1, ranks) is not None


def test_check_leaves_no_words_in_host_memory() -> None:
    memory = ctypes.create_string_buffer(3 * 1024)
    addresses = [ctypes.addressof(memory) + 1024 * place for place in range(3)]
    for rank in range(3):
        HostProbe(addresses, rank, 1024).write(f"seed {rank}")
    seeds = [f"seed {rank}" for rank in range(3)]
    for rank in range(3):
        found = HostProbe(addresses, rank, 1024).take()
        assert lost_word(found, seeds, rank, range(3)) is None
    assert memory.raw == bytes(3 * 1024)
