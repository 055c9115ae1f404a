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

# By format, the module with its `render_FORMAT`. Only the requested one is loaded.
_MODULES = {
    "text": "text",
    "concise": "text",
    "json": "json",
    "sarif": "json",
    "github": "ci",
    "junit": "ci",
}
FORMATS: tuple[str, ...] = tuple(_MODULES)


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
    module = import_module(f"meshplan.lint._reporters.{_MODULES[output_format]}")
    options = {"color": color} if output_format == "text" else {}
    text: str = getattr(module, f"render_{output_format}")(report, **options)
    return text
