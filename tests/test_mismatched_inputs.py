"""Different inputs to one collective are an error on every rank, on every path."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshplan
from meshplan.collectives import functional
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import SignatureMismatchError
from meshplan.execute import Purpose, StepGroups, _choose, _deferred, _run, run_reduction
from meshplan.planner import Step
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.processes import run_ranks
from tests.steps import make_step

pytestmark = pytest.mark.processes

WORLD, ODD = 4, 2
PURPOSE = Purpose("asked", "planned", "world")
Groups = Callable[[], StepGroups]


def step(**more: Any) -> Step:
    return make_step(more.pop("sizes", (WORLD,)), **more)


SCATTER: dict[str, Any] = {"kind": "reduce_scatter", "scatter": ((0, 0),)}
BLOCKS: dict[str, Any] = {"sizes": (2, 2), "inner": 2}
# The step of all ranks, and the path of ``run_reduction``.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "exchange": ({}, "exchange"),
    "reference": ({}, "reference"),
    "native": ({}, "native"),
    "hierarchical": (BLOCKS, "exchange"),
    "hierarchical in chunks": ({**BLOCKS, "chunk": 1}, "exchange"),
    "halving between blocks": ({**BLOCKS, "between": "halving"}, "exchange"),
    "native in blocks": (BLOCKS, "native"),
    "scatter": (SCATTER, "exchange"),
    "scatter by reference": (SCATTER, "reference"),
    "scatter in chunks": (
        {**BLOCKS, **SCATTER, "chunk": 2, "scatter": ((0, 0), (1, 0))},
        "exchange",
    ),
    "scatter in blocks": ({**BLOCKS, **SCATTER, "scatter": ((0, 0), (1, 0))}, "exchange"),
}
# What the odd rank brings otherwise, and what it does otherwise.
BRANCHES: dict[str, tuple[tuple[int, ...], torch.dtype, dict[str, Any]]] = {
    "one element more": ((9, 4), torch.float32, {}),
    "no element": ((0, 4), torch.float32, {}),
    "far more elements": ((900_000,), torch.float32, {}),
    "as many elements in another shape": ((4, 8), torch.float32, {}),
    "dtype of another size": ((8, 4), torch.float64, {}),
    "dtype of the same size": ((8, 4), torch.int32, {}),
    "operation": ((8, 4), torch.float32, {"op": "max"}),
    "divisor": ((8, 4), torch.float32, {"op": "avg", "divisor": 3}),
    "norm": ((8, 4), torch.float32, {"norm": 2.0}),
    "contract": ((8, 4), torch.float32, {"contract": Contract(rounding="node")}),
    "chunks": ((8, 4), torch.float32, {"chunk": 1 << 20}),
}


def groups_of(found: Step, pairs: list[Any]) -> StepGroups:
    if found.inner == 1:
        return StepGroups(dist.group.WORLD)
    rank = dist.get_rank()
    return StepGroups(None, inner=pairs[rank // 2], outer=pairs[2 + rank % 2])


def run(tensor: Tensor, found: Step, path: str, pairs: list[Any]) -> Tensor:
    if path == "reference":
        found = replace(found, path="reference")
    result = run_reduction(tensor, found, groups_of(found, pairs), purpose=PURPOSE, path=path)
    return torch.ops._c10d_functional.wait_tensor(result)


def test_any_difference_is_an_error_on_every_rank() -> None:
    """And the next call of the same ranks on the same groups has the right bits."""

    def ranks(rank: int) -> dict[tuple[str, str], str]:
        pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
        texts = {}
        leaves = [order_sensitive(32, rank=r, world_size=WORLD).view(8, 4) for r in range(WORLD)]
        expected = reduce_leaves(leaves, "sum", (WORLD,))
        for (form, (how, path)), (name, branch) in itertools.product(
            FORMS.items(), BRANCHES.items()
        ):
            if name == "contract" and path == "native":
                continue
            tensor, found = torch.ones(8, 4), step(**how)
            if rank == ODD:
                shape, dtype, more = branch
                tensor, found = torch.ones(shape, dtype=dtype), step(**{**how, **more})
            with pytest.raises(SignatureMismatchError) as caught:
                run(tensor, found, path, pairs)
            texts[form, name] = str(caught.value)
            assert caught.value.rank == (0 if rank == ODD else ODD)
            result = run(leaves[rank], step(**how), path, pairs)
            if path != "native":
                part = result.shape[0]
                start = rank * 2 if part < 8 else 0
                assert_bitwise_equal(result, expected[start : start + part])
        return texts

    first, *others = run_ranks(ranks, WORLD)
    assert len(first) == len(FORMS) * len(BRANCHES) - 2
    assert others == [first] * (WORLD - 1)
    for name, text in first.items():
        assert "ranks 0, 1, 3: float32[8, 4] for " in text, name
        assert f"rank {ODD}: " in text, name
    for form in FORMS:
        assert "rank 2: float64[8, 4] for" in first[form, "dtype of another size"]


def test_different_counts_on_all_ranks_are_errors() -> None:
    """Counts that fall in different classes of messages: small, in place, none at all."""
    numels = (10, 3_000_000, 40_000, 0)

    def ranks(rank: int) -> list[str]:
        texts = []
        for shift in range(WORLD):
            with pytest.raises(SignatureMismatchError) as caught:
                run(torch.ones(numels[(rank + shift) % WORLD]), step(), "exchange", [])
            texts.append(str(caught.value))
            assert run(torch.ones(200_000), step(), "exchange", []).sum().item() == 800_000
        return texts

    found = run_ranks(ranks, WORLD)
    assert found == [found[0]] * WORLD
    assert "rank 0: float32[10] for all_reduce sum over 4 ranks" in found[0][0]
    assert "rank 3: float32[0] for" in found[0][0]


def test_different_paths_or_collectives_are_errors() -> None:
    ways: list[tuple[dict[str, Any], str]] = [
        ({}, "exchange"),
        ({}, "reference"),
        (SCATTER, "exchange"),
        ({}, "native"),
    ]

    def ranks(rank: int) -> list[str]:
        how, path = ways[rank]
        with pytest.raises(SignatureMismatchError) as caught:
            run(torch.ones(8), step(**how), path, [])
        texts = [str(caught.value)]
        gather = partial(meshplan.deterministic_all_gather, torch.ones(8))
        reduce = partial(run, torch.ones(8), step(), "exchange", [])
        call = gather if rank == ODD else reduce
        with pytest.raises(SignatureMismatchError) as caught:
            call()
        return [*texts, str(caught.value)]

    found = run_ranks(ranks, WORLD)
    assert found == [found[0]] * WORLD
    assert "rank 1: float32[8] for all_reduce sum over 4 ranks" in found[0][0]
    assert "path reference" in found[0][0]
    assert "rank 2: float32[8] for reduce_scatter sum" in found[0][0]
    assert "rank 2: float32[32] for all_gather over 4 ranks" in found[0][1]


def call_api(name: str, tensor: Tensor, path: str) -> Any:
    config: dict[str, Any] = {"path": path}
    pair = [tensor, torch.ones(3)]
    return {
        "all_reduce": lambda: meshplan.deterministic_all_reduce(tensor, **config),
        "coalesced": lambda: meshplan.deterministic_all_reduce_coalesced(pair, **config),
        "functional": lambda: functional.all_reduce(tensor, **config),
        "reduce_scatter": lambda: meshplan.deterministic_reduce_scatter(tensor, path=path),
        "reduce_scatters": lambda: meshplan.deterministic_reduce_scatter_coalesced(
            [tensor, torch.ones(3)], path=path
        ),
        "all_gathers": lambda: meshplan.deterministic_all_gather_coalesced([tensor, torch.ones(3)]),
        "functional.reduce_scatter": lambda: functional.reduce_scatter(tensor, path=path),
        "all_gather": lambda: meshplan.deterministic_all_gather(tensor),
        "functional.all_gather": lambda: functional.all_gather(tensor),
    }[name]()


API = [
    ("all_reduce", "native"),
    ("all_reduce", "exchange"),
    ("all_reduce", "reference"),
    ("all_reduce", "auto"),
    ("coalesced", "native"),
    ("coalesced", "exchange"),
    ("coalesced", "auto"),
    ("functional", "native"),
    ("functional", "exchange"),
    ("functional", "reference"),
    ("reduce_scatter", "exchange"),
    ("reduce_scatter", "reference"),
    ("reduce_scatter", "auto"),
    ("reduce_scatter", "native"),
    ("reduce_scatters", "native"),
    ("reduce_scatters", "exchange"),
    ("functional.reduce_scatter", "exchange"),
    ("all_gather", ""),
    ("all_gathers", ""),
    ("functional.all_gather", ""),
]


def test_public_functions_compare_without_debug() -> None:
    """Without ``debug``: each function with tensors that differ in length, dtype or shape."""

    def ranks(rank: int) -> None:
        for name, chosen in API:
            path = chosen or "exchange"
            for odd in (
                torch.ones(6, 3),
                torch.ones(3, 3, dtype=torch.int32),
                torch.ones(3, 2) if "gather" in name else torch.ones(9, 1),
                torch.ones(0, 3),
            ):
                with pytest.raises(SignatureMismatchError):
                    call_api(name, odd if rank == 1 else torch.ones(3, 3), path)
                call_api(name, torch.ones(3, 3), path)

    run_ranks(ranks, 3)


@pytest.mark.parametrize("compiled", [(0, 1, 2), (1,)])
def test_compiled_graphs_compare_too(compiled: tuple[int, ...]) -> None:
    """Also if only some ranks run a graph, because it issues the same collectives."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def ranks(rank: int) -> None:
        def reduction(how: dict[str, Any], path: str) -> Callable[[Tensor], Tensor]:
            found = step(**how | {"sizes": (3,)})
            return lambda tensor: run(tensor, found, path, [])

        for how, path in itertools.product(({}, SCATTER), ("exchange", "reference", "native")):
            call = reduction(how, path)
            if rank in compiled:
                call = make_fx(call, tracing_mode="symbolic")(torch.ones(6))
            for numel in (6, 300_000):
                with pytest.raises(SignatureMismatchError):
                    call(torch.ones(numel + 3 * (rank == 1)))
                assert call(torch.ones(numel)).unique().tolist() == [3.0]

    run_ranks(ranks, 3)


@pytest.mark.parametrize("gathered", [True, False])
def test_headers_on_devices_poison_the_result_and_are_raised_later(gathered: bool) -> None:
    """What GPUs run, on tensors of the CPU: the host does not wait, so the next call raises."""
    kinds = {torch.float32: torch.ones(8, 4), torch.int32: torch.ones(8, 4, dtype=torch.int32)}
    forms = ("exchange", "native", "scatter", "hierarchical")

    def ranks(rank: int) -> dict[str, list[str]]:
        _run.is_gloo = lambda *_: False  # type: ignore[assignment]
        _choose.is_deferred = lambda *_: True  # type: ignore[assignment]
        _deferred._MOST_GATHERED = WORLD if gathered else WORLD - 1
        pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
        texts: dict[str, list[str]] = {form: [] for form in forms}
        for form, (dtype, tensor) in itertools.product(forms, kinds.items()):
            how, path = FORMS[form]
            mine = step(**how, op="max") if rank == ODD else step(**how)
            assert run(tensor, step(**how), path, pairs).unique().tolist() == [4]
            result = run(tensor, mine, path, pairs)
            poisoned = result.isnan() if dtype is torch.float32 else result == -1
            assert poisoned.all()
            with pytest.raises(SignatureMismatchError) as caught:
                meshplan.check()
            texts[form].append(str(caught.value))
            assert (caught.value.rank == ODD) == (rank != ODD)
            meshplan.check()
            run(tensor, mine, path, pairs)
            with pytest.raises(SignatureMismatchError):
                run(tensor, step(**how), path, pairs)
            assert run(tensor, step(**how), path, pairs).unique().tolist() == [4]
            meshplan.check()
        return texts

    found = run_ranks(ranks, WORLD)
    for form in forms:
        for rank, texts in enumerate(each[form] for each in found):
            if gathered:
                assert texts == found[0][form]
                assert "ranks 0, 1, 3: float32[8, 4] for " in texts[0]
                continue
            assert ", and there may be more. " in texts[0]
            assert f"{ODD}" in texts[0].partition(", and there may")[0]
            assert f"Rank {rank} passed float32[8, 4] for " in texts[0]
