"""Reductions of tensors on GPUs: issued by the caller's thread on side streams of the group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._calls import GroupCalls
from meshplan._torch.process_group import end_coalescing, start_coalescing
from meshplan.backend._work import PassedWork
from meshplan.collectives._lanes import SideStream, StreamWork, Work, stopping
from meshplan.errors import BackendError
from meshplan.flatten._create import hidden_device


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
        """The side stream of the group on a device."""
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
        call = self.side_stream(tensors[0].device).issue(partial(_run, run, self._calls))
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
        """The work of all calls; ``None`` if there were none."""
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


def _run(run: Callable[[], object], calls: GroupCalls) -> None:
    with stopping(calls):
        run()
