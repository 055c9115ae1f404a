"""The cost of linting a mesh, for 1,000 to 1,000,000 ranks: time and peak memory.

Each is the command as a user gives it, in a process of its own, with what it takes to start Python.
Layouts are jagged: each has groups that must agree and fall on NVLink domains in different ways.

    python -m benchmarks.lint
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from benchmarks.record import Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import seconds

LAYOUTS = {
    1_000: ("ddp=25,fsdp=40", 8),
    10_000: ("ddp=125,fsdp=20,tp=4", 8),
    100_000: ("ddp=625,fsdp=40,tp=4", 72),
    1_000_000: ("ddp=6250,fsdp=40,tp=4", 72),
    1_048_576: ("dp=2048,fsdp=64,tp=8", 72),
}
# Of the largest: what was wanted of it.
BAR_SECONDS, BAR_MIB = 10.0, 1536.0


def meshplan(*words: str) -> tuple[float, float]:
    """Seconds and peak MiB of a command that says something of a layout."""
    usage: list[float] = []

    def start() -> None:
        process = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "meshplan", *words],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
        )
        _, status, used = os.wait4(process, 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, 1):
            raise RuntimeError(f"meshplan {' '.join(words)}: exit code {code}")
        usage.append(used.ru_maxrss / 1024)

    return seconds(start), usage[0]


def measure(name: str, words: Sequence[str], ranks: int, rounds: int) -> Iterator[Case]:
    """One command, several times."""
    found = [meshplan(*words) for _ in range(rounds)]
    largest = ranks == max(LAYOUTS)
    for unit, column, limit in (("s", 0, BAR_SECONDS), ("MiB", 1, BAR_MIB)):
        yield Case(
            name=name if unit == "s" else f"{name}: peak memory",
            unit=unit,
            runs={"meshplan lint": Figures.of([one[column] for one in found])},
            parameters={"world_size": ranks},
            bars=(at_most(limit, "meshplan lint"),) if largest else (),
        )


def cases(smoke: bool) -> Iterator[Case]:
    """The help, then layouts by size."""
    rounds = 2 if smoke else 5
    helped = [meshplan("--help")[0] for _ in range(rounds)]
    yield Case(
        name="meshplan --help",
        unit="s",
        runs={"meshplan --help": Figures.of(helped)},
        bars=(at_most(0.3, "meshplan --help"),),
    )
    for ranks, (layout, domain) in list(LAYOUTS.items())[: 1 if smoke else None]:
        words = ("lint", "--mesh", layout, "--domain-size", str(domain))
        yield from measure(f"lint of {ranks:,} ranks ({layout})", words, ranks, rounds)


SUITE = Suite(__doc__ or "", cases, lambda smoke: 1 + 2 * (1 if smoke else len(LAYOUTS)))

if __name__ == "__main__":
    run(SUITE)
