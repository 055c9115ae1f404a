"""Where two tensors differ, piece by piece, against a plain look at all of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshplan.kernel import byte_pieces
from meshplan.replicas._elements import Difference, index_of, text_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def look(theirs: torch.Tensor, mine: torch.Tensor, size: int = 1 << 20) -> Difference:
    found, start = Difference(), 0
    for a, b in zip(byte_pieces(theirs, size), byte_pieces(mine, size), strict=True):
        found = found.with_piece(a, b, start, mine.dtype)
        start += a.numel()
    return found


def ordinal(value: float) -> int:
    bits = int(torch.tensor(value, dtype=torch.float64).view(torch.int64))
    return bits if bits >= 0 else -(1 << 63) - bits


@given(
    st.lists(st.tuples(st.floats(), st.floats(), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([16, 64, 1 << 20]),
)
def test_against_whole_numbers(cases: list[tuple[float, float, bool]], size: int) -> None:
    theirs = torch.tensor([a for a, _, _ in cases], dtype=torch.float64)
    mine = torch.tensor([a if same else b for a, b, same in cases], dtype=torch.float64)
    pairs = list(
        zip(theirs.view(torch.int64).tolist(), mine.view(torch.int64).tolist(), strict=True)
    )
    where = [i for i, (a, b) in enumerate(pairs) if a != b]
    found = look(theirs, mine, size)
    assert found.count == len(where)
    assert found.first == (where[0] if where else -1)
    apart = [
        abs(ordinal(theirs[i].item()) - ordinal(mine[i].item()))
        for i in where
        if not (theirs[i].isnan() or mine[i].isnan())
    ]
    assert found.ulps == max(apart, default=-1)
    if where:
        assert (found.theirs[0], found.mine[0]) == pairs[where[0]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbours_and_zeros(dtype: torch.dtype) -> None:
    theirs = torch.ones(9).to(dtype)
    mine = theirs.clone()
    mine[4] = (
        torch.nextafter(theirs[4].float(), torch.tensor(2.0)) if dtype is torch.float32 else mine[4]
    )
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    mine = theirs.clone()
    mine.view(integer)[4] += 3
    assert (look(theirs, mine).ulps, look(theirs, mine).first) == (3, 4)
    zero = torch.zeros(2).to(dtype)
    assert (look(zero, -zero).ulps, look(zero, -zero).count) == (0, 2)
    nan = torch.full((2,), float("nan")).to(dtype)
    assert (look(zero, nan).ulps, look(zero, nan).count) == (-1, 2)
    far = look(torch.full((1,), float("inf")).to(dtype), torch.full((1,), -float("inf")).to(dtype))
    assert far.ulps == 2 * int(torch.tensor(float("inf")).to(dtype).view(integer))


def test_other_dtypes() -> None:
    small = look(
        torch.tensor([1, 2, 3], dtype=torch.int8), torch.tensor([1, 2, -3], dtype=torch.int8)
    )
    assert (small.count, small.first, small.ulps) == (1, 2, -1)
    z = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j], dtype=torch.complex128)
    other = z.clone()
    other[1] = 3.5 + 4.5j
    other[2] = 5 - 6j
    found = look(z, other)
    assert (found.count, found.first) == (2, 1)
    assert text_of(found.theirs, torch.complex128) == "(3+4j) (0x40100000000000004008000000000000)"
    assert text_of(found.mine, torch.complex128).startswith("(3.5+4.5j) ")
    assert look(z, z.clone()) == Difference()


def test_texts() -> None:
    assert text_of((0x3F000000, 0), torch.float32) == "0.5 (0x3f000000)"
    assert text_of((0x80, 0), torch.bool) == "True (0x80)"
    assert text_of((-1, 0), torch.int64) == "-1 (0xffffffffffffffff)"
    assert text_of((0x7FC1, 0), torch.bfloat16) == "nan (0x7fc1)"
    assert text_of((0x12, 0), torch.float4_e2m1fn_x2) == "0x12"


def test_indices() -> None:
    assert index_of(0, ()) == ()
    assert [index_of(i, (2, 3)) for i in (0, 3, 5)] == [(0, 0), (1, 0), (1, 2)]
