"""TOML with places: which line and which characters give each value.

``tomllib`` says what a document means and not where it says so. What it has accepted is well
formed, so that a scan for keys, brackets and quotes finds the places.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshplan.errors import PolicyError
from meshplan.lint._readers._edits import line_at

__all__ = ["Entry", "Path", "entries", "load"]

Path = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)+")
_PART = re.compile(r"""[ \t]*(?:([\w-]+)|"((?:[^"\\\n]|\\.)*)"|'([^'\n]*)')[ \t]*(\.?)""", re.A)
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'", re.S
)
# Of one dotted key; parsing takes time in the square of them, and nobody writes more than a few.
_MAX_DOTS = 32
_DOTS = re.compile(r"[\w\"'-][ \t]*\.[ \t]*(?=[\w\"'-])")


@dataclass(frozen=True, slots=True)
class Entry:
    """A table or a value.

    Attributes:
        path: keys from the root, with the position in each array of tables.
        line: of the header or key, from 1 on.
        start: where the value begins; of a table, where the text after its header begins.
        end: where the value ends; of a table, as ``start``.
        is_table: whether this is a table with a header of its own.
    """

    path: Path
    line: int
    start: int
    end: int
    is_table: bool = False


def load(name: str, text: str) -> dict[str, Any]:
    """The document.

    Raises:
        PolicyError: it is not TOML; the message names file and line.
    """
    deep = next((i for i, line in enumerate(text.split("\n"), 1) if _is_deep(line)), None)
    if deep:
        raise PolicyError(f"{name}:{deep}: a key of more than {_MAX_DOTS} parts; write tables")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"^(.*) \(at line (\d+), column \d+\)$", str(error))
        why, where = (found[1], f":{found[2]}") if found else (str(error), "")
        why = " ".join(why.replace(" (at end of document)", " at the end").split())[:100]
        raise PolicyError(f"{name}{where}: not well-formed TOML ({why}); is it whole?") from None
    except (RecursionError, ValueError) as error:
        # Integers of thousands of digits are a ValueError.
        why = "nested too deeply" if isinstance(error, RecursionError) else "a number is too long"
        raise PolicyError(f"{name}: not TOML that can be read: {why}") from None


def entries(text: str) -> tuple[Entry, ...]:
    """Places of all tables with a header and of all their values, in order; ``load`` came first."""
    return tuple(_scan(text))


def _is_deep(line: str) -> bool:
    if line.count(".") <= _MAX_DOTS or line.lstrip().startswith("#"):
        return False
    return any(len(_DOTS.findall(part)) > _MAX_DOTS for part in re.split(r"[^\w.\"' \t-]", line))


def _scan(text: str) -> Iterator[Entry]:
    table: Path = ()
    counts: dict[Path, int] = {}  # of the tables of each array
    at = 0
    line, counted = 1, 0
    while True:
        blank = _BLANK.match(text, at)
        at = blank.end() if blank else at
        if at >= len(text):
            return
        line, counted = line + line_at(text[counted:at], at - counted) - 1, at
        brackets = 2 if text.startswith("[[", at) else 1 if text[at] == "[" else 0
        keys, end = _key(text, at + brackets)
        if end == at + brackets:
            return
        if brackets:
            table = _table(keys, brackets == 2, counts)
            at = end + brackets
            yield Entry(table, line, at, at, is_table=True)
        else:
            at = end + 1
            while text[at : at + 1] in (" ", "\t"):
                at += 1
            start, at = at, _value_end(text, at)
            yield Entry(table + keys, line, start, at)


def _table(keys: Path, in_array: bool, counts: dict[Path, int]) -> Path:
    path: Path = ()
    for i, key in enumerate(keys):
        path += (key,)
        if in_array and i == len(keys) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path += (counts[path],)
    return path


def _key(text: str, at: int) -> tuple[Path, int]:
    parts: list[str] = []
    while found := _PART.match(text, at):
        parts.append(next(part for part in found.groups()[:3] if part is not None))
        at = found.end()
        if not found[4]:
            break
    return tuple(parts), at


def _value_end(text: str, at: int) -> int:
    depth = 0
    end = at
    while at < len(text):
        character = text[at]
        if found := _STRING.match(text, at):
            at = end = found.end()
            continue
        if character == "#":
            newline = text.find("\n", at)
            if depth == 0 or newline < 0:
                break
            at = newline
        elif character == "\n" and depth == 0:
            break
        depth += (character in "[{") - (character in "]}")
        at += 1
        if not character.isspace() and character != "#":
            end = at
    return end
