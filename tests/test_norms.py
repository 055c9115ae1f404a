"""Exact norms: against rationals, on any mesh, by the compiled library and by plain torch."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshplan import clip_grad_norm_, exact_norm
from meshplan.errors import ContractError, ContractTypeError, MeshplanError
from meshplan.kernel import _digest
from meshplan.testing import bits
from tests.processes import common_result, run_ranks

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def random_floats(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Every bit pattern of a finite number is as likely, or a normal distribution."""
    draw = torch.Generator().manual_seed(seed)
    if seed % 3 == 0:
        return torch.randn(numel, generator=draw).to(dtype)
    integer = INTEGERS[dtype.itemsize]
    limits = torch.iinfo(integer)
    found = torch.randint(limits.min, limits.max, (numel,), generator=draw, dtype=integer)
    return torch.where(found.view(dtype).isfinite(), found.view(dtype), 0)


def square_of(tensor: Tensor) -> Fraction:
    return sum((Fraction(x) ** 2 for x in tensor.double().flatten().tolist()), Fraction(0))


def defined(tensor: Tensor) -> float:
    """The exact sum of squares, rounded once, and its root."""
    total = square_of(tensor)
    try:
        return math.sqrt(total.numerator / total.denominator)
    except OverflowError:
        return math.inf


@pytest.fixture(params=["compiled", "plain torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain torch":
        monkeypatch.setattr(_digest, "available", lambda: False)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norm_is_the_exact_sum_rounded_once(dtype: torch.dtype) -> None:
    for seed in range(12):
        tensor = random_floats(1 + 97 * seed, dtype, seed)
        want = defined(tensor)
        assert exact_norm(tensor).item() == want
        assert exact_norm(list(tensor.flip(0).split(7))).item() == want
    strided = random_floats(600, dtype, 3).view(20, 30).t()[::2]
    assert exact_norm(strided).item() == defined(strided)


@pytest.mark.usefixtures("library")
def test_norm_of_special_values_is_that_of_torch() -> None:
    inf, nan = math.inf, math.nan
    for values in ([], [0.0, -0.0], [1.0, inf], [nan, inf], [-inf], [nan]):
        for dtype in FLOATS:
            tensor = torch.tensor(values, dtype=dtype)
            want = torch.linalg.vector_norm(tensor, dtype=torch.float64)
            assert torch.equal(bits(exact_norm(tensor)), bits(want))
    # The sum exceeds float64; a norm of complex numbers; no tensors.
    assert exact_norm(torch.tensor([1e200], dtype=torch.float64)).item() == inf
    assert exact_norm(torch.tensor([3 + 4j])).item() == 5.0
    assert exact_norm([]).item() == 0.0


@pytest.mark.parametrize("size", [0, 399, 401, -400, -401, -1030])
@pytest.mark.parametrize("spread", [0, 17, 18, 40])
def test_blocks_of_nearly_equal_sizes(size: int, spread: int) -> None:
    """The largest significands, random ones and zeros, below the bound of a block and above it."""
    draw = torch.Generator().manual_seed(spread)
    found = torch.empty(512, dtype=torch.float64).uniform_(1, 2, generator=draw)
    found[:40], found[-1] = 2 - 2.0**-52, 1 + 2.0**-52
    found *= 2.0 ** -torch.randint(0, spread + 1, (512,), generator=draw)
    found[40:80] = 2 - 2.0**-52
    found[80:90] = 0.0
    found[::3] *= -1
    found *= 2.0**size
    assert exact_norm(found).item() == defined(found)


@pytest.mark.full
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_many_pieces(dtype: torch.dtype) -> None:
    """Pieces, carries between them, and several dtypes in one list."""
    ones = torch.ones(3 << 20, dtype=dtype)
    tensors = [ones, random_floats(4000, torch.float32, 1), torch.ones(5), ones[1:]]
    want = square_of(tensors[1]) + 2 * ones.numel() + 4
    assert exact_norm(tensors).item() == math.sqrt(want.numerator / want.denominator)


def placements(rank: int) -> list[int]:
    """The norm and the clipped gradients of the same numbers, on meshes of 4 ranks."""
    weights = [random_floats(35, torch.float32, 3).view(7, 5), random_floats(11, torch.float32, 6)]
    found: list[list[int]] = []

    def check(gradients: list[Tensor]) -> None:
        parameters = [torch.nn.Parameter(torch.zeros_like(one)) for one in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        total = clip_grad_norm_(parameters, 0.5)
        values = [total, *(parameter.grad for parameter in parameters)]
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in values]
        found.append([word for one in whole for word in bits(one).flatten().tolist()])

    check(weights)
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for mesh, places in (
        (flat, [(Shard(0),), (Replicate(),)]),
        (square, [(Shard(0), Shard(1)), (Shard(0), Replicate())]),
        (square, [(Shard(0), Shard(0)), (Replicate(), Shard(0))]),
        (square["tp"], [(Shard(0),), (Shard(0),)]),
    ):
        pairs = zip(weights, places, strict=True)
        check([distribute_tensor(one, mesh, place) for one, place in pairs])
    # Stages of a pipeline: each rank has numbers of its own.
    rows = torch.cat([one.flatten() for one in weights]).tensor_split(4)
    alone = exact_norm(rows[rank], group=dist.group.WORLD)
    assert bits(alone).tolist() == found[0][0]
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.full
def test_norm_and_clipped_gradients_of_any_mesh() -> None:
    assert len({tuple(found) for found in run_ranks(placements, 4)}) == 1


def shards(rank: int) -> list[int]:
    whole = random_floats(1003, torch.bfloat16, 9)
    found = []
    for ranks in range(1, dist.get_world_size() + 1):
        group = dist.new_group(list(range(ranks)))
        if rank < ranks:
            part = whole.tensor_split(ranks)[rank]
            found.append(int(bits(exact_norm(part, group=group if ranks > 1 else None))))
    return found


@pytest.mark.full
def test_norm_of_1_to_8_shards() -> None:
    assert len({word for found in run_ranks(shards, 8) for word in found}) == 1


def test_clipping_follows_torch() -> None:
    for maximum, scale in ((0.5, 1.0), (1e9, 1.0), (0.5, math.nan), (0.5, math.inf)):
        for foreach in (None, False):
            pairs = []
            for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
                parameter = torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))
                parameter.grad = random_floats(64, torch.float32, 0).double() * scale
                clip([parameter, torch.nn.Parameter(torch.zeros(2))], maximum, foreach=foreach)
                pairs.append(parameter.grad)
            torch.testing.assert_close(*pairs, equal_nan=True)


class TestMessages(TestCase):
    def test_unsupported_tensors_and_norms_are_refused(self) -> None:
        def messages(rank: int) -> list[str]:
            mesh = init_device_mesh("cpu", (2,))
            partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
            calls: list[tuple[Any, dict[str, Any], Any]] = [
                (torch.ones(2), {"norm_type": 1}, ContractError),
                ([torch.ones(2), partial], {}, ContractError),
                (torch.ones(2, dtype=torch.int64), {}, ContractTypeError),
                ([torch.ones(2).to_sparse()], {}, ContractTypeError),
                (torch.tensor([math.inf]), {"error_if_nonfinite": True}, RuntimeError),
            ]
            found = []
            for tensors, options, error in calls:
                with pytest.raises(error) as caught:
                    exact_norm(tensors, **options)
                assert (error is RuntimeError) != isinstance(caught.value, MeshplanError)
                found.append(str(caught.value))
            return found

        self.assertExpectedInline(
            "\n".join(common_result(messages, 2)),
            """\
MP411: norm_type=1: only the 2-norm has an exact sum here; pass norm_type=2.0, or call torch.nn.utils.get_total_norm
MP411: on rank 0: tensor 1 is (Partial(sum),), a sum that has not been made; redistribute it to Replicate or Shard first
MP412: tensor 0 is torch.int64, whose squares have no exact sum here; convert it to one of float16, bfloat16, float32, float64
MP412: tensor 0 is torch.sparse_coo; pass a dense one, e.g. tensor.to_dense()
the norm is inf, so that gradients cannot be scaled by it; pass error_if_nonfinite=False to scale them anyway""",
        )
