"""Codes of rules and errors by code or by name, and the page that explains each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import MappingProxyType

from meshplan import errors
from meshplan._message_text import find_near
from meshplan.errors import MeshplanError, PolicyError
from meshplan.lint._rules._rule import RULES

_CLASSES = [
    cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, MeshplanError)
]
ERRORS: Mapping[str, type[MeshplanError]] = MappingProxyType(
    {cls.code: cls for cls in sorted(_CLASSES, key=lambda cls: cls.code)}
)

# Letters that are mistaken for digits.
_MISREAD = str.maketrans("oil", "011")


def find_code(words: str) -> str:
    """The code of a rule or an error, by code or name, case-insensitive.

    Raises:
        PolicyError: an unknown code; the message lists similar ones.
    """
    code = _list_names().get(words.strip().lower())
    if code is not None:
        return code
    near = find_near_codes(words)[:3]
    hint = f"similar: {', '.join(near)}" if near else "meshplan rule --all lists all"
    raise PolicyError(f"no rule or error {words[:40]!a}; {hint}")


_NEAR = 20  # between the numbers of two codes


def find_near_codes(words: str) -> list[str]:
    """Codes similar to an unknown one, the most similar first."""
    known = _list_names()
    given = words.strip().lower()[:40]
    if given.startswith("mp"):
        given = given.translate(_MISREAD)
    parts = [name for name in known if len(given) > 2 and given in name]
    similar = find_near(given, known, 5, 0.7)
    if re.fullmatch(r"mp\d{3}", given):
        # Codes of one family have one subject; digits are swapped more often than mistaken.
        family = [name for name in known if re.fullmatch(rf"{given[:3]}\d\d", name)]
        near = {name: abs(int(name[2:]) - int(given[2:])) for name in family}
        family = [name for name in family if near[name] < _NEAR or sorted(name) == sorted(given)]
        family.sort(key=lambda name: (sorted(name) != sorted(given), near[name]))
        similar = family[:5] or similar
    return list(dict.fromkeys(known[name] for name in parts + similar))


def _list_names() -> dict[str, str]:
    known = {code.lower(): code for code in (*RULES, *ERRORS)}
    known |= {rule.name: rule.code for rule in RULES.values()}
    return known | {cls.__name__.lower(): code for code, cls in ERRORS.items()}


def format_rule_page(code: str) -> str:
    """The page of a rule or an error in Markdown: its meaning, reason and fix. Raises PolicyError
    for an unknown code, with similar ones.
    """
    code = find_code(code)
    if code in ERRORS:
        return _format_error_page(ERRORS[code])
    rule = RULES[code]
    return (
        f"# {rule.name} ({code})\n\nSeverity: {rule.severity}. {rule.summary}\n\n{rule.read_page()}"
    )


def _format_error_page(cls: type[MeshplanError]) -> str:
    summary = re.sub(r"``([^`]*)``", r"`\1`", inspect.cleandoc(cls.__doc__ or ""))
    if issubclass(cls, ValueError | TypeError):
        builtin = "ValueError" if issubclass(cls, ValueError) else "TypeError"
        why = "A mistake in the call or in its input; raised before anything is sent."
    elif issubclass(cls, RuntimeError):
        builtin, why = (
            "RuntimeError",
            "The state of the job or of the cluster, not of the call.",
        )
    else:
        builtin, why = "Exception", "Each of its children has a code of its own."
    return (
        f"# {cls.__name__} ({cls.code})\n\n"
        f"Raised as `meshplan.errors.{cls.__name__}`, a kind of `{builtin}`.\n\n"
        f"## What\n\n{summary}\n\n"
        f"## Why\n\n{why}\n\n"
        "## Fix\n\nThe message has the problem, the invalid value, and a valid one.\n"
    )
