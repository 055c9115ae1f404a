"""The references over gloo ranks: the bits of one process, and the same errors on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshplan.errors import MeshplanError
from meshplan.testing import assert_bitwise_equal, assert_replicas_equal, bits, order_sensitive
from meshplan.testing.tp import (
    distributed_active_token_count,
    distributed_masked_mean,
    distributed_masked_sum,
    masked_mean,
    masked_sum,
    selected_logprobs_distributed_tp_reference,
    selected_logprobs_reference,
    selected_logprobs_tp_reference,
)
from tests.processes import common_result, run_ranks
from tests.tp_inputs import DTYPES, boundary_tokens, logits_of, random_ranges

WORLD = 4


def test_missing_process_group_is_an_error() -> None:
    calls = [
        lambda: selected_logprobs_distributed_tp_reference(
            torch.zeros(1, 2), torch.tensor([0]), vocab_start_index=0
        ),
        lambda: distributed_masked_sum(torch.ones(2)),
        lambda: distributed_active_token_count(torch.ones(2)),
        lambda: distributed_masked_mean(torch.ones(2)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="MP503"):
            call()


def check_logprobs(
    rank: int, ranks: list[int], vocabulary: int, dtype: torch.dtype, group: dist.ProcessGroup
) -> Tensor:
    """This rank's result, which has been compared with that of one process."""
    size = len(ranks)
    ranges = random_ranges(vocabulary, size, seed=size)
    ids = boundary_tokens(ranges).reshape(2, size)
    mask = torch.ones(2, size, dtype=torch.bool)
    mask[1, 0] = size < 3
    logits = logits_of(2, size, vocabulary, seed=size, dtype=dtype)
    upstream = torch.linspace(-1.5, 2.0, ids.numel()).reshape(ids.shape)
    options = {"temperature": 0.9, "output_dtype": torch.float32}
    whole = logits.clone().requires_grad_()
    wanted = selected_logprobs_reference(whole, ids, mask, **options)
    wanted.backward(upstream)
    # The last rank of the group holds the first tokens.
    start, stop = ranges[-1 - ranks.index(rank)]
    local = logits[..., start:stop].clone().requires_grad_()
    found = selected_logprobs_distributed_tp_reference(
        local, ids, mask, vocab_start_index=start, group=group, **options
    )
    found.backward(upstream)
    assert_bitwise_equal(found, wanted, f"{size} ranks, {vocabulary} tokens, {dtype}")
    assert_bitwise_equal(local.grad, whole.grad[..., start:stop], "gradient")
    assert_replicas_equal(found, group)
    return bits(found)


def check_all_logprobs(rank: int) -> dict[str, list[int]]:
    found = {}
    for ranks in ([0], [0, 1], [2, 0, 3], [0, 1, 2, 3], [3, 1, 0, 2]):
        group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        for vocabulary in (257, 4099):
            for dtype in DTYPES:
                result = check_logprobs(rank, ranks, vocabulary, dtype, group)
                found[f"{ranks} {vocabulary} {dtype}"] = result.flatten().tolist()
    found["big"] = check_logprobs(
        rank, [0, 1, 2, 3], 128257, torch.bfloat16, dist.group.WORLD
    ).tolist()
    return found


@pytest.mark.processes
def test_logprobs_over_ranks_have_the_bits_of_one_process() -> None:
    results = run_ranks(check_all_logprobs, WORLD)
    for key in results[0]:
        values = [result[key] for result in results if key in result]
        assert values.count(values[0]) == len(values) >= 1
    assert len(results[0]) == 5 * 2 * 3 + 1


def check_special_logits(rank: int) -> list[int]:
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [[0.0, -inf, 1.0], [0.0, 1.0, nan], [inf, 0.0, 1.0], [-inf, -inf, -inf], [-0.0, -0.0, -inf]]
    )
    ids = torch.tensor([0, 1, 2, 0, 1])
    local = logits[:, rank : rank + 1]
    found = [
        selected_logprobs_distributed_tp_reference(local, ids, vocab_start_index=rank, **options)
        for options in (
            {},
            {"reduction_dtype": torch.bfloat16},
            {"reduction_dtype": torch.float64, "output_dtype": torch.float16},
        )
    ]
    assert_bitwise_equal(found[0], selected_logprobs_reference(logits, ids))
    assert_bitwise_equal(
        found[1],
        selected_logprobs_tp_reference([logits], ids, reduction_dtype=torch.bfloat16),
    )
    nobody = selected_logprobs_distributed_tp_reference(
        torch.zeros(0, 4), ids[:0], vocab_start_index=4 * rank
    )
    assert nobody.shape == (0,)
    alone = selected_logprobs_distributed_tp_reference(
        torch.zeros(3), torch.tensor(5), vocab_start_index=3 * rank
    )
    assert_bitwise_equal(alone, selected_logprobs_reference(torch.zeros(9), torch.tensor(5)))
    return [x for one in found for x in bits(one).tolist()]


def leaves_of(rank: int, sizes: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, slice]:
    """All values, their mask, and the part of this rank."""
    n = sum(sizes)
    parts = [order_sensitive(1, rank=i, world_size=n, dtype=dtype) for i in range(n)]
    mask = torch.arange(n) % 5 != 3
    start = sum(sizes[:rank])
    return torch.cat(parts), mask, slice(start, start + sizes[rank])


def check_masked(rank: int) -> list[float]:
    results = []
    for sizes in ([7, 0, 30], [0, 1, 0], [12, 13, 14], [1, 36, 2]):
        for dtype in (*DTYPES, torch.float64):
            values, mask, here = leaves_of(rank, sizes, dtype)
            for reduction in (torch.float32, torch.float64, torch.float16):
                found = distributed_masked_sum(values[here], mask[here], reduction_dtype=reduction)
                wanted = masked_sum([values], [mask], reduction_dtype=reduction)
                assert_bitwise_equal(found, wanted, f"sum of {sizes}, {dtype}")
            leaf = values[here].clone().requires_grad_()
            whole = values.clone().requires_grad_()
            found = distributed_masked_mean(leaf, mask[here])
            wanted = masked_mean(whole, mask)
            assert_bitwise_equal(found, wanted, "mean")
            (found * 3.0).backward()
            (wanted * 3.0).backward()
            assert_bitwise_equal(leaf.grad, whole.grad[here], "gradient of the mean")
            count = distributed_active_token_count(mask[here].float(), local_values=leaf)
            assert count.item() == int(mask.sum())
            # Values of any shape; a mask on some ranks only.
            square = values[here].reshape(1, -1)
            some = distributed_masked_sum(square, None if rank else mask[here].reshape(1, -1))
            partly = mask.clone()
            partly[sizes[0] :] = True
            assert_bitwise_equal(some, masked_sum(values, partly))
            results.append(float(found.detach()))
    nothing = distributed_masked_mean(torch.ones(2, 0), torch.ones(2, 0))
    assert_bitwise_equal(nothing, torch.tensor(0.0))
    off = distributed_masked_mean(torch.full((2,), math.nan), torch.zeros(2))
    assert_bitwise_equal(off, torch.tensor(0.0))
    either = (torch.ones(3, dtype=torch.int8), None) if rank == 1 else (None, torch.ones(rank + 1))
    assert distributed_active_token_count(either[0], local_values=either[1]).item() == 7.0
    return results


def check_special_and_masked(rank: int) -> tuple[list[int], list[float]]:
    return check_special_logits(rank), check_masked(rank)


@pytest.mark.processes
def test_masked_reductions_and_special_logits_match_over_ranks() -> None:
    common_result(check_special_and_masked, 3)


Change = dict[str, object]


def check_errors(rank: int) -> list[str]:
    """What this rank raises where some rank is wrong; all ranks come to the end."""
    ids = torch.tensor([0, 4, 8])

    def logprobs(**changes: object) -> Callable[[], Tensor]:
        given: Change = {
            "local_logits": torch.zeros(3, 3),
            "token_ids": ids,
            "mask": None,
            "vocab_start_index": 3 * rank,
            **changes,
        }
        return lambda: selected_logprobs_distributed_tp_reference(**given)  # type: ignore[arg-type]

    def only(who: int, **changes: object) -> Callable[[], Tensor]:
        return logprobs(**(changes if rank == who else {}))

    two = rank == 2
    mesh = init_device_mesh("cpu", (3,))
    sharded = DTensor.from_local(torch.zeros(3, 3), mesh, [Shard(1)])
    cases: dict[str, Callable[[], Tensor]] = {
        "logits without tokens": only(1, local_logits=torch.zeros(3)),
        "no vocabulary": only(0, local_logits=torch.zeros(3, 0)),
        "no tensor": only(2, local_logits=None),
        "DTensor": logprobs(local_logits=sharded),
        "negative start": only(1, vocab_start_index=-3),
        "start that is no number": only(1, vocab_start_index="x"),
        "temperature": only(2, temperature=0.5),
        "bad temperature": logprobs(temperature=0.0),
        "other tokens": only(1, token_ids=torch.tensor([0, 4, 7])),
        "other mask": only(1, mask=torch.tensor([1, 1, 0])),
        "other dtype": only(2, local_logits=torch.zeros(3, 3, dtype=torch.float16)),
        "other output": only(0, output_dtype=torch.bfloat16),
        "token of nobody": logprobs(token_ids=torch.tensor([0, 9, 2])),
        "token of two": logprobs(vocab_start_index=min(3 * rank, 3)),
        "overlap": logprobs(token_ids=ids * 0, vocab_start_index=3 * rank - two),
        "gap": logprobs(token_ids=ids * 0, vocab_start_index=3 * rank + 5 * two),
        "gap at the start": logprobs(token_ids=ids + 1, vocab_start_index=3 * rank + 1),
        "sum of nothing": lambda: distributed_masked_sum(None if two else torch.ones(2)),  # type: ignore[arg-type]
        "sums of two dtypes": lambda: distributed_masked_sum(
            torch.ones(2, dtype=torch.float16 if two else torch.float32)
        ),
        "mask of another shape": lambda: distributed_masked_sum(
            torch.ones(2), torch.ones(3 if two else 2)
        ),
        "reduction dtype": lambda: distributed_masked_sum(
            torch.ones(2), reduction_dtype=torch.float64 if two else torch.float32
        ),
        "integers": lambda: distributed_masked_sum(torch.ones(2), reduction_dtype=torch.int64),
        "count of nothing": lambda: distributed_active_token_count(
            None, local_values=None if two else torch.ones(2)
        ),
        "eps": lambda: distributed_masked_mean(torch.ones(2), eps=1e-3 if two else 1e-8),
        "bad eps": lambda: distributed_masked_mean(torch.ones(2), eps=-1.0 if two else 1e-8),
    }
    found = []
    for name, call in cases.items():
        with pytest.raises((MeshplanError, ValueError)) as caught:
            call()
        found.append(f"{name}: {type(caught.value).__name__} {caught.value}")
    # No rank waits or is ahead.
    logprobs()()
    return found


@pytest.mark.processes
def test_invalid_arguments_of_one_rank_are_errors_on_all() -> None:
    results = run_ranks(check_errors, 3)
    rows = []
    for lines in zip(*results, strict=True):
        different = list(dict.fromkeys(lines))
        rows += [
            line if len(different) == 1 else f"{line} [{''.join(map(str, at))}]"
            for line in different
            for at in [[rank for rank in range(3) if lines[rank] == line]]
        ]
    assert_expected_inline(
        "\n".join(rows),
        """\
logits without tokens: ShardError MP801: rank 1 raised ShardError: MP801: local_logits without its last dim has shape (), token_ids has shape (3,); pass both in one shape; all ranks of the group stopped [02]
logits without tokens: ShardError MP801: local_logits without its last dim has shape (), token_ids has shape (3,); pass both in one shape [1]
no vocabulary: ShardError MP801: local_logits has shape (3, 0); pass at least one token of the vocabulary in the last dim [0]
no vocabulary: ShardError MP801: rank 0 raised ShardError: MP801: local_logits has shape (3, 0); pass at least one token of the vocabulary in the last dim; all ranks of the group stopped [12]
no tensor: ShardError MP801: rank 2 raised ShardError: MP801: local_logits is a NoneType; pass a torch.Tensor; all ranks of the group stopped [01]
no tensor: ShardError MP801: local_logits is a NoneType; pass a torch.Tensor [2]
DTensor: ShardError MP801: local_logits is a DTensor; pass the tensor of this rank, x.to_local()
negative start: ShardError MP801: rank 1 raised ShardError: MP801: vocab_start_index is -3; pass an index from zero on; all ranks of the group stopped [02]
negative start: ShardError MP801: vocab_start_index is -3; pass an index from zero on [1]
start that is no number: ShardError MP801: rank 1 raised ValueError: invalid literal for int() with base 10: 'x'; all ranks of the group stopped [02]
start that is no number: ValueError invalid literal for int() with base 10: 'x' [1]
temperature: SignatureMismatchError MP703: ranks differ in temperature: 1.0 on rank 0, 0.5 on rank 2; pass the same on all ranks
bad temperature: ShardError MP801: temperature is 0.0, in torch.float32 0.0; pass a finite number above zero
other tokens: SignatureMismatchError MP703: ranks differ in token_ids under the mask: (3,) #07cd28553882 on rank 0, (3,) #bbfc72a1f940 on rank 1; pass the same on all ranks
other mask: SignatureMismatchError MP703: ranks differ in mask: (3,) #ad75f0bb4025 on rank 0, (3,) #abea3a646b57 on rank 1; pass the same on all ranks
other dtype: SignatureMismatchError MP703: ranks differ in the dtype of logits: torch.float32 on rank 0, torch.float16 on rank 2; pass the same on all ranks
other output: SignatureMismatchError MP703: ranks differ in output_dtype: torch.bfloat16 on rank 0, torch.float32 on rank 1; pass the same on all ranks
token of nobody: TokenCoverageError MP802: active token id 9 is not covered by any vocab shard, expected exactly one; mask the token out or correct the first tokens and sizes of the shards
token of two: TokenCoverageError MP802: active token id 4 is covered by 2 vocab shards, expected exactly one; mask the token out or correct the first tokens and sizes of the shards
overlap: ShardError MP801: the shard [5, 8) of rank 2 overlaps that of rank 1, which ends at 6; assign each token of the vocabulary to one rank
gap: ShardError MP801: no rank holds the tokens 6 to 10 of the vocabulary, the shard [11, 14) of rank 2 comes next; assign each token to one rank
gap at the start: ShardError MP801: no rank holds the tokens 0 to 0 of the vocabulary, the shard [1, 4) of rank 0 comes next; assign each token to one rank
sum of nothing: ShardError MP801: rank 2 raised ShardError: MP801: local_values is a NoneType; pass a torch.Tensor; all ranks of the group stopped [01]
sum of nothing: ShardError MP801: local_values is a NoneType; pass a torch.Tensor [2]
sums of two dtypes: SignatureMismatchError MP703: ranks differ in the dtype of values: torch.float32 on rank 0, torch.float16 on rank 2; pass the same on all ranks
mask of another shape: ShardError MP801: rank 2 raised ShardError: MP801: mask has shape (3,), local_values has shape (2,); pass both in one shape; all ranks of the group stopped [01]
mask of another shape: ShardError MP801: mask has shape (3,), local_values has shape (2,); pass both in one shape [2]
reduction dtype: SignatureMismatchError MP703: ranks differ in reduction_dtype: torch.float32 on rank 0, torch.float64 on rank 2; pass the same on all ranks
integers: ShardError MP801: reduction_dtype is torch.int64; use one of torch.float32, torch.bfloat16, torch.float16, torch.float64
count of nothing: ShardError MP801: rank 2 raised ShardError: MP801: local_values is a NoneType; pass a torch.Tensor; all ranks of the group stopped [01]
count of nothing: ShardError MP801: local_values is a NoneType; pass a torch.Tensor [2]
eps: SignatureMismatchError MP703: ranks differ in eps: 1e-08 on rank 0, 0.001 on rank 2; pass the same on all ranks
bad eps: ShardError MP801: rank 2 raised ShardError: MP801: eps is -1.0; pass a finite number, at least zero; all ranks of the group stopped [01]
bad eps: ShardError MP801: eps is -1.0; pass a finite number, at least zero [2]""",
    )
