"""What a rank posts about its tensors after a step: their words, added up by who holds them.

Words of shards add up to those of their tensors, and those of tensors are added with weights from
their names: 16 bytes for all tensors of one kind that the same ranks hold. All ranks with replicas
post at compared steps. For the certificate the first of them posts at each step, at compared steps
the words of each tensor too. Without a known replica tensors are copies, which rank 0 compares.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshplan._bits import bytes_of, flatten
from meshplan._dtypes import name_of
from meshplan._torch import disable_current_modes, local_tensor_of
from meshplan.errors import ReplicaInputError
from meshplan.kernel import land
from meshplan.layout import Layout
from meshplan.replicas._tensors import NamedTensor, named_tensors
from meshplan.run._holders import ParameterTable, Ranks, layout_of
from meshplan.run._leaves import Leaves
from meshplan.run._ledger import KINDS, Message
from meshplan.run._words import (
    Spans,
    find_spans,
    find_weights,
    find_words,
    format_words,
)

_MOST_VALUES = 1000  # between two steps
# Steps of a set that rank 0 may ask about, such as those before a late rank had connected, and
# bytes of all copies of their tensors.
KEPT = 32
COPIED_BYTES = 64 << 20
# Of a tensor whose elements are compared.
BLOCKS = 64
_LEAST_BYTES = 1024


class Item(NamedTuple):
    """A tensor of a step; ``parameter`` is the one that it belongs to, or itself."""

    kind: str
    name: str
    parameter: Tensor
    tensor: Tensor


class _Part(NamedTuple):
    """A tensor of which this rank holds elements."""

    at: tuple[int, int]  # among the tensors of the step, and inside of it
    spans: Spans
    weights: tuple[int, int]


@dataclass(slots=True)
class _Share:
    """Tensors of one kind whose elements the same ranks hold, with replicas on the same ones."""

    ranks: Ranks  # none, if shards are not known
    holders: Collection[Ranks]  # groups of this rank that hold replicas
    keys: list[str] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)
    count: int | None = None  # of elements, on the first rank that holds them
    # The same on all of its ranks; the first word on all with such tensors.
    name: str = ""
    sets: dict[str, Ranks] = field(default_factory=dict)  # holders by names that they have

    def start(self, local: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Begin the words of its tensors; returns what waits for them: int64 CPU [tensors, 2]."""
        pairs = zip(local, self.parts, strict=True)
        return land([find_words(one, part.spans) for one, part in pairs])

    def add_up(self, words: Tensor) -> list[int]:
        """The words of all its tensors together."""
        weights = torch.tensor([one.weights for one in self.parts], device="cpu")
        total: list[int] = (words * weights).sum(0).tolist()
        return total


class Begun(NamedTuple):
    """The part of a step that a rank will post, and the words that it waits for."""

    posts: list[Message]
    reads: list[tuple[Message, _Share, Callable[[], Tensor]]]


# Ranks, whether an order may change the result, and elements in a step and before it.
Reduced = list[tuple[Ranks, bool, int, int]]
# Tensors, what waits for their words, reductions of the step, and copies of small tensors.
_Kept = tuple[_Share, Callable[[], Tensor], Reduced, list[Tensor]]


class Shares:
    """The tensors of this rank, by optimizer; ``note`` records what is not compared."""

    def __init__(self, parameters: ParameterTable, note: Callable[[str], None]) -> None:
        self._parameters, self._note = parameters, note
        self.rank = 0
        self.leaves: Leaves | None = None
        # By optimizer and kind, while the tensors stay the same objects: these, and their shares.
        self._plans: dict[tuple[int, str], tuple[Any, list[_Share]]] = {}
        self.owners: dict[str, int] = {}  # the optimizers of sets
        self._kept: dict[tuple[str, int], _Kept] = {}  # by set and step
        self._lock = threading.RLock()
        self._declared: dict[str, int | None] = {}
        self._left: dict[str, str] = {}  # not certified, and why
        self._values: list[Item] = []

    def add_value(self, name: str, value: Tensor | float) -> None:
        """Keep a copy of a value until the next step."""
        if not isinstance(value, Tensor):
            value = torch.tensor(float(value), dtype=torch.float64, device="cpu")
        if len(self._values) < _MOST_VALUES:
            value = value.detach().clone()
            self._values.append(Item("value", name, value, value))
        else:
            self._left[f"value {name}"] = f"more than {_MOST_VALUES} values without a step"

    def pop_values(self) -> list[Item]:
        """Those since the last step."""
        found = list[Item]()
        # Other threads may add and take some meanwhile.
        with suppress(IndexError):
            while True:
                found.append(self._values.pop(0))
        return found

    def begin(
        self,
        begun: Begun,
        unit: int,
        step: int,
        items: Sequence[Item],
        *,
        whole: bool,
        certified: bool,
        reduced: Reduced,
    ) -> None:
        """Begin the words of tensors. ``whole`` compares replicas."""
        posts, reads = begun
        with torch.no_grad(), disable_current_modes():
            for kind, group in itertools.groupby(items, lambda one: one.kind):
                some = list(group)
                local = [_parts_of(one.tensor) for one in some]
                for share in self._plan(unit, kind, some, local, again=whole):
                    name = share.name if certified else ""
                    post: Message = {"name": name, "count": share.count}
                    post |= self._declare(share) if name else {}
                    if whole and share.sets:
                        sets = {
                            one: ranks if ranks[0] == self.rank else ()
                            for one, ranks in share.sets.items()
                        }
                        post |= {
                            "sets": sets,
                            "kind": kind,
                            "tensors": len(share.keys),
                        }
                    first = certified and share.count is not None
                    if "sets" in post or first:
                        tensors = [local[one.at[0]][one.at[1]] for one in share.parts]
                        reads.append((post, share, share.start(tensors)))
                        if "sets" in post:
                            self._keep(step, share, tensors, reads[-1][-1], reduced)
                    posts += [post] if first or len(post) > 2 else []

    def take(
        self,
        begun: Begun,
        unit: int,
        step: int,
        *,
        whole: bool,
        number: int | None,
    ) -> Callable[[], Message] | None:
        """What waits for the words that were begun; ``number``: of the certificate's link."""
        posts, reads = begun
        left, self._left = self._left, {}
        # Another thread may step.
        every = list(self._plans.items())
        plans = [found for (other, _), (_, found) in every if other == unit]
        idle = all(one.count is None for found in plans for one in found)
        says = left or any("keys" in one or one["count"] is not None for one in posts)
        if number is not None and not says and idle:
            number = None
        if number is None and not whole:
            return None
        head = {
            "unit": unit,
            "step": step,
            "link": number,
            "idle": idle,
        }

        def make() -> Message:
            for post, share, read in reads:
                rows = read()
                post["words"] = [share.add_up(rows)]
                if whole and number is not None and share.count is not None:
                    post["words"] += rows.tolist()
            return head | {"left": left, "shares": posts}

        return make

    def _declare(self, share: _Share) -> Message:
        """The tensors of a new share, by the first of its ranks."""
        if self._declared.get(share.name, "") == share.count:
            return {}
        self._declared[share.name] = share.count
        return {"keys": share.keys if share.ranks[0] == self.rank else []}

    def _keep(
        self,
        step: int,
        share: _Share,
        tensors: Sequence[Tensor],
        read: Callable[[], Tensor],
        reduced: Reduced,
    ) -> None:
        """Keep what waits for words, and copies of small ones. A post is sent once the
        device has both.
        """
        nbytes = sum(one.nbytes for one in tensors)
        copies = [one.clone() for one in tensors] if nbytes <= COPIED_BYTES else []
        with self._lock:
            for name in share.sets:
                self._kept[name, step] = share, read, reduced, copies
                for key in [key for key in self._kept if key[0] == name][:-KEPT]:
                    del self._kept[key]
            copied = 0
            for *_, older in reversed(self._kept.values()):
                copied += sum(one.nbytes for one in older)
                if copied > COPIED_BYTES:
                    older.clear()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to a question of rank 0."""
        what, head = question["what"], {"answer": question["ask"]}
        with self._lock:
            kept = self._kept.get((question["set"], question["step"]))
            copies = list(kept[-1]) if kept is not None else []
        if "kind" in question:  # about reductions
            at = self.owners.get(question["set"], -1), question["step"]
            gradient = None
            if copies and question["kind"] == "gradient" and "row" in question:
                gradient = copies[question["row"]]
            return head | (self.leaves.answer(question, at, gradient) if self.leaves else {})
        if kept is not None and what == "tensors":
            share, read, reduced, _ = kept
            return head | {
                "reduced": reduced,
                "words": [format_words(row) for row in read().tolist()],
                "keys": share.keys,
                "order": [part.at for part in share.parts],
            }
        if not copies:
            return head | {"gone": True}
        tensor = copies[question["row"]]
        flat = flatten(tensor)
        size = max(math.ceil(flat.numel() / BLOCKS), _LEAST_BYTES // flat.element_size())
        pieces = torch.split(flat, size)
        head |= {
            "dtype": name_of(flat.dtype),
            "shape": list(tensor.shape),
            "numel": flat.numel(),
        }
        head["block_bytes"] = size * flat.element_size()
        if what == "blocks":
            words = [find_words(one, ((0, len(one)),)) for one in pieces]
            return head | {"blocks": [format_words(one.tolist()) for one in words]}
        values = [bytes_of(pieces[number]) for number in question["blocks"]]
        return head | {"values": [base64.b64encode(one).decode() for one in values]}

    def _plan(
        self,
        unit: int,
        kind: str,
        items: Sequence[Item],
        local: list[list[Tensor]],
        *,
        again: bool,
    ) -> list[_Share]:
        """The shares of tensors of one kind, read again if these are others."""
        forms = [[(one.shape, one.dtype) for one in parts] for parts in local]
        (known, known_forms), shares = self._plans.get((unit, kind), ((None, None), []))
        if not again and known_forms == forms:
            pairs = zip(known, items, strict=True)
            if all(refer() is one.tensor for refer, one in pairs):
                return shares
        shares = self._share(kind, items, local)
        for one in shares:
            self._name(unit, kind, one)
        refers = [weakref.ref(one.tensor) for one in items]
        self._plans[unit, kind] = (refers, forms), shares
        return shares

    def _name(self, unit: int, kind: str, share: _Share) -> None:
        """The same on all holders, and other sets for each optimizer."""
        about = f"{_hash('|'.join(share.keys))} {_hash(str(share.ranks))}"
        share.name = about if share.ranks else ""
        for ranks in share.holders if kind in KINDS else ():
            names = (f"{_hash(f'{about} {ranks}')} {number}" for number in itertools.count())
            name = next(one for one in names if self.owners.setdefault(one, unit) == unit)
            share.sets[name] = ranks

    def _share(self, kind: str, items: Sequence[Item], local: list[list[Tensor]]) -> list[_Share]:
        """The shares of tensors of one kind."""
        found: dict[str, tuple[Any, tuple[int, int], Spans]] = {}
        for number, item in enumerate(items):
            try:
                parts = named_tensors({item.name: item.tensor})
            except ReplicaInputError as error:
                self._left[f"{kind} {item.name}"] = str(error)
                if kind in KINDS:
                    self._note(f"{kind} {item.name}: {error}")
                continue
            for place, one in enumerate(parts):
                if one.mesh is not None and one.mesh.get_coordinate() is None:
                    continue
                shape = one.local.shape if one.mesh is None else one.shape
                form = f"{name_of(one.local.dtype)}[{','.join(map(str, shape))}]"
                # Parameters of no module have no name but "parameter 3".
                about = f"{kind} {one.name.removeprefix('parameter ')}"
                ends = ("" if n == 1 else f" #{n}" for n in itertools.count(1))
                names = (f"{about}{end} {form}" for end in ends)
                key = next(name for name in names if name not in found)
                ranks, holders, spans = self._place(item.parameter, one)
                if not ranks:
                    self._left[key] = f"placements {one.placements}"
                if kind == "parameter" and one.mesh is None and not holders:
                    self._note(
                        "plain parameters that neither DistributedDataParallel nor an all-reduce "
                        "of their gradient shows to be replicas"
                    )
                # Of copies without a known replica, each buffer and value counts alone.
                alone = kind not in KINDS and ranks == (self.rank,) and key
                layout = None if one.mesh is None else layout_of(one.mesh)
                found[key] = (ranks, holders, layout, alone), (number, place), spans
        shares: dict[Any, _Share] = {}
        for key, (about, at, spans) in sorted(found.items(), key=lambda one: one[0]):
            ranks, holders, *_ = about
            share = shares.setdefault(about, _Share(ranks, holders))
            share.keys.append(key)
            share.parts.append(_Part(at, spans, find_weights(key)))
            if ranks and all(one[0] == self.rank for one in holders):
                share.count = (share.count or 0) + local[at[0]][at[1]].numel()
        return list(shares.values())

    def _place(self, parameter: Tensor, one: NamedTensor) -> tuple[Ranks, frozenset[Ranks], Spans]:
        """The ranks that share a tensor, none if that is not known; those that hold replicas of
        this rank's elements; and which these are.
        """
        holders = frozenset(self._parameters.holders_of(parameter, one, self.rank))
        whole = tuple((0, size) for size in one.local.shape)
        if one.mesh is None:
            return max(holders, key=len, default=(self.rank,)), holders, whole
        layout = layout_of(one.mesh)
        places = _find_places(layout, self.rank)
        spans = find_spans(one.shape, layout.sizes, places, one.placements)
        if spans is None or one.local.shape != tuple(b - a for a, b in spans):
            return (), holders, whole
        return tuple(sorted(layout.ranks)), holders, spans


@functools.lru_cache(maxsize=64)
def _find_places(layout: Layout, rank: int) -> tuple[int, ...]:
    """In the group along each axis, whose ranks torch sorts: where FSDP2 and gathers of torch put
    shards, whatever the coordinates of the ranks.
    """
    axes = range(len(layout.sizes))
    groups = (layout.group_of(rank, axis) for axis in axes)
    return tuple(sorted(one or ()).index(rank) for one in groups)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _parts_of(tensor: Tensor) -> list[Tensor]:
    local = local_tensor_of(tensor) if isinstance(tensor, DTensor) else tensor
    if type(local) in (Tensor, nn.Parameter) and local.layout is torch.strided:
        return [local.detach()]
    try:
        return [one.local.detach() for one in named_tensors([tensor])]
    except ReplicaInputError:
        return []
