"""The pages of the documentation: their blocks, and what these print."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Also one that is a part of an item of a list.
_FENCE = re.compile(r"^( *)```([a-z]*)\n(.*?)^\1```$", re.M | re.S)
# Numbers that change from run to run.
_CHANGING = (
    (re.compile(r"[\d.]+ s until it returned"), "0 s until it returned"),
    (re.compile(r"default group \d+ of"), "default group 0 of"),
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, and where in the page it starts and ends."""

    language: str
    text: str
    start: int
    end: int


def blocks(page: str, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, or those of one language; ``""`` is that of plain output.

    A diff counts as the Python script that it results in.
    """
    found = []
    for one in _FENCE.finditer(page):
        kind, text = one[2], re.sub(rf"^{one[1]}", "", one[3], flags=re.M)
        if kind == "diff":
            # The script with the added lines and without the removed ones.
            kind, text = "python", re.sub(r"^(?:-.*\n|[ +])", "", text, flags=re.M)
        found.append(Block(kind, text, one.start(), one.end()))
    return [one for one in found if language is None or one.language == language]


def prints(page: str, block: Block) -> str | None:
    """What the page shows as the output of a Python block: the plain block behind it, if any.

    Between the two may be nothing but a console block with the command that starts the script.
    """
    following = [one for one in blocks(page) if one.start >= block.end]
    if following and following[0].language == "console":
        following = following[1:]
    if not following or following[0].language:
        return None
    between = page[block.end : following[0].start]
    between = _FENCE.sub("", between)
    return None if between.strip() else following[0].text


def is_shown(printed: str, shown: str) -> bool:
    """Whether a page shows the printed text; ``...`` in the page matches anything."""
    for changing, written in _CHANGING:
        printed, shown = changing.sub(written, printed), changing.sub(written, shown)
    pattern = ".*".join(re.escape(part) for part in shown.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.S) is not None


def commands(block: Block) -> list[tuple[str, str]]:
    """The commands of a console block, each with what the page shows that it prints."""
    parts = re.split(r"^\$ ([^\n]*)\n", block.text, flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))
