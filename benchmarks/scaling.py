"""What all-reduces would cost on 8 to 100,000 GPUs, and how far such predictions are off here.

The model is that of `meshplan simulate --cost`: latencies and bandwidths of links, data-sheet
figures for the GPUs. Compared are meshplan's plan, the same without recursive halving, torch's
all-reduces axis by axis (a ring or a tree each, whichever is faster), and one ring and one tree
over all ranks. A clock for the messages that the plan's code sends shows the same times as the
formula.

How far it is off is seen where there is something to measure: jobs of CPU processes over gloo. They
measure their links as `meshplan links` does, predict from these alone, and then run: gloo's ring,
gloo's rings axis by axis, and meshplan's plan. Links between hosts are network namespaces, at a
rate that the kernel limits, where namespaces are allowed.

    python -m benchmarks.scaling
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import meshplan
from benchmarks.record import Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import in_blocks, on_ranks, slowest
from meshplan import Layout
from meshplan.cli._links_run import time_exchanges
from meshplan.cli._simulate import CLUSTERS, NODE, NUMELS
from meshplan.flatten import discover
from meshplan.planner import Prediction, Problem, plan, predict_backend, predict_plan
from meshplan.topology import Topology
from meshplan.topology._links import fit_links
from tests.clock import clock

AXES = ("ddp", "fsdp")
# Hosts, ranks on each, and megabits a second between hosts.
JOBS = ((1, 2, 0), (1, 4, 0), (2, 2, 1000), (2, 3, 250))
SMOKE_JOBS = ((1, 2, 0),)
# Of the ratios to one ring and one tree, whichever is faster; predicted.
BARS: dict[tuple[int, int], dict[str, float]] = {
    (1 << 14, 512): {"one tree": 3.5},
    (1 << 14, 4096): {"one tree": 3.5},
    (1 << 14, 100_000): {"one tree": 4.5},
    (1 << 22, 512): {"one tree": 2.5},
    (1 << 22, 4096): {"one tree": 2.5},
    (1 << 22, 100_000): {"one tree": 3.2},
    **{(1 << 28, ranks): {"one ring": 1.0, "one tree": 1.1} for ranks in (64, 512, 4096)},
}
# GPUs whose messages are clocked too.
CLOCKED = (64, 512, 4096)
# Elements, and calls that count.
SIZES = ((1 << 14, 21), (1 << 18, 21), (1 << 22, 6))
SMOKE_SIZES = ((1 << 10, 2),)
SAYS = "benchmark: "


def predictions(smoke: bool) -> Iterator[Case]:
    """Of GPUs, larger and larger clusters of them."""
    for numel in NUMELS[:1] if smoke else NUMELS:
        for ranks in CLUSTERS[:2] if smoke else CLUSTERS:
            problem = problem_of(
                Layout.of(ddp=ranks // NODE, fsdp=NODE),
                numel,
                Topology.uniform(ranks, node_size=NODE, domain_size=NODE),
            )
            found = {
                "meshplan": predict_plan(replace(problem, path="auto")),
                "exchange only": predict_plan(problem),
                "axis by axis": predict_backend(problem, [[axis] for axis in AXES]),
                "one ring": predict_backend(problem, [AXES], "ring"),
                "one tree": predict_backend(problem, [AXES], "tree"),
            }
            limits = BARS.get((numel, ranks), {})
            for what, unit, value in (
                ("time", "us", lambda one: one.cost.nanoseconds / 1e3),
                ("sent over the network by a rank", "MB", lambda one: one.cost.network / 1e6),
            ):
                yield Case(
                    name=f"{what}, all-reduce of {numel * 4 >> 10} KiB on {ranks} GPUs, predicted",
                    unit=unit,
                    runs={name: Figures.of([value(one)]) for name, one in found.items()},
                    peers=("axis by axis", "one ring", "one tree") if unit == "us" else (),
                    ranks=ranks,
                    parameters={
                        "message": f"{numel * 4 >> 10} KiB, predicted",
                        "world_size": ranks,
                    },
                    bars=tuple(
                        at_most(limit, "meshplan", peer)
                        for peer, limit in limits.items()
                        if unit == "us"
                    ),
                )


def clocked(smoke: bool) -> Iterator[Case]:
    """The formula of meshplan's plan, and a clock for the messages that its code sends."""
    for numel in NUMELS[:1] if smoke else NUMELS:
        for ranks in CLOCKED[:1] if smoke else CLOCKED:
            topology = Topology.uniform(ranks, node_size=NODE, domain_size=NODE)
            layout = Layout.of(ddp=ranks // NODE, fsdp=NODE)
            problem = replace(problem_of(layout, numel, topology), path="auto")
            (step,) = plan(problem).reductions
            shown = clock(step, topology, numel, lanes=step.inner > 1)
            formula = predict_plan(problem).cost.nanoseconds / 1e3
            yield Case(
                name=f"{step.describe_path()}, {numel * 4 >> 10} KiB on {ranks} GPUs",
                unit="us",
                runs={
                    "predicted": Figures.of([formula]),
                    "clocked": Figures.of([shown.seconds * 1e6]),
                },
                peers=("clocked",),
                ranks=ranks,
                parameters={"message": f"{numel * 4 >> 10} KiB, clocked", "world_size": ranks},
            )


def problem_of(layout: Layout, numel: int, topology: Topology) -> Problem:
    """An all-reduce over all axes."""
    return Problem.of(
        layout, ["P", "P"], ["R", "R"], dtype=torch.float32, shape=(numel,), topology=topology
    )


def axis_by_axis(tensor: torch.Tensor, groups: list[dist.ProcessGroup]) -> None:
    """The backend's all-reduces, one after the other."""
    for group in groups:
        dist.all_reduce(tensor, group=group)


def measure(hosts: int, sizes: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    """Links, predictions and what was predicted, on every rank of a job."""
    ranks = dist.get_world_size()
    cluster = discover(c10d._get_default_store(), dist.get_rank(), ranks, 60.0)
    found = time_exchanges(cluster.topology, torch.device("cpu"), 5, 60.0)
    links, fitted = fit_links(found)
    topology = replace(cluster.topology, links=links)
    shape = (hosts, ranks // hosts) if hosts > 1 or ranks < 4 else (2, ranks // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    layout = Layout.from_mesh(mesh)
    wide = [[axis] for axis, size in zip(AXES, shape, strict=True) if size > 1]
    where = f"{ranks} ranks on {hosts} host{'s' * (hosts > 1)}"
    errors = []
    for numel, calls in sizes:
        tensor = torch.zeros(numel)
        problem = problem_of(layout, numel, topology)
        runs: dict[str, tuple[Prediction, Callable[[], object]]] = {
            "gloo's ring": (
                predict_backend(problem, [AXES], "ring"),
                partial(dist.all_reduce, tensor),
            ),
        }
        if len(wide) > 1:
            runs["gloo's rings, axis by axis"] = (
                predict_backend(problem, wide, "ring"),
                partial(axis_by_axis, tensor, [mesh.get_group(axes[0]) for axes in wide]),
            )
        with meshplan.installed(path="exchange", topology=topology):
            summand = DTensor.from_local(tensor, mesh, (Partial(), Partial()), run_check=False)
            runs["meshplan's plan"] = (
                predict_plan(problem),
                summand.full_tensor,
            )
            samples = slowest(in_blocks({n: call for n, (_, call) in runs.items()}, calls))
        for name, (prediction, _) in runs.items():
            told = prediction.cost.nanoseconds / 1e6
            seen = samples[name]
            errors.append(abs(told / (seen.median * 1e3) - 1))
            yield Case(
                name=f"{name} ({', '.join(prediction.how)}), {numel * 4 >> 10} KiB, {where}",
                unit="ms",
                runs={
                    "predicted": Figures.of([told]),
                    "measured": Figures(seen.median * 1e3, seen.p95 * 1e3, seen.samples),
                },
                peers=("measured",),
                ranks=ranks,
                parameters={"hosts": hosts, "way": name, "message": f"{numel * 4 >> 10} KiB"},
            )
        meshplan.shutdown()
    yield Case(
        name=f"error of predictions, {where}",
        unit="%",
        runs={
            "median error": Figures.of([100 * median(errors)]),
            "largest error": Figures.of([100 * max(errors)]),
            "of the fit to exchanges": Figures.of([100 * fitted]),
        },
        ranks=ranks,
        parameters={"hosts": hosts, "links": str(links)},
        bars=(at_most(50.0, "median error"),),
    )


def on_hosts(file: str, hosts: int, each: int, rate: int, words: Sequence[str]) -> Iterator[Case]:
    """Cases of the script ``file``, on hosts between which there are so many megabits a second."""
    from tests.multinode.cluster import cluster
    from tests.multinode.launch import job

    script = str(Path(file).resolve().with_suffix(""))
    with cluster(hosts) as found:
        for host in found.hosts:
            if host.namespaces is not None:
                limit = ("rate", f"{rate}mbit", "burst", "64kb", "latency", "400ms")
                host.namespaces.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        with job(found, script, [each] * hosts, arguments=list(words)) as started:
            codes = started.wait(900)
            if any(codes):
                raise RuntimeError(f"exit codes {codes}\n{started.tails()}")
            for line in started.output(0).splitlines():
                if line.startswith(SAYS):
                    yield Case.from_json(json.loads(line.removeprefix(SAYS)))


def cases(smoke: bool) -> Iterator[Case]:
    """What is predicted for GPUs, and what was predicted and measured here."""
    yield from predictions(smoke)
    yield from clocked(smoke)
    for hosts, each, rate in SMOKE_JOBS if smoke else JOBS:
        if hosts > 1:
            yield from on_hosts(__file__, hosts, each, rate, ["--hosts", str(hosts)])
        elif smoke:
            yield from on_ranks(each, measure, hosts, SMOKE_SIZES)
        else:
            yield from on_ranks(each, measure, hosts, SIZES)


def total(smoke: bool) -> int:
    """Two cases for each prediction; one for each clock; the ways and the error of each job."""
    if smoke:
        return 2 * 2 + 1 + 2 + 1
    ways = sum(2 if hosts * each < 4 else 3 for hosts, each, _ in JOBS)
    return len(NUMELS) * (2 * len(CLUSTERS) + len(CLOCKED)) + ways * len(SIZES) + len(JOBS)


SUITE = Suite(__doc__ or "", cases, total)


def main() -> None:
    """The whole suite; or, under torchrun, the ranks of one job."""
    if "RANK" not in os.environ:
        run(SUITE)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in measure(asked.hosts, SIZES):
        if dist.get_rank() == 0:
            sys.stdout.write(SAYS + json.dumps(case.to_json()) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
