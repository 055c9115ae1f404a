"""The certificate of a job: a chain with one link for each step, made by rank 0 of posted words.

A link hashes the one before it, the step, the list of certified tensors and the sum of their
words. So it does not depend on shards, on placements or on the number of ranks. Copies of a tensor
that are not known to be replicas are certified while they have the same bits. Its file has lines
of JSON: a head with the conditions, lists of tensors, links, and at the end the conditions again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshplan._message_text import format_runs
from meshplan.run._words import format_words
from meshplan.topology._reading import group_values

Message = dict[str, Any]
HEAD = "meshplan certificate"
OTHER_BITS = "other bits, and no replicas are known"
VERSION = 2
# Steps that wait for a rank, before those that follow are given up.
_PENDING = 2000


# By rank and share, words and the count of their elements.
_Posts = dict[int, dict[str, tuple[Tensor, int]]]


@dataclass(slots=True)
class _Unit:
    """The steps of one optimizer."""

    pending: dict[int, _Posts] = field(default_factory=dict)
    reached: dict[int, float] = field(default_factory=dict)  # by rank, the last complete step
    listed: Message = field(default_factory=lambda: {"certified": [], "not_certified": {}})
    link: str = ""
    links: int = 0
    made: int = -1  # the last step that has been added up
    ended: str = ""


class Chain:
    """Links of a job's steps, by optimizer."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._records: list[Message] = []
        self._units: dict[int, _Unit] = {}
        self._keys: dict[str, list[str]] = {}  # by the first word of a share's name
        self._numels: dict[str, int] = {}  # of all their elements
        self._left: dict[str, str] = {}
        # Shares that only later replicas have declared, by optimizer and step.
        self._unnamed: dict[str, tuple[int, int]] = {}

    def add(self, rank: int, post: Message, ended: Set[int]) -> None:
        """Read what a rank posts for a step; ``ended`` post nothing more."""
        number, unit = post["link"], self._units.setdefault(post["unit"], _Unit())
        shares = [one for one in post["shares"] if one["name"]]
        for one in shares:
            about = one["name"].split()[0]
            if keys := one.get("keys"):
                self._unnamed.pop(about, None)
                self._keys[about] = keys
                self._numels[about] = sum(map(_count_elements, keys))
            elif "keys" in one and about not in self._keys:
                self._unnamed.setdefault(about, (post["unit"], number))
        self._left |= post["left"]
        if unit.ended:
            return
        # A rank posts its steps in order; one without shares posts no other.
        unit.reached[rank] = math.inf if post["idle"] else number
        mine = unit.pending.setdefault(number, {}).setdefault(rank, {})
        for one in shares:
            if (count := one["count"]) is not None:
                mine[one["name"]] = torch.tensor(one["words"], device="cpu"), count
        if number <= unit.made:
            unit.ended = f"rank {rank} posted step {number} after its link was made"
        elif len(unit.pending) > _PENDING:
            unit.ended = f"step {min(unit.pending)} was not posted by all ranks"
        self.advance(ended)

    def advance(self, ended: Set[int]) -> None:
        """Make the links of the steps that all ranks have posted."""
        for number, unit in self._units.items():
            while unit.pending and not unit.ended:
                first = min(unit.pending)
                done = {rank for rank, step in unit.reached.items() if step >= first}
                if len(done | ended) < self._world_size:
                    break
                # A rank that never posted may have no such optimizer.
                if stopped := (unit.reached.keys() & ended) - done:
                    shown = ", ".join(format_runs(stopped))
                    unit.ended = f"no step {first} on ranks {shown}"
                else:
                    unit.made = first
                    self._make_link(number, unit, first, unit.pending.pop(first))
            if unit.ended and unit.pending:
                unit.pending.clear()
                self._records.append({"optimizer": number, "ended": unit.ended})

    def _make_link(self, number: int, unit: _Unit, step: int, posts: _Posts) -> None:
        totals, reasons = self._add_up(posts)
        refused = {key: why for one, why in reasons.items() for key in self._keys.get(one, [one])}
        refused |= self._left
        why = "not listed by the first rank of their replicas"
        for one, (optimizer, since) in self._unnamed.items():
            if optimizer == number and since <= step:
                refused[f"tensors {one}"] = why
        keys = [key for one in totals for key in self._keys[one]]
        tables = [row for words in totals.values() for row in words[1:].tolist()]
        head: Message = {"optimizer": number, "step": step}
        listed = {"certified": sorted(keys), "not_certified": refused}
        if listed != unit.listed:
            unit.listed = listed
            self._records.append(head | listed)
        if not keys:
            return
        words = format_words(torch.stack([one[0] for one in totals.values()]).sum(0).tolist())
        text = "\n".join([f"{HEAD} {VERSION}", unit.link, str(step), words, *sorted(keys)])
        unit.link = hashlib.sha256(text.encode()).hexdigest()[:32]
        unit.links += 1
        record = head | {"words": words, "link": unit.link}
        if len(tables) == len(keys):
            record["tensors"] = [
                format_words(row) for _, row in sorted(zip(keys, tables, strict=True))
            ]
        self._records.append(record)

    def _add_up(self, posts: _Posts) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Words by list of tensors, and reasons why some are not certified."""
        shares = group_values((name, rank) for rank, words in posts.items() for name in words)
        names: dict[str, set[str]] = {}
        for one in {name.split()[0] for name in shares}:
            for key in self._keys.get(one, ()):
                names.setdefault(key.rpartition(" ")[0], set()).add(one)
        why = "ranks have other lists of tensors with the same name"
        reasons = {one: why for some in names.values() if len(some) > 1 for one in some}
        totals: dict[str, Tensor] = {}
        classes: dict[str, dict[str, list[int]]] = {}  # ranks by their words
        for name, ranks in shares.items():
            one, found = name.split()[0], [posts[rank][name] for rank in ranks]
            rows = min(len(words) for words, _ in found)
            total = torch.stack([words[:rows] for words, _ in found]).sum(0)
            if sum(count for _, count in found) != self._numels.get(one):
                shown = ", ".join(format_runs(ranks))
                reasons.setdefault(one, f"ranks {shown} posted a part of the elements, or copies")
            else:
                totals.setdefault(one, total)
                bits = format_words(total[0].tolist())
                classes.setdefault(one, {}).setdefault(bits, []).extend(ranks)
        for one, parts in classes.items():
            if len(parts) > 1:
                reasons.setdefault(one, _describe_copies(list(parts.values())))
        return {one: words for one, words in totals.items() if one not in reasons}, reasons

    def take_records(self) -> list[Message]:
        """The records since the last call."""
        found, self._records = self._records, []
        return found

    def describe(self) -> Message:
        """``certificate`` of the report."""
        units = self._units.values()
        refused = [one.listed["not_certified"] for one in units]
        return {
            "links": sum(one.links for one in units),
            "last": " ".join(one.link for one in units if one.links),
            "tensors": sum(len(one.listed["certified"]) for one in units),
            "not_certified": {key: why for some in refused for key, why in some.items()},
            "ended": [one.ended for one in units if one.ended],
        }


def _describe_copies(classes: list[list[int]]) -> str:
    """Why copies are not certified: of three, one that is odd is named."""
    *many, odd = sorted(classes, key=len, reverse=True)
    if len(many) == len(odd) == 1 < len(many[0]):
        return f"rank {odd[0]} holds {OTHER_BITS}"
    return f"ranks hold {OTHER_BITS}"


def _count_elements(key: str) -> int:
    """Of a tensor, whose shape ends its key."""
    sizes = key.rpartition("[")[2].removesuffix("]").split(",")
    return math.prod(int(size) for size in sizes if size)


class CertificateFile:
    """A certificate that is being written; a file that another process writes is left alone."""

    def __init__(self, path: str) -> None:
        self._path, self._rest, self._size = path, b"", 0
        self._descriptor: int | None = None  # -1: of another process

    def append(self, records: Sequence[Message], report: Mapping[str, Any]) -> None:
        """Add lines, the first time with a head, and an end if the report is the last one."""
        lines = list(records)
        conditions = {"conditions": _read_conditions(report)}
        if not self._size and not self._rest:
            lines.insert(0, {HEAD: VERSION} | conditions)
        if report["state"] != "running":
            lines.append({"end": report["state"]} | conditions)
        self._rest += "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        if self._descriptor is None:
            self._descriptor = _open_alone(self._path)
        if self._descriptor == -1:
            self._rest = b""
            raise OSError(f"another job is writing {self._path}; pass each job a file of its own")
        # A line that a full disk has cut goes on where it was cut.
        while self._rest:
            written = os.pwrite(self._descriptor, self._rest, self._size)
            self._size, self._rest = self._size + written, self._rest[written:]


def _open_alone(path: str) -> int:
    """The descriptor of a file that is empty now; -1 if another process writes it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # Not flock, whose locks children of the job keep that outlive it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        return -1
    except OSError:
        pass  # some file systems have no locks
    if os.fstat(descriptor).st_size:  # of a device: 0
        os.ftruncate(descriptor, 0)
    return descriptor


def _read_conditions(report: Mapping[str, Any]) -> Message:
    """The facts of a report that decide bits; compared, and no part of the chain."""
    names = ("world_size", "backend", "torch", "meshplan")
    found = {name: report[name] for name in names}
    found["hosts"] = sorted(len(ranks) for ranks in report["hosts"].values())
    found["meshes"] = [one["axes"] for one in report["meshes"]]
    settings = report["settings"] | report["settings_that_differ"]
    found |= {f"setting {name}": value for name, value in settings.items()}
    for row in report["reductions"]:
        call, size = row["call"].split()[0], row["group_size"]
        about = f"{call} of {row['dtype']} over {size} ranks"
        found[about] = row["contract"] or "outside the contract"
    return found
