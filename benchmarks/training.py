"""A training step, plain and with meshplan: the same model, batch and optimizer.

Both models live in the same processes and take turns, step by step, so that what else the machine
does meets both. A step is as slow as its slowest rank.

    plain      FSDP2 (HSDP where there are replicas), tensor parallel styles and clipping on gloo
    meshplan   the same under the contract: path auto is shared memory between the ranks of one
               host; path exchange is what ranks on several hosts use

Several hosts are network namespaces with a network between them, or two agents on loopback where
namespaces are not allowed.

    python -m benchmarks.training

Under torchrun, on one or several hosts, the processes that it has started are used.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshplan
from benchmarks.record import Case, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import in_turn, on_hosts, on_ranks, say_cases, slowest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_hsdp_tp as example

BARS = {"auto": 1.0, "exchange": 1.15}
# Hosts, axis sizes (ddp, fsdp, tp), and the path.
JOBS = (
    (1, "1,2,1", "auto"),
    (1, "1,2,1", "exchange"),
    (1, "1,2,2", "auto"),
    (1, "2,2,1", "auto"),
    (2, "1,2,1", "exchange"),
    (2, "1,2,2", "exchange"),
)
SMOKE_JOBS = ((1, "1,2,1", "auto"),)


def options_of(mesh: str, smoke: bool = False) -> argparse.Namespace:
    """What the example's model and batches are made of."""
    width, layers, steps = (32, 1, 2) if smoke else (256, 4, 25)
    sizes = tuple(int(size) for size in mesh.split(","))
    return argparse.Namespace(
        mesh=mesh, sizes=sizes, width=width, layers=layers, context=64, batch=1, steps=steps
    )


def stepper(way: str, mesh: DeviceMesh, options: argparse.Namespace) -> Callable[[], None]:
    """A function that makes one training step."""
    model = example.build(way, mesh, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps = iter(range(1_000_000))

    def step() -> None:
        model(example.batch(next(steps), mesh, options)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(options: argparse.Namespace, path: Any, hosts: int) -> Iterator[Case]:
    """On every rank of a job."""
    # Torch warns of the very thing that this is about, on every rank.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mesh = init_device_mesh("cpu", options.sizes, mesh_dim_names=example.AXES)
    plain = stepper("plain", mesh, options)
    groups = ("meshplan", meshplan.BackendOptions(path=path))
    ours = init_device_mesh(
        "cpu",
        options.sizes,
        mesh_dim_names=example.AXES,
        backend_override=dict.fromkeys(example.AXES, groups),
    )
    planned = stepper("plain", ours, options)

    def step() -> None:
        with meshplan.installed(path=path):
            planned()

    samples = in_turn(
        {"plain": plain, "meshplan": step},
        options.steps,
        scale=1e3,
        before=dist.barrier,
        warm_up=min(5, options.steps),
    )
    model = example.ByteTransformer(options.width, options.layers)
    runs = slowest(samples)
    meshplan.shutdown()
    yield Case(
        name=f"a step on mesh (ddp, fsdp, tp) = ({options.mesh}), {hosts} "
        f"host{'s' * (hosts > 1)}, path {path}",
        unit="ms",
        runs=runs,
        peers=("plain",),
        ranks=dist.get_world_size(),
        parameters={
            "world_size": dist.get_world_size(),
            "hosts": hosts,
            "path": path,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
        bars=(at_most(BARS[path], "meshplan", "plain"),),
    )


def on_hosts_of_mesh(file: str, hosts: int, mesh: str, *words: str) -> Iterator[Case]:
    """The cases of a script, with as equal numbers of ranks on each host as can be."""
    ranks = math.prod(int(size) for size in mesh.split(","))
    each = [ranks // hosts + (host < ranks % hosts) for host in range(hosts)]
    return on_hosts(file, each, ["--mesh", mesh, "--hosts", str(hosts), *words])


def cases(smoke: bool) -> Iterator[Case]:
    """One job after the other."""
    for hosts, mesh, path in SMOKE_JOBS if smoke else JOBS:
        if hosts > 1:
            yield from on_hosts_of_mesh(__file__, hosts, mesh, "--path", path)
        else:
            options = options_of(mesh, smoke)
            yield from on_ranks(math.prod(options.sizes), measure, options, path, 1)


SUITE = Suite(__doc__ or "", cases, lambda smoke: len(SMOKE_JOBS if smoke else JOBS))


def main() -> None:
    """The whole suite; or, under torchrun, the ranks of one job."""
    if "RANK" not in os.environ:
        run(SUITE)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="1,2,1", help="axis sizes: ddp,fsdp,tp")
    parser.add_argument("--path", choices=tuple(BARS), default="auto")
    parser.add_argument("--hosts", type=int, default=1)
    asked = parser.parse_args()
    say_cases(measure(options_of(asked.mesh), asked.path, asked.hosts))


if __name__ == "__main__":
    main()
