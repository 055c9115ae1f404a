"""Every behaviour of the systems that came before has its row, and its test."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "seed-coverage.md").read_text()
IDS = [
    *(f"RA-{n:02}" for n in (*range(1, 34), *range(40, 53))),
    *(f"TT-{n:02}" for n in range(1, 17)),
    *(f"TP-{n:02}" for n in range(1, 25)),
    *(f"SG-{n:02}" for n in range(1, 23)),
]
CELLS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| [A-Z]{2}-\d\d ", line)
]
ROWS = {cells[0]: cells[1:] for cells in CELLS}


@cache
def functions(file: str) -> dict[str, str]:
    """Test functions of a file, decorators and all."""
    text = (ROOT / file).read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def test_every_id_has_a_row() -> None:
    assert [cells[0] for cells in CELLS] == IDS


@pytest.mark.parametrize("name", IDS)
def test_a_row_has_its_test_or_its_reason(name: str) -> None:
    what, here, how, test = ROWS[name]
    assert what
    assert here in ("taken", "other", "not taken")
    if here == "not taken":
        assert len(how) > 20
        assert not test
        return
    match = re.fullmatch(r"`(tests/test_\w+\.py)::(test_\w+)`", test)
    assert match, test
    source = functions(match[1]).get(match[2], "")
    assert source, f"{test} is no test"
    ids = {one.upper().replace("_", "-") for one in re.findall(r"[A-Za-z]{2}[-_]\d\d", source)}
    for first, last in re.findall(r"([a-z]{2}_\d\d)_to_([a-z]{2}_\d\d)", source):
        ids |= {f"{first[:2].upper()}-{n:02}" for n in range(int(first[3:]), int(last[3:]) + 1)}
    assert name in ids, f"{test} does not say that it is about {name}"
    if here == "other":
        assert how


def test_tests_named_in_the_text_are_there() -> None:
    for file, name in re.findall(r"`(tests/test_\w+\.py)::(test_\w+)`", PAGE):
        assert name in functions(file)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)", PAGE))
def test_links(link: str) -> None:
    assert (ROOT / "docs" / link).exists()
