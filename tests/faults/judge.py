"""The judge of ``random_faults``: reads what was observed, runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from tests.doors import Result, expected_words
from tests.faults.random_faults import Case, Entry, Observation

KINDS = {
    "wrong": "a call returned something else than the reduction of that call",
    "hung": "a rank did not end",
    "crashed": "a rank ended otherwise than by the fault",
    "silent": "an error names no rank and gives no reason",
    "unnoticed": "a call returned although a rank had other arguments in it",
    "went on": "a group reduced after an error that stops it",
    "lost": "a call failed that no fault concerns",
}
# Errors of which the connections or the memory of a group are left unusable.
_STOPPING = ("MP504", "MP702")
# Why an error names no rank: it is this rank's own, or nothing is known of the others.
_REASONS = re.compile(
    r"\bthis (rank|process|thread)\b|\bthread '|\bthe store\b|\ball of its ranks report it\b"
    r"|\blook for a rank\b"
)


class Verdict(NamedTuple):
    """A fault of meshplan: its kind, and where it shows."""

    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind} ({KINDS[self.kind]}): {self.where}"


def judge(seen: Observation) -> list[Verdict]:
    """What is wrong with an observation; nothing if the list is empty."""
    return [*_judge_ends(seen), *_judge_entries(seen), *_judge_recovery(seen)]


def explains(result: Result) -> bool:
    """Whether an error names a rank, or says why it cannot."""
    # Codes below 500 are mistakes in a call, which the caller has made.
    mistake = result.code != "" and result.code < "MP500"
    reason = result.names_a_rank() or _REASONS.search(result.text) is not None
    return result.error == "Interrupted" or mistake or (result.code != "" and reason)


def _judge_ends(seen: Observation) -> Iterator[Verdict]:
    for rank, end in enumerate(seen.ends):
        killed = seen.case.fault.startswith("killed") and rank == seen.case.odd
        if end.startswith("hangs"):
            yield Verdict("hung", f"rank {rank} {end}")
        elif end not in (("killed", "returned") if killed else ("returned",)):
            yield Verdict("crashed", f"rank {rank} {end}")


def _judge_entries(seen: Observation) -> Iterator[Verdict]:
    case = seen.case
    for rank, entries in enumerate(seen.entries):
        stopped: dict[int, Result] = {}
        for entry in entries:
            result = entry.result
            where = f"rank {rank} call {entry.call} on group {entry.group} {entry.how}".rstrip()
            if result.words is None:
                # An inner backend that serves such a call has errors of its own.
                inner = case.door == "backend" and entry.how in ("integers", "sparse")
                if not inner and not explains(result):
                    yield Verdict("silent", f"{where}: {result.error}: {result.text}")
                if result.code in _STOPPING:
                    stopped.setdefault(entry.group, result)
                continue
            if entry.how or result.words != expected(case, entry.call, entry.group):
                yield Verdict("wrong", f"{where}: {_read_calls(case, result.words)}")
            if entry.group in stopped and entry.call < case.calls:
                yield Verdict("went on", f"{where}, after {stopped[entry.group].text}")
        if case.mismatched and any(entry.how for entry in seen.entries[case.odd]):
            # Not a second try, which has the same arguments on all ranks.
            tries = [entry for entry in entries if entry.call == case.at][:1]
            if tries and tries[0].result.words is not None:
                yield Verdict("unnoticed", f"rank {rank} call {case.at}")


@cache
def expected(case: Case, call: int, group: int) -> tuple[int, ...]:
    """The bits of a call."""
    return expected_words(
        call,
        group,
        case.world,
        numel=case.numel_of(call),
        dtype=case.torch_dtype,
        op=case.op,
        contract=case.contract,
    )


def _read_calls(case: Case, words: tuple[int, ...]) -> str:
    width = {4: torch.int32, 8: torch.int64}[case.torch_dtype.itemsize]
    value = torch.tensor(words[:1], dtype=width).view(case.torch_dtype).tolist()
    return f"the first element is {value[0] if value else None}, {case.op} over {case.world} ranks"


def _judge_recovery(seen: Observation) -> Iterator[Verdict]:
    """Calls that must be right on every rank, in one of their tries."""
    case = seen.case
    for call in _calls_that_must_be_right(seen):
        for rank, entries in enumerate(seen.entries):
            tries = [entry for entry in entries if entry.call == call]
            if not any(_is_right(case, entry) for entry in tries):
                last = tries[-1].result.text or "wrong" if tries else "not made"
                yield Verdict("lost", f"rank {rank} call {call}: {last}")


def _is_right(case: Case, entry: Entry) -> bool:
    return entry.result.words == expected(case, entry.call, entry.group)


def _calls_that_must_be_right(seen: Observation) -> Iterator[int]:
    case = seen.case
    if case.threads:
        yield from range(case.calls * case.groups)
    else:
        yield from range(case.at)
    if case.fault in ("none", "late in time"):
        yield from range(case.at, case.calls)
    # All ranks raise these in one call, and agree that the next ones are others.
    different_groups = case.fault == "contract" and case.first
    if case.mismatched and not different_groups:
        yield from range(case.at + (not case.retries), case.calls)
    # Late to a first reduction: all ranks have the same error for it. The backend may stop.
    late = case.fault in ("late", "stopped") and case.first and case.door != "backend"
    if late:
        yield from range(case.at + (not case.retries), case.calls)
    if case.fault.startswith("killed"):
        return
    broken = any(
        entry.result.code in _STOPPING or entry.result.error == "Interrupted"
        for entries in seen.entries
        for entry in entries
        if entry.group == 0
    )
    # Connections that gloo has closed stay closed: then only a new group reduces again.
    if case.ending == "group" or not (broken or (different_groups and case.door == "backend")):
        yield case.calls
