"""The request: a redistribution as a frozen and hashable value, and its reductions as steps.

The planner works on ``Spec`` values and names of dtypes. In a cache, these keep no mesh, mask
buffer or tensor alive, and they need no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from meshplan._dtypes import is_complex, is_floating_point, name_of
from meshplan.contract import OPS, Contract, check_dtype
from meshplan.errors import (
    ContractTypeError,
    PlacementError,
    PolicyError,
    TopologyError,
)
from meshplan.layout import Layout
from meshplan.planner._path_costs import CONTRACT_PATHS, ContractPath
from meshplan.topology import Topology

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor.placement_types import Placement

Policy = Literal["deterministic", "consistent", "fast"]
"""What runs under the contract, strictest first; see ``meshplan.install``."""
POLICIES: tuple[Policy, ...] = get_args(Policy)
"""All of ``Policy``, strictest first."""
SHARDED = ("shard", "other")
_BITWISE = ("band", "bor", "bxor")
_ONE = "at most one summand of an element is not zero"
_DIM = re.compile(r"\d{1,9}", re.ASCII)
_TEXT = re.compile(r"(?P<letter>[RSP])(?:\((?P<argument>\w+)\))?")


@dataclass(frozen=True, slots=True)
class Spec:
    """The placement on one axis."""

    # ``partial`` only for torch's own ``Partial`` class with a reduction of the contract;
    # ``norm`` for the partial p-norm of ``vector_norm``; ``opaque`` for other reductions
    # and subclasses of ``Partial``, which have unknown arithmetic or side effects;
    # ``other`` for the rest (strided shards).
    kind: Literal["replicate", "shard", "partial", "norm", "opaque", "other"]
    text: str  # as torch prints it, e.g. ``P(sum)``, ``S(0)``, ``R``
    op: str | None = None  # the reduction of a ``Partial`` itself
    dim: int | None = None  # the tensor dim of a ``shard``
    norm: float | None = None  # the p of a ``norm``
    # Of an ``opaque``: why its bits do not depend on the order, if so: bitwise
    # reductions, and the partial of an embedding with sharded rows.
    any_order: str = ""

    @property
    def is_partial(self) -> bool:
        """Whether ranks along the axis hold summands of any reduction."""
        return self.kind in ("partial", "norm", "opaque")

    @classmethod
    def of(cls, placement: Placement | str) -> Spec:
        """From a torch placement, or from ``R``, ``S(0)``, ``P`` or ``P(avg)``."""
        if isinstance(placement, str):
            return cls._read_text(placement)
        # Only this needs torch, and a caller with a placement has loaded it.
        from torch.distributed.tensor.placement_types import (
            Partial,
            Replicate,
            Shard,
        )

        from meshplan._torch import MaskPartial, NormPartial

        text = str(placement)
        if type(placement) is Partial and placement.reduce_op in OPS:
            return cls("partial", text, op=placement.reduce_op)
        if type(placement) is Partial:
            why = "bits are combined one by one" if placement.reduce_op in _BITWISE else ""
            return cls("opaque", text, op=placement.reduce_op, any_order=why)
        if isinstance(placement, Replicate):
            return cls("replicate", text)
        if type(placement) is Shard:
            return cls("shard", text, dim=placement.dim)
        if type(placement) is NormPartial:
            return cls("norm", text, norm=float(placement.norm_type))
        if type(placement) is MaskPartial:
            return cls(
                "opaque",
                text,
                any_order=_ONE if placement.reduce_op == "sum" else "",
            )
        return cls("opaque" if isinstance(placement, Partial) else "other", text)

    @classmethod
    def _read_text(cls, text: str) -> Spec:
        match = _TEXT.fullmatch(text.strip())
        letter, argument = match.group("letter", "argument") if match else ("", None)
        if letter == "R" and argument is None:
            return cls("replicate", "R")
        if letter == "S" and argument is not None and _DIM.fullmatch(argument):
            return cls("shard", text.strip(), dim=int(argument))
        if letter == "P" and (argument or "sum") in OPS:
            return cls("partial", f"P({argument or 'sum'})", op=argument or "sum")
        raise PlacementError(
            f"invalid placement {text!r}; use R, S(0), P or P(op) with op one of {', '.join(OPS)}"
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """One redistribution: from ``src`` to ``dst`` on ``layout``, under a policy and a contract.

    Attributes:
        layout: the mesh.
        src, dst: one ``Spec`` per axis.
        policy: ``deterministic`` (every reduction under the contract), ``consistent`` (only those
            whose sibling groups must agree and may not) or ``fast`` (none: several all-reduces
            become one of the backend, in its own order).
        contract: order, accumulator and rounding.
        path: how contract reductions move their data; it cannot change a bit. ``auto``: an exchange
            or recursive halving, whichever costs less.
        dtype: name of the tensor's dtype; a plan with ``None`` is valid for every dtype.
        scatter: whether each rank may reduce only its own part. False if the user orders the
            parts, or one process simulates all ranks.
        shape: of the whole tensor, in elements; plans are compared by it. With ``None`` they are
            compared for ``NOMINAL_ELEMENTS`` and valid for every shape.
        topology: the placement of ranks and the cost of links; if ``None``, all links count as the
            slowest.

    Raises:
        PlacementError: placements that do not fit the mesh or the shape, or that cannot be
            combined.
        PolicyError: unknown policy or path.
        ContractTypeError: ``avg`` of integers, if ``dtype`` is known.
        TopologyError: the layout has a rank that the topology lacks.
    """

    layout: Layout
    src: tuple[Spec, ...]
    dst: tuple[Spec, ...]
    policy: Policy = "deterministic"
    contract: Contract = Contract()
    path: ContractPath = "exchange"
    dtype: str | None = None
    scatter: bool = True
    shape: tuple[int, ...] | None = None
    topology: Topology | None = None

    def __post_init__(self) -> None:
        check_policy(self.policy, self.path)
        axes = len(self.layout.sizes)
        if len(self.src) != axes or len(self.dst) != axes:
            raise PlacementError(
                f"a mesh of {axes} axes needs {axes} placements, got {len(self.src)} from and "
                f"{len(self.dst)} to; pass one placement per axis of {self.layout}"
            )
        ops = sorted({s.op for s in self.src if s.kind == "partial" and s.op is not None})
        if len(ops) > 1 and not set(ops) <= {"sum", "avg"}:
            raise PlacementError(
                f"partial values of kinds {' and '.join(ops)} cannot be reduced together, "
                "because the result depends on their order; redistribute one of them first"
            )
        if self.dtype is not None and not is_floating_point(self.dtype) and "avg" in ops:
            raise ContractTypeError(
                f"P(avg) of {self.dtype} has no exact result; use P(sum) and divide, or convert "
                "to a floating dtype first"
            )
        if self.shape is not None:
            _check_shape(self.shape, (*self.src, *self.dst))
        if self.topology is not None:
            check_reach(self.topology, self.layout)

    @classmethod
    def of(
        cls,
        layout: Layout,
        src: Sequence[Placement | str],
        dst: Sequence[Placement | str],
        *,
        policy: Policy = "deterministic",
        contract: Contract | None = None,
        path: ContractPath = "exchange",
        dtype: torch.dtype | str | None = None,
        scatter: bool = True,
        shape: Sequence[int] | None = None,
        topology: Topology | None = None,
    ) -> Problem:
        """From torch placements or their text.

        Args:
            src, dst: a placement for each axis, before and after: torch's, or ``R``, ``S(0)``,
                ``P``, ``P(avg)``.
            dtype: torch's, or its name.
            layout, policy, contract, path, scatter, shape, topology: as the attributes.

        Raises:
            PlacementError, PolicyError, ContractTypeError, TopologyError: as the class.
        """
        return cls(
            layout=layout,
            src=tuple(Spec.of(p) for p in src),
            dst=tuple(Spec.of(p) for p in dst),
            policy=policy,
            contract=contract or Contract(),
            path=path,
            dtype=None if dtype is None else name_of(dtype),
            scatter=scatter,
            shape=None if shape is None else tuple(shape),
            topology=topology,
        )

    def __str__(self) -> str:
        src = ", ".join(s.text for s in self.src)
        dst = ", ".join(s.text for s in self.dst)
        return f"({src}) -> ({dst}) on {self.layout}"


def _check_shape(shape: tuple[int, ...], specs: Sequence[Spec]) -> None:
    if any(size < 0 for size in shape):
        raise PlacementError(
            f"no tensor has the shape {list(shape)}; use sizes of 0 or more elements"
        )
    for spec in specs:
        if spec.dim is not None and spec.dim >= len(shape):
            raise PlacementError(
                f"{spec.text} needs a tensor of {spec.dim + 1} or more dims, got shape "
                f"{list(shape)}; use a dim below {len(shape)}"
                if shape
                else f"{spec.text} cannot shard a tensor of 0 dims; use R"
            )


def check_reach(topology: Topology, layout: Layout) -> None:
    highest = layout.highest_rank
    if highest >= topology.world_size:
        raise TopologyError(
            f"the topology describes {topology.world_size} ranks, the mesh {layout} has "
            f"rank {highest}; pass a topology of {highest + 1} or more ranks"
        )


def check_policy(policy: str, path: str) -> None:
    for what, value, known in (
        ("policy", policy, POLICIES),
        ("contract path", path, ("auto", *CONTRACT_PATHS)),
    ):
        if value not in known:
            raise PolicyError(f"unknown {what} {value!r}; use {' or '.join(map(repr, known))}")


def check_audit(audit: object) -> None:
    if audit is not None and (type(audit) is not int or audit < 1):
        raise PolicyError(
            f"audit={audit!r} is not a number of calls; pass audit=100 to compare every "
            "100th call of each reduction with the reference, or audit=None"
        )


def can_merge(specs: Sequence[Spec]) -> bool:
    """Whether one reduction can combine all: plain partials (checked by `Problem`), or one norm."""
    return all(s.kind == "partial" for s in specs) or (
        len(set(specs)) == 1 and (len(specs) == 1 or specs[0].kind == "norm")
    )


def is_exact(problem: Problem, axes: Sequence[int]) -> bool:
    """Whether a reduction over ``axes`` has the same bits in every order."""
    dtype = problem.dtype
    if dtype is not None and not is_floating_point(dtype) and not is_complex(dtype):
        return True
    specs = [problem.src[i] for i in axes]
    exact = ("max", "min", "band", "bor", "bxor")
    return all(s.op in exact or (s.norm is not None and math.isinf(s.norm)) for s in specs)


def has_contract(problem: Problem, axes: Sequence[int]) -> bool:
    specs = [problem.src[i] for i in axes]
    if not can_merge(specs) or specs[0].kind == "opaque":
        return False
    if specs[0].kind == "norm" and any(problem.dst[i].kind != "replicate" for i in axes):
        return False
    try:
        product = specs[0].op == "product"
        check_dtype(
            "product" if product else "sum",
            problem.dtype or "float32",
            problem.contract,
        )
    except ContractTypeError:
        return False
    return True


def _find_pending(problem: Problem) -> list[int]:
    pairs = zip(problem.src, problem.dst, strict=True)
    return [i for i, (s, d) in enumerate(pairs) if s.is_partial and not d.is_partial]


def choose_default_steps(problem: Problem) -> list[tuple[int, ...]]:
    """One reduction over all partial axes, or one for each axis if their arithmetic differs."""
    wide = [i for i in _find_pending(problem) if problem.layout.sizes[i] > 1]
    if wide and can_merge([problem.src[i] for i in wide]):
        return [tuple(wide)]
    return [(i,) for i in wide]


def check_steps(problem: Problem, steps: Sequence[Sequence[int | str]]) -> list[tuple[int, ...]]:
    """``steps`` as tuples of ascending axis positions, without axes of size 1, checked to finish
    every partial axis. ``AxisNameError``, and ``PlacementError`` for an axis that is not pending,
    is repeated or is missing, or for a step that is not one reduction.
    """
    # Axes of a step are reduced together, or it is a single axis that is gathered.
    layout, src, dst = problem.layout, problem.src, problem.dst
    pending = _find_pending(problem)
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
        if not axes or not (gathers or can_merge([src[i] for i in axes])):
            texts = ", ".join(src[i].text for i in axes) or "nothing"
            raise PlacementError(
                f"step {list(step)} is not one reduction, it names {texts}; "
                "use steps of axes that reduce together, and a gathered axis by itself"
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
