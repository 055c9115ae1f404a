"""A reduction that can make replicas differ, with two groups that may add in other orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshplan._message_text import elide, format_first
from meshplan.planner._siblings import Algorithm

Verdict = Literal["none", "may differ", "unknown topology"]

_MAX_SIGNATURES, _MAX_RANKS = 6, 6  # of a printed hazard


@dataclass(frozen=True, slots=True)
class Example:
    """One group of a hazard, and an order in which it may add.

    Attributes:
        ranks: global ranks, in the order of their ranks in the communicator.
        signature: ranks per node, nodes in order of their first rank.
        expression: the additions, over global ranks, e.g. ``(0+(5+10))``.
    """

    ranks: tuple[int, ...]
    signature: tuple[int, ...]
    expression: str


@dataclass(frozen=True, slots=True)
class Hazard:
    """A reduction whose sibling groups must agree, and the known orders of their additions.

    Attributes:
        axes: positions of the reduced axes, ascending; axes of size 1 are left out.
        labels: labels of the reduced axes.
        along: labels of the axes along which siblings must agree.
        op: the reduction.
        group_size: ranks in a group.
        groups: groups of the reduction.
        siblings: how many groups must agree together.
        signatures: ranks per node of each different placement of a group, by first appearance;
            empty if the topology is unknown.
        classes: per modelled algorithm, the largest number of different associations of additions
            among siblings that must agree; empty if the topology is unknown.
        unknown: algorithms and libraries with an undocumented order, which are never safe.
        algorithm: the algorithm that ``examples`` shows; ``None`` without examples.
        channel: the channel that ``examples`` shows; ``None`` without examples.
        chunk: the ring chunk that ``examples`` shows; ``None`` for the tree.
        examples: two siblings that may add in different orders: those on the fewest nodes, then
            those with the lowest rank. Empty unless the verdict is ``may differ``.
        fixes: fixes in words, for the whole sequence of reductions; empty for the verdict
            ``none``.
    """

    axes: tuple[int, ...]
    labels: tuple[str, ...]
    along: tuple[str, ...]
    op: str
    group_size: int
    groups: int
    siblings: int
    signatures: tuple[tuple[int, ...], ...]
    classes: tuple[tuple[Algorithm, int], ...]
    unknown: tuple[str, ...]
    algorithm: Algorithm | None = None
    channel: int | None = None
    chunk: int | None = None
    examples: tuple[Example, ...] = ()
    fixes: tuple[str, ...] = ()

    @property
    def may_differ(self) -> tuple[Algorithm, ...]:
        """The modelled algorithms under which siblings may differ."""
        return tuple(name for name, count in self.classes if count > 1)

    @property
    def verdict(self) -> Verdict:
        """``none``: in the model, all siblings add in one order; it does not cover ``unknown``."""
        if not self.classes:
            return "unknown topology"
        return "may differ" if self.may_differ else "none"

    def __str__(self) -> str:
        lines = [
            f"{self.op} over ({', '.join(self.labels)}), {self.groups} groups of "
            f"{self.group_size}: {self.siblings} siblings along ({', '.join(self.along)}) hold "
            "the same inputs and must agree",
            f"  {self._describe_orders()}",
        ]
        if self.signatures:
            shown = [
                elide(f"({', '.join(map(str, s))})") for s in self.signatures[:_MAX_SIGNATURES]
            ]
            rest = len(self.signatures) - len(shown)
            more = f" and {rest} more" if rest else ""
            lines.append(f"  ranks per node: {'; '.join(shown)}{more}")
        where = f" channel {self.channel}" if self.channel else ""
        where += "" if self.chunk is None else f" chunk {self.chunk}"
        for example in self.examples:
            ranks = format_first(example.ranks, _MAX_RANKS)
            lines.append(f"  {self.algorithm}{where}, ranks {ranks}: {elide(example.expression)}")
        if self.fixes:
            lines.append(f"  fixes: {'; '.join(self.fixes)}")
        return "\n".join(lines)

    def _describe_orders(self) -> str:
        unknown = ", ".join(self.unknown)
        if self.verdict == "unknown topology":
            return f"may differ: node placement unknown, so the order is unknown under {unknown}"
        if self.verdict == "none":
            names = " and ".join(name for name, _ in self.classes)
            return f"identical under {names} in the model; order undocumented under {unknown}"
        orders = ", ".join(f"{name} ({count} orders)" for name, count in self.classes if count > 1)
        return f"may differ under {orders}; order undocumented under {unknown}"
