"""The pages of the documentation: their blocks, and the code in their lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Also one that is a part of an item of a list.
_FENCE = re.compile(r"^( *)```([a-z]*)\n(.*?)^\1```$", re.M | re.S)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4,}\S[^\n]*\n)+(?=\n|\Z)")
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_COMMAND = re.compile(
    r"(?:[A-Z_0-9]+=\S+ )*"
    r"(?:meshplan|torchrun|python3?|pip|make|bash|docker|set|nvidia-smi|rocm-smi|amd-smi|kubectl)(?: |$)"
)
_OPTION = re.compile(r"[a-z_]+=")
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


@dataclass(frozen=True)
class Snippet:
    """Code in a line of a page.

    Attributes:
        kind: ``command`` of a shell; ``python`` that calls something; ``name`` with dots;
            ``option``, as ``path="auto"``; ``call``, which is not Python and looks like a call.
        text: on one line.
        line: where it starts, from 1.
    """

    kind: str
    text: str
    line: int


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


def snippets(page: str) -> Iterator[Snippet]:
    """All code in a page that is in no fenced block."""
    # A fence keeps its lines, for the numbers of those behind it.
    prose = _FENCE.sub(lambda one: "\n" * one[0].count("\n"), page)
    for one in _INDENTED.finditer(prose):
        text = one[0].replace("\\\n", "")
        if _COMMAND.match(text.strip()):
            yield Snippet("command", " ".join(text.split()), _line(prose, one.start()))
    for one in _INLINE.finditer(prose):
        text = " ".join(one[1].split())
        kind = _kind(text)
        if kind:
            yield Snippet(kind, text, _line(prose, one.start()))


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _kind(text: str) -> str:
    if _COMMAND.match(text):
        return "command"
    try:
        tree = ast.parse(text + " pass" if text.endswith(":") else text)
    except SyntaxError:
        # Placements are written as ``(P(sum), R) -> (R, R)``.
        looks = re.search(r"[a-z_]{2,}\(", text) and "->" not in text
        return "call" if looks else ""
    if any(isinstance(node, ast.Call | ast.Import | ast.ImportFrom) for node in ast.walk(tree)):
        return "python"
    if _OPTION.match(text):
        return "option"
    return "name" if re.fullmatch(r"(?:meshplan|torch|dist)(?:\.\w+)+", text) else ""


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
