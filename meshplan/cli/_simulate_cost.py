"""``meshplan simulate --cost``: predicted costs of all-reduces, on one mesh or growing clusters."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshplan._dtypes import itemsize
from meshplan.cli._options import (
    Steps,
    find_cluster,
    format_steps,
    list_placement_options,
    read_dtype,
    read_inputs,
    read_links,
    read_number,
    read_placements,
    read_steps,
    replace_links,
    require_cluster,
)
from meshplan.cli._output import format_table
from meshplan.errors import PolicyError

if TYPE_CHECKING:
    from meshplan.planner import Prediction
    from meshplan.topology import Links, Topology

# Without --mesh: GPUs of the clusters, GPUs of a node that NVLink joins, and elements.
CLUSTERS = (8, 64, 512, 4096, 32_768, 100_000)
NODE = 8
NUMELS = (1 << 14, 1 << 22, 1 << 28)
_MODEL = (
    "alpha-beta model; arithmetic, contention between jobs and the creation of groups are left out"
)


@dataclass(frozen=True)
class _Row:
    name: str
    found: Prediction

    def to_json(self, plan: Prediction) -> dict[str, Any]:
        return {"way": self.name, **self.found.to_json(), "to_meshplan": self.compare_to(plan)}

    def compare_to(self, plan: Prediction) -> float | None:
        """Its time as a multiple of the time of meshplan's plan."""
        own = plan.cost.nanoseconds
        return float(f"{self.found.cost.nanoseconds / own:.4g}") if own else None


def predict_costs(given: argparse.Namespace) -> str:
    if given.seed is not None:
        raise PolicyError("--cost uses no random numbers; leave out --seed")
    if given.table and given.mesh is not None:
        raise PolicyError("--table has its own meshes; leave out --mesh")
    dtype = read_dtype(given.dtype)
    links = read_links(given)
    if given.mesh is None:
        return _predict_clusters(given, dtype, links)
    return _predict_mesh(given, dtype, links)


def _predict_mesh(given: argparse.Namespace, dtype: str, links: Links | None) -> str:
    from meshplan.lint._spec import parse_mesh
    from meshplan.planner import NOMINAL_ELEMENTS, Problem

    layout = parse_mesh(given.mesh)
    topology = replace_links(
        require_cluster(find_cluster(read_inputs(given), layout.highest_rank + 1)).topology, links
    )
    numel = NOMINAL_ELEMENTS if given.numel is None else read_number(given.numel, "--numel")
    src = ["P"] * len(layout.axes) if given.src is None else read_placements(given.src, "--from")
    problem = Problem.of(
        layout,
        src,
        ["R"] * len(src),
        path="auto",
        dtype=dtype,
        shape=(numel,),
        topology=topology,
    )
    wide = tuple(
        layout.axes[i]
        for i, spec in enumerate(problem.src)
        if spec.kind == "partial" and layout.sizes[i] > 1
    )
    orders = [
        (format_steps(steps), steps)
        for steps in (read_steps(o, "--reduce-order") for o in given.reduce_order)
    ]
    rows = _predict_rows(problem, wide, orders, given)
    plan = rows[0].found
    if given.output_format == "json":
        return json.dumps(
            {
                "mesh": dict(zip(layout.axes, layout.sizes, strict=True)),
                "topology": str(topology),
                **_describe_model(dtype, topology),
                "numel": numel,
                "rows": [row.to_json(plan) for row in rows],
            },
            indent=2,
        )
    lines = [f"mesh {layout}, {topology}; {_describe_message(numel, dtype)}"]
    if not wide:
        lines.append("nothing is reduced: no partial axis has 2 ranks or more")
    else:
        lines += format_table([_HEAD, *(_format_cells(row, plan) for row in rows)])
    return "\n".join([*lines, f"links: {topology.links}", _MODEL])


def _predict_rows(
    problem: Any,
    wide: tuple[str, ...],
    orders: Sequence[tuple[str, Steps]],
    given: argparse.Namespace,
) -> list[_Row]:
    """Meshplan's plan; then torch's sequence or the requested orders; then all axes at once."""
    from meshplan.planner import predict_backend, predict_plan

    rows = [_Row("meshplan", predict_plan(problem))]
    if not orders and not given.flat and len(wide) > 1:
        orders = [("torch, axis by axis", tuple((axis,) for axis in wide))]
    algorithms: list[Any] = ["ring", "tree"] if given.algorithm == "both" else [given.algorithm]
    every: Any = "best" if given.algorithm == "both" else given.algorithm
    for name, steps in orders:
        rows.append(_Row(name, predict_backend(problem, steps, every)))
    if wide and (given.flat or not given.reduce_order):
        for one in algorithms:
            rows.append(_Row(f"one {one}", predict_backend(problem, [wide], one)))
    return rows


def _predict_clusters(given: argparse.Namespace, dtype: str, links: Links | None) -> str:
    from meshplan.layout import Layout
    from meshplan.planner import Problem
    from meshplan.topology import Topology

    orders = {"--reduce-order": given.reduce_order, "--flat": given.flat, "--from": given.src}
    taken = [*(option for option, value in orders.items() if value), *list_placement_options(given)]
    if taken:
        raise PolicyError(
            f"{taken[0]} needs one mesh; add --mesh, such as --mesh ddp=8,fsdp=5, or leave it out"
        )
    numels = NUMELS if given.numel is None else (read_number(given.numel, "--numel"),)
    blocks: list[dict[str, Any]] = []
    lines: list[str] = []
    for numel in numels:
        cells: list[Sequence[str]] = []
        for ranks in CLUSTERS:
            layout = Layout.of(ddp=ranks // NODE, fsdp=NODE)
            topology = replace_links(
                Topology.uniform(ranks, node_size=NODE, domain_size=NODE), links
            )
            problem = Problem.of(
                layout,
                ["P", "P"],
                ["R", "R"],
                path="auto",
                dtype=dtype,
                shape=(numel,),
                topology=topology,
            )
            wide = tuple(a for a, size in zip(layout.axes, layout.sizes, strict=True) if size > 1)
            rows = _predict_rows(
                problem, wide, [("torch, axis by axis", tuple((a,) for a in wide))], given
            )
            found = {row.name: row.to_json(rows[0].found) for row in rows}
            mesh = dict(zip(layout.axes, layout.sizes, strict=True))
            blocks.append({"ranks": ranks, "mesh": mesh, "numel": numel, "rows": [*found.values()]})
            head = ["GPUs", *(row.name for row in rows), "a rank sends over the network"]
            cells.append([str(ranks), *_format_times(rows)])
        lines += [f"{_describe_message(numel, dtype)}:", *format_table([head, *cells]), ""]
    if given.output_format == "json":
        return json.dumps({**_describe_model(dtype, topology), "clusters": blocks}, indent=2)
    first = (
        f"predicted times of all-reduces over (ddp, fsdp), fsdp={NODE} on nodes of {NODE}, and of "
        "each as a multiple of meshplan's"
    )
    return "\n".join([first, *lines, f"links: {topology.links}", _MODEL])


def _format_times(rows: Sequence[_Row]) -> list[str]:
    from meshplan.planner import format_bytes, format_time

    plan = rows[0].found
    times = [
        format_time(row.found.cost.nanoseconds)
        + ("" if row is rows[0] else f" ({_format_ratio(row.compare_to(plan))})")
        for row in rows
    ]
    return [*times, ", ".join(format_bytes(row.found.cost.network) for row in rows)]


_HEAD = ("way", "steps", "time", "to meshplan", "network", "node", "domain")


def _format_cells(row: _Row, plan: Prediction) -> tuple[str, ...]:
    from meshplan.planner import format_bytes, format_time

    found = row.found
    steps = ", ".join(
        f"{'+'.join(axes)} {how}" for axes, how in zip(found.steps, found.how, strict=True)
    )
    links = (found.cost.network, found.cost.node, found.cost.domain)
    return (
        row.name,
        steps,
        format_time(found.cost.nanoseconds),
        _format_ratio(row.compare_to(plan)),
        *(format_bytes(sent) for sent in links),
    )


def _format_ratio(found: float | None) -> str:
    if found is None:
        return ""
    return f"{found:.2f}" if found >= 1 else f"{found:.2g}"


def _describe_model(dtype: str, topology: Topology) -> dict[str, Any]:
    links = json.loads(topology.links.dumps())
    return {"dtype": dtype, "links": links, "model": _MODEL}


def _describe_message(numel: int, dtype: str) -> str:
    from meshplan.planner import format_bytes

    size = format_bytes(numel * itemsize(dtype))
    return f"{numel} element{'s' if numel > 1 else ''} of {dtype} ({size})"
