"""Two certificates or two reports, read from their files and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshplan._message_text import format_first
from meshplan.errors import PolicyError
from meshplan.run._chain import HEAD, OTHER_BITS, VERSION
from meshplan.run._verdict import format_head

# First words of tensors, in the order of a step.
_KINDS = ("value", "gradient", "parameter", "optimizer", "buffer")
_Place = tuple[int, int]  # step and optimizer


@dataclass(slots=True)
class _Certificate:
    path: str
    conditions: dict[str, Any] = field(default_factory=dict)
    # Words, link, and the list of tensors with their words, if known.
    links: dict[_Place, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        steps = [step for step, _ in self.links]
        last = {number: one["link"] for (_, number), one in self.links.items()}
        text = f"{self.path}: {self.conditions.get('world_size')} ranks, {len(steps)} links"
        if steps:
            text += f" of steps {min(steps)}-{max(steps)}, the last {', '.join(last.values())}"
        return text


def compare_files(first: str, second: str) -> tuple[str, int]:
    """The differences of two certificates or two reports, and the exit status: 0 same, 1 not the
    same, 2 unknown. Raises PolicyError for other files.
    """
    one, other = _read(first), _read(second)
    if isinstance(one, _Certificate) and isinstance(other, _Certificate):
        lines, status = _compare_certificates(one, other)
    elif isinstance(one, dict) and isinstance(other, dict):
        lines = _describe_report(first, one) + _describe_report(second, other)
        affected = [found["replicas"]["first_difference"] is not None for found in (one, other)]
        status = int(affected[0] != affected[1])
    else:
        raise PolicyError(
            f"{first} and {second} are a report and a certificate; compare two files of --report, "
            "or two of --certify"
        )
    return "\n".join(lines), status


def _describe_report(path: str, report: Mapping[str, Any]) -> list[str]:
    seconds = report["seconds_per_step"]
    time = "unknown" if seconds is None else f"{seconds:.3g} s"
    return [f"{path}: {format_head(report)}", f"  time per step: {time}"]


def _read(path: str) -> _Certificate | dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path[:200]}: cannot be read: {error}") from error
    try:
        if text.startswith(f'{{"{HEAD}": {VERSION},'):
            return _read_certificate(path, text)
        report = json.loads(text)
        if report["version"] == 1 and "first_difference" in report["replicas"]:
            return dict(report)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise PolicyError(
        f"{path[:200]}: is neither a report nor a certificate of version {VERSION}; pass a file "
        "that meshplan run wrote with --certify or --report"
    )


def _read_certificate(path: str, text: str) -> _Certificate:
    found, lists = _Certificate(path), dict[int, list[str]]()
    certified, split = set[str](), dict[int, set[str]]()
    # The last line of a job that was killed may be half of one.
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        record = json.loads(line)
        number = record.get("optimizer", 0)
        if "conditions" in record:
            found.conditions = record["conditions"]
        elif "certified" in record:
            lists[number] = record["certified"]
            refused = record["not_certified"]
            found.refused |= refused
            certified.update(lists[number])
            # Copies that once had the same bits.
            apart = {key for key, why in refused.items() if OTHER_BITS in why}
            split[number] = apart & certified
        elif "ended" in record:
            found.refused[f"steps of optimizer {number}"] = record["ended"]
        elif "link" in record:
            keys = lists[number]
            words = record.get("tensors", [None] * len(keys))
            record["tensors"] = dict(zip(keys, words, strict=True))
            record["split"] = split[number]
            found.links[record["step"], number] = record
    return found


def _compare_certificates(one: _Certificate, other: _Certificate) -> tuple[list[str], int]:
    lines = [one.describe(), other.describe()]
    # Other versions of meshplan may have other conditions.
    for name in dict.fromkeys((*one.conditions, *other.conditions)):
        pair = [part.conditions.get(name, "none") for part in (one, other)]
        if pair[0] != pair[1]:
            lines.append(f"condition {name}: {pair[0]} against {pair[1]}")
    for part in (one, other):
        shown = format_first([f"{key} ({why})" for key, why in part.refused.items()])
        lines += [f"not certified in {part.path}: {shown}"] if part.refused else []
    places = sorted(one.links.keys() & other.links.keys())
    pairs = {place: (one.links[place], other.links[place]) for place in places}
    unlike: set[str] = set()
    for place, (mine, theirs) in pairs.items():
        lists = mine["tensors"].keys() ^ theirs["tensors"].keys()
        unlike |= lists
        if _list_differing(mine, theirs) or (not lists and mine["words"] != theirs["words"]):
            return [*lines, f"differ: {_name_first(pairs, place)}"], 1
    if unlike or not pairs:
        why = f"certified in one of them only: {format_first(sorted(unlike))}"
        return [*lines, f"cannot compare: {why if unlike else 'no step is in both'}"], 2
    rest = max(len(one.links), len(other.links)) - len(pairs)
    tensors = {key for mine, _ in pairs.values() for key in mine["tensors"]}
    text = f"same: {len(pairs)} steps, {len(tensors)} tensors"
    return [
        *lines,
        text + f"; {rest} more steps are in one of them only" * bool(rest),
    ], 0


def _list_differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Tensors of both whose words differ, or whose copies differ in one."""
    pairs = [(k, one, theirs["tensors"].get(k)) for k, one in mine["tensors"].items()]
    found = {key for key, *two in pairs if None not in two and two[0] != two[1]}
    found |= mine["tensors"].keys() & theirs["split"]
    found |= theirs["tensors"].keys() & mine["split"]
    return sorted(found, key=lambda key: (_KINDS.index(key.split()[0]), key))


def _name_first(pairs: Mapping[_Place, Any], first: _Place) -> str:
    text = f"first at step {first[0]}"
    for place, (mine, theirs) in pairs.items():
        counts = place[1] == first[1] and place >= first
        if counts and (found := _list_differing(mine, theirs)):
            later = f"; at step {place[0]}, the next with words of tensors" * (place != first)
            return f"{text}{later}: {format_first(found)}"
    return f"{text}; no later step has words of each tensor: use --every 1 to name the tensor"
