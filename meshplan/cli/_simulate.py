"""``meshplan simulate``: the replicas after all-reduces in the order of the NCCL model.

With ``--cost``, the cost of the all-reduces: ``_simulate_cost``.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshplan._dtypes import itemsize
from meshplan.cli._options import (
    Steps,
    add_links,
    add_mesh,
    add_output,
    add_placement,
    add_verb,
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
from meshplan.cli._output import format_table, track
from meshplan.errors import PolicyError, TopologyError

if TYPE_CHECKING:
    from meshplan.layout import Layout
    from meshplan.planner import Prediction, Simulation
    from meshplan.planner._hazards import Algorithm
    from meshplan.topology import Links, Topology


# Sizes of (ddp, fsdp), and consecutive ranks of a node. The first five are jagged.
REFERENCE = (
    ((8, 5), 8),
    ((4, 6), 8),
    ((4, 12), 8),
    ((3, 16), 24),
    ((9, 64), 72),
    ((5, 8), 8),
    ((8, 4), 8),
    ((2, 8), 8),
    ((6, 4), 8),
)
_MODEL = (
    "model of NCCL 2.30: 1 channel, hosts with NVSwitch, no NVLS; "
    "it shows what may happen and certifies nothing"
)
_MAX_ORDERS = 24
_ALGORITHMS: tuple[Algorithm, ...] = ("tree", "ring")
# Elements without --numel: `_MOST`, or fewer if all simulations of a call would draw more than
# `_DRAWN` random numbers, which takes seconds.
_MOST, _LEAST, _DRAWN = 1 << 14, 1 << 8, 1 << 26


def add(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "simulate",
        simulate_or_predict,
        "simulate all-reduces and count the different replicas, or predict their cost",
        description="Add random numbers in the order of a model of NCCL, rank by rank, and compare "
        "the replicas bit by bit. With --cost: predict the time and the bytes of meshplan's plan, "
        "of torch's all-reduces axis by axis, and of one ring and one tree over all axes; without "
        "--mesh, on clusters of 8 to 100000 GPUs.",
        epilog=f"A {_MODEL}.",
    )
    option = parser.add_argument
    add_mesh(parser)
    option(
        "--reduce-order",
        action="append",
        default=[],
        metavar="AXES",
        help="reduce these axes sequentially; + joins axes that are reduced at once: tp,ddp+fsdp. "
        "Ranks along other axes hold equal inputs. May be repeated (default: all orders of all "
        "axes, and all axes at once)",
    )
    option("--flat", action="store_true", help="reduce all axes at once")
    option(
        "--from",
        dest="src",
        metavar="PLACEMENTS",
        help="placement before, for each axis: P, P(avg), R or S(0) (default: P if "
        "--reduce-order has it)",
    )
    option("--algorithm", choices=("ring", "tree", "both"), default="both", help="default: both")
    option("--dtype", default="float32", metavar="DTYPE", help="e.g. bf16 (default: float32)")
    option(
        "--numel",
        metavar="N",
        help=f"number of elements (default: {_MOST}, fewer for thousands of ranks)",
    )
    option("--seed", metavar="N", help="seed of the random numbers (default: 0)")
    option("--table", action="store_true", help="simulate nine reference meshes")
    option("--cost", action="store_true", help="predict time and bytes from the figures of links")
    add_links(parser)
    add_placement(parser)
    add_output(parser)


def simulate_or_predict(given: argparse.Namespace) -> str:
    """The simulation, or with ``--cost`` the prediction, as text or JSON; ``MeshplanError`` for
    invalid options.
    """
    if given.cost:
        return predict_costs(given) + "\n"
    if given.links is not None:
        raise PolicyError("--links needs --cost; pass --cost too")
    return (_simulate_table(given) if given.table else _simulate_mesh(given)) + "\n"


class _Options:
    def __init__(self, given: argparse.Namespace) -> None:
        self.algorithms = [name for name in _ALGORITHMS if given.algorithm in (name, "both")]
        self.dtype = read_dtype(given.dtype)
        self.given = None if given.numel is None else read_number(given.numel, "--numel")
        self.seed = read_number(given.seed or "0", "--seed", least=0)

    def choose_numel(self, ranks: int, orders: int) -> int:
        if self.given is not None:
            return self.given
        room = _DRAWN // (ranks * max(orders, 1) * len(self.algorithms))
        return max(_LEAST, min(_MOST, 1 << max(room.bit_length() - 1, 0)))

    def simulate(
        self,
        layout: Layout,
        topology: Topology,
        steps: Steps,
        numel: int,
        src: list[str] | None = None,
    ) -> list[Simulation]:
        from meshplan.planner import simulate

        return [
            simulate(
                layout,
                topology,
                steps,
                algorithm=name,
                dtype=self.dtype,
                numel=numel,
                seed=self.seed,
                src=src,
            )
            for name in self.algorithms
        ]

    def to_json(self, numel: int) -> dict[str, Any]:
        return {"dtype": self.dtype, "numel": numel, "seed": self.seed, "model": _MODEL}

    def describe(self, numel: int) -> str:
        return f"{numel} element{'s' if numel > 1 else ''} of {self.dtype}, seed {self.seed}"


def _simulate_mesh(given: argparse.Namespace) -> str:
    options = _Options(given)
    if given.mesh is None:
        raise PolicyError("no mesh; pass --mesh AXES, such as ddp=8,fsdp=5, or --table")
    from meshplan.lint._spec import parse_mesh

    layout = parse_mesh(given.mesh)
    topology = require_cluster(find_cluster(read_inputs(given), layout.highest_rank + 1)).topology
    if not topology.known:
        raise TopologyError(
            "these files do not report the placement of ranks, which decides the order; pass "
            "--hosts, --node-size or --domain-size too"
        )
    src = None if given.src is None else read_placements(given.src, "--from")
    sequences = _read_sequences(given, layout, src)
    numel = options.choose_numel(layout.world_size, len(sequences))
    rows = [
        (steps, found)
        for steps in track("simulating order", sequences)
        for found in options.simulate(layout, topology, steps, numel, src)
    ]
    if given.output_format == "json":
        return json.dumps(
            {
                "mesh": dict(zip(layout.axes, layout.sizes, strict=True)),
                "topology": str(topology),
                **options.to_json(numel),
                "rows": [_encode_row(steps, found) for steps, found in rows],
            },
            indent=2,
        )
    lines = [f"mesh {layout}, {topology}; {options.describe(numel)}"]
    cells = [
        (format_steps(steps), found.algorithm, str(found.replicas), f"{found.differing:.1%}")
        for steps, found in rows
    ]
    if not cells:
        lines.append("nothing is reduced: no partial axis has 2 ranks or more")
    else:
        lines += format_table([("order", "algorithm", "replicas", "differ"), *cells])
    return "\n".join([*lines, _MODEL])


def _read_sequences(
    given: argparse.Namespace, layout: Layout, src: list[str] | None
) -> list[Steps]:
    every = [
        axis
        for i, axis in enumerate(layout.axes)
        if layout.sizes[i] > 1 and (src is None or (i < len(src) and src[i].startswith("P")))
    ]
    found: list[Steps] = [read_steps(order, "--reduce-order") for order in given.reduce_order]
    if not given.reduce_order and not given.flat and every:
        orders = list(itertools.islice(itertools.permutations(every), _MAX_ORDERS + 1))
        if len(orders) > _MAX_ORDERS:
            raise PolicyError(
                f"{len(every)} axes have more than {_MAX_ORDERS} orders; use one, such as "
                f"--reduce-order {','.join(every)}, or --flat"
            )
        found = [tuple((axis,) for axis in order) for order in orders]
    if every and (given.flat or (not given.reduce_order and len(every) > 1)):
        found.append((tuple(every),))
    return found


def _encode_row(steps: Steps, found: Simulation) -> dict[str, Any]:
    return {
        "order": [list(step) for step in steps],
        "algorithm": found.algorithm,
        "replicas": found.replicas,
        "differing": found.differing,
        "ulps": found.ulps,
        "steps": [
            {
                "axes": list(step.axes),
                "group_size": step.group_size,
                "groups": step.groups,
                "orders": step.orders,
                "sums": step.sums,
            }
            for step in found.per_step
        ],
    }


def _simulate_table(given: argparse.Namespace) -> str:
    from meshplan.layout import Layout
    from meshplan.topology import Topology

    options = _Options(given)
    clash = {
        "--mesh": given.mesh,
        "--reduce-order": given.reduce_order,
        "--flat": given.flat,
        "--from": given.src,
    }
    taken = [*(option for option, value in clash.items() if value), *list_placement_options(given)]
    if taken:
        raise PolicyError(f"--table has its own meshes and orders; leave out {taken[0]}")
    orders: tuple[Steps, ...] = (
        (("fsdp",), ("ddp",)),
        (("ddp",), ("fsdp",)),
        (("ddp", "fsdp"),),
    )
    heads = [f"{name} {format_steps(steps)}" for name in options.algorithms for steps in orders]
    rows = [("(ddp, fsdp)", "node", *heads)]
    numel = options.choose_numel(1, len(orders))
    found: list[dict[str, Any]] = []
    for sizes, node in track("simulating mesh", REFERENCE):
        layout = Layout.of(ddp=sizes[0], fsdp=sizes[1])
        topology = Topology.uniform(layout.world_size, node_size=node, domain_size=node)
        results = [(steps, options.simulate(layout, topology, steps, numel)) for steps in orders]
        one = [(s, r[i]) for i in range(len(options.algorithms)) for s, r in results]
        mesh = {"mesh": {"ddp": sizes[0], "fsdp": sizes[1]}, "node_size": node}
        found.append({**mesh, "rows": [_encode_row(steps, result) for steps, result in one]})
        cells = [f"{result.replicas} / {result.differing:.1%}" for _, result in one]
        rows.append((f"({sizes[0]}, {sizes[1]})", str(node), *cells))
    if given.output_format == "json":
        return json.dumps({**options.to_json(numel), "meshes": found}, indent=2)
    first = f"different replicas / largest share of elements that differ; {options.describe(numel)}"
    return "\n".join([first, *format_table(rows), _MODEL])


# ``meshplan simulate --cost``: predicted costs of all-reduces, on one mesh or growing clusters.

# Without --mesh: GPUs of the clusters, GPUs of a node that NVLink joins, and elements.
CLUSTERS = (8, 64, 512, 4096, 32_768, 100_000)
NODE = 8
NUMELS = (1 << 14, 1 << 22, 1 << 28)
_COST_MODEL = (
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
    return "\n".join([*lines, f"links: {topology.links}", _COST_MODEL])


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
    return "\n".join([first, *lines, f"links: {topology.links}", _COST_MODEL])


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
    return {"dtype": dtype, "links": links, "model": _COST_MODEL}


def _describe_message(numel: int, dtype: str) -> str:
    from meshplan.planner import format_bytes

    size = format_bytes(numel * itemsize(dtype))
    return f"{numel} element{'s' if numel > 1 else ''} of {dtype} ({size})"
