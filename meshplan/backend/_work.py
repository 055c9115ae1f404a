"""The work of a reduction, as torch's C++ and Python code wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from meshplan._calls import Ticket
from meshplan._torch.process_group import ReceivingWork


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
        """Wait for all calls, each no longer than ``timeout``."""
        for work in self._works:
            work.wait() if not timeout else work.wait(timeout)
        if self.finish is not None:
            self.finish()
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
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
        """A future of what the calls write."""
        found = torch.futures.collect_all([work.get_future() for work in self._works])

        def finish(future: torch.futures.Future[Any]) -> Any:
            values = [one.value() for one in future.value()]
            if self.finish is not None:
                self.finish()
            return values if self._written is None else self._written

        return found.then(finish)


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Raise the version of tensors, as operators that write do: autograd refuses an old value.

    Call it when the reduction is issued. Selective checkpointing keeps a result from then on, and
    refuses it if its version changes later, when another thread writes it.
    """
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def writable(tensor: Tensor) -> Tensor:
    """An alias without gradients; a write to it leaves the version of ``tensor`` as it is."""
    return tensor.data


Reduce = Callable[[dist.ProcessGroup, Ticket], object]
"""Reduces over the inner group for reductions, in a call."""


def in_caller_mode(run: Reduce, tensors: Sequence[Tensor]) -> Reduce:
    """``run`` on any thread, without gradients, where ``tensors`` can be written."""
    # Tensors of inference mode can be written to in that mode only, which is each thread's own.
    return partial(_run, run, any(tensor.is_inference() for tensor in tensors))


def _run(run: Reduce, inference: bool, group: dist.ProcessGroup, ticket: Ticket) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        run(group, ticket)
