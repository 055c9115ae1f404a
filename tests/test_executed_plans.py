"""Plans as torch's executor runs them: slices first, shards in orders of the user's own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import (
    redistribute_local_tensor,
    use_min_cost_redistribution_plan,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._debug_mode import DebugMode

import meshplan
from meshplan.definition import reduce_leaves
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.processes import run_ranks
from tests.traffic import Sent

pytestmark = pytest.mark.processes

P, R, S = Partial(), Replicate(), Shard


def source(mesh: DeviceMesh, shape: tuple[int, ...], *src: Placement) -> tuple[DTensor, Any]:
    """Sums of known leaves over the partial axes; no axis is sharded."""
    sizes = tuple(mesh.mesh.shape)
    where = mesh.get_coordinate() or ()
    partial = [i for i, p in enumerate(src) if p.is_partial()]
    position, count = 0, 1
    for i in partial:
        position, count = position * sizes[i] + where[i], count * sizes[i]
    numel = int(torch.Size(shape).numel())
    leaves = [order_sensitive(numel, rank=r, world_size=count).view(shape) for r in range(count)]
    d = DTensor.from_local(leaves[position], mesh, src, run_check=False)
    return d, reduce_leaves(leaves, "sum", [sizes[i] for i in partial])


def test_sliced_axis_is_sliced_before_the_reduction() -> None:
    """A quarter of the elements is reduced, where torch would reduce them all."""

    def ranks(rank: int) -> list[tuple[str, int]]:
        mesh = init_device_mesh("cpu", (2, 4))
        d, full = source(mesh, (16, 3), P, R)
        with meshplan.installed(strict=True, path="exchange"), Sent() as sent:
            found = d.redistribute(mesh, (R, S(0)))
        where = mesh.get_coordinate() or ()
        assert_bitwise_equal(found.to_local(), full[where[1] * 4 : where[1] * 4 + 4])
        return list(zip(sent.names, sent.elements, strict=True))

    for elements in run_ranks(ranks, 8):
        assert elements == [("all_to_all_single", 12), ("all_gather_into_tensor", 6)]


@pytest.mark.full
def test_plan_replaces_min_cost_plans_of_torch() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2))
        for src, dst in (
            ((P, P, P), (S(0), R, S(0))),
            ((P, R, P), (R, S(1), S(0))),
            ((P, P, R), (S(1), R, S(1))),
        ):
            for shape in ((5, 3), (8, 8), (1, 7)):
                d, _ = source(mesh, shape, *src)
                with meshplan.installed(strict=True):
                    wanted = d.redistribute(mesh, dst).to_local()
                    with use_min_cost_redistribution_plan():
                        found = d.redistribute(mesh, dst).to_local()
                assert_bitwise_equal(found, wanted, f"{src} {dst} {shape}")
                with meshplan.installed(strict=True), use_min_cost_redistribution_plan():
                    assert_bitwise_equal(d.redistribute(mesh, dst).full_tensor(), d.full_tensor())

    run_ranks(ranks, 8)


def test_strided_shards_are_sliced_after_one_reduction() -> None:
    """(strided, plain) on one dim: the second axis splits first, as with FSDP over TP."""

    def ranks(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2))
        where = mesh.get_coordinate() or ()
        d, full = source(mesh, (8, 3), P, P)
        meshplan.clear_report()
        with meshplan.installed(strict=True, path="exchange"):
            found = d.redistribute(mesh, (_StridedShard(0, split_factor=2), S(0))).to_local()
        start = where[1] * 4 + where[0] * 2
        assert_bitwise_equal(found, full[start : start + 2])
        entries = meshplan.report().entries
        assert [e["ran"] for e in entries].count("exchange") == 1
        return [e["why"] for e in entries if e["ran"] == "torch"]

    for reasons in run_ranks(ranks, 4):
        assert reasons == [
            "the shards of a dim are not nested in the default order: torch's moves stay in torch's "
            "order, around the reduction"
        ]


def spec(mesh: DeviceMesh, placements: Any, shape: Any, order: Any = None) -> DTensorSpec:
    meta = TensorMeta(torch.Size(shape), torch.empty(shape).stride(), torch.float32)
    return DTensorSpec(
        mesh,
        placements,
        meta,
        shard_order=order,
        use_strided_shard_as_shard_order=False if order else None,
    )


def test_custom_shard_order_is_respected() -> None:
    """Torch keeps it in the spec; only its moves show it."""
    inner_first = (ShardOrderEntry(tensor_dim=0, mesh_dims=(2, 1)),)

    def check(mesh: DeviceMesh, shape: tuple[int, int]) -> None:
        where = mesh.get_coordinate() or ()
        whole, replica = spec(mesh, (P, P, R), shape), spec(mesh, (R, R, R), shape)
        turned = spec(mesh, (R, S(0), S(0)), shape, inner_first)
        held = spec(mesh, (P, S(0), S(0)), shape, inner_first)
        d, full = source(mesh, shape, P, P, R)
        first = torch.chunk(full, 2)[where[2]]
        parts = torch.chunk(first, 2)
        wanted = parts[where[1]] if where[1] < len(parts) else first[:0]
        with meshplan.installed(strict=True):
            # Towards that order, and, which would be easy to get wrong, out of it.
            found = redistribute_local_tensor(d.to_local(), whole, turned)
            assert_bitwise_equal(found, wanted, f"{shape} to")
            mine = order_sensitive(full.numel(), rank=where[0], world_size=2).view(shape)
            first = torch.chunk(mine, 2)[where[2]]
            parts = torch.chunk(first, 2)
            local = (parts[where[1]] if where[1] < len(parts) else first[:0]).contiguous()
            found = redistribute_local_tensor(local, held, replica)
        leaves = [order_sensitive(full.numel(), rank=r, world_size=2).view(shape) for r in range(2)]
        assert_bitwise_equal(found, reduce_leaves(leaves, "sum", (2,)), f"{shape} from")

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2))
        for shape in ((8, 2), (5, 3), (3, 2)):
            check(mesh, shape)

    run_ranks(ranks, 8)


@pytest.mark.full
def test_placement_trace_of_torch_is_right() -> None:
    def ranks(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2, 2))
        traces = []
        for src, dst in (
            ((P, R, P), (R, S(0), R)),
            ((P, R, P), (S(0), S(1), R)),
            ((P, P, R), (R, S(0), S(0))),
        ):
            d, _ = source(mesh, (8, 4), *src)
            with meshplan.installed(strict=True), DebugMode(record_torchfunction=False) as debug:
                d.redistribute(mesh, dst)
            traces += re.findall(r"trace: (.*)\)", debug.debug_string())
        return traces

    first, *others = run_ranks(ranks, 8)
    assert all(traces == first for traces in others)
    assert_expected_inline(
        "\n".join(first),
        """\
P(sum)RP(sum)->P(sum)S(0)P(sum)-->RS(0)R
P(sum)RP(sum)->P(sum)S(1)P(sum)-->RS(1)R->S(0)S(1)R
P(sum)P(sum)R-->RRR->RS(0)R->RS(0)[0]S(0)[1]""",
    )
