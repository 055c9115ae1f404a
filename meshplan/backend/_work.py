"""Works of the inner group, and reductions on GPUs, which the caller's thread issues on streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from meshplan._calls import GroupCalls, Ticket
from meshplan._torch.process_group import (
    ReceivingWork,
    end_coalescing,
    start_coalescing,
)
from meshplan._uncompiled import never_compiled
from meshplan.collectives._lanes import (
    SideStream,
    StreamWork,
    Work,
    run_in_mode,
    stopping,
)
from meshplan.errors import BackendError
from meshplan.flatten._create import hidden_device


@never_compiled
class PassedWork(ReceivingWork):
    """Calls of the inner group, as one work. ``finish`` runs once after them, on the thread that
    waits first; it may be called again. The future has what is ``written``.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        finish: Callable[[], None] | None = None,
        written: Any = None,
    ) -> None:
        super().__init__(works)
        self.finish, self._written = finish, written

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if not timeout else work.wait(timeout)
        if self.finish is not None:
            self.finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether all calls have ended. The results are then in the caller's tensors."""
        if not all(work.is_completed() for work in self._works):
            return False
        with suppress(Exception):
            # Raised again by wait.
            self.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        found = torch.futures.collect_all([work.get_future() for work in self._works])

        def finish(future: torch.futures.Future[Any]) -> Any:
            values = [one.value() for one in future.value()]
            if self.finish is not None:
                self.finish()
            return values if self._written is None else self._written

        return found.then(finish)


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Raise the version of tensors, as operators that write do: autograd refuses an old value. Call
    it when the reduction is issued: selective checkpointing keeps a result from then on, and
    refuses it if its version changes later, when another thread writes it.
    """
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)


def writable(tensor: Tensor) -> Tensor:
    """An alias without gradients; a write to it leaves the version of ``tensor`` as it is."""
    return tensor.data


Reduce = Callable[[dist.ProcessGroup, Ticket], object]
"""Reduces over the inner group for reductions, in a call."""


def in_caller_mode(run: Reduce, tensors: Sequence[Tensor]) -> Reduce:
    """``run`` on any thread, without gradients, where ``tensors`` can be written."""
    return partial(run_in_mode, run, any(tensor.is_inference() for tensor in tensors))


class DeviceLane:
    """The inner group and the side streams of one group for reductions on GPUs. Callers issue them,
    so they have an inner group that no thread of the group uses. It is created by the first one,
    with the last ``timeout``: most groups have none.
    """

    def __init__(
        self,
        create: Callable[..., ProcessGroup],
        timeout: timedelta,
        calls: GroupCalls,
    ) -> None:
        self._create, self._calls = create, calls
        self.timeout = timeout
        self.group: ProcessGroup | None = None
        self._streams: dict[torch.device, SideStream] = {}
        self._lock = threading.Lock()

    def find_group(self) -> ProcessGroup:
        """The inner group; every member calls this in its first reduction on a GPU. Raises
        BackendError if that is captured in a CUDA graph.
        """
        with self._lock:
            if self.group is None:
                if torch.cuda.is_current_stream_capturing():
                    raise BackendError(
                        "the first reduction of CUDA tensors in a group connects its ranks, which "
                        "a CUDA graph cannot capture; reduce once before the capture"
                    )
                # Torch would split the communicator of the default group, with all of its ranks.
                with hidden_device():
                    self.group = self._create(timeout=self.timeout)
            return self.group

    def side_stream(self, device: torch.device) -> SideStream:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = SideStream(device)
            return self._streams[device]

    def start(
        self, run: Callable[[], object], tensors: Sequence[Tensor], is_async: bool
    ) -> StreamWork:
        """Issue a reduction that writes ``tensors``, of one device, behind those that were issued
        before it. ``run`` refers to every tensor of it. Unless ``is_async``, errors are raised now.
        """
        call = self.side_stream(tensors[0].device).issue(partial(_run_stopping, run, self._calls))
        work = StreamWork(call, list(tensors), self._calls)
        if not is_async:
            work.wait()
        return work


class Coalescing:
    """A block of calls that NCCL launches at its end, and that run at once on CPUs. A reduction is
    several calls, each of which needs the result of the one before. It ends the block, and begins
    it again. Torch raises RuntimeError if the inner backend cannot coalesce calls.
    """

    def __init__(self, inner: Any, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self._launches = device.type != "cpu"
        self._works: list[dist.Work] = []
        self._has_failed = False
        self._open()

    def add(self, work: dist.Work) -> None:
        """End the block after a call of the inner group."""
        has_ended = isinstance(work, Work) and work.future is None
        if not (self._has_failed or has_ended):
            # Launched together, the calls have one work of the inner group.
            late = PassedWork([], work.finish) if isinstance(work, PassedWork) else None
            self._works += [work] if not self._launches else [] if late is None else [late]

    def interrupt(self, start: Callable[[], dist.Work]) -> dist.Work:
        """``start()``, with nothing coalesced."""
        self._close()
        try:
            work = start()
            self.add(work) if not self._launches else self._works.append(work)
            return work
        except BaseException:
            # Torch does not end a block on CPUs after an error: nothing is kept for its end.
            self._has_failed = not self._launches
            raise
        finally:
            self._open()

    def end(self) -> dist.Work | None:
        self._close()
        # What is written back comes after the works of the inner group.
        works = sorted(self._works, key=lambda work: isinstance(work, PassedWork))
        return PassedWork(works) if len(works) > 1 else next(iter(works), None)

    def _open(self) -> None:
        if self._launches:
            start_coalescing(self._inner, self._device)

    def _close(self) -> None:
        work = end_coalescing(self._inner, self._device) if self._launches else None
        if work is not None:
            self._works.append(work)


def _run_stopping(run: Callable[[], object], calls: GroupCalls) -> None:
    with stopping(calls):
        run()
