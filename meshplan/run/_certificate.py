"""What a rank posts for the certificate: after each step, words of the tensors that it holds.

Words of shards add up to those of their tensors, and those of tensors are added with weights from
their names. So a rank posts 16 bytes for all tensors whose copies the same ranks share, and only if
it is the first of the ranks that hold an element. With each comparison of replicas it posts the
words of each tensor too. Tensors without a known replica count as copies of their own, which rank 0
compares.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshplan._bits import bytes_of
from meshplan._dtypes import name_of
from meshplan._torch import disable_current_modes, local_tensor_of
from meshplan.errors import ReplicaInputError
from meshplan.layout import Layout
from meshplan.replicas._tensors import NamedTensor, named_tensors
from meshplan.run._holders import ParameterTable, Ranks
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


@dataclass(slots=True)
class _Share:
    """Tensors whose elements the same ranks hold, and those that this rank posts."""

    ranks: Ranks
    keys: list[str] = field(default_factory=list)
    count: int = 0
    rows: list[int] = field(default_factory=list)  # of those posted, among the keys
    at: list[tuple[int, int]] = field(default_factory=list)  # and among the step's tensors
    spans: list[Spans] = field(default_factory=list)
    weights: list[tuple[int, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The same on all of its ranks; the first word on all ranks with such tensors."""
        return f"{_hash('|'.join(self.keys))} {_hash(str(self.ranks))}"

    def start(self, local: list[list[Tensor]], whole: bool) -> Callable[[], str]:
        """Begin the words of its tensors; returns what waits for those of all together, and with
        ``whole`` for those of each, as text.
        """
        tensors = [local[number][part] for number, part in self.at]
        rows: dict[torch.device, list[int]] = {}
        for row, one in enumerate(tensors):
            rows.setdefault(one.device, []).append(row)
        reads = [
            (some, land(torch.stack([find_words(tensors[i], self.spans[i]) for i in some])))
            for some in rows.values()
        ]

        def read() -> str:
            words = torch.zeros((1 + len(self.keys), LANES), dtype=torch.int64)
            for some, one in reads:
                words[[1 + self.rows[row] for row in some]] = one()
                weights = torch.tensor([self.weights[row] for row in some])
                words[0] += (one() * weights).sum(0)
            return base64.b64encode(bytes_of(words if whole else words[:1])).decode()

        return read


@dataclass(slots=True)
class _Plan:
    """How tensors of one kind are read, as long as they stay the same objects."""

    tensors: list[Any]
    shapes: list[list[torch.Size]]
    shares: dict[str, _Share]


class Certifier:
    """The tensors of this rank, by optimizer."""

    def __init__(self, parameters: ParameterTable, rank: int) -> None:
        self._parameters, self._rank = parameters, rank
        self._plans: dict[tuple[int, str], _Plan] = {}  # by optimizer, and kind of the first tensor
        self._declared: set[str] = set()
        self._left: dict[str, str] = {}  # not certified, and why
        self._values: list[tuple[str, Tensor]] = []  # logged since the last step

    def add_value(self, name: str, value: Tensor) -> None:
        if len(self._values) < _MOST_VALUES:
            self._values.append((name, value))
        else:
            self._left[f"value {name}"] = f"more than {_MOST_VALUES} values without a step"

    def pop_values(self) -> list[tuple[str, Tensor]]:
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
            shapes = [[one.shape for one in parts] for parts in local]
            about = unit, items[0].kind if items else ""
            plan = self._plans.get(about)
            if plan is not None and not whole and plan.shapes == shapes:
                pairs = zip(plan.tensors, items, strict=True)
                plan = plan if all(known() is one.tensor for known, one in pairs) else None
            else:
                plan = None
            if plan is None:
                references = [weakref.ref(one.tensor) for one in items]
                plan = self._plans[about] = _Plan(references, shapes, self._share(items, local))
            shares = plan.shares.items()
            reads = {name: one.start(local, whole) for name, one in shares if one.at}
        new = [(name, one) for name, one in shares if name not in self._declared]
        self._declared |= {name for name, _ in new}
        declared = {
            name: [one.count, one.keys if one.ranks[0] == self._rank else []] for name, one in new
        }
        left, self._left = self._left, {}
        plans = [one for (number, _), one in self._plans.items() if number == unit]
        idle = not any(share.at for one in plans for share in one.shares.values())
        head: Message = {"unit": unit, "step": step, "last": last, "idle": idle}
        if not (reads or declared or left or (last and not idle)):
            return None
        head |= {"declared": declared, "left": left}
        return lambda: {"link": head | {"words": {name: read() for name, read in reads.items()}}}

    def _share(self, items: Sequence[Item], local: list[list[Tensor]]) -> dict[str, _Share]:
        """The shares of tensors, by name."""
        found: dict[str, tuple[Ranks, bool, Spans, int, int]] = {}
        for number, item in enumerate(items):
            try:
                parts = named_tensors({item.name: item.tensor})
            except ReplicaInputError as error:
                self._left[f"{item.kind} {item.name}"] = str(error)
                continue
            for part, one in enumerate(parts):
                shape = one.local.shape if one.mesh is None else one.shape
                form = f"{name_of(one.local.dtype)}[{','.join(map(str, shape))}]"
                ends = ("" if n == 1 else f" #{n}" for n in itertools.count(1))
                # Parameters of no module have no name but "parameter 3".
                about = f"{item.kind} {one.name.removeprefix('parameter ')}"
                names = (f"{about}{end} {form}" for end in ends)
                key = next(name for name in names if name not in found)
                if one.mesh is not None and one.mesh.get_coordinate() is None:
                    continue
                if (place := self._place(item.parameter, one)) is None:
                    self._left[key] = f"placements {one.placements}"
                else:
                    found[key] = (*place, number, part)
        shares: dict[tuple[Ranks, str], _Share] = {}
        for key, (ranks, first, spans, number, part) in sorted(found.items()):
            # Of copies without a known replica, each buffer and value counts alone.
            alone = key if ranks == (self._rank,) and key.startswith(("buffer", "value")) else ""
            share = shares.setdefault((ranks, alone), _Share(ranks))
            if first:
                *weights, count = find_weights(key)
                share.count += count * local[number][part].numel()
                share.rows.append(len(share.keys))
                share.at.append((number, part))
                share.spans.append(spans)
                share.weights.append((weights[0], weights[1]))
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
        layout = Layout.from_mesh(one.mesh)
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
