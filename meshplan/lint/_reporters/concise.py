"""One line for each finding, most severe first: ``where: severity code message``."""

from __future__ import annotations

from meshplan.lint._finding import LintReport
from meshplan.lint._reporters._words import one_line, where

__all__ = ["render"]


def render(report: LintReport) -> str:
    """Lines that a program can cut at blanks; nothing if there are no findings."""
    return "".join(
        f"{where(found.source)}: {found.severity} {one_line(f'{found.code} {found.message}')}\n"
        for found in report.findings
    )
