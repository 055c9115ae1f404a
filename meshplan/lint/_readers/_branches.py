"""Branches of a shell script: those that do not run, and those that may not run.

Conditions on constants decide. The default of a variable counts as its value, as in ``${X:-8}`` and
in ``if [ -z "$X" ]; then X=8; fi``. All other conditions are unknown.
"""

from __future__ import annotations

import bisect
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

_COMMENT = re.compile(r"(?<![^\s;])#[^\n]*")
_CASE = re.compile(r"^[ \t]*+(?:case[ \t]++(\S++)[ \t]++in|esac)\b", re.M)
_BRANCH = re.compile(r"^[ \t]*+\(?+([^()\n]++)\)(.*?)(?:;;|\Z)", re.M | re.S)
_KEYWORD = re.compile(r"(?:^|[;\n])[ \t]*(if|then|elif|else|fi)(?![\w:=.(-])", re.M)
_TEST = re.compile(r"(?:\[\[?|\(\()(.*?)(?:\]\]?|\)\))", re.S)
_UNARY = re.compile(r"(-z|-n)[ \t]+(\"[^\"]*\"|'[^']*'|\S+)")
_BINARY = re.compile(
    r"(\"[^\"]*\"|'[^']*'|\S+?)[ \t]*(==|!=|<=|>=|=|<|>|[ \t]-(?:eq|ne|lt|le|gt|ge)\b)[ \t]*"
    r"(\"[^\"]*\"|'[^']*'|\S+)"
)
_NAME = re.compile(r"\$\{?(\w+)(?::?-)?\}?")
_SET = re.compile(r"\b(\w++)=")
# Conditions and texts in them are short; the patterns for them take the square of their length.
_MAX_CONDITION = 1000
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Constants(Protocol):
    """The constants of a script."""

    def is_assigned(self, name: str) -> bool: ...

    def read_constant(self, text: str) -> str | None: ...


class _Body(NamedTuple):
    """A branch of ``if``: its condition, empty for ``else``, and its offsets."""

    condition: str
    start: int
    end: int


_Span = tuple[int, int]


def find_branches(text: str, constants: Constants) -> tuple[list[_Span], list[_Span]]:
    """Offsets of the branches that do not run, and of those that may not run.

    Args:
        text: the script.
        constants: its variables.
    """
    dead = [*_find_dead_cases(text, constants)]
    unsure: list[_Span] = []
    places: dict[str, list[int]] = {}
    for assignment in _SET.finditer(text):
        places.setdefault(assignment[1], []).append(assignment.start())
    for bodies in _find_conditionals(text):
        is_open, is_unsure = True, False
        for body in bodies:
            value = _evaluate(body, places, constants) if body.condition else True
            if value is False or not is_open:
                dead.append((body.start, body.end))
                continue
            is_unsure = is_unsure or value is None
            if is_unsure:
                unsure.append((body.start, body.end))
            is_open = value is None
    return dead, unsure


def _find_dead_cases(text: str, constants: Constants) -> Iterator[_Span]:
    case: re.Match[str] | None = None
    for word in _CASE.finditer(text):
        if word[1] is not None:
            case = case or word
            continue
        subject = constants.read_constant(case[1]) if case else None
        if case and subject is not None:
            taken = False
            for branch in _BRANCH.finditer(text, case.end(), word.start()):
                if taken or not any(_matches(subject, one) for one in branch[1].split("|")):
                    yield branch.span()
                else:
                    taken = True
        case = None


def _matches(subject: str, pattern: str) -> bool:
    pattern = pattern.strip().strip("\"'")
    # Each glob is compiled, which takes long: not those whose beginning is another text.
    return subject.startswith(re.split(r"[*?\[]", pattern, maxsplit=1)[0]) and fnmatch.fnmatchcase(
        subject, pattern
    )


def _find_conditionals(text: str) -> list[list[_Body]]:
    """The branches of each ``if``; none if the words do not nest, as in another language."""
    bare = _COMMENT.sub(lambda one: " " * len(one[0]), text)
    found: list[list[_Body]] = []
    # Of each open one: its branches, the start of its condition, its condition, and its body.
    opened: list[tuple[list[_Body], int, str, int | None]] = []
    for word in _KEYWORD.finditer(bare):
        keyword, start, end = word[1], word.start(1), word.end(1)
        if keyword == "if":
            opened.append(([], end, "", None))
            continue
        if not opened:
            return []
        bodies, asked, condition, body = opened.pop()
        if (keyword == "then") != (body is None):
            return []
        if body is None:
            opened.append((bodies, asked, bare[asked:start].strip(" \t\n;"), end))
            continue
        bodies.append(_Body(condition, body, start))
        if keyword == "fi":
            found.append(bodies)
        else:
            opened.append((bodies, end, "", end if keyword == "else" else None))
    return [] if opened else found


def _evaluate(body: _Body, places: Mapping[str, list[int]], constants: Constants) -> bool | None:
    """Whether a condition holds; ``None`` if only the running script knows.

    ``places`` are the offsets of the assignments to each variable.
    """
    if "||" in body.condition or len(body.condition) > _MAX_CONDITION:
        return None
    values = []
    for part in body.condition.split("&&"):
        negated = part.strip().startswith("!")
        test = _TEST.fullmatch(part.strip(" \t\n!"))
        value = _evaluate_test(test[1].strip(" \t"), body, places, constants) if test else None
        values.append(value if value is None else value != negated)
    if False in values:
        return False
    return None if None in values else True


def _evaluate_test(
    test: str, body: _Body, places: Mapping[str, list[int]], constants: Constants
) -> bool | None:
    if unary := _UNARY.fullmatch(test):
        value = constants.read_constant(unary[2])
        name = _NAME.fullmatch(unary[2].strip("\"'"))
        if value is None and name and not name[1].isdigit():
            # Unset if the branch is what sets it.
            starts = places.get(name[1], [])
            first = bisect.bisect_left(starts, body.start)
            is_set = first < len(starts) and starts[first] < body.end
            value = "" if is_set and unary[1] == "-z" else None
        return None if value is None else (value == "") == (unary[1] == "-z")
    binary = _BINARY.fullmatch(test)
    if not binary:
        return None
    one, other = (
        constants.read_constant(binary[1]),
        constants.read_constant(binary[3]),
    )
    if one is None or other is None:
        return None
    compared = _COMPARED.get(binary[2].strip())
    if compared is None:
        return fnmatch.fnmatchcase(one, other) != (binary[2] == "!=")
    numbers = [int(word) for word in (one, other) if re.fullmatch(r"-?\d{1,12}", word)]
    return compared(*numbers) if len(numbers) == 2 else None
