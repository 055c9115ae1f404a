"""The oracle itself: against torch's IEEE arithmetic, against worked examples, and its shape."""

from __future__ import annotations

import math
import operator
import struct
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from meshplan.contract import Contract
from meshplan.errors import ContractError, ContractTypeError
from meshplan.testing import _reference as oracle
from meshplan.testing import assert_bitwise_equal, reference_reduce, reference_reduce_tensors
from tests.marks import full
from tests.programs import load_script
from tests.refusals import refusal

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIGNED = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, full(torch.bfloat16)])
def test_every_16_bit_pattern_decodes_as_in_torch(dtype: torch.dtype) -> None:
    form = oracle._FORMATS[dtype]
    wide = all_patterns(dtype).to(torch.float64).tolist()
    for bits, value in zip(all_patterns(dtype).view(torch.int16).tolist(), wide, strict=True):
        number = oracle._decode(bits % (1 << 16), form)
        if math.isnan(value):
            assert math.isnan(number)
        else:
            assert isinstance(number, Fraction) == (value != 0 and math.isfinite(value))
            assert (number, math.copysign(1.0, number)) == (value, math.copysign(1.0, value))
            assert oracle._round(number, form) == bits % (1 << 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@given(bits=st.integers(0, (1 << 64) - 1))
def test_rounding_from_float64_matches_torch(dtype: torch.dtype, bits: int) -> None:
    # Exponents of random patterns are mostly far out of range: pull half of them in.
    if bits & 1:
        bits = bits & ~(0x7FF << 52) | (1023 - 30 + (bits >> 52) % 60) << 52
    (value,) = struct.unpack("<d", struct.pack("<Q", bits))
    # Only one rounding: torch goes from float64 to 16 bits by way of float32.
    start = torch.tensor(value, dtype=torch.float64)
    start = start.to(torch.float32) if dtype.itemsize == 2 else start
    source = oracle._FORMATS[start.dtype]
    width = 8 * start.itemsize
    pattern = int(start.view(torch.int32 if width == 32 else torch.int64)) % (1 << width)
    found = oracle._round(oracle._decode(pattern, source), oracle._FORMATS[dtype])
    if math.isnan(value):
        assert found == oracle._FORMATS[dtype].quiet_nan
    else:
        wanted = int(start.to(dtype).view(SIGNED[dtype])) % (1 << 8 * dtype.itemsize)
        assert found == wanted


@pytest.mark.parametrize(("op", "python"), [("sum", operator.add), ("product", operator.mul)])
@given(a=st.floats(), b=st.floats())
def test_float64_arithmetic_matches_the_machine(op: str, python: object, a: float, b: float):
    leaves = [[int.from_bytes(struct.pack("<d", x), "little")] for x in (a, b)]
    (found,) = reference_reduce(leaves, torch.float64, op, [2], Contract())
    (value,) = struct.unpack("<d", struct.pack("<Q", found))
    wanted = python(a, b)
    if math.isnan(wanted):
        assert found == 0x7FF8000000000000
    else:
        assert struct.pack("<d", value) == struct.pack("<d", wanted)


def test_zero_signs_and_invalid_operations_follow_ieee_754() -> None:
    inf, nan = math.inf, math.nan
    rows = []
    for op, a, b in [
        ("sum", 1.5, -1.5),
        ("sum", -0.0, -0.0),
        ("sum", -0.0, 0.0),
        ("sum", inf, -inf),
        ("sum", -inf, 1.0),
        ("product", 0.0, inf),
        ("product", -0.0, 3.0),
        ("product", -inf, -2.0),
        ("product", -1e-38, 1e-38),
        ("avg", -0.0, -0.0),
        ("avg", -inf, 1.0),
        ("avg", 3e38, 3e38),
        ("max", -0.0, 0.0),
        ("min", 0.0, -0.0),
        ("max", inf, nan),
        ("min", -inf, 1.0),
    ]:
        leaves = [torch.tensor([a]), torch.tensor([b])]
        rows.append(f"{op}({a}, {b}) = {reference_reduce_tensors(leaves, op, [2], Contract())[0]}")
    assert_expected_inline(
        "\n".join(rows),
        """\
sum(1.5, -1.5) = 0.0
sum(-0.0, -0.0) = -0.0
sum(-0.0, 0.0) = 0.0
sum(inf, -inf) = nan
sum(-inf, 1.0) = -inf
product(0.0, inf) = nan
product(-0.0, 3.0) = -0.0
product(-inf, -2.0) = inf
product(-1e-38, 1e-38) = -0.0
avg(-0.0, -0.0) = -0.0
avg(-inf, 1.0) = -inf
avg(3e+38, 3e+38) = inf
max(-0.0, 0.0) = 0.0
min(0.0, -0.0) = -0.0
max(inf, nan) = nan
min(-inf, 1.0) = -inf""",
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_nan_becomes_canonical(dtype: torch.dtype) -> None:
    form = oracle._FORMATS[dtype]
    nans = [form.infinity + 1, form.sign_bit | form.infinity + 5, form.sign_bit * 2 - 1]
    for op in ("sum", "avg", "max", "min", "product"):
        assert reference_reduce([nans], dtype, op, [1], Contract()) == [form.quiet_nan] * 3
    assert (
        form.quiet_nan
        == {
            torch.float16: 0x7E00,
            torch.bfloat16: 0x7FC0,
            torch.float32: 0x7FC00000,
            torch.float64: 0x7FF8000000000000,
        }[dtype]
    )


def expression(*shape: int) -> str:
    names = [f"{i}" for i in range(math.prod(shape))]
    return oracle._tree(names, shape, lambda a, b: f"({a}+{b})")


def test_the_tree_has_the_shape_of_the_mesh() -> None:
    shapes = [
        (1,),
        (2,),
        (3,),
        (5,),
        (6,),
        (7,),
        (9,),
        (2, 3),
        (3, 2),
        (2, 1, 3),
        (6, 1),
        (2, 3, 2),
    ]
    assert_expected_inline(
        "\n".join(f"{list(shape)}: {expression(*shape)}" for shape in shapes),
        """\
[1]: 0
[2]: (0+1)
[3]: ((0+1)+2)
[5]: (((0+1)+(2+3))+4)
[6]: (((0+1)+(2+3))+(4+5))
[7]: (((0+1)+(2+3))+((4+5)+6))
[9]: ((((0+1)+(2+3))+((4+5)+(6+7)))+8)
[2, 3]: (((0+1)+2)+((3+4)+5))
[3, 2]: (((0+1)+(2+3))+(4+5))
[2, 1, 3]: (((0+1)+2)+((3+4)+5))
[6, 1]: (((0+1)+(2+3))+(4+5))
[2, 3, 2]: ((((0+1)+(2+3))+(4+5))+(((6+7)+(8+9))+(10+11)))""",
    )


def test_the_tree_of_one_axis_splits_after_the_largest_power_of_two() -> None:
    def split(names: list[str]) -> str:
        if len(names) == 1:
            return names[0]
        power = max(2**k for k in range(12) if 2**k < len(names))
        return f"({split(names[:power])}+{split(names[power:])})"

    for n in range(1, 70):
        assert expression(n) == split([f"{i}" for i in range(n)])


def test_rounding_modes_match_hand_computation() -> None:
    # bfloat16 has 8 significand bits: 256 + 1 is a tie and goes to 256, unless it is kept wide.
    leaves = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0, 1.0)]
    once = reference_reduce_tensors(leaves, "sum", [4], Contract("rank"))
    node = reference_reduce_tensors(leaves, "sum", [4], Contract("rank", rounding="node"))
    assert (once.item(), node.item()) == (260.0, 256.0)
    leaves = [torch.tensor([x]) for x in (2.0**24, 1.0, 1.0)]
    wide = reference_reduce_tensors(leaves, "sum", [3], Contract(accumulate="float64"))
    narrow = reference_reduce_tensors(leaves, "sum", [3], Contract())
    assert (wide.item(), narrow.item()) == (2.0**24 + 2, 2.0**24)


def test_divisors_and_integers_are_exact() -> None:
    leaves = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert reference_reduce_tensors(leaves, "avg", [2], Contract(), divisor=4).item() == 1.75
    bytes_ = [torch.tensor([100, -128], dtype=torch.int8)] * 2
    assert reference_reduce_tensors(bytes_, "sum", [2], Contract()).tolist() == [-56, 0]
    assert reference_reduce_tensors(bytes_, "product", [2], Contract()).tolist() == [16, 0]
    unsigned = [torch.tensor([200], dtype=torch.uint8), torch.tensor([100], dtype=torch.uint8)]
    assert reference_reduce_tensors(unsigned, "max", [2], Contract()).item() == 200
    assert reference_reduce_tensors(unsigned, "sum", [2], Contract()).item() == 44
    assert reference_reduce_tensors(bytes_, "min", [2], Contract()).tolist() == [100, -128]


def test_any_strides_and_shapes_are_reduced() -> None:
    leaf = torch.arange(12.0).reshape(3, 4).t()[::2]
    found = reference_reduce_tensors([leaf, leaf], "sum", [2], Contract())
    assert found.is_contiguous()
    assert_bitwise_equal(found, (leaf * 2).contiguous())
    for shape in ((), (0,), (2, 0)):
        empty = torch.ones(shape)
        assert_bitwise_equal(reference_reduce_tensors([empty], "sum", [1], Contract()), empty)


def test_invalid_arguments_are_refused() -> None:
    f32, plain, uneven = torch.float32, Contract(), [torch.ones(1), torch.ones(2)]
    message = partial(refusal, ContractError, reference_reduce)
    found = [
        message([[0]], f32, "sum", [2], plain),
        message([], f32, "sum", [], plain),
        message([[0]] * 4, f32, "sum", [-2, -2], plain),
        message([[0], [0, 1]], f32, "sum", [2], plain),
        message([[0]], f32, "sum", [1], plain, divisor=2),
        message([[0]], f32, "avg", [1], plain, divisor=0),
        refusal(ContractError, reference_reduce_tensors, [], "sum", [1], plain),
        refusal(ContractTypeError, reference_reduce_tensors, uneven, "sum", [2], plain),
    ]
    assert_expected_inline(
        "\n".join(found),
        """\
MP411: axes of sizes [2] do not hold 1 leaves; pass one leaf per coordinate, row-major
MP411: axes of sizes [] do not hold 0 leaves; pass one leaf per coordinate, row-major
MP411: axes of sizes [-2, -2] do not hold 4 leaves; pass one leaf per coordinate, row-major
MP411: leaves of lengths [1, 2]; pass leaves of one length
MP411: divisor=2 with op='sum'; pass a positive divisor, and only with op='avg'
MP411: divisor=0 with op='avg'; pass a positive divisor, and only with op='avg'
MP411: axes of sizes [1] need 1 leaves, got 0; pass one leaf per coordinate, row-major
MP412: leaf 1 is torch.float32 (2,) on cpu, leaf 0 is torch.float32 (1,) on cpu; all leaves must match""",
    )


@pytest.mark.full
def test_golden_file_matches_its_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parent.parent / "tools" / "make_golden.py"
    script = load_script(path)
    assert script.main(["--check"]) == 0
    assert script.main(["--check", "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("is not what this script writes") == 3
