"""The fold of leaves on a GPU. Run by ``make test-gpu``; skipped where there is none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from meshplan import definition, kernel
from meshplan.contract import Contract
from meshplan.kernel import device_of
from meshplan.kernel._device_peers import fold_device
from tests.devices import CONTRACTS, at_byte, have_equal_bits
from tests.inputs import FLOATS, INTEGERS, OPS, GoldenCase, draw_leaves, golden_cases
from tests.processes import run_ranks
from tests.test_gpu import gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpus() == 0, reason="no GPU"),
    pytest.mark.timeout(600),
]
leaves_of = partial(draw_leaves, specials=True)
SHAPES = ((1,), (2,), (3,), (4,), (5,), (7,), (8,), (16,), (32,), (72,), (300,), (3, 5), (4, 2, 2))


def alone(program: Callable[[], Any]) -> Any:
    """The program's result, in a process that may start CUDA, on kernels and not on plain torch."""

    def ranks(rank: int) -> Any:
        torch.cuda.set_device(0)
        assert fold_device(0) is not None
        return program()

    return run_ranks(ranks, 1, timeout=500, init=False)[0]


def wrong_golden() -> list[GoldenCase]:
    wrong = []
    for case in golden_cases("contract_v1", "exact_v1"):
        there = [leaf.cuda() for leaf in case.leaves]
        found = kernel.reduce_leaves(there, *case[1:4], divisor=case.divisor)  # type: ignore[arg-type]
        if not have_equal_bits(found, case.result):
            wrong.append(case)
    return wrong


def test_golden_vectors_match() -> None:
    assert alone(wrong_golden) == []


def wrong_kernels() -> list[str]:
    """Kernels, and the definition in torch's own ones, that differ from the CPU's bits."""
    wrong = []
    for shape, dtype in itertools.product(SHAPES, (*FLOATS, *INTEGERS)):
        leaves = leaves_of(math.prod(shape), 4099, dtype)
        there = [leaf.cuda() for leaf in leaves]
        for op, contract in itertools.product(OPS, CONTRACTS):
            if (op == "avg" and dtype in INTEGERS) or (op == "product" and contract.ordering.exact):
                continue
            expected: Tensor = kernel.reduce_leaves(leaves, op, shape, contract)  # type: ignore[arg-type]
            for module in (kernel, *((definition,) if shape == (5,) else ())):
                found = module.reduce_leaves(there, op, shape, contract)  # type: ignore[arg-type]
                if not have_equal_bits(found, expected):
                    wrong.append(f"{module.__name__} {dtype} {op} {shape} {contract.id}")
    return wrong


def test_every_kernel_has_the_bits_of_the_cpu() -> None:
    assert alone(wrong_kernels) == []


def wrong_halves() -> list[str]:
    """Every pattern of 16 bits, and float32 values around it, rounded by partial results."""
    wrong = []
    for dtype in (torch.float16, torch.bfloat16):
        patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        raised = patterns.float()
        near = [raised, raised * (1 + 2**-11), raised * (1 - 2**-11), raised * (1 + 2**-8)]
        near += [torch.nextafter(value, torch.tensor(math.inf)) for value in tuple(near)]
        for number, raw in enumerate(near):
            words = "sum", (1,), Contract(), dtype
            expected = definition.finish_partials([raw], *words)  # type: ignore[arg-type]
            found = kernel.finish_partials([raw.cuda()], *words)  # type: ignore[arg-type]
            if not have_equal_bits(found, expected):
                wrong.append(f"{dtype} {number}")
        halves = [patterns, patterns.flip(0)]
        expected = definition.reduce_leaves(halves, "sum", (2,))
        found = kernel.reduce_leaves([half.cuda() for half in halves], "sum", (2,))
        if not have_equal_bits(found, expected):
            wrong.append(f"{dtype} sum")
    return wrong


def test_every_16_bit_pattern_and_tie() -> None:
    assert alone(wrong_halves) == []


def wrong_layouts() -> list[str]:
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
        leaves = leaves_of(5, 24 * 1031, dtype)
        for offset, other in itertools.product(range(0, 16, dtype.itemsize), (0, 8)):
            moved = [
                at_byte(leaf.cuda(), (offset, (offset + other) % 16)[r % 2])
                for r, leaf in enumerate(leaves)
            ]
            if not have_equal_bits(
                kernel.reduce_leaves(moved, "sum", (5,)), kernel.reduce_leaves(leaves, "sum", (5,))
            ):
                wrong.append(f"{dtype} at byte {offset}, {other}")
        for number, view in enumerate(
            (
                lambda t: t.view(1031, 24).t(),
                lambda t: t.view(1031, 24)[:, 3:19],
                lambda t: t.view(1031, 2, 12).permute(1, 2, 0)[:, ::2],
                lambda t: t.view(1031, 24)[:1].expand(9, 24),
            )
        ):
            views = [view(leaf) for leaf in leaves]
            found = kernel.reduce_leaves([view(leaf.cuda()) for leaf in leaves], "sum", (5,))
            if not have_equal_bits(found, kernel.reduce_leaves(views, "sum", (5,))):
                wrong.append(f"{dtype} view {number}")
    return wrong


def test_addresses_and_strides() -> None:
    assert alone(wrong_layouts) == []


def launches() -> list[int]:
    """Kernels on the device for a reduction of 8 leaves, of 64, of 300, and of strided ones."""
    found = []
    for count, columns in ((8, 8), (64, 8), (300, 8), (8, 6)):
        leaves = [torch.ones(100, 8, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        leaves = [leaf[:, :columns] for leaf in leaves]
        kernel.reduce_leaves(leaves, "sum", (count,))
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            kernel.reduce_leaves(leaves, "sum", (count,))
            torch.cuda.synchronize()
        names = [event.name for event in profile.events() if event.name.startswith("mp_")]
        others = [event.name for event in profile.events() if "elementwise" in event.name]
        found.append(len(names) + len(others))
    return found


def test_a_reduction_is_one_launch() -> None:
    # Addresses of 300 leaves need two more.
    assert alone(launches) == [1, 1, 3, 1]


def captured() -> list[bool]:
    """Two folds in a graph, one of more leaves than a launch has room for, on two streams."""
    static = [torch.zeros(5003, device="cuda") for _ in range(300)]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # No launch before: kernels are found and loaded in the capture.
    with torch.cuda.graph(graph):
        origin = torch.cuda.current_stream()
        side.wait_stream(origin)
        whole = kernel.reduce_leaves(static, "sum", (300,))
        with torch.cuda.stream(side):
            some = kernel.reduce_leaves(static[:8], "avg", (2, 4), Contract("exact"))
        origin.wait_stream(side)
    right = []
    for seed in range(3):
        leaves = leaves_of(300, 5003, torch.float32, seed)
        for leaf, new in zip(static, leaves, strict=True):
            leaf.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        right.append(have_equal_bits(whole, kernel.reduce_leaves(leaves, "sum", (300,))))
        expected = kernel.reduce_leaves(leaves[:8], "avg", (2, 4), Contract("exact"))
        right.append(have_equal_bits(some, expected))
    return right


def test_graphs_hold_folds() -> None:
    device_of.cache_clear()
    assert alone(captured) == [True] * 6


def without_waits() -> bool:
    leaves = [torch.ones(1 << 20, device="cuda") for _ in range(8)]
    kernel.reduce_leaves(leaves, "sum", (8,))
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    found = kernel.reduce_leaves(leaves, "sum", (8,))
    torch.cuda.set_sync_debug_mode("default")
    early = not busy.query()
    torch.cuda.synchronize()
    return early and bool((found == 8).all())


def test_the_host_does_not_wait() -> None:
    assert alone(without_waits)


@pytest.mark.skipif(gpus() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    def program() -> bool:
        leaves = leaves_of(3, 1000, torch.float32)
        found = kernel.reduce_leaves([leaf.to("cuda:1") for leaf in leaves], "sum", (3,))
        return have_equal_bits(found, kernel.reduce_leaves(leaves, "sum", (3,)))

    assert alone(program)
