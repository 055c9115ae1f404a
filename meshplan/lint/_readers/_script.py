"""A shell script: its words, its options, and the constants of its variables."""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from meshplan.lint._readers._branches import find_branches
from meshplan.lint._readers._numbers import Number, evaluate

_WORD = re.compile(
    r"(?P<comment>(?<![^\s;])#(?!SBATCH\b)[^\n]*)"
    r"|(?P<word>(?:\$\(\([^()\n]*+\)\)|\$\{(?:\$\{[^{}\n]*+\}|[^{}\n])*+\}"
    r"|[^\s\"'();|&`\\,\[\]])++)"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)")
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?=(.*)\}")
_VALUE = re.compile(
    r"^[ \t]*(?:(?:export|local|declare(?: -a)?)[ \t]+)?([A-Za-z_]\w*)\+?="
    # An array may have $((...)) and $(...) in it.
    r"(?:\"([^\"]*)\"|'([^']*)'|\(((?:[^()$]++|\$\((?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+\)|\$)*+)\))",
    re.M,
)
_USE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]((?:[^{}]|\$\{[^{}]*\})*))?\}|(\w+))")
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:[./]\w+)*(?:@[\w.]*)?)=(.*)", re.S)
_UNDOTTED = re.compile(r"[a-z]\w*")
# Slurm's gpu:8, h100:8 and gpu:h100:8.
_GRES = re.compile(r"(?:gpu:)?(?:[a-z]\w*:)?(\d{1,4})")
_MAX_DEPTH = 20
_MAX_CONDITIONS = 4
_MAX_CONSTANT = 1000


class Word(NamedTuple):
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class Option(NamedTuple):
    """An option without its value, its start, and the word after it or after its ``=``."""

    text: str
    start: int
    value: Word | None


class Script:
    """The words of a text, its options, and the numbers of its variables."""

    def __init__(self, text: str, sourced: Mapping[str, str]) -> None:
        self.text = text
        self._sourced = sourced
        # A lone dash begins an item of a YAML list.
        self._words = [
            Word(found["word"], found.start())
            for found in _WORD.finditer(text)
            if found["word"] not in (None, "-")
        ]
        # Offset and line of each line that does not continue the one before.
        self._commands = [(0, 1)]
        at = 0
        for number, line in enumerate(text.split("\n"), 2):
            at += len(line) + 1
            if not line.rstrip("\r").endswith("\\"):
                self._commands.append((at, number))
        self._assigned: dict[str, list[Word]] = {}
        for i, word in enumerate(self._words):
            found = _ASSIGNMENT.fullmatch(word.text) or _DEFAULT.fullmatch(word.text)
            if found:
                value = Word(found[2], word.start + found.start(2))
                value = value if value.text else self._find_quoted(i) or value
                self._assigned.setdefault(found[1], []).append(value)
        self._numbers: dict[str, Number | None] = {}
        self._done: set[str] = set()
        self._texts: dict[str, str | None] = {}
        self._is_unsure = _make_test([])
        self.is_value = _make_test([value.span() for value in _VALUE.finditer(text)])
        # A condition may depend on a variable that another one sets.
        dead: list[tuple[int, int]] | None = None
        for _ in range(_MAX_CONDITIONS):
            before = dead
            dead, unsure = find_branches(text, self)
            self._is_unsure = _make_test(unsure)
            if dead == before:
                break
            self._remove(dead)
        self._remove(self._find_unused(dead or []))

    def _find_unused(self, dead: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The values of variables that only branches that do not run use."""
        values: dict[str, list[tuple[int, int]]] = {}
        for value in _VALUE.finditer(self.text):
            values.setdefault(value[1], []).append(value.span())
        uses: dict[str, list[int]] = {}
        for use in _USE.finditer(self.text):
            uses.setdefault(use[1], []).append(use.start())
        unused: list[tuple[int, int]] = []
        for _ in range(_MAX_DEPTH):
            is_dead = _make_test([*dead, *unused])
            more = [
                values.pop(name)
                for name, places in uses.items()
                if name in values and all(map(is_dead, places))
            ]
            if not more:
                break
            unused += [span for spans in more for span in spans]
        return unused

    def _remove(self, dead: Sequence[tuple[int, int]]) -> None:
        """Forget the words of branches that do not run."""
        is_dead = _make_test(dead)
        self._words = [word for word in self._words if not is_dead(word.start)]
        for name, values in self._assigned.items():
            self._assigned[name] = [word for word in values if not is_dead(word.start)]
        self._numbers.clear()
        self._done.clear()
        self._texts.clear()

    def is_assigned(self, name: str) -> bool:
        """Whether the script, or a file that it sources, sets a variable."""
        return bool(self._assigned.get(name)) or name in self._sourced

    def read_constant(self, text: str) -> str | None:
        """The text of a word of a condition; ``None`` if only the running script knows."""
        number = self.read_number(Word(text.strip("\"'"), 0))
        value = str(number.value) if number else self.read_text(Word(text.strip("\"'"), 0))
        return None if value is None or len(value) > _MAX_CONSTANT else value

    def list_constants(self) -> dict[str, str]:
        """The variables that have one value."""
        found = {name: self.read_constant(f"${name}") for name in self._assigned}
        return {name: value for name, value in found.items() if value is not None}

    def is_conditional(self, offset: int) -> bool:
        """Whether an option is a part of a variable that a branch sets, which may not run.

        A command inside of such a branch has its options if it runs.
        """
        return self._is_unsure(offset) and self.is_value(offset)

    def list_commands(self) -> Iterator[tuple[str, list[Option]]]:
        """Each command with options: its lines, all but the last with a backslash at the end."""
        for at, options in groupby(self.find_options(), lambda one: self._find_command(one.start)):
            end = self._commands[at + 1][0] if at + 1 < len(self._commands) else len(self.text)
            yield self.text[self._commands[at][0] : end], [*options]

    def _find_command(self, offset: int) -> int:
        return bisect.bisect_right(self._commands, (offset, len(self.text))) - 1

    def find_options(self) -> Iterator[Option]:
        """Each option and each override of Hydra, in order."""
        # Of each command: the offset up to which it was read, and whether it has a word there that
        # is no assignment.
        read: dict[int, tuple[int, bool]] = {}
        for i, word in enumerate(self._words):
            if word.text.startswith("-"):
                option, equals, rest = word.text.partition("=")
                if not re.match(r"--?[A-Za-z]", option):
                    continue
                value = self._words[i + 1] if i + 1 < len(self._words) else None
                if equals:
                    value = Word(rest, word.end - len(rest)) if rest else self._find_quoted(i)
                yield Option(option, word.start, value)
            elif (found := _OVERRIDE.fullmatch(word.text)) and self._is_override(
                word, found[1], read
            ):
                value = Word(found[2], word.start + found.start(2))
                yield Option(
                    found[1],
                    word.start,
                    value if found[2] else self._find_quoted(i),
                )

    def _is_override(self, word: Word, key: str, read: dict[int, tuple[int, bool]]) -> bool:
        """Whether ``key=value`` is an argument of a command, and no assignment of the shell."""
        if not key.isidentifier():
            return True
        # Any text may have TP=2; variables of the environment are in capitals.
        if not _UNDOTTED.fullmatch(key):
            return False
        command = self._find_command(word.start)
        start, is_argument = read.get(command, (self._commands[command][0], False))
        before = self.text[start : word.start].split()
        is_argument = is_argument or any(
            "=" not in one and one not in ("export", "local", "env") for one in before
        )
        read[command] = word.start, is_argument
        return is_argument

    def find_line(self, offset: int) -> int:
        """The first line of the command at ``offset``, whose lines end in a backslash."""
        return self._commands[self._find_command(offset)][1]

    def read_number(self, word: Word, depth: int = 0) -> Number | None:
        """The number that a word stands for; ``None`` if only the running script knows."""
        if re.fullmatch(r"-?[0-9]{1,12}", word.text):
            return Number(int(word.text), word.start, word.end)
        if depth > _MAX_DEPTH:
            return None
        if word.text.startswith("$((") and word.text.endswith("))"):
            return self._evaluate_sum(word, depth)
        found = _VARIABLE.fullmatch(word.text)
        if not found:
            quoted = re.fullmatch(r"([\"'])(.*)\1", word.text)
            return self.read_number(Word(quoted[2], word.start + 1), depth + 1) if quoted else None
        name = found[1] or found[3]
        # ``${X:-8}`` is 8 unless the script assigns X. An assignment without a number leaves it
        # unknown; the assignment that is being followed, as in ``X=${X:-8}``, does not count.
        variable = self._read_variable(name, depth)
        if variable is None and found[2] and not (name in self._assigned and name in self._done):
            return self.read_number(Word(found[2], word.start + found.start(2)), depth + 1)
        # Several places define the number: only this use of it can be rewritten.
        if variable is not None and variable.start < 0:
            return Number(variable.value, word.start, word.end)
        return variable

    def _read_variable(self, name: str, depth: int) -> Number | None:
        """Its number, without a place if several places define the same."""
        if name not in self._numbers:
            # A variable defined by itself, as in X=${X:-8}, is not set until then.
            self._numbers[name] = None
            words = self._assigned.get(name, ())
            given = [self.read_number(word, depth + 1) for word in words]
            if re.fullmatch(r"\d{1,12}", self._sourced.get(name, "")):
                given.append(Number(int(self._sourced[name]), -1, -1))
            first = given[0] if given else None
            if len(given) == 1:
                # In a branch that may not run, one value is not the only one.
                unsure = any(self._is_unsure(word.start) for word in words)
                self._numbers[name] = None if unsure else first
            elif first and all(number and number.value == first.value for number in given):
                self._numbers[name] = Number(first.value, -1, -1)
            self._done.add(name)
        return self._numbers[name]

    def read_text(self, word: Word, depth: int = 0) -> str | None:
        """The text that a word stands for, without quotes; ``None`` if only the script knows."""
        found = _VARIABLE.fullmatch(word.text)
        if found is None:
            return None if "$" in word.text else word.text.strip("\"'")
        if depth > _MAX_DEPTH:
            return None
        name = found[1] or found[3]
        if name not in self._texts:
            # A variable defined by itself, as in X=${X:-a}, is not set until then.
            self._texts[name] = None
            words = self._assigned.get(name, ())
            given = {self.read_text(one, depth + 1) for one in words}
            given |= {self._sourced[name]} if name in self._sourced else set()
            unsure = any(self._is_unsure(word.start) for word in words)
            self._texts[name] = given.pop() if len(given) == 1 and not unsure else None
        if self._texts[name] is None and found[2] is not None and len(word.text) > len(found[2]):
            return self.read_text(Word(found[2].strip("\"'"), word.start), depth + 1)
        return self._texts[name]

    def read_launch(self, word: Word) -> Number | None:
        """The number of a launcher's option; Slurm's ``gpu:8`` is 8."""
        if found := self.read_number(word):
            return found
        gres = _GRES.fullmatch(self.read_text(word) or "")
        return Number(int(gres[1]), word.start, word.end) if gres else None

    def _evaluate_sum(self, word: Word, depth: int) -> Number | None:
        def lookup(name: str) -> int | None:
            found = self._read_variable(name, depth + 1)
            return None if found is None else found.value

        try:
            parsed = ast.parse(re.sub(r"[${}]", "", word.text[3:-2]).strip(), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None
        value = evaluate(parsed.body, lookup)
        return None if value is None else Number(value, word.start, word.end)

    def _find_quoted(self, i: int) -> Word | None:
        """The word after word ``i``, if nothing but a quote is between them."""
        word, *after = self._words[i : i + 2]
        return after[0] if after and self.text[word.end : after[0].start] in ('"', "'") else None


def _make_test(spans: Sequence[tuple[int, int]]) -> Callable[[int], bool]:
    """A function that returns whether an offset is in one of the spans."""
    starts: list[int] = []
    ends: list[int] = []
    for start, end in sorted(spans):
        if not ends or end > ends[-1]:  # else it is inside of another span
            starts.append(start)
            ends.append(end)

    def is_inside(offset: int) -> bool:
        at = bisect.bisect_right(starts, offset) - 1
        return at >= 0 and offset < ends[at]

    return is_inside
