"""Plan: a frozen, printable, hashable list of steps. It holds decisions and makes none."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from meshplan.contract import Contract, Op
from meshplan.layout import Layout
from meshplan.planner._problem import Problem

__all__ = ["Path", "Plan", "Step"]

Path = Literal["exchange", "reference", "native"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan.

    Attributes:
        kind: ``all_reduce``: one reduction over ``axes``, every rank gets the result.
            ``reduce_scatter``: the same, but each rank gets the shard that it is to hold.
            ``slice``: each rank keeps its shard of a finished value; nothing is sent.
            ``torch``: a transition that meshplan leaves to torch as it is.
        axes: positions of the mesh axes, ascending; those of size 1 are left out of a reduction.
        sizes: sizes of ``axes``.
        move: the transition in placements, e.g. ``P(sum) -> R``.
        why: the reason, in words.
        op: the reduction, for ``all_reduce`` and ``reduce_scatter``.
        divisor: for ``op="avg"``: what the sum is divided by, the product of the averaged axes.
        path: how the data moves; ``native`` is the backend's own all-reduce.
        contract: what fixes the bits; ``None`` for ``native``.
        norm: reduce ``x ** norm`` and return the ``1 / norm``-th power.
        scatter: for ``reduce_scatter``: (mesh axis, tensor dim) in the order of the cuts, outermost
            first. The shard is gathered over the other ``axes`` once it is finished.
    """

    kind: Literal["all_reduce", "reduce_scatter", "slice", "torch"]
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    move: str
    why: str
    op: Op | None = None
    divisor: int | None = None
    path: Path | None = None
    contract: Contract | None = None
    norm: float | None = None
    scatter: tuple[tuple[int, int], ...] = ()

    @property
    def gather_axes(self) -> tuple[int, ...]:
        """The axes over which a finished shard is gathered; empty for other kinds."""
        cut = {axis for axis, _ in self.scatter}
        return tuple(i for i in self.axes if i not in cut) if self.scatter else ()

    @property
    def group_size(self) -> int:
        """Ranks that take part together."""
        return math.prod(self.sizes)

    def line(self, layout: Layout) -> str:
        """One line, with the axis labels of ``layout``."""
        over = f"over ({', '.join(layout.axes[i] for i in self.axes)})"
        if self.kind == "slice":
            return f"slice {self.move} {over}, local: {self.why}"
        if self.kind == "torch":
            return f"torch {self.move} {over}: {self.why}"
        op = f"{self.op}/{self.divisor}" if self.op == "avg" else f"{self.op}"
        if self.norm is not None:
            op = f"{self.norm:g}-norm"
        bits = f"contract {self.contract.id}" if self.contract else "no contract"
        to = ""
        if self.scatter:
            cuts = ", ".join(f"S({dim}) over {layout.axes[axis]}" for axis, dim in self.scatter)
            rest = ", ".join(layout.axes[i] for i in self.gather_axes)
            to = f" to {cuts}" + (f", all_gather over ({rest})" if rest else "")
        return (
            f"{self.kind} {op} {over}{to}, groups of {self.group_size}, {self.path}, {bits}: "
            f"{self.why}"
        )

    def to_json(self, layout: Layout) -> dict[str, Any]:
        """A JSON-ready dict; axes by label."""
        return {
            "kind": self.kind,
            "axes": [layout.axes[i] for i in self.axes],
            "sizes": list(self.sizes),
            "move": self.move,
            "op": self.op,
            "divisor": self.divisor,
            "norm": self.norm,
            "scatter": [[layout.axes[axis], dim] for axis, dim in self.scatter],
            "path": self.path,
            "contract": self.contract.id if self.contract else None,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps for one problem, in the order in which they run. ``str(plan)``: a line a step."""

    problem: Problem
    steps: tuple[Step, ...]

    @property
    def reductions(self) -> tuple[Step, ...]:
        """The steps that combine summands under meshplan: at most one unless norms are mixed in."""
        return tuple(s for s in self.steps if s.kind in ("all_reduce", "reduce_scatter"))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict: the problem and the steps. ``json.dumps`` of it is stable."""
        problem = self.problem
        return {
            "mesh": {
                "axes": list(problem.layout.axes),
                "sizes": list(problem.layout.sizes),
                "ranks": list(problem.layout.ranks),
            },
            "src": [s.text for s in problem.src],
            "dst": [s.text for s in problem.dst],
            "policy": problem.policy,
            "dtype": None if problem.dtype is None else str(problem.dtype).removeprefix("torch."),
            "steps": [step.to_json(problem.layout) for step in self.steps],
        }

    def dumps(self) -> str:
        """``to_json()`` as text, keys sorted: equal plans give equal text on every rank."""
        return json.dumps(self.to_json(), sort_keys=True)

    def __str__(self) -> str:
        if not self.steps:
            return "nothing to do"
        return "\n".join(step.line(self.problem.layout) for step in self.steps)
