"""Predicted figures of docs/cost.md, computed by the planner when the site is built."""

from __future__ import annotations

import io
from dataclasses import dataclass

from meshplan import Layout
from meshplan.planner import (
    CALIBRATIONS,
    Prediction,
    Problem,
    format_time,
    predict_backend,
    predict_plan,
)
from meshplan.topology import Topology

NODE = 8
H100 = CALIBRATIONS["h100"]
GPUS = (8, 16, 64, 256, 512, 1024, 4096)
# Messages in bytes, and their colours.
MESSAGES = {
    "64 KiB": (1 << 16, "#0072B2"),
    "16 MiB": (1 << 24, "#E69F00"),
    "1 GiB": (1 << 30, "#009E73"),
}


def make_problem(layout: Layout, src: list[str], size: int) -> Problem:
    """An all-reduce of float32 on nodes of 8 GPUs that NVLink joins."""
    ranks = layout.world_size
    topology = Topology.uniform(ranks, node_size=NODE, domain_size=NODE, links=H100.links)
    return Problem.of(
        layout,
        src,
        ["R"] * len(src),
        dtype="float32",
        shape=(size // 4,),
        topology=topology,
        path="auto",
    )


def predict(problem: Problem, steps: list[list[str]]) -> tuple[Prediction, Prediction]:
    """NCCL's rings or trees, and meshplan's plan."""
    return predict_backend(problem, steps, "best", H100), predict_plan(problem)


def compare(native: Prediction, ours: Prediction) -> tuple[float, float]:
    """The lowest and the highest time of meshplan, divided by NCCL's."""
    (least, most), (low, high) = H100.widen(native.cost), H100.widen(ours.cost)
    return low / most, high / least


def predict_slowdown(gpus: int, size: int) -> tuple[float, float]:
    """Of one all-reduce over all GPUs, by one ring or one tree."""
    problem = make_problem(Layout.of(ddp=gpus // NODE, fsdp=NODE), ["P", "P"], size)
    return compare(*predict(problem, [["ddp", "fsdp"]]))


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
            low, high = zip(*(predict_slowdown(gpus, size) for gpus in GPUS), strict=True)
            axis.fill_between(GPUS, low, high, color=colour, alpha=0.3, label=name)
        axis.axhline(1, color=ink, linewidth=1, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(GPUS, [f"{one:,}" for one in GPUS])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_xlabel("GPUs, 8 per node")
        axis.set_ylabel("time, NCCL's ring or tree = 1")
        axis.set_title("One all-reduce of float32 over all GPUs, predicted", fontsize=12)
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(frameon=False, loc="outside right upper")
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return text.getvalue()


@dataclass(frozen=True)
class Workload:
    """A row of the table, with the steps of NCCL."""

    name: str
    gpus: int
    problem: Problem
    steps: list[list[str]]

    def format_row(self) -> str:
        """The row in Markdown."""
        both = predict(self.problem, self.steps)
        times = (" to ".join(format_time(round(t)) for t in H100.widen(o.cost)) for o in both)
        low, high = compare(*both)
        return (
            f"| {self.name} | {self.gpus:,} | {' | '.join(times)} "
            f"| {low:.1f} to {high:.1f} times | {' then '.join(both[1].how)} |"
        )


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
                problem,
                [["ddp"]],
            )
        )
    decode = make_problem(Layout.of(tp=8), ["P"], 64 * kib)
    found.append(Workload("TP decode: 64 KiB of activations", 8, decode, [["tp"]]))
    for gpus in (64, 512, 4096):
        norm = make_problem(Layout.of(ddp=gpus // NODE, fsdp=NODE), ["P", "P"], 4)
        found.append(
            Workload(
                "clip norm: one number, `meshplan.install()`",
                gpus,
                norm,
                [["ddp"], ["fsdp"]],
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
