"""``--keep-leaves``: which rank has a wrong sum, if replicas differ after a step.

After each all-reduce under the contract a rank keeps copies of its summand, which is a leaf of the
sum, and of the result. After a difference rank 0 compares the results of that step. Of the first
that differs it gets one block of leaves and results, and adds the leaves in the order of the
contract: a rank with other bits has a wrong sum. If all agree, the difference arose outside.
"""

from __future__ import annotations

import base64
import json
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import torch
from torch import Tensor

from meshplan._bits import bytes_of, element_text, flatten, tensor_of
from meshplan._dtypes import name_of
from meshplan._torch import disable_current_modes
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import MeshplanError
from meshplan.execute import StepGroups
from meshplan.kernel import integers
from meshplan.planner import Step
from meshplan.run._holders import Ranks
from meshplan.run._ledger import ASKED, VALUE_BYTES, Message, Search
from meshplan.run._words import find_words, format_words

STEPS = 64  # that rank 0 may ask about
CALLS = 20_000  # of a step; earlier ones are not counted
_LEAST_BYTES = 16  # of a gradient that is not found by chance
_NO_ROOM = "over the limit"


@dataclass(slots=True)
class _Call:
    """A reduction."""

    order: int  # among all of this rank
    key: tuple[Ranks, str, int]  # members, group, and number in the group
    lost: str  # why its leaves are not kept; empty if they are
    facts: Message  # the same on all ranks
    position: int = 0  # of this rank's leaf
    # The leaf and the result, flat.
    kept: tuple[Tensor, ...] = ()


class Leaves:
    """The reductions of this process, and leaves of the newest ones up to ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self.due = True  # whether the next step is compared
        self._calls: deque[_Call] = deque(maxlen=CALLS)
        self._kept: deque[_Call] = deque()
        self._numbers: Counter[tuple[Ranks, str]] = Counter()
        self._last = 0  # order
        self._ended: dict[int, int] = {}  # the last order before a step of an optimizer
        self._steps: dict[tuple[int, int], list[_Call]] = {}
        # A handler of a signal may reduce wherever the main thread is.
        self._lock = threading.RLock()

    def add(self, ranks: Ranks, lost: str, group: str = "") -> _Call:
        """Count a reduction. Those of a group have the same numbers on all of its ranks."""
        with self._lock:
            number = self._numbers[ranks, group]
            self._numbers[ranks, group] += 1
            self._last += 1
            call = _Call(self._last, (ranks, group, number), lost, {})
            self._calls.append(call)
        return call

    def keep(self, step: Step, groups: StepGroups, leaf: Tensor, result: Tensor | None) -> None:
        """Copy what a reduction has read and written, on the thread and stream that ran it."""
        both = [leaf] if result is None else [leaf, result]
        ranks, nbytes = tuple(sorted(groups.members)), sum(one.nbytes for one in both)
        # Blocks of ranks have groups of their own. Other ranks have no shard of a reduce-scatter.
        group = "" if groups.whole is None else groups.whole.group_name
        lost = _NO_ROOM if step.kind == "all_reduce" else step.kind
        lost = lost if result is not None else "still under way on a GPU"
        with self._lock, torch.no_grad(), torch.inference_mode(False), disable_current_modes():
            call = self.add(ranks, lost, group)
            if lost != _NO_ROOM or not self.due or nbytes > self._limit or step.contract is None:
                return
            while self._held + nbytes > self._limit:
                older = self._kept.popleft()
                self._held -= sum(one.nbytes for one in older.kept)
                older.lost, older.kept = _NO_ROOM, ()
            call.facts = {"op": step.op, "sizes": step.sizes, "divisor": step.divisor}
            call.facts |= {"dtype": name_of(leaf.dtype), "shape": list(leaf.shape)}
            call.facts |= {"contract": step.contract.id}
            call.kept = tuple(flatten(one.detach().clone()) for one in both)
            call.position, call.lost = groups.position, ""  # there was memory for both
            self._kept.append(call)
            self._held += nbytes

    def end(self, unit: int, step: int, *, ended: bool) -> None:
        """Note that the reductions since the last step of an optimizer belong to this one."""
        with self._lock:
            before = self._ended.get(unit, 0)
            newest = takewhile(lambda one: one.order > before, reversed(self._calls))
            self._steps[unit, step] = list(newest)[::-1]
            if ended:
                self._ended[unit] = self._last
            for at in list(self._steps)[:-STEPS]:
                del self._steps[at]

    def answer(self, question: Message, at: tuple[int, int], gradient: Tensor | None) -> Message:
        """The answer to a question of ``find_wrong_sums`` about the step ``at`` of an optimizer,
        whose ``gradient`` differs; empty if what it needs has gone.
        """
        with self._lock:
            calls, newest = self._steps.get(at, []), list(self._kept)
        if question["what"] == "leaves":
            ranks, *rest = question["call"]
            call = next((one for one in newest if one.key == (tuple(ranks), *rest)), None)
            if call is None or not (kept := call.kept):
                return {}
            leaf, result = (bytes_of(_split(one)[question["block"]]) for one in kept)
            texts = {"leaf": leaf, "result": result}
            found = {name: base64.b64encode(data).decode() for name, data in texts.items()}
            return found | {"position": call.position}
        # Those of which several holders have the result, or of unknown ranks.
        holders, lost, sums = {*question["ranks"]}, Counter[str](), list[Message]()
        shared = (one for one in calls if not one.key[0] or len(holders & {*one.key[0]}) > 1)
        for number, call in enumerate(shared, 1):
            if not (kept := call.kept):  # another thread may drop it
                lost[call.lost] += 1
                continue
            words = (find_words(one, ((0, len(one)),)) for one in _split(kept[1]))
            sums.append(
                {
                    "call": call.key,
                    "number": number,
                    "facts": call.facts,
                    "blocks": [format_words(one.tolist()) for one in words],
                    "holds": None if gradient is None else _holds(kept[1], gradient),
                }
            )
        return {"sums": sums, "lost": lost}


def _split(flat: Tensor) -> tuple[Tensor, ...]:
    return torch.split(flat, VALUE_BYTES // flat.element_size())


def _holds(result: Tensor, gradient: Tensor) -> bool:
    """Whether a gradient is a run of elements of a result."""
    fits = _LEAST_BYTES <= gradient.nbytes <= result.nbytes
    if not fits or result.dtype is not gradient.dtype:
        return False
    whole, part = bytes_of(result), bytes_of(gradient)
    at = whole.find(part)
    while at > 0 and at % gradient.element_size():
        at = whole.find(part, at + 1)
    return at >= 0


def find_wrong_sums(classes: Sequence[Sequence[int]], about: Message, record: Message) -> Search:
    """Look for ranks with a wrong sum. ``classes`` are those that hold a tensor with the same bits.

    ``record`` is ``sums`` of the report: how many results were ``compared``, and why others were
    ``not_kept``. If one differs: ``call``, ``element``, the ranks that are ``wrong``, and values,
    ``expected`` and ``got``. If none does, ``changed`` are the ranks whose gradient is no part of a
    result, while that of others is.
    """
    turns = (members[n] for n in range(ASKED) for members in classes if n < len(members))
    asked = list(islice(turns, ASKED))
    answers = yield asked, about | {"what": "sums", "ranks": asked}
    found: dict[str, dict[int, Message]] = {}
    lost = Counter[str]()
    for rank, answer in zip(asked, answers, strict=True):
        for one in answer.get("sums", ()):
            found.setdefault(json.dumps([one["call"], one["facts"]]), {})[rank] = one
        # All have counted the same calls.
        lost |= Counter(answer.get("lost", {}))
    whole = [by for by in found.values() if _is_whole(by, asked)]
    sums = [list(by.values()) for by in whole]
    record |= {"compared": len(sums), "not_kept": dict(lost), "wrong": [], "changed": []}
    differing = [some for some in sums if len({json.dumps(one["blocks"]) for one in some}) > 1]
    if not differing:
        # A rank that has lost its gradient or a result shows nothing.
        holds = {rank: {by[rank]["holds"] for by in whole if rank in by} for rank in asked}
        if not lost and any(True in seen for seen in holds.values()):
            record["changed"] = sorted(rank for rank, seen in holds.items() if seen == {False})
        return
    first = differing[0][0]
    members, facts = first["call"][0], first["facts"]
    record["call"] = facts | {"ranks": members, "number": first["number"]}
    if len(members) > ASKED:
        record["failed"] = f"leaves of more than {ASKED} ranks are not added"
        return
    rows = zip(*(one["blocks"] for one in differing[0]), strict=True)
    block = next(at for at, words in enumerate(rows) if len({*words}) > 1)
    answers = yield members, about | {"what": "leaves", "call": first["call"], "block": block}
    if all("leaf" in one for one in answers):
        try:
            record |= _compare_sums(dict(zip(members, answers, strict=True)), facts, block)
        except MeshplanError as error:
            record["failed"] = str(error)


def _is_whole(found: Mapping[int, Message], asked: Sequence[int]) -> bool:
    """Whether each rank that was asked has kept a call, if it is a member."""
    return all({*one["call"][0]} & {*asked} == found.keys() for one in found.values())


def _compare_sums(answers: Mapping[int, Message], facts: Message, block: int) -> Message:
    dtype = getattr(torch, facts["dtype"])

    def read(what: str) -> list[Tensor]:
        texts = (base64.b64decode(one[what]) for one in answers.values())
        return [tensor_of(one).view(dtype) for one in texts]

    leaves = dict(zip((one["position"] for one in answers.values()), read("leaf"), strict=True))
    contract = Contract.of_id(facts["contract"])
    in_order = [leaves[position] for position in sorted(leaves)]
    total = reduce_leaves(in_order, facts["op"], facts["sizes"], contract, divisor=facts["divisor"])
    results = dict(zip(answers, read("result"), strict=True))
    differs = {rank: integers(one) != integers(total) for rank, one in results.items()}
    at = int(torch.stack(list(differs.values())).any(0).to(torch.uint8).argmax())

    def show(one: Tensor) -> str:
        return element_text(one[at : at + 1].view(torch.uint8), dtype)

    return {
        "wrong": [rank for rank, one in differs.items() if one.any()],
        "element": block * (VALUE_BYTES // dtype.itemsize) + at,
        "expected": show(total),
        "got": {str(rank): show(one) for rank, one in results.items()},
    }
