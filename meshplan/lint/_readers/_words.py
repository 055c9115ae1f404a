"""Words of a shell script, of a list of arguments, or of a YAML or JSON file that holds one.

A script is scanned, never run: a value that is a variable is followed to the one place that gives
it a number.
"""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshplan.lint._readers._arithmetic import evaluate
from meshplan.lint._readers._edits import Number

__all__ = ["Given", "Script", "Word"]

_WORD = re.compile(
    r"(?P<comment>(?<![^\s;])#(?!SBATCH\b)[^\n]*)"
    r"|(?P<word>(?:\$\(\([^()\n]*\)\)|\$\{[^{}\n]*\}|[^\s\"'();|&`\\,\[\]])+)"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^{}]*))?\}|(\w+))")
_MAX_DEPTH = 20


@dataclass(frozen=True, slots=True)
class Word:
    """A word, and where it stands."""

    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Given:
    """An option that is given.

    Attributes:
        option: as it is spelt, without its value.
        start: where it stands.
        value: the word after it or after its ``=``; ``None`` at the end of the text.
        line: where the command or the line of the list that it belongs to begins, from 1 on.
    """

    option: str
    start: int
    value: Word | None
    line: int


class Script:
    """The options of a text, and the numbers that they are given."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.words = [
            Word(found["word"], found.start())
            for found in _WORD.finditer(text)
            # A lone dash begins an item of a YAML list.
            if found["word"] not in (None, "-")
        ]
        self._starts = _command_starts(text)
        self._assigned = self._assignments()
        self._known: dict[str, Number | None] = {}
        self._done: set[str] = set()

    def options(self, names: Mapping[str, str]) -> Iterator[tuple[str, Given]]:
        """Each time that an option is given: what it stands for, and its value.

        ``names``: what each spelling stands for; ``_`` and ``-`` inside an option are the same.
        """
        for i, word in enumerate(self.words):
            if not word.text.startswith("-"):
                continue
            option, equals, rest = word.text.partition("=")
            spelt = option[:2] + option[2:].replace("_", "-")
            if spelt not in names:
                continue
            after = self.words[i + 1] if i + 1 < len(self.words) else None
            if equals and rest:
                after = Word(rest, word.end - len(rest))
            elif equals and not self._adjoins(word, after):
                after = None
            yield names[spelt], Given(option, word.start, after, self.line_of(word.start))

    def line_of(self, offset: int) -> int:
        """Where the command at ``offset`` begins, with its lines that end in a backslash."""
        position = bisect.bisect_right(self._starts, (offset, len(self.text))) - 1
        return self._starts[position][1]

    def number(self, word: Word, depth: int = 0) -> Number | None:
        """The number that a word stands for; ``None`` if only the running script knows."""
        if re.fullmatch(r"-?[0-9]{1,12}", word.text):
            return Number(int(word.text), word.start, word.end)
        if depth > _MAX_DEPTH:
            return None
        if word.text.startswith("$((") and word.text.endswith("))"):
            return self._sum(word, depth)
        found = _VARIABLE.fullmatch(word.text)
        if not found:
            return None
        variable = self._variable(found[1] or found[3], depth)
        if variable is None and found[2] and not self._is_set(found[1]):
            return self.number(Word(found[2], word.start + found.start(2)), depth + 1)
        if variable is not None and variable.start < 0:
            return Number(variable.value, word.start, word.end)
        return variable

    def _variable(self, name: str, depth: int) -> Number | None:
        """Its number, without a place if several places give the same."""
        if name not in self._known:
            # A variable that is given by itself, as in X=${X:-8}, is not set until then.
            self._known[name] = None
            given = [self.number(word, depth + 1) for word in self._assigned.get(name, ())]
            values = {number and number.value for number in given}
            if len(given) == 1 or len(values) > 1:
                self._known[name] = given[0] if len(given) == 1 else None
            elif number := (given[0] if given else None):
                self._known[name] = Number(number.value, -1, -1)
            self._done.add(name)
        return self._known[name]

    def _is_set(self, name: str) -> bool:
        return name in self._assigned and name in self._done

    def _sum(self, word: Word, depth: int) -> Number | None:
        def lookup(name: str) -> int | None:
            found = self._variable(name, depth + 1)
            return None if found is None else found.value

        try:
            parsed = ast.parse(re.sub(r"[${}]", "", word.text[3:-2]).strip(), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None
        value = evaluate(parsed.body, lookup)
        return None if value is None else Number(value, word.start, word.end)

    def _assignments(self) -> dict[str, list[Word]]:
        found: dict[str, list[Word]] = {}
        for i, word in enumerate(self.words):
            assignment = _ASSIGNMENT.fullmatch(word.text)
            if not assignment:
                continue
            value = Word(assignment[2], word.start + assignment.start(2))
            if (
                not value.text
                and i + 1 < len(self.words)
                and self._adjoins(word, self.words[i + 1])
            ):
                value = self.words[i + 1]
            found.setdefault(assignment[1], []).append(value)
        return found

    def _adjoins(self, word: Word, after: Word | None) -> bool:
        """Whether nothing but a quote is between two words."""
        return after is not None and self.text[word.end : after.start] in ('"', "'")


def _command_starts(text: str) -> Sequence[tuple[int, int]]:
    """Offset and line of each line that does not continue the one before."""
    starts = []
    at, continues = 0, False
    for number, line in enumerate(text.split("\n"), 1):
        if not continues:
            starts.append((at, number))
        continues = line.rstrip("\r").endswith("\\")
        at += len(line) + 1
    return starts
