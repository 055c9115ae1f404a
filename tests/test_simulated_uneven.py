"""Shards of unequal sizes where one process simulates all ranks: plain torch's results."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from meshplan.testing import assert_bitwise_equal
from tests.marks import full

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
Placements = tuple[Placement, ...]


def simulated(sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    world = torch.Size(sizes).numel()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with LocalTensorMode(world), warnings.catch_warnings():
            # Of torch's own, about sequential reductions.
            warnings.simplefilter("ignore")
            yield init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b", "c")[: len(sizes)])
    finally:
        dist.destroy_process_group()


@pytest.fixture
def square() -> Iterator[DeviceMesh]:
    yield from simulated((2, 2))


def summands(mesh: DeviceMesh, src: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Of each rank its shard of numbers that are its own, and whose sums are exact."""
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(tuple(shape))
    cut = [R if p.is_partial() else p for p in src]
    ranks = {}
    for rank in range(mesh.size()):
        where = [int(i) for i in (mesh.mesh == rank).nonzero()[0]]
        local = whole * (rank + 1) - 3
        for axis, placement in enumerate(cut):
            if isinstance(placement, Shard):
                parts = placement._split_tensor(
                    local, mesh.size(axis), with_padding=False, contiguous=True
                )[0]
                local = parts[where[axis]]
        ranks[rank] = local
    given = LocalTensor(ranks)  # type: ignore[no-untyped-call]
    return DTensor.from_local(
        given, mesh, list(src), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def moved(d: DTensor, dst: Sequence[Placement]) -> dict[int, Tensor] | str:
    """The ranks' tensors, or the error of what cannot be done."""
    try:
        found = d.redistribute(d.device_mesh, list(dst)).to_local()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    local: Tensor = found.wait() if hasattr(found, "wait") else found
    ranks: dict[int, Tensor] = local._local_tensors  # type: ignore[attr-defined]
    return ranks


def compare(
    mesh: DeviceMesh,
    cases: Iterable[tuple[Placements, Placements, tuple[int, ...]]],
    **options: object,
) -> int:
    """How many of these redistributions plain torch can do; meshplan does them the same."""
    done = 0
    for src, dst, shape in cases:
        d = summands(mesh, src, shape)
        plain = moved(d, dst)
        with meshplan.installed(**options):
            ours = moved(d, dst)
        if isinstance(plain, str):
            continue
        assert not isinstance(ours, str), (src, dst, shape, ours)
        done += 1
        assert ours.keys() == plain.keys()
        for rank, local in ours.items():
            assert_bitwise_equal(local, plain[rank])
    return done


@pytest.mark.parametrize(
    "options",
    [
        {"path": "exchange", "strict": True, "audit": 1},
        {"path": "reference"},
        full({"policy": "fast"}),
        full({"path": "native"}),
    ],
)
def test_uneven_shards_are_exact_on_other_paths(
    square: DeviceMesh, options: dict[str, object]
) -> None:
    sources = ((P, R), (R, P))
    targets = itertools.product([R, S0, S1], repeat=2)
    cases = [(s, d, (5, 3)) for d in list(targets)[1::2] for s in sources]
    assert compare(square, cases, **options) == len(cases)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex64])
def test_uneven_shards_are_exact_in_other_dtypes(square: DeviceMesh, dtype: torch.dtype) -> None:
    ranks = {r: torch.arange(6 if r % 2 else 9).to(dtype) * (r + 1) for r in range(4)}
    given = LocalTensor(ranks)  # type: ignore[no-untyped-call]
    d = DTensor.from_local(given, square, [P, S0], run_check=False, shape=(15,), stride=(1,))
    with meshplan.installed():
        ours = moved(d, [R, S0])
    assert not isinstance(ours, str), ours
    for rank, local in ours.items():
        assert local.dtype == dtype
        assert torch.equal(local, ranks[rank % 2] + ranks[rank % 2 + 2])
