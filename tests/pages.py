"""The pages of the documentation: their fenced blocks, and what blocks print."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Block", "blocks", "commands", "prints", "run_python"]

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.M | re.S)
# What is another number each time.
_CHANGING = (
    (re.compile(r"[\d.]+ s until it returned"), "0 s until it returned"),
    (re.compile(r"(axis|default) group \d+ of"), r"\1 group 0 of"),
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, and where in the page it ends and starts."""

    language: str
    text: str
    start: int
    end: int


def blocks(page: str, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, or those of one language; ``""`` is that of plain output."""
    found = [Block(one[1], one[2], one.start(), one.end()) for one in _FENCE.finditer(page)]
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
    """Whether a page shows what was printed; ``...`` in the page stands for anything."""
    for changing, written in _CHANGING:
        printed, shown = changing.sub(written, printed), changing.sub(written, shown)
    pattern = ".*".join(re.escape(part) for part in shown.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.S) is not None


def run_python(name: str, page: str, *, rank: int) -> int:
    """Run the Python blocks of a page in their order; the number of outputs that were compared.

    What the page shows is what rank 0 prints.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    compared = 0
    for number, block in enumerate(blocks(page, "python"), start=1):
        code = compile(block.text, f"{name}, block {number}", "exec")
        out = io.StringIO()
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            # There is a process group already, so that a page's profile of NCCL comes late.
            warnings.filterwarnings("ignore", message="a process group exists already")
            exec(code, names)
        shown = prints(page, block)
        if shown is not None and rank == 0:
            assert is_shown(out.getvalue(), shown), (
                f"{name}, block {number} prints\n{out.getvalue()}\nand the page shows\n{shown}"
            )
            compared += 1
    return compared


def commands(block: Block) -> list[tuple[str, str]]:
    """The commands of a console block, each with what the page shows that it prints."""
    parts = re.split(r"^\$ ([^\n]*)\n", block.text, flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))
