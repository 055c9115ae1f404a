"""Differences of two sets of gradients: by bits, and within tolerances."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from meshplan.errors import ContractError
from meshplan.testing.dp import compare_gradients
from tests.refusals import refusal

INF, NAN = math.inf, math.nan


def numbers(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_only_equal_bits_agree(dtype: torch.dtype) -> None:
    values = numbers(0.0, -0.0, 1.5, NAN, INF, -INF, dtype=dtype)
    compare_gradients({"w": values, "v": None}, {"v": None, "w": values.clone()})
    with pytest.raises(AssertionError, match="1 of 1 elements differ"):
        compare_gradients({"w": numbers(0.0, dtype=dtype)}, {"w": numbers(-0.0, dtype=dtype)})


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
    pair = {"w": numbers(*found)}, {"w": numbers(*wanted)}
    if not count:
        compare_gradients(*pair, rtol=rtol, atol=atol)
        return
    with pytest.raises(AssertionError, match=f"Mismatched elements: {count} / 2"):
        compare_gradients(*pair, rtol=rtol, atol=atol)


def test_differing_gradients_are_listed() -> None:
    wanted = {"a": numbers(1.0, 2.0), "b": numbers(0.5), "c": numbers(1.0), "d": None}
    found = {"a": numbers(1.0, 2.5), "b": numbers(0.5), "c": None, "d": numbers(1.0)}
    many = {f"layer.{i}": numbers(float(i)) for i in range(11)}
    head, *lines = refusal(
        AssertionError, compare_gradients, {name: value + 1 for name, value in many.items()}, many
    ).splitlines()
    assert head == "gradients of 11 of 11 parameters differ in their bits"
    listed = [line.split(":")[0].strip() for line in lines]
    assert listed == sorted(many)[:8]
    with pytest.raises(AssertionError, match="None mismatch"):
        compare_gradients(found, wanted, rtol=0.3)
    assert_expected_inline(
        refusal(AssertionError, compare_gradients, found, wanted),
        """\
gradients of 3 of 4 parameters differ in their bits
  a: 1 of 2 elements differ; first at flat index 1, index (1,): 2.5 (0x40200000), expected 2.0 (0x40000000), 2097152 ulp apart
  c: no gradient in the candidate
  d: no gradient in the reference""",
    )


def test_incomparable_gradients_are_errors() -> None:
    w = {"w": numbers(1.0)}
    many = {f"layer.{i}": numbers(1.0) for i in range(11)}
    calls: list[tuple[Any, Any, dict[str, float]]] = [
        ({"v": None}, w, {}),
        ({}, many, {"rtol": 1.0}),
        (w, w, {"rtol": -1.0}),
        (w, w, {"atol": NAN}),
    ]
    assert_expected_inline(
        "\n".join(
            refusal(ContractError, compare_gradients, one, other, **limits)
            for one, other, limits in calls
        ),
        """\
MP411: gradients of different parameters: w only in the reference, v only in the candidate; compare gradients of one model
MP411: gradients of different parameters: layer.0, layer.1, layer.10, layer.2, layer.3, layer.4, layer.5, layer.6, ... only in the reference, none only in the candidate; compare gradients of one model
MP411: rtol=-1.0, atol=0.0; pass finite tolerances, 0 or more
MP411: rtol=0.0, atol=nan; pass finite tolerances, 0 or more""",
    )
