"""What every benchmark is from outside: a script that prints a table, or JSON lines for the runner.

python -m benchmarks.dispatch [--smoke] [--lines]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.record import Bar, Case, machine


@dataclass(frozen=True)
class Suite:
    """A benchmark.

    Attributes:
        doc: of its module. Its first line says what is measured, the rest how.
        cases: measures them, one after the other; a few small ones, in seconds, if given true.
        total: how many there will be.
        why_not: why it cannot run on this machine, if it cannot.
        reasons: why a bar was not met at the last recording, by what the page names it:
            ``"fast / torch"``.
    """

    doc: str
    cases: Callable[[bool], Iterator[Case]]
    total: Callable[[bool], int]
    why_not: Callable[[], str | None] = lambda: None
    reasons: Mapping[str, str] = field(default_factory=dict)


def about(doc: str) -> tuple[str, str]:
    """What is measured, and how, without the command at the end."""
    first, _, rest = doc.strip().partition("\n\n")
    paragraphs = [p for p in rest.split("\n\n") if not p.startswith("    python")]
    return " ".join(first.split()), "\n\n".join(paragraphs).strip()


def run(suite: Suite) -> None:
    """The script's ``main``."""
    parser = argparse.ArgumentParser(
        description=suite.doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a few small cases, to see it work")
    parser.add_argument("--lines", action="store_true", help="a line of JSON for each case")
    options = parser.parse_args()
    why_not = suite.why_not()
    if options.lines:
        print(json.dumps({"total": suite.total(options.smoke), "skipped": why_not}), flush=True)
    elif why_not is not None:
        sys.exit(why_not)
    if why_not is not None:
        return
    if not options.lines:
        known = {**machine(), "date": time.strftime("%Y-%m-%d")}
        print(", ".join(f"{key} {value}" for key, value in known.items()), flush=True)
    for case in suite.cases(options.smoke):
        print(json.dumps(case.to_json()) if options.lines else row_of(case), flush=True)


def row_of(case: Case) -> str:
    """A case as text: what ran, ratios, and bars that it has."""
    runs = ", ".join(
        f"{name} {run.median:.4g} (p95 {run.p95:.4g})" for name, run in case.runs.items()
    )
    bars = {(bar.of, bar.to): bar for bar in case.bars}
    ratios = [
        f"{of}/{to} {value:.3g}{_goal(case, bars.get((of, to)))}" for of, to, value in case.ratios
    ]
    ratios += [
        f"{bar.of} {case.value(bar):.3g}{_goal(case, bar)}" for bar in case.bars if bar.to is None
    ]
    # Goals for others than a peer and what is compared with it.
    shown = {(of, to) for of, to, _ in case.ratios}
    ratios += [
        f"{bar.of}/{bar.to} {case.value(bar):.3g}{_goal(case, bar)}"
        for bar in case.bars
        if bar.to is not None and (bar.of, bar.to) not in shown
    ]
    ranks = f", {case.ranks} ranks" if case.ranks > 1 else ""
    return f"{case.name}{ranks}\n    {case.unit}: {runs}" + "".join(f"\n    {r}" for r in ratios)


def _goal(case: Case, bar: Bar | None) -> str:
    if bar is None:
        return ""
    return f" ({bar.kind} {bar.limit:g}: {'met' if case.met(bar) else 'NOT MET'})"
