"""Kernels for GPUs move tensors at any address in the widest words that it allows.

They run on the emulated GPU, which counts loads and stores by their width, and which ends the
process at an access that is not aligned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshplan.definition import reduce_leaves
from tests.devices import (
    EMULATED,
    Emulated,
    at_byte,
    connect_ranks,
    emulated_library,
    have_equal_bits,
    reduce_peers,
    synchronize,
    wrong_offsets,
)
from tests.inputs import draw_leaves
from tests.processes import run_ranks

pytestmark = EMULATED
WIDTHS = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("world_size", [3, 8])
def test_every_offset_has_the_same_bits(world_size: int) -> None:
    def ranks(rank: int) -> list[str]:
        connect_ranks(Emulated(), range(world_size), lanes=3)
        # The second reaches over several tiles at world size 8, and over odd ends everywhere.
        return wrong_offsets(rank, world_size, "cpu", (37, 6_011))

    assert run_ranks(ranks, world_size) == [[]] * world_size


def off_element(values: Tensor, offset: int) -> Tensor:
    """The same values at an address that is not a multiple of an element's size."""
    size = values.numel() * values.dtype.itemsize
    memory = bytearray(size + 32)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    first = -start % 16 + offset
    found = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=first)
    found.copy_(values)
    assert found.data_ptr() % values.dtype.itemsize != 0
    return found


def test_elements_that_are_not_aligned() -> None:
    """Buffers of other libraries may start anywhere."""

    def ranks(rank: int) -> list[str]:
        connect_ranks(Emulated(), range(3), lanes=3)
        wrong = []
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            leaves = draw_leaves(3, 519, dtype)
            expected = reduce_leaves(leaves, "sum", (3,))
            for offset in {1, 7, dtype.itemsize // 2}:
                for mode in ("one_shot", "two_shot"):
                    if not have_equal_bits(
                        reduce_peers(off_element(leaves[rank], offset), (3,), mode), expected
                    ):
                        wrong.append(f"{dtype} {mode} at byte {offset}")
        return wrong

    assert run_ranks(ranks, 3) == [[]] * 3


def counts(call: Callable[[], object]) -> list[int]:
    """How many accesses of each of ``WIDTHS`` a call makes."""
    count = ctypes.CDLL(emulated_library("cuda")).emulated_accesses
    count.restype = ctypes.c_ulonglong
    for width in WIDTHS:
        count(width)
    call()
    synchronize()
    return [count(width) for width in WIDTHS]


@pytest.mark.parametrize(("offset", "widest"), [(0, 16), (8, 8), (4, 4), (12, 4), (2, 2), (1, 1)])
def test_copies_and_folds_take_the_widest_words(offset: int, widest: int) -> None:
    """A message of 4096 bytes in two ranks, one-shot: nothing is narrower than its address asks.

    The message is read twice, for the peer and for the fold. The copy's other end is as narrow.
    """

    def ranks(rank: int) -> list[int]:
        connect_ranks(Emulated(), range(2), lanes=3)
        dtype = {2: torch.bfloat16, 1: torch.uint8}.get(widest, torch.float32)
        ones = at_byte(torch.ones(4096 // dtype.itemsize, dtype=dtype), offset)
        return counts(lambda: reduce_peers(ones, (2,), "one_shot"))

    expected = dict.fromkeys(WIDTHS, 0)
    expected[widest] += 3 * 4096 // widest
    # The peer's piece and the result.
    expected[16] += 2 * 4096 // 16
    assert run_ranks(ranks, 2) == [list(expected.values())] * 2


@pytest.mark.parametrize("offset", [0, 8])
def test_every_kernel_takes_the_widest_words(offset: int) -> None:
    """A product over nine ranks, in two batches; the message is at 8 bytes, or at 16."""

    def ranks(rank: int) -> list[int]:
        connect_ranks(Emulated(), range(9), lanes=3)
        ones = at_byte(torch.ones(512, dtype=torch.float64), offset)
        return counts(lambda: reduce_peers(ones, (3, 3), "one_shot", op="product"))

    expected = dict.fromkeys(WIDTHS, 0)
    # Eight copies, whose width is that of the address, and the own leaf.
    width = 16 if offset == 0 else 8
    expected[width] += (8 * 2 + 1) * 4096 // width
    # The tiles, and the result.
    expected[16] += 9 * 4096 // 16
    assert run_ranks(ranks, 9) == [list(expected.values())] * 9
