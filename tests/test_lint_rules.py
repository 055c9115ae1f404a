"""The table of rules and the pages that explain them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files

import pytest
from expecttest import assert_expected_inline

from meshplan.errors import PolicyError
from meshplan.lint._rules._rule import ERRORS, RULES, find_code, format_rule_page, register
from tests.cli import meshplan
from tests.refusals import refusal

SECTIONS = ["What", "Why", "Example", "Fix", "Source"]
# A file of input, and the command that reads it, where the page shows both.
SHOWN = re.compile(
    r"```text\n(.*?)```\n\n```console\n\$ [^\n]*meshplan topo -[^\n]*\n(.*?)```", re.S
)


def headings(page: str) -> list[str]:
    outside = re.sub(r"^```.*?^```$", "", page, flags=re.S | re.M)
    return re.findall(r"^## (.*)$", outside, re.M)


def test_every_error_has_a_page() -> None:
    for code, cls in ERRORS.items():
        page = format_rule_page(code)
        assert page.startswith(f"# {cls.__name__} ({code})\n")
        assert headings(page) == ["What", "Why", "Fix"]
        assert "``" not in page


def test_every_rule_has_a_page_and_no_page_is_left_over() -> None:
    found = {path.name for path in (files("meshplan.lint") / "pages").iterdir()}
    assert found == {f"{code}.md" for code in RULES}


@pytest.mark.parametrize("code", RULES)
def test_page_of_a_rule_is_read(code: str) -> None:
    page = format_rule_page(code)
    rule = RULES[code]
    assert page.startswith(f"# {rule.name} ({code})\n\nSeverity: {rule.severity}. {rule.summary}\n")
    assert page.endswith("\n")
    assert not page.endswith("\n\n")
    assert headings(page) == SECTIONS
    parts = dict(zip(SECTIONS, re.split(r"^## .*$", page, flags=re.M)[1:], strict=True))
    assert all(len(text.strip()) > 20 for text in parts.values())
    assert re.search(rf"^\$ .*meshplan (lint|topo) .*\n(?s:.*){code}", parts["Example"], re.M)
    assert page.count("```") % 2 == 0
    assert page.isascii()
    # The model shows what may be.
    assert not re.search(r"\bwill\b", page)


def test_examples_with_a_file_print_the_shown_report() -> None:
    shown = []
    for code in RULES:
        for given, expected in SHOWN.findall(format_rule_page(code)):
            status, out, err = meshplan("topo", "-", given=given)
            assert (status, out) == (0, expected), err
            shown.append((code, code in expected))
    fixed = [(code, is_found) for code in ("MP201", "MP202") for is_found in (True, False)]
    assert shown == [*fixed, ("MP203", True)]


def test_taken_code_is_refused() -> None:
    with pytest.raises(ValueError, match="there is a rule MP101 or jagged-reduction already"):
        register(RULES["MP101"])


def test_codes_of_parser_notes_are_rules() -> None:
    carried = set()
    for path in (files("meshplan") / "topology" / "formats").iterdir():
        if path.name.endswith(".py"):
            carried |= set(re.findall(r'"(MP\d\d\d)"', path.read_text(encoding="utf-8")))
    assert carried
    assert carried <= set(RULES)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("MP101", "MP101"),
        (" mp101 ", "MP101"),
        ("jagged-reduction", "MP101"),
        ("Jagged-Reduction", "MP101"),
        ("MP212", "MP212"),
        ("TopologyInputError", "MP212"),
    ],
)
def test_code_is_found_by_name_and_code(words: str, code: str) -> None:
    assert find_code(words) == code


def test_unknown_codes_list_near_ones() -> None:
    said = []
    for words in ("MP1O1", "jagged", "MP999", "", "x\n\x1b[31m" * 1000, "\udcff", "\u2028"):
        said.append(refusal(PolicyError, format_rule_page, words))
    assert_expected_inline(
        "\n".join(said),
        """\
MP402: no rule or error 'MP1O1'; similar: MP101, MP102, MP103
MP402: no rule or error 'jagged'; similar: MP101, MP102
MP402: no rule or error 'MP999'; meshplan rule --all lists all
MP402: no rule or error ''; meshplan rule --all lists all
MP402: no rule or error 'x\\n\\x1b[31mx\\n\\x1b[31mx\\n\\x1b[31mx\\n\\x1b[31mx\\n\\x1b[31mx\\n\\x1b[3'; meshplan rule --all lists all
MP402: no rule or error '\\udcff'; meshplan rule --all lists all
MP402: no rule or error '\\u2028'; meshplan rule --all lists all""",
    )


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        (
            "from meshplan.lint._rules._rule import format_rule_page; "
            "from meshplan.lint._reporters import ci; format_rule_page('MP101')",
            ("torch", "urllib.request"),
        ),
        ("from meshplan.cli._lint import add_rule", ("meshplan.lint._rules",)),
        # What `lint --live` finds its ranks by.
        ("import meshplan.cli._ranks", ("meshplan.collectives",)),
    ],
)
def test_modules_load_without_what_they_do_not_need(code: str, missing: tuple[str, ...]) -> None:
    ask = f"import sys; {code}; print(any(name in sys.modules for name in {missing}))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=300)
    assert done.stdout == "False\n", done.stderr
