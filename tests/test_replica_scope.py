"""Replica checks of models whose ranks hold other parameters: experts, stages, several meshes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshplan
from meshplan.errors import MeshplanError
from meshplan.replicas import ReplicaCheck, ReplicaReport, verify_replicas
from meshplan.testing import order_sensitive
from tests.processes import common_result, run_ranks
from tests.refusals import refusal
from tests.traffic import Sent

pytestmark = pytest.mark.processes

R, S = Replicate(), Shard(0)


def flip(tensor: Tensor, index: int = 3) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[index] ^= 1


def weights(seed: int = 0, numel: int = 8) -> Tensor:
    return order_sensitive(numel, rank=0, world_size=2, seed=seed)


error = partial(refusal, MeshplanError)


def short(report: ReplicaReport | None) -> str:
    return str(report).split(", in ")[0]


def dense_and_experts() -> tuple[nn.ModuleDict, DeviceMesh, DeviceMesh]:
    """Dense layers in HSDP, and experts that differ along ``ep`` in FSDP along ``efsdp``."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
    moe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(0)
    dense = fully_shard(nn.Linear(8, 8), mesh=world)
    torch.manual_seed(1 + moe.get_local_rank("ep"))
    experts = fully_shard(nn.Linear(8, 8), mesh=moe["efsdp"])
    return nn.ModuleDict({"dense": dense, "experts": experts}), world, moe


def check_dense_and_experts(rank: int) -> list[str]:
    model, _, moe = dense_and_experts()
    reports = [
        short(verify_replicas(model)),
        short(verify_replicas(model, moe, distinct=["ep"])),
        short(verify_replicas(model, moe, distinct=[(moe, "ep")])),
        short(verify_replicas(model, distinct=[moe["ep"].get_group()])),
    ]
    check = ReplicaCheck(model, moe, every=1, distinct="ep")
    assert short(check()) == f"step 1: {reports[1]}"
    if rank == 3:
        flip(model["dense"].weight.to_local())
    found = error(lambda: verify_replicas(model))
    declared = error(lambda: verify_replicas(model, moe, distinct=["ep"]))
    return [*reports, found.split("\n")[1], declared.split("\n")[0]]


def test_dense_layers_and_experts_are_checked_by_one_call() -> None:
    found = run_ranks(check_dense_and_experts, 4)
    hybrid = "2 tensors, 144 bytes, agree on all ranks (2 along rep); 2 have one replica each"
    slices = hybrid.replace("rep)", "efsdp)")
    line = "  dense.weight: float32[8, 8] (Replicate(), Shard(dim=0)): differs along rep"
    # Ranks 0 and 2 hold other parameters than 1 and 3, and raise the error of these.
    head = "MP705: replicas differ in 1 of 2 tensors, on mesh (efsdp=2; ranks 1, 3)"
    assert found == [[hybrid, slices, slices, hybrid, line, head]] * 4


def check_plain_experts(rank: int) -> list[str]:
    """Experts without a mesh, under names of their own, and a pipeline of two stages."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [4, 5], [6, 7])]
    ep, pp = groups[rank // 2], [dist.new_group([i, i + 4]) for i in range(4)][rank % 4]
    expert, stage = rank % 2, rank // 4
    tensors = {f"layers.{stage}.experts.{expert}": weights(2 * stage + expert)}
    reports = [short(verify_replicas(tensors, distinct=[ep, pp]))]
    with Sent() as sent:
        verify_replicas(tensors, distinct=[ep, pp])
    reports.append(" ".join(sent.names))
    if rank == 7:
        flip(tensors["layers.1.experts.1"])
    reports.append(error(lambda: verify_replicas(tensors, distinct=[ep, pp], step=3)))
    if rank == 7:
        flip(tensors["layers.1.experts.1"])
    reports.append(short(verify_replicas(tensors, distinct=[pp, ep])))
    return [text.split("\n")[0] for text in reports]


def test_process_groups_declare_experts_and_stages() -> None:
    found = run_ranks(check_plain_experts, 8)
    same = "1 tensors, 32 bytes, agree on all ranks (1 along rank)"
    gather = " ".join(["all_gather_into_tensor"] * 3)
    text = "MP705: replicas differ at step 3 in 1 of 1 tensors, on mesh (rank=2; ranks 5, 7)"
    assert found == [[same, gather, text, same]] * 8


def check_own_meshes(rank: int) -> list[object]:
    """Experts in DTensors of their whole mesh, replicated along one axis, and a plain buffer."""
    dense = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    moe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))

    def placed(local: Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
        return DTensor.from_local(local, mesh, placements, run_check=False)

    tensors = {
        "dense": placed(weights(), dense, R),
        "experts": placed(weights(moe.get_local_rank("ep")), moe, R, S),
        "buffer": weights(5),
    }
    report = verify_replicas(tensors)
    assert report is not None
    found: list[object] = [report.by_axes, report.unreplicated]
    for name in tensors:
        local = getattr(tensors[name], "_local_tensor", tensors[name])
        if rank == 2:
            flip(local)
        found.append(error(lambda: verify_replicas(tensors)).split("\n")[1])
        if rank == 2:
            flip(local)
    return found


def test_tensors_are_compared_on_their_own_meshes() -> None:
    axes = ((("rank",), 1), (("edp",), 1), (("dp",), 1))
    lines = [
        "  dense: float32[8] (Replicate(),): differs along dp",
        "  experts: float32[16] (Replicate(), Shard(dim=0)): differs along edp",
        "  buffer: float32[8]: differs along rank",
    ]
    found = run_ranks(check_own_meshes, 4)
    assert [sorted(one[0]) for one in found] == [sorted(axes)] * 4
    assert [one[1:] for one in found] == [[(), *lines]] * 4


def refuse_on_one_rank(rank: int) -> list[str]:
    """The codes of comparisons, the first of which rank 1 ends by its arguments."""
    mesh = init_device_mesh("cpu", (2,))
    codes = []
    for whole in (mesh, None):
        for call in (1, 2):
            details = -1 if (rank, call) == (1, 1) else 4
            source = torch.full((4,), float(call))
            found = error(partial(verify_replicas, source, whole, details=details))
            codes.append(found.partition(":")[0])
        # The stop ends, and a comparison that all ranks make is right.
        meshplan.shutdown()
        assert verify_replicas(weights(), whole) is not None
    return codes


def test_comparison_that_fails_on_one_rank_is_taken_for_no_other() -> None:
    assert run_ranks(refuse_on_one_rank, 2) == [["MP703", "MP503"] * 2, ["MP402", "MP703"] * 2]


def advise(backend: str) -> list[str]:
    """The advice for parameters of FSDP2, of DTensors without it, and plain ones, on rank 0."""

    def run(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
        torch.manual_seed(rank)
        never = fully_shard(nn.Linear(16, 16), mesh=mesh)
        texts = [error(lambda: verify_replicas(never, mesh))]
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(16, 16), mesh=mesh)
        placed = DTensor.from_local(weights(), mesh, (R, R), run_check=False)
        plain = weights()
        for source, local in (
            ({"model": [model]}, model.weight.to_local()),
            (placed, placed.to_local()),
            (plain, plain),
        ):
            # Two pairs of replicas: no single rank differs from the rest.
            if rank > 1:
                flip(local)
            texts.append(error(partial(verify_replicas, source, mesh)))
        return [text.split("\n")[-1] for text in texts]

    found = run_ranks(run, 4, backend=backend)
    assert all(one == found[0] for one in found)
    return found[0]


class TestErrors(TestCase):
    maxDiff = None

    def test_advice_names_what_reduces_the_tensors(self) -> None:
        self.assertExpectedInline(
            "\n".join(advise("gloo")),
            """\
203 of 272 elements differ in sign or by more than a factor of 2, so these replicas never held the same weights: initialise them with one seed, broadcast them from one rank, or load one checkpoint, and use the backend, init_process_group('meshplan'), for reductions of FSDP2; if ranks along rep hold other parameters, such as experts, name these axes in distinct=
replicas that drift apart are reduced in different orders: use the backend, init_process_group('meshplan'), for reductions of FSDP2; go back to an earlier checkpoint, or call meshplan.repair_replicas
replicas that drift apart are reduced in different orders: use meshplan.install() for reductions of DTensor, the backend, init_process_group('meshplan'), for FSDP2 and DDP; go back to an earlier checkpoint, or call meshplan.repair_replicas
replicas that drift apart are reduced in different orders: use the backend, init_process_group('meshplan'), for reductions of DDP; go back to an earlier checkpoint, or call meshplan.repair_replicas""",
        )
        self.assertExpectedInline(
            "\n".join(advise("meshplan")[:2]),
            """\
203 of 272 elements differ in sign or by more than a factor of 2, so these replicas never held the same weights: initialise them with one seed, broadcast them from one rank, or load one checkpoint; if ranks along rep hold other parameters, such as experts, name these axes in distinct=
replicas that drift apart are reduced in different orders: meshplan.coverage() lists the reductions that are not in one order; go back to an earlier checkpoint, or call meshplan.repair_replicas""",
        )

    def test_ranks_without_tensors_on_a_mesh_are_named(self) -> None:
        def run(rank: int) -> list[str]:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
            whole = DTensor.from_local(weights(), mesh["dp"], (R,), run_check=False)
            texts = [error(lambda: verify_replicas([] if rank == 3 else [whole]))]
            texts.append(error(lambda: verify_replicas(whole, step=int(rank == 2))))
            part = DTensor.from_local(weights(), mesh["dp"], (Partial(),), run_check=False)
            mixed = part if rank == 3 else whole
            texts.append(error(lambda: verify_replicas(mixed, mesh, distinct=["ep"])))
            assert verify_replicas(whole) is not None
            return texts

        found = run_ranks(run, 4)
        assert found[0] == found[2]
        self.assertExpectedInline(
            "\n".join(found[0] + found[1] + found[3]),
            """\
MP703: on rank 1: rank 3 passed no tensors on mesh (dp=2; ranks 1, 3) to the comparison of replicas, and other ranks did; pass the same tensors on all ranks that share a mesh
MP703: rank 2 passed other tensors to the comparison of replicas than the other ranks of mesh (rank=4); on rank 2: only there 'call 2, digest v1, step 1, mesh (rank=4)'; only on the others 'call 2, digest v1, step 0, mesh (rank=4)'; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them
MP703: on rank 1: rank 3 passed other tensors to the comparison of replicas than the other ranks of mesh (dp=2; ranks 1, 3); on rank 3: only there 'MP401: tensor: float32[8] (Partial(sum),) is a partial sum along dp, so its ranks hold summands and not replicas; redistribute it to Replicate first, or leave it out'; only on the others 'call 1, digest v1, step None, distinct along ep, mesh (dp=2; ranks 1, 3)'; only on the others 'tensor: float32[8] (Replicate(),), replicas along dp'; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them
MP703: rank 3 passed no tensors on mesh (dp=2; ranks 1, 3) to the comparison of replicas, and other ranks did; pass the same tensors on all ranks that share a mesh
MP703: rank 2 passed other tensors to the comparison of replicas than the other ranks of mesh (rank=4); on rank 2: only there 'call 2, digest v1, step 1, mesh (rank=4)'; only on the others 'call 2, digest v1, step 0, mesh (rank=4)'; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them
MP703: rank 3 passed other tensors to the comparison of replicas than the other ranks of mesh (dp=2; ranks 1, 3); on rank 3: only there 'MP401: tensor: float32[8] (Partial(sum),) is a partial sum along dp, so its ranks hold summands and not replicas; redistribute it to Replicate first, or leave it out'; only on the others 'call 1, digest v1, step None, distinct along ep, mesh (dp=2; ranks 1, 3)'; only on the others 'tensor: float32[8] (Replicate(),), replicas along dp'; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them
MP703: on rank 1: rank 3 passed no tensors on mesh (dp=2; ranks 1, 3) to the comparison of replicas, and other ranks did; pass the same tensors on all ranks that share a mesh
MP703: rank 2 passed other tensors to the comparison of replicas than the other ranks of mesh (rank=4); on rank 2: only there 'call 2, digest v1, step 1, mesh (rank=4)'; only on the others 'call 2, digest v1, step 0, mesh (rank=4)'; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them
MP401: tensor: float32[8] (Partial(sum),) is a partial sum along dp, so its ranks hold summands and not replicas; redistribute it to Replicate first, or leave it out""",
        )

    def test_declarations_that_name_no_axis_are_refused(self) -> None:
        def run(rank: int) -> list[str]:
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
            other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "dp"))
            whole = [
                DTensor.from_local(weights(), one, (R, R), run_check=False) for one in (mesh, other)
            ]
            cases: list[tuple[Any, Iterable[Any]]] = [
                (whole[0], ["epp"]),
                (weights(), ["ep"]),
                (whole, ["ep"]),
                (whole[0], [(mesh, "tp")]),
                (whole[0], [3]),
            ]
            return [error(partial(verify_replicas, one, distinct=names)) for one, names in cases]

        self.assertExpectedInline(
            "\n".join(common_result(run, 2)),
            """\
MP112: distinct has 'epp', and the meshes of the tensors have the axes dp, ep, rank (did you mean 'ep'?); pass one of these, or (mesh, 'epp') with the mesh that has this axis
MP112: distinct has 'ep', and the meshes of the tensors have the axes rank; pass one of these, or (mesh, 'ep') with the mesh that has this axis
MP402: distinct has 'ep', which is an axis of different ranks in the meshes (dp=2, ep=1) and (ep=2, dp=1); pass (mesh, 'ep')
MP112: no axis 'tp' in the mesh, it has dp, ep
MP402: distinct has 3; pass names of axes, (mesh, axis) pairs or process groups""",
        )
