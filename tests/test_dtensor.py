"""DTensor with meshplan installed, over real gloo processes, bit for bit against the contract."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _redistribute,
    distribute_tensor,
)
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

import meshplan
from meshplan._chunks import chunk_sizes
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import (
    AxisNameError,
    ContractTypeError,
)
from meshplan.layout import Layout
from meshplan.replicas import digest
from meshplan.testing import (
    assert_bitwise_equal,
    assert_replicas_equal,
    nccl_model,
    order_sensitive,
)
from tests.marks import full
from tests.processes import run_ranks
from tests.refusals import refusal
from tests.traffic import Issued
from tests.traffic import counts as sent_counts

pytestmark = pytest.mark.processes

P, R, S = Partial(), Replicate(), Shard
EXCHANGE = {"all_to_all_single": 1, "all_gather_into_tensor": 1}
# The headers, and the backend's own all-reduce.
NATIVE = {"all_to_all_single": 1, "all_reduce": 1}
LEFT = {"all_reduce": 1}


def counts(function: Any) -> tuple[Any, dict[str, int]]:
    with Issued() as calls:
        result = function()
    return result, sent_counts(calls)


def local_shard(
    full: Tensor, placements: Sequence[Placement], where: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """The slice of ``full`` at mesh coordinate ``where``: each sharding axis splits it, outer first."""
    for placement, index, size in zip(placements, where, sizes, strict=True):
        if isinstance(placement, Shard):
            lengths = chunk_sizes(full.shape[placement.dim], size)
            full = full.narrow(placement.dim, sum(lengths[:index]), lengths[index])
    return full


@functools.cache
def draw(numel: int, rank: int, world_size: int, dtype: torch.dtype) -> Tensor:
    return order_sensitive(numel, rank=rank, world_size=world_size, dtype=dtype)


class Case:
    """A redistribution whose leaves every rank can compute."""

    def __init__(
        self,
        mesh: DeviceMesh,
        src: Sequence[Placement],
        dst: Sequence[Placement],
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        contract: Contract = Contract(),
    ) -> None:
        self.mesh, self.src, self.dst, self.shape = mesh, tuple(src), tuple(dst), tuple(shape)
        self.layout = Layout.from_mesh(mesh)
        sizes = self.layout.sizes
        self.partial = [i for i, p in enumerate(src) if p.is_partial()]
        where = mesh.get_coordinate()
        assert where is not None
        grid = [range(sizes[i]) for i in self.partial]
        coordinates = list(itertools.product(*grid))
        leaves = [
            draw(math.prod(shape), n, max(2, len(coordinates)), dtype).clone().view(self.shape)
            for n in range(len(coordinates))
        ]
        mine = leaves[coordinates.index(tuple(where[i] for i in self.partial))]
        self.local = local_shard(mine, self.src, where, sizes).contiguous()
        averaged = math.prod(sizes[i] for i in self.partial if src[i].reduce_op == "avg")  # type: ignore[attr-defined]
        op = src[self.partial[0]].reduce_op if self.partial else "sum"  # type: ignore[attr-defined]
        if op in ("sum", "avg"):
            op = "avg" if averaged > 1 else "sum"
        self.full = reduce_leaves(
            leaves,
            op,
            [sizes[i] for i in self.partial] or [1],
            contract,
            divisor=averaged if op == "avg" else None,
        )
        self.expected = local_shard(self.full, self.dst, where, sizes)

    def source(self) -> DTensor:
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            self.local,
            self.mesh,
            self.src,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=stride,
        )

    def check(self) -> dict[str, int]:
        found, sent = counts(lambda: self.source().redistribute(self.mesh, self.dst))
        what = f"{self.src} -> {self.dst} {self.shape} on {self.layout}"
        assert tuple(found.placements) == self.dst
        assert_bitwise_equal(found.to_local(), self.expected, what)
        return sent


def test_jagged_mesh_replicas_have_equal_bits() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 3, 1), mesh_dim_names=("ddp", "fsdp", "tp"))
        with meshplan.installed(path="exchange"):
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
                assert Case(mesh, (P, P, R), (R, R, R), (7, 5), dtype).check() == EXCHANGE
            for src in ((P, R, R), (R, P, R), (R, R, P), (P, R, P), (P, P, P)):
                sent = Case(mesh, src, (R, R, R), (7, 5)).check()
                assert sent == ({} if src == (R, R, P) else EXCHANGE)
            found = Case(mesh, (P, P, R), (R, R, R), (64,)).source().full_tensor()
            assert_replicas_equal(found)

    run_ranks(ranks, 6)


def test_installed_contract_path_and_operation_are_used() -> None:
    def ranks(rank: int) -> list[dict[str, int]]:
        mesh = DeviceMesh("cpu", [[0, 3, 1], [5, 2, 4]], mesh_dim_names=("a", "b"))
        found = []
        for order, path in itertools.product(("tree", "rank"), paths):
            contract = Contract(order=order)  # type: ignore[arg-type]
            with meshplan.installed(contract=contract, path=path):  # type: ignore[arg-type]
                found.append(Case(mesh, (P, P), (R, R), (41,), contract=contract).check())
        with meshplan.installed(path="exchange"):
            for operation in ("avg", "max", "min", "product"):
                other = Partial(operation)
                pairs = [(other, other), (other, R), (R, other)]
                if operation == "avg":
                    pairs += [(other, P), (P, other)]
                for src, dtype in itertools.product(pairs, (torch.float32, torch.bfloat16)):
                    assert Case(mesh, src, (R, R), (5, 3), dtype).check() == EXCHANGE
        return found

    paths = ("exchange", "reference", "one_shot", "two_shot", "auto")
    sends = [EXCHANGE, {"all_to_all_single": 1}, {}, {}, {}]
    assert run_ranks(ranks, 6) == [sends * 2] * 6


@pytest.mark.parametrize("policy", ["deterministic", "consistent", "fast"])
def test_bitwise_operations_fall_through_to_torch(policy: Any) -> None:
    """The contract has none of them, and no order can change them: no fallback, even if strict."""
    given = [[6, 12, 5, -1], [7, 3, 4, 1 << 40], [14, -8, 7, 255], [15, 2, 6, 0]]
    operations = {"band": operator.and_, "bor": operator.or_, "bxor": operator.xor}

    def ranks(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        with meshplan.installed(policy=policy, strict=True, debug=True, audit=1):
            for (name, operation), dst in itertools.product(
                operations.items(), [(R, R), (R, S(0)), (S(0), R)]
            ):
                other = Partial(name)
                for src in ((other, other), (other, R), (R, other)):
                    mine = [given[r] for r in members(rank, src)]
                    whole = torch.tensor(
                        [functools.reduce(operation, row) for row in zip(*mine, strict=True)]
                    )
                    local = torch.tensor(given[rank])
                    d = DTensor.from_local(local, mesh, src, run_check=False)
                    found = d.redistribute(mesh, dst)
                    for axis, placement in enumerate(dst):
                        if isinstance(placement, Shard):
                            whole = whole.chunk(2)[mesh.get_local_rank(axis)]
                    assert found.to_local().tolist() == whole.tolist(), (name, src, dst)
        assert not meshplan.report().fallbacks
        return str(meshplan.report())

    def members(rank: int, src: tuple[Placement, ...]) -> list[int]:
        """The ranks whose summands make the result of ``rank``."""
        return [
            r
            for r in range(4)
            if (src[0] is not R or r // 2 == rank // 2) and (src[1] is not R or r % 2 == rank % 2)
        ]

    report = run_ranks(ranks, 4)[0]
    if policy == "deterministic":
        assert "fell through to PyTorch: bits are combined one by one: every order" in report


def test_a_users_flattened_mesh_neither_corrupts_nor_changes_a_bit() -> None:
    def ranks(rank: int) -> None:
        even = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        shuffled = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
        descending = DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("a", "b"))
        with meshplan.installed():
            for mesh in (even, shuffled, descending):
                before = Case(mesh, (P, P), (R, R), (9,)).source().full_tensor()
                mesh["a", "b"]._flatten("flat")
                assert_bitwise_equal(
                    Case(mesh, (P, P), (R, R), (9,)).source().full_tensor(), before
                )
                # Along descending ranks torch's own scatter is right for even shards only.
                for rows in (4, 8) if mesh is descending else (1, 4, 5, 6, 7, 8):
                    whole = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
                    d = distribute_tensor(whole, mesh, (S(0), S(0)))
                    gathered, sent = counts(d.full_tensor)
                    assert_bitwise_equal(gathered, whole, f"{rows} rows on {mesh}")
                    # Where torch's merge is right, it stays.
                    merged = mesh is even and rows in (1, 4, 7, 8)
                    assert sent == {"all_gather_into_tensor": 1 if merged else 2}
                for rows in (1, 4, 5, 6, 7, 8):
                    Case(mesh, (P, P), (S(0), S(0)), (rows, 3)).check()
        assert list(even._flatten_mapping) == ["flat"]

    run_ranks(ranks, 4)


def test_norm_and_mask_placements_are_reduced() -> None:
    def ranks(rank: int) -> list[list[float]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        two, three = _NormPartial(2), _NormPartial(3)
        rows = []
        for flattened in (False, True):
            if flattened:
                mesh["a", "b"]._flatten("ab")
            row = []
            for src in ((two, two), (two, P), (P, two), (two, three)):
                summand = torch.tensor([float(rank + 1)])
                d = DTensor.from_local(summand, mesh, src, run_check=False)
                with meshplan.installed():
                    row.append(round(d.full_tensor().item(), 4))
            rows.append(row)
        weights = distribute_tensor(torch.arange(16.0).view(8, 2), mesh, (S(0), R))
        with meshplan.installed():
            picked = nn.functional.embedding(
                distribute_tensor(torch.tensor([0, 3, 5, 7]), mesh, (R, R)), weights
            ).full_tensor()
            rows.append(picked.flatten().tolist())
        return rows

    # As torch computes them one axis after the other; its own merge gives 5.4772 and 10.0.
    sequential = [5.4772, 7.6344, 7.2111, 4.947]
    rows = [0.0, 1.0, 6.0, 7.0, 10.0, 11.0, 14.0, 15.0]
    assert run_ranks(ranks, 4) == [[sequential, sequential, rows]] * 4


def test_clip_grad_norm_reduces_all_axes_at_once() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 3))
        parameter = nn.Parameter(distribute_tensor(torch.ones(12, 5), mesh, (S(0), S(1))))
        parameter.grad = distribute_tensor(
            order_sensitive(60, rank=0, world_size=2).view(12, 5).clamp(-1e3, 1e3),
            mesh,
            (S(0), S(1)),
        )
        with meshplan.installed(path="exchange"):
            norm, sent = counts(lambda: nn.utils.clip_grad_norm_([parameter], 1.0))
        assert sent == EXCHANGE
        assert norm.placements == (R, R)  # type: ignore[attr-defined]
        assert_replicas_equal(norm.to_local())  # type: ignore[attr-defined]
        with meshplan.installed(path="exchange"):
            pending = torch.linalg.vector_norm(parameter.grad)  # type: ignore[arg-type]
            assert pending.placements == (_NormPartial(2), _NormPartial(2))  # type: ignore[attr-defined]
            full, sent = counts(pending.full_tensor)  # type: ignore[attr-defined]
        assert sent == EXCHANGE
        assert_replicas_equal(full)

    run_ranks(ranks, 6)


def test_backward_and_double_backward_are_exact() -> None:
    def ranks(rank: int) -> None:
        mesh = DeviceMesh("cpu", [[0, 3, 1], [5, 2, 4]])
        leaves = [order_sensitive(20, rank=r, world_size=6) for r in range(6)]
        order = [0, 3, 1, 5, 2, 4]
        expected = reduce_leaves([leaves[r] for r in order], "sum", (2, 3))
        with meshplan.installed(strict=True):
            # The gradient of a replicated input is the sum over ranks of what each computed.
            x = torch.ones(20, requires_grad=True)
            d = DTensor.from_local(x, mesh, (R, R), run_check=False)
            out = d.to_local(grad_placements=(P, P))
            (out * leaves[rank]).sum().backward()
            assert_bitwise_equal(x.grad, expected)  # type: ignore[arg-type]

            # Through redistribute itself, twice.
            summand = leaves[rank].clone().requires_grad_()
            y = DTensor.from_local(summand, mesh, (P, P), run_check=False).redistribute(
                mesh, (R, R)
            )
            assert_bitwise_equal(y.to_local().detach(), expected)
            (g,) = torch.autograd.grad(y.to_local().pow(2).sum(), summand, create_graph=True)
            assert_bitwise_equal(g.detach(), 2 * expected)
            # Torch 2.11 cannot differentiate a redistribution twice.
            if hasattr(_redistribute, "NestedRedistribute"):
                g.sum().backward()
                assert summand.grad is not None

    run_ranks(ranks, 6)


def test_implicit_redistributions_of_tensor_parallel_layers_are_exact() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        case = Case(mesh, (P, P), (R, R), (6, 4))
        with meshplan.installed(path="exchange", strict=True):
            for _ in range(2):  # the second call goes through torch's fast path
                relu, sent = counts(lambda: torch.relu(case.source()))
                assert sent == EXCHANGE
                assert_bitwise_equal(relu.to_local(), torch.relu(case.full))
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            out = model(torch.ones(2, 4))
            assert_replicas_equal(out.detach())
            out.sum().backward()

    run_ranks(ranks, 6)


def test_async_results_are_waited_for_on_use() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        with meshplan.installed():
            for src in ((P, P), (Partial("avg"), P), (P, R)):
                case = Case(mesh, src, (R, R), (11, 3))
                found = case.source().redistribute(mesh, (R, R), async_op=True)
                assert isinstance(found._local_tensor, AsyncCollectiveTensor)
                assert_bitwise_equal(found.to_local() + 0.0, case.full + 0.0)
                # The result of one may go straight into the next.
                again = DTensor.from_local(
                    case.source().redistribute(mesh, (R, R), async_op=True).to_local(),
                    mesh,
                    (P, R),
                    run_check=False,
                ).full_tensor()
                assert_bitwise_equal(again, case.full + case.full)

    run_ranks(ranks, 4)


def test_fast_keeps_the_gradient_of_torch_collectives() -> None:
    """Beneath DTensor's own autograd, as the code of others calls it."""

    def ranks(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ddp", "fsdp"))
        local = torch.ones(3, requires_grad=True)
        src, dst = (
            DTensor.from_local(torch.ones(3), mesh, placements, run_check=False)._spec
            for placements in ((P, P), (R, R))
        )
        with meshplan.installed(policy="fast"):
            _redistribute.redistribute_local_tensor(local, src, dst).sum().backward()
        assert local.grad is not None
        return local.grad.tolist()

    assert run_ranks(ranks, 2) == [[2.0] * 3] * 2


def test_fast_is_one_all_reduce_of_the_backend() -> None:
    def ranks(rank: int) -> list[dict[str, int]]:
        mesh = init_device_mesh("cpu", (2, 3, 1))
        sends = []
        with meshplan.installed(policy="fast"):
            for src in ((P, P, P), (Partial("avg"), P, P), (P, R, R)):
                d = DTensor.from_local(torch.full((4,), rank + 1.0), mesh, src, run_check=False)
                found, sent = counts(lambda d=d: d.full_tensor())
                sends.append(sent)
                if src[1] is P:
                    assert found.tolist() == [21.0 if src[0] is P else 10.5] * 4
            entries = meshplan.report().entries
            assert [e["ran"] for e in entries] == ["native", "native"]
            assert meshplan.report().untouched == 1
            assert not meshplan.report().fallbacks
        return sends

    # What torch runs itself has no headers.
    assert run_ranks(ranks, 6) == [[NATIVE, NATIVE, LEFT]] * 6


@pytest.mark.parametrize("backend", ["nccl_model", full("meshplan")])
@pytest.mark.parametrize(("algorithm", "sizes"), [("ring", (2, 5)), full("tree", (3, 3))])
def test_policies_have_their_bits_under_the_nccl_model(
    algorithm: str, sizes: tuple[int, int], backend: str
) -> None:
    """Nodes of four ranks: the groups of an axis fall on them in different ways."""
    world_size = math.prod(sizes)

    def ranks(rank: int) -> dict[str, list[int]]:
        nccl_model.register()
        nccl_model.configure(domain_size=4, algorithm=algorithm)  # type: ignore[arg-type]
        inside = meshplan.BackendOptions(inner="nccl_model", path="exchange")
        dist.init_process_group(
            backend,
            rank=rank,
            world_size=world_size,
            init_method=f"file://{os.environ['MESHPLAN_TEST_STORE']}",
            pg_options=inside if backend == "meshplan" else None,
        )
        mesh = init_device_mesh("cpu", sizes)
        where = mesh.get_coordinate()
        assert where is not None

        def different() -> list[int]:
            found = []
            for src in ((P, P), (P, R), (R, P)):
                # Ranks along an axis that is not partial are replicas and hold the same summand.
                mine = sizes[1] * where[0] * (src[0] is P) + where[1] * (src[1] is P)
                summand = order_sensitive(500, rank=mine, world_size=world_size)
                d = DTensor.from_local(summand, mesh, src, run_check=False)
                digests = [""] * world_size
                dist.all_gather_object(digests, digest(d.full_tensor()))
                found.append(len(set(digests)))
            return found

        result = {"plain": different()}
        for policy in ("deterministic", "consistent", "fast"):
            with meshplan.installed(policy=policy):
                result[policy] = different()
        dist.barrier()
        dist.destroy_process_group()
        return result

    for found in run_ranks(ranks, world_size, init=False):
        if backend == "meshplan":
            # What the plugin leaves to the backend is under the contract, too.
            assert all(distinct == [1, 1, 1] for distinct in found.values())
            continue
        assert max(found["plain"]) > 1
        assert found["deterministic"] == found["consistent"] == [1, 1, 1]
        # One flattened all-reduce cures two axes; one axis stays as it was.
        assert found["fast"] == [1, *found["plain"][1:]]


def test_policy_is_set_by_call_and_by_axis() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 3, 1), mesh_dim_names=("dp", "tp", "one"))

        def sent(*src: Placement) -> dict[str, int]:
            d = DTensor.from_local(torch.ones(6), mesh, src, run_check=False)
            return counts(d.full_tensor)[1]

        with meshplan.installed(path="exchange"):
            assert sent(P, P, R) == EXCHANGE
            with meshplan.policy("fast"):
                assert sent(P, P, R) == NATIVE
                with meshplan.policy("consistent"):
                    assert sent(R, P, R) == EXCHANGE
                    assert sent(P, R, R) == LEFT  # two ranks add the same in any order
                assert sent(P, P, R) == NATIVE
            assert sent(P, P, R) == EXCHANGE
            with meshplan.policy({"tp": "fast"}):
                assert sent(R, P, P) == LEFT
                assert sent(P, R, R) == EXCHANGE
                # Together with a stricter axis the stricter policy holds.
                assert sent(P, P, R) == EXCHANGE
        with meshplan.installed(path="exchange", policy={"tp": "fast", "dp": "fast"}):
            assert sent(P, P, P) == NATIVE
            assert (
                counts(
                    lambda: DTensor.from_local(
                        torch.ones(6), mesh["tp"], (P,), run_check=False
                    ).full_tensor()
                )[1]
                == LEFT
            )
        with meshplan.installed(path="exchange", policy={"tpp": "fast"}):
            assert refusal(AxisNameError, sent, R, P, R) == (
                "MP112: no axis 'tpp' in the mesh, it has dp, tp, one (did you mean 'tp'?)"
            )

    run_ranks(ranks, 6)


def test_sub_meshes_and_outside_ranks_are_handled() -> None:
    def ranks(rank: int) -> None:
        few = DeviceMesh("cpu", [[4, 1], [0, 2]])
        cube = init_device_mesh("cpu", (2, 3, 1), mesh_dim_names=("a", "b", "c"))
        with meshplan.installed(path="exchange", strict=True):
            d = DTensor.from_local(torch.ones(3), few, (P, P), run_check=False)
            out = d.redistribute(few, (R, R))
            if rank in (4, 1, 0, 2):
                assert out.to_local().tolist() == [4.0] * 3
            assert Case(cube["a", "b"], (P, P), (R, R), (9,)).check() == EXCHANGE
            assert Case(cube["b"], (P,), (R,), (9,)).check() == EXCHANGE
            assert Case(cube["c"], (P,), (R,), (9,)).check() == {}

    run_ranks(ranks, 6)


class TestRefusals(TestCase):
    def test_mixed_partial_kinds_raise_the_error_of_torch(self) -> None:
        def ranks(rank: int) -> list[str]:
            mesh = init_device_mesh("cpu", (1, 2))
            messages = []
            for _ in range(2):
                d = DTensor.from_local(torch.ones(2), mesh, (P, P), run_check=False)
                # from_local refuses a mix as well; the executor must do so by itself.
                d._spec.placements = (P, Partial("max"))
                with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever torch raises
                    d.redistribute(mesh, (R, R))
                assert not isinstance(caught.value, meshplan.MeshplanError)
                messages.append(str(caught.value))
                meshplan.install()
            return messages

        plain, installed = run_ranks(ranks, 2)[0]
        assert plain == installed

    def test_average_of_integers_is_refused(self) -> None:
        def ranks(rank: int) -> str:
            mesh = init_device_mesh("cpu", (2, 2))
            d = DTensor.from_local(
                torch.ones(2, dtype=torch.int64), mesh, (Partial("avg"), P), run_check=False
            )
            with meshplan.installed(), pytest.raises(ContractTypeError) as caught:
                d.full_tensor()
            return str(caught.value)

        self.assertExpectedInline(
            run_ranks(ranks, 4)[0],
            """MP412: avg of torch.int64 has no exact result, the contract defines avg for floats only; reduce with 'sum' and divide as you need, or convert to a floating dtype first""",
        )
