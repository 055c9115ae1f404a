"""``meshplan plan``: the plan of a redistribution, its cost, and the hazards without meshplan.
``meshplan simulate``: the replicas after all-reduces in the order of the NCCL model, or with
``--cost`` the predicted costs of all-reduces, on one mesh or on growing clusters.
``meshplan links``: measured costs of the links between the ranks of a job.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from meshplan import planner
from meshplan._dtypes import itemsize
from meshplan._needs_torch import import_with_torch
from meshplan.cli._options import (
    REPEATED,
    add_mesh,
    add_output,
    add_placement,
    add_switches,
    add_texts,
    add_timeout,
    add_verb,
    check_timeout,
    complain,
    find_cluster,
    format_table,
    list_placement_options,
    quote,
    read_inputs,
    read_number,
    refuse,
    require_cluster,
    require_launcher,
    track,
    try_to_open,
    write,
)
from meshplan.errors import MeshplanError, PolicyError, TopologyError

if TYPE_CHECKING:
    from meshplan.layout import Layout
    from meshplan.planner import Algorithm, Plan, Prediction, Problem
    from meshplan.topology import Links, Topology

Steps = tuple[tuple[str, ...], ...]
"""The axes of each reduction of a sequence."""
_DTYPES = {
    "float32": ("f32", "fp32", "float"),
    "bfloat16": ("bf16",),
    "float16": ("f16", "fp16", "half"),
    "float64": ("f64", "fp64", "double"),
    "int8": ("i8",),
    "int16": ("i16", "short"),
    "int32": ("i32", "int"),
    "int64": ("i64", "long"),
    "uint8": ("u8",),
}
_COMMA = re.compile(r",(?![^()]*\))")
_PLACEMENT = re.compile(r"[A-Z](\([a-z0-9]{1,8}\))?")
_NEEDED = {
    "mesh": "--mesh ddp=8,fsdp=5",
    "src": "--from P,P",
    "dst": "--to R,R",
}
# Comparing the orders of larger groups takes many seconds.
_MAX_GROUP = 1 << 16
_MAX_DIMS, _MAX_ELEMENTS = 64, 1 << 62


def add_plan(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "plan",
        show_plan,
        "show the plan of a redistribution, its cost, and the hazards without meshplan",
        description="Plan one DTensor redistribution, without a job.",
    )
    add_mesh(parser)
    add_texts(
        parser,
        ("--from", "PLACEMENTS", "for each axis: P, P(avg), S(0) or R"),
        dest="src",
    )
    add_texts(parser, ("--to", "PLACEMENTS", "for each axis: R or S(0)"), dest="dst")
    add_texts(
        parser,
        (
            "--shape",
            "SIZES",
            "shape of the whole tensor: 4096,4096 or 4096x4096",
        ),
        ("--dtype", "DTYPE", "e.g. bf16, float32"),
    )
    parser.add_argument(
        "--policy",
        choices=("deterministic", "consistent", "fast"),
        default="deterministic",
        help="default: deterministic",
    )
    parser.add_argument(
        "--path",
        choices=("auto", "exchange", "halving", "reference"),
        default="auto",
        help="default: auto, an exchange or recursive halving",
    )
    add_links_file(parser)
    add_placement(parser)
    add_switches(
        add_output(parser),
        ("--explain", "also show the rejected plans, and why they were rejected"),
    )


def add_links_file(parser: Any) -> None:
    text = "latencies and bandwidths in JSON from meshplan links, or - for standard input "
    text += "(default: data-sheet figures; with simulate --cost those of --gpu)"
    add_texts(parser, ("--links", "FILE", text))


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
    from meshplan.topology import Topology

    problem = _read_problem(given)
    planned = planner.plan(problem)
    steps = list_plain_steps(problem)
    layout = problem.layout
    topology = problem.topology or Topology.unknown(layout.world_size)
    judged = all(layout.sizes[axis] <= _MAX_GROUP for axes in steps for axis in axes)
    found = planner.hazards(problem, topology, steps=steps) if judged else ()
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
            {
                "verdict": one.verdict,
                **asdict(one),
                "classes": dict(one.classes),
            }
            for one in found
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
    from meshplan.topology import Topology

    for name, example in _NEEDED.items():
        if getattr(given, name) is None:
            raise PolicyError(f"{example.split()[0]} is missing; use {' '.join(_NEEDED.values())}")
    layout = parse_mesh(given.mesh)
    cluster = find_cluster(read_inputs(given), layout.highest_rank + 1)
    links = read_links(given)
    topology = None if cluster is None else cluster.topology
    if links is not None:
        topology = replace(topology or Topology.unknown(layout.highest_rank + 1), links=links)
    return planner.Problem.of(
        layout,
        read_placements(given.src, "--from"),
        read_placements(given.dst, "--to"),
        policy=given.policy,
        path=given.path,
        dtype=None if given.dtype is None else read_dtype(given.dtype),
        shape=None if given.shape is None else _read_shape(given.shape),
        topology=topology,
    )


def read_links(given: argparse.Namespace) -> Links | None:
    if given.links is None:
        return None
    from meshplan.topology import Links
    from meshplan.topology._files import read_content

    return Links.loads(read_content(given.links))


def read_dtype(text: str) -> str:
    """The name of a dtype from its full or short form, e.g. ``bf16``, ``torch.float32``."""
    short = text.strip().lower().removeprefix("torch.")
    for name, others in _DTYPES.items():
        if short == name or short in others:
            return name
    raise PolicyError(f"--dtype: use one of {', '.join(_DTYPES)}, got {quote(text)}")


def read_placements(text: str, option: str) -> list[str]:
    items = [item.strip() for item in _COMMA.split(text)]
    for item in items:
        if not _PLACEMENT.fullmatch(item):
            raise PolicyError(
                f"{option}: use R, S(0), P or P(avg) for each axis, such as {option} P,R, "
                f"got {quote(item)}"
            )
    return items


def read_steps(text: str) -> Steps:
    """The axes of each reduction in ``tp,ddp+fsdp``, as of ``--reduce-order``."""
    steps = tuple(tuple(axis.strip() for axis in step.split("+")) for step in text.split(","))
    for axis in (axis for step in steps for axis in step):
        if not re.fullmatch("[A-Za-z0-9_]{1,64}", axis):
            raise PolicyError(
                "--reduce-order: use axes of the mesh, such as --reduce-order ddp,fsdp, or "
                f"--reduce-order ddp+fsdp at once, got {quote(axis)}"
            )
    return steps


def format_steps(steps: Steps) -> str:
    """``tp, ddp+fsdp``."""
    return ", ".join(map("+".join, steps))


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


_MODEL = (
    "model of NCCL 2.30: 1 channel, hosts with NVSwitch, no NVLS; "
    "it shows what may happen and certifies nothing"
)
_MAX_ORDERS = 24
_ALGORITHMS: tuple[Algorithm, ...] = ("tree", "ring")
# Elements without --numel: `_MOST`, or fewer if all simulations of a call would draw more than
# `_DRAWN` random numbers, which takes seconds.
_MOST, _LEAST, _DRAWN = 1 << 14, 1 << 8, 1 << 26


def add_simulate(verbs: Any) -> None:
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
    add_mesh(parser)
    what = (
        "reduce these axes sequentially; + joins axes that are reduced at once: tp,ddp+fsdp. Ranks "
        "along other axes hold equal inputs. May be repeated (default: all orders of all axes, and "
        "all axes at once)"
    )
    add_texts(parser, ("--reduce-order", "AXES", what), **REPEATED)
    add_switches(parser, ("--flat", "reduce all axes at once"))
    what = "placement before, for each axis: P, P(avg), R or S(0) (default: P if "
    what += "--reduce-order has it)"
    add_texts(parser, ("--from", "PLACEMENTS", what), dest="src")
    parser.add_argument(
        "--algorithm",
        choices=("ring", "tree", "both"),
        default="both",
        help="default: both",
    )
    what = "e.g. bf16 (default: float32)"
    add_texts(parser, ("--dtype", "DTYPE", what), default="float32")
    add_texts(
        parser,
        (
            "--numel",
            "N",
            f"number of elements (default: {_MOST}, fewer for thousands of ranks)",
        ),
        ("--seed", "N", "seed of the random numbers (default: 0)"),
    )
    add_switches(parser, ("--cost", "predict time and bytes from the figures of links"))
    parser.add_argument(
        "--gpu",
        choices=("h100", "a100", "a100-efa", "gb200"),
        help="links fitted to published times (default: h100; EFA: the network of AWS)",
    )
    add_links_file(parser)
    add_placement(parser)
    add_output(parser)


def simulate_or_predict(given: argparse.Namespace) -> str:
    if given.cost:
        if given.seed is not None:
            raise PolicyError("--cost uses no random numbers; leave out --seed")
        predict = _predict_clusters if given.mesh is None else _predict_mesh
        return predict(given, read_dtype(given.dtype), _Model(given)) + "\n"
    for option, value in (("--links", given.links), ("--gpu", given.gpu)):
        if value is not None:
            raise PolicyError(f"{option} needs --cost; pass --cost too")
    return _simulate_mesh(given) + "\n"


def _read_mesh(
    given: argparse.Namespace,
) -> tuple[Layout, Topology, list[str] | None]:
    from meshplan.lint._spec import parse_mesh

    layout = parse_mesh(given.mesh)
    cluster = require_cluster(find_cluster(read_inputs(given), layout.highest_rank + 1))
    src = None if given.src is None else read_placements(given.src, "--from")
    return layout, cluster.topology, src


def _format_mesh(
    given: argparse.Namespace,
    layout: Layout,
    topology: Topology,
    facts: dict[str, Any],
    about: str,
    table: Sequence[Sequence[str]],
    notes: Sequence[str],
) -> str:
    """The facts as JSON, or as text a line about the mesh, the table and the notes."""
    if given.output_format == "json":
        mesh = dict(zip(layout.axes, layout.sizes, strict=True))
        return json.dumps({"mesh": mesh, "topology": str(topology), **facts}, indent=2)
    nothing = ["nothing is reduced: no partial axis has 2 ranks or more"]
    lines = format_table(table) if len(table) > 1 else nothing
    return "\n".join([f"mesh {layout}, {topology}; {about}", *lines, *notes])


def _simulate_mesh(given: argparse.Namespace) -> str:
    algorithms = [name for name in _ALGORITHMS if given.algorithm in (name, "both")]
    dtype = read_dtype(given.dtype)
    numel = None if given.numel is None else read_number(given.numel, "--numel")
    seed = read_number(given.seed or "0", "--seed", least=0)
    if given.mesh is None:
        raise PolicyError("no mesh; pass --mesh AXES, such as ddp=8,fsdp=5")
    layout, topology, src = _read_mesh(given)
    if not topology.known:
        raise TopologyError(
            "these files do not report the placement of ranks, which decides the order; pass "
            "--hosts, --node-size or --domain-size too"
        )
    sequences = _read_sequences(given, layout, src)
    if numel is None:
        room = _DRAWN // (layout.world_size * max(len(sequences), 1) * len(algorithms))
        numel = max(_LEAST, min(_MOST, 1 << max(room.bit_length() - 1, 0)))
    rows: list[dict[str, Any]] = []
    table = [("order", "algorithm", "replicas", "differ")]
    for steps, name in track("simulating order", [*itertools.product(sequences, algorithms)]):
        found = planner.simulate(
            layout,
            topology,
            steps,
            algorithm=name,
            dtype=dtype,
            numel=numel,
            seed=seed,
            src=src,
        )
        rows.append(
            {
                "order": [list(step) for step in steps],
                "algorithm": name,
                "replicas": found.replicas,
                "differing": found.differing,
                "ulps": found.ulps,
                "steps": [asdict(step) for step in found.per_step],
            }
        )
        different = f"{found.differing:.1%}"
        table.append((format_steps(steps), name, str(found.replicas), different))
    facts = {
        "dtype": dtype,
        "numel": numel,
        "seed": seed,
        "model": _MODEL,
        "rows": rows,
    }
    about = f"{_describe_elements(numel, dtype)}, seed {seed}"
    return _format_mesh(given, layout, topology, facts, about, table, [_MODEL])


def _read_sequences(
    given: argparse.Namespace, layout: Layout, src: list[str] | None
) -> list[Steps]:
    every = [
        axis
        for i, axis in enumerate(layout.axes)
        if layout.sizes[i] > 1 and (src is None or (i < len(src) and src[i].startswith("P")))
    ]
    found: list[Steps] = [read_steps(order) for order in given.reduce_order]
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


# Without --mesh: GPUs of the clusters, GPUs of a node that NVLink joins, and elements.
CLUSTERS = (8, 64, 512, 4096, 32_768, 100_000)
NODE = 8
NUMELS = (1 << 14, 1 << 22, 1 << 28)
_COST_MODEL = (
    "alpha-beta model; arithmetic, contention between jobs and the creation of groups are left out"
)


class _Model:
    """The links and their errors: of a kind of GPU, or of the file of ``--links``."""

    def __init__(self, given: argparse.Namespace) -> None:
        if given.links is not None and given.gpu is not None:
            raise PolicyError("--links has figures of its own; leave out --gpu")
        own, self.name = read_links(given), given.gpu or "h100"
        self.errors = planner.CALIBRATIONS[self.name]
        self.calibration = None if own else self.errors
        self.links = own or self.errors.links

    def describe(self, ranks: int) -> list[str]:
        most = self.errors.largest
        text = f"ranges: largest error of the model for {self.name} on published times of NCCL"
        more = f"; none was found for more than {most} GPUs" if ranks > most else ""
        return [f"links: {self.links}", f"{text}{more}", _COST_MODEL]

    def to_json(self, dtype: str) -> dict[str, Any]:
        return {
            "dtype": dtype,
            "links": json.loads(self.links.dumps()),
            "published": self.errors.largest,
            "model": _COST_MODEL,
        }


@dataclass(frozen=True)
class _Row:
    name: str
    found: Prediction
    low: float
    high: float
    ratios: list[float]  # its time as a multiple of that of meshplan's plan, lowest and highest

    def to_json(self) -> dict[str, Any]:
        times = {
            "low": round(self.low),
            "high": round(self.high),
            "to_meshplan": self.ratios,
        }
        return {"way": self.name, **self.found.to_json(), **times}

    @property
    def time(self) -> str:
        return " to ".join(planner.format_time(round(one)) for one in (self.low, self.high))

    @property
    def ratio(self) -> str:
        return " to ".join(f"{one:g}" for one in self.ratios)

    def format_cells(self) -> tuple[str, ...]:
        steps = zip(self.found.steps, self.found.how, strict=True)
        cost = self.found.cost
        sent = map(planner.format_bytes, (cost.network, cost.node, cost.domain))
        how = ", ".join(f"{'+'.join(axes)} {how}" for axes, how in steps)
        return self.name, how, self.time, self.ratio, *sent


_HEAD = ("way", "steps", "time", "to meshplan", "network", "node", "domain")


def _predict_mesh(given: argparse.Namespace, dtype: str, model: _Model) -> str:
    layout, topology, src = _read_mesh(given)
    numel = planner.NOMINAL_ELEMENTS
    if given.numel is not None:
        numel = read_number(given.numel, "--numel")
    src = src or ["P"] * len(layout.axes)
    rows = _predict_rows(given, model, layout, topology, src, numel, dtype)
    facts = {
        **model.to_json(dtype),
        "numel": numel,
        "rows": [row.to_json() for row in rows],
    }
    table = [
        _HEAD,
        *(row.format_cells() for row in rows if rows[0].found.steps),
    ]
    about = _describe_message(numel, dtype)
    notes = model.describe(layout.world_size)
    return _format_mesh(given, layout, topology, facts, about, table, notes)


def _predict_rows(
    given: argparse.Namespace,
    model: _Model,
    layout: Layout,
    topology: Topology,
    src: list[str],
    numel: int,
    dtype: str,
) -> list[_Row]:
    """Meshplan's plan; then torch's sequence or the requested orders; then all axes at once."""
    problem = planner.Problem.of(
        layout,
        src,
        ["R"] * len(src),
        path="auto",
        dtype=dtype,
        shape=(numel,),
        topology=replace(topology, links=model.links),
    )
    wide = tuple(
        layout.axes[i]
        for i, spec in enumerate(problem.src)
        if spec.kind == "partial" and layout.sizes[i] > 1
    )
    orders: list[Steps] = [read_steps(order) for order in given.reduce_order]
    both = given.algorithm == "both"
    every: Any = "best" if both else given.algorithm
    ways = [(format_steps(steps), steps, every) for steps in orders]
    if not orders and not given.flat and (len(wide) > 1 or given.mesh is None):
        ways = [("torch, axis by axis", tuple((axis,) for axis in wide), every)]
    if wide and (given.flat or not orders):
        algorithms = ["ring", "tree"] if both else [given.algorithm]
        ways += [(f"one {name}", (wide,), name) for name in algorithms]
    found = [("meshplan", planner.predict_plan(problem))]
    for name, steps, one in ways:
        found.append((name, planner.predict_backend(problem, steps, one, model.calibration)))
    rows: list[_Row] = []
    for name, prediction in found:
        low, high = model.errors.widen(prediction.cost)
        plan = rows[0] if rows and rows[0].low else None
        ratios = () if plan is None else (low / plan.high, high / plan.low)
        rows.append(_Row(name, prediction, low, high, [float(f"{one:.2g}") for one in ratios]))
    return rows


def _predict_clusters(given: argparse.Namespace, dtype: str, model: _Model) -> str:
    from meshplan.layout import Layout
    from meshplan.topology import Topology

    single = {
        "--reduce-order": given.reduce_order,
        "--flat": given.flat,
        "--from": given.src,
    }
    taken = [
        *(option for option, value in single.items() if value),
        *list_placement_options(given),
    ]
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
            topology = Topology.uniform(ranks, node_size=NODE, domain_size=NODE)
            rows = _predict_rows(given, model, layout, topology, ["P", "P"], numel, dtype)
            mesh = dict(zip(layout.axes, layout.sizes, strict=True))
            found = [row.to_json() for row in rows]
            blocks.append({"ranks": ranks, "mesh": mesh, "numel": numel, "rows": found})
            head = [
                "GPUs",
                *(row.name for row in rows),
                "a rank sends over the network",
            ]
            times = [f"{row.time} ({row.ratio})" if row.ratio else row.time for row in rows]
            sent = [planner.format_bytes(row.found.cost.network) for row in rows]
            cells.append([str(ranks), *times, ", ".join(sent)])
        lines += [
            f"{_describe_message(numel, dtype)}:",
            *format_table([head, *cells]),
            "",
        ]
    if given.output_format == "json":
        return json.dumps({**model.to_json(dtype), "clusters": blocks}, indent=2)
    first = (
        f"predicted times of all-reduces over (ddp, fsdp), fsdp={NODE} on nodes of {NODE}, and of "
        "each as a multiple of meshplan's"
    )
    return "\n".join([first, *lines, *model.describe(max(CLUSTERS))])


def _describe_message(numel: int, dtype: str) -> str:
    return f"{_describe_elements(numel, dtype)} ({planner.format_bytes(numel * itemsize(dtype))})"


def _describe_elements(numel: int, dtype: str) -> str:
    return f"{numel} element{'s' if numel > 1 else ''} of {dtype}"


def add_links(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "links",
        measure_links,
        "measure latencies and bandwidths between the ranks of a job",
        description="Run with torchrun on all ranks of an otherwise idle job. Times exchanges "
        "and recursive halving between the ranks of a domain, of a node and of several nodes, and "
        "writes latencies and bandwidths for --links of meshplan plan and meshplan simulate "
        "--cost.",
    )
    option = parser.add_argument
    option(
        "--backend",
        choices=("gloo", "nccl"),
        help="default: nccl with GPUs, else gloo",
    )
    option(
        "--repeat",
        type=int,
        default=20,
        metavar="N",
        help="repetitions of each exchange (default: 20)",
    )
    add_timeout(parser)
    add_texts(
        parser.add_argument_group("output"),
        ("--output-file", "FILE", "write the links here, not to standard output"),
    )


def measure_links(given: argparse.Namespace) -> int:
    # Only rank 0 reports an invalid command: the error is the same on all ranks.
    rank = os.environ.get("RANK") or "0"
    try:
        require_launcher(
            os.environ,
            "meshplan links",
            "links --output-file links.json",
        )
        check_timeout(given.timeout)
        if not 1 <= given.repeat <= 10_000:
            raise PolicyError(f"--repeat: use an integer from 1 to 10000, got {given.repeat}")
        if given.output_file is not None and rank == "0":
            try_to_open(given.output_file)
        ranks = import_with_torch("meshplan.cli._ranks", "meshplan links")
        text, about = ranks.measure(given.backend, given.repeat, given.timeout)
        if rank == "0":
            write(given.output_file, text + "\n")
            complain(about + "\n")
        return 0
    except PolicyError as error:
        return refuse(error) if rank == "0" else 2
    except (MeshplanError, RuntimeError, ValueError, OSError) as error:
        complain(f"meshplan: rank {rank[:10]}: {' '.join(str(error).split())[:1000]}\n")
    return 2
