"""A step of a plan, for tests that run it without one."""

from __future__ import annotations

from typing import Any

from meshplan.contract import Contract
from meshplan.planner import Step


def make_step(sizes: tuple[int, ...], **more: Any) -> Step:
    """Over axes of these sizes, to shards if ``scatter`` is given."""
    options: dict[str, Any] = {
        "kind": "reduce_scatter" if "scatter" in more else "all_reduce",
        "move": "P -> R",
        "op": "sum",
        "path": "exchange",
        "contract": Contract(),
    }
    return Step(axes=tuple(range(len(sizes))), sizes=sizes, why="a test", **options | more)
