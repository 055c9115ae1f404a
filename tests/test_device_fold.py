"""The fold of leaves on a GPU, on the emulated one that a CPU plays with the kernels' own source."""

from __future__ import annotations

import itertools
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from meshplan import kernel
from meshplan.contract import Contract
from meshplan.definition import partial_dtype
from meshplan.kernel import _device_peers
from meshplan.kernel._device_peers import launch_fold
from meshplan.testing import bits
from tests.devices import CONTRACTS, FOLDS, Emulated, at_byte
from tests.inputs import FLOATS, INTEGERS, arithmetics, draw_leaves, golden_cases

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not())),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: no GPU is emulated"),
]
leaves_of = partial(draw_leaves, specials=True)
SHAPES = (*((n,) for n in range(1, 18)), (32,), (72,), (2, 4), (3, 5), (4, 3, 2), (9, 9))


@pytest.fixture(scope="module")
def device() -> Iterator[Emulated]:
    found = Emulated("cuda", 5, FOLDS)
    layout, tables = _device_peers._in_one_layout, _device_peers._write_tables

    def held_layout(leaves: Sequence[Tensor]) -> Any:
        copies, *rest = layout(leaves)
        found.hold(*copies)
        return copies, *rest

    def held_tables(*words: Any) -> Tensor:
        made = tables(*words)
        found.hold(made)
        return made

    # As torch's allocator does for a GPU, whose work comes later.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_device_peers, "_in_one_layout", held_layout)
        patch.setattr(_device_peers, "_write_tables", held_tables)
        yield found


def fold(
    device: Emulated,
    leaves: Sequence[Tensor],
    op: str,
    shape: Sequence[int],
    contract: Contract = Contract(),
    *,
    dtype: torch.dtype | None = None,
    divisor: int | None = None,
    part: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """What the operator does for tensors of a GPU."""
    dtype = dtype or leaves[0].dtype
    if op == "avg" and divisor is None and part == 0:
        divisor = len(leaves)
    found = partial_dtype(op, dtype, contract) if part == 1 else dtype
    out = leaves[0].new_empty(leaves[0].shape, dtype=found) if out is None else out
    launch_fold(device, out, leaves, op, shape, contract, dtype, divisor, part)
    device.synchronize()
    return out


def have_equal_bits(found: Tensor, expected: Tensor) -> bool:
    return found.is_contiguous() and torch.equal(bits(found), bits(expected))


def launches(device: Emulated) -> int:
    return sum(line.startswith("launch") for line in device.history())


def wrong_kernels(device: Emulated, shapes: Sequence[tuple[int, ...]], numel: int) -> list[str]:
    """Every operation, dtype, order and rounding that differs from the CPU's."""
    wrong = []
    for dtype, shape in itertools.product((*FLOATS, *INTEGERS), shapes):
        leaves = leaves_of(math.prod(shape), numel, dtype)
        for op, contract in arithmetics(dtype, CONTRACTS):
            expected = kernel.reduce_leaves(leaves, op, shape, contract)  # type: ignore[arg-type]
            if not have_equal_bits(fold(device, leaves, op, shape, contract), expected):
                wrong.append(f"{dtype} {op} {shape} {contract.id}")
    return wrong


def test_golden_vectors_match(device: Emulated) -> None:
    for case in golden_cases("contract_v1", "exact_v1"):
        leaves, op, shape, contract, divisor, result = case
        found = fold(device, leaves, op, shape, contract, divisor=divisor)
        assert have_equal_bits(found, result), case


def test_every_kernel_and_shape_matches_the_cpu(device: Emulated) -> None:
    assert wrong_kernels(device, SHAPES, 19) == []


def test_parts_match_the_cpu(device: Emulated) -> None:
    for dtype, op, contract in itertools.product(FLOATS, ("sum", "product", "max"), CONTRACTS):
        if contract.ordering.exact or (contract.order == "rank" and op != "max"):
            continue
        leaves = leaves_of(8, 43, dtype)
        halves = leaves[:4], leaves[4:]
        parts = [fold(device, half, op, (4,), contract, part=1) for half in halves]
        for half, part in zip(halves, parts, strict=True):
            same = kernel.combine_leaves(half, op, (4,), contract)  # type: ignore[arg-type]
            # The payloads of NaNs in partial results are not defined.
            assert have_equal_bits(part.nan_to_num(1.5), same.nan_to_num(1.5)), (dtype, op)
        found = fold(device, parts, op, (2,), contract, dtype=dtype, part=2)
        expected = kernel.reduce_leaves(leaves, op, (2, 4), contract)  # type: ignore[arg-type]
        assert have_equal_bits(found, expected), (dtype, op, contract.id)
    leaves = leaves_of(4, 43, torch.bfloat16)
    parts = [fold(device, leaves, "sum", (4,), part=1)]
    found = fold(device, parts, "avg", (1,), dtype=torch.bfloat16, divisor=4, part=2)
    assert have_equal_bits(found, kernel.reduce_leaves(leaves, "avg", (4,)))


def test_leaves_at_any_address(device: Emulated) -> None:
    """Each at another offset, or all at one: the emulated GPU stops at an access that is not aligned."""
    draw = random.Random(0)
    for dtype, numel in itertools.product(
        (torch.float32, torch.bfloat16, torch.float64, torch.uint8), (0, 1, 7, 67, 1031)
    ):
        leaves = leaves_of(5, numel, dtype)
        expected = kernel.reduce_leaves(leaves, "sum", (5,))
        places = range(0, 16, dtype.itemsize)
        for shift in places:
            for offsets in ([shift] * 6, [draw.choice(places) for _ in range(6)], [shift, 8] * 3):
                *moved, out = map(at_byte, (*leaves, torch.zeros_like(expected)), offsets)
                around = torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage())
                before = around.clone()
                found = fold(device, moved, "sum", (5,), out=out)
                assert have_equal_bits(found, expected), (dtype, numel, offsets)
                start = out.storage_offset() * out.itemsize
                before[start : start + out.nbytes] = around[start : start + out.nbytes]
                assert torch.equal(around, before), (dtype, numel, offsets)
        inside = fold(device, leaves, "sum", (5,), out=leaves[2])
        assert have_equal_bits(inside, expected)


def test_strided_leaves_take_one_launch(device: Emulated) -> None:
    wide = leaves_of(3, 7 * 8 * 24, torch.bfloat16)
    for view in (
        lambda t: t.view(56, 24).t(),
        lambda t: t.view(56, 24)[:, :8],
        lambda t: t.view(56, 24)[:, 3:19],
        lambda t: t.view(7, 8, 24).permute(2, 0, 1)[:, ::2],
        lambda t: t.view(7, 8, 24)[:, 1:2].expand(7, 8, 24),
        lambda t: t.view(7, 2, 2, 2, 24)[:, :, :1, :, ::3],
        lambda t: t[5],
    ):
        leaves = [view(leaf) for leaf in wide]
        before = launches(device)
        found = fold(device, leaves, "sum", (3,))
        assert launches(device) == before + 1
        assert have_equal_bits(found, kernel.reduce_leaves(leaves, "sum", (3,)))
    mixed = [wide[0].view(56, 24).t(), wide[1].view(24, 56), wide[2].view(24, 56)]
    found = fold(device, mixed, "sum", (3,))
    assert have_equal_bits(found, kernel.reduce_leaves(mixed, "sum", (3,)))


@pytest.mark.parametrize("shape", [(256,), (257,), (1000,), (30, 11), (7, 43)])
def test_more_leaves_than_a_launch_has_room_for(device: Emulated, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    leaves = leaves_of(count, 19, torch.float32)
    for contract in (Contract(), Contract("rank"), Contract("exact")):
        before = launches(device)
        found = fold(device, leaves, "sum", shape, contract)
        tables = 0 if count <= 256 else -(-count // 256)
        assert launches(device) == before + 1 + tables
        assert have_equal_bits(found, kernel.reduce_leaves(leaves, "sum", shape, contract))


def test_one_launch_of_many_blocks(device: Emulated) -> None:
    for numel, line in (
        (0, None),
        (3, "launch 1 on 7"),
        (9000, "launch 18 on 7"),
        (99_999, "launch 20 on 7"),
    ):
        leaves = leaves_of(8, numel, torch.bfloat16)
        before = device.history()
        found = fold(device, leaves, "sum", (8,))
        assert device.history()[len(before) :] == ([] if line is None else [line])
        assert have_equal_bits(found, kernel.reduce_leaves(leaves, "sum", (8,)))


def test_captured_folds_and_streams(device: Emulated) -> None:
    """Twice in each of two graphs, on two streams; replays read what the leaves then hold."""
    leaves = [torch.zeros(500) for _ in range(300)]
    outs = [torch.zeros(500) for _ in range(4)]
    graphs = []
    for first, stream in ((0, 20), (2, 21)):
        with device.capture(stream) as graph:
            for out, order in zip(outs[first : first + 2], ("tree", "rank"), strict=True):
                some = leaves if order == "tree" else leaves[:8]
                shape = (len(some),)
                launch_fold(device, out, some, "sum", shape, Contract(order), out.dtype, None, 0)  # type: ignore[arg-type]
        graphs.append(graph)
    device.synchronize()
    assert not any(out.any() for out in outs)
    for seed in range(2):
        for leaf, new in zip(leaves, leaves_of(300, 500, torch.float32, seed=seed), strict=True):
            leaf.copy_(new)
        for graph, stream in zip(graphs, (5, 6), strict=True):
            graph.replay(stream)
        device.synchronize()
        tree = kernel.reduce_leaves(leaves, "sum", (300,))
        rank = kernel.reduce_leaves(leaves[:8], "sum", (8,), Contract("rank"))
        for out, expected in zip(outs, (tree, rank) * 2, strict=True):
            assert have_equal_bits(out, expected)


def test_kernels_are_loaded_while_a_stream_is_captured(device: Emulated) -> None:
    with device.capture(20), device.driver.current():
        device.driver.load(b"emulated")
