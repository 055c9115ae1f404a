"""What a rank posts for the certificate: after each step, words of the tensors that it holds.

Words of shards add up to those of their tensors, and those of tensors are added with weights from
their names. So a rank posts 16 bytes for all tensors whose copies the same ranks share, and only
if it is the first of the ranks that hold an element. With each comparison of replicas it posts the
words of each tensor too. Tensors without a known replica count as copies, which rank 0 compares.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshplan._dtypes import name_of
from meshplan._torch import disable_current_modes, local_tensor_of
from meshplan.errors import ReplicaInputError
from meshplan.replicas._tensors import NamedTensor, named_tensors
from meshplan.run._holders import ParameterTable, Ranks, layout_of
from meshplan.run._ledger import Message
from meshplan.run._snapshots import land
from meshplan.run._words import LANES, Spans, find_spans, find_weights, find_words

_MOST_VALUES = 1000  # between two steps


class Item(NamedTuple):
    """A tensor of a step; ``parameter`` is the one that it belongs to, or itself."""

    kind: str
    name: str
    parameter: Tensor
    tensor: Tensor


class _Part(NamedTuple):
    """A tensor of which this rank posts elements."""

    row: int  # among the keys of its share
    at: tuple[int, int]  # among the tensors of the step, and inside of it
    spans: Spans
    weights: tuple[int, int]


@dataclass(slots=True)
class _Share:
    """Tensors whose elements the same ranks hold."""

    ranks: Ranks
    keys: list[str] = field(default_factory=list)
    count: int = 0
    parts: list[_Part] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The same on all of its ranks; the first word on all ranks with such tensors."""
        return f"{_hash('|'.join(self.keys))} {_hash(str(self.ranks))}"

    def start(self, local: list[list[Tensor]], whole: bool) -> Callable[[], list[list[int]]]:
        """Begin the words of its tensors; returns what waits for those of all together, and with
        ``whole`` for those of each.
        """
        wait = land([find_words(local[one.at[0]][one.at[1]], one.spans) for one in self.parts])

        def read() -> list[list[int]]:
            weights = torch.tensor([one.weights for one in self.parts], device="cpu")
            total = (wait() * weights).sum(0).tolist()
            rows = [[0] * LANES for _ in self.keys]
            for one, words in zip(self.parts, wait().tolist(), strict=True):
                rows[one.row] = words
            return [total, *(rows if whole else ())]

        return read


class Certifier:
    """The tensors of this rank, by optimizer."""

    def __init__(self, parameters: ParameterTable, rank: int) -> None:
        self._parameters, self._rank = parameters, rank
        # By optimizer and kind, while the tensors stay the same objects: these, and their shares.
        self._plans: dict[tuple[int, str], tuple[Any, dict[str, _Share]]] = {}
        self._declared: dict[str, int] = {}
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
        found, self._values = self._values, []
        return found

    def take(
        self, unit: int, step: int, items: Sequence[Item], *, whole: bool, last: bool
    ) -> Callable[[], Message] | None:
        """Begin the words of tensors; returns what waits for them. ``whole`` posts those of each
        tensor too; ``last``: nothing else of this step follows.
        """
        with torch.no_grad(), disable_current_modes():
            local = [_parts_of(one.tensor) for one in items]
            shares = self._plan(unit, items, local, whole)
            reads = {name: one.start(local, whole) for name, one in shares.items() if one.parts}
        declared = {
            name: (one.count, one.keys if one.ranks[0] == self._rank else [])
            for name, one in shares.items()
            if self._declared.get(name) != one.count
        }
        self._declared |= {name: count for name, (count, _) in declared.items()}
        left, self._left = self._left, {}
        plans = [one for (number, _), (_, one) in self._plans.items() if number == unit]
        idle = not any(share.parts for one in plans for share in one.values())
        if not (reads or declared or left or (last and not idle)):
            return None
        head: Message = {"unit": unit, "step": step, "last": last, "idle": idle}
        head |= {"declared": declared, "left": left}
        return lambda: {"link": head | {"words": {name: read() for name, read in reads.items()}}}

    def _plan(
        self, unit: int, items: Sequence[Item], local: list[list[Tensor]], again: bool
    ) -> dict[str, _Share]:
        """The shares of tensors, read again if these are others."""
        about = unit, items[0].kind if items else ""
        forms = [[(one.shape, one.dtype) for one in parts] for parts in local]
        (known, known_forms), shares = self._plans.get(about, ((None, None), {}))
        if not again and known_forms == forms:
            pairs = zip(known, items, strict=True)
            if all(refer() is one.tensor for refer, one in pairs):
                return shares
        shares = self._share(items, local)
        self._plans[about] = ([weakref.ref(one.tensor) for one in items], forms), shares
        return shares

    def _share(self, items: Sequence[Item], local: list[list[Tensor]]) -> dict[str, _Share]:
        """The shares of tensors, by name."""
        found: dict[str, tuple[Ranks, bool, Spans, tuple[int, int]]] = {}
        for number, item in enumerate(items):
            try:
                parts = named_tensors({item.name: item.tensor})
            except ReplicaInputError as error:
                self._left[f"{item.kind} {item.name}"] = str(error)
                continue
            for part, one in enumerate(parts):
                shape = one.local.shape if one.mesh is None else one.shape
                form = f"{name_of(one.local.dtype)}[{','.join(map(str, shape))}]"
                # Parameters of no module have no name but "parameter 3".
                about = f"{item.kind} {one.name.removeprefix('parameter ')}"
                ends = ("" if n == 1 else f" #{n}" for n in itertools.count(1))
                names = (f"{about}{end} {form}" for end in ends)
                key = next(name for name in names if name not in found)
                if one.mesh is not None and one.mesh.get_coordinate() is None:
                    continue
                if (place := self._place(item.parameter, one)) is None:
                    self._left[key] = f"placements {one.placements}"
                else:
                    found[key] = (*place, (number, part))
        shares: dict[tuple[Ranks, str], _Share] = {}
        for key, (ranks, first, spans, at) in sorted(found.items()):
            # Of copies without a known replica, each buffer and value counts alone.
            alone = key if ranks == (self._rank,) and key.startswith(("buffer", "value")) else ""
            share = shares.setdefault((ranks, alone), _Share(ranks))
            if first:
                *weights, count = find_weights(key)
                share.count += count * local[at[0]][at[1]].numel()
                weight = (weights[0], weights[1])
                share.parts.append(_Part(len(share.keys), at, spans, weight))
            share.keys.append(key)
        return {one.name: one for one in shares.values()}

    def _place(self, parameter: Tensor, one: NamedTensor) -> tuple[Ranks, bool, Spans] | None:
        """The ranks that share a tensor, whether this one is the first with its elements, and
        which these are.
        """
        holders = self._parameters.holders_of(parameter, one, self._rank)
        first = all(ranks[0] == self._rank for ranks in holders)
        if one.mesh is None:
            ranks = max(holders, key=len, default=(self._rank,))
            return ranks, first, tuple((0, size) for size in one.local.shape)
        layout = layout_of(one.mesh)
        coordinate = layout.coordinate(self._rank) or ()
        spans = find_spans(one.shape, layout.sizes, coordinate, one.placements)
        if spans is None or one.local.shape != tuple(b - a for a, b in spans):
            return None
        return tuple(sorted(layout.ranks)), first, spans


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
