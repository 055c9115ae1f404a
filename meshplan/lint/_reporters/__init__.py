"""Reports as text for people or for programs.

The content of a report comes from files and from the command line: line breaks, control
characters, halves of surrogate pairs. Each format escapes the characters that break it.
"""

from __future__ import annotations

from importlib import import_module

from meshplan._message_text import suggest
from meshplan.errors import PolicyError
from meshplan.lint._finding import LintReport
from meshplan.lint._reporters.text import wants_color as wants_color

FORMATS = ("text", "concise", "json", "sarif", "github", "junit")


def render(report: LintReport, output_format: str, *, color: bool = False) -> str:
    """A report in one of ``FORMATS``: nothing, or lines that all end in a newline. Scripts may rely
    on ``json``, ``sarif`` and ``junit``; the others may change. ``color`` is for ``text``
    alone. Raises PolicyError for an unknown format.
    """
    if output_format not in FORMATS:
        raise PolicyError(
            f"unknown output format {output_format[:40]!a}; use one of {', '.join(FORMATS)}"
            f"{suggest(output_format, FORMATS)}"
        )
    # Only the requested module is loaded.
    module = "text" if output_format in FORMATS[:2] else "ci"
    reporter = import_module(f"meshplan.lint._reporters.{module}")
    options = {"color": color} if output_format == "text" else {}
    text: str = getattr(reporter, f"render_{output_format}")(report, **options)
    return text
