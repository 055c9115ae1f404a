"""Provenance: the request, the plan and the execution of each reduction. Per process, bounded.

Equal events are counted, not listed. Nothing here decides anything. The first event of its kind is
logged by the logger ``meshplan`` at level INFO (WARNING for a fallback), each later one at level
DEBUG, with the prefix ``[meshplan]``.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

from meshplan._observing import OBSERVING, count_contract
from meshplan.execute._report import Report

MAX_RECORDS = 1024
"""Kinds of events that a process keeps for its report; older ones are dropped and counted."""
_LOG = logging.getLogger("meshplan")

Kind = Literal["redistribution", "collective"]


@dataclass(frozen=True, slots=True)
class Event:
    """One kind of reduction or fallback. Its fields are keys of the report's JSON."""

    asked: str  # the requested redistribution, as placements on a mesh, or collective
    planned: str  # the step, or the reason why there is none
    ran: str  # the executed path, e.g. ``exchange``; ``torch``: fell through to PyTorch
    sends: tuple[str, ...]  # the collectives issued, by name
    group: str  # the process group, or an empty string
    dtype: str  # of the tensor, or an empty string
    why: str  # the reason for ``ran``
    fallback: bool = False  # whether ``ran`` is less than the policy requests
    kind: Kind = "redistribution"  # of ``asked``
    path: str = ""  # the requested path, e.g. ``auto``, or an empty string
    contract: str | None = None  # fixes the bits of ``ran``; ``None`` if they are not fixed
    ranks: int = 0  # how many reduce together; 0 where it fell through to PyTorch
    # In a simulation, or a compiled or captured graph, whose runs are not counted.
    traced: bool = False

    def __hash__(self) -> int:
        # Each reduction looks its event up: of 14 fields these differ most.
        return hash((self.asked, self.planned, self.ran, self.dtype))

    def __str__(self) -> str:
        what, _, _ = self.planned.partition(": ")
        mark = "fallback: " if self.fallback else ""
        head = f"[meshplan] {mark}{self.asked} {self.dtype}".rstrip()
        if self.ran == "torch":
            planned = "" if self.planned == self.why else f"{what}, "
            return f"{head}: {planned}left to torch: {self.why}"
        on = f" on {self.group}" if self.group else ""
        verb = "traced" if self.traced else "ran"
        return f"{head}: {what}; {verb} {self.ran} ({_sent(self.sends)}){on}: {self.why}"


@dataclass(frozen=True, slots=True)
class Purpose:
    """The request behind a collective, in the words of its events."""

    request: str  # the redistribution or the call
    planned: str  # the step of the plan
    group: str  # the axes or the group that it runs over
    kind: Kind = "redistribution"


class CollectiveLog:
    """Issues the collectives of one reduction, and lists their ``names`` in order. ``issue`` is the
    only way into the list, so every name is of a call that was made.
    """

    __slots__ = ("names",)

    def __init__(self) -> None:
        self.names: list[str] = []

    def issue(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """``collective(*arguments, **options)``, listed under the name that it has itself."""
        result = collective(*arguments, **options)
        name = collective.__name__
        self.names.append(_NAMES.get(name, name))
        return result


# One collective has one name, whether torch's function or the group's method issues it.
_NAMES = {
    "all_gather": "all_gather_into_tensor",
    "alltoall_base": "all_to_all_single",
}


@dataclass(slots=True)
class _Tally:
    count: int = 0
    audited: int = 0
    elements: int = 0
    smallest_elements: int | None = None
    largest_elements: int | None = None
    bytes: int = 0
    smallest_bytes: int | None = None
    largest_bytes: int | None = None
    seconds: float = 0.0

    def add(self, elements: int | None, nbytes: int, seconds: float, audited: bool) -> None:
        self.count += 1
        self.audited += audited
        self.seconds += seconds
        if elements is None:
            return
        self.elements += elements
        self.bytes += nbytes
        if self.smallest_elements is None or elements < self.smallest_elements:
            self.smallest_elements, self.smallest_bytes = elements, nbytes
        if self.largest_elements is None or elements > self.largest_elements:
            self.largest_elements, self.largest_bytes = elements, nbytes


class _Events:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._tallies: OrderedDict[Event, _Tally] = OrderedDict()
        self._dropped = 0

    def add(
        self,
        event: Event,
        elements: int | None = None,
        nbytes: int = 0,
        seconds: float = 0.0,
        *,
        audited: bool = False,
    ) -> None:
        with self._lock:
            tally = self._tallies.get(event)
            first = tally is None
            if tally is None:
                tally = self._tallies[event] = _Tally()
                if len(self._tallies) > self._limit:
                    self._tallies.popitem(last=False)
                    self._dropped += 1
            tally.add(elements, nbytes, seconds, audited)
        if first:
            _LOG.log(logging.WARNING if event.fallback else logging.INFO, "%s", event)
        else:
            _LOG.debug("%s", event)

    def snapshot(self) -> Report:
        with self._lock:
            entries = tuple(
                {name: getattr(event, name) for name in Event.__slots__}
                | {name: getattr(tally, name) for name in _Tally.__slots__}
                for event, tally in self._tallies.items()
            )
            return Report(entries=entries, dropped=self._dropped, untouched=COUNTERS.untouched)

    def clear(self) -> None:
        with self._lock:
            self._tallies.clear()
            self._dropped = 0
            COUNTERS.untouched = 0


class _Counters:
    """Counters that a caller adds to without a lock and without a call: every
    redistribution pays.
    """

    __slots__ = ("untouched",)

    def __init__(self) -> None:
        self.untouched = 0  # redistributions with nothing to plan


COUNTERS = _Counters()
_EVENTS = _Events(MAX_RECORDS)


def record(
    event: Event,
    *,
    elements: int | None = None,
    nbytes: int = 0,
    seconds: float = 0.0,
    audited: bool = False,
) -> None:
    """Count one event, with the sizes of this rank's summand (``None``: unknown) and the host's
    seconds until the call returned. ``audited``: the call was compared with the reference.
    """
    _EVENTS.add(event, elements, nbytes, seconds, audited=audited)
    if OBSERVING.observer is not None and event.contract is not None and not event.traced:
        count_contract(event.asked, event.dtype, event.ranks, nbytes, seconds)


@overload
def report(*, json: Literal[False] = False) -> Report: ...
@overload
def report(*, json: Literal[True]) -> dict[str, Any]: ...
def report(*, json: bool = False) -> Report | dict[str, Any]:
    """The events of this process so far. ``print(meshplan.report())``.

    Args:
        json: as a JSON-ready dict, ``Report.to_json()``.
    """
    found = _EVENTS.snapshot()
    return found.to_json() if json else found


def clear_report() -> None:
    """Forget all events."""
    _EVENTS.clear()


def _sent(sends: tuple[str, ...]) -> str:
    return " + ".join(sends) or "nothing sent"
