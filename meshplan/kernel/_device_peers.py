"""Reductions by GPUs that reach each other's memory, on streams.

A call only starts a kernel. A kernel that gives up on a rank writes the reason to memory of the
host, and leaves NaNs (integers: all ones) in the result. The next call, and ``meshplan.check``,
raise it.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from torch import Tensor

from meshplan._calls import NO_TICKET
from meshplan.errors import GroupStateError, PolicyError
from meshplan.kernel._batches import STAGED_WAITING, Plan, plan_of
from meshplan.kernel._communicator import (
    LINE_BYTES,
    CallKey,
    Communicator,
    prepare_call,
)
from meshplan.kernel._device_code import Device, kernel_name
from meshplan.kernel._driver import Driver, DriverError
from meshplan.kernel._library import (
    MAX_BLOCKS,
    MAX_PEERS,
    DeviceCall,
    Failures,
    PeerCall,
    Peers,
    library,
)
from meshplan.kernel._transports import Regions
from meshplan.record import CALL_WORD

# As ONE_SHOT_BYTES, for GPUs that are linked by NVLink: of the published times of such kernels.
DEVICE_ONE_SHOT_BYTES = ((2, 1 << 20), (4, 512 << 10), (MAX_PEERS, 256 << 10))
LANES = 512
# Of all ranks' pieces of a block in a round. A region of 32 blocks has 48 MiB. Two_shot over 8
# ranks takes 6 MiB of a message in a round. To stage them takes longer than the wait that they
# cover.
_STAGED_BYTES = 192 << 10
# A word of 16 bytes for each lane that a block copies with to one of 8 peers.
_LEAST_PIECE = 1 << 10


class _Call(NamedTuple):
    words: DeviceCall
    kernel: int
    blocks: int


_communicators: weakref.WeakSet[DeviceCommunicator] = weakref.WeakSet()
_also: list[Callable[[], None]] = []


def check() -> None:
    """Raise the errors of reductions on GPUs that were started before, if there are any.

    These run asynchronously on streams. Without this call, the next reduction of the same ranks
    raises. It does not wait: synchronise first to see every error.

    Raises:
        PeerTimeoutError, SignatureMismatchError: as for a reduction.
    """
    for communicator in list(_communicators):
        communicator.check()
    for function in _also:
        function()


def register_check(function: Callable[[], None]) -> None:
    """Let ``check`` call ``function``, which raises errors found so far and does not wait."""
    _also.append(function)


def device_region_bytes(ranks: int, blocks: int) -> int:
    """Bytes of one rank's region in a group of ``ranks``, for kernels of at most ``blocks``;
    ``RuntimeError`` without the compiled library, with the reason.
    """
    return int(library().mp_peer_bytes(ranks, blocks, tile_bytes(ranks), 1))


def tile_bytes(ranks: int) -> int:
    """Bytes of a piece at most, of a group of ``ranks``."""
    return max(_STAGED_BYTES // ranks, 4 << 10) // 64 * 64


def share_out(longest: int, blocks: int, tile: int) -> tuple[int, int]:
    """Bytes of a piece, and how many of ``blocks`` have one; no part has more than ``longest``."""
    # As few rounds as tiles of so many bytes allow, and as many blocks as have a piece.
    rounds = max(-(-longest // (blocks * tile)), 1)
    lines = -(-longest // (rounds * blocks * LINE_BYTES))
    piece = min(max(lines * LINE_BYTES, _LEAST_PIECE), tile)
    return piece, min(max(-(-longest // piece), 1), blocks)


def device_call(call: PeerCall, plan: Plan) -> DeviceCall:
    """The call as kernels take it, in the order of ``plan``."""
    words = DeviceCall(
        timeout_ns=call.timeout_ns,
        starts=call.starts,
        divisor=call.divisor,
        signature=call.signature,
        mode=call.mode,
        item=call.item,
        piece=call.piece,
        chain=plan.chain,
    )
    words.plan[: len(plan.batches)] = plan.batches
    return words


class DeviceCommunicator(Communicator[_Call]):
    """Regions in the memory of GPUs, one for each rank. A call is under way when it returns.

    Calls are ordered as they are issued, and replays of graphs as they are launched, whatever the
    streams: see ``StreamOrder``. A graph that has captured calls must not be replayed after
    ``close``.

    After a failure every call raises it, on every rank, until ``meshplan.shutdown`` releases the
    groups: ranks see it at different calls, and must not reconnect by themselves.

    Args:
        device: this rank's.
        regions: all ranks', of ``device_region_bytes``, zeroed; the communicator closes them.
        blocks: at most, of a kernel: 1 to ``MAX_BLOCKS``, equal on all ranks. The device must be
            able to run all of them at once.
        lanes: of a block, 1 to 512.
        one_shot_bytes: as it was timed on this GPU; of published times if not given.
        name, ranks, rank, timeout: as for ``Communicator``.

    Raises:
        DriverError: the driver refuses events, or memory of the host.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        device: Device,
        regions: Regions,
        timeout: float,
        *,
        blocks: int = MAX_BLOCKS,
        lanes: int = LANES,
        one_shot_bytes: int | None = None,
    ) -> None:
        super().__init__(name, ranks, rank, timeout)
        self.device_type = device.type
        self._device = device
        self._regions = regions
        self._lanes = lanes
        self._one_shot_bytes = one_shot_bytes
        self._peers = Peers(world=self.size, rank=rank, blocks=blocks, tile=tile_bytes(self.size))
        self._peers.region[: self.size] = regions.addresses
        with device.driver.current():
            self._order = StreamOrder(device.driver)
            self._shared = device.driver.host_malloc(ctypes.sizeof(Failures))
        self._failures = Failures.from_address(self._shared)
        self._in = ctypes.c_void_p()
        self._out = ctypes.c_void_p()
        _communicators.add(self)

    def __str__(self) -> str:
        return f"memory of {self.size} GPUs"

    @property
    def one_shot_bytes(self) -> int:
        if self._one_shot_bytes is not None:
            return self._one_shot_bytes
        return next(size for most, size in DEVICE_ONE_SHOT_BYTES if self.size <= most)

    def check(self) -> None:
        """Raise the error that a kernel has reported, if there is one."""
        with self._lock:
            if self.alive:
                self._raise_failure()

    def close(self) -> None:
        """Wait for the last call or replay and release the memory. A second call does nothing."""
        # If the device is not done in time, the memory stays until the process ends.
        with self._lock:
            if not self.alive:
                return
            self.alive = False
            if not self._idle():
                return
            self._regions.close()
            driver = self._device.driver
            # A device that is lost, or another process's, has taken these along.
            with suppress(DriverError), driver.current():
                self._order.close()
                driver.host_free(self._shared)

    def _idle(self) -> bool:
        driver = self._device.driver
        deadline = time.monotonic() + self.timeout
        with suppress(DriverError), driver.current():
            while not self._order.idle():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        return True

    def _prepare(self, key: CallKey) -> _Call:
        call = prepare_call(key, self.size, self.timeout)
        longest = call.starts[0]
        if key.mode != "one_shot":
            longest = max(call.starts[p + 1] - call.starts[p] for p in range(self.size))
        # All ranks must launch the same number of blocks. It follows from shape, dtype and mode,
        # which signatures compare.
        call.piece, blocks = share_out(longest, self._peers.blocks, self._peers.tile)
        plan = plan_of(key.how.order, tuple(call.shape[: call.axes]) or (1,))
        if plan is None or plan.waiting > STAGED_WAITING:
            raise PolicyError(
                f"order {key.how.order!r} over axes of {list(key.how.shape)} does not fit the "
                "kernels for GPUs; write path='exchange'"
            )
        words = device_call(call, plan)
        with self._device.driver.current():
            kernel = self._device.kernel(kernel_name(key.dtype, key.how.op, key.how.contract))
        return _Call(words, kernel, blocks)

    def _run(self, call: _Call, message: Tensor, out: Tensor, ticket: int) -> None:
        index = message.device.index
        if index is not None and index != self._device.driver.index:
            raise GroupStateError(
                f"the {self} is that of {self._device.type}:{self._device.driver.index} on this "
                f"rank, the tensor is on {message.device}; pass tensors of one device only"
            )
        self._raise_failure()
        driver, stream = self._device.driver, self._device.stream()
        # A graph would replay the ticket of its capture: there the kernel's own count of its calls,
        # which lies in device memory, pairs the replays of all ranks.
        captured = driver.capture(stream) is not None
        call.words.signature.words[CALL_WORD] = NO_TICKET if captured else ticket
        self._in.value, self._out.value = message.data_ptr(), out.data_ptr()
        given = (self._peers, call.words, self._in, self._out, ctypes.c_void_p(self._shared))
        arguments = (ctypes.c_void_p * len(given))(*[ctypes.addressof(one) for one in given])
        # A launch copies its parameters, so that the next call may reuse these.
        with driver.current(), self._order.turn(stream):
            driver.launch(call.kernel, call.blocks, self._lanes, stream, arguments)

    def _raise_failure(self) -> None:
        # The kernel stores `any` last, with release at system scope: once it is not 0, the outcome
        # is complete.
        failed = self._failures.any
        if failed == 0:
            return
        failure = self._failures.of[failed - 1]
        raise self._error(
            failure.outcome,
            failure.mine,
            "Call meshplan.shutdown on every rank, and these ranks reconnect",
        )


class StreamOrder:
    """The order of one communicator's calls on one device, whatever their streams and graphs.

    Two calls of one rank must not overlap, and all ranks must run them in one order. One stream
    keeps that order by itself. Between streams events keep it: ``last`` covers the last call that
    was issued or replayed, ``inside`` the last one in the capture under way. Every method expects
    the driver to be current.

    * A call outside graphs waits for the last one, if that was on another stream, or may have been
      part of a graph, which can be replayed on any.
    * In a graph, the first call waits for ``last`` as it is when the graph is launched. Each call
      records it, so that later calls and graphs wait for the whole of the replay.
    * Inside a capture, a call on another stream waits for the call before it. A capture cannot wait
      for events recorded outside, hence ``inside``.

    Raises:
        DriverError: the driver refuses events.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._last = driver.event()
        self._inside = driver.event()
        # Of the last call outside graphs.
        self._stream: int | None = None
        # Of the last call in a graph, and the graphs before.
        self._capture: int | None = None
        self._captured_stream: int | None = None
        self._earlier: set[int] = set()

    @contextmanager
    def turn(self, stream: int) -> Iterator[None]:
        """Launch inside this, on a stream that may be captured: after all calls before.
        ``GroupStateError`` if the order cannot be kept in this capture; nothing was launched.
        """
        driver = self._driver
        capture = driver.capture(stream)
        if capture is None:
            if self._capture is not None or self._stream not in (None, stream):
                driver.wait(self._last, stream)
            yield
            driver.record(self._last, stream)
            self._stream = stream
            return
        self._refuse(capture)
        try:
            if capture != self._capture:
                driver.wait_external(self._last, stream)
            elif stream != self._captured_stream:
                driver.wait(self._inside, stream)
            yield
            driver.record_external(self._last, stream)
            # Behind the record, so that the last one of a replay is that of its last call.
            driver.record(self._inside, stream)
        except DriverError as error:
            raise GroupStateError(
                f"a reduction cannot be captured in this graph: {error}; reduce outside the graph, "
                "or take the path exchange there"
            ) from error
        if self._capture not in (None, capture):
            self._earlier.add(self._capture)
        self._capture, self._captured_stream = capture, stream

    def idle(self) -> bool:
        """Whether all calls and all replays that were launched are done."""
        return self._driver.is_done(self._last)

    def close(self) -> None:
        """Release the events."""
        self._driver.destroy_event(self._last)
        self._driver.destroy_event(self._inside)

    def _refuse(self, capture: int) -> None:
        if not self._driver.has_external_events:
            raise GroupStateError(
                "this driver cannot record events in graphs, so that a captured reduction would "
                "overlap others of the same ranks; reduce outside the graph, or take the path "
                "exchange there"
            )
        if capture in self._earlier:
            raise GroupStateError(
                "two graphs that capture reductions of the same ranks are captured at the same "
                "time, which leaves no order between the calls; capture them sequentially"
            )
