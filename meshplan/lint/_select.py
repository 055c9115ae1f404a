"""The selected rules: ``--select``, ``--extend-select``, ``--ignore``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshplan.errors import PolicyError
from meshplan.lint._rules import ERRORS, RULES, find_near_codes


@dataclass(frozen=True, slots=True)
class Selection:
    """Rules by code or by prefix; made by `of`.

    As in ruff, the longest prefix that matches a rule decides, and at equal length ``--ignore``
    wins: ``--select MP1 --ignore MP101`` skips MP101, and ``--ignore MP1 --extend-select MP101``
    checks it.
    """

    selected: frozenset[str] = frozenset({""})  # prefixes; the empty one selects all rules
    ignored: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        select: Iterable[str] = (),
        extend_select: Iterable[str] = (),
        ignore: Iterable[str] = (),
    ) -> Selection:
        """From codes, prefixes or ``ALL``, case-insensitive, optionally comma-separated.

        Args:
            select: rules to check, all by default.
            extend_select: further rules.
            ignore: rules not to check.

        Raises:
            PolicyError: a selector that matches no rule; the message lists similar codes.
        """
        return cls(
            selected=(_read_prefixes(select) or frozenset({""})) | _read_prefixes(extend_select),
            ignored=_read_prefixes(ignore),
        )

    def wants(self, code: str) -> bool:
        """Whether a rule is selected.

        Args:
            code: of the rule.
        """
        return _match_longest(code, self.selected) > _match_longest(code, self.ignored)


def _match_longest(code: str, prefixes: Iterable[str]) -> int:
    return max((len(prefix) for prefix in prefixes if code.startswith(prefix)), default=-1)


def _read_prefixes(selectors: Iterable[str]) -> frozenset[str]:
    return frozenset(_read_prefix(one) for given in selectors for one in given.split(","))


def _read_prefix(selector: str) -> str:
    given = selector.strip().upper()
    if given == "ALL":
        return ""
    if given.startswith("MP") and any(code.startswith(given) for code in RULES):
        return given
    raise PolicyError(f"no rule has the selector {selector[:40]!a}; {_suggest_selector(given)}")


def _suggest_selector(given: str) -> str:
    usage = "use a code (MP101), a prefix (MP1) or ALL"
    if given in ERRORS:
        return f"{given} is an error, which cannot be ignored; {usage}"
    near = [code for code in find_near_codes(given) if code in RULES][:3]
    return f"{usage}; similar: {', '.join(near)}" if near else usage
