"""A reduce-scatter under way whose result belongs into a tensor of the caller's."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshplan.collectives import Work

__all__ = ["ShardWork"]


class ShardWork(dist.Work):
    """Writes the result to ``output`` once, when it is known to be there.

    Args:
        work: its result has as many elements as ``output``.
        output: not to be touched before ``wait`` has returned.
    """

    def __init__(self, work: Work, output: Tensor) -> None:
        super().__init__()
        self._work = work
        self._output = output
        self._written = False
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As ``Work.wait``; then ``output`` holds the result."""
        self._work.wait(timeout)
        with self._lock:
            if not self._written:
                self._output.copy_(self._work.result().view(self._output.shape))
                self._written = True
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return, or raise, at once. If so, the result is written now."""
        done = self._work.is_completed()
        if done and self._work.is_success():
            # Whoever polls may never wait.
            self.wait()
        return done

    def is_success(self) -> bool:
        """Whether it has finished and not failed."""
        return self._work.is_success()

    def exception(self) -> Any:
        """What it has failed with, or ``None``; waits for it."""
        return self._work.exception()

    def result(self) -> list[Tensor]:
        """``[output]``; waits for it."""
        self.wait()
        return [self._output]

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()
