"""TOML with places: which line and which characters hold each value.

``tomllib`` reads a document without places. Every text that it accepts is well formed, so a scan
for keys, brackets and quotes finds them.
"""

from __future__ import annotations

import bisect
import re
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

from meshplan.errors import PolicyError

Path = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*+)++")
_PART = re.compile(
    r"""[ \t]*(?:([\w-]+)|"((?:[^"\\\n]|\\.)*)"|'([^'\n]*)')[ \t]*(\.?)""",
    re.A,
)
_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|'
    r"'''.*?'{3,5}|"
    r'"(?:[^"\\\n]|\\.)*"|'
    r"'[^'\n]*'"
    r"|#[^\n]*|[^\S\n]+|[^\s#\"'\[\]{}]+|.",
    re.S,
)
# Of one dotted key; parsing takes time in the square of them.
_MAX_DOTS = 32
_DOTS = re.compile(r"[\w\"'-][ \t]*\.[ \t]*(?=[\w\"'-])")


class Entry(NamedTuple):
    """A table or a value."""

    path: Path  # keys from the root, with the position in each array of tables
    line: int  # of the header or key, from 1 on
    start: int  # offset of the value; of a table, of the text after its header
    end: int  # offset after the value; of a table, as ``start``
    is_table: bool  # whether this is a table with a header of its own


def load(name: str, text: str) -> dict[str, Any]:
    """The document. Raises PolicyError with file and line if it is not TOML."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MAX_DOTS and not line.lstrip().startswith("#"):
            parts = re.split(r"[^\w.\"' \t-]", line)
            if any(len(_DOTS.findall(part)) > _MAX_DOTS for part in parts):
                raise PolicyError(
                    f"{name}:{number}: a key of more than {_MAX_DOTS} parts; use tables"
                )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"^(.*) \(at line (\d+), column \d+\)$", str(error))
        why, where = (found[1], f":{found[2]}") if found else (str(error), "")
        why = " ".join(why.replace(" (at end of document)", " at the end").split())[:100]
        fixed = _fix_word(text.split("\n")[int(found[2]) - 1]) if found else ""
        hint = f"use {fixed[:100]}" if fixed else "is the file complete?"
        raise PolicyError(f"{name}{where}: cannot be parsed as TOML ({why}); {hint}") from None
    except (RecursionError, ValueError) as error:
        # Integers of thousands of digits are a ValueError.
        why = "nested too deeply" if isinstance(error, RecursionError) else "a number is too long"
        raise PolicyError(f"{name}: cannot be parsed as TOML: {why}") from None


def _fix_word(line: str) -> str:
    """``key = value`` as TOML, if the value is a word without quotes; else nothing."""
    found = re.fullmatch(r"\s*([\w.-]+\s*=\s*)([A-Za-z_./][^\s\"'#]*)\s*", line)
    if found is None:
        return ""
    word = found[2].lower() if found[2].lower() in ("true", "false") else f'"{found[2]}"'
    return found[1] + word


def find_entries(text: str) -> Iterator[Entry]:
    """The tables with a header and all values, in order, of a text that ``load`` accepts."""
    breaks = [found.start() for found in re.finditer("\n", text)]
    table: Path = ()
    counts: dict[Path, int] = {}  # of the tables of each array
    at = 0
    while True:
        blank = _BLANK.match(text, at)
        at = blank.end() if blank else at
        line = bisect.bisect(breaks, at) + 1
        brackets = 2 if text.startswith("[[", at) else int(text.startswith("[", at))
        keys, end = _read_key(text, at + brackets)
        if not keys:
            return
        if brackets:
            table = ()
            for i, key in enumerate(keys):
                table += (key,)
                if brackets == 2 and i == len(keys) - 1:
                    counts[table] = counts.get(table, -1) + 1
                if table in counts:
                    table += (counts[table],)
            at = end + brackets
            yield Entry(table, line, at, at, is_table=True)
        else:
            start = end + 1
            while text[start : start + 1] in (" ", "\t"):
                start += 1
            at = _find_value_end(text, start)
            yield Entry(table + keys, line, start, at, is_table=False)


def _read_key(text: str, at: int) -> tuple[Path, int]:
    """The parts of a dotted key, and its end."""
    parts: list[str] = []
    while found := _PART.match(text, at):
        parts.append(next(part for part in found.groups()[:3] if part is not None))
        at = found.end()
        if not found[4]:
            break
    return tuple(parts), at


def _find_value_end(text: str, at: int) -> int:
    depth, end = 0, at
    for token in _TOKEN.finditer(text, at):
        first = token[0][0]
        if depth == 0 and first in "#\n":
            break
        depth += (first in "[{") - (first in "]}")
        if first != "#" and not first.isspace():
            end = token.end()
    return end
