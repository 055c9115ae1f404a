"""The page of ``--html``: one file, without a script or a server. The linter's page writer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshplan.lint._drawing import draw_meshes, quote, write_page, write_table
from meshplan.lint._facts import JobFacts
from meshplan.lint._finding import Finding
from meshplan.run._ledger import format_ranks

_MOST_ROWS = 200


def save_page(
    path: str,
    report: Mapping[str, Any],
    verdict: str,
    facts: Sequence[JobFacts],
    findings: Sequence[Finding],
) -> None:
    """Write the page of a final report; ``OSError`` if the file cannot be written."""
    parts = [f"<pre>{quote(verdict.removeprefix('[meshplan] '), lines=True)}</pre>\n"]
    if picture := draw_meshes(facts, findings, every=True):
        parts.append(f"<h2>Meshes</h2>\n<figure>\n{picture}</figure>\n")
    for title, body in (
        ("First difference of replicas", _describe_difference(report["replicas"])),
        ("Hazards", "".join(map(_describe_hazard, report["hazards"]))),
        ("Reductions by call site", _list_reductions(report["reductions"])),
        ("Settings", _list_settings(report)),
        ("Not observed", _list_texts(report["not_observed"])),
    ):
        parts.append(f"<h2>{title}</h2>\n{body or '<p>none</p>'}\n")
    command = " ".join(report["command"])[:80]
    Path(path).write_text(write_page(f"meshplan run {command}", "".join(parts)), encoding="utf-8")


def _describe_difference(replicas: Mapping[str, Any]) -> str:
    found = replicas["first_difference"]
    if found is None:
        return f"<p>none in {replicas['compared']:,} comparisons of tensors</p>"
    rows = [
        ("step", found["step"]),
        (found["kind"], found["tensor"]),
        ("ranks that agree", "; ".join(map(format_ranks, found["ranks"]["agree"]))),
        ("elements that differ", _join(found["elements"], "of", found["of"])),
        ("largest difference", found["largest"]),
        ("cause", found["cause"]),
    ]
    text = f"<pre>{quote(found['text'], lines=True)}</pre>" if found["text"] else ""
    return write_table((), [(name, "unknown" if v is None else str(v)) for name, v in rows]) + text


def _join(number: int | None, word: str, total: int | None) -> str | None:
    return None if number is None else f"{number:,} {word} {total:,}"


def _describe_hazard(one: Mapping[str, Any]) -> str:
    head = f'<span class="{one["severity"]}">{one["severity"]} {quote(one["code"])}</span>'
    details = [*one["details"], *([f"fix: {one['fix']}"] if one["fix"] else [])]
    text = f"<pre>{quote(chr(10).join(details), lines=True)}</pre>\n" if details else ""
    return f"<h3>{head}: {quote(one['text'])}</h3>\n<p>{quote(one['mesh'])}</p>\n{text}"


def _list_reductions(rows: Sequence[Mapping[str, Any]]) -> str:
    """Those outside the contract first, the most calls first."""
    ordered = sorted(rows, key=lambda row: (row["contract"] is not None, -row["calls"]))
    cells = [
        (
            row["site"],
            f"{row['call']} {row['op'] or ''}",
            row["dtype"],
            f"{row['group'] or 'a group'} ({row['group_size']} ranks)",
            f"{row['calls']:,}",
            f"{row['elements']:,}",
            row["contract"] or row["kind"],
        )
        for row in ordered[:_MOST_ROWS]
    ]
    heads = (
        "call site",
        "reduction",
        "dtype",
        "group",
        "calls",
        "elements",
        "contract",
    )
    more = f"<p>and {len(rows) - _MOST_ROWS} more</p>" if len(rows) > _MOST_ROWS else ""
    return (write_table(heads, cells) if cells else "") + more


def _list_settings(report: Mapping[str, Any]) -> str:
    differing = report["settings_that_differ"]
    rows = [
        (
            name,
            "not set" if value is None else str(value),
            "; ".join(_format_values(differing.get(name, {}))),
        )
        for name, value in report["settings"].items()
    ]
    return write_table(("setting", "rank 0", "differs between ranks"), rows)


def _format_values(values: Mapping[str, Sequence[int]]) -> Iterator[str]:
    for value, ranks in values.items():
        yield f"{value} on {format_ranks(ranks)}"


def _list_texts(texts: Sequence[str]) -> str:
    items = "".join(f"<li>{quote(one)}</li>\n" for one in texts)
    return f"<ul>\n{items}</ul>" if texts else ""
