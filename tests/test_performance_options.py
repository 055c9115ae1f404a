"""No performance option changes a bit: paths, buckets, asynchronous calls, lists, foreach, audits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import meshplan
from meshplan import BackendOptions, Contract, clip_grad_norm_, collectives
from meshplan.collectives import _reduction, functional
from meshplan.definition import reduce_leaves
from meshplan.execute import PATHS
from meshplan.kernel import _digest
from meshplan.testing import bits
from tests.inputs import draw_leaves
from tests.marks import full
from tests.processes import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WORLD_SIZE, NUMEL = 4, 1003

# Options that change how long a call takes, all of which are walked below.
WALKED = {"path", "async_op", "out", "debug", "audit", "verify", "foreach"}
# Options that select the result, the ranks or the errors.
SELECTING = {
    *("op", "contract", "dim", "sizes", "policy"),
    *("group", "distinct", "inner", "topology"),
    *("strict", "timeout", "error_if_nonfinite", "norm_type", "allow_untested_torch"),
}


def test_every_option_is_walked_or_selects_the_result() -> None:
    functions = [
        *(getattr(collectives, name) for name in dir(collectives) if name.startswith("determ")),
        *(functional.all_reduce, functional.reduce_scatter, functional.all_gather),
        *(collectives.exact_norm, clip_grad_norm_, meshplan.install, BackendOptions),
    ]
    optional = {
        name
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    assert optional == WALKED | SELECTING


def paths_of(contract: Contract) -> list[str]:
    """The paths under a contract; those of integers are for exact sums."""
    exact = contract.order == "exact"
    return [path for path in PATHS if path != "native" and (exact or "integer" not in path)]


def waited(result: Any) -> Any:
    return result.result() if isinstance(result, collectives.Work) else result


def single_calls(leaf: Tensor, contract: Contract) -> Iterator[tuple[str, Tensor]]:
    """The sum of the ranks' leaves, by each form of a call for one tensor."""
    sizes = [len(part) for part in torch.chunk(leaf, WORLD_SIZE)]
    for path in paths_of(contract):
        options: dict[str, Any] = {"path": path, "contract": contract}
        for async_op in (False, True):
            summand = leaf.clone()
            result = meshplan.deterministic_all_reduce(summand, async_op=async_op, **options)
            yield f"{path} async={async_op}", waited(result)
            shard = meshplan.deterministic_reduce_scatter(leaf, async_op=async_op, **options)
            whole = meshplan.deterministic_all_gather(waited(shard), sizes=sizes)
            yield f"scattered {path} async={async_op}", waited(whole)
        out = torch.empty_like(leaf)
        meshplan.deterministic_all_reduce(leaf, out=out, debug=True, **options)
        yield f"{path} out=", out
        yield f"functional {path}", waited(functional.all_reduce(leaf, **options))
    if contract.order == "exact":
        options = {"path": "integer", "contract": contract, "verify": "checksum"}
        yield "verified", waited(meshplan.deterministic_all_reduce(leaf.clone(), **options))


def lists(leaf: Tensor, contract: Contract) -> Iterator[tuple[str, Tensor]]:
    """The same by lists in buckets of several sizes: elements move to other messages."""
    with pytest.MonkeyPatch.context() as patch:
        for bucket in (1, 64, 1500, 32 << 20):
            patch.setattr(_reduction, "_BUCKET_BYTES", bucket)
            for parts in ([NUMEL], [1, 2, 300, 0, 700]):
                pieces = [piece.clone() for piece in torch.split(leaf, parts)]
                for async_op in (False, True):
                    outs = [torch.empty_like(piece) for piece in pieces]
                    waited(
                        meshplan.deterministic_all_reduce_coalesced(
                            pieces, out=outs, contract=contract, async_op=async_op
                        )
                    )
                    yield f"buckets of {bucket}, {len(parts)} parts", torch.cat(outs)


def installed(leaf: Tensor, contract: Contract) -> Iterator[tuple[str, Tensor]]:
    """The same by DTensor, whose redistribution is planned."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for path in paths_of(contract):
        for audit, debug in ((None, False), (1, True)):
            with meshplan.installed(path=path, contract=contract, audit=audit, debug=debug):
                partial = DTensor.from_local(leaf.clone(), mesh, [Partial()], run_check=False)
                yield f"installed {path} {audit}", partial.full_tensor()


def over_backend(leaf: Tensor, contract: Contract) -> Iterator[tuple[str, Tensor]]:
    """The same by torch's own function over the backend."""
    for path, audit in (*((path, None) for path in paths_of(contract)), ("auto", 1)):
        options = BackendOptions(contract=contract, path=path, audit=audit)
        group = dist.new_group(backend="meshplan", pg_options=options)
        for async_op in (False, True):
            summand = leaf.clone()
            work = dist.all_reduce(summand, group=group, async_op=async_op)
            if work is not None:
                work.wait()
            yield f"backend {path} audit={audit} async={async_op}", summand


def walk(rank: int, dtype: torch.dtype, contract: Contract) -> list[str]:
    """The options whose bits are not those of the definition."""
    leaves = draw_leaves(WORLD_SIZE, NUMEL, dtype, specials=True)
    expected = bits(reduce_leaves(leaves, "sum", (WORLD_SIZE,), contract))
    forms = (single_calls, lists, installed, over_backend)
    return [
        name
        for form in forms
        for name, result in form(leaves[rank], contract)
        if not torch.equal(bits(result), expected)
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("dtype", "contract"),
    [
        (torch.bfloat16, Contract()),
        *(full(dtype, Contract(order="exact")) for dtype in DTYPES),
        *(full(dtype, Contract()) for dtype in (torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_no_option_of_a_reduction_changes_a_bit(dtype: torch.dtype, contract: Contract) -> None:
    assert run_ranks(lambda rank: walk(rank, dtype, contract), WORLD_SIZE) == [[]] * WORLD_SIZE


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def clipped(foreach: bool | None, dtypes: tuple[torch.dtype, ...], device: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    grads = [
        torch.randn(4096, generator=draw).to(dtype).to(device) for dtype in dtypes for _ in "ab"
    ]
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    norm = clip_grad_norm_(parameters, 1.0, foreach=foreach)
    # The definition: the accumulator's dtype, and one rounding.
    factor = 1.0 / (norm.item() + 1e-6)
    wide = [torch.promote_types(grad.dtype, torch.float32) for grad in grads]
    expected = [
        (grad.to(dtype) * torch.tensor(factor, dtype=dtype, device=device)).to(grad.dtype)
        for grad, dtype in zip(grads, wide, strict=True)
    ]
    for parameter, whole in zip(parameters, expected, strict=True):
        assert torch.equal(bits(gradient_of(parameter)), bits(whole))
    return [norm, *map(gradient_of, parameters)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "dtypes", [*((dtype,) for dtype in DTYPES), (*DTYPES, torch.float64)], ids=str
)
@pytest.mark.parametrize("compiled", [True, False])
def test_clipping_rounds_once_with_every_option(
    dtypes: tuple[torch.dtype, ...],
    device: str,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiled:
        monkeypatch.setattr(_digest, "available", lambda: False)
    results = [clipped(foreach, dtypes, device) for foreach in (None, False, True)]
    for other in results[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results[0], other, strict=True))
