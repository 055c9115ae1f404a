"""Spans: what meshplan does, and when, in torch's profiler and in Nsight.

A span is a ``record_function`` while a profiler is active, and an NVTX range once CUDA is
initialised. Otherwise it is next to nothing.
"""

from __future__ import annotations

from contextlib import (
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import TYPE_CHECKING

import torch

from meshplan._torch import disable_current_modes, profiler_enabled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

_NOTHING = nullcontext()


def span(*words: str) -> AbstractContextManager[None]:
    profiled = profiler_enabled()
    on_cuda = torch.cuda.is_initialized()
    if not profiled and not on_cuda:
        return _NOTHING
    return _span(f"meshplan::{' '.join(words)}", profiled, on_cuda)


@contextmanager
def _span(name: str, profiled: bool, on_cuda: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if on_cuda:
            # A torch that was built without NVTX says so with this error.
            with suppress(RuntimeError):
                torch.cuda.nvtx.range_push(name)
                stack.callback(torch.cuda.nvtx.range_pop)
        if profiled:
            recorded = torch.profiler.record_function(name)
            # It is an operator of torch: modes that trace or count operators must not see it.
            with disable_current_modes():
                recorded.__enter__()
            stack.callback(_leave, recorded)
        yield


def _leave(recorded: torch.profiler.record_function) -> None:
    with disable_current_modes():
        recorded.__exit__(None, None, None)
