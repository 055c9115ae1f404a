"""What ranks post about their steps, compared by rank 0. Pure: messages in, questions out.

A rank posts two words for each set of tensors that the same ranks hold, which is named by these and
by names, dtypes and shapes of the tensors. After a difference rank 0 asks one rank of each class
for the words of the tensors, for those of blocks of the first that differs, and for some blocks.

Rank 0 holds the posts of a step until the last holder has posted: 300 kB for 1,000 ranks with 1,000
tensors in two sets. Beyond ``HELD_POSTS`` it drops the oldest steps of a set. At most ``ASKED``
ranks answer, with 100 bytes for each tensor and ``VALUE_BYTES`` of elements.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from meshplan._bits import tensor_of
from meshplan._message_text import format_first, format_runs
from meshplan.errors import Divergence, Elements
from meshplan.replicas._comparison import (
    Difference,
    advise,
    format_elements,
)
from meshplan.run._chain import Chain
from meshplan.run._words import format_words
from meshplan.topology._reading import group_values

HELD_POSTS = 400_000  # some 60 MB
ASKED = 8
VALUE_BYTES = 64 << 10
KINDS = ("gradient", "parameter", "optimizer state")
"""In the order of a step, after which the first difference is chosen."""

Message = dict[str, Any]
Search = Generator[tuple[list[int], Message], list[Message], None]


class _Gone(Exception):
    """A rank does not keep any more what a question is about."""


@dataclass(slots=True)
class _TensorSet:
    """Tensors of the same holders."""

    kind: str
    tensors: int
    ranks: tuple[int, ...] = ()  # empty until the first of them has posted
    compared: int = 0
    last: int = 0  # step that was compared
    pending: dict[int, dict[int, str]] = field(default_factory=dict)  # by step and rank
    posted: set[int] = field(default_factory=set)  # ranks


class Ledger:
    """The posts of the ranks of a job, by rank and by set of tensors."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.hellos: dict[int, Message] = {}
        self.finals: dict[int, Message] = {}
        self.taken: dict[int, dict[str, int]] = {}
        self.sets: dict[str, _TensorSet] = {}
        self.probes: dict[tuple[Any, ...], dict[int, Message]] = {}  # by members, and by rank
        self.chain = Chain(world_size)
        self.first: Message | None = None
        self.refused: Message | None = None  # what first stopped a rank, under ``--require``
        self._held = 0  # posts of steps that not all holders have posted
        self._place = (0, 0)
        self._search: Search | None = None
        # Asks holders, about a difference, for the reductions before it, and fills a record.
        self.find_wrong_sums: Callable[[list[list[int]], Message, Message], Search] | None = None
        self._question: Message = {}
        self._answers: dict[int, Message | None] = {}

    def add(self, rank: int, message: Message) -> list[tuple[int, Message]]:
        """Read one message of a rank; returns ranks, and a question for each."""
        if "hello" in message:
            self.hellos[rank] = message["hello"]
        if "final" in message:
            self.finals[rank] = message["final"]
            self.chain.advance(self.finals.keys())
        if "refused" in message:
            self.refused = self.refused or {"rank": rank} | message["refused"]
        if "probe" in message:
            one = message["probe"]
            # Several groups may have the same ranks.
            key = one["name"], one["backend"], *one["ranks"]
            self.probes.setdefault(key, {})[rank] = one
        taken = self.taken.setdefault(rank, {})
        taken.update(message.get("taken", {}))
        questions = []
        if "shares" in message:
            names = [name for post in message["shares"] for name in post.get("sets", ())]
            taken |= dict.fromkeys((str(message["unit"]), *names), message["step"])
            for post in message["shares"]:
                questions += self._add_post(rank, message["step"], post)
            if message["link"] is not None:
                self.chain.add(rank, message, self.finals.keys())
        if "answer" in message and message["answer"] == self._question.get("ask"):
            self._answers[rank] = message
            if None not in self._answers.values():
                questions += self._continue([one for one in self._answers.values() if one])
        return questions

    def _add_post(self, rank: int, step: int, post: Message) -> list[tuple[int, Message]]:
        questions = []
        for name, ranks in post.get("sets", {}).items():
            one = self.sets.setdefault(name, _TensorSet(post["kind"], post["tensors"]))
            one.ranks = one.ranks or tuple(ranks)
            one.posted.add(rank)
            words = one.pending.setdefault(step, {})
            self._held += rank not in words
            words[rank] = format_words(post["words"][0])
            while self._held > HELD_POSTS and len(one.pending) > 1:
                self._held -= len(one.pending.pop(min(one.pending)))
            if one.ranks and len(words) == len(one.ranks):
                questions += self._compare(name, one, step, words)
        return questions

    def _compare(
        self,
        name: str,
        one: _TensorSet,
        step: int,
        words: Mapping[int, str],
    ) -> list[tuple[int, Message]]:
        # The posts of a rank come in order: no earlier step is completed any more.
        for other in [other for other in one.pending if other <= step]:
            self._held -= len(one.pending.pop(other))
        one.compared += 1
        before, one.last = one.last, step
        classes = _classes_of(words)
        place = (step, KINDS.index(one.kind))
        if len(classes) == 1 or (self.first is not None and self._place <= place):
            return []
        self._place = place
        self._search = self._locate(name, one, step, before, classes)
        return self._continue(None)

    def _continue(self, answers: list[Message] | None) -> list[tuple[int, Message]]:
        assert self._search is not None
        gone = answers is not None and any("gone" in one for one in answers)
        try:
            search: Any = self._search
            ranks, question = search.throw(_Gone()) if gone else search.send(answers)
        except (StopIteration, _Gone):
            ranks, question = [], {}
        self._question = question | {"ask": self._question.get("ask", 0) + 1}
        self._answers = dict.fromkeys(ranks)
        return [(rank, self._question) for rank in ranks]

    def _locate(
        self,
        name: str,
        one: _TensorSet,
        step: int,
        before: int,
        classes: list[list[int]],
    ) -> Search:
        """Find the first tensor that differs, and its elements."""
        first = self.first = {
            "step": step,
            "kind": one.kind,
            "tensor": f"one of {one.tensors} tensors",
            "ranks": {"agree": classes},
            **dict.fromkeys(("tensors", "elements", "of", "largest", "cause", "text")),
        }
        about: Message = {"set": name, "step": step}
        with suppress(_Gone):
            yield from self._find_elements(one, first, about, classes)
        if self.find_wrong_sums is not None:
            first["sums"] = {"since": before}
            classes = first["ranks"]["agree"]
            yield from self.find_wrong_sums(classes, about | {"kind": one.kind}, first["sums"])

    def _find_elements(
        self,
        one: _TensorSet,
        first: Message,
        about: Message,
        classes: list[list[int]],
    ) -> Search:
        agreed = one.compared > 1
        asked = [members[0] for members in classes[:ASKED]]
        answers = yield asked, about | {"what": "tensors"}
        rows = _find_differing([found["words"] for found in answers])
        if not rows:
            return
        reduced = answers
        # In the optimizer's order.
        about["row"] = row = min(rows, key=answers[0]["order"].__getitem__)
        # Ranks that differ elsewhere may agree on this tensor.
        asked_classes = zip(classes, answers, strict=False)
        words = {rank: one["words"][row] for members, one in asked_classes for rank in members}
        classes = _classes_of(words)
        what = answers[0]["keys"][row].removeprefix(f"{one.kind} ")
        first |= {"tensor": what.rpartition(" ")[0], "tensors": len(rows)}
        first["ranks"] = {"agree": classes}
        self._conclude(first, what, classes, ())
        asked = [next(rank for rank in members if rank in asked) for members in classes]
        answers = yield asked, about | {"what": "blocks"}
        differing = _find_differing([found["blocks"] for found in answers])
        blocks = differing[: max(1, VALUE_BYTES // answers[0]["block_bytes"])]
        first |= {
            "of": answers[0]["numel"],
            "at_least": blocks != differing,
        }
        answers = yield asked, about | {"what": "values", "blocks": blocks}
        pairs = zip(asked[1:], answers[1:], strict=True)
        elements = [_compare_elements(rank, blocks, answers[0], other) for rank, other in pairs]
        self._conclude(first, what, classes, tuple(elements))
        cause = first["cause"]
        if cause == "order" or (agreed and cause == "never equal"):
            sums = [found["reduced"] for found in reduced]
            order = cause == "order"
            first["cause"] = _check_order(order, classes, sums, first["of"])

    def _conclude(
        self,
        first: Message,
        what: str,
        classes: list[list[int]],
        elements: tuple[Elements, ...],
    ) -> None:
        parts = tuple(map(tuple, classes))
        divergence = Divergence(first["tensor"], what, (), (), parts, (), elements)
        ulps = max(
            (one.max_ulps for one in elements if one.max_ulps is not None),
            default=None,
        )
        lines = [f"step {first['step']}: {first['kind']} {what} differs"]
        for members in parts:
            found = next((one for one in elements if one.rank in members), None)
            text = format_elements(found, divergence.reference) if found else "the reference"
            lines.append(f"{format_ranks(members)}: {text}" if elements else format_ranks(members))
        first["text"] = "\n".join(lines)
        first["elements"] = max((one.count for one in elements), default=None)
        first["largest"] = None if ulps is None else f"{ulps} ulp"
        first["cause"] = advise((divergence,), "")[0]

    def find_clear(self, gone: Set[int] = frozenset()) -> set[int]:
        """Ranks that have ended and of which rank 0 needs nothing more; ``gone`` post nothing."""
        silent = gone | self.finals.keys()
        needed = {rank for rank, answer in self._answers.items() if answer is None}
        # Any rank may have a leaf.
        if self.find_wrong_sums is not None and needed - gone:
            return set()
        for one in self.sets.values() if self.finals else ():
            holders = set(one.ranks or range(self.world_size))
            for words in one.pending.values():
                # Other steps are never completed.
                needed |= set() if holders - words.keys() <= silent else words.keys()
        return self.finals.keys() - needed

    def describe_steps(self) -> Message:
        """``steps`` of the report."""
        taken = {rank: max(self.taken[rank].values(), default=0) for rank in sorted(self.taken)}
        compared = max((one.compared for one in self.sets.values()), default=0)
        unequal = []
        for name, one in self.sets.items():
            # A rank may hold them in a set of another name.
            held = [rank for rank in one.ranks if rank in one.posted or not taken.get(rank)]
            counts = {rank: self.taken.get(rank, {}).get(name, 0) for rank in held}
            ended = set(one.ranks) <= set(self.finals)
            if one.kind == "parameter" and ended and len(set(counts.values())) > 1:
                unequal.append(
                    {
                        "tensors": one.tensors,
                        "taken": group_by_value(counts),
                    }
                )
        return {
            "taken": {str(rank): count for rank, count in taken.items()},
            "unequal": unequal,
            "compared": compared,
            "not_compared": max(0, max(taken.values(), default=0) - compared),
        }

    def describe_probes(self) -> list[Message]:
        """``probes`` of the report: siblings, which have one label, are one row."""
        siblings: dict[tuple[Any, ...], list[list[Message]]] = {}
        for (_, backend, *ranks), found in self.probes.items():
            if found.keys() == set(ranks):
                key = found[ranks[0]]["group"], len(ranks), backend
                siblings.setdefault(key, []).append([found[rank] for rank in ranks])
        rows = []
        for (group, size, backend), groups in siblings.items():
            words = [{one["words"] for one in members} for members in groups]
            agree = len(set.union(*words)) == 1
            changes = [one["size_changes_bits"] for members in groups for one in members]
            rows.append(
                {
                    "group": group,
                    "group_size": size,
                    "backend": backend,
                    "groups": len(groups),
                    # The first member looks for them. Other bits are those of another contract.
                    "contracts": groups[0][0]["contracts"] if agree else [],
                    "size_changes_bits": any(changes),
                    "members_agree": all(len(one) == 1 for one in words),
                    "siblings_agree": agree,
                }
            )
        return rows

    def find_unposted(self) -> list[str]:
        """Sets that were never compared, because their holders have other lists of tensors."""
        return [
            f"{one.tensors} tensors: {format_ranks(sorted(one.posted))} posted "
            f"their list, and not all of {format_ranks(one.ranks or (0,))}"
            for one in self.sets.values()
            if not one.compared and one.posted != set(one.ranks)
        ]


def group_by_value(values: Mapping[int, Any]) -> dict[str, list[int]]:
    """Ranks by their value as text."""
    return group_values((str(values[rank]), rank) for rank in sorted(values))


def format_ranks(ranks: Iterable[int]) -> str:
    """``ranks 0-3, 6``."""
    runs = format_runs(ranks)
    one = len(runs) == 1 and "-" not in runs[0]
    return f"rank{'' if one else 's'} {format_first(runs)}"


def _classes_of(words: Mapping[int, str]) -> list[list[int]]:
    """Ranks by their words: the largest class first, of equally large ones that of the lowest."""
    return sorted(
        group_by_value(words).values(),
        key=lambda members: (-len(members), members[0]),
    )


def _find_differing(columns: list[list[str]]) -> list[int]:
    """Rows in which the columns differ."""
    rows = enumerate(zip(*columns, strict=True))
    return [row for row, words in rows if len(set(words)) > 1]


def _check_order(
    order: bool,
    classes: list[list[int]],
    sums: list[list[tuple[list[int], bool, int, int]]],
    numel: int,
) -> str | None:
    """The cause by reductions between the classes. ``not reduced``: some had the tensor's size
    before the step, and none in it. ``order``: one of the step may have had another order. Sums
    by other means leave it open.
    """
    now = before = 0
    may_vary = False
    for found in sums:
        # Of some groups the ranks are not known.
        between = [one for one in found if not one[0] or _is_between(classes, one[0])]
        now = max(now, sum(elements for *_, elements, _ in between))
        before = max(before, sum(elements for *_, elements in between))
        may_vary |= any(varies and elements for _, varies, elements, _ in between)
    if now < numel:
        return "not reduced" if before >= numel else None
    return "order" if order and may_vary else None


def _is_between(classes: list[list[int]], ranks: list[int]) -> bool:
    return sum(not set(ranks).isdisjoint(members) for members in classes) > 1


def _compare_elements(rank: int, blocks: list[int], reference: Message, other: Message) -> Elements:
    """The elements of the blocks that differ on two ranks, as far as they were sent."""
    dtype, found = getattr(torch, reference["dtype"]), Difference()
    like = torch.empty(reference["shape"], dtype=dtype, device="meta")
    values = zip(blocks, reference["values"], other["values"], strict=True)
    for block, theirs, mine in values:
        pair = [tensor_of(base64.b64decode(text)) for text in (theirs, mine)]
        found.add_piece(pair[0], pair[1], block * reference["block_bytes"], like)
    return Elements(rank=rank, numel=reference["numel"], **asdict(found))
