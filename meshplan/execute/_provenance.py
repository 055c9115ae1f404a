"""Provenance: the request, the plan and the execution of each reduction. Per process, bounded.

Equal events are counted, not listed. Nothing here decides anything. The first event of its kind is
logged by the logger ``meshplan`` at level INFO (WARNING for a fallback), each later one at level
DEBUG, with the prefix ``[meshplan]``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from meshplan._dtypes import name_of
from meshplan._observing import OBSERVING, Source, count_contract

# The report of a process: entries as JSON-ready dicts, and as text for people.

SCHEMA_VERSION = 1
"""Of ``Report.to_json()``, where it is ``version``."""


@dataclass(frozen=True, slots=True)
class Report:
    """The events of this process with their tallies. ``str(report)`` is for people.

    Attributes:
        entries: JSON-ready dicts, oldest first; ``docs/provenance.md`` describes the keys.
        dropped: kinds of events that were forgotten because there were more than ``MAX_RECORDS``.
        untouched: redistributions with nothing to plan: no axis to reduce, or under policy
            ``fast`` a single step. Only counted; short by a few where threads count together.
    """

    entries: tuple[dict[str, Any], ...]
    dropped: int
    untouched: int

    @property
    def fallbacks(self) -> tuple[dict[str, Any], ...]:
        """Entries that ran by less than the policy requests."""
        return tuple(entry for entry in self.entries if entry["fallback"])

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; ``version`` grows when a key goes away or changes its meaning."""
        return {
            "version": SCHEMA_VERSION,
            "entries": [entry | {"sends": list(entry["sends"])} for entry in self.entries],
            "dropped": self.dropped,
            "untouched": self.untouched,
        }

    def __str__(self) -> str:
        if not self.entries and not self.untouched:
            return "meshplan has not seen a redistribution"
        lines = [line for entry in self.entries for line in _lines(entry)]
        if self.dropped:
            lines.append(f"({self.dropped} older kinds of events were dropped)")
        if self.untouched:
            lines.append(f"{self.untouched} x nothing to plan, fell through to PyTorch")
        return "\n".join(lines)


def _lines(entry: dict[str, Any]) -> Iterator[str]:
    mark = "FALLBACK " if entry["fallback"] else ""
    collective = "collective " if entry["kind"] == "collective" else ""
    yield f"{entry['count']} x {collective}{entry['asked']} {entry['dtype']}".rstrip()
    planned, why = entry["planned"], entry["why"]
    if planned != why:
        yield f"    planned: {planned}"
    if entry["ran"] == "torch":
        yield f"    {mark}fell through to PyTorch: {why}"
        return
    sends = " + ".join(entry["sends"]) or "nothing sent"
    if entry["ran"] == "all_gather":
        order = "nothing is added"
    elif entry["contract"]:
        order = f"contract {entry['contract']}"
    else:
        order = "in the backend's own order"
    # What the plan has said already is not said again.
    more = why.removeprefix(planned.partition(": ")[2]).removeprefix("; ")
    verb = "traced" if entry["traced"] else "ran"
    yield f"    {mark}{verb}: {entry['ran']} ({sends}), {order}{f': {more}' if more else ''}"
    if entry["group"]:
        yield f"    on: {entry['group']}"
    if entry["traced"]:
        yield "    what a graph does later is not counted"
        return
    audited = f", {entry['audited']} audited" if entry["audited"] else ""
    yield f"    {_sizes(entry)}, {entry['seconds']:.3f} s until it returned{audited}"


def _sizes(entry: dict[str, Any]) -> str:
    low, high = entry["smallest_elements"], entry["largest_elements"]
    each = f"{low}" if low == high else f"{low} to {high}"
    return f"{each} elements each, {format_bytes(entry['bytes'])} in all"


def format_bytes(nbytes: int) -> str:
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


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
            return f"{head}: {planned}fell through to PyTorch: {self.why}"
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
        audited: bool = False,
        groups: Any = None,
        written: Sequence[Tensor] = (),
    ) -> None:
        """Count one event, with the sizes of this rank's summand (``None``: unknown) and the host's
        seconds until the call returned. ``audited``: the call was compared with the reference.
        ``groups``, ``written``: group and tensors of ``Source``.
        """
        with self._lock:
            tally = self._tallies.get(event)
            first = tally is None
            if tally is None:
                tally = self._tallies[event] = _Tally()
                if len(self._tallies) > self._limit:
                    self._tallies.popitem(last=False)
                    self._dropped += 1
            tally.count += 1
            tally.audited += audited
            tally.seconds += seconds
            if elements is not None:
                tally.elements += elements
                tally.bytes += nbytes
                if tally.smallest_elements is None or elements < tally.smallest_elements:
                    tally.smallest_elements, tally.smallest_bytes = elements, nbytes
                if tally.largest_elements is None or elements > tally.largest_elements:
                    tally.largest_elements, tally.largest_bytes = elements, nbytes
        if first:
            _LOG.log(logging.WARNING if event.fallback else logging.INFO, "%s", event)
        else:
            _LOG.debug("%s", event)
        if OBSERVING.observer is not None and event.contract is not None and not event.traced:
            source = Source(groups, written, event.contract, event.group)
            count_contract(event.asked, event.dtype, event.ranks, nbytes, seconds, source)

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


# A caller adds to ``untouched``, redistributions with nothing to plan, without a lock and without a
# call: every redistribution pays.
COUNTERS = SimpleNamespace(untouched=0)
_EVENTS = _Events(MAX_RECORDS)
record = _EVENTS.add


def record_call(
    purpose: Purpose,
    tensors: Sequence[Tensor],
    started: float,
    ran: str,
    sends: tuple[str, ...],
    ranks: int,
    **why: Any,
) -> None:
    """Record a collective of tensors of one dtype that no ``BoundReduction`` has run, and that has
    ``started`` at this ``time.perf_counter``.
    """
    event = Event(
        purpose.request,
        purpose.planned,
        ran,
        sends,
        purpose.group,
        name_of(tensors[0].dtype),
        kind="collective",
        ranks=ranks,
        **why,
    )
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    record(
        event,
        elements=sum(tensor.numel() for tensor in dense),
        nbytes=sum(tensor.nbytes for tensor in dense),
        seconds=time.perf_counter() - started,
    )


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
