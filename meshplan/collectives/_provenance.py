"""What was asked, what was planned, what really ran, and why. Kept per process, bounded.

Equal events are counted, not listed. Nothing here decides anything.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

__all__ = [
    "MAX_RECORDS",
    "Event",
    "Report",
    "Source",
    "clear_report",
    "count_untouched",
    "record",
    "report",
]

MAX_RECORDS = 1024


@dataclass(frozen=True, slots=True)
class Event:
    """One kind of thing that happened.

    Attributes:
        asked: the redistribution, as placements on a mesh.
        planned: the step, or why there is none.
        ran: the path that ran, e.g. ``exchange``; ``torch`` where meshplan stood aside.
        sends: the backend operations of the path, by name.
        group: the process group, or an empty string.
        dtype: of the tensor, or an empty string.
        why: the reason for ``ran``.
        fallback: whether ``ran`` is less than what the policy asked for.
    """

    asked: str
    planned: str
    ran: str
    sends: tuple[str, ...]
    group: str
    dtype: str
    why: str
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """What a collective is run for: ``asked``, ``planned`` and ``group`` of its events."""

    asked: str
    planned: str
    group: str


@dataclass(slots=True)
class _Tally:
    count: int = 0
    elements: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """The events of this process with their tallies. ``str(report)`` is for people.

    Attributes:
        entries: JSON-ready dicts, oldest first: the event's fields, ``count`` (times it ran),
            ``elements`` (sum of the elements reduced) and ``seconds`` (host time until the path
            returned; a device may still be busy).
        dropped: kinds of events that were forgotten because there were more than ``MAX_RECORDS``.
        untouched: redistributions with nothing to plan: no axis to reduce, or under policy
            ``fast`` a single step. Only counted; short by a few where threads count together.
    """

    entries: tuple[dict[str, Any], ...]
    dropped: int
    untouched: int

    @property
    def fallbacks(self) -> tuple[dict[str, Any], ...]:
        """Entries that ran as less than what the policy asked for."""
        return tuple(entry for entry in self.entries if entry["fallback"])

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {
            "entries": list(self.entries),
            "dropped": self.dropped,
            "untouched": self.untouched,
        }

    def __str__(self) -> str:
        if not self.entries and not self.untouched:
            return "meshplan has not seen a redistribution"
        lines = []
        for entry in self.entries:
            mark = "FALLBACK " if entry["fallback"] else ""
            sends = " + ".join(entry["sends"]) or "nothing sent"
            lines.append(f"{entry['count']} x {entry['asked']} {entry['dtype']}".rstrip())
            lines.append(f"    planned: {entry['planned']}")
            if entry["ran"] == "torch":
                lines.append(f"    left to torch: {entry['why']}")
                continue
            lines.append(f"    {mark}ran: {entry['ran']} ({sends}): {entry['why']}")
            if entry["group"]:
                lines.append(
                    f"    on: {entry['group']}; {entry['elements']} elements, "
                    f"{entry['seconds']:.3f} s"
                )
        if self.dropped:
            lines.append(f"({self.dropped} older kinds of events were dropped)")
        if self.untouched:
            lines.append(f"{self.untouched} x nothing to plan, left to torch")
        return "\n".join(lines)


class _Log:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._tallies: OrderedDict[Event, _Tally] = OrderedDict()
        self._dropped = 0
        # Counted without the lock, for it is on the path of everything that meshplan leaves alone.
        self.untouched = 0

    def add(self, event: Event, elements: int, seconds: float) -> None:
        with self._lock:
            tally = self._tallies.get(event)
            if tally is None:
                tally = self._tallies[event] = _Tally()
                if len(self._tallies) > self._limit:
                    self._tallies.popitem(last=False)
                    self._dropped += 1
            tally.count += 1
            tally.elements += elements
            tally.seconds += seconds

    def snapshot(self) -> Report:
        with self._lock:
            entries = tuple(
                {name: getattr(event, name) for name in Event.__slots__}
                | {"count": t.count, "elements": t.elements, "seconds": t.seconds}
                for event, t in self._tallies.items()
            )
            return Report(entries=entries, dropped=self._dropped, untouched=self.untouched)

    def clear(self) -> None:
        with self._lock:
            self._tallies.clear()
            self._dropped = 0
            self.untouched = 0


_LOG = _Log(MAX_RECORDS)


def record(event: Event, *, elements: int = 0, seconds: float = 0.0) -> None:
    """Count one event."""
    _LOG.add(event, elements, seconds)


def count_untouched() -> None:
    """Count one redistribution in which there was nothing to plan."""
    _LOG.untouched += 1


def report() -> Report:
    """What this process has seen so far. ``print(meshplan.report())``."""
    return _LOG.snapshot()


def clear_report() -> None:
    """Forget what was recorded."""
    _LOG.clear()
