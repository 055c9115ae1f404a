"""Memory of GPUs that the processes of one host reach: by CUDA or HIP IPC, or as torch shares it.

A member that cannot take part reports why, and the whole group tries the next transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from meshplan._torch import (
    SymmetricMemory,
    symmetric_memory_rendezvous,
)
from meshplan.kernel._device_code import Device
from meshplan.kernel._driver import DriverError

# Smaller allocations may be parts of a block, of which other processes would map the whole.
_ALIGNMENT = 2 << 20

# Sends a text to all members and returns theirs, in group order; ``TransportError`` without them.
Exchange = Callable[[str], Sequence[str]]
# Reports to all members that this one has unmapped theirs; whether all of them did so in time.
Farewell = Callable[[], bool]


class TransportError(RuntimeError):
    """Memory could not be shared. Not raised to users: it is the reason for another path.
    ``regions`` are those made so far, to be closed when all members know.
    """

    def __init__(self, message: str, regions: Regions | None = None) -> None:
        super().__init__(message)
        self.regions = regions


class Regions:
    """Memory of all members; ``addresses`` of the regions in this process, in group order."""

    def __init__(self, addresses: tuple[int, ...], release: Callable[[], None]) -> None:
        self.addresses = addresses
        self._release: Callable[[], None] | None = release

    def close(self) -> None:
        """Release the memory; no call is under way. A second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Ipc:
    """Memory that the driver allocates for us, so that no allocator's settings matter."""

    name = "IPC"  # in the report

    def open(
        self,
        device: Device,
        nbytes: int,
        rank: int,
        exchange: Exchange,
        farewell: Farewell,
    ) -> Regions:
        """Zeroed regions of ``nbytes`` for all members, who call this together; ``rank`` is this
        rank's place among them. ``TransportError`` if not on this machine, or a member was missing.
        """
        driver = device.driver
        try:
            with driver.current():
                own = driver.malloc(-(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        except DriverError as error:
            raise TransportError(f"{nbytes} bytes of its device: {error}") from error
        mapped: list[int] = []

        def release() -> None:
            # A lost device, or another process's, has released its memory already.
            with suppress(DriverError), driver.current():
                while mapped:
                    driver.unmap(mapped.pop())
                # To free memory that others have mapped is undefined; then the process keeps it.
                if farewell():
                    driver.free(own)

        regions = Regions((own,), release)
        try:
            with driver.current():
                handles = exchange(driver.share(own).hex())
                for place, handle in enumerate(handles):
                    if place != rank:
                        mapped.append(driver.map(bytes.fromhex(handle)))
        except (DriverError, TransportError) as error:
            raise TransportError(str(error), regions) from error
        regions.addresses = (*mapped[:rank], own, *mapped[rank:])
        return regions


@dataclass(frozen=True, slots=True)
class Symmetric:
    """torch's symmetric memory: allocated once for a communicator, never from a pool.
    ``group_name`` is torch's name for the process group.
    """

    # The signal pad is not used: torch's own operators have their protocol there.
    group_name: str
    name = "symmetric memory"

    def open(
        self,
        device: Device,
        nbytes: int,
        rank: int,
        exchange: Exchange,
        farewell: Farewell,
    ) -> Regions:
        # torch exchanges handles itself, hence neither `exchange` nor `farewell`.
        where = torch.device(device.type, device.driver.index)
        try:
            tensor = SymmetricMemory.empty_strided_p2p(
                (nbytes,), (1,), torch.uint8, where, self.group_name
            )
            tensor.zero_()
            with device.driver.current():
                device.driver.synchronize()
            handle = symmetric_memory_rendezvous(tensor, self.group_name)  # type: ignore[arg-type]
            addresses = tuple(int(address) for address in handle.buffer_ptrs)
        except (DriverError, RuntimeError) as error:
            raise TransportError(str(error).splitlines()[0]) from error
        if addresses[rank] != tensor.data_ptr():
            raise TransportError("torch's symmetric memory begins elsewhere than its tensor")
        held = [tensor, handle]
        return Regions(addresses, held.clear)


Transport = Ipc | Symmetric
