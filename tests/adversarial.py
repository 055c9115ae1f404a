"""Texts that are slow to read where a pattern backtracks, or a reader goes over a text again."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from types import FrameType
from typing import Any

import meshplan

_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_EXAMPLES: dict[str, str] = {}
_CHARACTERS = "a1 \t\n_-.x\"'[(:=/,;<>{}$#|&`\\A0"


class _Late(BaseException):
    """No `Exception`: readers catch those."""


def stop_after(seconds: float, call: Callable[[], object]) -> bool:
    """Whether a call ends within this CPU time of the process; else it is stopped."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Late

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        call()
    except _Late:
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return True


def fill(piece: str | Callable[[int], str], size: int) -> str:
    """The piece again and again, up to ``size`` characters; a function gets 0, 1, 2, ..."""
    if isinstance(piece, str):
        return piece * (size // len(piece))
    pieces: list[str] = []
    count = 0
    while (count := count + len(piece(len(pieces)))) <= size:
        pieces.append(piece(len(pieces)))
    return "".join(pieces)


def list_patterns() -> dict[re.Pattern[str], str]:
    """Every pattern of the package with its place: module attributes, and literals in calls."""
    found: dict[re.Pattern[str], str] = {}
    for module in pkgutil.walk_packages(meshplan.__path__, "meshplan."):
        if module.name.endswith("__main__"):
            continue
        try:
            values = vars(importlib.import_module(module.name))
        except ImportError:  # an extra that is not installed: its literals are read below
            continue
        for name, value in values.items():
            for one in value if isinstance(value, tuple | list) else [value]:
                if isinstance(one, re.Pattern) and isinstance(one.pattern, str):
                    found.setdefault(one, f"{module.name}.{name}")
    for path in Path(meshplan.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(ast.Attribute(ast.Name("re")), [ast.Constant(str(text)), *_]):
                    found.setdefault(re.compile(text), f"{path.name}:{node.lineno}")
    return found


def list_texts(pattern: re.Pattern[str], size: int) -> set[str]:
    """Texts that repeat what each repeat of the pattern matches, with an end that does not match."""
    tree = _parser.parse(pattern.pattern, pattern.flags)
    starts = {(before, one) for before, one in _list_repeats(tree, "")}
    return {
        text + end
        for before, one in starts
        for text in (before + fill(one, size), fill(before + one, size))
        for end in ("", "\0", "\n!")
    }


def _list_repeats(tree: Any, before: str) -> Iterator[tuple[str, str]]:
    """A text of each repeat without a small bound, and of what the pattern has before it."""
    for kind, argument in tree:
        if kind in _REPEATS:
            _, most, inner = argument
            if most == _constants.MAXREPEAT or most > 8:
                yield from ((before, one) for one in _list_variants(inner) if one)
            yield from _list_repeats(inner, before)
        elif kind is _constants.BRANCH:
            for inner in argument[1]:
                yield from _list_repeats(inner, before)
        elif kind in (_constants.SUBPATTERN, _constants.ATOMIC_GROUP):
            inner = argument[3] if kind is _constants.SUBPATTERN else argument
            yield from _list_repeats(inner, before)
        elif kind in (_constants.ASSERT, _constants.ASSERT_NOT):
            yield from _list_repeats(argument[1], before)
        before += next(iter(_list_variants([(kind, argument)])), "")


def _list_variants(tree: Any) -> list[str]:
    """Short texts that a part of a pattern matches: at most 40, each branch among the first."""
    found = [""]
    for kind, argument in tree:
        if kind is _constants.LITERAL:
            texts = [chr(argument)]
        elif kind in (_constants.IN, _constants.NOT_LITERAL, _constants.ANY):
            key = str((kind, argument))
            texts = [_EXAMPLES.setdefault(key, "") or _find_example(kind, argument)]
            _EXAMPLES[key] = texts[0]
        elif kind in _REPEATS:
            least, _, inner = argument
            texts = [one * max(least, 1) for one in _list_variants(inner)]
            texts = texts if least else ["", *texts]
        elif kind is _constants.BRANCH:
            texts = [one for inner in argument[1] for one in _list_variants(inner)]
        elif kind is _constants.SUBPATTERN:
            texts = _list_variants(argument[3])
        elif kind is _constants.ATOMIC_GROUP:
            texts = _list_variants(argument)
        else:
            texts = [""]
        found = [one + text for one in found for text in texts][:40]
    return found


def _find_example(kind: Any, argument: Any) -> str:
    """A character of a set, of ``[...]`` or ``.``."""
    tree = _parser.SubPattern(_parser.State(), [(kind, argument)])
    pattern = _compiler.compile(tree)
    return next((one for one in _CHARACTERS if pattern.fullmatch(one)), "")
