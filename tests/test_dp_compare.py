"""Differences of two sets of gradients, by bits and in numbers."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshplan.errors import ContractError
from meshplan.testing.dp import compare_gradients, gradient_summary

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
INF, NAN = math.inf, math.nan


def numbers(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def compare_one(found: Tensor | None, wanted: Tensor | None, **limits: float) -> Any:
    return gradient_summary({"w": found}, {"w": wanted}, **limits).parameters["w"]


def test_summary_is_of_each_parameter_and_of_all() -> None:
    reference = {"b": numbers(1.0, 2.0, 4.0), "a": numbers(3.0), "c": None, "d": numbers(0.0)}
    candidate = {"a": numbers(3.0), "b": numbers(1.0, 2.25, 3.0), "c": None, "d": numbers(INF)}
    found = asdict(gradient_summary(candidate, reference))
    equal = {
        "bitwise_equal": True,
        "max_abs_diff": 0.0,
        "max_rel_diff": 0.0,
        "max_ulps": 0,
        "mismatch_count": 0,
        "numel": 1,
    }
    near = {"max_abs_diff": 1.0, "max_rel_diff": 0.25, "max_ulps": 4194304, "mismatch_count": 2}
    far = {"max_abs_diff": INF, "max_rel_diff": INF, "max_ulps": 2139095040}
    differing = {"bitwise_equal": False, "mismatch_count": 1}
    parameters = {
        "a": equal,
        "b": equal | differing | near | {"numel": 3},
        "c": equal | {"numel": 0},
        "d": equal | differing | far,
    }
    whole = equal | differing | far | {"mismatch_count": 3, "numel": 5, "parameters": parameters}
    assert found == whole


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equal_bits_have_no_difference(dtype: torch.dtype) -> None:
    values = numbers(0.0, -0.0, 1.5, NAN, INF, -INF, dtype=dtype)
    found = compare_gradients({"w": values}, {"w": values.clone()})
    assert (found.bitwise_equal, found.mismatch_count, found.max_ulps) == (True, 0, 0)
    assert (found.max_abs_diff, found.max_rel_diff, found.numel) == (0.0, 0.0, 6)


def test_special_numbers_have_distances() -> None:
    zeros = compare_one(numbers(0.0), numbers(-0.0))
    assert (zeros.bitwise_equal, zeros.mismatch_count) == (False, 1)
    assert (zeros.max_abs_diff, zeros.max_rel_diff, zeros.max_ulps) == (0.0, 0.0, 0)
    next_up = compare_one(numbers(1.0 + 2**-23), numbers(1.0))
    assert (next_up.max_abs_diff, next_up.max_rel_diff, next_up.max_ulps) == (2**-23, 2**-23, 1)
    from_zero = compare_one(numbers(2.0), numbers(0.0))
    assert (from_zero.max_abs_diff, from_zero.max_rel_diff) == (2.0, INF)
    infinite = compare_one(numbers(INF), numbers(-INF))
    assert (infinite.max_abs_diff, infinite.max_rel_diff) == (INF, INF)
    from_infinite = compare_one(numbers(1.0), numbers(INF))
    assert (from_infinite.max_abs_diff, from_infinite.max_rel_diff) == (INF, INF)
    nan = compare_one(numbers(NAN, 1.0), numbers(1.0, 1.0))
    assert (nan.mismatch_count, nan.max_abs_diff, nan.max_ulps) == (1, INF, None)
    payloads = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    nans = compare_one(payloads[:1], payloads[1:])
    assert (nans.mismatch_count, nans.max_abs_diff, nans.max_rel_diff) == (1, 0.0, 0.0)
    none = compare_one(None, numbers(1.0, 2.0))
    assert (none.bitwise_equal, none.mismatch_count, none.max_abs_diff) == (False, 2, INF)
    assert compare_one(torch.ones(0), None).mismatch_count == 1
    assert compare_one(torch.ones(0), torch.ones(0)).bitwise_equal


@given(st.data())
def test_ulps_are_exact(data: st.DataObject) -> None:
    dtype = data.draw(
        st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
    )
    integer = INTEGERS[dtype.itemsize]
    infinity = int(numbers(INF, dtype=dtype).view(integer))
    patterns = st.tuples(st.booleans(), st.integers(0, infinity))
    pairs = data.draw(st.lists(st.tuples(patterns, patterns), min_size=1, max_size=5))

    def tensor(side: int) -> Tensor:
        least = torch.iinfo(integer).min
        values = [size + least if minus else size for minus, size in (p[side] for p in pairs)]
        return torch.tensor(values, dtype=integer).view(dtype)

    places = [[-size if minus else size for minus, size in pair] for pair in pairs]
    assert compare_one(tensor(0), tensor(1)).max_ulps == max(abs(a - b) for a, b in places)


@pytest.mark.parametrize(
    ("found", "wanted", "rtol", "atol", "count"),
    [
        ([1.01, 2.0], [1.0, 2.0], 0.02, 0.0, 0),
        ([1.01, 2.1], [1.0, 2.0], 0.02, 0.0, 1),
        ([0.01, -0.0], [0.0, 0.0], 0.0, 0.02, 0),
        ([NAN, INF], [NAN, INF], 0.1, 0.0, 0),
        ([NAN, INF], [1.0, 1.0], 10.0, 10.0, 2),
        ([1.0, INF], [INF, -INF], 10.0, 10.0, 2),
    ],
)
def test_elements_within_the_tolerance_match(
    found: list[float], wanted: list[float], rtol: float, atol: float, count: int
) -> None:
    assert (
        compare_one(numbers(*found), numbers(*wanted), rtol=rtol, atol=atol).mismatch_count == count
    )


def test_differing_gradients_are_listed() -> None:
    wanted = {"a": numbers(1.0, 2.0), "b": numbers(0.5), "c": numbers(1.0), "d": None}
    found = {"a": numbers(1.0, 2.5), "b": numbers(-0.5), "c": None, "d": numbers(1.0)}
    many = {f"layer.{i}": numbers(float(i)) for i in range(11)}
    messages = []
    calls: list[tuple[Any, Any, dict[str, float]]] = [
        (found, wanted, {}),
        (found, wanted, {"rtol": 0.3}),
    ]
    with pytest.raises(AssertionError) as caught:
        compare_gradients({name: value + 1 for name, value in many.items()}, many)
    head, *lines, last = str(caught.value).splitlines()
    assert head == "gradients of 11 of 11 parameters differ in their bits:"
    # Two lines for each parameter that is listed.
    listed = [line.split(":")[0].strip() for line in lines[::2]]
    assert (listed, last) == (sorted(many)[:8], "  and 3 more")
    for candidate, reference, limits in calls:
        with pytest.raises(AssertionError) as caught:
            compare_gradients(candidate, reference, **limits)
        messages.append(str(caught.value))
    assert_expected_inline(
        "\n".join(messages),
        """\
gradients of 4 of 4 parameters differ in their bits:
  a: 1 of 2 elements, max_abs_diff 0.5, max_rel_diff 0.25, max_ulps 2097152
    1 of 2 elements differ; first at flat index 1, index (1,): 2.5 (0x40200000), expected 2.0 (0x40000000), 2097152 ulp apart
  b: 1 of 1 elements, max_abs_diff 1, max_rel_diff 2, max_ulps 2113929216
    1 of 1 elements differ; first at flat index 0, index (0,): -0.5 (0xbf000000), expected 0.5 (0x3f000000), 2113929216 ulp apart
  c: 1 of 1 elements, max_abs_diff inf, max_rel_diff inf, max_ulps None; no gradient in the candidate
  d: 1 of 1 elements, max_abs_diff inf, max_rel_diff inf, max_ulps None; no gradient in the reference
gradients of 3 of 4 parameters differ (rtol=0.3, atol=0):
  b: 1 of 1 elements, max_abs_diff 1, max_rel_diff 2, max_ulps 2113929216
  c: 1 of 1 elements, max_abs_diff inf, max_rel_diff inf, max_ulps None; no gradient in the candidate
  d: 1 of 1 elements, max_abs_diff inf, max_rel_diff inf, max_ulps None; no gradient in the reference""",
    )


def test_incomparable_gradients_are_errors() -> None:
    w = {"w": numbers(1.0)}
    many = {f"layer.{i}": numbers(1.0) for i in range(11)}
    calls: list[tuple[Any, Any, dict[str, float]]] = [
        ({"w": w["w"], "v": None}, w, {}),
        ({"v": None}, w, {}),
        ({}, many, {}),
        ({"w": numbers(1.0, 2.0)}, w, {}),
        ({"w": numbers(1.0, dtype=torch.float64)}, w, {}),
        ({"w": torch.ones(1, dtype=torch.int32)}, {"w": torch.ones(1, dtype=torch.int32)}, {}),
        (w, w, {"rtol": -1.0}),
        (w, w, {"atol": NAN}),
    ]
    messages = []
    for candidate, reference, limits in calls:
        with pytest.raises(ValueError, match="MP411") as caught:
            compare_gradients(candidate, reference, **limits)
        assert type(caught.value) is ContractError
        messages.append(str(caught.value))
    assert_expected_inline(
        "\n".join(messages),
        """\
MP411: gradients of different parameters: 1 only in the candidate (v); compare gradients of one model
MP411: gradients of different parameters: 1 only in the reference (w) and 1 only in the candidate (v); compare gradients of one model
MP411: gradients of different parameters: 11 only in the reference (layer.0, layer.1, layer.10, layer.2, layer.3, layer.4, layer.5, layer.6, ...); compare gradients of one model
MP411: gradient of 'w' is torch.float32 (2,), in the reference torch.float32 (1,); compare gradients of one model
MP411: gradient of 'w' is torch.float64 (1,), in the reference torch.float32 (1,); compare gradients of one model
MP411: gradient of 'w' is torch.int32; compare float16, bfloat16, float32 or float64
MP411: rtol=-1.0, atol=0.0; pass finite tolerances, 0 or more
MP411: rtol=0.0, atol=nan; pass finite tolerances, 0 or more""",
    )
