"""The reductions of a redistribution as a sequence of steps: the default one, or a given one.

A step is a tuple of axis positions, ascending, without axes of size 1. Its axes are reduced
together, or it is a single axis that is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.errors import PlacementError
from meshplan.planner._problem import Problem, Spec

__all__ = ["SHARDED", "are_alike", "checked_steps", "default_steps"]

SHARDED = ("shard", "other")
_PENDING = ("partial", "norm", "opaque")


def are_alike(specs: Sequence[Spec]) -> bool:
    """True if one reduction can do all: plain partials (`Problem` checks those), or one norm."""
    return all(s.kind == "partial" for s in specs) or (
        len(set(specs)) == 1 and (len(specs) == 1 or specs[0].kind == "norm")
    )


def _pending(problem: Problem) -> list[int]:
    pairs = zip(problem.src, problem.dst, strict=True)
    return [i for i, (s, d) in enumerate(pairs) if s.kind in _PENDING and d.kind not in _PENDING]


def default_steps(problem: Problem) -> list[tuple[int, ...]]:
    """One reduction over all partial axes, or one for each axis if their arithmetic differs."""
    wide = [i for i in _pending(problem) if problem.layout.sizes[i] > 1]
    if wide and are_alike([problem.src[i] for i in wide]):
        return [tuple(wide)]
    return [(i,) for i in wide]


def checked_steps(problem: Problem, steps: Sequence[Sequence[int | str]]) -> list[tuple[int, ...]]:
    """``steps`` by axis position, once it is clear that they finish every partial axis.

    Raises:
        PlacementError: an axis that is not pending, or is named twice or not at all, or a step
            that is not one reduction.
        AxisNameError: the mesh has no such axis.
    """
    layout, src, dst = problem.layout, problem.src, problem.dst
    pending = _pending(problem)
    gathered = [i for i, s in enumerate(src) if s.kind in SHARDED and dst[i].kind == "replicate"]
    named = ", ".join(layout.axes[i] for i in pending) or "none"
    left, found = {*pending, *gathered}, []
    for step in steps:
        axes = [layout.axis_index(axis) for axis in step]
        for i in axes:
            if i not in left:
                again = " a second time" if i in pending or i in gathered else ""
                raise PlacementError(
                    f"step {list(step)} names axis {layout.axes[i]} ({src[i].text} -> "
                    f"{dst[i].text}){again}, where nothing is pending; name each axis to reduce "
                    f"once: {named}"
                )
            left.discard(i)
        gathers = len(axes) == 1 and axes[0] in gathered
        if not axes or not (gathers or are_alike([src[i] for i in axes])):
            texts = ", ".join(src[i].text for i in axes) or "nothing"
            raise PlacementError(
                f"step {list(step)} is not one reduction, it names {texts}; "
                "write steps of axes that reduce together, and a gathered axis by itself"
            )
        wide = tuple(sorted(i for i in axes if layout.sizes[i] > 1))
        if wide:
            found.append(wide)
    forgotten = [layout.axes[i] for i in pending if i in left and layout.sizes[i] > 1]
    if forgotten:
        raise PlacementError(
            f"no step reduces axis {', '.join(forgotten)}; name each axis to reduce once: {named}"
        )
    return found
