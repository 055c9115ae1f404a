"""Totals of a job for dashboards: reductions by kind, and comparisons of replicas."""

from __future__ import annotations

import threading

from meshplan.errors import ReplicaDivergenceError
from meshplan.replicas._comparison import ReplicaReport
from meshplan.replicas._coverage import KINDS, CoverageStep


class StepMonitor:
    """Adds up the steps of ``meshplan.coverage(on_step=monitor)``. ``str(monitor)`` is one line.

    Another thread may read it, such as one that answers a scraper.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(_names(), 0.0)

    def __call__(self, step: CoverageStep) -> None:
        """Add a step that has ended."""
        scalars = step.to_scalars()
        with self._lock:
            self._totals["meshplan/steps"] += 1
            for name, number in scalars.items():
                self._totals[name] += number

    def add_check(self, found: ReplicaReport | ReplicaDivergenceError | None) -> None:
        """Add the result of ``meshplan.verify_replicas``.

        Args:
            found: the report, or the error that was raised; ``None``, on a rank outside the mesh,
                adds nothing.
        """
        if found is None:
            return
        differing = found.tensors if isinstance(found, ReplicaDivergenceError) else 0
        with self._lock:
            self._totals["meshplan/replicas/checks"] += 1
            self._totals["meshplan/replicas/failed_checks"] += differing > 0
            # Of the last comparison: replicas that were restored are equal again.
            self._totals["meshplan/replicas/differing_tensors"] = differing

    def to_scalars(self) -> dict[str, float]:
        """Totals since the monitor was created, with the names of ``CoverageStep.to_scalars``."""
        with self._lock:
            return dict(self._totals)

    def __str__(self) -> str:
        totals = self.to_scalars()
        words = {kind: kind.replace(" ", "_") for kind in KINDS}
        counts = [f"{totals[f'meshplan/{word}/count']:.0f} {kind}" for kind, word in words.items()]
        checks, failed = (totals[f"meshplan/replicas/{one}"] for one in ("checks", "failed_checks"))
        return (
            f"[meshplan] {totals['meshplan/steps']:.0f} steps: {', '.join(counts)}; replicas "
            f"compared {checks:.0f} times, {failed:.0f} times different"
        )


def _names() -> list[str]:
    checks = ("checks", "failed_checks", "differing_tensors")
    reductions = CoverageStep(0).to_scalars()
    return [
        "meshplan/steps",
        *reductions,
        *(f"meshplan/replicas/{one}" for one in checks),
    ]
