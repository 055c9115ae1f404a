"""Keys and numbers of drift summaries, and the worst token."""

from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline

from meshplan.errors import ShardError
from meshplan.testing.tp import (
    selected_logprobs_reference,
    summarize_kernel_drift,
    summarize_tp_logprob_drift,
    vocab_shard_ranges,
)
from tests.tp_inputs import logits_of


def test_errors_and_ulps_of_active_elements() -> None:
    reference = torch.tensor([1.0, 2.0, 4.0, 8.0])
    candidate = reference + torch.tensor([0.0, 0.5, -0.25, 100.0])
    mask = torch.tensor([True, True, True, False])
    assert summarize_kernel_drift(candidate, reference, mask) == {
        "max_abs_error": 0.5,
        "mean_abs_error": 0.25,
        "max_ulps": 1 << 21,
        "active_count": 3,
    }
    assert summarize_kernel_drift(reference, reference)["active_count"] == 4


def test_no_active_elements_are_zero_drift() -> None:
    for shape in ((3,), (0,)):
        found = summarize_kernel_drift(torch.ones(shape), torch.zeros(shape), torch.zeros(shape))
        assert found == {
            "max_abs_error": 0.0,
            "mean_abs_error": 0.0,
            "max_ulps": 0,
            "active_count": 0,
        }


@pytest.mark.parametrize(
    ("dtype", "found", "wanted", "ulps"),
    [
        (torch.float32, 1.0, 1.0000001, 1),
        (torch.float32, 0.0, -0.0, 0),
        (torch.float32, 1e-45, -1e-45, 2),
        (torch.float32, math.nan, math.nan, 0),
        (torch.float32, math.inf, math.inf, 0),
        (torch.float32, math.nan, 1.0, None),
        (torch.float32, math.inf, -math.inf, 2 * 0x7F800000),
        (torch.bfloat16, 1.0, 1.015625, 2),
        (torch.float16, -2.0, 2.0, 2 * 0x4000),
        (torch.float64, math.inf, -math.inf, 2 * 0x7FF0000000000000),
        (torch.float64, 0.5, 1.0, 1 << 52),
        (torch.int32, 3, 5, None),
    ],
)
def test_ulps_of_dtypes(dtype: torch.dtype, found: float, wanted: float, ulps: int | None) -> None:
    pair = [torch.tensor([1, x, 1], dtype=dtype) for x in (found, wanted)]
    assert summarize_kernel_drift(*pair)["max_ulps"] == ulps
    assert summarize_kernel_drift(*reversed(pair))["max_ulps"] == ulps
    assert summarize_kernel_drift(pair[0].double(), pair[1].float())["max_ulps"] is None


def test_nans_and_infinities_of_both_are_no_error() -> None:
    inf, nan = math.inf, math.nan
    same = summarize_kernel_drift(torch.tensor([inf, nan, 1.0]), torch.tensor([inf, nan, 1.0]))
    assert (same["max_abs_error"], same["mean_abs_error"]) == (0.0, 0.0)
    apart = summarize_kernel_drift(torch.tensor([nan, 1.0]), torch.tensor([1.0, 1.0]))
    assert math.isnan(apart["max_abs_error"])
    assert math.isnan(apart["mean_abs_error"])
    masked = summarize_kernel_drift(
        torch.tensor([nan, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([0, 1])
    )
    assert masked["max_abs_error"] == 0.0


def test_worst_token_is_described() -> None:
    logits = logits_of(2, 4, 19, seed=5)
    ids = torch.tensor([[0, 5, 9, 14], [18, 1, 7, 12]])
    mask = torch.tensor([[True, True, True, True], [True, False, True, True]])
    reference = selected_logprobs_reference(logits, ids, mask)
    candidate = reference.clone()
    candidate[0, 3] += 0.25
    candidate[1, 1] += 9.0
    found = summarize_tp_logprob_drift(
        candidate,
        reference,
        ids,
        vocab_shard_ranges(19, 4),
        mask,
        backend="simulated-tp",
        reduction_name="unit-test",
        dtype=torch.float16,
    )
    error = candidate[0, 3].item() - reference[0, 3].item()
    assert found.pop("max_ulps") > 1000
    assert found == {
        "max_abs_error": error,
        "mean_abs_error": error / 7,
        "active_count": 7,
        "max_rel_error": error / -reference[0, 3].item(),
        "mean_rel_error": error / -reference[0, 3].item() / 7,
        "backend": "simulated-tp",
        "reduction_name": "unit-test",
        "dtype": "torch.float16",
        "flat_index": 3,
        "multi_index": (0, 3),
        "token_id": 14,
        "owner_rank": 2,
        "owner_vocab_start": 10,
        "owner_vocab_end": 15,
        "candidate_value": candidate[0, 3].item(),
        "reference_value": reference[0, 3].item(),
        "signed_error": error,
        "tp_size": 4,
    }


def test_token_without_an_owner_has_no_rank() -> None:
    values = torch.tensor([-1.0, -2.0, 0.0], dtype=torch.bfloat16)
    found = summarize_tp_logprob_drift(
        values, values - 1, torch.tensor([9, 1, 2]), [(0, 4), (4, 8)]
    )
    assert found["dtype"] == "torch.bfloat16"
    assert (found["backend"], found["reduction_name"]) == ("reference", "tp_vocab_logsumexp")
    assert (found["flat_index"], found["token_id"], found["tp_size"]) == (0, 9, 2)
    assert found["owner_rank"] is found["owner_vocab_start"] is found["owner_vocab_end"] is None
    assert found["signed_error"] == 1.0
    exact = summarize_tp_logprob_drift(values, values, torch.tensor([9, 1, 2]), [(0, 4)])
    assert (exact["max_rel_error"], exact["mean_rel_error"]) == (0.0, 0.0)
    scalar = summarize_tp_logprob_drift(values[0], values[1], torch.tensor(1), [(0, 4)])
    assert (scalar["flat_index"], scalar["multi_index"]) == (0, ())


def test_no_active_tokens_have_no_worst_token() -> None:
    ids = torch.tensor([1, 2])
    found = summarize_tp_logprob_drift(
        torch.ones(2), torch.zeros(2), ids, [(0, 4), (4, 8)], torch.zeros(2)
    )
    numbers = ("max_abs_error", "mean_abs_error", "max_rel_error", "mean_rel_error")
    assert [found.pop(name) for name in numbers] == [0.0] * 4
    assert (found.pop("max_ulps"), found.pop("active_count")) == (0, 0)
    words = {"backend": "reference", "reduction_name": "tp_vocab_logsumexp"}
    words |= {"dtype": "torch.float32"}
    assert found == dict.fromkeys(found) | words | {"tp_size": 2}


def test_invalid_arguments_are_errors() -> None:
    a, ids = torch.ones(2), torch.tensor([0, 1])
    calls = [
        lambda: summarize_kernel_drift(a, torch.ones(3)),
        lambda: summarize_kernel_drift(a, a, torch.ones(3)),
        lambda: summarize_kernel_drift(a, a.to("meta")),
        lambda: summarize_kernel_drift(a, a * 1j),
        lambda: summarize_tp_logprob_drift(a, a, ids[:1], [(0, 4)]),
        lambda: summarize_tp_logprob_drift(a, a, ids.float(), [(0, 4)]),
        lambda: summarize_tp_logprob_drift(a, a, ids, [(0, 4), (3, 8)]),
    ]
    found = []
    for call in calls:
        with pytest.raises(ShardError) as caught:
            call()
        found.append(str(caught.value))
    assert_expected_inline(
        "\n".join(found),
        """\
MP801: candidate has shape (2,), reference has shape (3,); pass both in one shape
MP801: mask has shape (3,), candidate has shape (2,); pass both in one shape
MP801: candidate is on cpu, reference is on meta; pass both on one device
MP801: reference is torch.complex64; pass real numbers
MP801: candidate has shape (2,), token_ids has shape (1,); pass both in one shape
MP801: token_ids are torch.float32; pass integers
MP801: shard_ranges[0] is [0, 4) and shard_ranges[1] is [3, 8), they overlap; assign each token of the vocabulary to one rank""",
    )
