"""Reductions of the backend, of every operation and dtype, have the bits of the collectives."""

from __future__ import annotations

import itertools
import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

import meshplan
import meshplan.backend
from meshplan import Contract
from meshplan.backend import BackendOptions
from meshplan.definition import canonicalize_nans
from meshplan.errors import ContractTypeError
from tests.backend.native_calls import count_native_reductions
from tests.processes import run_ranks

pytestmark = pytest.mark.processes
RANKS = 3
GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "premul_sum_v1.json").read_text(encoding="utf-8")
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "product": ReduceOp.PRODUCT,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
}
CONTRACTS = (
    Contract(),
    Contract("rank"),
    Contract(accumulate="float64"),
    Contract(rounding="node"),
    Contract("exact"),
)


def summand(rank: int, dtype: torch.dtype, numel: int = 61) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_complex:
        real = [summand(rank + 9 * part, dtype.to_real(), numel) for part in range(2)]
        return torch.complex(*real)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (numel,), generator=generator).to(dtype)
    found = torch.randn(numel, generator=generator, dtype=torch.float64)
    found *= 2.0 ** torch.randint(-6, 6, (numel,), generator=generator)
    found[:4] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-42])
    return found.to(dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@cache
def expected(dtype: torch.dtype, op: str, contract: Contract) -> Tensor:
    leaves = [summand(rank, dtype) for rank in range(RANKS)]
    if not dtype.is_complex:
        return meshplan.reduce_leaves(leaves, op, [RANKS], contract)  # type: ignore[arg-type]
    pairs = [torch.view_as_real(leaf) for leaf in leaves]
    return torch.view_as_complex(meshplan.reduce_leaves(pairs, op, [RANKS], contract))  # type: ignore[arg-type]


def cases() -> list[tuple[torch.dtype, str]]:
    pairs = [*itertools.product(FLOATS, OPS), *itertools.product(COMPLEX, ("sum", "avg"))]
    return [*pairs, *((d, op) for d, op in itertools.product(INTEGERS, OPS) if op != "avg")]


def is_refused(dtype: torch.dtype, op: str, contract: Contract) -> bool:
    return contract.order == "exact" and op == "product" and dtype.is_floating_point


def compute_sums() -> None:
    """Once for all ranks, which are forked later."""
    for contract, case in itertools.product(CONTRACTS, cases()):
        if not is_refused(*case, contract):
            expected(*case, contract)


def refused_products(dtype: torch.dtype, rank: int, group: Any) -> list[str]:
    """The calls that do not raise, or change the tensor."""
    mine = summand(rank, dtype)
    x = mine.clone()
    calls = {
        "all_reduce": lambda: dist.all_reduce(x, ReduceOp.PRODUCT, group),
        "reduce": lambda: dist.reduce(x, 1, ReduceOp.PRODUCT, group),
        "reduce_scatter": lambda: dist.reduce_scatter(
            x[:20], list(x[:60].split(20)), ReduceOp.PRODUCT, group
        ),
    }
    wrong = []
    for name, call in calls.items():
        try:
            call()
            wrong.append(f"{dtype} product {name}")
        except ContractTypeError as error:
            text = f"order='exact' defines no product of {dtype}"
            wrong += [str(error)] * (error.code != "MP412" or text not in str(error))
    return wrong + [f"{dtype} changed"] * (bits(x) != bits(mine))


def reduce_everything(contract: Contract, rank: int) -> list[str]:
    group = dist.new_group(backend="meshplan", pg_options=BackendOptions(contract))
    wrong = []
    for dtype, op in cases():
        if is_refused(dtype, op, contract):
            wrong += refused_products(dtype, rank, group)
            continue
        whole, mine = expected(dtype, op, contract), summand(rank, dtype)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        x = mine.clone()
        dist.all_reduce(x, OPS[op], group)
        found["all_reduce"] = (x, whole)
        x = mine.clone()
        dist.reduce(x, 1, OPS[op], group)
        found["reduce"] = (x, whole if rank == 1 else mine)
        lengths = [30, 0, 31]
        blocks = list(mine.clone().split(lengths))
        x = mine.new_empty(lengths[rank])
        dist.reduce_scatter(x, blocks, OPS[op], group)
        found["uneven"] = (x, whole.split(lengths)[rank])
        # Strided: every second element of a wider tensor.
        wide = mine.new_zeros(2 * mine.numel())
        wide[::2] = mine
        dist.all_reduce(wide[::2], OPS[op], group)
        found["strided"] = (wide[::2], whole)
        wrong += [f"{dtype} {op} {name}" for name, (a, b) in found.items() if bits(a) != bits(b)]
    return wrong


def test_every_operation_and_dtype_has_the_bits_of_the_contract() -> None:
    def ranks(rank: int) -> dict[str, list[str]]:
        return {one.id: reduce_everything(one, rank) for one in CONTRACTS}

    compute_sums()
    right: dict[str, list[str]] = {one.id: [] for one in CONTRACTS}
    assert run_ranks(ranks, RANKS, backend="meshplan") == [right] * RANKS


def premultiplied(dtype: torch.dtype, factors: list[float], contract: Contract) -> Tensor:
    """The definition, in operations of torch."""
    real = dtype.to_real() if dtype.is_complex else dtype
    wide = getattr(torch, contract.accumulator(str(real).removeprefix("torch.")))
    leaves = []
    for rank in range(RANKS):
        leaf = summand(rank, dtype)
        leaf = torch.view_as_real(leaf) if dtype.is_complex else leaf
        scaled = leaf.to(wide) * torch.tensor(factors[rank], dtype=torch.float64).to(wide)
        leaves.append(scaled.to(real) if contract.rounding == "node" else scaled)
    total = canonicalize_nans(meshplan.reduce_leaves(leaves, "sum", [RANKS], contract).to(real))
    return torch.view_as_complex(total) if dtype.is_complex else total


def premultiply(rank: int) -> list[str]:
    from torch._C._distributed_c10d import _make_nccl_premul_sum

    wrong, factors = [], [1 / 3, -0.7, 1e-3]
    for contract in CONTRACTS:
        group = dist.new_group(backend="meshplan", pg_options=BackendOptions(contract))
        for dtype in (*FLOATS, *COMPLEX):
            op = _make_nccl_premul_sum(factors[rank])
            whole = premultiplied(dtype, factors, contract)
            x = summand(rank, dtype)
            group.allreduce([x], _options(op)).wait()
            wrong += [f"{contract.id} {dtype}"] * (bits(x) != bits(whole))
            shard = x.new_empty(20)
            given = dist.ReduceScatterOptions()
            given.reduceOp = op
            group.reduce_scatter_single(shard, summand(rank, dtype)[:60].clone(), given).wait()
            mine = whole[:60].chunk(RANKS)[rank]
            wrong += [f"{contract.id} {dtype} shard"] * (bits(shard) != bits(mine))
    return wrong


def _options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def test_premul_sum_multiplies_in_the_accumulator_and_then_adds() -> None:
    assert run_ranks(premultiply, RANKS, backend="meshplan") == [[]] * RANKS


def premultiply_golden(rank: int) -> list[str]:
    from torch._C._distributed_c10d import _make_nccl_premul_sum

    wrong, groups = [], {}
    for number, case in enumerate(GOLDEN["cases"]):
        (size,), words = case["shape"], (case["order"], case["accumulate"], case["rounding"])
        if (size, words) not in groups:
            groups[size, words] = dist.new_group(
                list(range(size)), backend="meshplan", pg_options=BackendOptions(Contract(*words))
            )
        if rank >= size:
            continue
        (factor,) = struct.unpack("<d", bytes.fromhex(case["factors"][rank]))
        x = torch.frombuffer(
            bytearray.fromhex(case["inputs"][rank]), dtype=getattr(torch, case["dtype"])
        )
        groups[size, words].allreduce([x], _options(_make_nccl_premul_sum(factor))).wait()
        wrong += [f"case {number}"] * (bits(x).hex() != case["output"])
    return wrong


def test_premul_sum_has_the_bits_of_the_golden_file() -> None:
    assert (GOLDEN["contract"], len(GOLDEN["cases"])) == ("v1", 60)
    assert run_ranks(premultiply_golden, 4, backend="meshplan") == [[]] * 4


def reduce_bits(rank: int) -> list[Any]:
    """What the contract does not order goes to the inner backend, and is recorded."""
    x = torch.tensor([1 << rank, 7], dtype=torch.int32)
    meshplan.clear_report()
    with count_native_reductions() as counts:
        for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
            y = x.clone()
            dist.all_reduce(y, op)
            assert (
                y.tolist()
                == {
                    ReduceOp.BAND: [0, 7],
                    ReduceOp.BOR: [7, 7],
                    ReduceOp.BXOR: [7, 7],
                }[op]
            )
        out = torch.empty(1, dtype=torch.int32)
        dist.reduce_scatter_single(out, torch.full((RANKS,), 1 << rank).int(), ReduceOp.BOR)
        assert out.item() == 7
    ran = [(entry["ran"], entry["fallback"]) for entry in meshplan.report().entries]
    return [dict(counts), ran]


def test_operations_without_an_order_run_on_the_inner_backend() -> None:
    for counts, ran in run_ranks(reduce_bits, RANKS, backend="meshplan"):
        assert counts == {"allreduce_": 3, "_reduce_scatter_base_": 1}
        assert set(ran) == {("native", False)}


def reduce_sparse(rank: int) -> list[Any]:
    x = torch.eye(3)[rank : rank + 1].to_sparse()
    meshplan.clear_report()
    dist.all_reduce(x)
    strict = dist.new_group(backend="meshplan", pg_options=BackendOptions(strict=True))
    try:
        dist.all_reduce(torch.eye(3).to_sparse(), group=strict)
    except meshplan.MeshplanError as error:
        return [x.to_dense().tolist(), meshplan.report().entries[0]["fallback"], error.code]
    return []


def test_a_reduction_outside_the_contract_is_a_fallback_that_strict_refuses() -> None:
    for found in run_ranks(reduce_sparse, RANKS, backend="meshplan"):
        assert found == [[[1.0, 1.0, 1.0]], True, "MP701"]


def reduce_alone(_: int) -> list[Any]:
    x = torch.tensor([1.5, float("nan")])
    dist.all_reduce(x)
    out = torch.empty(2)
    dist.reduce_scatter_single(out, x)
    dist.reduce(x, 0)
    return [bits(x) == bits(out), x[0].item()]


def test_a_group_of_one_rank_keeps_the_tensor() -> None:
    assert run_ranks(reduce_alone, 1, backend="meshplan") == [[True, 1.5]]
