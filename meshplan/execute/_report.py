"""The report of a process: entries as JSON-ready dicts, and as text for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
        """A JSON-ready dict; ``version`` grows when a key goes away or changes its meaning."""
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
            lines.append(f"{self.untouched} x nothing to plan, left to torch")
        return "\n".join(lines)


def _lines(entry: dict[str, Any]) -> Iterator[str]:
    mark = "FALLBACK " if entry["fallback"] else ""
    collective = "collective " if entry["kind"] == "collective" else ""
    yield f"{entry['count']} x {collective}{entry['asked']} {entry['dtype']}".rstrip()
    planned, why = entry["planned"], entry["why"]
    if planned != why:
        yield f"    planned: {planned}"
    if entry["ran"] == "torch":
        yield f"    {mark}left to torch: {why}"
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
    """A number of bytes for people."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"
