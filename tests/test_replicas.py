"""Replica checks over gloo processes: divergences, messages, and the state after a failure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import meshplan
from meshplan.errors import (
    CollectiveError,
    GroupAgreementError,
    LayoutError,
    ReplicaDivergenceError,
    SignatureMismatchError,
)
from meshplan.replicas import ReplicaCheck, ReplicaReport, _comparison, verify_replicas
from meshplan.replicas._tensors import TensorSource
from meshplan.testing import order_sensitive
from tests.processes import arrive, patience, run_ranks, shorten, wait_for
from tests.traffic import Sent

pytestmark = pytest.mark.processes

R, S = Replicate(), Shard(0)


def error(source: TensorSource, mesh: DeviceMesh | None, **options: int) -> meshplan.MeshplanError:
    with pytest.raises((ReplicaDivergenceError, SignatureMismatchError)) as caught:
        verify_replicas(source, mesh, **options)
    return caught.value  # type: ignore[return-value]


def flip(tensor: Tensor, index: int, bit: int = 0) -> None:
    """One bit of one element of this rank's data."""
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[index] ^= 1 << bit


def weights(numel: int) -> Tensor:
    """Equal on all ranks."""
    return order_sensitive(numel, rank=0, world_size=2)


class Model(nn.Module):
    """Two million elements in several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(weights(1_000_000).view(1000, 1000))
        self.layers = nn.ParameterList(nn.Parameter(weights(300_000)) for _ in range(3))
        self.norm = nn.BatchNorm1d(7)


class TestOneBit(TestCase):
    @pytest.mark.full
    def test_one_flipped_bit_of_one_rank_out_of_eight_is_found(self) -> None:
        def ranks(rank: int) -> list[str]:
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("ddp", "fsdp"))
            model = Model()
            report = verify_replicas(model, mesh)
            assert report is not None
            messages = [str(report).split(", in ")[0]]
            if rank == 6:
                flip(model.layers[1], 123_456, bit=3)
            found = error(model, mesh, step=300)
            messages.append(str(found))
            assert isinstance(found, ReplicaDivergenceError)
            assert (found.tensors, found.step) == (1, 300)
            (one,) = found.divergences
            assert (one.name, one.axes, one.ranks) == ("layers.1", ("ddp", "fsdp"), (6,))
            assert one.coordinates[1] == ((1, 2),)
            (elements,) = one.elements
            assert (elements.rank, elements.count, elements.index) == (6, 1, (123_456,))
            assert elements.max_ulps == 8
            # All ranks continue, and find the same divergence again.
            (head, *lines), short = str(found).splitlines(), str(error(model, mesh, details=0))
            lines[2] = lines[2].partition(":")[0]
            assert short.splitlines() == [head.replace(" at step 300", ""), *lines]
            if rank == 6:
                flip(model.layers[1], 123_456, bit=3)
            assert verify_replicas(model, mesh) is not None
            return messages

        found = run_ranks(ranks, 8)
        assert all(messages == found[0] for messages in found)
        self.assertExpectedInline(
            "\n".join(found[0]),
            """\
9 tensors, 7600120 bytes, agree on all ranks (9 along ddp, fsdp)
MP705: replicas differ at step 300 in 1 of 9 tensors, on mesh (ddp=2, fsdp=4)
  layers.1: float32[300000]: differs along ddp, fsdp
    rank 0 (ddp=0, fsdp=0), rank 1 (ddp=0, fsdp=1), rank 2 (ddp=0, fsdp=2), rank 3 (ddp=0, fsdp=3) and 3 more: the reference
    rank 6 (ddp=1, fsdp=2): 1 of 300000 elements differ, first at index (123456,): 22645604.0 (0x4bacc5b2), on rank 0 22645620.0 (0x4bacc5ba), at most 8 ulp apart
only rank 6 differs: test its hardware and memory, and go back to an earlier checkpoint""",
        )


def placed(local: Tensor, mesh: DeviceMesh, *placements: Placement, numel: int = 0) -> DTensor:
    """Of a 1-D tensor whose shards are not of one length all ranks have to be told the length."""
    whole = {"shape": torch.Size([numel]), "stride": (1,)} if numel else {}
    return DTensor.from_local(local, mesh, placements, run_check=False, **whole)


def fsdp_and_replicas(rank: int) -> tuple[ReplicaReport | None, list[str], list[object]]:
    """Rank 4 sits at (1, 1); its shard along ``b`` is rank 1's too."""
    mesh = DeviceMesh("cpu", [[3, 1, 2], [5, 4, 0]], mesh_dim_names=("a", "b"))
    place = mesh.get_coordinate()
    assert place is not None
    tensors = {
        "both": placed(weights(64), mesh, R, R),
        "cut": placed(weights(64) + rank, mesh, S, S),
        "hsdp": placed(weights(64) + place[1], mesh, R, S),
        "other": placed(weights(64) + place[0], mesh, S, R),
        "uneven": placed(weights(64)[: 9 - 4 * place[1]], mesh, R, S, numel=15),
        "line": placed(weights(8) + place[1], mesh["b"], S),
        "plain": weights(5),
    }
    report = verify_replicas(tensors, mesh)
    found = []
    for name, odd in (
        ("hsdp", 4),
        ("other", 4),
        ("both", 0),
        ("uneven", 5),
        ("line", 0),
        ("plain", 2),
    ):
        local = tensors[name]._local_tensor if name != "plain" else tensors[name]  # type: ignore[attr-defined]
        if rank == odd:
            flip(local, 3)
        one = error(tensors, mesh)
        assert isinstance(one, ReplicaDivergenceError)
        (divergence,) = one.divergences
        found.append((name, divergence.axes, divergence.classes, divergence.elements[0].index))
        if rank == odd:
            flip(local, 3)
    if rank == 1:
        flip(tensors["cut"]._local_tensor, 0)  # type: ignore[attr-defined]
    unseen = verify_replicas(tensors, mesh)
    assert unseen is not None
    return report, [str(unseen).split(", in ")[0]], found


def test_name_of_an_axis_is_no_mesh() -> None:
    model, wanted = (
        nn.Linear(2, 2),
        r"MP\d+: mesh='dp' is not a DeviceMesh; pass a mesh, or a slice",
    )
    with pytest.raises(LayoutError, match=wanted):
        verify_replicas(model, "dp")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=wanted):
        ReplicaCheck(model, "dp", every=1)()  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=wanted):
        meshplan.prepare("dp")  # type: ignore[arg-type]


def test_dtensors_on_a_permuted_mesh_are_compared_along_their_replicas() -> None:
    found = run_ranks(fsdp_and_replicas, 6)
    for _, _, seen in found:
        assert seen == found[0][2]
    report = found[0][0]
    assert report is not None
    assert report.by_axes == ((("a",), 3), (("a", "b"), 2), (("b",), 1))
    assert report.unreplicated == ("cut",)
    assert found[0][2] == [
        # Of two that differ the one with the lower coordinate is the reference.
        ("hsdp", ("a",), ((1,), (4,)), (3,)),
        ("other", ("b",), ((5, 0), (4,)), (3,)),
        ("both", ("a", "b"), ((3, 1, 2, 5, 4), (0,)), (3,)),
        ("uneven", ("a",), ((3,), (5,)), (3,)),
        ("line", ("a",), ((2,), (0,)), (3,)),
        ("plain", ("a", "b"), ((3, 1, 5, 4, 0), (2,)), (3,)),
    ]


class TestThreeRanks(TestCase):
    def test_ranks_with_other_tensors_are_named(self) -> None:
        def ranks(rank: int) -> list[tuple[str, int]]:
            mesh = init_device_mesh("cpu", (3,))
            one = torch.ones(2, 2)
            found = []
            for source, step in (
                ({"w": one, "b": one} if rank == 1 else {"w": one}, 1),
                ({"w": one.half() if rank == 0 else one}, 1),
                ({"w": one.view(4) if rank > 0 else one}, 1),
                ([one] * (20 if rank == 2 else 5), 1),
                ([], 5 if rank == 2 else 4),
                ({"w": placed(one, mesh, S if rank == 2 else R)}, 1),
            ):
                caught = error(source, mesh, step=step)
                assert isinstance(caught, SignatureMismatchError)
                found.append((str(caught), caught.rank))
            assert verify_replicas(one, mesh) is not None
            return found

        found = run_ranks(ranks, 3)
        assert [[rank for _, rank in one] for one in found] == [
            [1, 1, 1, 2, 2, 2],
            [0, 0, 0, 2, 2, 2],
            [1, 0, 0, 0, 0, 0],
        ]
        for one in found:
            assert [text for text, _ in one] == [text for text, _ in found[0]]
        self.assertExpectedInline(
            "\n".join(text for text, _ in found[0]),
            """\
MP703: rank 1 passed other tensors to the comparison of replicas than the other ranks of mesh (axis0=3); on rank 1: only there 'b: float32[2, 2], replicas along axis0'; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them
MP703: rank 0 passed other tensors to the comparison of replicas than the other ranks of mesh (axis0=3); on rank 0: only there 'w: float16[2, 2], replicas along axis0'; only on the others 'w: float32[2, 2], replicas along axis0'; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them
MP703: rank 0 passed other tensors to the comparison of replicas than the other ranks of mesh (axis0=3); on rank 0: only there 'w: float32[2, 2], replicas along axis0'; only on the others 'w: float32[4], replicas along axis0'; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them
MP703: rank 2 passed other tensors to the comparison of replicas than the other ranks of mesh (axis0=3); on rank 2: only there '5: float32[2, 2], replicas along axis0'; only there '6: float32[2, 2], replicas along axis0'; only there '7: float32[2, 2], replicas along axis0'; only there '8: float32[2, 2], replicas along axis0'; only there '9: float32[2, 2], replicas along axis0'; and 10 more; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them
MP703: rank 2 passed other tensors to the comparison of replicas than the other ranks of mesh (axis0=3); on rank 2: only there 'call 5, digest v1, step 5, mesh (axis0=3)'; only on the others 'call 5, digest v1, step 4, mesh (axis0=3)'; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them
MP703: rank 2 passed other tensors to the comparison of replicas than the other ranks of mesh (axis0=3); on rank 2: only there 'w: float32[6, 2] (Shard(dim=0),), replicas along no axis'; only on the others 'w: float32[2, 2] (Replicate(),), replicas along axis0'; pass the same tensors at the same step on every rank of the mesh, or use a mesh of only the ranks that share them""",
        )

    def test_differing_elements_are_described(self) -> None:
        def ranks(rank: int) -> list[str]:
            # Several pieces, and several gathers of digests.
            _comparison.PIECE_BYTES = 1024
            _comparison._GATHERED_BYTES = 100
            mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("x", "y"))
            base = {
                "bfloat16": weights(3000).bfloat16().view(30, 100),
                "bool": torch.arange(9) % 2 == 0,
                "complex64": torch.ones(600, dtype=torch.complex64),
                "float8": torch.ones(4).to(torch.float8_e5m2),
                "int64": torch.arange(5000),
                "nan": torch.ones(3),
                "scalar": torch.tensor(1.0),
                "shape": placed(torch.zeros(4 + rank), mesh, R, R, numel=4),
                "strided": weights(6000).view(60, 100).t(),
                "zero": torch.zeros(700),
            }
            if rank == 2:
                base["bfloat16"][7, 3] *= -1
                base["bfloat16"][29, 99] *= -1
                base["bool"][5] = True
                base["complex64"][500] = complex(1, -0.0)
                base["float8"][1] = 2
                base["int64"][4999] = -1
                base["nan"][2] = float("nan")
                base["scalar"].mul_(1.5)
                # Another order in memory and the same elements, but for one.
                base["strided"] = base["strided"].contiguous()
                base["strided"][99, 58] = 7
                base["zero"].neg_()
            found = error(base, mesh, details=16)
            few = error(base, mesh, details=2)
            assert isinstance(few, ReplicaDivergenceError)
            assert few.tensors == 10
            assert [len(one.elements) for one in few.divergences] == [1, 1] + [0] * 6
            return [
                str(found),
                str(error({f"{n}": torch.ones(1) * rank for n in range(20)}, mesh, details=0)),
            ]

        found = run_ranks(ranks, 3)
        assert all(messages == found[0] for messages in found)
        details, many = found[0]
        head, *lines = many.splitlines()
        assert head == "MP705: replicas differ in 20 of 20 tensors, on mesh (x=3, y=1)"
        for name, (title, *ranks_of) in zip(
            range(8), zip(*[iter(lines[:32])] * 4, strict=True), strict=False
        ):
            assert title == f"  {name}: float32[1]: differs along x"
            assert [line[4:10] for line in ranks_of] == ["rank 0", "rank 1", "rank 2"]
            assert [line.endswith(": the reference") for line in ranks_of] == [True, False, False]
        assert lines[32] == "  and 12 more groups of replicas"
        assert lines[33].startswith("pass details=4 to compare elements")
        reference = "    rank 0 (x=0, y=0), rank 1 (x=1, y=0): the reference"
        assert details.splitlines().count(reference) == 9
        self.assertExpectedInline(
            "\n".join(one for one in details.splitlines() if not one.endswith("the reference")),
            """\
MP705: replicas differ in 10 of 10 tensors, on mesh (x=3, y=1)
  bfloat16: bfloat16[30, 100]: differs along x
    rank 2 (x=2, y=0): 2 of 3000 elements differ, first at index (7, 3): -4.26941244674723e+18 (0xde6d), on rank 0 4.26941244674723e+18 (0x5e6d), at most 48346 ulp apart
  bool: bool[9]: differs along x
    rank 2 (x=2, y=0): 1 of 9 elements differ, first at index (5,): True (0x01), on rank 0 False (0x00)
  complex64: complex64[600]: differs along x
    rank 2 (x=2, y=0): 1 of 600 elements differ, first at index (500,): (1-0j) (0x800000003f800000), on rank 0 (1+0j) (0x000000003f800000), at most 0 ulp apart
  float8: float8_e5m2[4]: differs along x
    rank 2 (x=2, y=0): 1 of 4 elements differ, first at index (1,): 2.0 (0x40), on rank 0 1.0 (0x3c)
  int64: int64[5000]: differs along x
    rank 2 (x=2, y=0): 1 of 5000 elements differ, first at index (4999,): -1 (0xffffffffffffffff), on rank 0 4999 (0x0000000000001387)
  nan: float32[3]: differs along x
    rank 2 (x=2, y=0): 1 of 3 elements differ, first at index (2,): nan (0x7fc00000), on rank 0 1.0 (0x3f800000)
  scalar: float32[]: differs along x
    rank 2 (x=2, y=0): 1 of 1 elements differ, first at index (): 1.5 (0x3fc00000), on rank 0 1.0 (0x3f800000), at most 4194304 ulp apart
  shape: float32[4] (Replicate(), Replicate()): differs along x
    rank 1 (x=1, y=0): its local shape is [5], that of rank 0 [4]
    rank 2 (x=2, y=0): its local shape is [6], that of rank 0 [4]
  strided: float32[100, 60]: differs along x
    rank 2 (x=2, y=0): 1 of 6000 elements differ, first at index (99, 58): 7.0 (0x40e00000), on rank 0 -14793378.0 (0xcb61baa2), at most 2353117858 ulp apart
  zero: float32[700]: differs along x
    rank 2 (x=2, y=0): 700 of 700 elements differ, first at index (0,): -0.0 (0x80000000), on rank 0 0.0 (0x00000000), at most 0 ulp apart
replicas that drift apart are reduced in different orders: use meshplan.install() for reductions of DTensor, the backend, init_process_group('meshplan'), for FSDP2 and DDP; go back to an earlier checkpoint, or call meshplan.repair_replicas""",
        )

    @pytest.mark.full
    def test_absent_rank_is_named_and_the_check_recovers(self) -> None:
        def ranks(rank: int) -> str:
            mesh = DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("a",))
            first = ""
            if rank != 1:
                shorten(1.0)
                with patience(2), pytest.raises(GroupAgreementError) as caught:
                    verify_replicas(torch.ones(1), mesh)
                shorten(200.0)
                assert caught.value.missing == (1,)
                first = str(caught.value)
            synchronise("first")
            if rank == 1:
                with pytest.raises(GroupAgreementError):
                    verify_replicas(torch.ones(1), mesh)
            assert verify_replicas(torch.ones(1), mesh) is not None
            if rank != 1:
                shorten(3.0)
                with pytest.raises(CollectiveError, match="rank 1 did not report it too"):
                    verify_replicas(torch.ones(1), mesh)
            synchronise("second")
            return first

        found = run_ranks(ranks, 3)
        assert found[0] == found[2]
        self.assertExpectedInline(
            found[0],
            """MP501: replicas could not be compared: rank 1 did not reach the first reduction over ranks 2, 0, 1 within 1 s, so no rank started it; every rank of the group must make the same calls: look for a rank that died or took another branch""",
        )


def synchronise(name: str) -> None:
    """All three ranks, without a collective, which would time out."""
    arrive(name)
    wait_for(name, 3)


def hooks_and_the_default_group(rank: int) -> Sequence[object]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    check = ReplicaCheck({"model": model, "optimizer": optimizer}, every=2)
    optimizer.register_step_post_hook(check.hook)
    for step in range(4):
        model(torch.ones(1, 3)).sum().backward()
        if step == 3 and rank == 1:
            # No loss would show this.
            optimizer.state[model.weight]["exp_avg_sq"][1, 2] = 1e-30
        if step < 3:
            optimizer.step()
    assert check.last is not None
    assert (check.step, check.last.step, check.last.tensors) == (3, 2, 8)
    with pytest.raises(ReplicaDivergenceError) as caught:
        optimizer.step()
    names = [one.name for one in caught.value.divergences]
    # A part of the mesh: the other ranks do nothing.
    pair = DeviceMesh("cpu", [2, 0])
    report = verify_replicas(model, pair)
    return caught.value.step, names, None if report is None else report.tensors


def test_hook_finds_divergent_optimizer_state() -> None:
    found = run_ranks(hooks_and_the_default_group, 3)
    names = ["model.weight", "optimizer.group0.param0.exp_avg_sq"]
    assert found == [(4, names, 2), (4, names, None), (4, names, 2)]


def traffic_of_equal_replicas(rank: int) -> tuple[list[str], int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(30, 30) for _ in range(20)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    verify_replicas(model, mesh)  # creates the group
    with Sent() as sent:
        verify_replicas(model, mesh)
    (dtype,), (elements,) = set(sent.dtypes), sent.elements
    return sent.names, elements * dtype.itemsize


def test_equal_replicas_cost_one_all_gather_of_128_bytes() -> None:
    assert run_ranks(traffic_of_equal_replicas, 4) == [(["all_gather_into_tensor"], 128)] * 4


def many_sets(rank: int) -> list[object]:
    """More sets of axes than one message holds."""
    _comparison.ROWS = 2
    mesh = init_device_mesh("cpu", (2, 2, 2))
    whole = torch.ones(4)
    kinds = [(a, b, c) for a in (R, S) for b in (R, S) for c in (R, S)]
    tensors = [placed(whole.clone(), mesh, *kind) for kind in kinds]
    assert verify_replicas(tensors, mesh) is not None
    if rank == 7:
        for one in tensors:
            flip(one._local_tensor, 1)
    found = error(tensors, mesh, details=1)
    assert isinstance(found, ReplicaDivergenceError)
    return [(one.name, one.replicated, one.axes, one.ranks) for one in found.divergences]


def test_more_sets_of_axes_than_one_message_holds() -> None:
    found = run_ranks(many_sets, 8)
    assert all(one == found[0] for one in found)
    axes = ("axis0", "axis1", "axis2")
    assert sorted(found[0]) == [
        (str(n), held, held, (7,))
        for n, held in enumerate(
            tuple(axis for i, axis in enumerate(axes) if not n & (4 >> i)) for n in range(7)
        )
    ]


def hybrid_fsdp(rank: int) -> tuple[object, ...]:
    """Parameters in shards, shards in replicas, optimizer state placed in the same way."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    check = ReplicaCheck([model, optimizer], mesh, every=1, grads=True)
    optimizer.register_step_post_hook(check.hook)
    model(torch.ones(2, 5) * rank).sum().backward()
    optimizer.step()
    report = check.last
    assert report is not None
    if rank == 3:
        flip(model[1].weight.to_local(), 4)
    found = error(model, mesh)
    assert isinstance(found, ReplicaDivergenceError)
    (one,) = found.divergences
    return report.tensors, report.by_axes, report.unreplicated, one.name, one.axes, one.classes


def test_hybrid_fsdp_shards_are_compared_along_replicas() -> None:
    found = run_ranks(hybrid_fsdp, 4)
    shards, steps = (("replicate",), 16), (("replicate", "shard"), 4)
    name = "1.weight"
    assert found == [(20, (shards, steps), (), name, ("replicate",), ((1,), (3,)))] * 4
