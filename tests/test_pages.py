"""Every Python block of the pages is run by a test; `mkdocs build --strict` checks their links."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.pages import ROOT, blocks

# Which test runs, or compares with its source, what the Python blocks of a page say.
RUN_BY = {
    "README.md": "tests/test_pages_run.py",
    "docs": "tests/test_pages_run.py",
    "docs/api": "tests/test_pages_run.py",
    "docs/howto": "tests/test_pages_run.py",
    "examples": "tests/test_pages_run.py",
    "docs/explanation": "tests/test_explanations.py",
}


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


def test_every_python_block_is_run() -> None:
    tests: Counter[str] = Counter()
    for page in pages():
        if not page.startswith(("docs/adr/", "meshplan/")):
            found = blocks(text_of(page), "python")
            fences = re.findall(r"^ *(?:```+|~~~+) *(?:python|py|diff)\b", text_of(page), re.M)
            assert len(fences) == len(found), f"{page}: a fence that no test can read"
            if found:
                place = page if page in RUN_BY else page.rpartition("/")[0]
                assert place in RUN_BY, f"{page} has Python blocks and no test that runs them"
                tests[RUN_BY[place]] += 1
    assert tests["tests/test_pages_run.py"] > 10
    for test in tests:
        assert (ROOT / test).exists(), test


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


# Code that compares replicas or runs, and what a plain run beside it is called.
_COMPARES = re.compile(r"verify_replicas\(|int32\)|\bbits\(|\bdigest\(")
_PLAIN = re.compile(r"nccl_model|gloo|\bplain = ")
# Where a plain run is not beside it: why, or which test has it.
WITHOUT_PLAIN = {
    "docs/howto/experts.md": "nothing is reduced before the comparison",
    "docs/howto/tensor-parallel.md": "tests/backend/test_trainers.py, jobs with TP",
}


def test_claims_of_agreement_are_seeded_and_stand_beside_a_plain_run() -> None:
    claims = set()
    for name in [*pages(), *(f"examples/{one.name}" for one in (ROOT / "examples").glob("*.py"))]:
        parts = [one.text for one in blocks(text_of(name), "python")]
        code = text_of(name) if name.endswith(".py") else "\n".join(parts)
        if not name.startswith(("docs/api/", "docs/adr/")) and _COMPARES.search(code):
            claims.add(name)
            assert bool(_PLAIN.search(code)) != (name in WITHOUT_PLAIN), name
            assert re.search(r"manual_seed|seed_everything", code), name
            assert re.search(r"\bassert |raise SystemExit|return 1 if ", code), name
    assert claims >= WITHOUT_PLAIN.keys()
