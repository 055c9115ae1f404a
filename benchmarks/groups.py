"""The cost of a process group: agreed on and created once, then looked up.

The first reduction over axes is a vote of its members and, where torch has no such group yet, the
creation of one. Beside it, in the same job, torch's ``new_group`` and what ``DeviceMesh._flatten``
does for the same ranks. All on one machine over gloo, with a store that is a file; connections are
made when a group is created, so that all take part in the time.

    python -m benchmarks.groups
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshplan
from benchmarks.record import Case
from benchmarks.script import Suite, run
from benchmarks.timing import in_blocks, on_ranks, seconds, slowest
from meshplan.flatten import registry
from meshplan.layout import Layout
from meshplan.record import Record

WORLD_SIZES = (2, 4, 8)


def used(group: dist.ProcessGroup) -> None:
    """A group is there when it works."""
    dist.all_reduce(torch.ones(1), group=group)


def measure(rounds: int) -> Iterator[Case]:
    """On every rank of a job."""
    ranks = dist.get_world_size()
    # Turned, so that torch has no group in this order.
    order = [*range(1, ranks), 0]
    numbers = iter(range(100 * rounds))

    def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
        names = tuple(f"{axis}{next(numbers)}" for axis in ("a", "b")[: len(sizes)])
        return DeviceMesh("cpu", torch.tensor(order).view(sizes), mesh_dim_names=names)

    def planned() -> None:
        # What was created by the round before has been shut down.
        mesh = mesh_of((ranks,))
        layout = Layout.from_mesh(mesh)
        samples["meshplan, created"].append(
            seconds(
                lambda: used(
                    registry().get(mesh, layout, (0,), token=Record.of(use="benchmark")).pg
                )
            )
            * 1e3
        )
        meshplan.shutdown()

    def torchs() -> None:
        samples["torch new_group"].append(
            seconds(lambda: used(dist.new_group(order, sort_ranks=False))) * 1e3
        )

    def flattened() -> None:
        mesh = mesh_of((2, ranks // 2))
        samples["torch _flatten"].append(
            seconds(lambda: used(mesh._flatten(f"flat{next(numbers)}").get_group())) * 1e3
        )

    ways: dict[str, Callable[[], None]] = {
        "meshplan, created": planned,
        "torch new_group": torchs,
        "torch _flatten": flattened,
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for way in ways.values():
            dist.barrier()
            way()
    yield Case(
        name=f"a group of {ranks} ranks, created and used once",
        unit="ms",
        runs=slowest(samples),
        peers=("torch new_group", "torch _flatten"),
        ranks=ranks,
        parameters={"world_size": ranks},
    )
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    layout = Layout.from_mesh(mesh)
    registry().get(mesh, layout, (0,), token=Record.of(use="benchmark"))
    again = {
        "meshplan, found again": lambda: registry().get(
            mesh, layout, (0,), token=Record.of(use="benchmark")
        ),
        "torch get_group": mesh.get_group,
    }
    yield Case(
        name=f"a group of {ranks} ranks, found again",
        unit="us",
        runs=slowest(in_blocks(again, 10 * rounds, scale=1e6)),
        peers=("torch get_group",),
        ranks=ranks,
        parameters={"world_size": ranks},
    )


def cases(smoke: bool) -> Iterator[Case]:
    """Jobs of several sizes."""
    for world_size in WORLD_SIZES[:1] if smoke else WORLD_SIZES:
        yield from on_ranks(world_size, measure, 2 if smoke else 15)


SUITE = Suite(__doc__ or "", cases, lambda smoke: 2 * (1 if smoke else len(WORLD_SIZES)))

if __name__ == "__main__":
    run(SUITE)
