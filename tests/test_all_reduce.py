"""``deterministic_all_reduce`` over real processes: bits, orders, groups, no-ops, failures."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor

from meshplan import (
    Contract,
    deterministic_all_reduce,
    deterministic_all_reduce_coalesced,
)
from meshplan.collectives import Work, _reduction
from meshplan.errors import GroupStateError
from meshplan.testing import assert_bitwise_equal, order_sensitive, reference_reduce_tensors
from tests.processes import run_ranks, shorten
from tests.refusals import refusal

pytestmark = pytest.mark.processes

RANKS = 5
CONTRACT_PATHS = ("auto", "one_shot", "two_shot", "exchange")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8)
OPS = ("sum", "avg", "max", "min", "product")


def leaf(rank: int, dtype: torch.dtype = torch.float32, numel: int = 101, n: int = RANKS) -> Tensor:
    return order_sensitive(numel, rank=rank, world_size=n, dtype=dtype, specials=True)


def expected(
    op: str,
    contract: Contract,
    dtype: torch.dtype = torch.float32,
    numel: int = 101,
    n: int = RANKS,
) -> Tensor:
    """The result by the oracle, which shares no arithmetic with the tested code."""
    leaves = [leaf(rank, dtype, numel, n) for rank in range(n)]
    return reference_reduce_tensors(leaves, op, (n,), contract)  # type: ignore[arg-type]


def test_every_path_op_and_dtype_has_the_contract_bits() -> None:
    """Every contract mode gives the contract's bits, whatever op and dtype.

    The result is written in place and the same object is returned. Sums are covered too.
    """

    # By the oracle, which takes long: once for all ranks.
    cases = [
        (op, contract, dtype, expected(op, contract, dtype, 33))
        for dtype in DTYPES
        for op in OPS
        if op != "avg" or dtype.is_floating_point
        for contract in (Contract(), Contract(rounding="node"))
    ]

    def ranks(rank: int) -> int:
        count = 0
        for op, contract, dtype, wanted in cases:
            mine = leaf(rank, dtype, 33)
            for path in CONTRACT_PATHS:
                tensor = mine.clone()
                config: dict[str, Any] = {"path": path, "op": op, "contract": contract}
                assert deterministic_all_reduce(tensor, **config) is tensor
                assert_bitwise_equal(tensor, wanted, f"{path} {op} {dtype} {contract}")
                count += 1
        return count

    assert run_ranks(ranks, RANKS) == [224] * RANKS


def test_complex_sums_are_sums_of_real_and_imaginary_parts() -> None:
    leaves = [torch.complex(leaf(r, n=3), leaf(2 - r, n=3)) for r in range(3)]
    real = [torch.view_as_real(x) for x in leaves]
    cases = {op: reference_reduce_tensors(real, op, (3,), Contract()) for op in ("sum", "avg")}  # type: ignore[arg-type]

    def ranks(rank: int) -> bool:
        for path in ("reference", *CONTRACT_PATHS):
            for op, wanted in cases.items():
                tensor = leaves[rank].clone()
                config: dict[str, Any] = {"path": path, "op": op}  # type: ignore[arg-type]
                deterministic_all_reduce(tensor, **config)
                assert_bitwise_equal(torch.view_as_real(tensor), wanted)
        return True

    assert all(run_ranks(ranks, 3))


def test_path_native_is_the_backends_all_reduce() -> None:
    """Torch's own, but the flag is honoured and strides are right."""

    def ranks(rank: int) -> bool:
        plain = leaf(rank)
        dist.all_reduce(plain)
        tensor = leaf(rank)
        assert deterministic_all_reduce(tensor, path="native") is tensor
        assert_bitwise_equal(tensor, plain)

        half = leaf(rank, torch.bfloat16)
        wide = half.float()
        dist.all_reduce(wide)
        kept = half.clone()
        deterministic_all_reduce(half, path="native")
        assert_bitwise_equal(half, wide.bfloat16())
        dist.all_reduce(kept)
        narrow = leaf(rank, torch.bfloat16)
        deterministic_all_reduce(narrow, path="native", contract=Contract(rounding="node"))
        assert_bitwise_equal(narrow, kept)

        mean = leaf(rank, torch.bfloat16)
        deterministic_all_reduce(mean, path="native", op="avg")
        assert_bitwise_equal(mean, (wide / RANKS).bfloat16())
        for op, torch_op in (("max", dist.ReduceOp.MAX), ("product", dist.ReduceOp.PRODUCT)):
            one = torch.full((3,), rank + 1.0)
            two = one.clone()
            deterministic_all_reduce(one, path="native", op=op)  # type: ignore[arg-type]
            dist.all_reduce(two, torch_op)
            assert_bitwise_equal(one, two)
        numbers = torch.full((3,), rank + 1, dtype=torch.int64)
        deterministic_all_reduce(numbers, path="native")
        assert numbers.tolist() == [15] * 3
        return True

    assert all(run_ranks(ranks, RANKS))


def test_strided_tensors_are_reduced_in_place() -> None:
    """Columns of a larger tensor: right in every mode, and the elements between them are untouched."""

    def ranks(rank: int) -> bool:
        for path in ("native", "reference", *CONTRACT_PATHS):
            config: dict[str, Any] = {"path": path}  # type: ignore[arg-type]
            base = leaf(rank, numel=240).view(12, 20).clone()
            before = base.clone()
            view = base[:, ::2]
            assert not view.is_contiguous()
            assert deterministic_all_reduce(view, **config) is view
            packed = before[:, ::2].contiguous()
            deterministic_all_reduce(packed, **config)
            assert_bitwise_equal(view.contiguous(), packed, path)
            assert_bitwise_equal(base[:, 1::2].contiguous(), before[:, 1::2].contiguous(), path)
            if path == "native":
                # Whose order is another one at another place of the message.
                continue
            turned = before.clone().t()
            deterministic_all_reduce(turned, **config)
            assert_bitwise_equal(turned[::2].t().contiguous(), packed, path)
        return True

    assert all(run_ranks(ranks, RANKS))


def test_conjugated_and_negated_views_are_reduced() -> None:
    """The result is written through conjugated and negated views."""

    def ranks(rank: int) -> bool:
        for path in ("native", "reference", "exchange"):
            config: dict[str, Any] = {"path": path}  # type: ignore[arg-type]
            base = torch.complex(leaf(rank, n=3), leaf(2 - rank, n=3))
            plain = base.conj().resolve_conj()
            deterministic_all_reduce(base.conj(), **config)
            deterministic_all_reduce(plain, **config)
            assert_bitwise_equal(
                torch.view_as_real(base.conj().resolve_conj()), torch.view_as_real(plain), path
            )
        return True

    assert all(run_ranks(ranks, 3))


@pytest.mark.parametrize("size", [None, "1", "0", ""])
def test_single_process_needs_no_group(monkeypatch: pytest.MonkeyPatch, size: str | None) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    tensor = torch.arange(4.0)
    # The same object with the values unchanged, for a mean too.
    assert deterministic_all_reduce(tensor, op="avg") is tensor
    assert tensor.tolist() == [0, 1, 2, 3]
    listed = deterministic_all_reduce_coalesced([tensor], path="auto")
    assert isinstance(listed, list)
    assert listed[0] is tensor


class TestGroupErrors(TestCase):
    def test_missing_default_group_of_a_launched_job_is_refused(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", "4")
            said = refusal(GroupStateError, deterministic_all_reduce, torch.ones(1))
        self.assertExpectedInline(
            said,
            """MP503: WORLD_SIZE is 4 and there is no process group; call torch.distributed.init_process_group first""",
        )

    def test_torch_without_distributed_is_refused(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_reduction.dist, "is_available", lambda: False)
            said = refusal(RuntimeError, deterministic_all_reduce, torch.ones(1))
        self.assertExpectedInline(
            said,
            """MP503: torch.distributed is unavailable; install a torch that was built with it""",
        )


def test_many_asynchronous_works_complete_in_any_order() -> None:
    """Not refused, as the seed does: many works under way at once, waited for in any order."""

    def ranks(rank: int) -> bool:
        for path in ("native", "reference", *CONTRACT_PATHS):
            config: dict[str, Any] = {"path": path, "async_op": True}  # type: ignore[arg-type]
            tensors = [leaf(rank, numel=100 * n + 1) for n in range(8)]
            works = [deterministic_all_reduce(tensor, **config) for tensor in tensors]
            # Beside them the caller sends on the same group, in a place of its own on each rank.
            mine = torch.full((3,), float(rank))
            dist.all_reduce(mine)
            assert mine.tolist() == [10.0] * 3
            for work in reversed(works) if rank % 2 else works:
                assert isinstance(work, Work)
                assert isinstance(work, dist.Work)
                assert work.wait(timedelta(minutes=10)) is True
                assert work.is_completed()
                assert work.is_success()
                assert work.exception() is None
            for n, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
                assert work.result() is tensor  # type: ignore[union-attr]
                plain = leaf(rank, numel=100 * n + 1)
                deterministic_all_reduce(plain, path=path)  # type: ignore[arg-type]
                assert_bitwise_equal(tensor, plain, path)
        return True

    assert all(run_ranks(ranks, RANKS))


def test_asynchronous_call_returns_before_other_ranks_arrive() -> None:
    def ranks(rank: int) -> bool:
        store = dist.distributed_c10d._get_default_store()
        config: dict[str, Any] = {"path": "exchange", "async_op": True}
        deterministic_all_reduce(torch.ones(4), **config).wait()  # type: ignore[union-attr]
        tensor = torch.full((4,), float(rank))
        if rank == 1:
            # Only now does this rank know that the other has returned.
            store.wait(["returned"], timedelta(minutes=10))
        work = deterministic_all_reduce(tensor, **config)
        assert isinstance(work, Work)
        if rank == 0:
            assert not work.is_completed()
            with pytest.raises(GroupStateError, match=r"did not finish within 0\.05 s"):
                work.wait(timedelta(seconds=0.05))
            store.set("returned", "yes")
        work.wait()
        return tensor.tolist() == [1.0] * 4

    assert run_ranks(ranks, 2) == [True, True]


def test_failed_work_raises_in_wait() -> None:
    def ranks(rank: int) -> str:
        config: dict[str, Any] = {"path": "exchange", "async_op": True}
        deterministic_all_reduce(torch.ones(4), **config).wait()  # type: ignore[union-attr]
        if rank == 1:
            return ""
        shorten(1.0)
        tensor = torch.ones(4)
        work = deterministic_all_reduce(tensor, **config)
        assert isinstance(work, Work)
        with pytest.raises(RuntimeError) as error:
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), RuntimeError)
        # Nothing was written.
        assert tensor.tolist() == [1.0] * 4
        return type(error.value).__name__

    assert run_ranks(ranks, 2)[0]
