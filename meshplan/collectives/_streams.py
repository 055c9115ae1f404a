"""The side streams of a device: calls that run concurrently with the caller's stream.

The caller's thread issues them, so that their order is the order of its calls and a CUDA graph can
hold them. Events order the streams; nothing here makes the host wait for the device, except
``StreamCall.block``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

# Calls of one stream whose memory is held; far more than a host is ahead of its device.
MAX_HELD = 512
_POLL_SECONDS = 0.0005


class StreamCall:
    """A call on the side stream ``side``."""

    def __init__(
        self,
        side: SideStream,
        origin: Any,
        end: Any,
        held: Any,
        found: Any,
        failure: Any,
    ) -> None:
        # The caller's stream at the call, an event behind the call, and the object that keeps
        # tensors alive that the device may still use.
        self.side, self._origin, self._end, self._held = side, origin, end, held
        # The returned value, or the error that was raised instead.
        self.found, self.failure = found, failure

    @property
    def holds_memory(self) -> bool:
        """Whether it keeps the tensors of the call alive."""
        return self._held is not None

    def wait(self) -> Any:
        """Order the current stream of the device behind the call; returns that stream."""
        side = self.side
        stream = side.module.current_stream(side.device)
        stream.wait_event(self._end)
        if stream == self._origin:
            # What the caller frees from now on is reused behind the call.
            self._held = None
        return stream

    def is_done(self) -> bool:
        """Whether the device has finished the call; an error while a graph captures it."""
        return bool(self._end.query())

    def release(self) -> None:
        """Let go of memory: without a wait if the call is done, else behind it."""
        if self._held is not None and not self.is_done():
            self._origin.wait_event(self._end)
        self._held = None

    def block(self, timeout: timedelta) -> bool:
        """Make the host wait; returns whether the call was done within ``timeout``."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.is_done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    @contextmanager
    def behind(self) -> Iterator[None]:
        """The current stream is one on which this call has ended."""
        side = self.side
        with side.module.device(side.device), side.module.stream(side.stream):
            yield


class SideStream:
    """A stream of a device with an index, and the calls on it whose memory is held."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device)
        self.stream = self.module.Stream(device)
        # A callback of a call may issue another one.
        self._lock = threading.RLock()
        self._calls: deque[StreamCall] = deque()

    def issue(self, run: Callable[[], Any]) -> StreamCall:
        """Call ``run`` on this stream, behind all work of the current one; it issues work on the
        current stream. ``run`` refers to every tensor of the caller that the work reads or writes.
        Returns the call, also if ``run`` has raised an error.
        """
        module, found, failure = self.module, None, None
        with self._lock, module.device(self.device):
            origin = module.current_stream(self.device)
            captured = self.is_captured()
            if not captured:
                self._sweep()
            self.stream.wait_stream(origin)
            with module.stream(self.stream):
                try:
                    found = run()
                except Exception as error:
                    failure = error
                end = module.Event()
                end.record(self.stream)
            call = StreamCall(self, origin, end, run, found, failure)
            # A capture without a wait for the call is an error, and until then the caller has it.
            if not captured:
                self._calls.append(call)
        return call

    def is_captured(self) -> bool:
        """Whether a graph captures the current stream of the device."""
        with self.module.device(self.device):
            return bool(self.module.is_current_stream_capturing())

    def held(self) -> int:
        """How many calls hold memory."""
        return sum(call.holds_memory for call in self._calls)

    def _sweep(self) -> None:
        """Forget calls that have ended; of too many, the oldest."""
        calls = self._calls
        while calls and (not calls[0].holds_memory or calls[0].is_done()):
            calls.popleft().release()
        while len(calls) >= MAX_HELD:
            calls.popleft().release()


_streams: dict[torch.device, SideStream] = {}
_lock = threading.Lock()


def side_stream_of(device: torch.device) -> SideStream:
    """The side stream of ``device`` for collectives that name no other."""
    with _lock:
        if device not in _streams:
            _streams[device] = SideStream(device)
        return _streams[device]
