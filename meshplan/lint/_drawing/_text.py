"""Text for pictures: made safe for XML, measured without fonts, shortened and wrapped to fit."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape as _escape
from xml.sax.saxutils import quoteattr

__all__ = [
    "BOLD",
    "attribute",
    "clean",
    "escape",
    "ranks_text",
    "short_forms",
    "shorten",
    "signature_text",
    "width",
    "wrap",
]

ELLIPSIS = "…"

# How much wider bold text is.
BOLD = 1.15

# Advance widths in em of DejaVu Sans, rounded up: the widest of the fonts that are asked for.
_WIDTHS = {
    **dict.fromkeys(" .,:;'|ijlI", 0.35),
    **dict.fromkeys("()[]!ftr-/", 0.42),
    **dict.fromkeys('`"*', 0.5),
    **dict.fromkeys("mMWw@%…—&", 1.0),
    **dict.fromkeys("+=<>~#^", 0.84),
}


def clean(text: str) -> str:
    """The text with what cannot be written or seen replaced: XML forbids control characters.

    Those that turn the direction of writing are replaced as well: a name cannot pose as another.
    """
    if text.isprintable():
        return text
    return "".join(
        " " if one.isspace() else "\ufffd" if unicodedata.category(one)[0] == "C" else one
        for one in text
    )


def escape(text: str) -> str:
    """`clean` text as XML or HTML content."""
    return _escape(clean(text))


def attribute(text: str) -> str:
    """`clean` text as an XML or HTML attribute value, in its quotes."""
    return quoteattr(clean(text))


def width(text: str, size: float) -> float:
    """At most how many pixels the text takes in a sans-serif font of ``size`` pixels."""
    return size * sum(map(_em, text))


def shorten(text: str, size: float, room: float) -> str:
    """The text, or its beginning and end round an ellipsis, such that it fits into ``room``."""
    # A name of a megabyte is cut before it is looked at.
    most = max(4, math.ceil(room / (0.35 * size)))
    if len(text) <= most and width(text, size) <= room:
        return text
    head, tail = text[: most // 2], text[-(most // 2) :]
    while head + tail and width(head + ELLIPSIS + tail, size) > room:
        if len(head) >= len(tail):
            head = head[:-1]
        else:
            tail = tail[1:]
    return head + ELLIPSIS + tail


def wrap(text: str, size: float, room: float, lines: int) -> list[str]:
    """The text in at most ``lines`` lines of ``room`` pixels; the last is shortened if need be."""
    found = [""]
    words = text.split()
    for i, word in enumerate(words):
        longer = f"{found[-1]} {word}".strip()
        if width(longer, size) <= room or not found[-1]:
            found[-1] = longer
        elif len(found) < lines and width(word, size) <= room:
            found.append(word)
        else:
            found[-1] = " ".join((found[-1], *words[i:]))
            break
    return [shorten(line, size, room) for line in found]


def signature_text(signature: Sequence[int]) -> str:
    """``(3, 2)``; a long one by its beginning: ``(8, 8, 8, 8, 8, 8, … 14564 nodes)``."""
    if len(signature) <= 10:
        return f"({', '.join(map(str, signature))})"
    return f"({', '.join(map(str, signature[:6]))}, … {len(signature)} nodes)"


def ranks_text(ranks: Sequence[int], most: int = 8) -> str:
    """``5 to 9`` for consecutive ranks, else the first ranks, at most ``most``."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks[:most])) + (", …" if len(ranks) > most else "")


def short_forms(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Forms of each name, each shorter than the one before, that still tell the names apart.

    ``gpu-a-001.x.net, gpu-a-002.x.net`` are also ``gpu-a-001, gpu-a-002``, and ``…001, …002``.
    """
    forms = {name: [name] for name in names}
    for shorter in (_without_end, _without_beginning):
        last = [of_name[-1] for of_name in forms.values()]
        for of_name, text in zip(forms.values(), shorter(last), strict=True):
            of_name.append(text)
    return {name: tuple(of_name) for name, of_name in forms.items()}


def _without_end(names: list[str]) -> list[str]:
    """The names without the network domain that all of them share."""
    shared = len({name.partition(".")[1:] for name in names}) == 1
    return [name.partition(".")[0] for name in names] if shared else names


def _without_beginning(names: list[str]) -> list[str]:
    """The names without the beginning that all of them share; a number stays whole."""
    low, high = min(names, default=""), max(names, default="")
    alike = next((i for i, one in enumerate(low) if one != high[i : i + 1]), len(low))
    cut = len(low[:alike].rstrip("0123456789"))
    if low == high or cut < 4 or cut == len(low):
        return names
    return [ELLIPSIS + name[cut:] for name in names]


def _em(one: str) -> float:
    known = _WIDTHS.get(one)
    if known is not None:
        return known
    if one.isascii():
        return 0.8 if one.isupper() else 0.65
    return 1.05 if unicodedata.east_asian_width(one) in "WF" else 0.85
