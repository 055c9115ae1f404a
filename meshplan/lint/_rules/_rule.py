"""A rule of the linter, and the register of all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from meshplan.lint._finding import Finding, Fix, Severity, Source
from meshplan.lint._programs import format_fix_list

if TYPE_CHECKING:
    from meshplan.lint._facts import JobFacts
    from meshplan.lint._nccl_environment import NcclEnvironment

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
    # Markdown with the sections of ``pages/MP101.md``; if empty, the page of its code
    page: str = ""
    # Yields the findings; ``None`` if readers of files report them (MP190, MP191)
    check: Check | None = None

    def run(self, facts: Any) -> Iterable[Finding]:
        """The findings of its check."""
        return () if self.check is None else self.check(self, facts)

    def make_finding(self, message: str, source: Source, **options: Any) -> Finding:
        """A finding of this rule; ``options`` are further attributes of `Finding`."""
        return Finding(
            self.code,
            options.pop("severity", self.severity),
            message,
            source,
            **options,
        )

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
            severity=severity or self.severity,
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
            severity=severity or self.severity,
            data={"variables": values, **data},
        )

    def read_page(self) -> str:
        """The page, without its title."""
        path = files("meshplan.lint") / "pages" / f"{self.code}.md"
        text = self.page or path.read_text(encoding="utf-8")
        return text.replace("{fixes by program}", format_fix_list())


_registered: dict[str, Rule] = {}
RULES: Mapping[str, Rule] = MappingProxyType(_registered)
"""Every rule, in the order of codes, which is the order of execution."""


def register(new: Rule) -> Rule:
    """Add a rule. It runs, is selected, explained and reported like all others.

    Raises:
        ValueError: the code or the name is taken.
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
    page: str = "",
) -> Callable[[Check], Rule]:
    """Register the decorated check as a rule with these attributes of `Rule`."""

    def decorate(check: Check) -> Rule:
        return register(Rule(subject, code, name, severity, summary, needs, page, check))

    return decorate


def list_codes_needing(need: Need) -> list[str]:
    """Codes of the rules that check a mesh only if these facts of its cluster are known."""
    return [one.code for one in RULES.values() if one.needs == need]
