"""Random redistributions that start from ``Partial``, for the pure tests and the real ones."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from meshplan.contract import Contract
from meshplan.layout import Layout
from meshplan.planner import Problem
from meshplan.topology import Link, Links, Topology

FAST_NODES = Links(node=Link(1e-7, 1e12), group=0.0)
CONTRACTS = tuple(
    Contract(*words)  # type: ignore[arg-type]
    for words in itertools.product(("tree", "rank"), ("wide", "float64"), ("once", "node"))
)
EXACT = Contract("exact"), Contract("exact", "float64")


@dataclass(frozen=True)
class Redistribution:
    """One drawn case; ``seed`` makes its values."""

    layout: Layout
    src: tuple[str, ...]
    dst: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    options: dict[str, Any] = field(hash=False)
    seed: int

    @property
    def problem(self) -> Problem:
        """The input of the planner."""
        return Problem.of(self.layout, self.src, self.dst, **self.options)

    @property
    def partial(self) -> tuple[int, ...]:
        """The axes that are reduced, those of size 1 included."""
        pairs = zip(self.src, self.dst, strict=True)
        return tuple(i for i, (s, d) in enumerate(pairs) if s[0] == "P" and d[0] != "P")


@st.composite
def redistributions(
    draw: st.DrawFn,
    *,
    max_world: int = 48,
    all_ranks: int | None = None,
    to_partial: bool = True,
    dtypes: tuple[torch.dtype, ...] = (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.int32,
        torch.int64,
    ),
) -> Redistribution:
    """Layouts of 1 to 5 axes of 1 to 6 ranks in any order, any placements, shapes of 0 to 3 dims.
    The largest mesh has ``max_world`` ranks; with ``all_ranks`` the job has as many, and the mesh
    may be a part of it. ``to_partial``: also values that become partial, which torch does in
    backward only.
    """
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 5))):
        sizes.append(draw(st.integers(1, min(6, max_world // math.prod(sizes)))))
    count = math.prod(sizes)
    job = all_ranks or count + draw(st.sampled_from([0, 0, 3]))
    ranks = list(range(job))
    if draw(st.sampled_from([False, False, True])):
        ranks = draw(st.permutations(ranks))
    first = draw(st.sampled_from([0, job - count]))
    named = draw(st.booleans())
    layout = Layout(
        sizes=tuple(sizes),
        names=tuple("abcde"[: len(sizes)]) if named else None,
        ranks=tuple(ranks[first : first + count]),
    )
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    dtype = draw(st.sampled_from(dtypes))
    shards = [f"S({dim})" for dim in range(len(shape))]
    linear = ["P", "P(avg)"] if dtype.is_floating_point else ["P"]
    sums = draw(st.sampled_from([linear, linear, ["P(max)"], ["P(min)"], ["P(product)"]]))
    src = [draw(st.sampled_from([*sums, *sums, "R", *shards])) for _ in sizes]
    src[draw(st.integers(0, len(sizes) - 1))] = sums[0]
    dst = []
    for text in src:
        other = [text] if text[0] == "P" else []
        if to_partial and text == "R" and sums[0] == "P":
            other = ["P"]
        dst.append(draw(st.sampled_from(["R", "R", *shards, *shards, *other])))
    places = st.none() | st.integers(1, 8).map(lambda n: Topology.uniform(job, node_size=n))
    places |= st.integers(1, 8).map(lambda n: Topology.uniform(job, node_size=n, domain_size=n))
    nodes = st.lists(st.integers(0, 3), min_size=job, max_size=job)
    places |= nodes.map(Topology.of)
    # Domains in any order inside nodes in any order.
    places |= st.tuples(nodes, nodes).map(lambda both: Topology.of(*both))
    # Nodes that hold inner axes whole.
    inner = [n for k in range(len(sizes)) if 1 < (n := math.prod(sizes[k:])) <= job]
    if inner:
        aligned = st.sampled_from(inner)
        places |= aligned.map(lambda n: Topology.uniform(job, node_size=n, domain_size=n))
        places |= aligned.map(lambda n: Topology.uniform(job, node_size=n, links=FAST_NODES))
    # An exact order has no product of floats.
    floats = dtype.is_floating_point and sums[0] == "P(product)"
    options = {
        "contract": draw(st.sampled_from(CONTRACTS if floats else CONTRACTS + EXACT)),
        "topology": draw(places),
        "path": draw(st.sampled_from(["exchange", "exchange", "reference"])),
    }
    if all_ranks is None:
        # What the seam cannot give.
        options["shape"] = shape if draw(st.booleans()) else None
        options["dtype"] = dtype if draw(st.booleans()) else None
        options["scatter"] = draw(st.sampled_from([True, True, True, False]))
    seed = draw(st.integers(0, 1 << 16))
    return Redistribution(layout, tuple(src), tuple(dst), shape, dtype, options, seed)
