"""Workflow commands, which GitHub Actions shows as annotations of files.

The form and the escapes: https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from meshplan.lint._finding import Finding, LintReport
from meshplan.lint._reporters._places import relative
from meshplan.lint._reporters._words import body, one_line, where

__all__ = ["render"]

_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def render(report: LintReport) -> str:
    """One command for each finding; nothing if there are none."""
    return "".join(_command(finding) + "\n" for finding in report.findings)


def _command(finding: Finding) -> str:
    source = finding.source
    properties = []
    message = one_line(finding.message)
    if source.file and source.file != "-":
        properties.append(f"file={_property(relative(source.file))}")
        if source.line is not None:
            properties.append(f"line={source.line}")
    else:
        message = f"{where(source)}: {message}"
    properties.append(f"title={_property(finding.code)}")
    text = "\n".join([message, *body(finding)])
    return f"::{_COMMANDS[finding.severity]} {','.join(properties)}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(one_line(text)).replace(":", "%3A").replace(",", "%2C")
