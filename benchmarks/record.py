"""What benchmarks measure, all in one form: cases, what ran in each, ratios and bars.

``schema.json`` describes the JSON. A ratio is that of two medians of one case, which ran in turn in
the same processes; a bar is what a ratio or a median was wanted to be.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import meshplan
from meshplan import kernel

SCHEMA = "meshplan-benchmarks/1"

Kind = Literal["at most", "at least"]


@dataclass(frozen=True)
class Figures:
    """Of one thing that ran in a case, in the case's unit.

    Attributes:
        median, p95: over ``samples`` calls. A call of several ranks is as slow as the slowest.
    """

    median: float
    p95: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Figures:
        """At least one sample."""
        high = samples[0]
        if len(samples) > 1:
            high = statistics.quantiles(samples, n=20, method="inclusive")[-1]
        return cls(statistics.median(samples), high, len(samples))


@dataclass(frozen=True)
class Bar:
    """A goal for the median of ``of``, or for its ratio to that of ``to``."""

    of: str
    kind: Kind
    limit: float
    to: str | None = None


def at_most(limit: float, of: str, to: str | None = None) -> Bar:
    """The median, or the ratio of medians, may be so large."""
    return Bar(of, "at most", limit, to)


def at_least(limit: float, of: str, to: str | None = None) -> Bar:
    """The median, or the ratio of medians, must be so large."""
    return Bar(of, "at least", limit, to)


@dataclass(frozen=True)
class Case:
    """One thing that was measured, in several ways.

    Attributes:
        name: what all runs did.
        unit: of the figures.
        runs: by name, the peers among them.
        peers: what is not meshplan's; every other run has a ratio to each of them.
        ranks: how many processes took part.
        parameters: numbers and names that tell this case from its neighbours.
        bars: goals.
    """

    name: str
    unit: str
    runs: dict[str, Figures]
    peers: tuple[str, ...] = ()
    ranks: int = 1
    parameters: dict[str, int | str] = field(default_factory=dict)
    bars: tuple[Bar, ...] = ()

    def ratio(self, of: str, to: str) -> float:
        """Of two medians."""
        return self.runs[of].median / self.runs[to].median

    @property
    def ratios(self) -> list[tuple[str, str, float]]:
        """Of every run that is meshplan's, to every peer."""
        ours = [name for name in self.runs if name not in self.peers]
        return [(of, to, self.ratio(of, to)) for of in ours for to in self.peers]

    def value(self, bar: Bar) -> float:
        """What a bar is about."""
        return self.runs[bar.of].median if bar.to is None else self.ratio(bar.of, bar.to)

    def met(self, bar: Bar) -> bool:
        """Whether a bar is met."""
        value = self.value(bar)
        return value <= bar.limit if bar.kind == "at most" else value >= bar.limit

    def to_json(self) -> dict[str, Any]:
        """As ``schema.json`` has it."""
        return {
            "name": self.name,
            "unit": self.unit,
            "ranks": self.ranks,
            "parameters": self.parameters,
            "peers": list(self.peers),
            "runs": {
                name: {"median": run.median, "p95": run.p95, "samples": run.samples}
                for name, run in self.runs.items()
            },
            "ratios": [{"of": of, "to": to, "value": value} for of, to, value in self.ratios],
            "bars": [
                {
                    "of": bar.of,
                    "to": bar.to,
                    "kind": bar.kind,
                    "limit": bar.limit,
                    "value": self.value(bar),
                    "met": self.met(bar),
                }
                for bar in self.bars
            ],
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Case:
        """The same case again."""
        return cls(
            name=found["name"],
            unit=found["unit"],
            runs={name: Figures(**run) for name, run in found["runs"].items()},
            peers=tuple(found["peers"]),
            ranks=found["ranks"],
            parameters=found["parameters"],
            bars=tuple(
                Bar(bar["of"], bar["kind"], bar["limit"], bar["to"]) for bar in found["bars"]
            ),
        )


def machine() -> dict[str, Any]:
    """What it was measured on, and with."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "gpu": _gpu(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "meshplan": meshplan.__version__,
        "compiled_for_cpu": kernel.available(),
    }


def _gpu() -> str | None:
    """Its name and the version of its driver; ``None`` without one."""
    if not torch.cuda.is_available():
        return None
    name, tool = torch.cuda.get_device_name(), shutil.which("nvidia-smi")
    if tool is None:
        return name
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return f"{name}, driver {done.stdout.strip()}" if done.returncode == 0 else name


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
