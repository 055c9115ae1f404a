"""Repair of replicas: what is copied, from which rank, and what is refused with nothing changed."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import meshplan
from meshplan._bits import bytes_of
from meshplan.errors import CollectiveError, MeshplanError
from meshplan.replicas import ReplicaRepair, _comparison
from meshplan.replicas._comparison import Difference
from meshplan.replicas._tensors import named_tensors
from tests.processes import arrive, common_result, patience, run_ranks, shorten, wait_for
from tests.refusals import refusal

pytestmark = pytest.mark.processes
SPECIAL = (float("nan"), -0.0, float("inf"), 1e-42)


def flip(tensor: Any, index: int = 3, bit: int = 0) -> None:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local.detach().view(torch.int32).view(-1)[index] ^= 1 << bit


def bits_of(*sources: Any) -> list[bytes]:
    return [bytes_of(one.local.detach().contiguous()) for one in named_tensors(sources)]


error = partial(refusal, MeshplanError)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 5))
        # Its memory is not in the order of its elements.
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.register_buffer("special", torch.tensor(SPECIAL))
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, batch: Tensor) -> Tensor:
        return batch @ self.weight @ self.turned


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        torch.manual_seed(step + 10 * dist.get_rank())
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def repair_ddp(rank: int) -> list[object]:
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    inner, before = model.module, bits_of(model, optimizer)
    nothing = meshplan.repair_replicas(model, optimizer)
    if rank == 2:
        flip(inner.turned.t(), 14)
        flip(inner.special, 1, 31)  # 0.0 in the place of -0.0
        flip(inner.special, 0)  # another NaN
        flip(optimizer.state[inner.weight]["exp_avg"], bit=30)
    if rank == 0:
        inner.seen += 1
    found = meshplan.repair_replicas(model, [optimizer], step=1)
    same = bits_of(model, optimizer) == before
    train(model, optimizer)
    return [short(nothing), found, same, bits_of(model, optimizer)]


def short(repair: ReplicaRepair | None) -> str:
    """Without the report, whose bytes depend on the rank."""
    head, *lines = str(repair).split("\n")
    return "\n".join([head.split(";")[0], *lines])


def make_hybrid() -> tuple[Any, Any, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    whole = Model()
    whole.turned = nn.Parameter(whole.turned.detach().contiguous())
    model: Any = fully_shard(whole, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer, mesh


def repair_hybrid(rank: int) -> list[object]:
    model, optimizer, mesh = make_hybrid()
    before = bits_of(model, optimizer)
    texts = []
    for whole in (mesh, None):
        if rank == 3:
            flip(model.weight)
            flip(optimizer.state[model.turned]["exp_avg_sq"])
        now = bits_of(model, optimizer)
        refused = error(partial(meshplan.repair_replicas, model, optimizer, whole))
        texts.append(refused.split("\n")[-1])
        assert bits_of(model, optimizer) == now
        # Rank 0 is along dp where rank 1 is, which has the shard of rank 3.
        texts.append(short(meshplan.repair_replicas(model, optimizer, whole, source=0)))
        assert bits_of(model, optimizer) == before
    return texts


def repair_experts(rank: int) -> list[object]:
    """Dense weights on all ranks, and experts of one name that differ along ``ep``."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(mesh.get_local_rank("ep"))
    model: Any = nn.ModuleDict({"expert": nn.Linear(4, 8)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model["expert"](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = bits_of(model, optimizer)
    texts = [error(lambda: meshplan.repair_replicas(model, optimizer, mesh, source=0))]
    assert bits_of(model, optimizer) == before
    if rank == 5:
        flip(model["expert"].weight)
    declared = meshplan.repair_replicas(model, optimizer, mesh, distinct=["ep"])
    texts.append(short(declared))
    assert bits_of(model, optimizer) == before
    if rank in (3, 5):
        flip(model["expert"].weight, rank)
    call = partial(meshplan.repair_replicas, model, optimizer, mesh, distinct=["ep"])
    # No majority in the slice of ranks 1, 3 and 5; the other ranks get its text.
    texts.append(error(call))
    texts.append(short(call(source=0)))
    assert bits_of(model, optimizer) == before
    return [text.split("\n")[-1] if text.startswith("MP") else text for text in texts]


def refuse(rank: int) -> list[str]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if rank != 1:
        train(model, optimizer)
    texts = []

    def attempt(**options: Any) -> None:
        now = bits_of(model, optimizer)
        texts.append(error(lambda: meshplan.repair_replicas(model, optimizer, **options)))
        assert bits_of(model, optimizer) == now

    attempt()  # rank 1 has no state
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    attempt(source=0)
    for state in optimizer.state.values():
        state["step"].fill_(2)
        state["scale"] = 0.5 + (rank == 0)
    attempt(source=0)
    attempt(source=3)
    attempt(source=rank)
    return [text.split("\n")[-1] for text in texts]


def fail_to_write(rank: int) -> list[str]:
    model = Model()
    if rank == 1:
        # Its elements share memory.
        model.special = torch.tensor(1.0).expand(4)
    flip(model.weight, rank)
    found = error(lambda: meshplan.repair_replicas(model, (), source=0)).split("\n")
    # The tensor after it was written, and the group works on.
    weights = [line for line in found if "weight" in line]
    model.special = torch.tensor(SPECIAL)
    return [found[0], *weights, short(meshplan.repair_replicas(model, []))]


class RepairTest(TestCase):
    def test_the_majority_of_three_replicas_is_copied(self) -> None:
        found = run_ranks(repair_ddp, 3)
        assert len({(nothing, same, str(bits)) for nothing, _, same, bits in found}) == 1
        assert found[0][2] is True
        texts = {short(one) for _, one, *_ in found}
        self.assertExpectedInline(
            "\n".join([found[0][0], *texts]),
            """\
copied 0 tensors
copied 4 tensors
  model.module.seen: from rank 1 to 0
  model.module.special: from rank 0 to 2
  model.module.turned: from rank 0 to 2
  optimizer.0.group0.param0.exp_avg: from rank 0 to 2""",
        )

    def test_two_replicas_of_shards_need_a_source(self) -> None:
        found = run_ranks(repair_hybrid, 4)
        assert found == [found[0]] * 4
        self.assertExpectedInline(
            "\n\n".join(found[0]),
            """\
nothing was repaired: no bits of model.weight are on most of its ranks; pass as source= a rank whose replica is right

copied 2 tensors
  model.weight: from rank 1 to 3
  optimizer.0.group0.param1.exp_avg_sq: from rank 1 to 3

nothing was repaired: no bits of model.weight are on most of its ranks; pass as source= a rank whose replica is right

copied 2 tensors
  model.weight: from rank 1 to 3
  optimizer.0.group0.param1.exp_avg_sq: from rank 1 to 3""",
        )

    def test_experts_are_copied_along_their_replicas_only(self) -> None:
        found = run_ranks(repair_experts, 6)
        self.assertExpectedInline(
            "\n\n".join(map("\n".join, found[:2])),
            """\
nothing was repaired: model.expert.weight never was the same on these ranks; name axes of experts in distinct=, or load one checkpoint
copied 0 tensors
nothing was repaired: no bits of model.expert.weight are on most of its ranks; pass as source= a rank whose replica is right
copied 0 tensors

nothing was repaired: model.expert.weight never was the same on these ranks; name axes of experts in distinct=, or load one checkpoint
copied 1 tensors
  model.expert.weight: from rank 1 to 5
nothing was repaired: no bits of model.expert.weight are on most of its ranks; pass as source= a rank whose replica is right
copied 1 tensors
  model.expert.weight: from rank 1 to 3, 5""",
        )

    def test_what_cannot_be_repaired_is_refused_on_all_ranks(self) -> None:
        found = run_ranks(refuse, 3)
        assert found == [found[0]] * 3
        self.assertExpectedInline(
            "\n".join(found[0]),
            """\
MP703: rank 1 passed other tensors to the comparison of replicas than the other ranks of mesh (rank=3); on rank 1: only on the others 'optimizer.0.group0.param0.exp_avg: float32[8, 5], replicas along rank'; only on the others 'optimizer.0.group0.param0.exp_avg_sq: float32[8, 5], replicas along rank'; only on the others 'optimizer.0.group0.param0.step: float32[], replicas along rank'; only on the others 'optimizer.0.group0.param1.exp_avg: float32[5, 3], replicas along rank'; only on the others 'optimizer.0.group0.param1.exp_avg_sq: float32[5, 3], replicas along rank'; and 1 more; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them
nothing was repaired: optimizer.0.group0.param0.step is a count of steps; load one checkpoint on all ranks
nothing was repaired: optimizer.0.group0.param0.scale is a Python number; load one checkpoint on all ranks
MP402: source=3 is not a rank of mesh (rank=3); pass one
MP703: ranks 1, 2 passed other tensors to the comparison of replicas than the other ranks of mesh (rank=3); on rank 1: only there 'call 5, digest v1, step None, repair from 1, 2 numbers, mesh (rank=3)'; only on the others 'call 5, digest v1, step None, repair from 0, 2 numbers, mesh (rank=3)'; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them""",
        )

    def test_a_rank_that_cannot_write_fails_the_call_on_all_ranks(self) -> None:
        found = run_ranks(fail_to_write, 3)
        assert found == [found[0]] * 3
        self.assertExpectedInline(
            "\n".join(found[0]),
            """\
MP705: replicas differ in 1 of 4 tensors, on mesh (rank=3)
3 of 4 elements differ in sign or by more than a factor of 2, so these replicas never held the same weights: initialise them with one seed, broadcast them from one rank, or load one checkpoint, and use the backend, init_process_group('meshplan'), for reductions of DDP; if ranks along rank hold other parameters, such as experts, name these axes in distinct=
copied 0 tensors""",
        )


def leave_before_copying(rank: int) -> str:
    model = Model()
    flip(model.weight) if rank == 2 else None
    optimizer = torch.optim.SGD(model.parameters())

    def difference() -> Difference:
        if rank == 0:
            dist.destroy_process_group()
            arrive("left")
            raise KeyError
        wait_for("left", 1)
        shorten(1.0)
        return Difference()

    with patience(2), mock.patch.object(_comparison, "Difference", difference):
        try:
            meshplan.repair_replicas(model, optimizer)
        except KeyError:
            return "left"
        except CollectiveError as error:
            return f"{error.code} {error.missing}"
    return "repaired"


def pass_wrong_arguments(rank: int) -> list[str]:
    torch.manual_seed(0)
    model: Any = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    verify, repair = meshplan.verify_replicas, meshplan.repair_replicas
    wrong = (
        lambda: repair({"w": model.weight}, optimizer, mesh),
        lambda: repair(model, mesh, mesh),
        lambda: repair(model, optimizer, mesh, source="1"),
        lambda: repair(model, optimizer, mesh, distinct=3),
        lambda: repair(model, optimizer, "dp"),
        lambda: verify(model, mesh, details="all"),
        lambda: verify({}, mesh),
        lambda: verify(optimizer),
        lambda: verify(model if rank else {}, mesh),
    )
    texts = [error(call) for call in wrong]
    report = verify(model, mesh)
    assert report is not None
    assert report.tensors == 2
    # One axis needs no list. Along it each rank has parameters of its own.
    alone = verify(model, mesh, distinct=mesh["dp"])
    assert alone is not None
    return [*texts, str(alone).split(", in ")[0]]


def test_wrong_arguments_are_named_and_leave_the_group_usable() -> None:
    TestCase().assertExpectedInline(
        "\n".join(common_result(pass_wrong_arguments, 2)),
        """\
MP421: model is of type dict; pass a torch.nn.Module
MP421: optimizer.0 is of type DeviceMesh, and only tensors are compared; pass a module, an optimizer, a tensor, or a mapping or list of them
MP402: source='1' is not a rank of mesh (dp=2); pass one
MP402: distinct has 3; pass names of axes, (mesh, axis) pairs or process groups
MP111: mesh='dp' is not a DeviceMesh; pass a mesh, or a slice of one such as device_mesh['dp', 'tp']
MP402: details='all' is invalid; pass an integer of 0 or more
MP421: no rank passed a tensor, so nothing was compared; pass a module, or a list if a generator was used before
MP421: no rank passed a tensor, so nothing was compared; pass a module, or a list if a generator was used before
MP703: rank 1 passed other tensors to the comparison of replicas than the other ranks of mesh (dp=2); on rank 1: only there 'bias: float32[1], replicas along dp'; only there 'weight: float32[1, 2], replicas along dp'; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them
nothing was compared; 2 have one replica each""",
    )


def test_ranks_that_left_before_their_copies_are_reported() -> None:
    found = run_ranks(leave_before_copying, 3)
    assert found == ["left", "MP504 (0,)", "MP504 (0,)"]
