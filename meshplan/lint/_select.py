"""The selected rules, ``--select`` and the like, and comments that suppress a finding at its cause.

``# meshplan: ignore[MP101] two racks, agreed with the cluster team`` is at the end of the line of
the cause, or alone on the line before it. The reason is required. A line may have several.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshplan.errors import PolicyError
from meshplan.lint._finding import Finding, Source
from meshplan.lint._programs import find_fix, is_reached
from meshplan.lint._rules._rule import ERRORS, RULES, find_near_codes
from meshplan.lint._rules.cluster import UNUSED_IGNORE


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
        """From codes, prefixes or ``ALL``, case-insensitive, optionally comma-separated; all rules
        by default. Raises PolicyError, with similar codes, for a selector that matches no rule.
        """
        return cls(
            selected=(_read_prefixes(select) or frozenset({""})) | _read_prefixes(extend_select),
            ignored=_read_prefixes(ignore),
        )

    def wants(self, code: str) -> bool:
        """Whether a rule is selected."""
        return _match_longest(code, self.selected) > _match_longest(code, self.ignored)


def _match_longest(code: str, prefixes: Iterable[str]) -> int:
    return max(
        (len(prefix) for prefix in prefixes if code.startswith(prefix)),
        default=-1,
    )


def _read_prefixes(selectors: Iterable[str]) -> frozenset[str]:
    return frozenset(_read_prefix(one) for given in selectors for one in given.split(","))


def _read_prefix(selector: str) -> str:
    given = selector.strip().upper()
    if given == "ALL":
        return ""
    if given.startswith("MP") and any(code.startswith(given) for code in RULES):
        return given
    hint = usage = "use a code (MP101), a prefix (MP1) or ALL"
    if given in ERRORS:
        hint = f"{given} is an error, which cannot be ignored; {usage}"
    elif near := [code for code in find_near_codes(given) if code in RULES][:3]:
        hint = f"{usage}; similar: {', '.join(near)}"
    raise PolicyError(f"no rule has the selector {selector[:40]!a}; {hint}")


_START = r"#[ \t]*meshplan[ \t]*:[ \t]*"
# A reason goes to the end of the line, or to the next such comment.
_COMMENT = re.compile(
    rf"(?:^|(?<=\s)){_START}(?P<rest>ignore\b(?:(?!\s{_START}ignore\b)[^\n])*)",
    re.M,
)
_IGNORE = re.compile(r"ignore[ \t]*\[(?P<codes>[^\]]*)\](?P<reason>.*)")
_MESHPLAN_REDUCES = re.compile(
    r"meshplan|\binstall(?:s|ed)?\b|\bfsdp\.apply\b|\bddp\.register\b", re.I
)
# Reasons that name the way to a program that `install` does not reach.
_WAYS = {
    "backend": re.compile(r"\b(?:init_process_group|process_group_backend|backend)\b", re.I),
    "plugin": re.compile(r"plugin", re.I),
}
_EXAMPLE = "use, for example, # meshplan: ignore[MP101] REASON"


@dataclass(frozen=True, slots=True)
class Ignore:
    """One ignore comment."""

    line: int  # of the comment, from 1 on
    codes: tuple[str, ...]  # the codes and prefixes that it suppresses, as written
    reason: str
    target: int  # the line whose findings it suppresses

    def suppresses(self, finding: Finding) -> bool:
        """Whether it suppresses this finding of its file."""
        return finding.source.line == self.target and finding.code.startswith(self.codes)

    def misjudges(self, finding: Finding) -> bool:
        """Whether the reason is meshplan, which cannot run the reductions of this program."""
        if is_reached(finding.program) or not _MESHPLAN_REDUCES.search(self.reason):
            return False
        way = _WAYS.get(find_fix(finding.program).way)
        return way is None or not way.search(self.reason)


def read_ignores(text: str, *, file: str = "") -> tuple[Ignore, ...]:
    """The comments in a text whose comments begin with ``#``, in order of lines. Raises
    PolicyError, with the line, for one without codes, with an unknown code or without a reason.
    """
    found: list[Ignore] = []
    if "meshplan" not in text:
        return ()
    targets = _find_targets(text)
    known = {code[:length] for code in RULES for length in range(2, 6)}  # and their prefixes
    counted, line = 0, 1
    for comment in _COMMENT.finditer(text):
        line, counted = (
            line + text.count("\n", counted, comment.start()),
            comment.start(),
        )
        where = Source(file or "-", line)
        given = _IGNORE.fullmatch(comment["rest"].rstrip("\r"))
        if given is None:
            raise PolicyError(f"{where}: this comment has no rule code to ignore; {_EXAMPLE}")
        codes = tuple(code.strip() for code in given["codes"].split(","))
        wrong = next((code for code in codes if code not in known), None)
        if wrong is not None:
            raise PolicyError(f"{where}: '{wrong[:40]}' is not the code of a rule; {_EXAMPLE}")
        reason = given["reason"].strip()
        if not reason:
            raise PolicyError(
                f"{where}: an ignore comment needs a reason; "
                f"use # meshplan: ignore[{', '.join(codes)[:60]}] REASON"
            )
        found.append(Ignore(line, codes, reason, targets[line - 1]))
    return tuple(found)


def remove_ignored(
    findings: Sequence[Finding], given: Mapping[str, Sequence[Ignore]]
) -> tuple[tuple[Finding, ...], int, tuple[Finding, ...]]:
    """The findings without the suppressed ones, the number of these, and a finding MP190 for each
    comment that matches none. ``findings`` are of all rules: a comment about an unselected rule is
    in use.
    """
    kept = []
    used: set[tuple[str, Ignore]] = set()
    for finding in findings:
        file = finding.source.file
        about = [one for one in given.get(file, ()) if file and one.suppresses(finding)]
        used |= {(file, one) for one in about}
        wrong = [one for one in about if one.misjudges(finding)]
        if len(wrong) == len(about):
            kept.append(_add_reasons(finding, wrong))
    unused = [
        _report_unused(file, one, kept)
        for file, comments in given.items()
        for one in comments
        if (file, one) not in used
    ]
    return tuple(kept), len(findings) - len(kept), tuple(unused)


def _add_reasons(finding: Finding, wrong: Sequence[Ignore]) -> Finding:
    """The finding, with the reason why comments do not suppress it."""
    name = find_fix(finding.program).name
    reasons = tuple(
        f"the comment on line {one.line} does not suppress this: meshplan does not run the "
        f"reductions of {name}"
        for one in wrong
    )
    return replace(finding, details=(*finding.details, *reasons))


def _find_targets(text: str) -> list[int]:
    """The line that a comment on each line applies to: itself, or the next that is not one."""
    lines = text.split("\n")
    found = list(range(1, len(lines) + 1))
    for i in range(len(lines) - 2, -1, -1):
        if lines[i].lstrip().startswith("#"):
            found[i] = found[i + 1]
    return found


def _report_unused(file: str, ignore: Ignore, findings: Sequence[Finding]) -> Finding:
    codes = ", ".join(ignore.codes)
    lines = {
        one.source.line
        for one in findings
        if one.source.file == file
        and one.source.line is not None
        and one.code.startswith(ignore.codes)
    }
    fix = "remove it"
    if lines:
        # A finding is reported where its mesh begins, which may be the header of a table.
        fix = f"one is on line {min(lines)}: move the comment there, or remove it"
    return UNUSED_IGNORE.make_finding(
        f"no finding of {codes} on line {ignore.target} matches this comment; {fix}",
        Source(file, ignore.line),
        data={
            "codes": list(ignore.codes),
            "line": ignore.target,
            "reason": ignore.reason,
        },
    )
