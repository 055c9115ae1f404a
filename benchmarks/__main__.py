"""Run benchmarks sequentially, each in a process of its own, and record their figures.

python -m benchmarks                                    all
python -m benchmarks dispatch fold                      some
python -m benchmarks --json FILE --page docs            the JSON of ``schema.json``; the page
                                                        performance.md
python -m benchmarks --from FILE --page docs            the page again, of what was measured
python -m benchmarks --smoke                            a few small cases, to see that it works
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from benchmarks.page import write_page
from benchmarks.record import SCHEMA, Case, machine
from benchmarks.script import about, row_of

# Each suite, and how many seconds it should take on two idle cores: in all at most 20 minutes.
SUITES = {
    "dispatch": 25,
    "planner": 45,
    "fold": 10,
    "exact": 35,
    "allreduce_cpu": 140,
    "allreduce_gpu": 5,
    "backend": 160,
    "headers": 70,
    "scaling": 150,
    "paths": 300,
    "groups": 15,
    "memory": 25,
    "lint": 35,
    "replicas": 10,
    "run": 45,
    "training": 85,
    "elastic": 45,
}
TIMEOUT_SECONDS = 1800
FAILED = "it failed"


def measured(name: str, smoke: bool, told: Callable[[int, Case | None], object]) -> dict[str, Any]:
    """One suite, as ``schema.json`` has it.

    Args:
        name: its module.
        smoke: a few small cases.
        told: of how many cases there are, and of each.
    """
    title, how = about(import_module(f"benchmarks.{name}").__doc__ or "")
    command = [
        sys.executable,
        "-m",
        f"benchmarks.{name}",
        "--lines",
        *["--smoke"] * smoke,
    ]
    started = time.perf_counter()
    cases: list[Case] = []
    head: dict[str, Any] = {}
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        late = threading.Timer(TIMEOUT_SECONDS, process.kill)
        late.start()
        for line in process.stdout:
            found = json.loads(line)
            if "total" in found:
                head = found
                told(head["total"], None)
                continue
            cases.append(Case.from_json(found))
            told(head["total"], cases[-1])
        code = process.wait()
        late.cancel()
    why_not = head.get("skipped")
    if code:
        why_not = f"{FAILED}: {' '.join(command[1:])} ended with exit code {code}"
    return {
        "name": name,
        "title": title,
        "about": how,
        "command": f"python -m benchmarks.{name}",
        "seconds": time.perf_counter() - started,
        "skipped": why_not,
        "cases": [] if why_not else [case.to_json() for case in cases],
    }


def time_of(name: str, seconds: float, elapsed: float) -> str:
    """What is printed after a suite."""
    late = ", more than its budget" if seconds > SUITES[name] else ""
    return f"{name}: {seconds:.0f} s of {SUITES[name]} s{late}; {elapsed:.0f} s since the start"


def run_all(names: Sequence[str], smoke: bool, console: Console) -> dict[str, Any]:
    """All suites, with a bar for each, a line for each case and one for the time of each suite."""
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%d"),
        "smoke": smoke,
        "machine": machine(),
        "benchmarks": [],
    }
    started = time.perf_counter()
    columns = (TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:

        def say(text: str) -> None:
            progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

        for name in names:
            task = progress.add_task(name, total=None)

            def told(total: int, case: Case | None, task: Any = task) -> None:
                progress.update(task, total=total)
                if case is not None:
                    say(row_of(case))
                    progress.advance(task)

            one = measured(name, smoke, told)
            found["benchmarks"].append(one)
            if one["skipped"]:
                say(f"{name} is left out: {one['skipped']}")
            progress.update(task, total=len(one["cases"]), completed=len(one["cases"]))
            progress.stop_task(task)
            say(time_of(name, one["seconds"], time.perf_counter() - started))
    return found


def format_json(found: dict[str, Any]) -> str:
    """A line for each case, so that a diff shows what has changed."""
    suites = [
        {**suite, "cases": [*map(json.dumps, suite["cases"])]} for suite in found["benchmarks"]
    ]
    text = json.dumps({**found, "benchmarks": suites}, indent=1)
    return (
        re.sub(
            r'^ *("\{.*\}")(,?)$',
            lambda one: json.loads(one[1]) + one[2],
            text,
            flags=re.M,
        )
        + "\n"
    )


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a suite has failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FOLDER")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source")
    options = parser.parse_args(words)
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown:
        parser.error(f"no suite {unknown[0]!r}; write some of {', '.join(SUITES)}")
    if options.source is not None:
        found = json.loads(options.source.read_text())
    else:
        found = run_all(options.suites or SUITES, options.smoke, Console())
    if options.json is not None:
        options.json.write_text(format_json(found))
    if options.page is not None:
        print(f"wrote {write_page(found, options.page)}")
    return int(any(str(suite["skipped"]).startswith(FAILED) for suite in found["benchmarks"]))


if __name__ == "__main__":
    sys.exit(main())
