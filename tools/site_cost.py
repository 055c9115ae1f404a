"""Predicted figures of docs/cost.md, computed by the planner when the site is built."""

from __future__ import annotations

import io
from dataclasses import dataclass

from meshplan import Layout
from meshplan.planner import Prediction, Problem, predict_backend, predict_plan
from meshplan.topology import Topology

NODE = 8
GPUS = (8, 16, 64, 256, 512, 1024, 4096)
# Messages in bytes, and their colours: those of benchmarks/picture.py, in its order.
MESSAGES = {
    "64 KiB": (1 << 16, "#0072B2"),
    "16 MiB": (1 << 24, "#E69F00"),
    "1 GiB": (1 << 30, "#009E73"),
}


def make_problem(layout: Layout, src: list[str], size: int) -> Problem:
    """An all-reduce of float32 on nodes of 8 GPUs that NVLink joins."""
    ranks = layout.world_size
    topology = Topology.uniform(ranks, node_size=NODE, domain_size=NODE)
    return Problem.of(
        layout,
        src,
        ["R"] * len(src),
        dtype="float32",
        shape=(size // 4,),
        topology=topology,
        path="auto",
    )


def predict_slowdown(gpus: int, size: int) -> float:
    """The time of meshplan's plan over all GPUs, divided by that of one ring or one tree."""
    problem = make_problem(Layout.of(ddp=gpus // NODE, fsdp=NODE), ["P", "P"], size)
    native = predict_backend(problem, [["ddp", "fsdp"]])
    return predict_plan(problem).cost.nanoseconds / native.cost.nanoseconds


def draw_chart(*, dark: bool) -> str:
    """The slowdown by GPUs as SVG, without a background."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ink = "#d0d0d8" if dark else "#303038"
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "meshplan",
        "font.family": "sans-serif",
        "font.size": 11,
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink
        ),
    }
    with matplotlib.rc_context(style):
        figure, axis = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
        for name, (size, colour) in MESSAGES.items():
            values = [predict_slowdown(gpus, size) for gpus in GPUS]
            axis.plot(GPUS, values, marker="o", color=colour, label=name, linewidth=2)
        axis.axhline(1, color=ink, linewidth=1, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(GPUS, [f"{one:,}" for one in GPUS])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_xlabel("GPUs, 8 per node")
        axis.set_ylabel("time, NCCL's ring or tree = 1")
        axis.set_title("One all-reduce of float32 over all GPUs, predicted", fontsize=12)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return text.getvalue()


@dataclass(frozen=True)
class Workload:
    """A row of the table: meshplan's reductions of one step, and those without it."""

    name: str
    gpus: int
    ours: Prediction
    native: Prediction
    rounds: int = 1

    def format_row(self) -> str:
        """The row in Markdown."""
        ours, native = self.rounds * self.ours.cost.nanoseconds, self.native.cost.nanoseconds
        return (
            f"| {self.name} | {self.gpus:,} | {format_time(native)} | {format_time(ours)} "
            f"| {ours / native:.1f} times | {' then '.join(self.ours.how)} |"
        )


def format_time(nanoseconds: float) -> str:
    """With two or three digits and a human unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds / 1e3:.3g} µs"


def list_workloads() -> list[Workload]:
    """Reductions of common jobs."""
    found = []
    shard, kib = 8 << 20, 1 << 10
    for gpus in (8, 64, 512, 4096):
        replicas = gpus // NODE if gpus > NODE else 2
        layout = Layout.of(ddp=replicas, fsdp=gpus // replicas)
        problem = make_problem(layout, ["P", "R"], shard)
        found.append(
            Workload(
                f"HSDP: 8 MiB of gradients of a shard over {replicas} replicas",
                gpus,
                predict_plan(problem),
                predict_backend(problem, [["ddp"]]),
            )
        )
    decode = make_problem(Layout.of(tp=8), ["P"], 64 * kib)
    found.append(
        Workload(
            "TP decode: 64 KiB of activations",
            8,
            predict_plan(decode),
            predict_backend(decode, [["tp"]]),
        )
    )
    for gpus in (64, 512, 4096):
        norm = make_problem(Layout.of(ddp=gpus // NODE, fsdp=NODE), ["P", "P"], 4)
        found.append(
            Workload(
                "clip norm: one number, `meshplan.install()`",
                gpus,
                predict_plan(norm),
                predict_backend(norm, [["ddp"], ["fsdp"]]),
            )
        )
    rounds = 4
    elastic = make_problem(Layout.of(ddp=64, fsdp=NODE), ["P", "R"], shard)
    found.append(
        Workload(
            f"elastic: 8 MiB over 64 replicas, in each of {rounds} rounds",
            512,
            predict_plan(elastic),
            predict_backend(elastic, [["ddp"]]),
            rounds,
        )
    )
    return found


def make_table() -> str:
    """The table by workload in Markdown."""
    head = [
        "| reduction | GPUs | NCCL | meshplan | to NCCL | path |",
        "|---|---:|---:|---:|---:|---|",
    ]
    return "\n".join([*head, *(one.format_row() for one in list_workloads())])
