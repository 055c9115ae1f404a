"""Comparison by bits, on one rank and between three gloo processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline

from meshplan._message_text import format_runs
from meshplan.errors import GroupStateError
from meshplan.testing import (
    assert_bitwise_equal,
    assert_replicas_equal,
    bits,
    first_difference,
)
from meshplan.testing._bitwise import digest
from tests.processes import run_ranks

NAN = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("dtype", "integer"),
    [
        (torch.bool, torch.uint8),
        (torch.uint8, torch.uint8),
        (torch.int8, torch.uint8),
        (torch.float8_e4m3fn, torch.uint8),
        (torch.float16, torch.int16),
        (torch.bfloat16, torch.int16),
        (torch.float32, torch.int32),
        (torch.int64, torch.int64),
        (torch.float64, torch.int64),
        (torch.complex64, torch.int32),
        (torch.complex128, torch.int64),
    ],
)
def test_bits_are_compared_for_each_dtype(dtype: torch.dtype, integer: torch.dtype) -> None:
    tensor = torch.ones(3, 4).to(dtype).t()[1:]
    found = bits(tensor)
    assert found.dtype is integer
    assert found.is_contiguous()
    assert tuple(found.shape) == ((3, 3, 2) if dtype.is_complex else (3, 3))
    assert tuple(bits(torch.ones(()).to(dtype)).shape) == ((2,) if dtype.is_complex else ())


def test_bits_sees_lazy_conjugates_and_gradients() -> None:
    z = torch.tensor([1 + 2j])
    assert bits(z.conj()).view(torch.float32).tolist() == [[1.0, -2.0]]
    assert bits(z.conj().imag).view(torch.float32).tolist() == [-2.0]
    assert not bits(torch.ones(2, requires_grad=True)).requires_grad


def test_equal_bits_have_no_difference() -> None:
    for tensor in (NAN, torch.tensor(-0.0), torch.empty(0, 3), torch.tensor([True, False])):
        assert first_difference(tensor, tensor.clone()) is None
        assert_bitwise_equal(tensor, tensor.clone())
    strided = torch.arange(6.0).reshape(2, 3).t()
    assert_bitwise_equal(strided, strided.contiguous())


def test_differences_that_torch_equal_misses() -> None:
    zero, minus = torch.tensor([0.0]), torch.tensor([-0.0])
    assert torch.equal(zero, minus)
    assert first_difference(zero, minus) is not None
    assert first_difference(NAN[:1], NAN[1:]) is not None


def test_first_difference_is_described() -> None:
    half = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    grid = torch.zeros(2, 3)
    other = grid.clone()
    other[1, 0] = -0.0
    other[1, 2] = 5.0
    pairs = [
        (grid, grid.double()),
        (grid, grid.t()),
        (grid, other),
        (torch.tensor(1.0), torch.tensor(1.0000001)),
        (torch.tensor(-1e-45), torch.tensor(1e-45)),
        (half, torch.tensor([1.0, 2.015625], dtype=torch.bfloat16)),
        (NAN[:1], NAN[1:]),
        (torch.tensor([3, -1], dtype=torch.int8), torch.tensor([3, 4], dtype=torch.int8)),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j])),
    ]
    with pytest.raises(AssertionError) as caught:
        assert_bitwise_equal(grid, other, "gradient of layer 3")
    rows = [str(first_difference(*pair)) for pair in pairs]
    assert_expected_inline(
        "\n".join([*rows, str(caught.value)]),
        """\
dtype differs: torch.float32, expected torch.float64
shape differs: (2, 3), expected (3, 2)
2 of 6 elements differ; first at flat index 3, index (1, 0): 0.0 (0x00000000), expected -0.0 (0x80000000), 0 ulp apart
1 of 1 elements differ; first at flat index 0, index (): 1.0 (0x3f800000), expected 1.0000001192092896 (0x3f800001), 1 ulp apart
1 of 1 elements differ; first at flat index 0, index (): -1.401298464324817e-45 (0x80000001), expected 1.401298464324817e-45 (0x00000001), 2 ulp apart
1 of 2 elements differ; first at flat index 1, index (1,): 2.0 (0x4000), expected 2.015625 (0x4001), 1 ulp apart
1 of 1 elements differ; first at flat index 0, index (0,): nan (0x7fc00000), expected nan (0x7fc00001), NaN
1 of 2 elements differ; first at flat index 1, index (1,): -1 (0xff), expected 4 (0x04)
1 of 1 elements differ; first at flat index 0, index (0,): True (0x01), expected False (0x00)
1 of 2 elements differ; first at flat index 1, index (0, 1): 2.0 (0x40000000), expected -2.0 (0xc0000000), 2147483648 ulp apart
gradient of layer 3: 2 of 6 elements differ; first at flat index 3, index (1, 0): 0.0 (0x00000000), expected -0.0 (0x80000000), 0 ulp apart""",
    )


def test_missing_process_group_is_an_error() -> None:
    with pytest.raises(GroupStateError) as caught:
        assert_replicas_equal(torch.ones(2))
    assert_expected_inline(
        str(caught.value),
        """MP503: no process group is initialised; call torch.distributed.init_process_group first""",
    )


def test_digests_are_of_dtype_shape_and_bits() -> None:
    base = torch.arange(6.0)
    same = digest(base.reshape(2, 3).t().contiguous().t())
    assert same == digest(base.reshape(2, 3))
    others = base, base.view(torch.int32).reshape(2, 3), -base.reshape(2, 3)
    assert same not in map(digest, others)
    assert digest(torch.tensor([-0.0])) != digest(torch.tensor([0.0]))


def check_replicas(rank: int) -> None:
    assert_replicas_equal(torch.ones(3))
    with pytest.raises(AssertionError) as two:
        assert_replicas_equal(torch.tensor([0.0 if rank == 1 else -0.0]), what="loss")
    assert str(two.value) == "loss: 2 different replicas: ranks 0,2 | 1"
    with pytest.raises(AssertionError) as three:
        assert_replicas_equal(torch.ones(rank))
    assert str(three.value) == "tensor: 3 different replicas: ranks 0 | 1 | 2"
    with pytest.raises(AssertionError) as first:
        assert_replicas_equal(torch.tensor(rank == 2), what="flag")
    assert str(first.value) == "flag: 2 different replicas: ranks 0-1 | 2"


def check_subgroup(rank: int) -> None:
    pair = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(GroupStateError, match="rank 1 is not in the group"):
            assert_replicas_equal(torch.ones(1), pair)
    else:
        assert_replicas_equal(torch.ones(1), pair)
        with pytest.raises(AssertionError, match=r"ranks 0 \| 2"):
            assert_replicas_equal(torch.full((2,), rank), pair)


@pytest.mark.processes
@pytest.mark.parametrize("check", [check_replicas, check_subgroup])
def test_differing_ranks_are_named(check: Callable[[int], None]) -> None:
    run_ranks(check, 3)


def test_ranks_are_shown_as_ranges() -> None:
    assert format_runs([0, 1, 2, 3, 4, 6]) == ["0-4", "6"]
    assert format_runs([5]) == ["5"]
    assert format_runs([9, 7, 8, 1]) == ["1", "7-9"]


@pytest.mark.full
def test_parallel_references_are_imported_on_first_use() -> None:
    code = (
        "import sys, meshplan.testing as testing\n"
        "lazy = [f'meshplan.testing.{name}' for name in ('tp', 'dp', 'nccl_model')]\n"
        "assert not any(name in sys.modules for name in lazy)\n"
        "assert [testing.tp, testing.dp, testing.nccl_model] == [sys.modules[n] for n in lazy]\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)
