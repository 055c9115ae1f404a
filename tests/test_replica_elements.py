"""Element counts and distances found piece by piece, compared with the whole tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshplan.kernel import byte_pieces
from meshplan.replicas._comparison import Difference

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def compare(theirs: torch.Tensor, mine: torch.Tensor, size: int = 1 << 20) -> Difference:
    found, start = Difference(), 0
    for a, b in zip(byte_pieces(theirs, size), byte_pieces(mine, size), strict=True):
        found.add_piece(a, b, start, mine)
        start += a.numel()
    return found


def ordinal(value: float) -> int:
    bits = int(torch.tensor(value, dtype=torch.float64).view(torch.int64))
    return bits if bits >= 0 else -(1 << 63) - bits


@given(
    st.lists(st.tuples(st.floats(), st.floats(), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([16, 64, 1 << 20]),
)
def test_pieces_add_up_to_the_whole(cases: list[tuple[float, float, bool]], size: int) -> None:
    theirs = torch.tensor([a for a, _, _ in cases], dtype=torch.float64)
    mine = torch.tensor([a if same else b for a, b, same in cases], dtype=torch.float64)
    pairs = list(
        zip(theirs.view(torch.int64).tolist(), mine.view(torch.int64).tolist(), strict=True)
    )
    where = [i for i, (a, b) in enumerate(pairs) if a != b]
    found = compare(theirs, mine, size)
    assert found.count == len(where)
    assert found.index == ((where[0],) if where else None)
    apart = [
        abs(ordinal(theirs[i].item()) - ordinal(mine[i].item()))
        for i in where
        if not (theirs[i].isnan() or mine[i].isnan())
    ]
    assert found.max_ulps == max(apart, default=None)
    assert found.unrelated == sum(ulps > 1 << 52 for ulps in apart)
    if where:
        patterns = [f"(0x{bits % (1 << 64):016x})" for bits in pairs[where[0]]]
        assert found.reference.split()[1] == patterns[0]
        assert found.value.split()[1] == patterns[1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_distance_of_neighbours_zeros_and_nans(dtype: torch.dtype) -> None:
    theirs = torch.ones(9).to(dtype)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    mine = theirs.clone()
    mine.view(integer)[4] += 3
    assert (compare(theirs, mine).max_ulps, compare(theirs, mine).index) == (3, (4,))
    zero = torch.zeros(2).to(dtype)
    assert (compare(zero, -zero).max_ulps, compare(zero, -zero).count) == (0, 2)
    nan = torch.full((2,), float("nan")).to(dtype)
    assert (compare(zero, nan).max_ulps, compare(zero, nan).count) == (None, 2)
    far = compare(
        torch.full((1,), float("inf")).to(dtype), torch.full((1,), -float("inf")).to(dtype)
    )
    assert far.unrelated == 1
    # A factor of 2 and less of the same sign is no such difference.
    pairs = (1.0, 2.0), (1.0, 2.5), (1.0, -1.0), (-3.0, -1.0)
    for a, b in pairs:
        one = compare(torch.tensor([a]).to(dtype), torch.tensor([b]).to(dtype))
        assert one.unrelated == (b != 2.0)
    assert far.max_ulps == 2 * int(torch.tensor(float("inf")).to(dtype).view(integer))


def test_integers_have_no_distance_and_complex_numbers_do() -> None:
    small = compare(
        torch.tensor([1, 2, 3], dtype=torch.int8), torch.tensor([1, 2, -3], dtype=torch.int8)
    )
    assert (small.count, small.index, small.max_ulps) == (1, (2,), None)
    z = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j], dtype=torch.complex128)
    other = z.clone()
    other[1] = 3.5 + 4.5j
    other[2] = 5 - 6j
    found = compare(z, other)
    # An element counts once: of the first only bits differ, of the second the sign.
    assert (found.count, found.index, found.unrelated) == (2, (1,), 1)
    assert found.reference == "(3+4j) (0x40100000000000004008000000000000)"
    assert found.value.startswith("(3.5+4.5j) ")
    assert compare(z, z.clone()) == Difference()
