"""Which rules are asked for: ``--select``, ``--extend-select``, ``--ignore``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshplan.errors import PolicyError
from meshplan.lint._rules import ERRORS, RULES, near_codes

__all__ = ["Selection"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Rules by code or by prefix; made by `of`.

    As in ruff, the longest prefix that fits a rule decides over it, and of two that are equally
    long the one that ignores: ``--select MP1 --ignore MP101`` leaves MP101 out, and
    ``--ignore MP1 --extend-select MP101`` leaves it in.

    Attributes:
        selected: prefixes; the empty one is that of all rules.
        ignored: prefixes.
    """

    selected: frozenset[str] = frozenset({""})
    ignored: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        select: Iterable[str] = (),
        extend_select: Iterable[str] = (),
        ignore: Iterable[str] = (),
    ) -> Selection:
        """From what a user wrote: codes, prefixes or ``ALL``, in any case, also with commas.

        Args:
            select: instead of all rules.
            extend_select: these too.
            ignore: not these.

        Raises:
            PolicyError: a selector that fits no rule; the message lists near ones.
        """
        return cls(
            selected=(_prefixes(select) or frozenset({""})) | _prefixes(extend_select),
            ignored=_prefixes(ignore),
        )

    def wants(self, code: str) -> bool:
        """Whether the findings of a rule are asked for.

        Args:
            code: of the rule.
        """
        return _longest(code, self.selected) > _longest(code, self.ignored)


def _longest(code: str, prefixes: Iterable[str]) -> int:
    return max((len(prefix) for prefix in prefixes if code.startswith(prefix)), default=-1)


def _prefixes(selectors: Iterable[str]) -> frozenset[str]:
    return frozenset(_prefix(one) for given in selectors for one in given.split(","))


def _prefix(selector: str) -> str:
    given = selector.strip().upper()
    if given == "ALL":
        return ""
    if given.startswith("MP") and any(code.startswith(given) for code in RULES):
        return given
    raise PolicyError(f"no rule has the selector {selector[:40]!a}; {_hint(given)}")


def _hint(given: str) -> str:
    usage = "write a code (MP101), a prefix (MP1) or ALL"
    if given in ERRORS:
        return f"{given} is an error, which cannot be left out; {usage}"
    near = [code for code in near_codes(given) if code in RULES][:3]
    return f"{usage}; near it are {', '.join(near)}" if near else usage
