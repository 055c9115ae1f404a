"""A rule of the linter, the register of all rules, and the pages that explain codes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from meshplan import errors
from meshplan._message_text import find_near
from meshplan.errors import MeshplanError, PolicyError
from meshplan.lint._finding import Finding, Fix, Severity, Source
from meshplan.lint._programs import format_fix_list

if TYPE_CHECKING:
    from meshplan.lint._facts import JobFacts
    from meshplan.lint._rules.environment import NcclEnvironment

Need = Literal["nothing", "nodes", "domains"]
"""The facts of a cluster that a rule needs to check a mesh on it."""
Subject = Literal["mesh", "cluster", "environment", "input"]
"""What a rule checks: `JobFacts`, a `Cluster`, an `NcclEnvironment`, or comments and files."""
Check = Callable[["Rule", Any], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: its code, its severity, and the check that yields its findings."""

    subject: Subject  # selects the argument of the check
    code: str  # ``MP`` and three digits; the first is the family (1 mesh, 2 cluster, 3 environment)
    name: str
    severity: Severity  # of its findings, unless a finding has another
    summary: str
    needs: Need = "nothing"  # facts of the cluster without which a check of meshes does not run
    # Yields the findings; ``None`` if readers of files report them (MP190, MP191)
    check: Check | None = None

    def run(self, facts: Any) -> Iterable[Finding]:
        """The findings of its check."""
        return () if self.check is None else self.check(self, facts)

    def make_finding(
        self, message: str, source: Source, *, severity: Severity | None = None, **options: Any
    ) -> Finding:
        """A finding of this rule; ``options`` are further attributes of `Finding`."""
        return Finding(self.code, severity or self.severity, message, source, **options)

    def make_mesh_finding(
        self,
        facts: JobFacts,
        message: str,
        *details: str,
        fixes: tuple[Fix, ...] = (),
        severity: Severity | None = None,
        **data: Any,
    ) -> Finding:
        """A finding about the mesh of a job."""
        return self.make_finding(
            message,
            facts.job.source,
            subject=str(facts.layout),
            severity=severity,
            details=details,
            fixes=fixes,
            data=data,
            program=facts.job.program,
        )

    def make_variable_finding(
        self,
        nccl: NcclEnvironment,
        names: Sequence[str],
        message: str,
        *,
        severity: Severity | None = None,
        **data: Any,
    ) -> Finding:
        """A finding about variables; ``message`` follows their values."""
        shown = nccl.format_variables(*names)
        values = {name: nccl.values[name] for name in names if name in nccl.values}
        return self.make_finding(
            f"{shown}{message}",
            Source(option=shown),
            severity=severity,
            data={"variables": values, **data},
        )

    def read_page(self) -> str:
        """The page, without its title."""
        from importlib.resources import files

        path = files("meshplan.lint") / "pages" / f"{self.code}.md"
        return path.read_text(encoding="utf-8").replace("{fixes by program}", format_fix_list())


_registered: dict[str, Rule] = {}
RULES: Mapping[str, Rule] = MappingProxyType(_registered)
"""Every rule, in the order of codes, which is the order of execution."""


def register(new: Rule) -> Rule:
    """Add a rule. It runs, is selected, explained and reported like all others. Raises ValueError
    if the code or the name is taken.
    """
    if any(new.code == one.code or new.name == one.name for one in RULES.values()):
        raise ValueError(f"there is a rule {new.code} or {new.name} already; choose another")
    rules = sorted([*_registered.items(), (new.code, new)])
    _registered.clear()
    _registered.update(rules)
    return new


def rule(
    subject: Subject,
    code: str,
    name: str,
    severity: Severity,
    summary: str,
    needs: Need = "nothing",
) -> Callable[[Check], Rule]:
    """Register the decorated check as a rule with these attributes of `Rule`."""

    def decorate(check: Check) -> Rule:
        return register(Rule(subject, code, name, severity, summary, needs, check))

    return decorate


def list_codes_needing(need: Need) -> list[str]:
    """Codes of the rules that check a mesh only if these facts of its cluster are known."""
    return [one.code for one in RULES.values() if one.needs == need]


_CLASSES = [
    cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, MeshplanError)
]
ERRORS: Mapping[str, type[MeshplanError]] = MappingProxyType(
    {cls.code: cls for cls in sorted(_CLASSES, key=lambda cls: cls.code)}
)

# Letters that are mistaken for digits.
_MISREAD = str.maketrans("oil", "011")


def find_code(words: str) -> str:
    """The code of a rule or an error, by code or name, case-insensitive. Raises PolicyError with
    similar codes for an unknown one.
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


_CAUSES = {
    "RuntimeError": "The job or the cluster is in a state that makes the call fail.",
    "Exception": "Each subclass has a code of its own.",
}


def _format_error_page(cls: type[MeshplanError]) -> str:
    summary = re.sub(r"``([^`]*)``", r"`\1`", inspect.cleandoc(cls.__doc__ or ""))
    summary = re.sub(r"\n {4}(\w+):", r"\n* `\1`:", summary.replace("Attributes:", "Attributes:\n"))
    builtin = next(one.__name__ for one in cls.__mro__ if one.__module__ == "builtins")
    why = _CAUSES.get(builtin, "An argument or an input is invalid. No message has been sent.")
    return (
        f"# {cls.__name__} ({cls.code})\n\n"
        f"Raised as `meshplan.errors.{cls.__name__}`, a kind of `{builtin}`.\n\n"
        f"## What\n\n{summary}\n\n"
        f"## Why\n\n{why}\n\n"
        "## Fix\n\nFollow the message, or see [When something fails](../faults.md).\n"
    )
