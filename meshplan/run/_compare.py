"""Certificates and reports as files: written while a job runs, and two of them compared.

A certificate is a file of lines, each a JSON object: a head with the conditions; the tensors, when
their list changes; a link for each step; at the end the conditions again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshplan._message_text import format_first
from meshplan.errors import PolicyError
from meshplan.run._verdict import format_head

_HEAD = "meshplan certificate"
# First words of tensors, in the order of a step.
_KINDS = ("value", "gradient", "parameter", "optimizer", "buffer")
_Place = tuple[int, int]  # optimizer and step
_Links = dict[_Place, dict[str, Any]]


class CertificateFile:
    """A certificate that is being written."""

    def __init__(self, path: str) -> None:
        self._path, self._rest, self._size = Path(path), b"", 0

    def append(self, records: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> None:
        """Add lines, the first time with a head, and an end if the report is the last one."""
        lines: list[Mapping[str, Any]] = list(records)
        conditions = {"conditions": _read_conditions(report)}
        if not self._size and not self._rest:
            lines.insert(0, {_HEAD: 1} | conditions)
        if report["state"] != "running":
            lines.append({"end": report["state"]} | conditions)
        self._rest += "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        # A line that a full disk has cut is written again.
        with self._path.open("r+b" if self._size else "wb") as file:
            file.seek(self._size)
            file.write(self._rest)
        self._size, self._rest = self._size + len(self._rest), b""


def _read_conditions(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a report knows that decides bits; compared, and no part of the chain."""
    found = {name: report[name] for name in ("world_size", "backend", "torch", "meshplan")}
    found["hosts"] = sorted(len(ranks) for ranks in report["hosts"].values())
    found["meshes"] = [one["axes"] for one in report["meshes"]]
    reductions = {
        f"{row['call'].split()[0]} of {row['dtype']} over {row['group_size']} ranks": (
            row["contract"] or "outside the contract"
        )
        for row in report["reductions"]
    }
    settings = report["settings"] | report["settings_that_differ"]
    return found | {f"setting {name}": value for name, value in settings.items()} | reductions


@dataclass(slots=True)
class _Certificate:
    path: str
    conditions: dict[str, Any] = field(default_factory=dict)
    # By optimizer and step: words, link, and the list of tensors with their words, if known.
    links: _Links = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        steps = [step for _, step in self.links]
        last = {optimizer: one["link"] for (optimizer, _), one in self.links.items()}
        about = f"{self.path}: {self.conditions.get('world_size')} ranks, {len(steps)} links"
        if steps:
            about += f" of steps {min(steps)}-{max(steps)}, the last {', '.join(last.values())}"
        return about


def compare_files(first: str, second: str) -> tuple[str, int]:
    """What differs between two certificates or two reports, and the exit status: 0 same, 1 not the
    same, 2 unknown.

    Raises:
        PolicyError: a file cannot be read, or one is a report and the other one a certificate.
    """
    one, other = _read(first), _read(second)
    if isinstance(one, _Certificate) and isinstance(other, _Certificate):
        lines, status = _compare_certificates(one, other)
    elif isinstance(one, dict) and isinstance(other, dict):
        lines, status = _compare_reports((first, second), (one, other))
    else:
        raise PolicyError(
            f"{first} and {second} are a report and a certificate; compare two files of --report, "
            "or two of --certify"
        )
    return "\n".join(lines), status


def _read(path: str) -> _Certificate | dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path[:200]}: cannot be read: {error}") from error
    try:
        if text.startswith(f'{{"{_HEAD}"'):
            return _read_certificate(path, text)
        report = json.loads(text)
        if report["version"] == 1 and "first_difference" in report["replicas"]:
            return dict(report)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise PolicyError(
        f"{path[:200]}: is neither a certificate nor a report; pass a file that meshplan run wrote "
        "with --certify or --report"
    )


def _read_certificate(path: str, text: str) -> _Certificate:
    found, lists = _Certificate(path), dict[int, list[str]]()
    # The last line of a job that was killed may be half of one.
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        record = json.loads(line)
        if "conditions" in record:
            found.conditions = record["conditions"]
        elif "certified" in record:
            lists[record["optimizer"]] = record["certified"]
            found.refused |= record["not_certified"]
        elif "ended" in record:
            found.refused[f"steps of optimizer {record['optimizer']}"] = record["ended"]
        elif "link" in record:
            listed = lists[record["optimizer"]]
            tensors = dict(zip(listed, record.get("tensors", [None] * len(listed)), strict=True))
            found.links[record["optimizer"], record["step"]] = record | {"tensors": tensors}
    return found


def _compare_certificates(one: _Certificate, other: _Certificate) -> tuple[list[str], int]:
    lines = [one.describe(), other.describe()]
    lines += _list_conditions(one.conditions, other.conditions)
    for part in (one, other):
        shown = format_first([f"{key} ({why})" for key, why in part.refused.items()])
        lines += [f"not certified in {part.path}: {shown}"] if part.refused else []
    shift = _find_shift(one.links, other.links)
    if shift:
        lines.append(f"step {1 + shift} of {one.path} is step 1 of {other.path}")
    there = {(number, step + shift): link for (number, step), link in other.links.items()}
    places = sorted(one.links.keys() & there.keys(), key=lambda place: place[::-1])
    pairs = {place: (one.links[place], there[place]) for place in places}
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
    return [*lines, text + f"; {rest} more steps are in one of them only" * bool(rest)], 0


def _find_shift(one: _Links, other: _Links) -> int:
    """How many steps the second is behind. If an optimizer does not count its steps, those of a
    resumed job start at 1 again.
    """
    first = min(one.keys() & other.keys(), key=lambda place: place[::-1], default=None)
    if first is not None and one[first]["words"] == other[first]["words"]:
        return 0
    for part, whole, sign in ((other, one, 1), (one, other, -1)):
        for (number, step), link in whole.items():
            if part.get((number, 1), {}).get("words") == link["words"]:
                return sign * (step - 1)
    return 0


def _list_differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Tensors of both whose words are known and differ."""
    pairs = [(k, one, theirs["tensors"].get(k)) for k, one in mine["tensors"].items()]
    found = [key for key, *two in pairs if None not in two and two[0] != two[1]]
    return sorted(found, key=lambda key: _KINDS.index(key.split()[0]))


def _name_first(pairs: Mapping[_Place, Any], first: _Place) -> str:
    text = f"first at step {first[1]}"
    for place, (mine, theirs) in pairs.items():
        counts = place[0] == first[0] and place >= first
        if counts and (found := _list_differing(mine, theirs)):
            later = f"; at step {place[1]}, the next with words of tensors" * (place != first)
            return f"{text}{later}: {format_first(found)}"
    return f"{text}; no later step has words of each tensor: use --every 1 to name the tensor"


def _list_conditions(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """A line for each condition with two values; other versions of meshplan are one too."""
    return [
        f"condition {name}: {one.get(name, 'none')} against {other.get(name, 'none')}"
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name)
    ]


def _compare_reports(
    paths: tuple[str, str], reports: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> tuple[list[str], int]:
    """Verdicts and times per step, the first report above the second."""
    lines = []
    for path, report in zip(paths, reports, strict=True):
        lines.append(f"{path}: {format_head(report)}")
        outside = sum(not row["contract"] for row in report["reductions"])
        seconds = report["seconds_per_step"]
        time = "unknown" if seconds is None else f"{seconds:.3g} s"
        lines.append(f"  backend {report['backend']}, reductions outside the contract: {outside}")
        lines.append(f"  time per step: {time}")
    first, second = (report["seconds_per_step"] for report in reports)
    if first and second:
        lines.append(f"time per step: {second / first:.2f} of the first")
    lines += _list_conditions(*map(_read_conditions, reports))
    affected = [report["replicas"]["first_difference"] is not None for report in reports]
    return lines, int(affected[0] != affected[1])
