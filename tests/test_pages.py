"""All pages: links and images lead somewhere, every page is found, every block is run by a test."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

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

_LINK = re.compile(r"\]\(\s*([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\s*\)")
_ADDRESS = re.compile(r"(?<![\w(])(https?://[^\s<>)\]`|]+)")
_CODE = re.compile(r"^(```+|~~~+).*?^\1$|`[^`\n]+`", re.M | re.S)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#* *$", re.M)
_HOST = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}")


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


def links(text: str) -> list[str]:
    """What a page links to or shows as an image, and the addresses that it writes out."""
    prose = _CODE.sub("", text)
    return _LINK.findall(prose) + _ADDRESS.findall(_LINK.sub("", prose))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^(```+|~~~+).*?^\1$", "", text, flags=re.M | re.S)
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(prose):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def target(page: str, link: str) -> tuple[Path, str]:
    """The file that a relative link leads to, and the anchor in it."""
    path, _, anchor = link.partition("#")
    place = ROOT / page
    return ((place.parent / unquote(path)).resolve() if path else place.resolve()), anchor


def wrong(page: str, link: str) -> str:
    """The error of a link; empty if there is none."""
    parts = urlsplit(link)
    if parts.scheme == "mailto":
        return ""
    if parts.scheme or link.startswith("//"):
        if parts.scheme != "https":
            return "not https"
        return "" if _HOST.fullmatch(parts.hostname or "") else "not a host"
    file, anchor = target(page, link)
    if not file.is_relative_to(ROOT.resolve()):
        return "outside of the repository"
    if not file.exists():
        return "no such file"
    if anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
        return "no such heading"
    return ""


def test_broken_links_are_found() -> None:
    page = (
        "[a](docs/lint.md#jobs) [b](docs/lint.md#none) ![c](docs/no.svg) <http://a.example>\n"
        "[d](../../etc) [e](https://a) `[f](none.md)`\n```\n[g](none.md)\n```\n[h](#a-page)\n"
        "https://docs.example.org/x\n"
    )
    found = {link: wrong("README.md", link) for link in links(page)}
    assert found == {
        "docs/lint.md#jobs": "",
        "docs/lint.md#none": "no such heading",
        "docs/no.svg": "no such file",
        "../../etc": "outside of the repository",
        "https://a": "not a host",
        "#a-page": "no such heading",
        "http://a.example": "not https",
        "https://docs.example.org/x": "",
    }


def test_anchors_match_github() -> None:
    page = "# What `install` does, and [why](x.md)\n## A\n## A\n```\n# no heading\n```\n"
    assert anchors(page) == {"what-install-does-and-why", "a", "a-1"}


@pytest.mark.parametrize("page", pages())
def test_every_link_leads_somewhere(page: str) -> None:
    found = {link: wrong(page, link) for link in links(text_of(page))}
    assert {link: why for link, why in found.items() if why} == {}


def test_every_page_is_found() -> None:
    seen: set[Path] = set()
    waiting = [(ROOT / start).resolve() for start in ("README.md", "docs/index.md")]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        page = path.relative_to(ROOT.resolve()).as_posix()
        near = (target(page, link)[0] for link in links(text_of(page)) if "://" not in link)
        waiting += [file for file in near if file.suffix == ".md" and file.exists()]
    assert [
        page for page in pages() if page.startswith("docs/") and (ROOT / page).resolve() not in seen
    ] == []


def test_every_page_is_in_the_index_once() -> None:
    listed = [
        link for link in links(text_of("docs/index.md")) if "#" not in link and "://" not in link
    ]
    assert [link for link, count in Counter(listed).items() if count > 1] == []
    files = {target("docs/index.md", link)[0] for link in listed}
    # docs/architecture.md lists decisions, which are not for users.
    mine = [page for page in pages() if re.match(r"docs/(?!index\.md$|adr/)", page)]
    assert [page for page in mine if (ROOT / page).resolve() not in files] == []


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
