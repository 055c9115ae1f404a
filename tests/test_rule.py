"""``meshplan rule``: pages of rules and errors."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence

from expecttest import TestCase

from meshplan.cli._lint import explain_rules
from meshplan.errors import PolicyError
from meshplan.lint._rules._rule import ERRORS, RULES, format_rule_page
from tests.refusals import refusal


def rule(codes: Sequence[str], all_: bool = False, output_format: str = "text") -> str:
    return explain_rules(Namespace(codes=codes, all=all_, output_format=output_format))


class TestRule(TestCase):
    def test_page_of_an_error_is_printed(self) -> None:
        self.assertExpectedInline(
            rule(["mp212"]),
            """\
# TopologyInputError (MP212)

Raised as `meshplan.errors.TopologyInputError`, a kind of `ValueError`.

## What

An invalid description of a cluster: a file, an output or variables.

`line` counts from 1; `None` if it is about the whole input.

## Why

An argument or an input is invalid. No message has been sent.

## Fix

Follow the message, or see [When something fails](../faults.md).
""",
        )

    def test_all_pages_are_printed(self) -> None:
        lines = rule([], True).splitlines()
        assert len(lines) == 2 + len(RULES) + len(ERRORS)
        self.assertExpectedInline(
            "\n".join([*lines[:3], *lines[len(RULES) + 1 :][:3]]),
            """\
rules of meshplan lint
  MP101  error    jagged-reduction         Groups that must agree are placed on nodes in different ways; replicas may differ.
  MP102  info     jagged-not-shown-to-differ  Groups of an axis are placed on nodes in different ways; replicas are not shown to differ.
errors of meshplan
  MP000           MeshplanError            Base of all errors of meshplan. `str(error)` starts with the code.
  MP111           LayoutError              Axis sizes, names and ranks do not describe a mesh.""",
        )

    def test_invalid_arguments_are_refused(self) -> None:
        said = []
        for codes, all_ in (
            ([], False),
            (["MP101"], True),
            (["MP101", "MP1O2"], False),
            (["MP110"], False),
        ):
            said.append(refusal(PolicyError, rule, codes, all_))
        self.assertExpectedInline(
            "\n".join(said),
            """\
MP402: no code; use, for example, meshplan rule MP101, or --all
MP402: no code; use, for example, meshplan rule MP101, or --all
MP402: no rule or error 'MP1O2'; similar: MP102, MP101, MP103
MP402: no rule or error 'MP110'; similar: MP101, MP111, MP108""",
        )


def test_all_as_json_is_a_list_of_all_pages() -> None:
    found = json.loads(rule([], True, "json"))
    assert [one["code"] for one in found] == [*RULES, *ERRORS]
    assert all(one["page"] == format_rule_page(one["code"]) for one in found)
    assert {one["kind"] for one in found} == {"rule", "error"}
    (one,) = [one for one in found if one["code"] == "MP204"]
    assert one == json.loads(rule(["MP204"], False, "json"))
    shown = "hosts-differ", "warning", "Hosts of one job are not identical."
    assert (one["name"], one["severity"], one["summary"]) == shown
