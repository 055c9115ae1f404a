"""The bytes of tensors in index order, whatever their strides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshplan.kernel import byte_pieces, integers


def joined(tensor: torch.Tensor, size: int) -> bytes:
    pieces = list(byte_pieces(tensor, size))
    assert all(piece.dtype is torch.uint8 and piece.is_contiguous() for piece in pieces)
    assert all(piece.numel() == size for piece in pieces[:-1])
    assert all(0 < piece.numel() <= size for piece in pieces[-1:])
    return b"".join(bytes(piece.tolist()) for piece in pieces)


@given(
    st.lists(st.integers(0, 7), max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from([8, 16, 64, 1024]),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]),
)
def test_bytes_do_not_depend_on_strides(shape, random, size, dtype) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(shape)))
    random.shuffle(order)
    steps = [random.randint(1, 3) for _ in shape]
    room = torch.arange(math.prod(n * s for n, s in zip(shape, steps, strict=True)))
    strided = room.to(dtype).view([n * s for n, s in zip(shape, steps, strict=True)])
    for dim, step in enumerate(steps):
        strided = strided[(slice(None),) * dim + (slice(None, None, step),)]
    strided = strided.permute(order)
    expected = bytes(
        strided.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8).tolist()
    )
    assert joined(strided, size) == expected
    assert joined(strided.contiguous(), size) == expected


def test_expanded_and_lazy_tensors_have_the_shown_bytes() -> None:
    row = torch.tensor([1.0, 2.0])
    assert joined(row.expand(3, 2), 8) == joined(torch.stack([row] * 3), 8)
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert joined(z.conj(), 16) == joined(z.conj().resolve_conj(), 16)
    assert joined(z.conj().imag, 16) == joined(torch.tensor([-2.0, 4.0]), 16)
    assert joined(torch._efficientzerotensor((3,)), 8) == bytes(12)
    assert joined(torch.ones(2, requires_grad=True), 8) == joined(torch.ones(2), 8)


def test_contiguous_tensors_are_not_copied() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    (piece,) = byte_pieces(tensor, 1024)
    assert piece.data_ptr() == tensor.data_ptr()
    assert integers(tensor.t()).data_ptr() == tensor.data_ptr()
    assert list(byte_pieces(torch.empty(0, 3).t(), 8)) == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32, torch.float64])
def test_integers_are_as_wide_as_elements(dtype: torch.dtype) -> None:
    found = integers(torch.ones(2, 3).to(dtype).t())
    assert not found.is_floating_point()
    assert found.element_size() == dtype.itemsize
    assert found.shape == (3, 2)
