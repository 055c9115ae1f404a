"""The hook of mkdocs: adds the pages that have no file in docs/.

These are a page for each rule and error, the pages and sources outside of docs/ that others link
to, and the names of the API, whose docstrings mkdocstrings renders.
"""

from __future__ import annotations

import posixpath
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.structure.files import File, Files

from meshplan.lint._roles import AXIS_NAMES
from meshplan.lint._rules._rule import ERRORS, RULES, format_rule_page
from tools import site_cost

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()([^()\s]+)(\))")
_FENCE = re.compile(r"^( *)(```+).*?^\1\2$|`[^`\n]+`", re.M | re.S)
# A public name, in a row of a page of the API.
_NAME = re.compile(r"`(meshplan\.[\w.]+)`(?=.*\|$)", re.M)
_CHART = "\n".join(
    f"![Slowdown of one all-reduce by number of GPUs, predicted](cost-{theme}.svg#only-{theme})"
    for theme in ("light", "dark")
)
# Pages of the repository that are pages of the site.
_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/torchtitan.md": "howto/torchtitan.md",
}


def find_place(path: str) -> str:
    """The page of the site that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("meshplan/lint/pages/"):
        return f"codes/{posixpath.basename(path)}"
    return _PAGES.get(path, f"source/{path.removesuffix('.md')}.md")


def rewrite_links(text: str, origin: str, place: str) -> tuple[str, list[str]]:
    """Point the links of a page at pages of the site. Returns the text, and the linked files.
    ``origin`` is the file of the page in the repository, ``place`` that in the site.
    """
    linked = []

    def rewrite(link: re.Match[str]) -> str:
        path, _, anchor = link[2].partition("#")
        if not path or urlsplit(path).scheme:
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        linked.append(file)
        target = posixpath.relpath(find_place(file), posixpath.dirname(place) or ".")
        return f"{link[1]}{target}{'#' + anchor if anchor else ''}{link[3]}"

    parts, at = [], 0
    for code in _FENCE.finditer(text):
        parts += [_LINK.sub(rewrite, text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, _LINK.sub(rewrite, text[at:])]), linked


def _read(path: str) -> str:
    """A repository file as a page."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = {"py": "python", "h": "cpp", "cpp": "cpp"}.get(path.rpartition(".")[2], "")
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n{text}````\n"


def _collect_pages() -> dict[str, tuple[str, str]]:
    """All pages of the site: the file of the repository, and the text."""
    pages = {}
    for code in (*RULES, *ERRORS):
        text = format_rule_page(code)
        # Pages of rules link from the folder that they are in.
        origin = f"meshplan/lint/pages/{code}.md" if code in RULES else f"docs/codes/{code}.md"
        pages[f"codes/{code}.md"] = (origin, text)
    waiting = [
        *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
        *_PAGES,
    ]
    while waiting:
        path = waiting.pop()
        place = find_place(path)
        if place in pages or not (ROOT / path).is_file():
            continue
        if path.startswith("docs/") and not path.endswith(".md"):
            continue
        pages[place] = (path, _read(path))
        waiting += rewrite_links(pages[place][1], path, place)[1]
    return pages


def on_config(config: Any) -> Any:
    """List the pages of codes in the navigation."""
    for section in config.nav:
        for title, entries in section.items():
            if title == "Reference":
                (codes,) = (one["Codes"] for one in entries if "Codes" in one)
                codes += [f"codes/{code}.md" for code in (*RULES, *ERRORS)]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and rewrite the links of all."""
    for place, (origin, text) in _collect_pages().items():
        text, _ = rewrite_links(text, origin, place)
        if place == "codes.md":
            text = f"{text}\n" + "\n".join(_list_codes())
        if place == "lint.md":
            for role, names in AXIS_NAMES.items():
                row = rf"^(\| {role} \|.*\| )such as .*\|$"
                text = re.sub(row, rf"\1`{'`, `'.join(names)}` |", text, flags=re.M)
        if place == "architecture.md":
            text = f"{text}\n" + "\n".join(_list_decisions())
        if place == "api.md":
            text = text.replace("<!-- names -->", "\n".join(_list_names()))
        if place == "cost.md":
            for theme in ("light", "dark"):
                chart = site_cost.draw_chart(dark=theme == "dark")
                files.append(File.generated(config, f"cost-{theme}.svg", content=chart))
            text = text.replace("`make docs-serve` shows the chart here.", _CHART)
            text = text.replace("`make docs-serve` shows the table here.", site_cost.make_table())
        if place.startswith("api/"):
            text = re.sub(r"^\| name \|.*\n\|---.*\n", "", text, flags=re.M)
            text = re.sub(r"^\| (`.*`) \| ?(.*)\|$", _document_names, text, flags=re.M)
        if existing := files.get_file_from_path(place):
            files.remove(existing)
        files.append(File.generated(config, place, content=text))
    return files


def _document_names(row: re.Match[str]) -> str:
    see = f"\n\nSee {row[2]}\n" if row[2] else "\n"
    return "".join(f"::: {name}{see}" for name in _NAME.findall(row[0]))


def _list_names() -> Iterator[str]:
    yield "| name | |\n|---|---|"
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for name in _NAME.findall(page.read_text(encoding="utf-8")):
            doc = pydoc.locate(name).__doc__ if callable(pydoc.locate(name)) else ""
            yield f"| [`{name}`][{name}] | {(doc or '').strip().partition(chr(10))[0]} |"


def _list_decisions() -> Iterator[str]:
    for page in sorted((ROOT / "docs" / "adr").glob("*.md")):
        title = page.read_text(encoding="utf-8").partition("\n")[0]
        yield f"{title[2:].replace('. ', '. [', 1)}](adr/{page.name})"


def _list_codes() -> Iterator[str]:
    yield "| code | rule or class | severity | meaning |\n|---|---|---|---|"
    for code, rule in RULES.items():
        yield f"| [{code}](codes/{code}.md) | {rule.name} | {rule.severity} | {rule.summary} |"
    for code, cls in ERRORS.items():
        first = pydoc.splitdoc(cls.__doc__ or "")[0].replace("``", "`")
        yield f"| [{code}](codes/{code}.md) | `{cls.__name__}` | raised | {first} |"
