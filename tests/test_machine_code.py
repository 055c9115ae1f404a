"""What a compiler makes of the kernels, executed: machine code of AMD's GPUs on a CPU.

The emulated GPU of other tests runs the kernels' source, compiled for a CPU. Here the code objects
themselves run, by AMD's own description of each instruction (`tests.amd_gpu`).
"""

from __future__ import annotations

import ctypes.util
import random
import shutil
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from meshplan import kernel
from meshplan.contract import Contract
from meshplan.kernel._device_peers import _kernel_name
from meshplan.testing import bits
from tests import machine_code
from tests.amd_gpu import Image
from tests.devices import MODES, have_equal_bits
from tests.inputs import golden_cases
from tests.machine_code import PROGRAMS, MachineDevice, compile_program, image, reduce_peers
from tests.pseudocode import fma
from tests.test_device_fold import leaves_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not())),
]
CLANG = shutil.which("clang++-19")
REMEDY = "run python -m tests.machine_code with clang 19, and commit the archive"


def golden(kernels: Image) -> Iterator[tuple[list[Tensor], str, Contract, dict[str, Any], Tensor]]:
    """Arguments and results of the golden vectors that these kernels reduce."""
    for case in golden_cases("contract_v1", "exact_v1"):
        fold = _kernel_name(case.result.dtype, case.op, case.contract, 0)
        if {fold, fold.removesuffix("_fold")} & {*kernels.kernels}:
            more = {"shape": case.shape, "divisor": case.divisor}
            yield case.leaves, case.op, case.contract, more, case.result


def test_archive_has_the_kernels_of_the_source() -> None:
    assert machine_code.read_archive()["source"] == machine_code.source_hash(), REMEDY


@pytest.mark.skipif(CLANG is None, reason="no clang 19: the archive is not compiled again")
@pytest.mark.parametrize("name", ["folds", "peers", "folds_gfx942"])
def test_archive_has_the_code_that_clang_writes(name: str) -> None:
    program = PROGRAMS[name]
    assert CLANG is not None
    found = compile_program(program, CLANG)
    comment = found[found.index(b"clang version") :].split(b"\0")[0]
    if comment.hex() not in machine_code.read_archive()[name]:
        pytest.skip(f"the archive is from another compiler than {comment.decode()}")
    assert Image(found, program.architecture).text == image(name).text, REMEDY


@pytest.mark.parametrize("name", ["folds", "folds_gfx942"])
def test_folds_match_golden_vectors(name: str) -> None:
    device = MachineDevice(name)
    cases = list(golden(device.image))
    assert len(cases) >= 20
    for *given, more, expected in cases:
        assert have_equal_bits(device.fold(*given, **more), expected), (given, more)


@pytest.mark.parametrize("name", ["folds", "folds_gfx942"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folds_match_the_cpu(name: str, dtype: torch.dtype) -> None:
    """Words of 16 bytes, single elements, several waves; batches that wait, and averages of every
    scale, whose divisions are not one instruction."""
    device = MachineDevice(name)
    cases = [(2, 37, "sum"), (3, 1100, "avg"), (9, 70, "sum"), (19, 6, "avg"), (7, 0, "sum")]
    for count, numel, op in cases:
        leaves = leaves_of(count, numel, dtype)
        for contract in (Contract(), Contract("rank")):
            expected = kernel.reduce_leaves(leaves, op, (count,), contract)  # type: ignore[arg-type]
            found = device.fold(leaves, op, contract)
            assert have_equal_bits(found, expected), (count, numel, op, contract)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "order", "numel"),
    [
        (torch.float32, "tree", 37),
        (torch.float32, "tree", 1500),
        (torch.bfloat16, "tree", 70),
        (torch.float32, "exact", 70),
    ],
)
def test_ranks_match_the_cpu(dtype: torch.dtype, order: str, numel: int, mode: str) -> None:
    """Ranks whose waves take turns of random lengths."""
    contract = Contract(order)  # type: ignore[arg-type]
    for world in (2, 3):
        leaves = leaves_of(world, numel, dtype)
        expected = kernel.reduce_leaves(leaves, "sum", (world,), contract)
        outs, failures = reduce_peers(leaves, "sum", contract, mode, seed=numel)
        assert not any(failure.any for failure in failures)
        assert all(have_equal_bits(out, expected) for out in outs), world


@pytest.mark.parametrize("mode", MODES)
def test_ranks_match_golden_vectors(mode: str) -> None:
    cases = [case for case in golden(image("peers")) if len(case[0]) in (2, 3)]
    assert len(cases) >= 6
    for *given, more, expected in cases:
        outs, _ = reduce_peers(*given, mode, **more)
        assert all(have_equal_bits(out, expected) for out in outs), (given, more)


def test_ranks_give_up_on_one_that_never_starts() -> None:
    outs, failures = reduce_peers(
        leaves_of(3, 300, torch.float32), "sum", Contract(), "one_shot", absent=2
    )
    for out, failure in zip(outs[:2], failures, strict=False):
        assert failure.any > 0
        assert failure.of[failure.any - 1].outcome.rank == 2
        assert bits(out).eq(-1).all(), "no poison"


def test_other_memory_is_an_error() -> None:
    device = MachineDevice("folds")
    leaves = leaves_of(2, 37, torch.float32)
    with patch.object(device.gpu, "add_tensors"), pytest.raises(AssertionError, match="no memory"):
        device.fold(leaves, "sum")


@pytest.mark.parametrize(
    "name", ["triple_contracted", "wrong_order", "flushed", "truncated", "wrong_lane"]
)
def test_wrong_kernels_have_other_bits(name: str) -> None:
    # Only a fused operation tells these two apart.
    right, factor = ("triple", 3) if name == "triple_contracted" else ("folds", 1)
    draw = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if name == "truncated" else torch.float32
    leaves = [torch.randn(64, generator=draw).to(dtype) for _ in range(5)]
    wrong = MachineDevice(name)
    if name == "flushed":
        expected = kernel.reduce_leaves(leaves, "sum", (5,), Contract())
        assert have_equal_bits(wrong.fold(leaves, "sum"), expected)
        leaves = [leaf * 2**-129 for leaf in leaves]
    expected = kernel.reduce_leaves([leaf * factor for leaf in leaves], "sum", (5,), Contract())
    assert have_equal_bits(MachineDevice(right).fold(leaves, "sum"), expected)
    found = wrong.fold(leaves, "sum")
    assert not have_equal_bits(found, expected)
    # Only roundings differ, where no element is taken for another.
    assert (name == "wrong_lane") != torch.allclose(found, expected, rtol=0.02, atol=1e-4)


def test_fma_is_rounded_once() -> None:
    """As the C library has it."""
    draw = random.Random(0)
    kinds = [0, 1, 0x80000000, 0x00800000, 0x7F7FFFFF, 0x3F800001, 0xBF800001, 0x007FFFFF]
    words = [[draw.choice([*kinds, draw.getrandbits(32)]) for _ in range(3)] for _ in range(5_000)]
    # Sums near a tie of two results.
    for _ in range(50):
        small = draw.getrandbits(1) << 31 | draw.randrange(9 << 23, 103 << 23)
        words.append([0x3F800001, 0x3F800001, small])
    columns = np.array(words, np.uint32).view(np.float32).T
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    expected = np.array([fmaf(*row) for row in columns.T.tolist()], np.float32)
    with np.errstate(all="ignore"):
        found = fma(*columns)
    numbers = ~np.isnan(expected)
    assert (np.isnan(found) == ~numbers).all()
    assert (found.view(np.uint32) == expected.view(np.uint32))[numbers].all()
