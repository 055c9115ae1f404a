"""The page of what was measured: ``performance.md``, with a picture for each benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.picture import draw
from benchmarks.record import Bar, Case

__all__ = ["write_page"]

HEAD = """\
# Performance

For developers: every bar and every measurement. Users find the figures of a job in
[What will it cost me](cost.md).

Made by one command; do not edit. All figures of a case come from one run, in which the compared
calls take turns in the same processes. The time of a call is that of its slowest rank. The tables
have medians and, in brackets, 95th percentiles, of the cases that have a bar. Ratios are those of
medians. The command writes all cases to `build/performance.json`. What a suite does is the first
text of its module.

    make bench

It is estimated at 20 minutes on two idle cores. The budget of each suite stands in
`benchmarks/__main__.py`. The run prints the time of each suite beside its budget.
"""


def write_page(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write page and pictures.

    Args:
        found: as ``schema.json`` has it.
        folder: where ``performance.md`` and the folder ``performance`` are.

    Returns:
        The files.
    """
    pictures = folder / "performance"
    pictures.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    parts = [HEAD, "\n".join(_machine(found)), "\n## Bars\n", "\n".join(_bars(found)), ""]
    for suite in found["benchmarks"]:
        cases = [Case.from_json(case) for case in suite["cases"]]
        title = suite["title"].rstrip(".")
        parts += [f"## {title}\n"]
        if suite["skipped"]:
            parts += [f"    {suite['command']}\n", f"Left out here: {suite['skipped']}.\n"]
            continue
        parts += [f"    {suite['command']}\n"]
        drawn = draw(suite["name"], title, cases, pictures)
        if drawn:
            files += drawn
            parts += [f"![{title}](performance/{suite['name']}.png)\n"]
        parts += ["\n".join(_table([case for case in cases if case.bars] or cases)) + "\n"]
    page = folder / "performance.md"
    page.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    return [page, *files]


def _machine(found: dict[str, Any]) -> Iterator[str]:
    it = found["machine"]
    yield "| | |"
    yield "|---|---|"
    yield f"| machine | {it['processor']}, {it['cores']} cores, {it['memory_gib']:g} GiB |"
    yield f"| GPU | {it['gpu'] or 'none'} |"
    yield f"| system | {it['system']}, {it['architecture']} |"
    yield f"| with | torch {it['torch']}, Python {it['python']}, meshplan {it['meshplan']} |"
    yield f"| date | {found['date']} |"
    if found["smoke"]:
        yield "| **not to be quoted** | small cases, to see that the benchmarks work |"


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
    def reason(self) -> str:
        """Why it is not met."""
        reasons = import_module(f"benchmarks.{self.suite}").SUITE.reasons
        return str(reasons.get(self.name, "reason unknown"))


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
    yield "| benchmark | what | bar | best | worst | cases | |"
    yield "|---|---|---|---|---|---|---|"
    for goal in goals.values():
        best, worst = min(goal.values), max(goal.values)
        if goal.bar.kind == "at least":
            best, worst = worst, best
        verdict = "met" if goal.met == len(goal.values) else "**not met**"
        yield (
            f"| {goal.suite} | {goal.name} | {goal.bar.kind} {goal.bar.limit:g}{goal.unit} | "
            f"{best:.3g}{goal.unit} | {worst:.3g}{goal.unit} | {goal.met} of {len(goal.values)} | "
            f"{verdict} |"
        )
    missed = {(g.suite, g.name): g.reason for g in goals.values() if g.met < len(g.values)}
    if missed:
        yield "\nNot met:\n"
        yield from (f"* {suite}, {name}: {why}" for (suite, name), why in missed.items())


def _table(cases: Sequence[Case]) -> Iterator[str]:
    """A table for each group of cases that ran the same things, by its first case."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        ratios = tuple((of, to) for of, to, _ in case.ratios)
        groups.setdefault((tuple(case.runs), case.unit, ratios), []).append(case)
    for number, same in enumerate(groups.values()):
        if number:
            yield ""
        heads = [*(f"{name}, {same[0].unit}" for name in same[0].runs)]
        heads += [f"{of} / {to}" for of, to, _ in same[0].ratios]
        yield f"| | ranks | {' | '.join(heads)} |"
        yield "|---" * (2 + len(heads)) + "|"
        for case in same:
            cells = [
                f"{run.median:.4g} ({run.p95:.4g})" if run.samples > 1 else f"{run.median:.4g}"
                for run in case.runs.values()
            ]
            cells += [f"{value:.3g}" for _, _, value in case.ratios]
            yield f"| {case.name} | {case.ranks} | {' | '.join(cells)} |"
