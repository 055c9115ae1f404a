"""The page of what was measured: ``performance.md``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.record import Bar, Case

HEAD = """\
# Performance

For developers: every bar, and all-reduces between hosts. Users find the figures of a
job in [What will it cost me](cost.md).

`make bench` writes this page in about 20 minutes on two idle cores; do not edit it. The compared
calls of a case take turns in the same processes. The time of a call is that of its slowest rank.
All cases are in `build/performance.json` then. `python -m benchmarks NAME` runs one suite.
"""
# What no JSON is kept of.
OTHER_MACHINE = """\
## A second machine

Intel Xeon, 2 cores, 2026-11-25: fold, compiled / copy 0.965 to 0.977; replicas, digest / read 0.883
to 0.981; a training step 0.822 to 1.1 of the plain one; exact / torch of norms 0.786 to 1.5.
"""


def write_page(found: dict[str, Any], folder: Path) -> Path:
    """Write the page ``performance.md``.

    Args:
        found: as ``schema.json`` has it.
        folder: of the page.

    Returns:
        The file.

    Raises:
        ValueError: a bar is not met, and its suite has no reason for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [HEAD, _machine(found), "\n## Bars\n", *_bars(found), "", OTHER_MACHINE]
    for suite in found["benchmarks"]:
        if suite["skipped"] or suite["name"] == "paths":
            title = suite["title"].rstrip(".")
            parts += [f"## {suite['name']}: {title[0].lower()}{title[1:]}\n"]
            cases = [Case.from_json(case) for case in suite["cases"]]
            skipped = f"Left out here: {suite['skipped']}."
            parts += [skipped] if suite["skipped"] else _paths(cases)
            parts += [""]
    page = folder / "performance.md"
    page.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    return page


def _machine(found: dict[str, Any]) -> str:
    it = found["machine"]
    versions = f"torch {it['torch']}, Python {it['python']}, meshplan {it['meshplan']}"
    text = (
        f"Machine: {it['processor']}, {it['cores']} cores, {it['memory_gib']:g} GiB, "
        f"{it['gpu'] or 'no GPU'}, {it['system']}, {it['architecture']}, {versions}, "
        f"{found['date']}."
    )
    if found["smoke"]:
        text += " **Not to be quoted**: small cases, to see that the benchmarks work."
    return text


@dataclass
class _Goal:
    """One bar, over all cases that have it."""

    suite: str
    unit: str
    bar: Bar
    values: list[float]
    met: int = 0

    @property
    def name(self) -> str:
        return self.bar.of if self.bar.to is None else f"{self.bar.of} / {self.bar.to}"

    @property
    def range(self) -> str:
        """The measured values: one figure, or the smallest and the largest."""
        ends = dict.fromkeys(f"{value:.3g}" for value in (min(self.values), max(self.values)))
        return " to ".join(ends)

    def find_reason(self, smoke: bool) -> str:
        """Why it is not met. Small cases have none."""
        reasons = import_module(f"benchmarks.{self.suite}").SUITE.reasons
        if self.name not in reasons and not smoke:
            raise ValueError(
                f"{self.suite}: the bar of {self.name} is not met, without a reason; add one to "
                f"reasons in benchmarks/{self.suite}.py, then write the page with --from and --page"
            )
        return str(reasons.get(self.name, "a small case"))


def _bars(found: dict[str, Any]) -> Iterator[str]:
    goals: dict[tuple[str, str, Bar], _Goal] = {}
    for suite in found["benchmarks"]:
        for case in (Case.from_json(case) for case in suite["cases"]):
            for bar in case.bars:
                unit = "" if bar.to is not None else f" {case.unit}"
                key = (suite["name"], unit, bar)
                goal = goals.setdefault(key, _Goal(suite["name"], unit, bar, []))
                goal.values.append(case.value(bar))
                goal.met += case.met(bar)
    yield "| benchmark | ratio or figure | bar | measured | cases | |"
    yield "|---|---|---|---|---|---|"
    for goal in goals.values():
        limit = f"{goal.bar.kind} {goal.bar.limit:g}{goal.unit}"
        count = f"{goal.met} of {len(goal.values)}"
        verdict = "met" if goal.met == len(goal.values) else "**not met**"
        figures = f"{limit} | {goal.range}{goal.unit} | {count}"
        yield f"| {goal.suite} | {goal.name} | {figures} | {verdict} |"
    missed = [goal for goal in goals.values() if goal.met < len(goal.values)]
    reasons = {(goal.suite, goal.name): goal.find_reason(found["smoke"]) for goal in missed}
    if reasons:
        yield "\nNot met:\n"
        yield from (f"* {suite}, {name}: {why}" for (suite, name), why in reasons.items())


def _paths(cases: list[Case]) -> Iterator[str]:
    """Of float32: the times of each job, by size. Bytes and CPU times are in the JSON."""
    yield "All hosts share the cores of one machine. The limit is what a host's link must carry.\n"
    ways = ("gloo", "auto", "limit")
    table: dict[str, dict[int, str]] = {}
    for case in cases:
        about = case.parameters
        if about.get("dtype") == "float32" and case.unit == "ms" and "limit" in case.runs:
            rate, hosts, size = (int(about[name]) for name in ("rate", "hosts", "bytes"))
            row = f"{rate / 1000:g} Gb/s, {hosts} x {case.ranks // hosts}"
            medians = (float(f"{case.runs[way].median:.3g}") for way in ways)
            table.setdefault(row, {})[size] = ", ".join(f"{one:g}" for one in medians)
    sizes = sorted({size for found in table.values() for size in found})
    yield f"| ms: {', '.join(ways)} | {' | '.join(f'{size >> 10} KiB' for size in sizes)} |"
    yield "|---" * (1 + len(sizes)) + "|"
    for row, found in table.items():
        yield f"| {row} | {' | '.join(found[size] for size in sizes)} |"
