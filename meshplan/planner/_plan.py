"""Plan: frozen, printable, hashable steps with their reasons. It makes no decisions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshplan.contract import Contract, Op
from meshplan.layout import Layout
from meshplan.planner._path_costs import Between, Cost, LinkName, Reach, split_sizes
from meshplan.planner._problem import Problem, Spec
from meshplan.topology._reading import format_count

MAX_CANDIDATES = 6
"""Plans that a ``Plan`` keeps for ``explain``, itself among them."""
NOMINAL_ELEMENTS = 1 << 22
"""Elements for comparing plans without a shape: 16 MiB of float32, a gradient bucket."""
Path = str
"""How a step is planned to move its data: one of ``CONTRACT_PATHS``, or ``native``."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan."""

    # ``all_reduce``: one reduction over ``axes``, every rank gets the result.
    # ``reduce_scatter``: the same, but each rank gets its shard of the result. ``slice``:
    # each rank keeps its shard of a finished value, without communication. ``torch``: a
    # transition that falls through to torch.
    kind: Literal["all_reduce", "reduce_scatter", "slice", "torch"]
    # Positions of the mesh axes, ascending; those of size 1 are left out of a reduction.
    axes: tuple[int, ...]
    sizes: tuple[int, ...]  # sizes of ``axes``
    move: str  # the transition in placements, e.g. ``P(sum) -> R``
    why: str  # the reason, in words
    # The reduction, for ``all_reduce`` and ``reduce_scatter``.
    op: Op | None = None
    # For ``op="avg"``: divides the sum; the product of the averaged axes.
    divisor: int | None = None
    # How the data moves; ``native`` is the backend's own all-reduce.
    path: Path | None = None
    # What fixes the bits; ``None`` for ``native``.
    contract: Contract | None = None
    # Reduce ``x ** norm`` and return the ``1 / norm``-th power.
    norm: float | None = None
    # For ``reduce_scatter``: (mesh axis, tensor dim) in the order of sharding, outermost
    # first. The finished shard is gathered over the other ``axes``.
    scatter: tuple[tuple[int, int], ...] = ()
    # Of the shards, by position on the one axis of ``scatter``; empty: as ``torch.chunk``
    # splits.
    lengths: tuple[int, ...] = ()
    # inner, between: as in ``ReductionStrategy``.
    inner: int = 1
    between: Between = "exchange"
    # For a flat ``exchange``: how far apart its ranks are; ``None`` if nothing decides
    # between its paths when the size is known.
    reach: Reach | None = None
    # For a hierarchical ``exchange``: the unit of ``count_chunks``, in bytes.
    chunk: int = 0
    # For a flat ``exchange``, or on CPUs: a rank's shard is the leaves of its sum, in order.
    leaves: bool = False
    # src, dst: for ``slice`` and ``torch``: the placements before and after.
    src: Spec | None = None
    dst: Spec | None = None

    @property
    def outer_sizes(self) -> tuple[int, ...]:
        """Axis sizes of the tree over the blocks of ``inner`` ranks, outermost first."""
        return split_sizes(self.sizes, self.inner)[0]

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        return split_sizes(self.sizes, self.inner)[1]

    @property
    def gather_axes(self) -> tuple[int, ...]:
        """The axes over which finished parts of a shard are gathered; none by ``reference``."""
        if not self.scatter or self.path not in ("exchange", "halving"):
            return ()
        sharded = {axis for axis, _ in self.scatter}
        return tuple(i for i in self.axes if i not in sharded)

    @property
    def group_size(self) -> int:
        return math.prod(self.sizes)

    def line(self, layout: Layout) -> str:
        bits = ""
        if self.kind not in ("slice", "torch"):
            named = f"contract {self.contract.id}" if self.contract else "no contract"
            bits = f", groups of {self.group_size}, {self.describe_path()}, {named}"
        return f"{self._summarize(layout)}{bits}: {self.why}"

    def brief(self, layout: Layout) -> str:
        path = "" if self.kind in ("slice", "torch") else f", {self.describe_path()}"
        return f"{self._summarize(layout)}{path}"

    def describe_path(self) -> str:
        halving = self.between == "halving"
        if self.inner == 1:
            return "halving" if halving else f"{self.path}"
        between = ", halving between them" if halving else ""
        return f"{self.path} in blocks of {self.inner}{between}"

    def _summarize(self, layout: Layout) -> str:
        over = _format_labels(layout, self.axes)
        if self.kind == "slice":
            return f"slice {self.move} over {over}, local"
        if self.kind == "torch":
            return f"torch {self.move} over {over}"
        op = f"{self.op}/{self.divisor}" if self.op == "avg" else f"{self.op}"
        if self.norm is not None:
            op = f"{self.norm:g}-norm"
        shards = ", ".join(f"S({dim}) over {layout.axes[axis]}" for axis, dim in self.scatter)
        to = f" to {shards}" if shards else ""
        if self.gather_axes:
            to += f", all_gather over {_format_labels(layout, self.gather_axes)}"
        return f"{self.kind} {op} over {over}{to}"

    def to_json(self, layout: Layout) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "axes": [layout.axes[i] for i in self.axes],
            "sizes": list(self.sizes),
            "move": self.move,
            "op": self.op,
            "divisor": self.divisor,
            "norm": self.norm,
            "scatter": [[layout.axes[axis], dim] for axis, dim in self.scatter],
            "inner": self.inner,
            "between": self.between,
            "chunk": self.chunk,
            "path": self.path,
            "contract": self.contract.id if self.contract else None,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    steps: tuple[Step, ...]
    cost: Cost


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps for one problem. ``str(plan)`` has one line for each step.

    Attributes:
        problem: the redistribution.
        steps: in the order of execution, if ``ordered``.
        ordered: whether the steps are the whole redistribution, in this order. Else the plan has
            reductions only, and each replaces torch's own in its place.
        candidates: the plans that were compared, the chosen one first; at most
            ``MAX_CANDIDATES``, and none if there was no choice.
        compared: number of compared plans.
    """

    problem: Problem
    steps: tuple[Step, ...]
    ordered: bool = False
    candidates: tuple[Candidate, ...] = ()
    compared: int = 0

    @property
    def reductions(self) -> tuple[Step, ...]:
        """The reductions under meshplan: at most one, unless norms are mixed with sums."""
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
            "dtype": problem.dtype,
            "shape": None if problem.shape is None else list(problem.shape),
            "cost": self.candidates[0].cost.to_json() if self.candidates else None,
            "steps": [step.to_json(problem.layout) for step in self.steps],
        }

    def __str__(self) -> str:
        if not self.steps:
            return "nothing to do"
        return "\n".join(step.line(self.problem.layout) for step in self.steps)

    def explain(self) -> str:
        return "\n".join((str(self.problem), *self._explain()))

    def _explain(self) -> Iterator[str]:
        layout = self.problem.layout
        if not self.candidates:
            yield "no choice:" if self.steps else "nothing to do"
            yield from (f"  {step.line(layout)}" for step in self.steps)
            return
        plans = format_count(self.compared, "plan")
        yield f"{plans} compared for {_describe_size(self.problem)}; bytes out of the busiest rank"
        best = self.candidates[0].cost
        for candidate in self.candidates:
            cost = candidate.cost
            verdict = "chosen"
            if candidate is not self.candidates[0]:
                verdict = f"rejected, {_explain_rejection(best, cost)}"
            yield f"{verdict}: {_format_cost(cost)}"
            yield from (f"  {step.brief(layout)}" for step in candidate.steps)
        if self.compared > len(self.candidates):
            yield f"and {self.compared - len(self.candidates)} more, none cheaper"


def format_time(nanoseconds: int) -> str:
    """A time of 0 or more to four figures or fewer: ns, us, ms or s."""
    if nanoseconds < 1000:
        return f"{nanoseconds} ns"
    if nanoseconds < 1e9:
        return f"{nanoseconds / 1e3:.1f} us" if nanoseconds < 1e6 else f"{nanoseconds / 1e6:.2f} ms"
    return f"{nanoseconds / 1e9:.2f} s"


def format_bytes(count: int) -> str:
    """A size to one decimal: B, kB, MB, GB or TB, in powers of 1000."""
    if count < 1000:
        return f"{count} B"
    power = min(int(math.log10(count)) // 3, 4)
    return f"{count / 1000**power:.1f} {'kMGT'[power - 1]}B"


def _format_labels(layout: Layout, axes: Sequence[int]) -> str:
    return f"({', '.join(layout.axes[i] for i in axes)})"


def _describe_size(problem: Problem) -> str:
    dtype = problem.dtype or "float32"
    known = problem.topology is not None and problem.topology.known
    where = f"{problem.topology}" if known else "placement of ranks unknown"
    if problem.shape is None:
        return f"{NOMINAL_ELEMENTS} elements of {dtype} (no shape given), {where}"
    shape = " x ".join(map(str, problem.shape)) or "1"
    return f"{shape} elements of {dtype}, {where}"


def _format_cost(cost: Cost) -> str:
    sent = [(name, getattr(cost, name)) for name in get_args(LinkName)]
    links = [f"{format_bytes(count)} {name}" for name, count in sent if count]
    out = (
        f" ({', '.join(links)})" if len(links) > 1 else "".join(f" {n.split()[-1]}" for n in links)
    )
    return (
        f"{format_time(cost.nanoseconds)}, {format_count(cost.collectives, 'collective')}, "
        f"{format_bytes(cost.sent)} out{out}, {format_bytes(cost.peak)} memory"
        + (f", new group {' and '.join(cost.creates)}" if cost.creates else "")
    )


def _explain_rejection(best: Cost, other: Cost) -> str:
    reasons = [
        f"{format_bytes(more - less)} more {where}"
        for where, more, less in (
            ("over the network", other.network, best.network),
            ("inside nodes", other.node, best.node),
            ("inside domains", other.domain, best.domain),
        )
        if more > less
    ]
    extra = other.collectives - best.collectives
    if extra > 0:
        reasons.append(format_count(extra, "more collective"))
    reasons += [f"a new group {name}" for name in other.creates if name not in best.creates]
    if other.peak > best.peak:
        reasons.append(f"{format_bytes(other.peak - best.peak)} more memory")
    slower = other.nanoseconds - best.nanoseconds
    if slower < 0:
        return f"{format_time(-slower)} faster, within the margin that halving has to save"
    if not slower and not reasons:
        return "equal cost, later in the list"
    time = f"{format_time(slower)} slower" if slower else "same time"
    return f"{time}, {', '.join(reasons) or 'more messages'}"
