"""The counter of this process's reductions, and the reduction that each thread is in.

Without a counter, each check costs one attribute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

_Result = TypeVar("_Result")

Extent = Literal["", "counted", "native", "fallback"]
"""What a thread is in the middle of: a reduction that is counted with all its parts, one that is
requested in the backend's own order, one of which the contract does not define the order, or none.
"""


class Source(NamedTuple):
    """More about a reduction, for observers of a job."""

    group: Any  # a process group, the groups of a step, or ranks
    tensors: Sequence[Any] = ()  # that an all-reduce overwrites, or that another backend got
    contract: str | None = None
    described: str | None = None  # the group, in words


class Origin(Protocol):
    def count(
        self,
        what: str,
        dtype: str,
        ranks: int,
        nbytes: int,
        seconds: float,
        *,
        source: Source | None = None,
    ) -> None:
        """Count a reduction, on any thread: bytes of this rank's summand, seconds of the host."""


class _Observing:
    """The hooks of the counter of reductions."""

    __slots__ = ("before", "falls_through", "keep", "observer")

    def __init__(self) -> None:
        # Called with the group and the device of a reduction that this thread is about to issue.
        self.before: Callable[[Any, Any], None] | None = None
        # Called with the step, groups, summand and result of a reduction under the contract.
        self.keep: Callable[[Any, Any, Any, Any], None] | None = None
        # Returns the caller of the reduction that this thread begins.
        self.observer: Callable[[], Origin] | None = None
        # Whether the frame of a redistribution runs a reduction that the policy leaves to torch.
        self.falls_through: Callable[[FrameType], bool] | None = None


class _ThisThread(threading.local):
    origin: Origin | None = None
    extent: Extent = ""


OBSERVING = _Observing()
_THREAD = _ThisThread()


def current_extent() -> Extent:
    return _THREAD.extent


def find_origin() -> Origin | None:
    if OBSERVING.observer is None:
        return None
    return OBSERVING.observer() if _THREAD.origin is None else _THREAD.origin


def count_contract(
    what: str,
    dtype: str,
    ranks: int,
    nbytes: int,
    seconds: float,
    source: Source,
) -> None:
    if _THREAD.extent != "counted" and (origin := find_origin()) is not None:
        origin.count(what, dtype, ranks, nbytes, seconds, source=source)


def within(extent: Extent, run: Callable[[], _Result]) -> _Result:
    """``run()``, which is all of such a reduction."""
    return _run(_THREAD.origin, extent, run)


def carry_origin(run: Callable[[], _Result]) -> Callable[[], _Result]:
    """``run``, to be called on another thread for the caller of this function."""
    origin = find_origin()
    return run if origin is None else partial(_run, origin, _THREAD.extent, run)


def _run(origin: Origin | None, extent: Extent, run: Callable[[], _Result]) -> _Result:
    before = _THREAD.origin, _THREAD.extent
    _THREAD.origin, _THREAD.extent = origin, extent
    try:
        return run()
    finally:
        _THREAD.origin, _THREAD.extent = before
