"""Branches of a shell script: those that do not run, and those that may not run.

Conditions on constants decide. The default of a variable counts as its value, as in ``${X:-8}`` and
in ``if [ -z "$X" ]; then X=8; fi``. All other conditions are unknown.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

_COMMENT = re.compile(r"(?<![^\s;])#[^\n]*")
_CASE = re.compile(r"^[ \t]*case[ \t]+(\S+)[ \t]+in\b(.*?)^[ \t]*esac\b", re.M | re.S)
_BRANCH = re.compile(r"^[ \t]*\(?([^()\n]+)\)(.*?)(?:;;|\Z)", re.M | re.S)
_KEYWORD = re.compile(r"(?:^|[;\n])[ \t]*(if|then|elif|else|fi)(?![\w:=.(-])", re.M)
_TEST = re.compile(r"(\[\[?|\(\()[ \t]*(.*?)[ \t]*(?:\]\]?|\)\))", re.S)
_UNARY = re.compile(r"(-z|-n)[ \t]+(\"[^\"]*\"|'[^']*'|\S+)")
_BINARY = re.compile(
    r"(\"[^\"]*\"|'[^']*'|\S+?)[ \t]*(==|!=|<=|>=|=|<|>|[ \t]-(?:eq|ne|lt|le|gt|ge)\b)[ \t]*"
    r"(\"[^\"]*\"|'[^']*'|\S+)"
)
_NAME = re.compile(r"\$\{?(\w+)(?::?-)?\}?")
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
    for bodies in _find_conditionals(text):
        is_open = True
        for body in bodies:
            value = _evaluate(body, text, constants) if body.condition else True
            if value is False or not is_open:
                dead.append((body.start, body.end))
                continue
            if value is None or any(one in unsure for one in _list_spans(bodies, body)):
                unsure.append((body.start, body.end))
            is_open = value is None
    return dead, unsure


def _list_spans(bodies: list[_Body], last: _Body) -> list[_Span]:
    return [(one.start, one.end) for one in bodies[: bodies.index(last)]]


def _find_dead_cases(text: str, constants: Constants) -> Iterator[_Span]:
    for case in _CASE.finditer(text):
        subject = constants.read_constant(case[1])
        if subject is None:
            continue
        taken = False
        for branch in _BRANCH.finditer(text, case.start(2), case.end(2)):
            patterns = [one.strip().strip("\"'") for one in branch[1].split("|")]
            if taken or not any(fnmatch.fnmatchcase(subject, one) for one in patterns):
                yield branch.span()
            else:
                taken = True


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


def _evaluate(body: _Body, text: str, constants: Constants) -> bool | None:
    """Whether a condition holds; ``None`` if only the running script knows."""
    if "||" in body.condition:
        return None
    values = []
    for part in body.condition.split("&&"):
        negated = part.strip().startswith("!")
        test = _TEST.fullmatch(part.strip(" \t\n!"))
        value = _evaluate_test(test[2], body, text, constants) if test else None
        values.append(value if value is None else value != negated)
    if False in values:
        return False
    return None if None in values else True


def _evaluate_test(test: str, body: _Body, text: str, constants: Constants) -> bool | None:
    if unary := _UNARY.fullmatch(test):
        value = constants.read_constant(unary[2])
        name = _NAME.fullmatch(unary[2].strip("\"'"))
        if value is None and name and not name[1].isdigit():
            # Unset if the branch is what sets it.
            sets = re.search(rf"\b{name[1]}=", text[body.start : body.end])
            value = "" if sets and unary[1] == "-z" else None
        return None if value is None else (value == "") == (unary[1] == "-z")
    binary = _BINARY.fullmatch(test)
    if not binary:
        return None
    one, other = constants.read_constant(binary[1]), constants.read_constant(binary[3])
    if one is None or other is None:
        return None
    compared = _COMPARED.get(binary[2].strip())
    if compared is None:
        return fnmatch.fnmatchcase(one, other) != (binary[2] == "!=")
    numbers = [int(word) for word in (one, other) if re.fullmatch(r"-?\d{1,12}", word)]
    return compared(*numbers) if len(numbers) == 2 else None
