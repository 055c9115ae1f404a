"""Meshes that are equal and not the same, and many meshes that live for a short time."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _redistribute
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from meshplan.dtensor import _routes
from meshplan.dtensor._routes import mesh_entry
from meshplan.flatten import registry
from tests.faults.jobs import count_resources, end, right_bits, run_to_end

pytestmark = pytest.mark.processes

# What meshplan may hold more after many meshes than after few: with each that torch keeps alive,
# its layout and its plans.
KIB_PER_MESH = 24
SHAPES = ((4,), (2, 2), (4, 1), (1, 2, 2), (2, 1, 2))
KINDS = ("descriptors", "threads", "python threads", "mappings", "groups")


def test_equal_meshes_share_one_entry() -> None:
    """Whichever comes first on a rank, and when the first is gone."""

    def ranks(rank: int) -> list[int]:
        meshes = [DeviceMesh("cpu", [[2, 0], [3, 1]]) for _ in range(2)]
        assert meshes[0] == meshes[1]
        assert meshes[0] is not meshes[1]
        counts = []
        for path in ("auto", "exchange"):
            with meshplan.installed(path=path, timeout=60.0):
                # In one order on all ranks: their process groups differ.
                for mesh in meshes:
                    right_bits(mesh)
                counts.append(len(registry()._table))
        assert mesh_entry(meshes[0]) is mesh_entry(meshes[1])
        entry = mesh_entry(meshes[0])
        del meshes[0], mesh
        gc.collect()
        third = DeviceMesh("cpu", [[2, 0], [3, 1]])
        assert mesh_entry(meshes[0]) is mesh_entry(third) is entry
        for path in ("auto", "exchange"):
            with meshplan.installed(path=path, timeout=60.0):
                right_bits(third)
                right_bits(meshes[0])
        counts.append(len(registry()._table))
        return [*counts, meshplan.shutdown()]

    values = run_to_end(ranks, 4)
    # One group serves both paths and all meshes that are equal.
    assert values == [[1, 1, 1, 1]] * 4


def test_mesh_entry_lives_as_long_as_any_equal_mesh() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        before = len(_routes._EQUAL)
        first, second = (DeviceMesh("cpu", [1, 0, 3, 2]) for _ in range(2))
        mesh_entry(first).by_coordinate.add(0)
        assert mesh_entry(second) is mesh_entry(first)
        del first
        gc.collect()
        # Or shards that lie by coordinate were taken for shards of torch's.
        assert mesh_entry(DeviceMesh("cpu", [1, 0, 3, 2])).by_coordinate == {0}
        del second
        gc.collect()
        assert len(_routes._EQUAL) == before
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.dist)])
def test_short_lived_meshes_leave_nothing_behind(count: int) -> None:
    """Over process groups that exist: those of ``init_device_mesh`` are torch's, and stay."""

    def ranks(rank: int) -> tuple[Counter[str], Counter[str], int, int]:
        axes = {
            shape: [init_device_mesh("cpu", shape).get_group(i) for i in range(len(shape))]
            for shape in SHAPES
        }
        holds = {}
        with meshplan.installed(timeout=60.0):
            for number in range(count + 1):
                shape = SHAPES[number % len(SHAPES)]
                # By its name a new mesh to torch, every time.
                mesh = DeviceMesh.from_group(
                    axes[shape] if len(shape) > 1 else axes[shape][0],
                    "cpu",
                    mesh=torch.arange(4).view(shape),
                    mesh_dim_names=tuple(f"{axis}{number}" for axis in "abc"[: len(shape)]),
                )
                right_bits(mesh, numel=100)
                del mesh
                if number in (count // 5, count):
                    gc.collect()
                    holds[number] = count_resources()
                    if not tracemalloc.is_tracing():
                        tracemalloc.start()
            gc.collect()
            ours = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(True, "*/meshplan/*")]
            )
        tracemalloc.stop()
        size = sum(stat.size for stat in ours.statistics("filename"))
        # Torch remembers placements, and with them meshes; without that nothing is left of ours.
        for remembered in vars(_redistribute).values():
            getattr(remembered, "cache_clear", int)()
        end()
        return holds[count // 5], holds[count], size, len(registry()._table._shortcuts)

    for few, many, size, layouts in run_to_end(ranks, 4):
        assert all(many[kind] <= few[kind] + 3 for kind in KINDS), (few, many)
        assert size < KIB_PER_MESH * 1024 * (count - count // 5)
        assert layouts == 0
