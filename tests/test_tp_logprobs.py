"""Selected log-probabilities: the same bits for any number and sizes of shards."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshplan.definition import reduce_leaves
from meshplan.errors import ContractStateError, ShardError, TokenCoverageError
from meshplan.testing import assert_bitwise_equal
from meshplan.testing.tp import (
    selected_logprobs_reference,
    selected_logprobs_tp_reference,
    shard_logits_by_vocab,
    vocab_shard_ranges,
)
from meshplan.testing.tp._math import exp, log
from tests.refusals import refusal, refusals
from tests.tp_inputs import DTYPES, SIZES, boundary_tokens, logits_of, random_ranges, split


def weights(ids: Tensor) -> Tensor:
    """An upstream gradient of both signs."""
    return torch.linspace(-1.5, 2.0, ids.numel()).reshape(ids.shape)


def with_gradient(logits: Tensor, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    result = selected_logprobs_reference(leaf, ids, mask)
    result.backward(weights(ids))
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def check_shards(
    shards: list[Tensor], ids: Tensor, mask: Tensor | None, whole: tuple[Tensor, Tensor]
) -> None:
    result = selected_logprobs_tp_reference(shards, ids, mask)
    result.backward(weights(ids))
    assert_bitwise_equal(result, whole[0], "log-probabilities")
    assert_bitwise_equal(torch.cat([x.grad for x in shards], dim=-1), whole[1], "gradient")


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_shards_of_a_large_vocabulary_have_the_bits_of_one_tensor(dtype: torch.dtype) -> None:
    vocabulary = 128257
    for size in SIZES:
        kinds = [random_ranges(vocabulary, size, seed=size), vocab_shard_ranges(vocabulary, size)]
        # Even cuts for one size only.
        for ranges in kinds if size == 3 else kinds[:1]:
            ids = boundary_tokens(ranges).unsqueeze(0)
            if dtype is not torch.float32:
                # Every boundary has been met in float32; here a few at the end.
                ids = ids[:, -4:]
            mask = torch.ones_like(ids, dtype=torch.bool)
            mask[0, -1] = size != 5
            logits = logits_of(1, ids.numel(), vocabulary, seed=size, dtype=dtype)
            check_shards(split(logits, ranges), ids, mask, with_gradient(logits, ids, mask))


@given(st.data())
def test_random_shards_have_the_bits_of_one_tensor(data: st.DataObject) -> None:
    vocabulary = data.draw(st.integers(1, 70))
    cuts = data.draw(st.sets(st.integers(1, vocabulary - 1), max_size=9)) if vocabulary > 1 else ()
    ends = [0, *sorted(cuts), vocabulary]
    ranges = list(itertools.pairwise(ends))
    dtype = data.draw(st.sampled_from((*DTYPES, torch.float64)))
    options = {
        "temperature": data.draw(st.sampled_from([1.0, 0.7, 3.0])),
        "output_dtype": data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "reduction_dtype": data.draw(st.sampled_from((*DTYPES, torch.float64))),
    }
    scale = data.draw(st.sampled_from([0.0, 1.0, 30.0]))
    logits = logits_of(2, 3, vocabulary, seed=vocabulary, dtype=dtype, scale=scale)
    logits[0, 0, 0] = data.draw(st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan]))
    ids = torch.tensor([[0, vocabulary - 1, ends[1] - 1], [ends[-2], vocabulary // 2, -100]])
    mask = ids >= 0
    results = []
    for cut in ([(0, vocabulary)], ranges):
        shards = split(logits, cut)
        result = selected_logprobs_tp_reference(shards, ids, mask, **options)
        result.backward(weights(ids).to(result.dtype))
        gradient = torch.cat([x.grad for x in shards], dim=-1)
        assert (result.dtype, gradient.dtype) == (options["output_dtype"], dtype)
        results.append((result, gradient))
    for one, other in zip(*results, strict=True):
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_oracle_is_the_tree_of_the_contract(dtype: torch.dtype) -> None:
    logits = logits_of(5, 257, seed=1, dtype=dtype)
    ids = torch.tensor([0, 128, 255, 256, 17])
    wide = logits.float() / torch.tensor(0.7)
    maximum = wide.max(dim=-1).values
    columns = [exp(wide[:, v] - maximum) for v in range(257)]
    total = reduce_leaves(columns, "sum", (257,))
    expected = (wide[torch.arange(5), ids] - maximum) - log(total)
    assert_bitwise_equal(selected_logprobs_reference(logits, ids, temperature=0.7), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_match_torch(dtype: torch.dtype, temperature: float) -> None:
    logits = logits_of(3, 4, 521, seed=2, dtype=dtype).requires_grad_()
    ids = torch.randint(0, 521, (3, 4), generator=torch.Generator().manual_seed(3))
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(4)) > 0.3
    found = selected_logprobs_reference(logits, ids, mask, temperature=temperature)
    (gradient,) = torch.autograd.grad(found, logits, weights(ids))
    plain = logits.detach().double().requires_grad_()
    every = torch.log_softmax(plain / temperature, dim=-1)
    wanted = every.gather(-1, ids[..., None]).squeeze(-1).masked_fill(~mask, 0.0)
    (slope,) = torch.autograd.grad(wanted, plain, weights(ids).double())
    torch.testing.assert_close(found.double(), wanted, rtol=3e-7, atol=1e-6)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), slope, rtol=max(eps, 2e-6), atol=1e-7)
    assert not found[~mask].any()
    assert not gradient[~mask].any()


def test_closed_form_passes_gradcheck() -> None:
    logits = logits_of(2, 7, seed=5, dtype=torch.float64)
    ids, mask = torch.tensor([3, 6]), torch.tensor([True, True])

    def function(*shards: Tensor) -> Tensor:
        return selected_logprobs_tp_reference(
            shards,
            ids,
            mask,
            temperature=0.6,
            output_dtype=torch.float64,
            reduction_dtype=torch.float64,
        )

    assert torch.autograd.gradcheck(function, split(logits, [(0, 2), (2, 7)]))


def test_views_and_partial_shards_get_gradients() -> None:
    logits = logits_of(4, 67, seed=6).requires_grad_()
    ids = torch.tensor([0, 16, 17, 66])
    through_views = selected_logprobs_tp_reference(shard_logits_by_vocab(logits, 4), ids)
    (found,) = torch.autograd.grad(through_views, logits, weights(ids))
    (wanted,) = torch.autograd.grad(selected_logprobs_reference(logits, ids), logits, weights(ids))
    assert_bitwise_equal(found, wanted)
    # Tokens of probability zero under a negative upstream gradient would give -0.0.
    cold = torch.tensor([[0.0, -math.inf, 1.0, -500.0]], dtype=torch.float16).requires_grad_()
    down = torch.tensor([-1.0])
    for shards in ([cold], shard_logits_by_vocab(cold, 3)):
        result = selected_logprobs_tp_reference(shards, torch.tensor([0]))
        (slope,) = torch.autograd.grad(result, cold, down)
        assert not slope[0, 1::2].view(torch.int16).any()
    first, second = split(logits, [(0, 30), (30, 67)])
    result = selected_logprobs_tp_reference([first.detach(), second], ids)
    result.backward(weights(ids))
    assert_bitwise_equal(second.grad, wanted[:, 30:])
    assert first.grad is None
    total = selected_logprobs_reference(logits, ids).sum()
    assert_expected_inline(
        refusal(ShardError, torch.autograd.grad, total, logits, create_graph=True),
        """MP801: selected log-probabilities have a first derivative only; call backward or torch.autograd.grad without create_graph=True""",
    )


def test_test_data_reveals_a_sum_over_shards() -> None:
    logits = logits_of(16, 4099, seed=7)
    ids = torch.arange(16)
    whole = selected_logprobs_reference(logits, ids)
    maximum = logits.amax(dim=-1)
    seen = 0
    for size in SIZES[1:]:
        parts = [
            torch.exp(shard - maximum[:, None]).sum(dim=-1)
            for shard in shard_logits_by_vocab(logits, size)
        ]
        total = torch.stack(parts).sum(dim=0)
        seed_like = logits[ids, ids] - (maximum + torch.log(total))
        seen += int((seed_like != whole).sum())
    assert seen > 5


def test_masked_tokens_may_have_any_id_and_any_logits() -> None:
    logits = torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(8))
    logits[0, 1] = math.nan
    logits[0, 3, 2] = math.inf
    logits.requires_grad_()
    ids = torch.tensor([[0, -100, 8, 99]])
    mask = torch.tensor([[True, False, True, False]])
    result = selected_logprobs_tp_reference(shard_logits_by_vocab(logits, 3), ids, mask)
    result.sum().backward()
    assert_bitwise_equal(result, selected_logprobs_reference(logits, ids, mask.to(torch.int8)))
    assert_bitwise_equal(result[0, 1::2], torch.zeros(2))
    assert logits.grad is not None
    assert_bitwise_equal(logits.grad[0, 1::2], torch.zeros(2, 9))
    assert logits.grad[0, ::2].all()


def test_active_token_without_a_shard_is_an_error() -> None:
    logits = torch.zeros(1, 4, 9)
    ids = torch.tensor([[0, -100, 8, 99]])
    shards, pair = shard_logits_by_vocab(logits, 3), [logits[..., :4], logits[..., 4:]]
    for token, reference, call in (
        (99, selected_logprobs_tp_reference, (shards, ids, torch.tensor([[1, 0, 1, 1]]))),
        (-100, selected_logprobs_tp_reference, (shards, ids)),
        (-100, selected_logprobs_reference, (logits, ids)),
    ):
        found = refusal(TokenCoverageError, reference, *call)
        assert found.startswith(f"MP802: active token id {token} is not covered by any vocab shard")
    gap: dict[str, Any] = {"vocab_start_indices": [0, 5]}
    assert_expected_inline(
        refusal(TokenCoverageError, selected_logprobs_tp_reference, pair, ids * 0 + 4, **gap),
        """MP802: active token id 4 is not covered by any vocab shard, expected exactly one; mask the token out or correct the first tokens and sizes of the shards""",
    )


def test_vocabulary_may_have_gaps() -> None:
    logits = logits_of(3, 30, seed=10)
    held = [*range(3, 10), *range(14, 15), *range(22, 30)]
    starts = [3, 5, 14, 22]
    shards = [logits[:, 3:5], logits[:, 5:10], logits[:, 14:15], logits[:, 22:30]]
    ids = torch.tensor([3, 14, 29])
    found = selected_logprobs_tp_reference(shards, ids, vocab_start_indices=starts)
    wanted = torch.log_softmax(logits[:, held].double(), dim=-1)
    picked = wanted[torch.arange(3), torch.tensor([held.index(int(i)) for i in ids])]
    torch.testing.assert_close(found.double(), picked, rtol=1e-6, atol=1e-6)
    joined = [logits[:, 3:10], logits[:, 14:15], logits[:, 22:26], logits[:, 26:30]]
    again = selected_logprobs_tp_reference(joined, ids, vocab_start_indices=[3, 14, 22, 26])
    assert_bitwise_equal(again, found)


def test_infinities_and_nans_match_log_softmax() -> None:
    inf, nan = math.inf, math.nan
    rows = [
        [0.0, -inf, 1.0, -inf],  # tokens of no probability
        [0.0, nan, 1.0, 2.0],
        [0.0, inf, 1.0, 2.0],
        [-inf, -inf, -inf, -inf],
        [3e38, -3e38, 3e38, 0.0],
        [-0.0, 0.0, -inf, -inf],
    ]
    for token in range(4):
        ids = torch.full((6,), token)
        logits = torch.tensor(rows)
        whole = with_gradient(logits, ids, None)
        for cut in ([(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)]):
            check_shards(split(logits, cut), ids, None, whole)
        plain = logits.clone().requires_grad_()
        wanted = torch.log_softmax(plain, dim=-1)[:, token]
        (slope,) = torch.autograd.grad(wanted, plain, weights(ids))
        torch.testing.assert_close(whole[0], wanted, equal_nan=True)
        torch.testing.assert_close(whole[1], slope, equal_nan=True)
        assert (whole[0].view(torch.int32)[1:4] == 0x7FC00000).all()


def test_smallest_vocabularies_and_batches_are_supported() -> None:
    one = torch.tensor([[0.0], [5.0]])
    assert_bitwise_equal(selected_logprobs_reference(one, torch.tensor([0, 0])), torch.zeros(2))
    scalar = selected_logprobs_reference(torch.tensor([1.0, 2.0, 3.0]), torch.tensor(1))
    assert scalar.shape == ()
    empty = torch.zeros(2, 0, 8, requires_grad=True)
    result = selected_logprobs_tp_reference(
        shard_logits_by_vocab(empty, 3), torch.zeros(2, 0, dtype=torch.int32)
    )
    result.sum().backward()
    assert (result.shape, empty.grad.shape) == ((2, 0), (2, 0, 8))


def test_results_are_rounded_once_to_the_output_dtype() -> None:
    logits, ids = logits_of(3, 40, seed=11), torch.tensor([1, 20, 39])
    single = selected_logprobs_reference(logits, ids)
    for dtype in (*DTYPES, torch.float64):
        found = selected_logprobs_reference(logits, ids, output_dtype=dtype)
        assert_bitwise_equal(found, single.to(dtype))
    wide = selected_logprobs_tp_reference(
        [logits], ids, reduction_dtype=torch.float64, output_dtype=torch.float64
    )
    plain = torch.log_softmax(logits.double(), dim=-1)[torch.arange(3), ids]
    torch.testing.assert_close(wide, plain, rtol=1e-14, atol=0.0)
    half = selected_logprobs_reference(logits.to(torch.bfloat16), ids)
    assert_bitwise_equal(half, selected_logprobs_reference(logits.bfloat16().float(), ids))


def test_modes_and_threads_of_the_caller_do_not_change_bits() -> None:
    logits, ids = logits_of(3, 40, seed=12), torch.tensor([1, 20, 39])
    wanted = selected_logprobs_reference(logits, ids)
    with torch.inference_mode():
        assert_bitwise_equal(selected_logprobs_reference(logits, ids), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert_bitwise_equal(selected_logprobs_reference(logits, ids), wanted)
    threads = torch.get_num_threads()
    wide = logits_of(2, 128257, seed=12)
    single = selected_logprobs_reference(wide, ids[:2])
    torch.set_num_threads(3)
    try:
        assert_bitwise_equal(selected_logprobs_reference(wide, ids[:2]), single)
    finally:
        torch.set_num_threads(threads)
    strided = logits.t().contiguous().t()
    assert_bitwise_equal(selected_logprobs_reference(strided, ids), wanted)
    torch.set_default_dtype(torch.float64)
    try:
        assert_bitwise_equal(selected_logprobs_reference(logits, ids, temperature=1.0), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_invalid_arguments_are_errors() -> None:
    a, ids = torch.zeros(2, 3), torch.tensor([0, 1])
    long = torch.zeros(2, 3, dtype=torch.int64)
    calls = [
        lambda: selected_logprobs_tp_reference([], ids),
        lambda: selected_logprobs_tp_reference(a, ids),  # type: ignore[arg-type]
        lambda: selected_logprobs_tp_reference([torch.tensor(1.0)], torch.tensor(0)),
        lambda: selected_logprobs_tp_reference([a, a[:, :0]], ids),
        lambda: selected_logprobs_tp_reference([a, a.to("meta")], ids),
        lambda: selected_logprobs_tp_reference([a, a.half()], ids),
        lambda: selected_logprobs_tp_reference([long], ids),
        lambda: selected_logprobs_tp_reference([a, a[:1]], ids),
        lambda: selected_logprobs_tp_reference([a], ids[:1]),
        lambda: selected_logprobs_tp_reference([a, None], ids),  # type: ignore[list-item]
        # Others are in tests/test_tp_vocab.py.
        lambda: selected_logprobs_tp_reference([a, a], ids, vocab_start_indices=[0, 2]),
        lambda: selected_logprobs_tp_reference([a], ids.double()),
        lambda: selected_logprobs_reference(a, ids, torch.ones(3)),
        lambda: selected_logprobs_reference(a, ids, temperature=0.0),
        lambda: selected_logprobs_reference(a, ids, temperature=-1),
        lambda: selected_logprobs_reference(a, ids, temperature=math.nan),
        lambda: selected_logprobs_reference(a, ids, temperature=1e-60),
        lambda: selected_logprobs_reference(a, ids, output_dtype=torch.int32),
        lambda: selected_logprobs_tp_reference([a], ids, reduction_dtype=torch.complex64),
    ]
    assert_expected_inline(
        refusals(ShardError, calls),
        """\
MP801: logit_shards is empty; pass at least one shard
MP801: logit_shards is one tensor; pass a list of shards, [x] for a single one
MP801: logit_shards has shape (); pass at least one token of the vocabulary in the last dim
MP801: logit_shards[1] has shape (2, 0); pass at least one token of the vocabulary in the last dim
MP801: logit_shards[1] is torch.float32 on meta, logit_shards[0] is torch.float32 on cpu; pass all shards in one dtype on one device
MP801: logit_shards[1] is torch.float16 on cpu, logit_shards[0] is torch.float32 on cpu; pass all shards in one dtype on one device
MP801: logit_shards is torch.int64; pass floating-point logits
MP801: logit_shards[1] without its last dim has shape (1,), token_ids has shape (2,); pass both in one shape
MP801: logit_shards without its last dim has shape (2,), token_ids has shape (1,); pass both in one shape
MP801: logit_shards[1] is a NoneType; pass a torch.Tensor
MP801: logit_shards[0] is [0, 3) and logit_shards[1] is [2, 5), they overlap; assign each token of the vocabulary to one rank
MP801: token_ids are torch.float64; pass integers
MP801: mask has shape (3,), token_ids has shape (2,); pass both in one shape
MP801: temperature is 0.0, in torch.float32 0.0; pass a finite number above zero
MP801: temperature is -1, in torch.float32 -1.0; pass a finite number above zero
MP801: temperature is nan, in torch.float32 nan; pass a finite number above zero
MP801: temperature is 1e-60, in torch.float32 0.0; pass a finite number above zero
MP801: output_dtype is torch.int32; use one of torch.float32, torch.bfloat16, torch.float16, torch.float64
MP801: reduction_dtype is torch.complex64; use one of torch.float32, torch.bfloat16, torch.float16, torch.float64""",
    )


def test_flushed_subnormals_are_an_error() -> None:
    torch.set_flush_denormal(True)
    try:
        with pytest.raises(ContractStateError):
            selected_logprobs_reference(torch.zeros(1, 2), torch.tensor([0]))
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_bits_match_the_cpu(dtype: torch.dtype) -> None:
    logits = logits_of(6, 4099, seed=13, dtype=dtype)
    ranges = random_ranges(4099, 3, seed=14)
    ids = boundary_tokens(ranges)
    whole = with_gradient(logits, ids, None)
    shards = [x.detach().cuda().requires_grad_() for x in split(logits, ranges)]
    result = selected_logprobs_tp_reference(shards, ids.cuda())
    result.backward(weights(ids).cuda())
    assert_bitwise_equal(result, whole[0])
    assert_bitwise_equal(torch.cat([x.grad for x in shards], dim=-1), whole[1])
