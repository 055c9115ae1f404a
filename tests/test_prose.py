"""Pages and docstrings use the field's terms; each of these words has a better one."""

from __future__ import annotations

import ast
import re

import pytest

from tests.pages import ROOT

INSTEAD = {
    r"nobody|somebody": "name the rank, the caller or the library",
    r"tells?|told|says": "reports, specifies, reads",
    r"(?:lies?|sits?|falls?|fell) (?:on|in|across)": "is placed on, spans",
    r"near ranks first": "intra-node first, hierarchical",
    r"one after the other": "sequentially",
    r"beside": "concurrently; compared with",
    r"what (?:was|is|were) (?:asked|planned|sent|done|run|computed)|what ran": "name the thing",
    r"votes?|voted|meeting|meets? anew": "agreement round",
    r"stood aside|left to torch": "not handled, falls through to PyTorch",
    r"number that is none": "not a valid integer",
    r"backend has not": "the backend does not support",
    r"mend(?:s|ed)?|cures?|cured": "fix, resolve",
    r"of no (?:more )?use": "invalid, unusable",
    r"alike": "identical, match, both",
    r"gives?": "returns, provides",
    r"cuts?": "shard, split",
    r"unlike nodes": "heterogeneous nodes",
    r"is none|are none": "is not one, does not exist",
    r"anew": "again",
}
# Pages that a program writes, and history.
_GENERATED = ("docs/performance.md", "docs/torch-versions.md", "docs/training/hsdp_tp.md")
# A phrase that may stand, and why.
EXCEPTIONS = {
    "gives up": "an idiom",
    "give up": "an idiom",
    "the same inputs give the same bits": "what tests and pages call G2",
    "there is none": "an idiom",
    "there are none": "an idiom",
}
# The agreement rounds of the group protocol are votes in its code.
_VOTES = "meshplan/flatten"

PAGES = sorted(
    page
    for pattern in (
        *("*.md", "docs/**/*.md", "examples/*.md", "tests/**/*.md"),
        "meshplan/lint/pages/*.md",
    )
    for page in (path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
    if page not in _GENERATED
)
PROGRAMS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("meshplan/**/*.py", "meshplan_autoload.py", "examples/*.py")
    for path in ROOT.glob(pattern)
)


def find_words(name: str, text: str, line: int = 1) -> list[str]:
    """The words that have a better one; ``line`` is that of the beginning of the text."""
    for phrase in EXCEPTIONS:
        text = text.replace(phrase, "")
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + line}: {match[0]!r}: write {better}"
        for words, better in INSTEAD.items()
        if not (name.startswith(_VOTES) and words.startswith("vote"))
        for match in re.finditer(rf"\b(?:{words})\b", text, re.I)
    ]


def blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


@pytest.mark.parametrize("page", PAGES)
def test_page_uses_the_terms_of_the_field(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    # Output and names are checked where they are made.
    text = re.sub(r"^ *```.*?^ *```$", blank, text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", blank, text)
    found = find_words(page, text)
    assert found == [], "\n".join(found)


def test_docstrings_use_the_terms_of_the_field() -> None:
    found = []
    for program in PROGRAMS:
        for node in ast.walk(ast.parse((ROOT / program).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node, clean=False)
                if text is not None:
                    # Names of code and of documented parameters.
                    text = re.sub(r"``[^`]*``|^ +[*\w, ]+:", blank, text, flags=re.M)
                    found += find_words(program, text, node.body[0].lineno)
    assert len(PROGRAMS) > 200
    assert found == [], "\n".join(found)
