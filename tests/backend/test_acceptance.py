"""What gloo accepts is accepted over it; what it rejects is rejected with gloo's own error."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshplan.backend  # noqa: F401 - registers the backend
from tests.processes import run_ranks

pytestmark = pytest.mark.processes
RANKS = 2
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex32, torch.complex128, torch.bool, torch.uint8, torch.uint16, torch.uint32),
    *(torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def ones(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(shape).to(dtype)


def all_reduce(dtype: torch.dtype, op: Any, group: Any) -> Tensor:
    dist.all_reduce(x := ones(dtype, 4), op, group)
    return x


def reduce(dtype: torch.dtype, op: Any, group: Any) -> Tensor:
    dist.reduce(x := ones(dtype, 4), 0, op, group)
    return x if group.rank() == 0 else ones(dtype, 0)


def reduce_scatter(dtype: torch.dtype, op: Any, group: Any) -> Tensor:
    out = ones(dtype, 2)
    dist.reduce_scatter(out, [ones(dtype, 2), ones(dtype, 2)], op, group)
    return out


def reduce_scatter_single(dtype: torch.dtype, op: Any, group: Any) -> Tensor:
    out = ones(dtype, 2)
    dist.reduce_scatter_tensor(out, ones(dtype, 4), op, group)
    return out


def coalesced(dtype: torch.dtype, op: Any, group: Any) -> Tensor:
    given = dist.AllreduceCoalescedOptions()
    given.reduceOp = op
    parts = [ones(dtype, 2), ones(dtype, 3)]
    group.allreduce_coalesced(parts, given).wait()
    return torch.cat([part.view(-1) for part in parts])


def sparse(dtype: torch.dtype, op: Any, group: Any) -> Tensor:
    x = torch.eye(3).to(dtype)[group.rank()].to_sparse()
    dist.all_reduce(x, op, group)
    return x.to_dense()


FORMS = (all_reduce, reduce, reduce_scatter, reduce_scatter_single, coalesced, sparse)


def outcome(run: Callable[[], Tensor]) -> tuple[str, str, list[int]]:
    try:
        found = run()
    except Exception as error:
        return "error", str(error).splitlines()[0], []
    return "ok", "", found.contiguous().view(-1).view(torch.uint8).tolist()


def compare(_: int) -> list[str]:
    gloo, ours = dist.new_group(backend="gloo"), dist.new_group(backend="meshplan")
    wrong = []
    for form, dtype, name in itertools.product(FORMS, DTYPES, OPS):
        op = getattr(dist.ReduceOp, name)
        plain = outcome(lambda f=form, d=dtype, o=op: f(d, o, gloo))  # type: ignore[misc]
        found = outcome(lambda f=form, d=dtype, o=op: f(d, o, ours))  # type: ignore[misc]
        # The contract defines these, and gloo does not. Bitwise operations are run on bytes.
        defined = dtype in (torch.int16, torch.complex32)
        integral = not (dtype.is_floating_point or dtype.is_complex)
        more = plain[0] == "error" and (defined or (name.startswith("B") and integral))
        if dtype is torch.bool:
            # gloo adds the bytes of booleans, and leaves a 2 in one.
            plain = (*plain[:2], [int(byte != 0) for byte in plain[2]])
            more = more or plain[0] == found[0] == "error"
        if found != plain and not more:
            wrong.append(f"{form.__name__} {name} of {dtype}: {plain} by gloo, {found}")
    return wrong


def test_gloo_and_the_backend_accept_the_same() -> None:
    assert run_ranks(compare, RANKS) == [[]] * RANKS
