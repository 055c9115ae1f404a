"""Removes the additions of terminals, launchers and web pages from the lines of an output.

Line numbers stay those of the input, so that notes and errors point at lines of the file.
"""

from __future__ import annotations

import re

from meshplan.errors import TopologyInputError

# Characters of a text that are enough to recognise it.
HEAD = 2**18
# Far above any output of a host about its links. They keep the time bounded.
_MOST_CHARACTERS = 2**26
_MOST_LINES = 2**18
_MOST_ESCAPES = 2**18

# Colours and underlines, titles, and the charset that `tput sgr0` selects.
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b\n]{0,512}(?:\x07|\x1b\\)?|[()][0-9A-Za-z])"
)
# mpirun --tag-output, torchrun --tee and the interpreter's own prefix, srun --label.
_LAUNCHER = re.compile(
    r"[ \t]{0,8}(?:"
    r"\[\d{1,7},[^\]\n]{1,64}\]<std(?:out|err|diag)>:"
    r"|\[(?:rank|default|trainer|worker)\d{1,7}(?:\|\d{1,7})?\]:"
    r"|\d{1,7}:(?: |$)"
    r")"
)
_QUOTED = re.compile(r"[ \t]{0,3}(?:> ?){1,8}")
_FENCE = re.compile(r"[ \t]{0,8}(?:```|~~~)[^`]{0,64}$")
_RULE = re.compile(r"[ \t:|-]{3,}+$")
_FIRST = frozenset("[0123456789>`~|")


def clean_lines(text: str) -> list[tuple[int, str]]:
    """Each line with its number from 1 up, blank ones too. Without escape sequences, carriage
    returns, prefixes of launchers, quote marks, fences, and the pipes of a Markdown table (each
    becomes a tab).
    """
    for what, count, most in (
        ("characters", len(text), _MOST_CHARACTERS),
        ("lines", max(text.count("\n"), text.count("\r")), _MOST_LINES),
        ("escape sequences", text.count("\x1b"), _MOST_ESCAPES),
    ):
        if count > most:
            raise TopologyInputError(
                f"{count} {what}, at most {most} are read; pass only the output of the command"
            )
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n")
        # Alone it ends a line only in a text without line feeds: progress counters use it too.
        text = text.replace("\r", " " if "\n" in text else "\n")
    return [
        (number, _clean_line(line) if line[:16].lstrip()[:1] in _FIRST else line)
        for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1)
    ]


def _clean_line(line: str) -> str:
    # A launcher may have started another one.
    for _ in range(3):
        prefix = _LAUNCHER.match(line) or _QUOTED.match(line)
        if prefix is None:
            break
        line = line[prefix.end() :]
    if _FENCE.match(line):
        return ""
    # Only the tables: elsewhere a pipe may be part of the format.
    if line[:16].lstrip().startswith("|"):
        return "" if _RULE.match(line) else line.replace("|", "\t")
    return line


def format_some(names: list[str]) -> str:
    more = len(names) - 8
    return ", ".join(names[:8]) + (f" and {more} more" if more > 0 else "")
