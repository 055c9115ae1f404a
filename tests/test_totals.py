"""Norms over meshes of different ranks: every element counts once, and all ranks raise one error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshplan
from meshplan import clip_grad_norm_, exact_norm, verify_replicas
from meshplan.errors import MeshplanError
from meshplan.testing import bits
from tests.marks import full
from tests.processes import run_ranks
from tests.refusals import refusal

pytestmark = pytest.mark.processes

PLACEMENTS = (Shard(0), Shard(1), Replicate())


def values(*key: int) -> Tensor:
    """Numbers whose squares have sums that depend on the order of float additions."""
    draw = torch.Generator().manual_seed(hash(key) % (1 << 31))
    exponents = torch.randint(-30, 30, (6, 5), generator=draw)
    return torch.randn(6, 5, generator=draw) * 2.0**exponents


def split(draw: random.Random, count: int, parts: int) -> list[int]:
    """Sizes of ``parts`` axes with ``count`` ranks."""
    sizes = []
    for _ in range(parts - 1):
        sizes.append(draw.choice([size for size in range(1, count + 1) if count % size == 0]))
        count //= sizes[-1]
    return [*sizes, count]


class RandomJob:
    """Stages of a pipeline, each with two meshes of the same ranks, in any order of ranks.
    ``whole`` has each tensor of all ranks once, ``parameters`` those of this rank, with gradients.
    """

    def __init__(self, world_size: int, seed: int) -> None:
        # Every rank draws the same job.
        self.seed, self.draw = seed, random.Random(1000 * world_size + seed)
        order = torch.tensor(self.draw.sample(range(world_size), world_size))
        self.stages = self.draw.choice([one for one in (1, 1, 2, 3) if world_size % one == 0])

        def mesh(*names: str) -> DeviceMesh:
            sizes = [self.stages, *split(self.draw, world_size // self.stages, 3)]
            return DeviceMesh("cpu", order.view(sizes), mesh_dim_names=("pp", *names))

        self.sparse, self.dense = mesh("rep", "efsdp", "ep"), mesh("dp", "fsdp", "tp")
        self.stage_mesh = self.dense["dp", "fsdp", "tp"]
        self.whole: list[Tensor] = []
        self.parameters: list[Tensor] = []

    def add(self, kind: int, mesh: DeviceMesh | None, distinct: bool) -> None:
        """A parameter, of which each stage has its own, and each expert if it is ``distinct``."""
        experts = self.sparse["ep"].size() if distinct else 1
        # An expert without tokens has no gradient.
        absent = self.draw.choice([None, None, self.draw.randrange(experts)]) if distinct else None
        self.whole += [
            values(self.seed, kind, stage, expert)
            for stage in range(self.stages)
            for expert in range(experts)
            if expert != absent
        ]
        expert = self.sparse.get_local_rank("ep") if distinct else 0
        gradient = values(self.seed, kind, self.sparse.get_local_rank("pp"), expert)
        if mesh is not None:
            placements = [self.draw.choice(PLACEMENTS) for _ in range(mesh.ndim)]
            gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        parameter = nn.Parameter(torch.zeros_like(gradient))
        if expert != absent:
            parameter.grad = gradient
        # Listed twice: tied.
        self.parameters += [parameter] * self.draw.choice([1, 1, 1, 2])

    def freeze(self, mesh: DeviceMesh) -> None:
        """A parameter without a gradient, which has a mesh."""
        frozen = distribute_tensor(torch.zeros(6, 5), mesh, [Replicate()] * mesh.ndim)
        self.parameters.append(frozen)

    def norm(self) -> Tensor:
        """The norm by a declaration that is true, in any of its forms."""
        sparse = self.sparse
        axes: list[Any] = []
        if self.experts:
            axis = self.draw.choice(
                ["ep", (sparse, "ep"), (sparse, 3), sparse["ep"], sparse.get_group("ep")]
            )
            axes.append(axis)
            if axis == "ep":
                # The name is found in the mesh that any tensor's mesh is a slice of.
                self.freeze(sparse["rep"])
        if self.draw.random() < 0.3:
            # The axis of the pipeline may be declared, and ``group`` declares it too.
            axes.append((sparse, "pp"))
        self.draw.shuffle(self.parameters)
        group = (self.dense, "pp") if self.stages > 1 else None
        return clip_grad_norm_(self.parameters, 1e9, group=group, distinct=axes)

    def fill(self) -> None:
        """Add parameters of all kinds."""
        self.experts = self.draw.choice([True, False])
        # Makes the mesh of the stage the largest one.
        self.freeze(self.stage_mesh)
        for kind, mesh, distinct in (
            (0, self.stage_mesh, False),
            (2, self.sparse["rep", "efsdp"], self.experts),
            (4, self.sparse["rep", "efsdp", "ep"], False),
            (6, None, self.experts),
            (8, self.dense["tp"], False),
        ):
            # What is only on the axis of tensor parallelism is no expert.
            if kind != 8 or not self.experts:
                for number in range(self.draw.randint(0, 2)):
                    self.add(kind + number, mesh, distinct)


def wrong_norms(rank: int, world_size: int, seeds: range) -> list[str]:
    """Differences from one process that holds all tensors once."""
    wrong = []
    for seed in seeds:
        job = RandomJob(world_size, seed)
        job.fill()
        norm, expected = job.norm(), exact_norm(job.whole)
        if bits(norm).tolist() != bits(expected).tolist():
            wrong.append(f"seed {seed} on rank {rank}: {norm.item()}, not {expected.item()}")
    dist.barrier()
    return wrong


@pytest.mark.parametrize("world_size", [*map(full, (2, 3)), 4, *map(full, (6, 8))])
def test_random_meshes_have_the_norm_of_one_process(world_size: int) -> None:
    seeds = range(6 if world_size == 4 else 12)
    wrong = run_ranks(lambda rank: wrong_norms(rank, world_size, seeds), world_size)
    assert [line for lines in wrong for line in lines] == []


def mixture(rank: int) -> list[Any]:
    """Dense weights over all ranks, and experts over slices, as FSDP2 shards them."""
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    replicas = DeviceMesh(
        "cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("replicate", "shard")
    )
    results: list[Any] = []
    for declared in ({"distinct": ["ep"]}, {"group": (sparse, "ep")}):
        torch.manual_seed(0)
        dense, expert = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        fully_shard(dense, mesh=replicas)
        fully_shard(expert, mesh=sparse["efsdp"])
        parameters = [*dense.parameters(), *expert.parameters()]
        for parameter, value in zip(
            parameters, (3.0, 4.0 + 2 * sparse.get_local_rank("ep")), strict=True
        ):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad += value
        meshplan.clear_report()
        norm = clip_grad_norm_(parameters, 1.0, **declared)
        reductions = sum(entry["count"] for entry in meshplan.report().entries)
        torch.optim.SGD(parameters, lr=0.1).step()
        verify_replicas(dense, replicas)
        results.append((norm.item(), reductions))
    return results


def test_experts_and_dense_weights_have_one_norm_and_equal_replicas() -> None:
    expected = ((16 * 9 + 16 * 16 + 16 * 36) ** 0.5, 1)
    assert run_ranks(mixture, 4) == [[expected, expected]] * 4


def groups(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    sharded = DTensor.from_local(torch.full((2, 2), 2.0), mesh["tp"], [Shard(0)], run_check=False)
    return [
        exact_norm(sharded, group=group).item() ** 2
        for group in (None, mesh["tp"], (mesh, "pp"), dist.group.WORLD)
    ]


def test_group_adds_other_ranks_and_never_a_mesh_again() -> None:
    assert run_ranks(groups, 4) == [pytest.approx([32.0, 32.0, 64.0, 64.0])] * 4


def empty_stages(rank: int) -> list[float]:
    """A stage of frozen parameters, and one with nothing at all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh["dp"], [Shard(0)]))
    if rank < 2:
        parameter.grad = distribute_tensor(torch.ones(4), mesh["dp"], [Shard(0)])
    lists = ([parameter], [parameter] if rank < 2 else [])
    return [clip_grad_norm_(some, 1e9, group=(mesh, "pp")).item() for some in lists]


def test_stage_without_gradients_has_the_norm_of_the_others() -> None:
    assert run_ranks(empty_stages, 4) == [[2.0, 2.0]] * 4


def messages(rank: int) -> list[str]:
    """The text of each refused list on this rank; each is followed by a list that is accepted."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "ep"))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    crossing = DeviceMesh("cpu", torch.tensor([[0, 2], [3, 1]]), mesh_dim_names=("y", "ep"))
    whole = distribute_tensor(torch.ones(4, 4), other, [Shard(0)])
    replicas = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
    part = distribute_tensor(torch.ones(4), mesh["x"], [Shard(0)], src_data_rank=None)
    column = distribute_tensor(torch.ones(4), mesh["ep"], [Shard(0)], src_data_rank=None)
    plain = torch.ones(2)
    integers = torch.ones(2, dtype=torch.int64) if rank == 2 else plain
    calls: list[Callable[[], Any]] = [
        lambda: exact_norm([whole, part]),
        lambda: exact_norm([whole, plain]),
        # Only some of the ranks have a tensor on another mesh.
        lambda: exact_norm([part, column] if rank in (1, 3) else [column]),
        lambda: exact_norm([whole, integers], distinct=[]),
        lambda: exact_norm(integers, group=dist.group.WORLD),
        lambda: exact_norm([whole, part], distinct=["experts"]),
        lambda: exact_norm([whole, part, distribute_tensor(plain, crossing["y"])], distinct=["ep"]),
        lambda: exact_norm([whole, part], distinct=[3]),  # type: ignore[list-item]
        lambda: exact_norm([whole, part], distinct=[(mesh, "tp")]),
        lambda: exact_norm([whole, part], distinct=[(crossing, "ep"), (mesh, "ep"), other]),
        # Ranks with replicas have other lists: a missing gradient, an axis that is not declared.
        lambda: exact_norm([replicas, whole] if rank else [whole]),
        lambda: exact_norm([whole, torch.ones(2 + rank % 2)], distinct=[]),
        lambda: exact_norm([whole, None] if rank == 3 else whole),  # type: ignore[list-item]
        lambda: exact_norm(whole, norm_type=float("inf") if rank == 1 else 2.0),
    ]
    texts = []
    for call in calls:
        texts.append(refusal(MeshplanError, call))
        assert exact_norm([whole, part, plain], distinct=["ep"]).item() == (16 + 8 + 4) ** 0.5
    return texts


class TestMessages(TestCase):
    def test_all_ranks_raise_the_error_of_one(self) -> None:
        texts = run_ranks(messages, 4)
        assert texts == [texts[0]] * 4
        self.assertExpectedInline(
            "\n".join(texts[0]),
            """\
MP411: on rank 0: tensor 1 is on ranks 0, 2, but the total is over ranks 0, 1, 2, 3; pass distinct= with the axes along which ranks hold other tensors, such as distinct=['ep'], or distinct=[] if all ranks hold replicas of it
MP411: on rank 0: tensor 1 is no DTensor, but the total is over ranks 0, 1, 2, 3; pass distinct= with the axes along which ranks hold other tensors, such as distinct=['ep'], or distinct=[] if all ranks hold replicas of it
MP411: on rank 1: the tensors and group= are on several largest meshes, ranks 0, 1 and ranks 1, 3, and none has all ranks of the total; pass group= with a process group of all these ranks, or tensors on one of the meshes at a time
MP412: on rank 2: tensor 1 is torch.int64, whose squares have no exact sum here; convert it to one of float16, bfloat16, float32, float64
MP412: on rank 2: tensor 0 is torch.int64, whose squares have no exact sum here; convert it to one of float16, bfloat16, float32, float64
MP112: on rank 0: distinct has 'experts', and the meshes of the tensors have the axes dp, ep, x; pass one of these, or (mesh, 'experts') with the mesh that has this axis
MP402: on rank 0: distinct has 'ep', which is an axis of different ranks in the meshes (x=2, ep=2) and (y=2, ep=2; ranks 0, 2, 3, 1); pass (mesh, 'ep')
MP402: on rank 0: distinct has 3; pass names of axes, (mesh, axis) pairs or process groups
MP112: on rank 0: no axis 'tp' in the mesh, it has x, ep
MP411: on rank 0: tensor 1 is on ranks 0, 2, but the total is over ranks 0, 1, 2, 3; distinct= and its mesh do not show which of these hold replicas of it; pass axes that share only this rank with the mesh, or a DTensor whose mesh has them
MP411: ranks of the total, 0, 1, 2, 3, hold replicas by declaration or placement but passed tensors of other shapes or dtypes; pass distinct= with every axis along which ranks hold other tensors, and the same gradients on all ranks of a replica
MP411: ranks of the total, 0, 1, 2, 3, hold replicas by declaration or placement but passed tensors of other shapes or dtypes; pass distinct= with every axis along which ranks hold other tensors, and the same gradients on all ranks of a replica
MP412: on rank 3: tensor 1 must be a torch.Tensor, got NoneType
MP411: on rank 1: norm_type=inf: only the 2-norm has an exact sum here; pass norm_type=2.0, or call torch.nn.utils.get_total_norm""",
        )
