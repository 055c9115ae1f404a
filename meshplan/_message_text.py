"""Parts of messages: shortened texts, and runs of consecutive numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def shorten(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def elide(text: str) -> str:
    """The text, or its beginning and its end around an ellipsis, in 100 characters."""
    return text if len(text) <= 100 else f"{text[:47]} ... {text[-47:]}"


def format_first(items: Sequence[object], most: int = 8) -> str:
    """``0, 1, 2``; the first items and dots if there are more than ``most``."""
    return ", ".join(map(str, items[:most])) + (", ..." if len(items) > most else "")


def find_near(
    word: str,
    known: Iterable[str],
    most: int = 1,
    cutoff: float = 0.6,
) -> list[str]:
    import difflib  # only messages of errors need it

    return difflib.get_close_matches(
        word[:60],
        list(known),
        n=most,
        cutoff=cutoff,
    )


def suggest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`` (did you mean 'fsdp'?)`` for an unknown word; empty if no known one is similar."""
    near = find_near(word, known, cutoff=cutoff)
    return f" (did you mean '{near[0]}'?)" if near else ""


def format_runs(numbers: Iterable[int]) -> list[str]:
    """``["0-4", "6"]`` for 0, 1, 2, 3, 4, 6, in any order."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(low) if low == high else f"{low}-{high}" for low, high in runs]
