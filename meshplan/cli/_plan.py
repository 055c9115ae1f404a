"""``meshplan plan``: the plan of a redistribution, its cost, and the hazards without meshplan."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meshplan.cli._options import (
    add_links,
    add_mesh,
    add_output,
    add_placement,
    add_verb,
    find_cluster,
    quote,
    read_dtype,
    read_inputs,
    read_links,
    read_placements,
    replace_links,
)
from meshplan.errors import PolicyError

if TYPE_CHECKING:
    from meshplan.planner import Plan, Problem

_NEEDED = {"mesh": "--mesh ddp=8,fsdp=5", "src": "--from P,P", "dst": "--to R,R"}
# Comparing the orders of larger groups takes many seconds.
_MAX_GROUP = 1 << 16
_MAX_DIMS, _MAX_ELEMENTS = 64, 1 << 62


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "plan",
        show_plan,
        "show the plan of a redistribution, its cost, and the hazards without meshplan",
        description="Plan one DTensor redistribution, without a job.",
    )
    option = parser.add_argument
    add_mesh(parser)
    option(
        "--from",
        dest="src",
        metavar="PLACEMENTS",
        help="for each axis: P, P(avg), S(0) or R",
    )
    option("--to", dest="dst", metavar="PLACEMENTS", help="for each axis: R or S(0)")
    option(
        "--shape",
        metavar="SIZES",
        help="shape of the whole tensor: 4096,4096 or 4096x4096",
    )
    option("--dtype", metavar="DTYPE", help="e.g. bf16, float32")
    option(
        "--policy",
        choices=("deterministic", "consistent", "fast"),
        default="deterministic",
        help="default: deterministic",
    )
    option(
        "--path",
        choices=("auto", "exchange", "halving", "reference"),
        default="auto",
        help="default: auto, an exchange or recursive halving",
    )
    add_links(parser)
    add_placement(parser)
    add_output(parser).add_argument(
        "--explain",
        action="store_true",
        help="also show the rejected plans, and why they were rejected",
    )


def list_plain_steps(problem: Problem) -> list[tuple[int, ...]]:
    """The axes that torch reduces or gathers without meshplan, in its order: each axis by itself,
    the outermost first; the innermost first if the tensor is sharded.
    """
    # Source: torch 2.13, distributed/tensor/_redistribute.py, generate_greedy_transform_infos.
    sizes = problem.layout.sizes
    pairs = list(enumerate(zip(problem.src, problem.dst, strict=True)))
    axes = [
        i
        for i, (src, dst) in pairs
        if sizes[i] > 1
        and (
            (src.kind == "partial" and dst.kind != "partial")
            or (src.kind == "shard" and dst.kind == "replicate")
        )
    ]
    shards = math.prod(sizes[i] for i, (src, _) in pairs if src.kind == "shard")
    return [(i,) for i in (reversed(axes) if shards > 1 else axes)]


def show_plan(given: argparse.Namespace) -> str:
    from meshplan.planner import hazards, plan
    from meshplan.topology import Topology

    problem = _read_problem(given)
    planned = plan(problem)
    steps = list_plain_steps(problem)
    layout = problem.layout
    topology = problem.topology or Topology.unknown(layout.world_size)
    judged = all(layout.sizes[axis] <= _MAX_GROUP for axes in steps for axis in axes)
    found = hazards(problem, topology, steps=steps) if judged else ()
    if given.output_format == "json":
        document = planned.to_json()
        document["compared"] = planned.compared
        if given.explain:
            document["candidates"] = [
                {
                    "cost": candidate.cost.to_json(),
                    "steps": [step.to_json(layout) for step in candidate.steps],
                }
                for candidate in planned.candidates
            ]
        entries = [
            {"verdict": one.verdict, **asdict(one), "classes": dict(one.classes)} for one in found
        ]
        document["plain"] = {
            "steps": [[layout.axes[i] for i in axes] for axes in steps],
            "hazards": entries if judged else None,
        }
        return json.dumps(document, indent=2) + "\n"
    lines = planned.explain().splitlines() if given.explain else _summarize(planned)
    if steps:
        order = ", ".join(layout.axes[axis] for axes in steps for axis in axes)
        lines.append(f"without meshplan, sequentially by axis ({order}), in the backend's order:")
        if not judged:
            lines.append(f"  groups of more than {_MAX_GROUP} ranks are not checked")
        elif not found:
            lines.append("  no groups that must agree may differ")
        lines += [f"  {line}" for hazard in found for line in str(hazard).splitlines()]
    return "\n".join([*lines, ""])


def _read_problem(given: argparse.Namespace) -> Problem:
    from meshplan.lint._spec import parse_mesh
    from meshplan.planner import Problem
    from meshplan.topology import Topology

    for name, example in _NEEDED.items():
        if getattr(given, name) is None:
            raise PolicyError(f"{example.split()[0]} is missing; use {' '.join(_NEEDED.values())}")
    layout = parse_mesh(given.mesh)
    cluster = find_cluster(read_inputs(given), layout.highest_rank + 1)
    links = read_links(given)
    topology = None if cluster is None else replace_links(cluster.topology, links)
    if topology is None and links is not None:
        topology = Topology.unknown(layout.highest_rank + 1, links)
    return Problem.of(
        layout,
        read_placements(given.src, "--from"),
        read_placements(given.dst, "--to"),
        policy=given.policy,
        path=given.path,
        dtype=None if given.dtype is None else read_dtype(given.dtype),
        shape=None if given.shape is None else _read_shape(given.shape),
        topology=topology,
    )


def _read_shape(text: str) -> tuple[int, ...]:
    items = [item.strip() for item in re.split("[,x]", text)]
    if len(items) > _MAX_DIMS or not all(re.fullmatch("[0-9]{1,15}", item) for item in items):
        raise PolicyError(
            f"--shape: use a length for each dim, such as 4096,4096, got {quote(text)}"
        )
    lengths = tuple(map(int, items))
    if math.prod(lengths) > _MAX_ELEMENTS:
        raise PolicyError(f"--shape: use at most {_MAX_ELEMENTS} elements, got {quote(text)}")
    return lengths


def _summarize(planned: Plan) -> list[str]:
    lines = [
        f"{planned.problem}",
        *(f"  {line}" for line in str(planned).splitlines()),
    ]
    if planned.candidates:
        chosen = next(c for c in planned.explain().splitlines() if c.startswith("chosen: "))
        others = planned.compared - 1
        more = f"; best of {planned.compared} plans, --explain shows others" if others else ""
        lines.append(f"predicted: {chosen.removeprefix('chosen: ')}{more}")
    return lines
