"""The executable definition of the contract, against the golden file and the exact oracle."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshplan import kernel
from meshplan.contract import OPS, Contract, check_dtype
from meshplan.definition import (
    NAN_BITS,
    accumulator,
    combine_leaves,
    finish_partials,
    partial_dtype,
    reduce_leaves,
)
from meshplan.errors import ContractError, ContractStateError, ContractTypeError
from meshplan.testing import assert_bitwise_equal, bits, order_sensitive, reference_reduce_tensors
from tests.programs import capture
from tests.refusals import refusal

FOLDER = Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "contract_v1.json").read_text())
EXACT = json.loads((FOLDER / "exact_v1.json").read_text())
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SHAPES = ((1,), (2,), (3,), (5,), (8,), (2, 2), (2, 3), (3, 2), (5, 3), (2, 1, 3), (2, 3, 2))
CONTRACTS = [
    Contract(*words)
    for words in itertools.product(("tree", "rank"), ("wide", "float64"), ("once", "node"))
]


def case_name(case: dict) -> str:
    words = [case[key] for key in ("dtype", "op", "order", "accumulate", "rounding")]
    divisor = "" if case["divisor"] is None else f"-by{case['divisor']}"
    return "-".join(words) + "-" + "x".join(map(str, case["shape"])) + divisor


def group(world_size: int, numel: int, dtype: torch.dtype, **more: object) -> list[Tensor]:
    return [
        order_sensitive(numel, rank=rank, world_size=world_size, dtype=dtype, **more)
        for rank in range(world_size)
    ]


def single(*values: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.tensor([value], dtype=dtype) for value in values]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", GOLDEN["cases"] + EXACT["cases"], ids=case_name)
def test_definition_matches_the_golden_file(case: dict, device: str) -> None:
    dtype = getattr(torch, case["dtype"])

    def tensor(text: str) -> Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=dtype).to(device)

    contract = Contract(case["order"], case["accumulate"], case["rounding"])
    leaves = [tensor(text) for text in case["inputs"]]
    found = reduce_leaves(leaves, case["op"], case["shape"], contract, divisor=case["divisor"])
    assert_bitwise_equal(found, tensor(case["output"]))


def test_golden_file_names_this_contract() -> None:
    for file in (GOLDEN, EXACT):
        assert (file["contract"], file["byte_order"]) == ("v1", "little")
        assert len(set(map(case_name, file["cases"]))) == len(file["cases"])


@st.composite
def patterns(draw: st.DrawFn, dtype: torch.dtype) -> int:
    """A bit pattern: any at all, or (for floats) near a boundary where rules change."""
    width = 8 * dtype.itemsize
    if not dtype.is_floating_point:
        return draw(st.integers(-(1 << width - 1), (1 << width - 1) - 1))
    integer = SIGNED[dtype.itemsize]
    infinity, normal, one = (
        int(torch.tensor(value, dtype=dtype).view(integer))
        for value in (math.inf, torch.finfo(dtype).tiny, 1.0)
    )
    top = (1 << width - 1) - 1
    ranges = [(0, top), (infinity + 1, top), (0, normal), (one - 60, one + 60)]
    edges = st.sampled_from([0, 1, normal - 1, normal, infinity - 1, infinity, infinity + 1])
    magnitude = draw(st.one_of(edges, *(st.integers(low, high) for low, high in ranges)))
    return magnitude - (1 << width - 1) if draw(st.booleans()) else magnitude


@st.composite
def reductions(draw: st.DrawFn) -> tuple[list[Tensor], str, tuple[int, ...], Contract, int | None]:
    dtype = draw(st.sampled_from(FLOATS + INTEGERS))
    op = draw(st.sampled_from(OPS if dtype.is_floating_point else ("sum", "max", "min", "product")))
    shape = draw(st.sampled_from(SHAPES))
    numel = draw(st.integers(1, 4))
    row = st.lists(patterns(dtype), min_size=numel, max_size=numel)
    rows = draw(st.lists(row, min_size=math.prod(shape), max_size=math.prod(shape)))
    integer = torch.uint8 if dtype is torch.uint8 else SIGNED[dtype.itemsize]
    if dtype is torch.uint8:
        rows = [[value % 256 for value in row] for row in rows]
    leaves = [torch.tensor(row, dtype=integer).view(dtype) for row in rows]
    divisor = draw(st.none() | st.integers(1, 1 << 26)) if op == "avg" else None
    defined = op != "product" or not dtype.is_floating_point
    contracts = [*CONTRACTS, Contract("exact"), Contract("exact", "float64")][
        : None if defined else -2
    ]
    return leaves, op, shape, draw(st.sampled_from(contracts)), divisor


@pytest.mark.soak
@given(reduction=reductions())
def test_equals_the_oracle(reduction: tuple) -> None:
    *arguments, divisor = reduction
    found = reduce_leaves(*arguments, divisor=divisor)
    assert_bitwise_equal(found, reference_reduce_tensors(*arguments, divisor=divisor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_matches_the_oracle(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    same = torch.where(every.isnan(), torch.nan, every)
    for op in OPS:
        found = reduce_leaves([every], op, [1])
        assert_bitwise_equal(found, same, op)
        assert len(bits(found)[every.isnan()].unique()) == 1


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("op", ["sum", "product", "max"])
def test_bits_do_not_depend_on_position_or_size(op: str, dtype: torch.dtype) -> None:
    """G3: a slice reduced alone has the bits that it has inside the whole."""
    leaves = group(5, 96, dtype, specials=True)
    for contract in (Contract(), Contract("rank", rounding="node")):
        whole = reduce_leaves(leaves, op, [5], contract)
        for offset, length in itertools.product(range(18), (1, 2, 3, 7, 8, 15, 16, 17, 33, 64)):
            part = slice(offset, offset + length)
            alone = reduce_leaves([leaf[part] for leaf in leaves], op, [5], contract)
            moved = reduce_leaves([leaf[part].clone() for leaf in leaves], op, [5], contract)
            assert_bitwise_equal(alone, whole[part], f"offset {offset}")
            assert_bitwise_equal(moved, whole[part], f"offset {offset}, own memory")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_rounding_at_nodes_has_the_bits_of_a_fold_of_pairs(count: int, dtype: torch.dtype) -> None:
    """Whose partial results are in 16 bits, such as TBIK's."""
    leaves = group(count, 999, dtype)
    partials = leaves
    while len(partials) > 1:
        partials = [a + b for a, b in zip(partials[::2], partials[1::2], strict=True)]
    found = reduce_leaves(leaves, "sum", [count], Contract(rounding="node"))
    assert_bitwise_equal(found, partials[0])
    assert count == 2 or not torch.equal(bits(found), bits(reduce_leaves(leaves, "sum", [count])))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_strides_do_not_change_bits_and_the_result_is_contiguous(
    op: str, dtype: torch.dtype
) -> None:
    leaves = [leaf.reshape(4, 6) for leaf in group(5, 24, dtype, specials=True)]
    wanted = reduce_leaves(leaves, op, [5])
    turned = [leaf.t().contiguous().t() for leaf in leaves]
    spread = [torch.stack([leaf, leaf], -1)[..., 0] for leaf in leaves]
    for others in (turned, spread, [turned[0], *leaves[1:]]):
        found = reduce_leaves(others, op, [5])
        assert found.is_contiguous()
        assert_bitwise_equal(found, wanted)
    assert reduce_leaves(turned[:1], op, [1]).is_contiguous()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_0_dim_and_empty_tensors_are_reduced(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    leaves = [torch.full(shape, 2).to(dtype) for _ in range(3)]
    for op in ("sum", "max", "product"):
        found = reduce_leaves(leaves, op, [3])
        wanted = torch.full(shape, {"sum": 6, "max": 2, "product": 8}[op]).to(dtype)
        assert_bitwise_equal(found, wanted)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
@pytest.mark.parametrize("op", ["sum", "avg", "max", "product"])
@pytest.mark.parametrize("count", [1, 2])
def test_result_is_new_memory_and_leaves_stay(count: int, op: str, dtype: torch.dtype) -> None:
    if op == "avg" and not dtype.is_floating_point:
        op = "sum"
    leaves = group(count, 34, dtype, specials=True)
    before = [leaf.clone() for leaf in leaves]
    for contract in CONTRACTS:
        found = reduce_leaves(leaves, op, [count], contract)
        bits(found).fill_(1)
        for leaf, copy in zip(leaves, before, strict=True):
            assert_bitwise_equal(leaf, copy)


TREES = [contract for contract in CONTRACTS if contract.order == "tree"]


def in_two_parts(
    leaves: list[Tensor],
    op: str,
    outer: Sequence[int],
    inner: Sequence[int],
    contract: Contract,
    divisor: int | None = None,
) -> Tensor:
    """``reduce_leaves`` over the axes ``outer`` and then ``inner``, block by block."""
    size = math.prod(inner)
    blocks = [leaves[i : i + size] for i in range(0, len(leaves), size)]
    partials = [combine_leaves(block, op, inner, contract) for block in blocks]
    wanted = partial_dtype(op, leaves[0].dtype, contract)
    assert {partial.dtype for partial in partials} == {wanted}
    if op == "avg" and divisor is None:
        divisor = len(leaves)
    return finish_partials(partials, op, outer, contract, leaves[0].dtype, divisor)


def splits(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All splits of the tree of ``shape`` into blocks that are subtrees: (outer, inner sizes)."""
    found = []
    for k in range(len(shape) + 1):
        outer, inner = shape[:k], shape[k:]
        found.append((outer, inner))
        power = 2
        while outer and outer[-1] % power == 0:
            found.append(((*outer[:-1], outer[-1] // power), (power, *inner)))
            power *= 2
    return found


@pytest.mark.soak
@given(data=st.data())
def test_two_parts_of_any_bits_equal_flat(data: st.DataObject) -> None:
    leaves, op, shape, contract, divisor = data.draw(reductions())
    exact = op in ("max", "min") or not leaves[0].is_floating_point()
    if contract.order == "rank" and not exact:
        contract = Contract("tree", contract.accumulate, contract.rounding)
    outer, inner = data.draw(st.sampled_from(splits(shape)))
    found = in_two_parts(leaves, op, outer, inner, contract, divisor)
    assert_bitwise_equal(found, reduce_leaves(leaves, op, shape, contract, divisor=divisor))


def test_block_that_is_no_subtree_changes_bits() -> None:
    """What the tests above would show: blocks of 3 in an axis of 6, and a rounding in between."""
    leaves = group(6, 200, torch.float32)
    parts = in_two_parts(leaves, "sum", (2,), (3,), Contract())
    assert (bits(parts) != bits(reduce_leaves(leaves, "sum", [6]))).any()
    leaves = group(8, 200, torch.bfloat16)
    early = [reduce_leaves(leaves[i : i + 2], "sum", [2]) for i in range(0, 8, 2)]
    assert (bits(reduce_leaves(early, "sum", [4])) != bits(reduce_leaves(leaves, "sum", [8]))).any()


def test_partial_results_have_the_accumulator_dtype() -> None:
    wide, double, node = Contract(), Contract(accumulate="float64"), Contract(rounding="node")
    for contract, wanted in (
        (wide, [torch.float32] * 3 + [torch.float64]),
        (double, [torch.float64] + [torch.float32] * 2 + [torch.float64]),
        (node, list(FLOATS)),
    ):
        assert [partial_dtype("avg", dtype, contract) for dtype in FLOATS] == wanted
        assert [partial_dtype("max", dtype, contract) for dtype in FLOATS] == list(FLOATS)
        assert [partial_dtype("sum", dtype, contract) for dtype in INTEGERS] == list(INTEGERS)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_parts_are_new_contiguous_memory(op: str, dtype: torch.dtype) -> None:
    leaf = group(1, 24, dtype)[0].view(4, 6).t()
    for contract in TREES:
        partial = combine_leaves([leaf], op, [1], contract)
        finished = finish_partials([partial.t()], op, [1], contract, dtype)
        for found, given_ in ((partial, leaf), (finished, partial)):
            assert found.is_contiguous()
            assert found.untyped_storage().data_ptr() != given_.untyped_storage().data_ptr()
        assert_bitwise_equal(finished, reduce_leaves([leaf.t()], op, [1], contract))


def test_contract_compares_by_value() -> None:
    assert Contract() == Contract("tree", "wide", "once")
    assert len({contract.id for contract in CONTRACTS}) == len(set(CONTRACTS)) == 8
    assert Contract("rank", "float64", "node").id == "v1/rank/float64/node"
    wide, double = Contract(), Contract(accumulate="float64")
    assert [accumulator(wide, dtype) for dtype in FLOATS] == [torch.float32] * 3 + [torch.float64]
    assert accumulator(double, torch.float32) is torch.float64
    assert accumulator(double, torch.bfloat16) is torch.float32
    assert accumulator(double, torch.int8) is torch.int8


def test_invalid_arguments_are_refused() -> None:
    one = torch.ones(2)
    rows = []
    for error, act in (
        (ContractError, lambda: Contract("ring")),
        (ContractError, lambda: Contract(accumulate="float128")),
        (ContractError, lambda: Contract(rounding="twice")),
        (ContractError, lambda: check_dtype("mean", torch.float32)),
        (ContractTypeError, lambda: check_dtype("avg", torch.int32)),
        (ContractTypeError, lambda: check_dtype("sum", torch.complex64)),
        (ContractError, lambda: reduce_leaves([], "sum", [0])),
        (ContractError, lambda: reduce_leaves([one] * 5, "sum", [2, 3])),
        (ContractError, lambda: reduce_leaves([one] * 4, "sum", [-2, -2])),
        (ContractError, lambda: reduce_leaves([one], "sum", [1], divisor=2)),
        (ContractError, lambda: reduce_leaves([one], "avg", [1], divisor=0)),
        (ContractError, lambda: reduce_leaves([one], "avg", [1], divisor=2**63)),
        (ContractTypeError, lambda: reduce_leaves([one, one.double()], "sum", [2])),
        (ContractTypeError, lambda: reduce_leaves([one, one[:1]], "sum", [2])),
        (ContractTypeError, lambda: reduce_leaves([one, one.to("meta")], "sum", [2])),
    ):
        rows.append(refusal(error, act))
    assert_expected_inline(
        "\n".join(rows),
        """\
MP411: no order 'ring' in the contract; use 'tree' or 'rank' or 'exact'
MP411: no accumulate 'float128' in the contract; use 'wide' or 'float64'
MP411: no rounding 'twice' in the contract; use 'once' or 'node'
MP411: no reduction 'mean' in the contract; use one of sum, avg, max, min, product
MP412: avg of torch.int32 has no exact result, the contract defines avg for floats only; reduce with 'sum' and divide as you need, or convert to a floating dtype first
MP412: torch.complex64 is outside the contract; convert to one of float32, bfloat16, float16, float64, int8, int16, int32, int64, uint8
MP411: axes of sizes [0] need 0 leaves, got 0; pass one leaf per coordinate, row-major
MP411: axes of sizes [2, 3] need 6 leaves, got 5; pass one leaf per coordinate, row-major
MP411: axes of sizes [-2, -2] need 4 leaves, got 4; pass one leaf per coordinate, row-major
MP411: divisor=2 with op='sum'; a divisor is a whole number from 1 to 2**63 - 1 and needs op='avg'
MP411: divisor=0 with op='avg'; a divisor is a whole number from 1 to 2**63 - 1 and needs op='avg'
MP411: divisor=9223372036854775808 with op='avg'; a divisor is a whole number from 1 to 2**63 - 1 and needs op='avg'
MP412: leaf 1 is torch.float64 (2,) on cpu, leaf 0 is torch.float32 (2,) on cpu; all leaves must match
MP412: leaf 1 is torch.float32 (1,) on cpu, leaf 0 is torch.float32 (2,) on cpu; all leaves must match
MP412: leaf 1 is torch.float32 (2,) on meta, leaf 0 is torch.float32 (2,) on cpu; all leaves must match""",
    )


def test_invalid_parts_are_refused() -> None:
    one, by_rank = torch.ones(2), Contract("rank")
    half = one.bfloat16()
    rows = []
    for error, act in (
        (ContractError, lambda: combine_leaves([one, one], "sum", [2], by_rank)),
        (ContractError, lambda: finish_partials([one], "avg", [1], by_rank, one.dtype, 2)),
        (ContractError, lambda: combine_leaves([one], "sum", [2])),
        (ContractTypeError, lambda: combine_leaves([one.int()], "avg", [1])),
        (ContractTypeError, lambda: combine_leaves([one.bool()], "max", [1])),
        (ContractError, lambda: finish_partials([one], "avg", [1], Contract(), one.dtype)),
        (ContractError, lambda: finish_partials([one], "sum", [1], Contract(), one.dtype, 2)),
        (ContractTypeError, lambda: finish_partials([half], "sum", [1], Contract(), half.dtype)),
        (ContractTypeError, lambda: finish_partials([one], "max", [1], Contract(), half.dtype)),
    ):
        rows.append(refusal(error, act))
    assert_expected_inline(
        "\n".join(rows),
        """\
MP411: sum of torch.float32 in order='rank' is one fold from the first leaf to the last and has no parts; use order='tree' or order='exact', or pass all leaves to reduce_leaves
MP411: avg of torch.float32 in order='rank' is one fold from the first leaf to the last and has no parts; use order='tree' or order='exact', or pass all leaves to reduce_leaves
MP411: axes of sizes [2] need 2 leaves, got 1; pass one leaf per coordinate, row-major
MP412: avg of torch.int32 has no exact result, the contract defines avg for floats only; reduce with 'sum' and divide as you need, or convert to a floating dtype first
MP412: torch.bool is outside the contract; convert to one of float32, bfloat16, float16, float64, int8, int16, int32, int64, uint8
MP411: an average in parts needs a divisor, got 1 partials without one; pass divisor, the number of leaves
MP411: divisor=2 with op='sum'; a divisor is a whole number from 1 to 2**63 - 1 and needs op='avg'
MP412: partials of sum of torch.bfloat16 are torch.float32 under v1/tree/wide/once, got torch.bfloat16; pass the results of combine_leaves
MP412: partials of max of torch.bfloat16 are torch.bfloat16 under v1/tree/wide/once, got torch.float32; pass the results of combine_leaves""",
    )
    # In any order these are exact, and may be done in parts.
    numbers = [torch.tensor([100, -7], dtype=torch.int8)] * 6
    for op, leaves in (("sum", numbers), ("product", numbers), ("min", [one, -one] * 3)):
        found = in_two_parts(leaves, op, (2,), (3,), by_rank)
        assert_bitwise_equal(found, reduce_leaves(leaves, op, [6], by_rank))


def test_lazy_negation_and_gradients_of_leaves_are_handled() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j]).conj()
    for op in OPS:
        found = reduce_leaves([numbers.imag, numbers.imag], op, [2])
        plain = numbers.imag.clone()
        assert_bitwise_equal(found, reduce_leaves([plain, plain], op, [2]))
    wanting = torch.ones(2, requires_grad=True)
    for op in OPS:
        assert not reduce_leaves([wanting, wanting], op, [2]).requires_grad


FLUSHING_WORKERS = """
import torch
from meshplan import MeshplanError, reduce_leaves

torch.set_num_threads(2)
subnormal = torch.full((1 << 20,), 1, dtype=torch.int32).view(torch.float32)
# Worker threads are started by the first parallel computation, in the mode of that moment.
if torch.set_flush_denormal(True):
    _ = torch.ones(1 << 20) * 2
torch.set_flush_denormal(False)
try:
    result = reduce_leaves([subnormal, subnormal], "sum", [2])
    print(bool((result.view(torch.int32) == 2).all()))
except MeshplanError as error:
    print(error)
"""


@pytest.mark.full
def test_a_worker_thread_that_flushes_subnormals_is_refused() -> None:
    child = capture([sys.executable, "-c", FLUSHING_WORKERS], check=True)
    # Either torch starts its workers otherwise, and the bits are right, or it is said.
    assert child.stdout.strip() in (
        "True",
        "MP413: one of torch's worker threads flushes subnormal numbers to zero, the contract "
        "keeps them; call torch.set_flush_denormal(False) on every rank, before any computation",
    )


def test_a_thread_that_flushes_subnormals_is_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        with pytest.raises(ContractStateError) as caught:
            reduce_leaves(single(1e-45, 1e-45), "sum", [2])
        for dtype in FLOATS:
            tiny = single(1, 2, dtype=dtype)
            for reduce in (combine_leaves, kernel.reduce_leaves):
                with pytest.raises(ContractStateError):
                    reduce(tiny, "sum", [2])
            partials = [leaf.to(partial_dtype("sum", dtype, Contract())) for leaf in tiny]
            with pytest.raises(ContractStateError):
                finish_partials(partials, "sum", [2], Contract(), dtype)
        assert reduce_leaves(single(1, 2, dtype=torch.int32), "sum", [2]).item() == 3
    finally:
        torch.set_flush_denormal(False)
    assert_expected_inline(
        str(caught.value),
        """MP413: this thread flushes subnormal numbers to zero, the contract keeps them; call torch.set_flush_denormal(False) on every rank, before any computation""",
    )
    found = reduce_leaves(single(1e-45, 1e-45), "sum", [2])
    assert bits(found).item() == 2


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("leaves", [1, 3])
def test_nans_of_any_payload_become_the_canonical_one(leaves: int, op: Any) -> None:
    for dtype, (integer, canonical) in NAN_BITS.items():
        odd = torch.tensor([canonical + 3, -1], dtype=integer).view(dtype)
        others = [torch.ones(2, dtype=dtype)] * (leaves - 1)
        found = reduce_leaves([odd, *others], op, [leaves])
        assert found.view(integer).tolist() == [canonical, canonical]


def test_a_divisor_is_rounded_once_to_the_accumulator() -> None:
    """By way of float64 this one would become 2**62, and the quotient 2**-62."""
    found = reduce_leaves([torch.ones(1)], "avg", [1], divisor=2**62 + 2**38 + 1)
    assert found.view(torch.int32).item() == 0x207FFFFE
