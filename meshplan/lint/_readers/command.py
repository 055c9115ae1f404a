"""Command lines: arguments, scripts that start jobs, and YAML or JSON that holds arguments.

A script is scanned, never run: a value that is a variable is followed to the one place that
defines it, here or in a file that the script sources. Of a ``case`` or an ``if`` on constants only
the branch that runs is read. The default of a variable counts as its value, as in ``${X:-8}`` and
in ``if [ -z "$X" ]; then X=8; fi``. All other conditions are unknown.
"""

from __future__ import annotations

import ast
import bisect
import fnmatch
import operator
import re
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import replace
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from meshplan._message_text import shorten
from meshplan.errors import LayoutError
from meshplan.lint._job import JobFile
from meshplan.lint._readers._degrees import (
    Computed,
    Document,
    Setting,
    match,
    read_document,
    split_allocations,
)
from meshplan.lint._readers._frameworks import PLAIN
from meshplan.lint._readers._numbers import (
    INSTEAD,
    Edit,
    Whole,
    apply_edits,
    evaluate,
    is_whole,
)
from meshplan.lint._readers._values import PythonText, find_callee, parse

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


# `Script.read_constant`.
_Read = Callable[[str], str | None]


class _Body(NamedTuple):
    """A branch of ``if``: its condition, empty for ``else``, and its offsets."""

    condition: str
    start: int
    end: int


_Span = tuple[int, int]


def find_branches(text: str, read: _Read) -> tuple[list[_Span], list[_Span]]:
    """Offsets of the branches that do not run, and of those that may not run."""
    dead = [*_find_dead_cases(text, read)]
    unsure: list[_Span] = []
    places: dict[str, list[int]] = {}
    for assignment in _SET.finditer(text):
        places.setdefault(assignment[1], []).append(assignment.start())
    for bodies in _find_conditionals(text):
        is_open, is_unsure = True, False
        for body in bodies:
            value = _evaluate(body, places, read) if body.condition else True
            if value is False or not is_open:
                dead.append((body.start, body.end))
                continue
            is_unsure = is_unsure or value is None
            if is_unsure:
                unsure.append((body.start, body.end))
            is_open = value is None
    return dead, unsure


def _find_dead_cases(text: str, read: _Read) -> Iterator[_Span]:
    case: re.Match[str] | None = None
    for word in _CASE.finditer(text):
        if word[1] is not None:
            case = case or word
            continue
        subject = read(case[1]) if case else None
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


def _evaluate(body: _Body, places: Mapping[str, list[int]], read: _Read) -> bool | None:
    """Whether a condition holds; ``None`` if only the running script knows.

    ``places`` are the offsets of the assignments to each variable.
    """
    if "||" in body.condition or len(body.condition) > _MAX_CONDITION:
        return None
    values = []
    for part in body.condition.split("&&"):
        negated = part.strip().startswith("!")
        test = _TEST.fullmatch(part.strip(" \t\n!"))
        value = _evaluate_test(test[1].strip(" \t"), body, places, read) if test else None
        values.append(value if value is None else value != negated)
    if False in values:
        return False
    return None if None in values else True


def _evaluate_test(
    test: str, body: _Body, places: Mapping[str, list[int]], read: _Read
) -> bool | None:
    if unary := _UNARY.fullmatch(test):
        value = read(unary[2])
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
        read(binary[1]),
        read(binary[3]),
    )
    if one is None or other is None:
        return None
    compared = _COMPARED.get(binary[2].strip())
    if compared is None:
        return fnmatch.fnmatchcase(one, other) != (binary[2] == "!=")
    numbers = [int(word) for word in (one, other) if re.fullmatch(r"-?\d{1,12}", word)]
    return compared(*numbers) if len(numbers) == 2 else None


_WORD = re.compile(
    r"(?P<comment>(?<![^\s;])#(?!SBATCH\b)[^\n]*)"
    r"|(?P<word>(?:\$\(\([^()\n]*+\)\)|\$\{(?:\$\{[^{}\n]*+\}|[^{}\n])*+\}"
    r"|[^\s\"'();|&`\\,\[\]])++)"
)
# TP=$TP sets nothing, as in a log.
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(?!\$\{?\1\}?$)(.*)")
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?=(.*)\}")
_VALUE = re.compile(
    r"^[ \t]*(?:(?:export|local|declare(?: -a)?)[ \t]+)?([A-Za-z_]\w*)\+?="
    # An array may have $((...)) and $(...) in it.
    r"(?:\"([^\"]*)\"|'([^']*)'|\(((?:[^()$]++|\$\((?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+\)|\$)*+)\))",
    re.M,
)
# What sets a variable, besides an assignment: loops, `read`, and arithmetic.
_SETTER = re.compile(
    r"\b(?:for|select)[ \t]++(?P<item>\w++)[ \t]++in\b|\bread[ \t]++(?P<read>[^\n;|<&]{1,200})"
    r"|\b(?P<sum>[A-Za-z_]\w*+)[ \t]*+(?:[-+*/%]=|\+\+)"
)
_USE = re.compile(r"\$\{?([A-Za-z_]\w*)")
# Set by Slurm.
_SBATCH = re.compile(
    r"^#SBATCH[ \t]+--?(nodes|N|gpus-per-node|ntasks-per-node)"
    r"[= \t]++(?:[a-z]\w*:)?(\d{1,9})(?!\S)",
    re.M,
)
_SLURM = {
    "nodes": ("NNODES", "JOB_NUM_NODES"),
    "N": ("NNODES", "JOB_NUM_NODES"),
    "gpus-per-node": ("GPUS_PER_NODE",),
    "ntasks-per-node": ("NTASKS_PER_NODE",),
}
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]((?:[^{}]|\$\{[^{}]*\})*))?\}|(\w+))")
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:[./]\w+)*(?:@[\w.]*)?)=(.*)", re.S)
# Arguments, and variables with the name of options.
_ARGUMENTS = re.compile(
    r"\$\{?([@*]|(?!\w*(?:dist|launch|run|slurm|docker|ray|prof|eval"
    r"|data|optim|wandb|log|output|ckpt|token))"
    r"\w*(?:arg|option|opts|overr|flags|params|extra(?!ct)|parallel)\w*)"
    r"(?:\[[@*]\]|:\d+)?\}?",
    re.I,
)
_ASSIGNED = re.compile(r"\b(\w++)\+?=")
_UNDOTTED = re.compile(r"[a-z]\w*")
_SETS = re.compile(r"export|local|env|declare|typeset|readonly|-[aAirx]+")
# Slurm's gpu:8, h100:8 and gpu:h100:8.
_GRES = re.compile(r"(?:gpu:)?(?:[a-z]\w*:)?(\d{1,12})")
_MAX_DEPTH = 20
_MAX_CONDITIONS = 4
_MAX_CONSTANT = 1000
_MAX_CALL = 200  # characters of a call before one of its arguments


class Word(NamedTuple):
    """A text, and the offsets of its place; -1 if several places define it."""

    text: str
    start: int = -1
    end: int = -1


class Option(NamedTuple):
    """An option without its value, its start, and the word after it or after its ``=``."""

    text: str
    start: int
    value: Word | None


class Script:
    """The words of a text, its options, and the numbers of its variables. ``sourced`` are texts of
    files.
    """

    def __init__(self, text: str, sourced: Sequence[str] = ()) -> None:
        self.text = text
        self._sourced_text = "\n".join(sourced)
        self.sourced: dict[str, str] = {}
        for other in map(Script, sourced):
            values = {name: other.read_constant(f"${name}") for name in other.assigned}
            self.sourced |= {name: one for name, one in values.items() if one is not None}
        # A lone dash begins an item of a YAML list.
        self._words = [
            Word(found["word"], *found.span())
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
        self.assigned: dict[str, list[Word]] = {}
        for i, word in enumerate(self._words):
            found = _ASSIGNMENT.fullmatch(word.text) or _DEFAULT.fullmatch(word.text)
            if found:
                value = self._take_part(word, found)
                value = value if value.text else self._find_quoted(i) or value
                self.assigned.setdefault(found[1], []).append(value)
        for option in _SBATCH.finditer(text):
            value = self._take_part(Word("", 0), option)
            for name in _SLURM[option[1]]:
                self.assigned.setdefault(f"SLURM_{name}", [value])
        for setter in _SETTER.finditer(text):
            for name in re.findall(r"[A-Za-z_]\w*", setter[setter.lastgroup or 0]):
                # No word of a script is only this: a value that is unknown.
                self.assigned.setdefault(name, []).append(Word("$", *setter.span()))
        self._variables: dict[str, Word | None] = {}
        self._done: set[str] = set()
        self._is_unsure = _make_test([])
        self.is_value = _make_test([value.span() for value in _VALUE.finditer(text)])
        # A condition may depend on a variable that another one sets.
        dead: list[tuple[int, int]] | None = None
        for _ in range(_MAX_CONDITIONS):
            before = dead
            dead, unsure = find_branches(text, self.read_constant)
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
        for name, values in self.assigned.items():
            self.assigned[name] = [word for word in values if not is_dead(word.start)]
        self._variables.clear()
        self._done.clear()

    def read_constant(self, text: str) -> str | None:
        """The text of a word of a condition, as `read`."""
        found = self.read(Word(text.strip("\"'")))
        return None if found is None or len(found.text) > _MAX_CONSTANT else found.text

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

    def list_elsewhere(self) -> dict[str, int]:
        """The words that stand for options from elsewhere, with their lines."""
        known = {*_ASSIGNED.findall(self.text)}
        if not _MARK_IN_STRING.search(self._sourced_text):
            known |= {*_ASSIGNED.findall(self._sourced_text)}
        words = ((word, _ARGUMENTS.fullmatch(word.text)) for word in self._words)
        return {
            word.text: self.find_line(word.start)
            for word, found in words
            if found and found[1] not in known
        }

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
                    start = word.end - len(rest)
                    value = Word(rest, start, word.end) if rest else self._find_quoted(i)
                yield Option(option, word.start, value)
            elif (found := _OVERRIDE.fullmatch(word.text)) and self._is_override(
                word, found[1], read
            ):
                value = self._take_part(word, found)
                yield Option(
                    found[1],
                    word.start,
                    value if found[2] else self._find_quoted(i),
                )

    def _is_override(self, word: Word, key: str, read: dict[int, tuple[int, bool]]) -> bool:
        """Whether ``key=value`` is an argument of a command, and no assignment or call."""
        around = self.text[max(0, word.start - _MAX_CALL) : word.start]
        if re.search(r"\w\([^()\n]*$|[^=]\($", around):
            return False
        if not key.isidentifier():
            return True
        # Any text may have TP=2; variables of the environment are in capitals.
        if not _UNDOTTED.fullmatch(key):
            return False
        command = self._find_command(word.start)
        if self.text.startswith(("echo ", "printf "), self._commands[command][0]):
            return False
        start, is_argument = read.get(command, (self._commands[command][0], False))
        before = self.text[start : word.start].split()
        is_argument = is_argument or not all("=" in one or _SETS.fullmatch(one) for one in before)
        read[command] = word.start, is_argument
        return is_argument

    def find_line(self, offset: int) -> int:
        """The first line of the command at ``offset``, whose lines end in a backslash."""
        return self._commands[self._find_command(offset)][1]

    def read_number(self, word: Word) -> Whole | None:
        """The number that a word stands for, as `read`."""
        found = self.read(word)
        if found is None or not re.fullmatch(r"-?[0-9]{1,12}", found.text):
            return None
        return Whole.at(int(found.text), found.start, found.end)

    def read_launch(self, word: Word) -> Whole | None:
        """The number of a launcher's option; Slurm's ``gpu:8`` is 8."""
        found = self.read(word)
        gres = found and _GRES.fullmatch(found.text)
        return Whole.at(int(gres[1]), word.start, word.end) if gres else None

    def read(self, word: Word, depth: int = 0) -> Word | None:
        """The text that a word stands for, without quotes, at the place that defines it; ``None``
        if only the running script knows.
        """
        if depth > _MAX_DEPTH:
            return None
        if quoted := re.fullmatch(r"([\"'])(.*)\1", word.text):
            return self.read(self._take_part(word, quoted), depth + 1)
        if word.text.startswith("$((") and word.text.endswith("))"):
            return self._evaluate_sum(word, depth)
        found = _VARIABLE.fullmatch(word.text)
        if not found:
            return None if "$" in word.text else word
        name = found[1] or found[3]
        # ``${X:-8}`` is 8 unless the script assigns X. An assignment without a text leaves it
        # unknown; the assignment that is being followed, as in ``X=${X:-8}``, does not count.
        variable = self._read_variable(name, depth)
        is_set = name in self.assigned and name in self._done
        if variable is None and found[2] is not None and not is_set:
            return self.read(self._take_part(word, found), depth + 1)
        # Several places define it: only this use of it can be rewritten.
        several = variable is not None and variable.start < 0
        return word._replace(text=variable.text) if variable and several else variable

    def _read_variable(self, name: str, depth: int) -> Word | None:
        """Its text, without a place if several places define the same."""
        if name not in self._variables:
            # A variable defined by itself, as in X=${X:-8}, is not set until then.
            self._variables[name] = None
            words = self.assigned.get(name, ())
            given = [self.read(word, depth + 1) for word in words]
            if name in self.sourced:
                given.append(Word(self.sourced[name]))
            first = given[0] if given else None
            if len(given) == 1:
                # In a branch that may not run, one value is not the only one.
                unsure = any(self._is_unsure(word.start) for word in words)
                self._variables[name] = None if unsure else first
            elif first and all(word and word.text == first.text for word in given):
                self._variables[name] = Word(first.text)
            self._done.add(name)
        return self._variables[name]

    def _evaluate_sum(self, word: Word, depth: int) -> Word | None:
        def lookup(name: str) -> int | None:
            found = self._read_variable(name, depth + 1)
            return int(found.text) if found and re.fullmatch(r"-?\d+", found.text, re.A) else None

        try:
            parsed = ast.parse(re.sub(r"[${}]", "", word.text[3:-2]).strip(), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None
        value = evaluate(parsed.body, lookup)
        return None if value is None else word._replace(text=str(value))

    @staticmethod
    def _take_part(word: Word, found: re.Match[str]) -> Word:
        """The second group of a match of a word."""
        return Word(found[2], *(word.start + at for at in found.span(2)))

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


# Of torchrun, srun, sbatch, deepspeed and accelerate.
_LAUNCH: Mapping[str, str] = {
    "--nnodes": "hosts",
    "--num-nodes": "hosts",
    "--num-machines": "hosts",
    "--nodes": "hosts",
    "-N": "hosts",
    "--nproc-per-node": "ranks_per_host",
    "--gpus-per-node": "GPUs per host",
    "--gres": "GPUs per host",
    "--ntasks-per-node": "tasks per host",
    "--world-size": "world_size",
    "--num-gpus": "GPUs",
    "--num-processes": "world_size",
    # slime, slime/utils/arguments.py: the trainer's part of a Ray cluster.
    "--actor-num-nodes": "hosts",
    "--actor-num-gpus-per-node": "ranks_per_host",
}
# Of the commands of ms-swift and LLaMA-Factory, which start torchrun with them.
_ENVIRONMENT: Mapping[str, str] = {
    "NPROC_PER_NODE": "ranks_per_host",
    "NNODES": "hosts",
}
_FLAG = re.compile(r"(?:.*\.)?(?:use_\w+|(?:no_|enable_)?(?:enable_)?sequence_parallel|enable_\w+)")
_SOURCE = re.compile(r"^[ \t]*(?:source|\.)[ \t]+[\"']?(?:\$\{?\w+\}?/|\./)?([\w./-]+)", re.M)
# A converter's degrees are those of another job's checkpoint.
_CONVERTER = re.compile(r"(?:convert|merge)\w*+\.py\b")
_TRAINER = re.compile(
    r"(?<![\w-])(?:torchrun|deepspeed|torch\.distributed\.\w+|accelerate[\s\"',]+launch)(?![\w.-])"
)
# They change the meaning of a launcher's options.
_LAUNCH_WORDS = ("deepspeed", "srun", "#SBATCH")
_MAX_SOURCED = 1 << 16
_MAX_SOURCED_FILES = 32


def read_command(name: str, text: str) -> Document:
    """The settings of a command: a script, arguments, or YAML and JSON that hold them."""
    files = dict.fromkeys(one[1] for one in _SOURCE.finditer(text))
    script = Script(text, [read_neighbor(name, one) for one in islice(files, _MAX_SOURCED_FILES)])
    settings: list[Setting] = []
    ends: dict[Setting, int | None] = {}
    launch: dict[str, set[int]] = {}
    conditional: dict[str, list[int]] = {}
    commands: set[int] = set()
    trained: set[int] = set()
    trains = bool(_TRAINER.search(_COMMENT.sub("", text)))
    # Their lists of words have a line for each.
    is_listed = name.endswith((".py", ".yaml", ".yml", ".json"))
    for command, options in script.list_commands():
        own = trains and (is_listed or bool(_TRAINER.search(_COMMENT.sub("", command))))
        is_converter = _CONVERTER.search(command)
        words = {one for one in _LAUNCH_WORDS if one in command}
        for option in options:
            dashes = len(option.text) - len(option.text.lstrip("-"))
            if key := _LAUNCH.get(option.text[:dashes] + option.text[dashes:].replace("_", "-")):
                _add_launch(launch, key, script, option, words)
                continue
            if is_converter:
                continue
            path = option.text[dashes:].replace("-", "_").lower()
            value = _read_value(script, option, path)
            line = script.find_line(option.start)
            settings.append(Setting(path, value, line, option.text))
            is_value = script.is_value(option.start)
            commands.update([] if is_value else [line])
            trained.update([line] if (trains if is_value else own) else [])
            if script.is_conditional(option.start):
                conditional.setdefault(path, []).append(len(settings) - 1)
            # The end of an option that has its value on the same line
            word = option.value
            is_near = word and "\n" not in text[option.start : word.start]
            ends[settings[-1]] = word.end if word and is_near else None
    if not launch:
        launch = _read_environment(script)
    _doubt_conditional(settings, conditional)
    axes = {one.path for one in settings if match(PLAIN.mark, one.path)}
    if axes == {"fsdp"} and "hybrid" not in text.lower():
        # ``--fsdp full_shard`` is torch's FSDP along all ranks, without a size.
        sized = re.compile(r"\d|\$")
        settings = [one for one in settings if one.path != "fsdp" or sized.search(str(one.value))]

    def insert(after: Setting, key: str, size: int) -> Edit | None:
        # Next to an option that has its value on the same line, and no quote or comma after it.
        end = ends.get(after)
        if end is None or text[end : end + 1] not in (
            "",
            " ",
            "\t",
            "\n",
            "\r",
        ):
            return None
        before, dot, last = after.key.lstrip("-").rpartition(".")
        if not after.key.startswith("-"):
            return Edit(end, end, f" {before}{dot}{key}={size}")
        key = key if "_" in last else key.replace("_", "-")
        return Edit(end, end, f" --{before}{dot}{key} {size}")

    return Document(
        name,
        text,
        "command",
        split_allocations(settings),
        insert,
        _count_ranks(launch),
        commands,
        trained,
        script.list_elsewhere(),
    )


def _doubt_conditional(settings: list[Setting], conditional: Mapping[str, list[int]]) -> None:
    """Make the degrees unknown that only one branch of a condition has."""
    for at, *others in conditional.values():
        one = settings[at]
        if not others and is_whole(one.value):
            why = f"{one.key} depends on a condition; {INSTEAD}"
            settings[at] = one._replace(value=Computed(why))


def _read_value(script: Script, option: Option, path: str) -> object:
    """The value of an option."""
    word = option.value
    if _FLAG.fullmatch(path) and (word is None or word.text.lower() not in ("true", "false")):
        return True
    # A sweep of Hydra and others: 2,4.
    if word and re.match(r",[\d$]", script.text[word.end : word.end + 2]):
        return Computed(f"{option.text} has several values; {INSTEAD}")
    number = script.read_number(word) if word else None
    if number is not None:
        return number
    if word is None or (word.text.startswith("-") and option.text.startswith("-")):
        return Computed(f"{option.text} has no value; pass an integer after it")
    found = script.read(word)
    if found is not None:
        return found.text
    return Computed(
        f"{option.text} {shorten(word.text)} has no single value in this file; {INSTEAD}"
    )


def _add_launch(
    launch: dict[str, set[int]],
    key: str,
    script: Script,
    option: Option,
    words: Set[str],
) -> None:
    """Add the number of a launcher's option, if it is that of the job.

    ``words`` are those of `_LAUNCH_WORDS` in its command.
    """
    # Ray's --num-gpus are of a cluster, and a step of srun may be smaller than its job.
    if (key == "GPUs" and "deepspeed" not in words) or (
        "srun" in words and f"job's {key}" in launch
    ):
        return
    found = option.value and script.read_launch(option.value)
    launch.setdefault(key, set()).update([] if found is None else [int(found)])
    if "#SBATCH" in words:
        launch[f"job's {key}"] = set()


def _read_environment(script: Script) -> dict[str, set[int]]:
    """The numbers of a launcher that the script passes as variables."""
    found = {}
    for variable, key in _ENVIRONMENT.items():
        if script.assigned.get(variable) or variable in script.sourced:
            number = script.read_number(Word(f"${variable}"))
            found[key] = set() if number is None else {int(number)}
    return found


def read_neighbor(name: str, file: str) -> str:
    """The text of a short file, by its path from another one; empty if there is none in the
    repository, in the working directory or, outside of both, below the folder of the other file.
    """
    try:
        folder = Path(name).parent.resolve()
        path = (folder / file).resolve()
        around = [folder, *folder.parents]
        root = next((one for one in around if (one / ".git").exists()), Path.cwd())
        if not path.is_relative_to(root if root in around else folder):
            return ""
        is_short = path.is_file() and path.stat().st_size <= _MAX_SOURCED
        return path.read_text(encoding="utf-8") if is_short else ""
    except (OSError, ValueError, RuntimeError):  # before Python 3.13, of links in a circle
        return ""


def _count_ranks(given: Mapping[str, set[int]]) -> dict[str, int]:
    """Hosts, ranks on each host and ranks that a command starts, if it specifies them."""
    # Several commands of one script may start different numbers.
    known = {key: min(values) for key, values in given.items() if len(values) == 1}
    found = {key: value for key, value in known.items() if 1 <= value <= 1 << 24}
    hosts = found.get("hosts")
    per_host = found.get("ranks_per_host") or found.get("GPUs per host")
    if per_host is None and hosts is not None:
        # The launcher of DeepSpeed counts GPUs of a host; one task may start a rank for each GPU.
        per_host = found.get("GPUs")
    if per_host is None and found.get("tasks per host", 1) > 1:
        per_host = found["tasks per host"]
    total, alone = found.get("world_size"), None
    if total is None and hosts is None:
        alone = found.get("GPUs") or (None if "hosts" in given else found.get("ranks_per_host"))
    counts = (hosts, per_host, total, alone)
    names = ("hosts", "ranks_per_host", "world_size", "ranks of one host")
    return {key: n for key, n in zip(names, counts, strict=True) if n is not None}


# Part of each key in the table; a text without them has no degrees.
_MARK = re.compile(
    r"parallel|actor_rollout_ref|fsdp_size|autotp"
    r"|ring_attn_size|allocation_mode|backend=|trainer\.placement"
    r"|(?<![\w-])--?(?:tp|pp|dp|cp|sp|ddp|fsdp)[\w-]*",
)
_MARK_IN_STRING = re.compile(
    r"--(?:[\w.-]*parallel|(?:[\w.]+[._-])?(?:tp|pp|dp|cp|ep|sp|ddp|fsdp)(?![a-z]))"
    r"|actor_rollout_ref|\w_parallel_\w{1,99}="
)
# An option with a value, or Hydra's override, in a string.
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w.-]*[= ]+[^\s-]|(?<![\w.])[a-z]\w*(?:\.\w+)+=\S")
_QUOTE = re.compile(r"[rfbuRFBU]{0,2}(?:\"{3}|'{3}|[\"'])|\\[nt\"']")
_NO_COMMANDS = {
    "add_argument",
    "add_option",
    "option",
    "Option",
    "print",
    "warn",
    "info",
    "error",
    "format_help",
}
_HELP = ("help", "description", "epilog")


def recognises(name: str, text: str) -> bool:
    """Whether the text may have an option for the size of an axis; if not, `read` is empty."""
    return not name.endswith((".py", ".pyi", ".toml")) and bool(_MARK.search(text))


def read_strings(name: str, text: str, *, world_size: int | None) -> JobFile:
    """The meshes of the command lines in strings of Python, which a launcher of a job has.

    The file without all but these strings is read as one script, so that places stay the same.
    """
    if not _MARK_IN_STRING.search(text):
        return JobFile()
    try:
        source = PythonText(parse(name, text), text)
    except LayoutError:
        return JobFile()
    edits = []
    for node in _list_arguments(source.tree):
        start, end = source.find_span(node)
        words = _QUOTE.sub(lambda quote: " " * len(quote[0]), text[start:end])
        edits.append(Edit(start, end, words))
    script = apply_edits(re.sub(r"[^\n]", " ", text), edits) or ""
    document = replace(read_command(name, script), commands=frozenset())
    found = read_document(document, world_size)
    if not (found.is_read or found.skipped):
        from meshplan.lint._unread import find_unread_in_text

        unread = find_unread_in_text(name, script)
        return replace(found, skipped=() if unread is None else (unread,))
    # Only the strings would be written.
    return replace(found, jobs=tuple(replace(job, rewrite=None) for job in found.jobs))


def _list_arguments(tree: ast.Module) -> list[ast.expr]:
    """The strings with an option and its value, and the words of a list of arguments.

    Definitions of options (``add_argument``), help and docstrings are no commands.
    """
    found: list[ast.expr] = []
    help_texts = {
        getattr(node.value, "id", None)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg in _HELP
    }
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    for node, is_word in pending:
        if isinstance(node, ast.Constant | ast.JoinedStr):
            parts = getattr(node, "values", [node])
            text = "".join(str(getattr(one, "value", "")) for one in parts)
            if isinstance(getattr(node, "value", ""), str) and (is_word or _OPTION.search(text)):
                found.append(node)
        elif (isinstance(node, ast.Call) and find_callee(node) in _NO_COMMANDS) or (
            isinstance(node, ast.Assign) and help_texts & {*map(find_callee, node.targets)}
        ):
            continue
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            words = [str(getattr(one, "value", "")) for one in getattr(node, "elts", ())]
            is_command = any(a[:2] == "--" and b[:1] != "-" for a, b in pairwise(words))
            is_help = isinstance(node, ast.keyword) and node.arg in _HELP
            pending += [(one, is_command) for one in ast.iter_child_nodes(node) if not is_help]
    return found


def read(name: str, text: str, *, world_size: int | None) -> JobFile:
    """The meshes of the options."""
    return read_document(read_command(name, text), world_size)
