"""Numbers with their place in a text, and texts with other numbers in these places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshplan.layout import Layout

__all__ = ["Edit", "Number", "edited", "line_at", "sizes_in_order"]


@dataclass(frozen=True, slots=True)
class Number:
    """A whole number that is written in a text.

    Attributes:
        value: the number.
        start: where the text that gives it begins, as an offset in characters.
        end: where that text ends.
    """

    value: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Edit:
    """``new`` in place of what stands from ``start`` to ``end``."""

    start: int
    end: int
    new: str


def edited(text: str, edits: Iterable[Edit]) -> str | None:
    """The text after all edits; ``None`` if two of them want different things in one place."""
    parts: list[str] = []
    done = 0
    for edit in sorted(set(edits), key=lambda edit: (edit.start, edit.end)):
        if edit.start < done:
            return None
        parts += [text[done : edit.start], edit.new]
        done = edit.end
    return "".join([*parts, text[done:]])


def line_at(text: str, offset: int) -> int:
    """The line, from 1 on, of an offset."""
    return text.count("\n", 0, offset) + 1


def sizes_in_order(layout: Layout, order: Sequence[str]) -> dict[str, int] | None:
    """Size of each axis of ``order`` in ``layout``; 1 for an axis that it does not have.

    ``None`` if only another order of axes could express the layout: its ranks are not 0..n-1, it
    has another axis, or its axes of more than one rank come in another order.
    """
    sizes = dict(zip(layout.axes, layout.sizes, strict=True))
    long = [axis for axis in layout.axes if sizes[axis] > 1]
    if layout.ranks != range(layout.world_size) or not set(long) <= set(order):
        return None
    if long != [axis for axis in order if axis in long]:
        return None
    return {axis: sizes.get(axis, 1) for axis in order}
