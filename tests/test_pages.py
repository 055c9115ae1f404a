"""Code and tests that pages name exist; `mkdocs build --strict` checks their links."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from tests.pages import ROOT


def pages() -> list[str]:
    """All pages of the repository, without what tools have put there."""
    found: list[str] = []
    for folder, inside, names in os.walk(ROOT):
        inside[:] = [name for name in inside if not name.startswith(".") and name != "build"]
        relative = Path(folder).relative_to(ROOT)
        found += [(relative / name).as_posix() for name in names if name.endswith(".md")]
    return sorted(found)


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_code_and_tests_that_pages_name_exist() -> None:
    names = {
        name
        for page in pages()
        if page != "CHANGELOG.md"
        for name in re.findall(r"`((?:tests|csrc|meshplan)/[\w/]+\.\w+(?:::\w+)?)`", text_of(page))
    }
    assert len(names) > 20
    for name in names - {"tests/test_format_NAME.py"}:
        file, _, function = name.partition("::")
        code = text_of(file)
        assert not function or f"def {function}(" in code, name
