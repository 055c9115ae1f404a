"""Arguments that all collectives share, over gloo ranks, with order-sensitive data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan import (
    Contract,
    deterministic_all_gather,
    deterministic_all_gather_coalesced,
    deterministic_all_reduce,
    deterministic_all_reduce_coalesced,
    deterministic_reduce_scatter,
    deterministic_reduce_scatter_coalesced,
)
from meshplan.collectives import Work, _reduction, functional
from meshplan.definition import reduce_leaves
from meshplan.errors import ContractTypeError, GroupStateError, SignatureMismatchError
from meshplan.flatten._create import create_members_only
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.marks import full
from tests.processes import run_ranks

pytestmark = pytest.mark.processes

RANKS = 4
RANK_ORDER = Contract(order="rank")
ops = dist.ReduceOp
OPS = {"sum": ops.SUM, "avg": ops.AVG, "max": ops.MAX, "min": ops.MIN, "product": ops.PRODUCT}
UNEVEN = [5, 0, 3, 1]


def leaf(rank: int, shape: Sequence[int] = (9, 4), dtype: torch.dtype = torch.float32) -> Tensor:
    return draw(torch.Size(shape).numel(), rank, dtype).clone().view(*shape)


@cache
def draw(numel: int, rank: int, dtype: torch.dtype) -> Tensor:
    return order_sensitive(numel, rank=rank, world_size=RANKS, dtype=dtype, specials=True)


def total(
    ranks: Sequence[int] = range(RANKS),
    op: str = "sum",
    contract: Contract = RANK_ORDER,
    shape: Sequence[int] = (9, 4),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    leaves = [leaf(rank, shape, dtype) for rank in ranks]
    return reduce_leaves(leaves, op, (len(leaves),), contract)  # type: ignore[arg-type]


def shard(tensor: Tensor, position: int, sizes: Sequence[int], dim: int = 0) -> Tensor:
    return tensor.narrow(dim, sum(sizes[:position]), sizes[position]).contiguous()


def read_result(found: Any) -> Any:
    return found.result() if isinstance(found, Work) else found


def test_data_depends_on_the_order() -> None:
    for other in (total(contract=Contract()), total(range(RANKS)[::-1])):
        assert not torch.equal(total().view(torch.int32), other.view(torch.int32))


def group_forms(mesh: DeviceMesh, axis: int) -> list[Any]:
    name = ("dp", "tp")[axis]
    return [mesh.get_group(name), mesh[name], (mesh, name), (mesh, axis)]


def test_group_may_be_a_process_group_a_mesh_or_an_axis() -> None:
    def ranks(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        count = 0
        for axis, members in (
            (0, (rank % 2, rank % 2 + 2)),
            (1, (rank // 2 * 2, rank // 2 * 2 + 1)),
        ):
            position, wanted = members.index(rank), total(members)
            mine, both = shard(wanted, position, [5, 4]), [leaf(r) for r in members]
            for group in group_forms(mesh, axis):
                how: dict[str, Any] = {"group": group, "contract": RANK_ORDER}
                pair = [leaf(rank), leaf(rank)]
                for found in (
                    deterministic_all_reduce(leaf(rank), **how),
                    functional.all_reduce(leaf(rank), **how),
                    *read_result(deterministic_all_reduce_coalesced(pair, **how)),
                ):
                    assert_bitwise_equal(found, wanted)
                for found in (
                    deterministic_reduce_scatter(leaf(rank), **how),
                    functional.reduce_scatter(leaf(rank), **how),
                    *read_result(deterministic_reduce_scatter_coalesced([leaf(rank)] * 2, **how)),
                ):
                    assert_bitwise_equal(found, mine)
                for found in (
                    deterministic_all_gather(leaf(rank), **how),
                    functional.all_gather(leaf(rank), **how),
                    *read_result(deterministic_all_gather_coalesced([leaf(rank)] * 2, **how)),
                ):
                    assert_bitwise_equal(found, torch.cat(both))
                    count += 1
        return count

    assert run_ranks(ranks, RANKS) == [32] * RANKS


def test_leaves_follow_the_order_of_the_group() -> None:
    """Not that of global ranks. A rank outside of the group gets an error."""

    def ranks(rank: int) -> None:
        for order in ([2, 0, 3, 1], [3, 1]):
            mesh, plain = DeviceMesh("cpu", order), dist.new_group(order)
            if rank not in order:
                for group in (mesh, (mesh, 0), plain):
                    with pytest.raises(GroupStateError, match=f"rank {rank} is not in the group"):
                        deterministic_all_reduce(torch.ones(2), group=group)
                continue
            created = create_members_only(order, "gloo", "cpu", f"group of {order}", f"{order}")
            # torch sorts the ranks of the others.
            for group, members in ((mesh, sorted(order)), (plain, sorted(order)), (created, order)):
                for path in PATHS[1:]:
                    how: dict[str, Any] = {"path": path, "contract": RANK_ORDER, "group": group}
                    assert_bitwise_equal(
                        deterministic_all_reduce(leaf(rank), **how), total(members)
                    )
                gathered = deterministic_all_gather(leaf(rank), group=group)
                assert_bitwise_equal(gathered, torch.cat([leaf(r) for r in members]))  # type: ignore[arg-type]

    run_ranks(ranks, RANKS)


def test_torch_reduce_ops_match_their_names() -> None:
    def ranks(rank: int) -> None:
        for name, op in OPS.items():
            for path in ("native", "exchange", "reference", "auto"):
                how: dict[str, Any] = {"path": path}
                if path != "native":
                    how["contract"] = RANK_ORDER
                calls: list[Callable[[Any], Any]] = [
                    lambda op, how=how: deterministic_all_reduce(leaf(rank), op=op, **how),
                    lambda op, how=how: functional.all_reduce(leaf(rank), op=op, **how),
                    lambda op, how=how: deterministic_reduce_scatter(leaf(rank), op=op, **how),
                    lambda op, how=how: functional.reduce_scatter(leaf(rank), op=op, **how),
                ]
                for call in calls:
                    assert_bitwise_equal(call(op), call(name), f"{name} {path}")
                for call in calls[:2] if path != "native" else ():
                    assert_bitwise_equal(call(op), total(op=name), f"{name} {path}")

    run_ranks(ranks, RANKS)


PATHS = ("native", "reference", "auto", "exchange", "one_shot", "two_shot")


@pytest.mark.parametrize("async_op", [False, True])
def test_output_may_overlap_the_input(async_op: bool) -> None:
    """All of it, a part of it, and a part of a larger tensor that it overlaps."""

    def ranks(rank: int) -> None:
        for path in PATHS:
            how: dict[str, Any] = {"path": path, "async_op": async_op}
            whole = leaf(rank)
            deterministic_all_reduce(whole, path=path)
            given, out = leaf(rank), torch.empty(9, 4)
            assert read_result(deterministic_all_reduce(given, out=out, **how)) is out
            assert_bitwise_equal(out, whole, path)
            assert_bitwise_equal(given, leaf(rank), "a separate input")
            assert read_result(deterministic_all_reduce(given, out=given, **how)) is given
            assert_bitwise_equal(given, whole, path)
            # The output is four rows further on in the same memory.
            base = torch.cat([leaf(rank), torch.zeros(4, 4)])
            given, out = base[:9], base[4:]
            assert read_result(deterministic_all_reduce(given, out=out, **how)) is out
            assert_bitwise_equal(out, whole, path)
            assert_bitwise_equal(base[:4], leaf(rank)[:4], "outside the output")

            given = leaf(rank)
            out = given.narrow(0, sum(UNEVEN[:rank]), UNEVEN[rank])
            read_result(deterministic_reduce_scatter(given, sizes=UNEVEN, out=out, **how))
            assert_bitwise_equal(out, shard(whole, rank, UNEVEN), path)
            # Columns, which are not contiguous.
            columns = torch.zeros(UNEVEN[rank], 8)
            strided = columns[:, ::2]
            read_result(deterministic_reduce_scatter(leaf(rank), sizes=UNEVEN, out=strided, **how))
            assert_bitwise_equal(strided.contiguous(), shard(whole, rank, UNEVEN), path)
            assert not columns[:, 1::2].any()

            buffer = leaf(0).clone() if rank == 0 else torch.zeros(9, 4)
            mine = buffer.narrow(0, sum(UNEVEN[:rank]), UNEVEN[rank])
            mine.copy_(shard(whole, rank, UNEVEN))
            found = read_result(deterministic_all_gather(mine, sizes=UNEVEN, out=buffer, **how))
            assert found is buffer
            assert_bitwise_equal(buffer, whole, path)

    run_ranks(ranks, RANKS)


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int32)
SHAPES = ((9, 4), (9,), (9, 0), (9, 3, 2))


def mixed(rank: int) -> list[Tensor]:
    listed = [leaf(rank, shape, dtype) for shape in SHAPES for dtype in DTYPES]
    return [*listed, leaf(rank, (9, 8))[:, ::2], leaf(rank, (4, 9)).t()]


@pytest.mark.parametrize("bucket_bytes", [1 << 8, full(32 << 20)])
def test_coalesced_reductions_have_the_bits_of_single_ones(bucket_bytes: int) -> None:
    """Mixed dtypes, uneven sizes, empty and strided tensors, few and many buckets."""

    def ranks(rank: int) -> None:
        _reduction._BUCKET_BYTES = bucket_bytes
        tensors = mixed(rank)
        sizes = [(UNEVEN, None)[i % 3 == 2] for i in range(len(tensors))]
        for path in PATHS:
            how: dict[str, Any] = {"path": path, "op": "sum"}
            alone = [
                deterministic_reduce_scatter(tensor, sizes=split, **how)
                for tensor, split in zip(tensors, sizes, strict=True)
            ]
            scalar = torch.tensor(float(rank))
            wholes = [
                deterministic_all_reduce(one, **how) for one in (*mixed(rank), scalar.clone())
            ]
            for async_op in (False, True):
                found = read_result(
                    deterministic_reduce_scatter_coalesced(
                        tensors, sizes=sizes, async_op=async_op, **how
                    )
                )
                for i, (one, other) in enumerate(zip(found, alone, strict=True)):
                    assert one.is_contiguous()
                    assert_bitwise_equal(one, other, f"{path}, tensor {i}")
                given = [*mixed(rank), scalar.clone()]
                listed = read_result(
                    deterministic_all_reduce_coalesced(given, async_op=async_op, **how)
                )
                for one, same, whole in zip(listed, given, wholes, strict=True):
                    assert one is same
                    assert_bitwise_equal(one.contiguous(), whole.contiguous(), path)  # type: ignore[union-attr]
            outs = [torch.empty_like(one) for one in found]
            written = deterministic_reduce_scatter_coalesced(tensors, sizes=sizes, out=outs, **how)
            assert all(one is out for one, out in zip(written, outs, strict=True))  # type: ignore[arg-type]
            for one, other in zip(outs, alone, strict=True):
                assert_bitwise_equal(one, other, path)  # type: ignore[arg-type]
        for one, other in zip(tensors, mixed(rank), strict=True):
            assert_bitwise_equal(one.contiguous(), other.contiguous(), "the summand")
        for function in (deterministic_all_reduce_coalesced, deterministic_all_gather_coalesced):
            assert function([]) == []

    run_ranks(ranks, RANKS)


@pytest.mark.parametrize("bucket_bytes", [1 << 8, full(32 << 20)])
def test_coalesced_gathers_have_the_bits_of_single_ones(bucket_bytes: int) -> None:
    def ranks(rank: int) -> None:
        _reduction._BUCKET_BYTES = bucket_bytes
        wholes = [*mixed(0), torch.arange(9) % 2 == 0, leaf(1, (9, 2)).to(torch.float8_e5m2)]
        wholes.append(torch.view_as_complex(leaf(2, (9, 2))).conj())
        parts = [shard(whole, rank, UNEVEN) for whole in wholes]
        parts[-1] = wholes[-1].narrow(0, sum(UNEVEN[:rank]), UNEVEN[rank])
        sizes = [UNEVEN] * len(parts)
        outs = [torch.empty_like(whole, memory_format=torch.contiguous_format) for whole in wholes]
        deterministic_all_gather_coalesced(parts, sizes=sizes, out=outs)
        now, later = (
            read_result(deterministic_all_gather_coalesced(parts, sizes=sizes, async_op=async_op))
            for async_op in (False, True)
        )
        for whole, part, *gathered in zip(wholes, parts, outs, now, later, strict=True):
            alone = deterministic_all_gather(part, sizes=UNEVEN)
            assert isinstance(alone, Tensor)
            for one in gathered:
                assert one.is_contiguous()
                assert one.dtype is whole.dtype
                assert torch.equal(one.view(torch.uint8), alone.view(torch.uint8))
        # Along another dimension, and of equal shards.
        turned = [leaf(rank, (3, 2, 5)), leaf(rank, (2, 2, 1), torch.int32)]
        for found, part in zip(
            read_result(deterministic_all_gather_coalesced(turned, dim=1)), turned, strict=True
        ):
            assert_bitwise_equal(found, deterministic_all_gather(part, dim=1))  # type: ignore[arg-type]

    run_ranks(ranks, RANKS)


def test_lists_of_different_lengths_are_refused() -> None:
    """At once and on every rank, also where a rank passes one tensor."""
    coalesced = (
        deterministic_all_reduce_coalesced,
        deterministic_reduce_scatter_coalesced,
        deterministic_all_gather_coalesced,
    )

    def ranks(rank: int) -> None:
        for function, async_op in itertools.product(coalesced, (False, True)):
            for lengths in ((1, 2), (2, 3)):
                tensors = [leaf(rank, (4,)) for _ in range(lengths[rank == 2])]
                with pytest.raises(SignatureMismatchError):
                    read_result(function(tensors, async_op=async_op))
            read_result(function([leaf(rank, (4,))], async_op=async_op))

    run_ranks(ranks, RANKS)


def test_outputs_may_share_memory_with_other_inputs() -> None:
    """Every tensor is read before one is written, in whatever message it travels."""

    def ranks(rank: int) -> None:
        for bucket_bytes in (1 << 6, 32 << 20):
            _reduction._BUCKET_BYTES = bucket_bytes
            for path in ("native", "exchange"):
                tensors = [leaf(rank, (9, 4)), leaf(rank + 0, (9, 4)).flip(0).contiguous()]
                wanted = [tensor.clone() for tensor in tensors]
                for one in wanted:
                    deterministic_all_reduce(one, path=path)
                deterministic_all_reduce_coalesced(tensors, out=tensors[::-1], path=path)
                for one, other in zip(tensors[::-1], wanted, strict=True):
                    assert_bitwise_equal(one, other, path)

    run_ranks(ranks, RANKS)


def reduce_on_one_rank(given: Tensor, **how: Any) -> list[Tensor]:
    pair = [given, given.clone()]
    return [
        read_result(deterministic_reduce_scatter(given, **how)),
        read_result(deterministic_all_gather(given, **how)),
        *read_result(deterministic_reduce_scatter_coalesced(pair, **how)),
        *read_result(deterministic_all_gather_coalesced(pair, **how)),
    ]


def test_one_rank_gets_a_copy() -> None:
    """With a process group of one rank, with one axis of size one, and without any."""

    def ranks(rank: int) -> None:
        groups: list[Any] = [None]
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
            groups += [mesh, (mesh, "dp"), dist.group.WORLD]
        for group in groups:
            for given in (leaf(0), leaf(0).t()):
                copies = reduce_on_one_rank(given, group=group)
                copies += reduce_on_one_rank(given, group=group, async_op=True)
                copies += [
                    function(given, group=group)
                    for function in (
                        functional.all_reduce,
                        functional.reduce_scatter,
                        functional.all_gather,
                    )
                ]
                for copy in copies:
                    assert copy.is_contiguous()
                    assert copy.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
                    assert_bitwise_equal(copy, given.contiguous())
            out = torch.empty(9, 4)
            assert deterministic_all_reduce(leaf(0), out=out, group=group) is out
            assert_bitwise_equal(out, leaf(0))
            assert deterministic_reduce_scatter(leaf(1), out=out, group=group) is out
            assert_bitwise_equal(out, leaf(1))
            assert deterministic_all_gather(leaf(2), out=out, group=group) is out
            assert_bitwise_equal(out, leaf(2))
            # In place, one rank keeps what it has.
            given = leaf(0)
            assert deterministic_all_reduce(given, out=given, group=group) is given
            for op, path in itertools.product(OPS, (*PATHS, "one_shot", "two_shot")):
                assert deterministic_all_reduce(given, op=op, path=path, group=group) is given
                assert_bitwise_equal(given, leaf(0))
            work = deterministic_all_reduce(given, async_op=True, group=group)
            assert isinstance(work, Work)
            assert work.result() is given

    run_ranks(ranks, 1)
    ranks(0)


def pass_meta_tensors(rank: int) -> None:
    empty, mesh = torch.ones(4, device="meta"), init_device_mesh("cpu", (2,))
    over_backend = dist.new_group(backend="meshplan")

    def redistribute(local: Tensor) -> object:
        with meshplan.installed():
            return DTensor.from_local(local, mesh, [Partial()]).redistribute(mesh, [Replicate()])

    for door in (
        deterministic_all_reduce,
        deterministic_all_gather,
        functional.all_reduce,
        lambda local: meshplan.exact_norm([local]),
        redistribute,
        lambda local: dist.all_reduce(local, group=over_backend),
    ):
        with pytest.raises(ContractTypeError, match="is on the meta device"):
            door(empty)
        door(torch.ones(4))  # the group is usable


def test_meta_tensors_are_refused_before_anything_is_sent() -> None:
    run_ranks(pass_meta_tensors, 2)
