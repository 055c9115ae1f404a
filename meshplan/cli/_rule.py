"""``meshplan rule``: the page of a rule or an error code."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

from meshplan.cli._options import add_output, add_verb
from meshplan.errors import PolicyError
from meshplan.lint._rules._rule import ERRORS, RULES, find_code, format_rule_page


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "rule",
        explain_rules,
        "explain a rule of the linter or an error code",
        description="Explain a rule or an error code: its meaning, its reason, and how to fix it.",
    )
    parser.add_argument("codes", nargs="*", metavar="CODE", help="MP101, or jagged-reduction")
    parser.add_argument("--all", action="store_true", help="a table of all rules and errors")
    add_output(parser)


def explain_rules(given: argparse.Namespace) -> str:
    """The pages of the codes in Markdown, with ``--all`` a table. As JSON, one object or a list."""
    if bool(given.codes) == given.all:
        raise PolicyError("no code; use, for example, meshplan rule MP101, or --all")
    codes = [*RULES, *ERRORS] if given.all else list(dict.fromkeys(map(find_code, given.codes)))
    if given.output_format == "json":
        found = [{**_describe(code), "page": format_rule_page(code)} for code in codes]
        return json.dumps(found if given.all or len(found) > 1 else found[0], indent=2) + "\n"
    if not given.all:
        return "\n".join(map(format_rule_page, codes))
    lines = []
    for heading, some in (
        ("rules of meshplan lint", RULES),
        ("errors of meshplan", ERRORS),
    ):
        lines.append(heading)
        for one in map(_describe, some):
            severity = one["severity"] if one["kind"] == "rule" else ""
            lines.append(f"  {one['code']}  {severity:<7}  {one['name']:<23}  {one['summary']}")
    return "\n".join([*lines, ""])


def _describe(code: str) -> dict[str, Any]:
    if code in RULES:
        one = RULES[code]
        found = ("rule", one.name, one.severity, one.summary)
    else:
        first = inspect.cleandoc(ERRORS[code].__doc__ or "").partition("\n")[0]
        found = ("error", ERRORS[code].__name__, "error", first.replace("``", "`"))
    return {"code": code, **dict(zip(("kind", "name", "severity", "summary"), found, strict=True))}
