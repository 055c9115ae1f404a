"""``meshplan rule``: what a rule or an error code means, why, and what to do."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

from meshplan.cli._arguments import refused
from meshplan.cli._streams import say
from meshplan.errors import MeshplanError, PolicyError
from meshplan.lint._rules import ERRORS, RULES, code_of, rule_page

__all__ = ["add", "rule", "run"]


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "rule",
        help="what a rule of the linter or an error code means, and what to do",
        description="What a rule or an error code means, why, and what to do.",
    )
    parser.add_argument("codes", nargs="*", metavar="CODE", help="MP101, or jagged-reduction")
    parser.add_argument("--all", action="store_true", help="a table of all of them")
    parser.add_argument("--output-format", choices=("text", "json"), default="text")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the pages; the exit status."""
    try:
        text = rule(given.codes, given.all, given.output_format)
    except MeshplanError as error:
        return refused(error)
    say(text)
    return 0


def rule(codes: Sequence[str], all_: bool, output_format: str) -> str:
    """The pages of ``codes``, or of all there are; ends in a newline.

    Args:
        codes: codes or names of rules and errors, in any case.
        all_: instead of ``codes``: as text, a table of all rules and errors, one line each; as
            JSON, all pages.
        output_format: ``text`` is Markdown; ``json`` is one object for one code, else a list.

    Raises:
        PolicyError: no such code (the message lists near ones), none at all, or both ways asked.
    """
    if bool(codes) == all_:
        raise PolicyError("write the codes of rules, e.g. meshplan rule MP101, or --all")
    asked = [*RULES, *ERRORS] if all_ else list(dict.fromkeys(map(code_of, codes)))
    if output_format == "json":
        found = [_entry(code) for code in asked]
        return json.dumps(found if all_ or len(found) > 1 else found[0], indent=2) + "\n"
    if all_:
        return "".join(line + "\n" for line in _table())
    return "\n".join(rule_page(code) for code in asked)


def _entry(code: str) -> dict[str, Any]:
    if code in RULES:
        one = RULES[code]
        kind, name, severity, summary = "rule", one.name, one.severity, one.summary
    else:
        cls = ERRORS[code]
        kind, name, severity, summary = "error", cls.__name__, "error", _first_line(cls)
    return {
        "code": code,
        "kind": kind,
        "name": name,
        "severity": severity,
        "summary": summary,
        "page": rule_page(code),
    }


def _table() -> Iterator[str]:
    yield "rules of meshplan lint"
    for one in RULES.values():
        yield f"  {one.code}  {one.severity:<7}  {one.name:<23}  {one.summary}"
    yield "errors of meshplan"
    for code, cls in ERRORS.items():
        yield f"  {code}  {'':<7}  {cls.__name__:<23}  {_first_line(cls)}"


def _first_line(cls: type[Exception]) -> str:
    return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0].replace("``", "`")
