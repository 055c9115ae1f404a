"""Hazard: what may go wrong in one reduction, as a frozen value and as text for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshplan.planner._siblings import Algorithm

__all__ = ["Example", "Hazard", "Verdict"]

Verdict = Literal["none", "may differ", "unknown topology"]

_MAX_SIGNATURES = 6
_MAX_RANKS = 6
_MAX_CHARACTERS = 100


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
    """A reduction whose sibling groups must agree, and what is known of their orders.

    Attributes:
        axes: positions of the reduced axes, ascending; axes of size 1 are left out.
        labels: labels of the reduced axes.
        along: labels of the axes along which siblings must agree.
        op: the reduction.
        group_size: ranks in a group.
        groups: groups of the reduction.
        siblings: how many groups must agree together.
        signatures: the ways in which the groups fall on nodes (ranks per node), by first
            appearance; empty if the topology is unknown.
        classes: per modelled algorithm, the largest number of different associations of additions
            among siblings that must agree; empty if the topology is unknown.
        unknown: algorithms and libraries whose order is not known here, hence never safe.
        algorithm: the algorithm that ``examples`` shows; ``None`` without examples.
        chunk: the ring chunk that ``examples`` shows; ``None`` for the tree.
        examples: two siblings that may add in different orders: those on the fewest nodes, then
            those with the lowest rank. Empty unless the verdict is ``may differ``.
        cures: what can be done, in words, for the whole sequence of reductions; empty for the
            verdict ``none``.
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
    chunk: int | None = None
    examples: tuple[Example, ...] = ()
    cures: tuple[str, ...] = ()

    @property
    def may_differ(self) -> tuple[Algorithm, ...]:
        """The modelled algorithms under which siblings that must agree may not."""
        return tuple(name for name, count in self.classes if count > 1)

    @property
    def verdict(self) -> Verdict:
        """``none`` says that the model adds alike in all siblings; nothing of ``unknown``."""
        if not self.classes:
            return "unknown topology"
        return "may differ" if self.may_differ else "none"

    def __str__(self) -> str:
        lines = [
            f"{self.op} over ({', '.join(self.labels)}), {self.groups} groups of "
            f"{self.group_size}: {self.siblings} siblings along ({', '.join(self.along)}) hold "
            "the same inputs and must agree",
            f"  {self._orders()}",
        ]
        if self.signatures:
            shown = [
                _short(f"({', '.join(map(str, s))})") for s in self.signatures[:_MAX_SIGNATURES]
            ]
            rest = len(self.signatures) - len(shown)
            more = f" and {rest} more" if rest else ""
            lines.append(f"  ranks per node: {'; '.join(shown)}{more}")
        where = "" if self.chunk is None else f" chunk {self.chunk}"
        for example in self.examples:
            ranks = ", ".join(map(str, example.ranks[:_MAX_RANKS]))
            dots = ", ..." if len(example.ranks) > _MAX_RANKS else ""
            lines.append(
                f"  {self.algorithm}{where}, ranks {ranks}{dots}: {_short(example.expression)}"
            )
        if self.cures:
            lines.append(f"  cures: {'; '.join(self.cures)}")
        return "\n".join(lines)

    def _orders(self) -> str:
        unknown = ", ".join(self.unknown)
        if self.verdict == "unknown topology":
            return f"may differ: nodes unknown, so the order is unknown under {unknown}"
        if self.verdict == "none":
            names = " and ".join(name for name, _ in self.classes)
            return f"alike under {names} in the model; may differ under {unknown}, order unknown"
        orders = ", ".join(f"{name} ({count} orders)" for name, count in self.classes if count > 1)
        return f"may differ under {orders}; order unknown under {unknown}"


def _short(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2 - 3
    return f"{text[:half]} ... {text[-half:]}"
