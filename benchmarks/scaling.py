"""Error of the predictions: all-reduces of CPU processes over gloo.

Jobs measure their links as `meshplan links` does, predict from these alone as `meshplan simulate
--cost --links` does, and then run: gloo's ring, gloo's rings axis by axis, and meshplan's plan.
Links between hosts are network namespaces, at a rate that the kernel limits, where namespaces are
allowed. Predictions for GPUs are compared with published times in tests/test_calibration.py.

    python -m benchmarks.scaling
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import meshplan
from benchmarks.record import Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import in_blocks, on_hosts, on_ranks, say_cases, slowest
from meshplan import Layout
from meshplan.cli._ranks import time_exchanges
from meshplan.flatten import discover
from meshplan.planner import Prediction, Problem, predict_backend, predict_plan
from meshplan.topology import Topology
from meshplan.topology._links import fit_links

AXES = ("ddp", "fsdp")
# Hosts, ranks on each, and megabits a second between hosts.
JOBS = ((1, 2, 0), (1, 4, 0), (2, 2, 1000), (2, 3, 250))
SMOKE_JOBS = ((1, 2, 0),)
# Elements, and calls that count.
SIZES = ((1 << 14, 21), (1 << 18, 21), (1 << 22, 6))
SMOKE_SIZES = ((1 << 10, 2),)


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
    topology = discover(c10d._get_default_store(), dist.get_rank(), ranks, 60.0).topology
    found = time_exchanges(topology, torch.device("cpu"), 5, 60.0)
    # A busy machine, on which the smoke run must pass, may time no bandwidth.
    links, fitted = fit_links(found) if sizes == SIZES else (topology.links, 0.0)
    topology = replace(topology, links=links)
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


def cases(smoke: bool) -> Iterator[Case]:
    """What was predicted and measured, in each job."""
    for hosts, each, rate in SMOKE_JOBS if smoke else JOBS:
        if hosts > 1:
            yield from on_hosts(__file__, [each] * hosts, [f"--hosts={hosts}"], rate)
        else:
            yield from on_ranks(each, measure, hosts, SMOKE_SIZES if smoke else SIZES)


def total(smoke: bool) -> int:
    """The ways and the error of each job."""
    if smoke:
        return 3
    ways = sum(2 if hosts * each < 4 else 3 for hosts, each, _ in JOBS)
    return ways * len(SIZES) + len(JOBS)


SUITE = Suite(__doc__ or "", cases, total)


def main() -> None:
    """The whole suite; or, under torchrun, the ranks of one job."""
    if "RANK" not in os.environ:
        run(SUITE)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, required=True)
    say_cases(measure(parser.parse_args().hosts, SIZES))


if __name__ == "__main__":
    main()
